"""The call of the frame stream as bytes, without a network: errors of clients, and the end of calls."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import EdgeServerError
from edge_server.frontends.error_status import GrpcStatus
from edge_server.plugins.cameras.endpoints.stream_call import FrameCall
from edge_server.protocol.frame_codec import decode_client_message, decode_server_message, encode_client_message
from edge_server.protocol.frame_messages import Delivery, DropReason, FrameResult, StreamOpened, StreamRequest


class Call:
    """One call as a transport makes it: the client's messages, and the responses."""

    hold_us = math.inf
    metadata = ()
    deadline_ns = 0
    peer = "test"

    def __init__(self, streams, *first):
        self._requests = deque()
        self._events = queue.SimpleQueue()
        self._answers = deque()
        self._is_wanted = True
        self._ending = None
        self._has_left = False
        self.side = FrameCall(lambda: streams, self)
        for message in first:
            self.send_request(message)

    # As the front end calls it.

    def wake(self):
        self._events.put(self.side.on_woken)

    def receive(self):
        self._is_wanted = True
        self._events.put(self._deliver)

    def send(self, message):
        self._answers.append(b"".join(message))
        return True

    def end(self, done):
        if self._ending is None:
            self._ending = done
            self._events.put(lambda: None)

    # As the client and the test do.

    def _deliver(self):
        if self._is_wanted and self._requests and self._ending is None:
            self._is_wanted = False
            request = self._requests.popleft()
            if request is None:
                self.side.on_last_message()
            else:
                self.side.on_message(request)

    def send_request(self, message):
        self._requests.append(message if isinstance(message, bytes) else encode_client_message(message))
        self._events.put(self._deliver)

    def half_close(self):
        self._requests.append(None)
        self._events.put(self._deliver)

    def leave(self):
        self._events.put(self._leave)

    def _leave(self):
        self._has_left = True
        self.side.on_client_left()

    def next_answer(self):
        """Return the next message; None at the end. Raises Ended when it is a bad one."""
        while True:
            ending = self._ending  # read first: a worker's thread may answer and end the call between the two
            if self._answers:
                return self._answers.popleft()
            if ending is not None:
                if ending.code:
                    raise Ended(ending)
                return None
            if self._has_left:
                return None
            self._events.get()()

    def read(self):
        return decode_server_message(self.next_answer())

    def rest(self):
        return [decode_server_message(data)[0] for data in iter(self.next_answer, None)]


class Ended(Exception):
    """The call ended with this status."""


@pytest.fixture
def call(served):
    calls = []

    def make(*first, model="sum", **fields):
        calls.append(Call(served.streams, *(first or (StreamRequest(model, **fields),))))
        return calls[-1]

    yield make
    for each in calls:
        each.leave()
        while not each._has_left:
            each._events.get()()


def test_the_first_message_is_the_opening_with_the_first_credit(call):
    opened, frames_allowed = call(delivery=Delivery(depth=3)).read()
    assert isinstance(opened, StreamOpened)
    assert opened.stream_id
    assert (opened.model, opened.version) == ("sum", 1)
    assert frames_allowed == 5


def test_a_client_that_disconnects_silently_is_no_error(served):
    spoken = Call(served.streams)
    spoken.half_close()
    assert spoken.rest() == []


def test_a_half_closed_client_gets_all_results_and_status_ok(call, tools):
    spoken = call(delivery=Delivery(depth=8))
    for value in range(1, 6):
        spoken.send_request(tools.frame(value))
    spoken.half_close()
    messages = spoken.rest()
    assert [message.header.seq for message in messages if isinstance(message, FrameResult)] == [1, 2, 3, 4, 5]


def test_a_client_that_disconnects_frees_its_stream(call, tools, served):
    spoken = call(stream_id="gone")
    spoken.read()
    spoken.send_request(tools.frame(1))
    spoken.leave()
    spoken.rest()
    assert served.streams.reports() == []


def test_a_call_cancelled_before_its_start_leaves_no_stream_open(served):
    spoken = Call(served.streams)
    spoken.leave()
    spoken.rest()
    spoken.side.on_message(encode_client_message(StreamRequest("sum")))
    assert spoken.rest() == []
    assert served.streams.reports() == []


@pytest.mark.parametrize("garbage", [b"\xff", b"", b"\x12\x05hello", encode_client_message(StreamRequest("sum"))])
def test_invalid_data_ends_the_call_and_its_frames_are_counted(call, tools, served, garbage):
    spoken = call(stream_id="bad", delivery=Delivery(depth=8))
    spoken.read()
    for value in range(4):
        spoken.send_request(tools.frame(value))
    spoken.send_request(garbage)
    with pytest.raises(Ended) as ended:
        spoken.rest()
    assert ended.value.args[0].code is GrpcStatus.INVALID_ARGUMENT
    assert served.streams.reports() == []
    again = call(stream_id="bad")
    counts = again.read()[0].counts
    assert counts.received == 4
    assert counts.received == counts.answered + counts.dropped.get(DropReason.CLOSED, 0)


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_invalid_bytes_do_not_disturb_other_clients(shared_stream_server, tools, messages):
    """Bytes may happen to be a frame; then they are answered. All else ends their own call, and no other."""
    opening = encode_client_message(StreamRequest("sum"))
    good = Call(shared_stream_server.streams, StreamRequest("sum"))
    good.read()
    bad = Call(shared_stream_server.streams, opening, *messages)
    bad.half_close()
    is_garbage = any(not reads(message) for message in messages)
    if is_garbage:
        with pytest.raises(Ended) as ended:
            bad.rest()
        assert ended.value.args[0].code is GrpcStatus.INVALID_ARGUMENT
    else:
        bad.rest()
    good.send_request(tools.frame(9))
    good.half_close()
    (result,) = [message for message in good.rest() if isinstance(message, FrameResult)]
    assert tools.values([result]) == [tools.sum_of(9)]
    assert shared_stream_server.streams.reports() == []


def reads(message):
    try:
        return not isinstance(decode_client_message(message), StreamRequest)
    except EdgeServerError:
        return False


@pytest.fixture(scope="module")
def shared_stream_server(tmp_path_factory, tools, make_stream_server):
    stream_server = make_stream_server(tmp_path_factory.mktemp("models"))
    stream_server.serve("sum", tools.config())
    yield stream_server
    stream_server.close()


def test_a_stream_needs_no_thread_of_its_own(call):
    before = [each.name for each in threading.enumerate()]
    for number in range(5):
        call(stream_id=str(number)).read()
    # One stream alone has the same workers for its model.
    assert len(threading.enumerate()) - len(before) <= 2
