"""Both clients against a real gRPC server that works, fails, ends and returns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from edge_server.client import (
    AioFrameStream,
    BackOff,
    Counters,
    Delivery,
    DropReason,
    Frame,
    FrameDropped,
    FrameHeader,
    RegionSlice,
    Returns,
    StreamError,
    StreamOpened,
)
from edge_server.client import asyncio_stream as aio_module
from edge_server.errors import ErrorCode, InvalidRequest
from edge_server.protocol.frame_codec import encode_server_message
from edge_server.protocol.frame_messages import Credit
from tests.kit.eventually import eventually

Connect = Callable[..., Any]
JPEG = b"\xff\xd8\xff\xe0 as good as a picture"
DEAD = "127.0.0.1:1"


def is_balanced(counters: Counters) -> bool:
    sent = counters.answered + sum(counters.dropped.values()) + counters.in_flight + counters.lost
    return (counters.offered, counters.sent) == (counters.sent + counters.dropped_here + counters.waiting, sent)


def credit(frames_allowed: int) -> bytes:
    return encode_server_message(Credit(), frames_allowed)


def test_frames_sent_one_by_one_are_each_answered_with_their_header(scripted: Connect, connect: Connect) -> None:
    with connect(scripted().address) as stream:
        results = stream.results()
        for number in range(1, 6):
            stream.send(JPEG, stamp=(number, 7), frame_id="front")
            assert next(results).header == FrameHeader(number, 7, "front", number)
        assert stream.counters() == Counters(offered=5, sent=5, answered=5, connections=1)
        assert stream.opened == StreamOpened(stream.stream_id, "m", 1, "script")


def test_the_opening_message_contains_all_options(scripted: Connect, connect: Connect) -> None:
    server = scripted()
    returns, delivery = Returns(("*",), 5, has_mask=True), Delivery(2, 300, 400, 12.5, 2.0, 1, True)
    with connect(
        server.address, "yunet", version=3, stream_id="front", returns=returns, delivery=delivery, client="robot",
        metadata=[("token", "secret")],
    ) as stream:  # fmt: skip
        stream.send(JPEG)
        next(stream.results())
    opening = server.calls[0].opening
    assert (opening.model, opening.version, opening.stream_id, opening.client) == ("yunet", 3, "front", "robot")
    assert (opening.returns, opening.delivery) == (returns, delivery)
    assert server.metadata[0]["token"] == "secret"


def test_no_more_frames_are_in_flight_than_the_server_allows(
    scripted: Connect, connect: Connect, collect: Connect
) -> None:
    allow_more, answer = threading.Event(), threading.Event()

    def script(call: Any) -> Iterator[bytes]:
        yield call.opened(2)
        held = list(itertools.islice(call.frames(), 2))
        allow_more.wait(20)
        yield credit(3)
        held.append(next(call.frames()))
        answer.wait(20)
        for frame in held:
            yield call.result(frame, 3)

    server = scripted(script)
    with connect(server.address, delivery=Delivery(depth=2)) as stream:
        taken = collect(stream)
        assert eventually(lambda: stream.opened is not None)
        for number in range(1, 3):
            stream.send(JPEG, header=FrameHeader(seq=number))
            assert eventually(lambda sent=number: stream.counters().sent == sent)
        for number in range(3, 11):
            stream.send(JPEG, header=FrameHeader(seq=number))
        counters = stream.counters()
        assert counters == Counters(offered=10, sent=2, dropped_here=6, waiting=2, in_flight=2, connections=1)
        allow_more.set()
        assert eventually(lambda: stream.counters().sent == 3)
        answer.set()
        assert eventually(lambda: len(taken.results) == 3)
        # Of the frames that waited, the newest two were kept, and the older of them went first.
        assert taken.seqs() == [1, 2, 9]
        assert is_balanced(stream.counters())
    assert taken.join()


def test_drops_by_the_server_are_counted_by_reason(scripted: Connect, connect: Connect) -> None:
    def script(call: Any) -> Iterator[bytes]:
        yield call.opened(100)
        for number, frame in enumerate(call.frames(), 1):
            if number == 3:
                yield call.result(frame, 100, dropped={DropReason.NEWER: 2})
            if number == 6:
                yield call.result(frame, 100, dropped={DropReason.NEWER: 1, DropReason.MAX_AGE: 1})

    with connect(scripted(script).address, delivery=Delivery(depth=10)) as stream:
        for _ in range(6):
            stream.send(JPEG)
        stream.finish()
        assert [result.header.seq for result in stream.results()] == [3, 6]
        assert stream.counters() == Counters(
            offered=6, sent=6, answered=2, dropped={DropReason.NEWER: 3, DropReason.MAX_AGE: 1}, connections=1
        )


def test_a_result_reports_frames_that_were_dropped_before_sending(
    scripted: Connect, connect: Connect, collect: Connect
) -> None:
    offered = threading.Event()

    def script(call: Any) -> Iterator[bytes]:
        yield call.opened(0)
        offered.wait(20)
        yield credit(2)
        frames = call.frames()
        yield call.result(next(frames), 2, dropped={DropReason.NEWER: 2, DropReason.MAX_FPS: 1})
        yield call.result(next(frames), 2)

    with connect(scripted(script).address) as stream:
        taken = collect(stream)
        assert eventually(lambda: stream.opened is not None)
        for _ in range(5):
            stream.send(JPEG)
        offered.set()
        assert eventually(lambda: len(taken.results) == 1)
        assert taken.results[0].dropped == {DropReason.NEWER: 4 + 2, DropReason.MAX_FPS: 1}
        stream.send(JPEG)
        assert eventually(lambda: len(taken.results) == 2)
        assert taken.results[1].dropped == {}
        assert (stream.counters().dropped_here, is_balanced(stream.counters())) == (4, True)
    assert taken.join()


def test_drop_notices_reach_the_callback_and_are_counted_once(scripted: Connect, connect: Connect) -> None:
    def script(call: Any) -> Iterator[bytes]:
        yield call.opened(100)
        for number, frame in enumerate(call.frames(), 1):
            if number == 1:
                yield encode_server_message(FrameDropped(frame.header, DropReason.MAX_FPS, "too soon"))
            if number == 3:  # all are sent: a client counts no drops of frames that it has yet to send
                yield call.result(frame, 100, dropped={DropReason.MAX_FPS: 2})
                # The previous result has reported it already.
                yield encode_server_message(FrameDropped(frame.header, DropReason.MAX_FPS, "late notice"))

    told: list[FrameDropped] = []
    options = {"delivery": Delivery(depth=9, notifies_drops=True), "on_dropped": told.append}
    with connect(scripted(script).address, **options) as stream:
        for _ in range(3):
            stream.send(JPEG)
        stream.finish()
        assert len(list(stream.results())) == 1
        assert [notice.detail for notice in told] == ["too soon", "late notice"]
        assert stream.counters().dropped == {DropReason.MAX_FPS: 2}
        assert is_balanced(stream.counters())


FINAL = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID_ARG,
    grpc.StatusCode.NOT_FOUND: ErrorCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.UNSUPPORTED,
    grpc.StatusCode.PERMISSION_DENIED: ErrorCode.UNKNOWN,
    grpc.StatusCode.ABORTED: ErrorCode.ABORTED,
}


@pytest.mark.sample
@pytest.mark.parametrize("status", FINAL)
def test_a_permanent_refusal_is_raised_at_once(scripted: Connect, connect: Connect, status: grpc.StatusCode) -> None:
    def script(call: Any) -> Iterator[bytes]:
        call.context.abort(status, "no model of that name")
        yield b""

    server = scripted(script)
    with connect(server.address) as stream:
        stream.send(JPEG)
        with pytest.raises(StreamError, match=rf"{server.address} ended: {status.name}: no model of that name") as told:
            list(stream.results())
        assert (told.value.status, told.value.code, told.value.heals) == (status.name, FINAL[status], False)
        assert (len(server.calls), stream.counters().waiting) == (1, 1)


def breaking(call: Any) -> Iterator[bytes]:
    """Answer one frame, take another, and die."""
    yield call.opened(5)
    frames = call.frames()
    yield call.result(next(frames), 5)
    next(frames)
    call.context.abort(grpc.StatusCode.UNAVAILABLE, "going down")


def test_a_broken_stream_continues_under_the_same_name(scripted: Connect, connect: Connect, collect: Connect) -> None:
    server = scripted(breaking)
    broken: list[StreamError] = []
    with connect(server.address, on_broken=broken.append) as stream:
        taken = collect(stream)
        stream.send(JPEG)
        assert eventually(lambda: len(taken.results) == 1)
        stream.send(JPEG)
        assert eventually(lambda: len(broken) == 1)
        stream.send(JPEG)
        assert eventually(lambda: taken.seqs() == [1, 3])
        assert (broken[0].status, broken[0].heals) == ("UNAVAILABLE", True)
        assert {call.opening.stream_id for call in server.calls} == {stream.stream_id}
        assert stream.counters() == Counters(offered=3, sent=3, answered=2, lost=1, connections=2)
    assert taken.join()


def test_the_client_reconnects_to_a_server_that_restarts_on_its_port(
    scripted: Connect, connect: Connect, collect: Connect
) -> None:
    server = scripted()
    broken: list[StreamError] = []
    with connect(server.address, on_broken=broken.append) as stream:
        taken = collect(stream)
        stream.send(JPEG)
        assert eventually(lambda: len(taken.results) == 1)
        server.stop()
        # Several attempts fail without a server.
        assert eventually(lambda: len(broken) >= 3)
        stream.send(JPEG, header=FrameHeader(seq=2))
        server.start()
        assert eventually(lambda: taken.seqs() == [1, 2])
        assert is_balanced(stream.counters())
    assert taken.join()


def test_the_client_connects_to_a_server_that_starts_later(
    scripted: Connect, connect: Connect, collect: Connect
) -> None:
    server = scripted()
    server.stop()
    broken: list[StreamError] = []
    with connect(server.address, on_broken=broken.append) as stream:
        taken = collect(stream)
        stream.send(JPEG)
        assert eventually(lambda: len(broken) > 0)
        server.start()
        assert eventually(lambda: taken.seqs() == [1])
    assert taken.join()


def test_the_client_reconnects_if_the_server_ends_the_call_early(scripted: Connect, connect: Connect) -> None:
    def leaving(call: Any) -> Iterator[bytes]:
        yield call.opened(3)

    server = scripted(leaving, leaving)
    broken: list[StreamError] = []
    with connect(server.address, on_broken=broken.append) as stream:
        results = stream.results()
        # A frame sent over a connection that ends is lost, so frames are sent until one is answered.
        stop = threading.Event()
        offering = threading.Thread(target=lambda: [stream.send(JPEG) for _ in iter(lambda: stop.wait(0.01), True)])
        offering.start()
        next(results)
        stop.set()
        offering.join()
        assert [error.heals for error in broken] == [True, True]
        assert "was ended by the server" in str(broken[0])
        assert is_balanced(stream.counters())


def test_a_frame_written_after_the_end_of_the_call_does_not_hide_its_status(
    scripted: Connect, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended = threading.Semaphore(0)

    def leaving(call: Any) -> Iterator[bytes]:
        call.context.add_callback(has_ended.release)
        yield call.opened(3)

    plain_read = aio_module._AioConnection.read_message

    async def read_late(link: Any) -> bytes | None:
        data = await plain_read(link)
        if data is not None and waits:
            # The loop learns nothing until the call has ended, and writes then.
            has_ended.acquire(timeout=20)
            waits.pop()
            with contextlib.suppress(grpc.RpcError):
                await link._call.write(b"")
        return data

    monkeypatch.setattr(aio_module._AioConnection, "read_message", read_late)
    waits = [True] * 10
    broken: list[StreamError] = []
    with connect(scripted(*[leaving] * 10).address, on_broken=broken.append) as stream:
        stop = threading.Event()
        offering = threading.Thread(target=lambda: [stream.send(JPEG) for _ in iter(lambda: stop.wait(0.01), True)])
        offering.start()
        next(stream.results())
        stop.set()
        offering.join()
    assert len(broken) == 10
    assert {str(error).partition(" was ")[2] for error in broken} == {"ended by the server"}


def test_without_reconnecting_the_first_break_is_raised(connect: Connect) -> None:
    with connect(DEAD, reconnects=False) as stream:
        stream.send(JPEG)
        with pytest.raises(StreamError, match="UNAVAILABLE") as told:
            next(stream.results())
        assert (told.value.code, told.value.heals) == (ErrorCode.UNAVAILABLE, True)


@pytest.mark.sample
@pytest.mark.parametrize("garbage", [b"\xff" * 12, b"\x12\x05\x0a\x7f", b"\x12\x04\x2a\x02\xff\xfe"])
def test_garbage_from_the_server_is_raised(scripted: Connect, connect: Connect, garbage: bytes) -> None:
    def script(call: Any) -> Iterator[bytes]:
        yield call.opened()
        yield garbage
        yield from ()

    with connect(scripted(script).address) as stream:
        stream.send(JPEG)
        with pytest.raises(StreamError, match="sent a message that is not valid in a frame stream") as told:
            list(stream.results())
        assert not told.value.heals


def test_a_failed_frame_is_returned_as_a_result(scripted: Connect, connect: Connect) -> None:
    def script(call: Any) -> Iterator[bytes]:
        yield call.opened()
        for frame in call.frames():
            yield call.result(frame, 9, error_code="INVALID_ARG", error="no JPEG at all")

    with connect(scripted(script).address) as stream:
        stream.send(JPEG)
        result = next(stream.results())
        assert (result.error_code, result.error) == ("INVALID_ARG", "no JPEG at all")
        assert stream.counters().answered == 1


@pytest.mark.parametrize("number", [1, 4])
def test_finishing_waits_for_all_offered_frames(scripted: Connect, connect: Connect, number: int) -> None:
    with connect(scripted().address, delivery=Delivery(depth=4)) as stream:
        for _ in range(number):
            stream.send(JPEG)
        stream.finish()
        assert len(list(stream.results())) == number
        with pytest.raises(ValueError, match="is finished"):
            stream.send(JPEG)
        assert list(stream.results()) == []


def test_a_finished_stream_whose_server_dies_ends_with_the_loss_counted(scripted: Connect, connect: Connect) -> None:
    with connect(scripted(breaking).address, delivery=Delivery(depth=2)) as stream:
        stream.send(JPEG)
        stream.send(JPEG)
        stream.finish()
        assert [result.header.seq for result in stream.results()] == [1]
        assert stream.counters() == Counters(offered=2, sent=2, answered=1, lost=1, connections=1)


def test_a_file_is_played_completely_if_no_frame_may_be_dropped(scripted: Connect, connect: Connect) -> None:
    """The mailbox of the scripted server drops what comes while one frame waits, as a server's of depth 1 does."""

    def script(call: Any) -> Iterator[bytes]:
        assert call.opening.delivery.notifies_drops
        yield call.opened(1000)
        for number, frame in enumerate(call.frames(), 1):
            if number % 5 == 0:  # for a reason that room does not help
                yield encode_server_message(FrameDropped(frame.header, DropReason.DEADLINE))
            else:
                yield call.result(frame, 1000, dropped={DropReason.DEADLINE: 1} if number % 5 == 1 < number else {})

    with connect(scripted(script).address, keeps_all=True) as stream:
        frames = (Frame(FrameHeader(seq=number), format="jpeg", data=JPEG) for number in range(1, 41))
        found = [result.header.seq for result in stream.results(frames)]
        assert found == [number for number in range(1, 41) if number % 5]
        counters = stream.counters()
        assert counters == Counters(offered=40, sent=40, answered=32, dropped={DropReason.DEADLINE: 8}, connections=1)


def test_an_error_of_the_frame_source_is_raised_by_the_results(scripted: Connect, connect: Connect) -> None:
    def frames() -> Iterator[bytes]:
        yield JPEG
        raise OSError("the camera was unplugged")

    with (
        connect(scripted().address, keeps_all=True) as stream,
        pytest.raises(OSError, match="the camera was unplugged"),
    ):
        list(stream.results(frames()))


def test_two_threads_cannot_read_results_at_once(scripted: Connect, connect: Connect, collect: Connect) -> None:
    with connect(scripted().address) as stream:
        stream.send(JPEG)
        results = stream.results()
        next(results)
        with pytest.raises(ValueError, match="are being read already"):
            next(stream.results())


@pytest.mark.sample
@pytest.mark.parametrize("state", ["connected and idle", "waiting to try again", "under way"])
def test_closing_ends_the_results_from_any_thread(
    scripted: Connect, connect: Connect, collect: Connect, state: str
) -> None:
    def silent(call: Any) -> Iterator[bytes]:
        yield call.opened()
        for _ in call.frames():
            pass

    server = scripted(silent)
    broken: list[StreamError] = []
    options = {"back_off": BackOff(100, 100), "on_broken": broken.append}
    with connect(DEAD if state == "waiting to try again" else server.address, **options) as stream:
        taken = collect(stream)
        if state == "waiting to try again":
            assert eventually(lambda: broken != [])
        else:
            assert eventually(lambda: stream.opened is not None)
        if state == "under way":
            stream.send(JPEG)
            assert eventually(lambda: stream.counters().in_flight == 1)
        stream.close()
        assert taken.join()
        assert taken.error is None
        assert is_balanced(stream.counters())
        with pytest.raises(ValueError, match="is closed"):
            stream.send(JPEG)


def test_a_stream_that_is_never_read_closes(scripted: Connect, connect: Connect) -> None:
    with connect(scripted().address) as stream:
        stream.send(JPEG)
    assert stream.counters() == Counters(offered=1, dropped_here=1)


def test_iteration_over_results_can_be_paused_and_resumed(scripted: Connect, connect: Connect) -> None:
    with connect(scripted().address) as stream:
        for number in (1, 2):
            stream.send(JPEG)
            for result in stream.results():
                assert result.header.seq == number
                break
        assert stream.counters().connections == 1


PICTURES = {
    "an array of OpenCV": (np.zeros((4, 6, 3), np.uint8), {}, ("bgr8", 4, 6, 18, "", 72)),
    "an array of colours in order": (np.zeros((4, 6, 3), np.uint8), {"encoding": "rgb8"}, ("rgb8", 4, 6, 18, "", 72)),
    "a grey array": (np.zeros((4, 6), np.uint8), {}, ("mono8", 4, 6, 6, "", 24)),
    "a depth array": (np.zeros((4, 6), np.uint16), {"encoding": "16UC1"}, ("16UC1", 4, 6, 12, "", 48)),
    "raw bytes": (bytes(72), {"encoding": "rgb8", "height": 4, "width": 6}, ("rgb8", 4, 6, 0, "", 72)),
    "raw bytes with padding": (
        bytearray(80), {"encoding": "rgb8", "height": 4, "width": 6, "step": 20}, ("rgb8", 4, 6, 20, "", 80),
    ),
    "a JPEG file": (JPEG, {}, ("", 0, 0, 0, "jpeg", len(JPEG))),
    "a named format": (b"anything", {"format": "png"}, ("", 0, 0, 0, "png", 8)),
    "shared memory": (
        RegionSlice("ring", 4096, 72), {"encoding": "rgb8", "height": 4, "width": 6}, ("rgb8", 4, 6, 0, "", 0),
    ),
    "a frame": (Frame(FrameHeader(), 2, 2, "mono8", 4, data=bytes(8)), {}, ("mono8", 2, 2, 4, "", 8)),
}  # fmt: skip


@pytest.mark.sample
@pytest.mark.parametrize("what", PICTURES)
def test_images_of_every_encoding_arrive(scripted: Connect, connect: Connect, what: str) -> None:
    arrived: list[Frame] = []

    def script(call: Any) -> Iterator[bytes]:
        yield call.opened()
        for frame in call.frames():
            arrived.append(frame)
            yield call.result(frame)

    picture, options, expected = PICTURES[what]
    with connect(scripted(script).address) as stream:
        stream.send(picture, **options)
        stream.finish()
        assert len(list(stream.results())) == 1
    (frame,) = arrived
    assert (frame.encoding, frame.height, frame.width, frame.step, frame.format, len(frame.data)) == expected
    assert frame.region == (picture if isinstance(picture, RegionSlice) else None)


def test_a_number_that_does_not_fit_is_reported_to_the_sender(scripted: Connect, connect: Connect) -> None:
    with connect(scripted().address) as stream:
        with pytest.raises(InvalidRequest, match="'nanosec' of Header must be"):
            stream.send(JPEG, stamp=(1, -1))
        with pytest.raises(InvalidRequest, match="'data' of Frame must be bytes"):
            stream.send(replace(Frame(FrameHeader(), format="jpeg"), data="text"))  # type: ignore[arg-type]
        assert stream.counters().offered == 0


def test_the_age_of_a_frame_grows_while_it_waits_for_credit(
    scripted: Connect, connect: Connect, collect: Connect
) -> None:
    ages: list[int] = []
    go = threading.Event()

    def script(call: Any) -> Iterator[bytes]:
        yield call.opened(0)
        go.wait(20)
        yield credit(1)
        ages.append(next(call.frames()).age_us)

    with connect(scripted(script).address) as stream:
        taken = collect(stream)
        assert eventually(lambda: stream.opened is not None)
        stream.send(JPEG, age_us=1_000_000)
        threading.Event().wait(0.02)
        go.set()
        assert eventually(lambda: len(ages) == 1)
        assert ages[0] >= 1_020_000
    assert taken.join()


def test_frames_from_a_list_do_not_block_other_tasks_of_the_event_loop() -> None:
    async def run() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        def frames() -> Iterator[bytes]:
            before = turns
            for number in range(1000):
                assert number < 100 or turns > before, "no other task had a turn"
                yield JPEG

        beside = asyncio.create_task(other())
        async with AioFrameStream(DEAD, "m", reconnects=False) as stream:
            with pytest.raises(StreamError):
                async for _ in stream.results(frames()):
                    pass
            assert stream._sender is not None
            await stream._sender
        beside.cancel()

    asyncio.run(run())
