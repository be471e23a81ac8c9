"""Every RPC that is not inference, health checking and reflection, over a real channel."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_server.config import RestrictedGroup
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.grpc import rpc_table
from edge_server.frontends.grpc.control_rpcs import ControlRpcs
from edge_server.frontends.grpc.restricted_protocols import CATEGORY_OF
from edge_server.protocol import messages


def refusal(front_end: Any, rpc: str, request: Any = None, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        front_end.call(rpc, request, **options)
    return caught.value.code(), caught.value.details()


def test_every_rpc_of_the_service_is_served_and_has_a_category(service: Any) -> None:
    rpcs = {method.name for method in messages.service_methods(messages.GRPC_SERVICE)}
    assert len(rpcs) == 20
    assert set(ControlRpcs(service).table()) | {"ModelInfer", "ModelStreamInfer"} == rpcs
    assert rpcs | {"Check", "Watch"} == set(CATEGORY_OF)


def test_health_follows_the_service(front_end: Any) -> None:
    assert front_end.call("ServerLive").live is True
    assert front_end.call("ServerReady").ready is True
    front_end.service.ready = False
    assert front_end.call("ServerReady").ready is False


@pytest.mark.parametrize(("name", "version", "expected"), [("echo", "", True), ("echo", "7", False), ("x", "", False)])
def test_an_unknown_model_is_not_ready_rather_than_an_error(
    front_end: Any, name: str, version: str, expected: bool
) -> None:
    assert front_end.call("ModelReady", messages.ModelReadyRequest(name=name, version=version)).ready is expected


def test_metadata_of_server_and_model(front_end: Any) -> None:
    server = front_end.call("ServerMetadata")
    assert (server.name, server.version, list(server.extensions)) == (
        "triton",
        "1.2.3",
        ["classification", "statistics"],
    )
    model = front_end.call("ModelMetadata", messages.ModelMetadataRequest(name="echo"))
    assert (model.platform, list(model.versions), list(model.inputs[0].shape)) == ("stub_plan", ["1"], [-1, 4])


def test_a_model_configuration_is_a_message(front_end: Any) -> None:
    config = front_end.call("ModelConfig", messages.ModelConfigRequest(name="echo")).config
    assert (config.name, config.max_batch_size, config.instance_group[0].count) == ("echo", 8, 1)


def test_statistics_of_one_and_of_all_models(front_end: Any) -> None:
    for name in ("echo", ""):
        (found,) = front_end.call("ModelStatistics", messages.ModelStatisticsRequest(name=name)).model_stats
        assert (found.name, found.version, found.inference_count) == ("echo", "1", 2**40)
        assert (found.inference_stats.success.count, found.inference_stats.success.ns) == (3, 7)
    assert refusal(front_end, "ModelStatistics", messages.ModelStatisticsRequest(name="x")) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "requested model 'x' is not available",
    )


def test_the_repository_index_can_be_filtered(front_end: Any) -> None:
    everything = front_end.call("RepositoryIndex").models
    assert [(m.name, m.version, m.state, m.reason) for m in everything] == [
        ("echo", "1", "READY", ""),
        ("old", "2", "UNAVAILABLE", "unloaded"),
    ]
    assert len(front_end.call("RepositoryIndex", messages.RepositoryIndexRequest(ready=True)).models) == 1


@pytest.mark.parametrize("rpc", ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"])
def test_named_repositories_are_not_supported(front_end: Any, rpc: str) -> None:
    request = getattr(messages, f"{rpc}Request")(repository_name="r")
    assert refusal(front_end, rpc, request)[0] is grpc.StatusCode.UNIMPLEMENTED


def load_request(**parameters: Any) -> Any:
    request = messages.RepositoryModelLoadRequest(model_name="m")
    for key, value in parameters.items():
        request.parameters[key].CopyFrom(value)
    return request


def test_a_load_carries_configuration_and_files(front_end: Any) -> None:
    front_end.call("RepositoryModelLoad", messages.RepositoryModelLoadRequest(model_name="plain"))
    parameter = messages.ModelRepositoryParameter
    override = load_request(
        **{"config": parameter(string_param="{}"), "file:1/model.onnx": parameter(bytes_param=b"\0\1")}
    )
    front_end.call("RepositoryModelLoad", override)
    assert front_end.service.loads == [("plain", None, {}), ("m", "{}", {"1/model.onnx": b"\0\1"})]


def test_code_is_taken_from_this_machine_and_from_others_where_that_is_allowed(
    front_end: Any, open_front_end: Any, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    request = messages.RepositoryModelLoadRequest(model_name="m")
    front_end.call("RepositoryModelLoad", request)
    monkeypatch.setattr(rpc_table, "is_this_machine", lambda address: asked.append(address) or False)
    front_end.call("RepositoryModelLoad", request)
    open_front_end(allows_code_upload=True).call("RepositoryModelLoad", request)
    assert service.may_carry_code == [True, False, True]
    assert asked == ["127.0.0.1"]


def test_load_parameters_of_wrong_name_or_type_are_refused(front_end: Any) -> None:
    parameter = messages.ModelRepositoryParameter
    for request, words in (
        (load_request(other=parameter(string_param="x")), "unexpected load parameter 'other'"),
        (load_request(config=parameter(bool_param=True)), "'config' parameter, expected string_param, got bool_param"),
        (load_request(**{"file:x": parameter(string_param="x")}), "'file:x' parameter, expected bytes_param"),
    ):
        code, details = refusal(front_end, "RepositoryModelLoad", request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in details
    assert front_end.service.loads == []


def test_unload_knows_its_one_parameter(front_end: Any) -> None:
    request = messages.RepositoryModelUnloadRequest(model_name="m")
    front_end.call("RepositoryModelUnload", request)
    request.parameters["unload_dependents"].bool_param = True
    front_end.call("RepositoryModelUnload", request)
    assert front_end.service.unloads == [("m", False), ("m", True)]
    request.parameters["other"].bool_param = True
    assert refusal(front_end, "RepositoryModelUnload", request)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_shared_memory_is_registered_shown_and_forgotten(front_end: Any) -> None:
    front_end.call(
        "SystemSharedMemoryRegister",
        messages.SystemSharedMemoryRegisterRequest(name="r", key="/k", offset=8, byte_size=64),
    )
    regions = front_end.call("SystemSharedMemoryStatus").regions
    assert {name: (r.name, r.key, r.offset, r.byte_size) for name, r in regions.items()} == {"r": ("r", "/k", 8, 64)}
    unknown = messages.SystemSharedMemoryStatusRequest(name="x")
    assert refusal(front_end, "SystemSharedMemoryStatus", unknown)[0] is grpc.StatusCode.NOT_FOUND
    front_end.call("SystemSharedMemoryUnregister", messages.SystemSharedMemoryUnregisterRequest(name="r"))
    assert not front_end.call("SystemSharedMemoryStatus").regions


def test_cuda_shared_memory_is_empty_and_cannot_be_registered(front_end: Any) -> None:
    assert not front_end.call("CudaSharedMemoryStatus").regions
    front_end.call("CudaSharedMemoryUnregister")
    assert refusal(front_end, "CudaSharedMemoryRegister")[0] is grpc.StatusCode.UNIMPLEMENTED


def test_log_settings_are_read_and_changed(front_end: Any) -> None:
    before = front_end.call("LogSettings").settings
    assert before["log_info"].bool_param is True
    assert before["log_format"].string_param == "default"
    request = messages.LogSettingsRequest()
    request.settings["log_verbose_level"].uint32_param = 1
    request.settings["log_info"].bool_param = False
    after = front_end.call("LogSettings", request).settings
    assert (after["log_verbose_level"].uint32_param, after["log_info"].bool_param) == (1, False)
    request.settings["log_file"].string_param = "/etc/passwd"
    assert refusal(front_end, "LogSettings", request)[0] is grpc.StatusCode.UNIMPLEMENTED


def test_a_malformed_message_is_an_invalid_argument(front_end: Any) -> None:
    assert refusal(front_end, "ModelMetadata", b"\x0a\xff")[0] is grpc.StatusCode.INVALID_ARGUMENT


def health(front_end: Any) -> int:
    response = messages.message_class("grpc.health.v1.HealthCheckResponse")
    call = front_end.channel().unary_unary("/grpc.health.v1.Health/Check", response_deserializer=response.FromString)
    return int(call(b"\x0a\x03any", timeout=20).status)


def test_health_check_serves_exactly_when_ready(front_end: Any) -> None:
    assert health(front_end) == 1
    front_end.service.ready = False
    assert health(front_end) == 2


def watch(front_end: Any) -> Any:
    """Return an open Health/Watch call, an iterator of status numbers."""
    response = messages.message_class("grpc.health.v1.HealthCheckResponse")
    return front_end.channel().unary_stream(
        "/grpc.health.v1.Health/Watch", response_deserializer=lambda data: int(response.FromString(data).status)
    )(b"\x0a\x03any", timeout=20)


def test_health_watch_sends_the_state_at_once_and_then_each_change(front_end: Any) -> None:
    first, second = watch(front_end), watch(front_end)
    assert [next(first), next(second)] == [1, 1]
    for ready, status in ((False, 2), (True, 1), (False, 2)):
        front_end.service.ready = ready
        assert [next(first), next(second)] == [status, status]
    first.cancel()
    front_end.service.ready = True
    assert next(second) == 1


def test_a_server_that_stops_sends_not_serving_and_ends_the_watch(open_front_end: Any) -> None:
    front_end = open_front_end()
    watching = watch(front_end)
    assert next(watching) == 1
    stopping = threading.Thread(target=front_end.frontend.stop, args=(20,))
    stopping.start()
    assert next(watching) == 2
    with pytest.raises(grpc.RpcError) as caught:
        next(watching)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    stopping.join(20)
    assert not stopping.is_alive()


def test_no_thread_remains_of_watches_that_have_ended(front_end: Any) -> None:
    for _ in range(2):
        others = threading.enumerate()
        watching = watch(front_end)
        next(watching)
        (thread,) = (item for item in threading.enumerate() if item.name == "grpc-health" and item not in others)
        watching.cancel()
        thread.join(20)
        assert not thread.is_alive()


def test_a_malformed_watch_request_is_an_invalid_argument(front_end: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(front_end.channel().unary_stream("/grpc.health.v1.Health/Watch")(b"\x0a\xff", timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
def test_reflection_tells_services_and_schemas(front_end: Any, package: str) -> None:
    request_class = messages.message_class(f"{package}.ServerReflectionRequest")
    response_class = messages.message_class(f"{package}.ServerReflectionResponse")
    ask = front_end.channel().stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo", response_deserializer=response_class.FromString
    )
    questions = [
        request_class(list_services=""),
        request_class(file_containing_symbol="inference.GRPCInferenceService"),
        request_class(file_by_filename="no/such.proto"),
        request_class(all_extension_numbers_of_type="x"),
    ]
    listed, found, missing, extensions = ask(iter([q.SerializeToString() for q in questions]), timeout=20)
    names = {service.name for service in listed.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health", f"{package}.ServerReflection"} <= names
    assert len(found.file_descriptor_response.file_descriptor_proto) >= 2
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert extensions.error_response.error_code == grpc.StatusCode.UNIMPLEMENTED.value[0]


def test_restricted_rpcs_want_their_secret_and_others_do_not(open_front_end: Any, make_request: Any) -> None:
    group = RestrictedGroup(("inference", "model-repository"), "Admin-Key", "secret")
    front_end = open_front_end(restricted=(group,))
    words = "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
    for metadata in (None, [("triton-grpc-protocol-admin-key", "guess")]):
        refused = refusal(front_end, "ModelInfer", make_request(), metadata=metadata)
        assert refused == (grpc.StatusCode.UNAVAILABLE, words)
        assert refusal(front_end, "RepositoryIndex", metadata=metadata)[0] is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError) as caught:
            list(front_end.stream([make_request()], metadata=metadata))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert front_end.service.calls == []
    secret = [("triton-grpc-protocol-admin-key", "secret")]
    assert front_end.call("ModelInfer", make_request(), metadata=secret).model_name == "echo"
    assert len(list(front_end.stream([make_request()], metadata=secret))) == 1
    assert front_end.call("ServerLive").live is True


def test_a_token_lets_calls_and_streams_in_beside_the_shared_word(
    open_front_end: Any, make_request: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    digest = hashlib.sha256(b"secret").hexdigest()
    (tmp_path / "tokens").write_text(f"alice {digest} inference,model-repository\n")
    tokens = Tokens(str(tmp_path / "tokens"))
    front_end = open_front_end(tokens=tokens, restricted=(RestrictedGroup(("inference",), "key", "word"),))
    wrong, right = [("authorization", "Bearer guess")], [("authorization", "Bearer secret")]
    for metadata in (None, wrong, [*right, *right], [("triton-grpc-protocol-key", "guess")]):
        assert refusal(front_end, "ModelInfer", make_request(), metadata=metadata)[0] is grpc.StatusCode.UNAUTHENTICATED
        assert refusal(front_end, "RepositoryModelLoad", metadata=metadata)[0] is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            list(front_end.stream([make_request()], metadata=metadata))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert refusal(front_end, "LogSettings", metadata=right)[0] is grpc.StatusCode.PERMISSION_DENIED
    assert front_end.service.calls == []
    for metadata in (right, [("triton-grpc-protocol-key", "word")]):
        assert front_end.call("ModelInfer", make_request(), metadata=metadata).model_name == "echo"
        assert len(list(front_end.stream([make_request()], metadata=metadata))) == 1
    front_end.call("RepositoryModelLoad", messages.RepositoryModelLoadRequest(model_name="m"), metadata=right)
    assert "'alice' requested: RepositoryModelLoad" in caplog.text
    assert front_end.call("ServerReady").ready
    page = "".join(text for family in tokens.families() for text in family.render())
    assert 'edge_auth_requests_total{name="alice",category="inference"} 2\n' in page
    (tmp_path / "tokens").write_text("protect inference\n")
    tokens.load(str(tmp_path / "tokens"))
    assert refusal(front_end, "RepositoryModelLoad", metadata=right)[0] is grpc.StatusCode.UNAUTHENTICATED
