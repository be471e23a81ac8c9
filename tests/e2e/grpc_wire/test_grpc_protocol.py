"""gRPC's interoperability cases on this server's RPCs, equal for every transport.

Cases: github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md; wire: doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import gzip
import queue
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from hyperframe.frame import DataFrame, HeadersFrame, RstStreamFrame

from edge_server.protocol import messages
from edge_server.protocol.frame_codec import STREAM_PATH, decode_server_message, encode_client_message
from edge_server.protocol.frame_messages import Delivery, Frame, FrameHeader, FrameResult, StreamOpened, StreamRequest
from tests.kit.eventually import eventually
from tests.kit.together import together

SERVICE = "/inference.GRPCInferenceService/"
INFER = SERVICE + "ModelInfer"
STREAM_INFER = SERVICE + "ModelStreamInfer"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/Check"
Code = grpc.StatusCode


def refused(call: Callable[..., Any], *arguments: Any, **more: Any) -> grpc.RpcError:
    """Make a call that must fail and return its error."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=30, **more)
    return caught.value


def stream_response(data: bytes) -> Any:
    message = messages.ModelStreamInferResponse.FromString(data)
    assert not message.error_message
    return message.infer_response


def out(data: bytes) -> int:
    """Return the number in a response of `repeat`."""
    return int.from_bytes(stream_response(data).raw_output_contents[0], "little")


class RequestStream:
    """The requests of a stream, put in one by one. `end` half-closes it."""

    def __init__(self, *first: bytes) -> None:
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        for item in first:
            self.put(item)

    def put(self, item: bytes) -> None:
        self._queue.put(item)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue.get, None)


# -- messages


@pytest.mark.parametrize("path", [SERVICE + "ServerLive", HEALTH])
def test_an_empty_message_is_a_message(target: Any, path: str) -> None:
    assert target.channel().unary_unary(path)(b"", timeout=30) == b"\x08\x01"


def test_a_message_of_many_mebibytes_is_echoed(target: Any) -> None:
    request = target.numbers(count=18 << 20)
    response = messages.ModelInferResponse.FromString(target.channel().unary_unary(INFER)(request, timeout=60))
    assert response.raw_output_contents[0] == messages.ModelInferRequest.FromString(request).raw_input_contents[0]


def without_padding(target: Any) -> None:
    if target.transport == "grpcio":
        pytest.skip("gRPC's core refuses DATA frames with padding")


def test_padding_counts_against_the_window_and_is_credited_back(target: Any) -> None:
    """More padding than the first window holds: a server that forgets to count it never opens the window again."""
    without_padding(target)
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream))
    size = wire.server_settings.get(4, 65_535)
    body = target.framed(target.numbers())
    for _ in range(3 * size // 256 // 64):
        wire.send(b"".join(DataFrame(stream, pad_length=255, flags=["PADDED"]).serialize() for _ in range(64)))
        wire._window -= 256 * 64
        wire._windows[stream] = wire._windows.get(stream, wire._initial_window()) - 256 * 64
        while wire._window < 256 * 64 or wire._windows[stream] < 256 * 64:
            assert wire.read() is not None
    wire.send_data(stream, body)
    target.assert_right(wire.finish(stream))


def test_concurrent_calls_on_one_connection_each_get_their_response(target: Any) -> None:
    infer = target.channel().unary_unary(INFER)
    calls = [infer.future(target.numbers(id=str(number), count=1 + number), timeout=60) for number in range(200)]
    for number, call in enumerate(calls):
        response = messages.ModelInferResponse.FromString(call.result())
        assert (response.id, len(response.raw_output_contents[0])) == (str(number), 1 + number)


# -- streams


def test_each_request_of_a_stream_is_answered_before_the_next(target: Any) -> None:
    questions = RequestStream()
    answers = target.channel().stream_stream(STREAM_INFER)(iter(questions), timeout=30)
    for count in (27_182, 8, 1_828, 45_904):
        questions.put(target.numbers(count=count, id=str(count)))
        response = stream_response(next(answers))
        assert (response.id, len(response.raw_output_contents[0])) == (str(count), count)
    questions.end()
    assert list(answers) == []
    assert answers.code() is Code.OK


def test_all_requests_before_the_end_of_the_stream_are_answered(target: Any) -> None:
    requests = [target.numbers(count=count, id=str(index)) for index, count in enumerate([27_182, 8, 1_828, 45_904])]
    answers = target.channel().stream_stream(STREAM_INFER)(iter(requests * 25), timeout=60)
    assert [stream_response(data).id for data in answers] == ["0", "1", "2", "3"] * 25
    assert answers.code() is Code.OK


def test_one_request_gets_many_responses(target: Any) -> None:
    answers = target.channel().stream_stream(STREAM_INFER)(iter([target.repeat(range(300))]), timeout=30)
    assert [out(data) for data in answers] == list(range(300))


@pytest.mark.parametrize("path", [STREAM_INFER, REFLECTION, STREAM_PATH])
def test_an_empty_stream_ends_with_status_ok(target: Any, path: str) -> None:
    answers = target.channel().stream_stream(path)(iter(()), timeout=30)
    assert list(answers) == []
    assert answers.code() is Code.OK


def test_reflection_returns_the_schema(target: Any) -> None:
    request_class = messages.message_class("grpc.reflection.v1.ServerReflectionRequest")
    response_class = messages.message_class("grpc.reflection.v1.ServerReflectionResponse")
    questions = [request_class(list_services=""), request_class(file_containing_symbol=messages.GRPC_SERVICE)]
    stream = target.channel().stream_stream(REFLECTION)
    answers = stream(iter([question.SerializeToString() for question in questions]), timeout=30)
    listed, file = (response_class.FromString(data) for data in answers)
    assert {messages.GRPC_SERVICE, messages.HEALTH_SERVICE} <= {
        service.name for service in listed.list_services_response.service
    }
    assert file.file_descriptor_response.file_descriptor_proto


def test_a_frame_stream_answers_frame_by_frame(target: Any) -> None:
    questions = RequestStream(encode_client_message(StreamRequest("camera", delivery=Delivery(depth=4))))
    answers = target.channel().stream_stream(STREAM_PATH)(iter(questions), timeout=30)
    opened, frames_allowed = decode_server_message(next(answers))
    assert isinstance(opened, StreamOpened)
    assert frames_allowed > 0
    for number in (1, 2, 3):
        picture = Frame(FrameHeader(0, 0, "front", number), 2, 2, "mono8", 2, data=bytes(4))
        questions.put(encode_client_message(picture))
        found = next(message for data in answers if isinstance(message := decode_server_message(data)[0], FrameResult))
        assert found.header.seq == number
    questions.end()
    assert [decode_server_message(data)[0] for data in answers] == []
    assert answers.code() is Code.OK


# -- calls that end early


def failures(target: Any, model: str) -> float:
    """Return how many requests of a model did not succeed, whatever the reason."""
    counters = target.server.read_counters(model)
    return sum(value for name, value in counters.items() if name.startswith("nv_inference_request_failure"))


def pending(target: Any, model: str) -> float:
    return float(target.server.read_counters(model)["nv_inference_pending_request_count"])


@pytest.fixture
def check_cancelled(target: Any) -> Callable[[Callable[[], Callable[[], Any]]], None]:
    """`check_cancelled(call)`: while `slow`, which runs one request at a time, runs one and another waits, make a call
    to it, cancel it by the function that `call` returned, and assert that it is never run."""

    def check(call: Callable[[], Callable[[], Any]]) -> None:
        server = target.server
        runs, failed = server.statistics("slow")["execution_count"], failures(target, "slow")
        wire = target.connect()
        others = [wire.new_stream(), wire.new_stream()]
        for stream in others:
            wire.send(wire.head(stream))
            wire.send_data(stream, target.framed(target.numbers("slow")))
        assert eventually(lambda: pending(target, "slow") == 1)
        give_up = call()
        give_up()
        assert eventually(lambda: failures(target, "slow") == failed + 1), server.read_counters("slow")
        assert [wire.finish(stream).status for stream in others] == [Code.OK, Code.OK]
        assert server.statistics("slow")["execution_count"] == runs + 2

    return check


def test_a_call_cancelled_while_it_waits_is_removed_from_the_queue(target: Any, check_cancelled: Any) -> None:
    def call() -> Callable[[], None]:
        waiting = target.channel().unary_unary(INFER).future(target.numbers("slow"), timeout=60)
        assert eventually(lambda: pending(target, "slow") == 2)
        return waiting.cancel

    check_cancelled(call)


def test_a_reset_call_is_cancelled_and_its_connection_continues(target: Any, check_cancelled: Any) -> None:
    wire = target.connect()

    def call() -> Callable[[], None]:
        stream = wire.new_stream()
        wire.send(wire.head(stream))
        wire.send_data(stream, target.framed(target.numbers("slow")))
        assert eventually(lambda: pending(target, "slow") == 2)
        return lambda: wire.send(RstStreamFrame(stream, 8))

    check_cancelled(call)
    target.assert_right(wire.call("ModelInfer", target.numbers()))


def test_a_call_whose_connection_breaks_is_cancelled(target: Any, check_cancelled: Any) -> None:
    def call() -> Callable[[], None]:
        wire = target.connect()
        stream = wire.new_stream()
        wire.send(wire.head(stream))
        wire.send_data(stream, target.framed(target.numbers("slow")))
        assert eventually(lambda: pending(target, "slow") == 2)
        return wire.close

    check_cancelled(call)


def test_a_deadline_that_passes_while_a_call_waits_ends_it(target: Any, check_cancelled: Any) -> None:
    errors: list[grpc.RpcError] = []

    def call() -> Callable[[], None]:
        waiting = target.channel().unary_unary(INFER).future(target.numbers("slow"), timeout=0.1)
        return lambda: errors.append(waiting.exception())

    check_cancelled(call)
    assert errors[0].code() is Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize("timeout", ["100m", "100000u", "99999999n"])
def test_the_server_enforces_the_deadline_itself(target: Any, check_cancelled: Any, timeout: str) -> None:
    """A client that sends its deadline and then does nothing."""
    wire = target.connect()

    def call() -> Callable[[], None]:
        stream = wire.new_stream()
        wire.send(wire.head(stream, INFER, ("grpc-timeout", timeout)))
        wire.send_data(stream, target.framed(target.numbers("slow")))

        def wait() -> None:
            answer = wire.finish(stream)
            assert answer.status is Code.DEADLINE_EXCEEDED or answer.reset == 8, answer

        return wait

    check_cancelled(call)
    target.assert_right(wire.call("ModelInfer", target.numbers()))


@pytest.mark.parametrize("timeout", ["1H", "60M", "99999999S", "99999999H", "30000m"])
def test_a_distant_deadline_has_no_effect(target: Any, timeout: str) -> None:
    answer = target.connect().call("ModelInfer", target.numbers(), metadata=[("grpc-timeout", timeout)])
    target.assert_right(answer)


@pytest.mark.parametrize("timeout", ["", "S", "10", "-1S", "1.5S", "10s", "123456789S", "1S1S", "\u0661S"])
def test_an_invalid_deadline_is_ignored_or_refused(target: Any, timeout: str) -> None:
    wire = target.connect()
    answer = wire.call("ModelInfer", target.numbers(), metadata=[("grpc-timeout", timeout.encode())])
    assert answer.status in (Code.OK, Code.INTERNAL, Code.INVALID_ARGUMENT, Code.DEADLINE_EXCEEDED) or answer.reset


def test_a_deadline_that_passed_before_the_call_arrives(target: Any) -> None:
    answer = target.connect().call("ModelInfer", target.numbers("slow"), metadata=[("grpc-timeout", "0n")])
    assert answer.status is Code.DEADLINE_EXCEEDED or answer.reset == 8, answer


def test_a_stream_cancelled_after_its_start(target: Any) -> None:
    questions = RequestStream()
    answers = target.channel().stream_stream(STREAM_INFER)(iter(questions), timeout=30)
    answers.cancel()
    assert answers.code() is Code.CANCELLED
    questions.end()


def test_a_stream_cancelled_after_its_first_response(target: Any) -> None:
    failed = failures(target, "repeat")
    questions = RequestStream(target.repeat(range(1000), delay_ms=20))
    answers = target.channel().stream_stream(STREAM_INFER)(iter(questions), timeout=60)
    assert out(next(answers)) == 0
    answers.cancel()
    assert answers.code() is Code.CANCELLED
    questions.end()
    # The rest of a thousand responses, 20 seconds of them, is not made.
    assert eventually(lambda: failures(target, "repeat") == failed + 1), target.server.read_counters("repeat")


def test_a_deadline_ends_a_stream_with_its_running_requests(target: Any) -> None:
    failed = failures(target, "repeat")
    questions = RequestStream(target.repeat(range(1000), delay_ms=20))
    answers = target.channel().stream_stream(STREAM_INFER)(iter(questions), timeout=0.3)
    assert out(next(answers)) == 0
    with pytest.raises(grpc.RpcError) as caught:
        list(answers)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    questions.end()
    assert eventually(lambda: failures(target, "repeat") == failed + 1), target.server.read_counters("repeat")


def test_a_frame_stream_whose_connection_breaks_is_closed(target: Any) -> None:
    wire = target.connect()
    stream = wire.new_stream()
    opening = encode_client_message(StreamRequest("camera", stream_id="breaks"))
    wire.send(wire.head(stream, STREAM_PATH), DataFrame(stream, target.framed(opening)))
    assert isinstance(decode_server_message(wire.first_message(stream))[0], StreamOpened)
    assert eventually(lambda: open_frame_streams(target) == 1)
    wire.close()
    assert eventually(lambda: open_frame_streams(target) == 0)


def open_frame_streams(target: Any) -> int:
    status, found = target.server.ask("/edge/v1/streams")
    assert status == 200, found
    return len(found["streams"])


# -- statuses


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \U0001f608\t\n",
        "50% of 100%25",
        "é" * 50,
    ],
)
def test_status_messages_arrive_unchanged(target: Any, name: str) -> None:
    words = f"'{name}' is not found"
    error = refused(target.channel().unary_unary(INFER), target.numbers(name))
    assert error.code() is Code.NOT_FOUND
    assert words in error.details()
    answer = target.connect().call("ModelInfer", target.numbers(name))
    assert (answer.status, answer.details) == (Code.NOT_FOUND, error.details())
    # Percent-encoded as the protocol has it: printable ASCII on the wire, and no bare percent sign.
    text = answer.value(b"grpc-message")
    assert all(0x20 <= octet <= 0x7E for octet in text)
    assert text.count(b"%") == sum(octet in b"%" or not 0x20 <= octet <= 0x7E for octet in error.details().encode())


def test_a_long_status_message_is_truncated(target: Any) -> None:
    """Peers refuse trailers of more than 8 KiB; every letter of this name takes nine bytes there."""
    error = refused(target.channel().unary_unary(INFER), target.numbers("\u263a" * 50_000))
    assert error.code() is Code.NOT_FOUND
    assert "\u263a" * 500 in error.details()


def test_an_error_without_a_message_is_trailers_only(target: Any) -> None:
    wire = target.connect()
    answer = wire.call("ModelInfer", target.numbers("nobody"))
    assert answer.value(b":status") == b"200"
    assert answer.value(b"content-type").startswith(b"application/grpc")
    assert answer.status is Code.NOT_FOUND
    assert answer.data == b""


def test_a_response_is_headers_message_and_trailers(target: Any) -> None:
    wire = target.connect()
    answer = wire.call("ModelInfer", target.numbers())
    names = [name for name, _ in answer.headers]
    assert answer.headers[0] == (b":status", b"200")
    assert dict(answer.headers)[b"content-type"] in (b"application/grpc", b"application/grpc+proto")
    assert b"grpc-status" not in names
    assert dict(answer.trailers)[b"grpc-status"] == b"0"
    assert all(name == name.lower() for name, _ in [*answer.headers, *answer.trailers])
    kinds = [frame for frame in wire.frames if isinstance(frame, HeadersFrame)]
    assert ["END_STREAM" in frame.flags for frame in kinds] == [False, True]


@pytest.mark.parametrize(
    "path",
    [
        SERVICE + "Nonsense", "/inference.Nonsense/ModelInfer", "/nonsense", "/", "//", SERVICE, INFER + "/",
        "/inference.grpcinferenceservice/modelinfer", INFER + "?x=1", "/%2e%2e/x", "/" + "x" * 2000,
    ],
)  # fmt: skip
def test_unknown_methods_are_unimplemented(target: Any, path: str) -> None:
    wire = target.connect()
    assert wire.call(path, target.numbers()).status is Code.UNIMPLEMENTED
    assert wire.call(path).status is Code.UNIMPLEMENTED
    target.assert_right(wire.call("ModelInfer", target.numbers()))


def test_an_unimplemented_stream_is_refused_before_its_messages(target: Any) -> None:
    questions = RequestStream()
    call = target.channel().stream_stream(SERVICE + "Nonsense")(iter(questions), timeout=30)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is Code.UNIMPLEMENTED
    questions.end()


def test_an_undecodable_message_is_an_error_of_the_client(target: Any) -> None:
    wire = target.connect()
    for method in ("ModelInfer", "ModelConfig", "RepositoryIndex"):
        answer = wire.call(method, b"\xff\xff\xff")
        assert answer.status in (Code.INVALID_ARGUMENT, Code.INTERNAL), answer
    target.assert_right(wire.call("ModelInfer", target.numbers()))


# -- metadata


def forwarded(target: Any, metadata: list[tuple[str, str | bytes]]) -> str:
    """Return the parameters that a model was given for a call with this metadata, as JSON."""
    infer = target.channel().unary_unary(INFER)
    answer = infer(target.numbers("parameters", parameters={}), metadata=metadata, timeout=30)
    (raw,) = messages.ModelInferResponse.FromString(answer).raw_output_contents
    return raw[4:].decode()


def test_matching_metadata_becomes_request_parameters(target: Any) -> None:
    found = forwarded(target, [("x-camera", "front left"), ("y-camera", "rear"), ("x-long", "a" * 4000)])
    assert '"x-camera": "front left"' in found
    assert '"x-long": "' + "a" * 4000 + '"' in found
    assert "y-camera" not in found


def test_binary_metadata_is_accepted_but_not_forwarded(target: Any) -> None:
    found = forwarded(target, [("x-raw-bin", bytes(range(256))), ("x-camera", "front"), ("x-empty-bin", b"")])
    assert '"x-camera": "front"' in found
    assert "-bin" not in found


def test_the_last_value_of_repeated_metadata_is_forwarded(target: Any) -> None:
    found = forwarded(target, [("x-camera", "front"), ("x-camera", "rear"), ("x-raw-bin", b"1"), ("x-raw-bin", b"2")])
    assert '"x-camera": "rear"' in found


def test_equal_metadata_is_read_alike_in_every_call_of_a_connection(target: Any) -> None:
    """A client's header table makes the second block of the same headers much shorter than the first."""
    infer = target.channel().unary_unary(INFER)
    for number in range(12):
        metadata = [("x-number", str(number // 3)), ("x-steady", "yes")]
        (raw,) = messages.ModelInferResponse.FromString(
            infer(target.numbers("parameters"), metadata=metadata, timeout=30)
        ).raw_output_contents
        assert f'"x-number": "{number // 3}"'.encode() in raw
        assert b'"x-steady": "yes"' in raw


def test_metadata_larger_than_the_limit_is_refused_and_the_next_call_is_answered(target: Any) -> None:
    channel = target.channel(("grpc.max_metadata_size", 1 << 20))
    error = refused(channel.unary_unary(INFER), target.numbers(), metadata=[("x-huge", "a" * 200_000)])
    assert error.code() in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.INTERNAL), error
    again = channel.unary_unary(INFER)(target.numbers(), timeout=30, wait_for_ready=True)
    assert messages.ModelInferResponse.FromString(again).model_name == "same"


def test_metadata_of_four_kilobytes_in_hundred_fields_is_accepted(target: Any) -> None:
    metadata = [(f"y-field-{number}", "v" * 20) for number in range(100)]
    target.assert_right(target.connect().call("ModelInfer", target.numbers(), metadata=metadata))


# -- compression


def deflated(data: bytes) -> bytes:
    return zlib.compress(data)


ENCODINGS = {"gzip": gzip.compress, "deflate": deflated}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_compressed_messages_are_accepted_in_unary_calls_and_streams(target: Any, encoding: str) -> None:
    compression = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}[encoding]
    channel = target.channel()
    request = target.numbers(count=100_000, id="z")
    answer = channel.unary_unary(INFER)(request, compression=compression, timeout=30)
    assert messages.ModelInferResponse.FromString(answer).id == "z"
    answers = channel.stream_stream(STREAM_INFER)(iter([request] * 3), compression=compression, timeout=30)
    assert [stream_response(data).id for data in answers] == ["z"] * 3


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_compressed_message_beside_a_plain_one_in_a_stream(target: Any, encoding: str) -> None:
    request = target.numbers()
    body = target.framed(ENCODINGS[encoding](request), 1) + target.framed(request)
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream, STREAM_INFER, ("grpc-encoding", encoding), ("grpc-accept-encoding", "identity")))
    wire.send_data(stream, body)
    answer = wire.finish(stream)
    assert (answer.status, len(answer.messages)) == (Code.OK, 2)
    assert all(stream_response(data).model_name == "same" for data in answer.messages)


def test_an_unknown_encoding_is_unimplemented_and_the_known_ones_are_named(target: Any) -> None:
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream, INFER, ("grpc-encoding", "snappy")))
    wire.send_data(stream, target.framed(b"whatever", 1))
    answer = wire.finish(stream)
    if target.transport == "grpcio":
        assert answer.status is Code.INTERNAL  # its core refuses the header before it knows what for
    else:
        assert answer.status is Code.UNIMPLEMENTED
        assert b"gzip" in answer.value(b"grpc-accept-encoding")


@pytest.mark.parametrize("metadata", [[], [("grpc-encoding", "identity")]])
def test_a_compressed_message_without_an_encoding_is_an_error(target: Any, metadata: list[tuple[str, str]]) -> None:
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream, INFER, *metadata))
    wire.send_data(stream, target.framed(gzip.compress(target.numbers()), 1))
    assert wire.finish(stream).status in (Code.INTERNAL, Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT)
    target.assert_right(wire.call("ModelInfer", target.numbers()))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("damage", ["cut", "garbage", "more"])
def test_a_damaged_compressed_message_is_an_error(target: Any, encoding: str, damage: str) -> None:
    whole = ENCODINGS[encoding](target.numbers(count=1000))
    data = {"cut": whole[: len(whole) // 2], "garbage": b"\xff" * 40, "more": whole + b"\xff" * 40}[damage]
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream, INFER, ("grpc-encoding", encoding)))
    wire.send_data(stream, target.framed(data, 1))
    # Some decompressors leave alone what follows the end.
    allowed = {Code.INTERNAL, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED} | (
        {Code.OK} if damage == "more" else set()
    )
    assert wire.finish(stream).status in allowed
    target.assert_right(wire.call("ModelInfer", target.numbers()))


@pytest.mark.parametrize("flag", [2, 128, 255])
def test_an_unknown_message_flag_is_an_error(target: Any, flag: int) -> None:
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream))
    wire.send_data(stream, target.framed(target.numbers(), flag))
    answer = wire.finish(stream)
    assert answer.status is not Code.OK
    target.assert_serves()


# -- requests that are no gRPC calls


@pytest.mark.parametrize("length", [2**31, 2**32 - 1])
def test_a_message_whose_announced_length_exceeds_the_limit_is_refused_at_once(target: Any, length: int) -> None:
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream))
    # Not ended: the length alone is enough to refuse.
    wire.send_data(stream, b"\0" + length.to_bytes(4, "big") + b"x", ends=False)
    assert wire.finish(stream).status is Code.RESOURCE_EXHAUSTED
    target.assert_right(wire.call("ModelInfer", target.numbers()))


@pytest.mark.parametrize("content_type", ["text/html", "application/json", "", None])
def test_another_content_type_is_unsupported(target: Any, content_type: str | None) -> None:
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream, content_type=content_type))
    wire.send_data(stream, target.framed(target.numbers()))
    answer = wire.finish(stream)
    if target.transport == "grpcio":
        assert answer.is_ended  # its core does not look at the type
    else:
        assert answer.value(b":status") == b"415", answer
    target.assert_right(wire.call("ModelInfer", target.numbers()))


@pytest.mark.parametrize(
    "content_type", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"]
)
def test_the_content_types_of_grpc_are_accepted(target: Any, content_type: str) -> None:
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream, content_type=content_type))
    wire.send_data(stream, target.framed(target.numbers()))
    target.assert_right(wire.finish(stream))


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS", "CONNECT", "post", ""])
def test_a_request_by_another_method_is_refused(target: Any, method: str) -> None:
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream, ends=True, method=method))
    answer = wire.finish(stream)
    assert answer.status is not Code.OK
    if target.transport == "http2":
        assert answer.reset is not None or answer.status is not None or answer.value(b":status")[:1] == b"4", answer
        target.assert_right(wire.call("ModelInfer", target.numbers()))


def test_calls_without_the_te_header_are_all_treated_alike(target: Any) -> None:
    wire = target.connect()
    found = set()
    for _ in range(3):
        stream = wire.new_stream()
        wire.send(wire.head(stream, te=None))
        wire.send_data(stream, target.framed(target.numbers()))
        found.add(wire.finish(stream).status)
    assert len(found) == 1


def test_a_second_message_in_a_unary_call_is_an_error_or_ignored(target: Any) -> None:
    wire = target.connect()
    answer = wire.call("ModelInfer", target.numbers(), target.numbers())
    if target.transport == "http2":
        assert answer.status in (Code.INTERNAL, Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED), answer
    target.assert_right(wire.call("ModelInfer", target.numbers()))


def test_a_unary_call_without_a_message_is_an_error(target: Any) -> None:
    wire = target.connect()
    answer = wire.call("ModelInfer")
    assert answer.status not in (Code.OK, None) or answer.reset is not None
    stream = wire.new_stream()
    wire.send(wire.head(stream, ends=True))
    answer = wire.finish(stream)
    assert answer.status not in (Code.OK, None) or answer.reset is not None
    target.assert_right(wire.call("ModelInfer", target.numbers()))


def test_a_call_that_ends_within_a_message_is_an_error(target: Any) -> None:
    wire = target.connect()
    body = target.framed(target.numbers())
    for size in (1, 4, 5, 6, len(body) - 1):
        stream = wire.new_stream()
        wire.send(wire.head(stream))
        wire.send_data(stream, body[:size])
        answer = wire.finish(stream)
        assert answer.status not in (Code.OK, None) or answer.reset is not None, (size, answer)
    target.assert_right(wire.call("ModelInfer", target.numbers()))


def test_calls_from_many_threads_over_one_channel_succeed(target: Any) -> None:
    infer = target.channel().unary_unary(INFER)
    wrong: list[Any] = []

    def ask(number: int) -> None:
        for count in range(20):
            response = messages.ModelInferResponse.FromString(
                infer(target.numbers(count=1 + number * count), timeout=60)
            )
            if len(response.raw_output_contents[0]) != 1 + number * count:
                wrong.append((number, count))

    together(ask, range(8))
    assert wrong == []
