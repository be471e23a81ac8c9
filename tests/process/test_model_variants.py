"""A lighter variant of a model, through the real front ends; the test activates it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from onnx import TensorProto, helper

from tests.e2e.yolo_exports import ULTRALYTICS, detect, export
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.models import Repository, finish
from tests.kit.server import serve_here
from tests.kit.triton_stream import TritonStream

WIDTH = 8


def scaled(factor: float, width: int = WIDTH) -> onnx.ModelProto:
    """OUT = factor x IN."""
    given, out = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name in ("IN", "OUT"))
    weight = helper.make_tensor("factor", TensorProto.FLOAT, [1], [factor])
    return finish(
        helper.make_graph([helper.make_node("Mul", ["IN", "factor"], ["OUT"])], "scaled", [given], [out], [weight])
    )


def names(lighter: str) -> str:
    return parameters(variant=lighter)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    repository = Repository(tmp_path_factory.mktemp("models"))
    add = repository.add
    add("heavy", names("light"), model=scaled(2))
    add("light", version=3, model=scaled(3))
    add("odd", names("narrow"), model=scaled(5))
    add("narrow", model=scaled(7, WIDTH // 2))
    add("vain", names("vain"), model=scaled(9))
    add("alone", names("absent"), model=scaled(11))
    add("camera", names("any_size"), model=export(detect(), ULTRALYTICS))
    add("any_size", model=export(detect(), ULTRALYTICS, is_dynamic=True))
    with serve_here(repository.path, model_control_mode="explicit", load_model="*", allow_client_shm=True) as made:
        made.service = made.server._core.service
        yield made


@pytest.fixture
def choice(server: Any) -> dict[str, str]:
    """What a governor has chosen: model -> its lighter variant."""
    chosen: dict[str, str] = {}
    server.service.variants.choice = SimpleNamespace(variant_for=chosen.get)
    return chosen


VALUE = np.arange(WIDTH, dtype=np.float32).reshape(1, WIDTH)


def counts(server: Any) -> dict[str, int]:
    return {item.name: item.success.count for item in server.service.statistics(None, None)}


def tensor(client: Any) -> Any:
    return infer_input(client, "IN", VALUE)


def ask_grpc(server: Any, model: str, version: str = "") -> tuple[float, str, str, str]:
    """Return the factor, and model, version and variant as the answer names them."""
    with triton.InferenceServerClient(server.grpc) as client:
        result = client.infer(model, [tensor(triton)], model_version=version)
    told = result.get_response()
    return float(result.as_numpy("OUT")[0, 1]), told.model_name, told.model_version, variant_in(told)


def variant_in(told: Any) -> str:
    return str(told.parameters["edge_variant"].string_param) if "edge_variant" in told.parameters else ""


def ask_http(server: Any, model: str, version: str = "") -> tuple[float, str, str, str]:
    with triton_http.InferenceServerClient(server.http) as client:
        result = client.infer(model, [tensor(triton_http)], model_version=version)
    told = result.get_response()
    variant = told.get("parameters", {}).get("edge_variant", "")
    return float(result.as_numpy("OUT")[0, 1]), told["model_name"], told["model_version"], variant


@pytest.mark.parametrize("ask", [ask_grpc, ask_http])
def test_the_lighter_variant_answers_under_the_heavier_models_name(
    server: Any, choice: dict[str, str], ask: Callable[..., Any]
) -> None:
    before = counts(server)
    assert ask(server, "heavy") == (2.0, "heavy", "1", "")
    choice["heavy"] = "light"
    assert ask(server, "heavy") == (3.0, "heavy", "3", "light")
    assert ask(server, "light") == (3.0, "light", "3", "")
    assert ask(server, "heavy", "1") == (2.0, "heavy", "1", ""), "who names a version gets it"
    choice.clear()
    assert ask(server, "heavy") == (2.0, "heavy", "1", "")
    after = counts(server)
    assert (after["heavy"] - before["heavy"], after["light"] - before["light"]) == (3, 2)


@pytest.mark.parametrize(
    ("model", "lighter", "factor", "message"),
    [
        ("odd", "narrow", 5.0, "expected input 'IN' FP32[8], it has 'IN' FP32[4]"),
        ("vain", "vain", 9.0, "names itself"),
        ("alone", "absent", 11.0, "model 'absent' does not serve"),
    ],
)
def test_an_incompatible_variant_is_not_used_and_status_has_the_reason(
    server: Any, choice: dict[str, str], model: str, lighter: str, factor: float, message: str
) -> None:
    choice[model] = lighter
    assert ask_grpc(server, model) == (factor, model, "1", "")
    notes = next(report.notes for report in server.service.instance_reports() if report.name == model)
    assert any(message in note for note in notes), notes


def test_available_and_active_variants_can_be_queried(server: Any, choice: dict[str, str]) -> None:
    assert server.service.variants.find_pairs() == {"heavy": "light", "camera": "any_size"}
    assert server.service.variants.variant_for("heavy") is None
    choice["heavy"] = "light"
    assert server.service.variants.variant_for("heavy").name == "light"
    assert server.service.variants.variant_for("camera") is None


def test_streams_and_shared_memory_work_through_the_variant(server: Any, choice: dict[str, str]) -> None:
    choice["heavy"] = "light"
    key = f"/variant_in_{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("variant_in", key, VALUE.nbytes)
    try:
        shm.set_shared_memory_region(handle, [VALUE])
        with triton.InferenceServerClient(server.grpc) as client:
            client.register_system_shared_memory("variant_in", key, VALUE.nbytes)
            given = triton.InferInput("IN", [1, WIDTH], "FP32")
            given.set_shared_memory("variant_in", VALUE.nbytes)
            assert client.infer("heavy", [given]).as_numpy("OUT")[0, 1] == 3.0
            client.unregister_system_shared_memory("variant_in")
        with TritonStream(server.grpc) as stream:
            for _ in range(3):
                stream.send("heavy", [tensor(triton)])
                assert variant_in(stream.result().get_response()) == "light"
    finally:
        shm.destroy_shared_memory_region(handle)


def test_requests_succeed_while_the_lighter_variant_is_loaded_and_unloaded(server: Any, choice: dict[str, str]) -> None:
    choice["heavy"] = "light"
    seen: set[float] = set()
    done = threading.Event()

    def unload_and_load() -> None:
        for _ in range(3):
            server.service.unload_model("light")
            server.service.load_model("light")
        done.set()

    thread = threading.Thread(target=unload_and_load)
    thread.start()
    while not done.is_set():
        seen.add(ask_grpc(server, "heavy")[0])
    thread.join(30)
    assert seen <= {2.0, 3.0}
    assert ask_grpc(server, "heavy") == (3.0, "heavy", "3", "light")
