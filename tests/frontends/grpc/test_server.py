"""The listener: binding, limits, options, TLS, stopping; and Triton's own client against it."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from edge_server.config import GrpcConfig
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ServingFault
from edge_server.frontends.grpc import server as server_module
from edge_server.frontends.grpc.grpcio_transport import channel_options
from edge_server.frontends.grpc.server import GrpcFrontend
from edge_server.protocol import messages
from tests.kit.certificates import self_signed
from tests.kit.infer_input import infer_input


def test_a_port_in_use_is_an_error_that_names_the_address(service: Any, transport: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServingFault, match=rf"gRPC cannot listen on 127.0.0.1:{port}: .*in use.*--grpc-port"):
            GrpcFrontend(service, GrpcConfig(transport=transport, port=port)).start()


def test_two_front_ends_share_a_port_only_if_configured(service: Any, open_front_end: Any, transport: str) -> None:
    front_end = open_front_end()
    with pytest.raises(ServingFault):
        GrpcFrontend(service, GrpcConfig(transport=transport, port=front_end.port)).start()
    shared = open_front_end(reuses_port=True)
    other = GrpcFrontend(service, GrpcConfig(transport=transport, port=shared.port, reuses_port=True))
    assert other.start() == shared.port
    other.stop(0)


def test_until_it_accepts_a_front_end_refuses_clients_and_keeps_the_port(
    service: Any, transport: str, free_ports: Any
) -> None:
    (port,) = free_ports(1)
    config = GrpcConfig(transport=transport, port=port)
    for _ in range(2):  # the second time beside closed connections of the first
        front = GrpcFrontend(service, config)
        assert front.start(accepts=False) == port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5).close()
        for other in (config, GrpcConfig(transport=transport, port=port, reuses_port=True)):
            with pytest.raises(ServingFault, match="in use"):
                GrpcFrontend(service, other).start()
        # Another program, with the option that servers set.
        with socket.socket() as program:
            program.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                program.bind(("127.0.0.1", port))
        front.accept_connections()
        with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=20)
            assert live == messages.ServerLiveResponse(live=True).SerializeToString()
            front.stop(0)


def test_a_front_end_that_never_accepted_stops(service: Any, transport: str) -> None:
    front = GrpcFrontend(service, GrpcConfig(transport=transport, port=0))
    port = front.start(accepts=False)
    front.stop(0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_configuration_becomes_channel_arguments() -> None:
    options = dict(channel_options(GrpcConfig(keepalive_time_ms=5, compression_level="high", max_connection_age_ms=9)))
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 2**31 - 1
    assert options["grpc.keepalive_time_ms"] == 5
    assert options["grpc.default_compression_level"] == 3
    assert options["grpc.max_connection_age_ms"] == 9
    assert options["grpc.so_reuseport"] == 0
    assert "grpc.max_connection_age_grace_ms" not in options


def test_messages_far_above_grpcs_default_limit_pass(front_end: Any) -> None:
    data = bytes(range(256)) * (64 << 10)
    request = messages.ModelInferRequest(model_name="echo", raw_input_contents=[data])
    request.inputs.add(name="x", datatype="UINT8", shape=[len(data)])
    assert front_end.call("ModelInfer", request).raw_output_contents[0] == data


class Meter:
    """Forwards one connection to a port and counts what comes back."""

    def __init__(self, port: int) -> None:
        self.received = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, args=(port,), daemon=True)
        self._thread.start()

    def _serve(self, port: int) -> None:
        client, _ = self._listener.accept()
        target = socket.create_connection(("127.0.0.1", port))
        back = threading.Thread(target=self._pump, args=(target, client, True), daemon=True)
        back.start()
        self._pump(client, target, False)
        back.join()
        client.close()
        target.close()

    def _pump(self, source: socket.socket, sink: socket.socket, is_counted: bool) -> None:
        with contextlib.suppress(OSError):  # either side may hang up first
            while data := source.recv(65536):
                if is_counted:
                    self.received += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(20)


@pytest.mark.sample
@pytest.mark.parametrize(("level", "is_small"), [("none", False), ("low", True), ("medium", True), ("high", True)])
def test_responses_are_compressed_when_configured(open_front_end: Any, level: str, is_small: bool) -> None:
    front_end = open_front_end(compression_level=level)
    meter = Meter(front_end.port)
    request = messages.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(500_000)])
    request.inputs.add(name="x", datatype="UINT8", shape=[500_000])
    with grpc.insecure_channel(meter.address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer = messages.ModelInferResponse.FromString(infer(request.SerializeToString(), timeout=20))
    meter.close()
    assert answer.raw_output_contents[0] == bytes(500_000)
    assert (meter.received < 100_000) is is_small


def test_compressed_requests_are_understood(front_end: Any, make_request: Any) -> None:
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        infer = front_end.channel().unary_unary("/inference.GRPCInferenceService/ModelInfer")
        data = infer(make_request(id="z").SerializeToString(), compression=compression, timeout=20)
        assert messages.ModelInferResponse.FromString(data).id == "z"


def test_calls_beyond_the_limit_are_refused_instead_of_hanging(
    open_front_end: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CALLS", 3)
    front_end = open_front_end()
    infer = front_end.channel().unary_unary("/inference.GRPCInferenceService/ModelInfer")
    waiting = [infer.future(make_request("held").SerializeToString(), timeout=30) for _ in range(3)]
    held = front_end.service.wait_for_calls(3)
    with pytest.raises(grpc.RpcError) as caught:
        front_end.call("ModelInfer", make_request("held"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in held:
        call.answer(Tensor("OUTPUT0", DType.FP32, np.zeros(1, "<f4")))
    for future in waiting:
        future.result()


def test_many_open_streams_leave_room_for_unary_calls(
    open_front_end: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_STREAMS", 80)
    front_end = open_front_end()
    done = threading.Event()

    def requests() -> Any:
        yield make_request(id="a")
        done.wait(30)

    streams = [front_end.stream(requests(), timeout=60) for _ in range(80)]
    assert all(next(stream).infer_response.id == "a" for stream in streams)
    assert front_end.call("ModelInfer", make_request(id="b")).id == "b"
    with pytest.raises(grpc.RpcError) as caught:
        list(front_end.stream([make_request()]))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    done.set()
    assert all(list(stream) == [] for stream in streams)
    assert len(list(front_end.stream([make_request()]))) == 1


def test_stop_waits_for_running_calls_and_takes_no_new_ones(open_front_end: Any, make_request: Any) -> None:
    front_end = open_front_end()
    channel = front_end.channel()
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    future = infer.future(make_request("held", id="last").SerializeToString(), timeout=30)
    (held,) = front_end.service.wait_for_calls(1)
    stopping = threading.Thread(target=front_end.frontend.stop, args=(30,))
    stopping.start()
    with contextlib.suppress(grpc.RpcError):
        while True:
            front_end.call("ServerLive", timeout=2)
    assert stopping.is_alive()
    held.answer(Tensor("OUTPUT0", DType.FP32, np.zeros(1, "<f4")))
    assert messages.ModelInferResponse.FromString(future.result()).id == "last"
    stopping.join(20)
    assert not stopping.is_alive()


def test_stop_ends_idle_streams_at_once_and_busy_ones_when_they_are_answered(
    open_front_end: Any, make_request: Any
) -> None:
    front_end = open_front_end()
    gate = threading.Event()

    def requests(model: str) -> Any:
        yield make_request(model, id=model)
        gate.wait(60)

    idle = front_end.stream(requests("echo"), timeout=60)
    assert next(idle).infer_response.id == "echo"
    busy = front_end.stream(requests("held"), timeout=60)
    held = next(call for call in iter(lambda: front_end.service.wait_for_calls(2), None))[1]
    stopping = threading.Thread(target=front_end.frontend.stop, args=(60,))
    stopping.start()
    with pytest.raises(grpc.RpcError) as caught:
        next(idle)
    assert caught.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    held.answer(Tensor("OUTPUT0", DType.FP32, np.zeros(1, "<f4")))
    assert next(busy).infer_response.id == "held"
    with pytest.raises(grpc.RpcError) as caught:
        next(busy)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    stopping.join(20)
    assert not stopping.is_alive()
    gate.set()


def test_calls_that_outlive_the_grace_are_cancelled(open_front_end: Any, make_request: Any) -> None:
    front_end = open_front_end()
    infer = front_end.channel().unary_unary("/inference.GRPCInferenceService/ModelInfer")
    future = infer.future(make_request("held").SerializeToString(), timeout=30)
    (held,) = front_end.service.wait_for_calls(1)
    front_end.frontend.stop(0.05)
    assert held.is_cancelled.wait(20)
    with pytest.raises(grpc.RpcError):
        future.result()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return key and self-signed certificate for localhost."""
    cert, key = self_signed(tmp_path_factory.mktemp("tls"), alternative="DNS:localhost")
    return key, cert


def tls_answer(port: int, credentials: grpc.ChannelCredentials) -> bytes:
    with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
        return bytes(channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=10))


def test_tls_serves_those_who_trust_the_certificate(open_front_end: Any, certificate: tuple[Path, Path]) -> None:
    key, cert = certificate
    front_end = open_front_end(is_tls=True, server_key=str(key), server_cert=str(cert))
    assert tls_answer(front_end.port, grpc.ssl_channel_credentials(cert.read_bytes())) == b"\x08\x01"
    with pytest.raises(grpc.RpcError):
        front_end.call("ServerLive", timeout=5)


def test_mutual_tls_wants_a_client_certificate(open_front_end: Any, certificate: tuple[Path, Path]) -> None:
    key, cert = certificate
    front_end = open_front_end(is_mutual_tls=True, server_key=str(key), server_cert=str(cert), root_cert=str(cert))
    root = cert.read_bytes()
    with pytest.raises(grpc.RpcError):
        tls_answer(front_end.port, grpc.ssl_channel_credentials(root))
    assert tls_answer(front_end.port, grpc.ssl_channel_credentials(root, key.read_bytes(), root)) == b"\x08\x01"


@pytest.mark.parametrize("path", ["", "/no/such/file.pem"])
def test_tls_files_that_cannot_be_read_are_named(service: Any, path: str, transport: str) -> None:
    config = GrpcConfig(transport=transport, port=0, is_tls=True, server_key=path, server_cert=path)
    with pytest.raises(ServingFault, match="server key"):
        GrpcFrontend(service, config).start()


def test_stopping_what_never_started_does_nothing(service: Any, transport: str) -> None:
    GrpcFrontend(service, GrpcConfig(transport=transport, port=0)).stop(0)


def test_tritons_client_infers_and_asks(front_end: Any) -> None:
    with triton.InferenceServerClient(front_end.address) as client:
        assert client.is_server_live()
        assert client.is_model_ready("echo")
        assert not client.is_model_ready("nobody")
        assert client.get_server_metadata().name == "triton"
        assert client.get_model_config("echo", as_json=True)["config"]["max_batch_size"] == 8
        values = np.arange(8, dtype=np.float32).reshape(2, 4)
        given = infer_input(triton, "INPUT0", values)
        result = client.infer("echo", [given], request_id="r", outputs=[triton.InferRequestedOutput("OUTPUT0")])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), values)
        words = infer_input(triton, "INPUT0", np.array([b"a", b"\0\xff"], object))
        assert client.infer("echo", [words]).as_numpy("OUTPUT0").tolist() == [b"a", b"\0\xff"]
        client.load_model("echo", config="{}")
        client.update_log_settings({"log_verbose_level": 1})
        assert client.get_log_settings(as_json=True)["settings"]["log_verbose_level"]["uint32_param"] == 1


def test_tritons_client_streams_from_a_decoupled_model(front_end: Any) -> None:
    answers: list[tuple[Any, Any]] = []
    is_done = threading.Event()

    def take(result: Any, error: Any) -> None:
        answers.append((result, error))
        if error is not None or result.get_response().parameters["triton_final_response"].bool_param:
            is_done.set()

    with triton.InferenceServerClient(front_end.address) as client:
        client.start_stream(take)
        given = infer_input(triton, "IN", np.array([4, 5, 6], np.int32))
        client.async_stream_infer("repeat", [given], enable_empty_final_response=True)
        assert is_done.wait(20)
        client.stop_stream()
    assert [error for _, error in answers] == [None] * 4
    assert [int(result.as_numpy("OUT")[0]) for result, _ in answers[:3]] == [4, 5, 6]
