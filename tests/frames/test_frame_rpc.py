"""The call of the frame stream as bytes, without a network: what clients may do wrong, and how calls end."""

from __future__ import annotations

import queue
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.frame import Delivery, DropReason, FrameResult, StreamOpened, StreamRequest
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.frontends.frames.rpc import FrameRpc
from edge_server.protocol.frame_codec import decode_client_message, decode_server_message, encode_client_message


class Call:
    """One call: what the client sends, and what it gets. It is the context as well."""

    def __init__(self, streams, *first):
        self._requests = queue.SimpleQueue()
        self._callbacks = []
        self.is_over = False
        for message in first:
            self.send(message)
        self.answers = FrameRpc(streams).answers(iter(self._requests.get, None), self)

    def add_callback(self, callback):
        self._callbacks.append(callback)
        return not self.is_over

    def send(self, message):
        self._requests.put(message if isinstance(message, bytes) else encode_client_message(message))

    def half_close(self):
        self._requests.put(None)

    def leave(self):
        self.is_over = True
        for callback in self._callbacks:
            callback()
        self._requests.put(None)

    def read(self):
        return decode_server_message(next(self.answers))

    def rest(self):
        return [decode_server_message(data)[0] for data in self.answers]


@pytest.fixture
def call(served):
    calls = []

    def make(*first, model="sum", **fields):
        calls.append(Call(served.streams, *(first or (StreamRequest(model, **fields),))))
        return calls[-1]

    yield make
    for each in calls:
        each.leave()


def test_the_first_message_is_the_opening_with_credit_for_the_first_frames(call):
    opened, frames_allowed = call(delivery=Delivery(depth=3)).read()
    assert isinstance(opened, StreamOpened)
    assert opened.stream_id
    assert (opened.model, opened.version) == ("sum", 1)
    assert frames_allowed == 5


def test_a_client_that_says_nothing_and_leaves_is_no_error(served):
    spoken = Call(served.streams)
    spoken.half_close()
    assert spoken.rest() == []


def test_a_client_that_closes_its_side_gets_everything_and_a_good_end(call, tools):
    spoken = call(delivery=Delivery(depth=8))
    for value in range(1, 6):
        spoken.send(tools.frame(value))
    spoken.half_close()
    messages = spoken.rest()
    assert [message.header.seq for message in messages if isinstance(message, FrameResult)] == [1, 2, 3, 4, 5]


def test_a_client_that_leaves_frees_its_stream(call, tools, served):
    spoken = call(stream_id="gone")
    spoken.read()
    spoken.send(tools.frame(1))
    spoken.leave()
    spoken.rest()
    assert served.streams.reports() == []


def test_a_call_that_is_over_before_it_began_leaves_nothing_open(served):
    spoken = Call(served.streams, StreamRequest("sum"))
    spoken.is_over = True
    assert spoken.rest() == []
    assert served.streams.reports() == []


@pytest.mark.parametrize("garbage", [b"\xff", b"", b"\x12\x05hello", encode_client_message(StreamRequest("sum"))])
def test_garbage_ends_the_call_and_counts_its_frames(call, tools, served, garbage):
    spoken = call(stream_id="bad", delivery=Delivery(depth=8))
    spoken.read()
    for value in range(4):
        spoken.send(tools.frame(value))
    spoken.send(garbage)
    with pytest.raises(InvalidRequest):
        spoken.rest()
    assert served.streams.reports() == []
    again = call(stream_id="bad")
    counts = again.read()[0].counts
    assert counts.received == 4
    assert counts.received == counts.answered + counts.dropped.get(DropReason.CLOSED, 0)


def test_a_broken_request_stream_ends_quietly(served):
    class Broken:
        def __init__(self):
            self.first = [encode_client_message(StreamRequest("sum", stream_id="broken"))]

        def __iter__(self):
            return self

        def __next__(self):
            if self.first:
                return self.first.pop()
            raise RuntimeError("the transport went away")

    answers = FrameRpc(served.streams).answers(Broken(), Call(served.streams))
    assert len(list(answers)) == 1
    assert served.streams.reports() == []


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_no_bytes_harm_anybody_else(house_of_all, tools, messages):
    """Bytes may happen to be a frame; then they are answered. All else ends their own call, and no other."""
    opening = encode_client_message(StreamRequest("sum"))
    good = Call(house_of_all.streams, StreamRequest("sum"))
    good.read()
    bad = Call(house_of_all.streams, opening, *messages)
    bad.half_close()
    is_garbage = any(not reads(message) for message in messages)
    try:
        bad.rest()
        assert not is_garbage
    except InvalidRequest:
        assert is_garbage
    good.send(tools.frame(9))
    good.half_close()
    (result,) = [message for message in good.rest() if isinstance(message, FrameResult)]
    assert tools.values([result]) == [tools.sum_of(9)]
    assert house_of_all.streams.reports() == []


def reads(message):
    try:
        return not isinstance(decode_client_message(message), StreamRequest)
    except EdgeServerError:
        return False


@pytest.fixture(scope="module")
def house_of_all(tmp_path_factory, tools, make_house):
    house = make_house(tmp_path_factory.mktemp("models"))
    house.add("sum", tools.config())
    house.start()
    yield house
    house.close()


def test_threads_that_read_end_with_their_calls(call, tools):
    spoken = call()
    spoken.read()
    spoken.leave()
    spoken.rest()
    assert tools.wait_until(lambda: not any(each.name == "frames-read" for each in threading.enumerate()))
