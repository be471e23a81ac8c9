"""A lighter variant of a model, through the real front ends; the test activates it."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from onnx import TensorProto, helper

from edge_server.config import GrpcConfig, HttpConfig, LogConfig, MemoryConfig, RepositoryConfig, ServerConfig
from edge_server.frontends.grpc.server import GrpcFrontend
from edge_server.frontends.http.event_endpoints import EventEndpoints
from edge_server.frontends.http.frontend import HttpFrontend
from edge_server.plugin import own_plugins
from edge_server.process.composition_root import build, first_desired_state
from edge_server.process.http_routes import http_routes
from edge_server.telemetry.log import LogSettings
from tests.e2e.yolo_exports import ULTRALYTICS, detect, export
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.models import finish
from tests.kit.triton_stream import TritonStream

WIDTH = 8
COST = 24


def scaled(factor: float, steps: int, width: int = WIDTH) -> onnx.ModelProto:
    """OUT = factor x IN, by way of `steps` additions and subtractions that cancel out: the more, the heavier."""
    nodes, last = [], "IN"
    for step in range(steps):
        nodes += [
            helper.make_node("Add", [last, "one"], [f"up{step}"]),
            helper.make_node("Sub", [f"up{step}", "one"], [f"down{step}"]),
        ]
        last = f"down{step}"
    nodes.append(helper.make_node("Mul", [last, "factor"], ["OUT"]))
    graph = helper.make_graph(
        nodes,
        "scaled",
        [helper.make_tensor_value_info("IN", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info("OUT", TensorProto.FLOAT, ["batch", width])],
        [
            helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0]),
            helper.make_tensor("factor", TensorProto.FLOAT, [1], [factor]),
        ],
    )
    return finish(graph)


class Choice:
    """The choice of a governor."""

    def __init__(self) -> None:
        self.chosen: dict[str, str] = {}

    def variant_for(self, name: str) -> str | None:
        return self.chosen.get(name)


class FrontEnds:
    """The serving core of a repository with both front ends in front of it."""

    def __init__(self, path: Any) -> None:
        config = ServerConfig(
            repository=RepositoryConfig(paths=(str(path),), control_mode="explicit", load_models=("*",)),
            memory=MemoryConfig(allows_client_shm=True),
        )
        vision = [plugin for plugin in own_plugins() if plugin.name == "vision"]
        self.core = build(config, LogSettings(LogConfig()), vision)
        self.service = self.core.service
        self.service.variants.choice = self.choice = Choice()
        self.service.set_desired_state(first_desired_state(config.repository, self.core.source))
        assert self.core.service.table.wait_settled(timeout_s=60)
        self.service.started()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        http = HttpConfig(port=0)
        self.front = HttpFrontend(self.service, http)
        routes = http_routes(self.front, self.service, http, EventEndpoints(self.service.events))
        self.http = f"127.0.0.1:{self.run(self.front.start(routes))}"
        self.grpc_front = GrpcFrontend(self.service, GrpcConfig(port=0))
        self.grpc = f"127.0.0.1:{self.grpc_front.start()}"

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=60)

    def counts(self) -> dict[str, int]:
        return {item.name: item.success.count for item in self.service.statistics(None, None)}

    def close(self) -> None:
        self.grpc_front.stop(1.0)
        self.run(self.front.stop(1.0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()
        self.core.close(10.0)


def names(lighter: str) -> str:
    return parameters(variant=lighter)


@pytest.fixture(scope="module")
def front_ends(module_repository: Any) -> Iterator[FrontEnds]:
    add = module_repository.add
    add("heavy", names("light"), model=scaled(2, COST))
    add("light", version=3, model=scaled(3, 1))
    add("odd", names("narrow"), model=scaled(5, 1))
    add("narrow", model=scaled(7, 1, WIDTH // 2))
    add("vain", names("vain"), model=scaled(9, 1))
    add("alone", names("absent"), model=scaled(11, 1))
    add("camera", names("any_size"), model=export(detect(), ULTRALYTICS))
    add("any_size", model=export(detect(), ULTRALYTICS, is_dynamic=True))
    made = FrontEnds(module_repository.path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_active_variant(front_ends: FrontEnds) -> None:
    front_ends.choice.chosen = {}


VALUE = np.arange(WIDTH, dtype=np.float32).reshape(1, WIDTH)


def tensor(client: Any) -> Any:
    return infer_input(client, "IN", VALUE)


def ask_grpc(front_ends: FrontEnds, model: str, version: str = "") -> tuple[float, str, str, str]:
    """Return the factor, and model, version and variant as the answer names them."""
    with triton.InferenceServerClient(front_ends.grpc) as client:
        result = client.infer(model, [tensor(triton)], model_version=version)
    told = result.get_response()
    return float(result.as_numpy("OUT")[0, 1]), told.model_name, told.model_version, variant_in(told)


def variant_in(told: Any) -> str:
    return str(told.parameters["edge_variant"].string_param) if "edge_variant" in told.parameters else ""


def ask_http(front_ends: FrontEnds, model: str, version: str = "") -> tuple[float, str, str, str]:
    with triton_http.InferenceServerClient(front_ends.http) as client:
        result = client.infer(model, [tensor(triton_http)], model_version=version)
    told = result.get_response()
    variant = told.get("parameters", {}).get("edge_variant", "")
    return float(result.as_numpy("OUT")[0, 1]), told["model_name"], told["model_version"], variant


@pytest.mark.parametrize("ask", [ask_grpc, ask_http])
def test_the_lighter_variant_answers_under_the_heavier_models_name(
    front_ends: FrontEnds, ask: Callable[..., Any]
) -> None:
    before = front_ends.counts()
    assert ask(front_ends, "heavy") == (2.0, "heavy", "1", "")
    front_ends.choice.chosen = {"heavy": "light"}
    assert ask(front_ends, "heavy") == (3.0, "heavy", "3", "light")
    assert ask(front_ends, "light") == (3.0, "light", "3", "")
    assert ask(front_ends, "heavy", "1") == (2.0, "heavy", "1", ""), "who names a version gets it"
    front_ends.choice.chosen = {}
    assert ask(front_ends, "heavy") == (2.0, "heavy", "1", "")
    after = front_ends.counts()
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
    front_ends: FrontEnds, model: str, lighter: str, factor: float, message: str
) -> None:
    front_ends.choice.chosen = {model: lighter}
    assert ask_grpc(front_ends, model) == (factor, model, "1", "")
    notes = next(report.notes for report in front_ends.service.instance_reports() if report.name == model)
    assert any(message in note for note in notes), notes


def test_available_and_active_variants_can_be_queried(front_ends: FrontEnds) -> None:
    assert front_ends.service.variants.find_pairs() == {"heavy": "light", "camera": "any_size"}
    assert front_ends.service.variants.variant_for("heavy") is None
    front_ends.choice.chosen = {"heavy": "light"}
    assert front_ends.service.variants.variant_for("heavy").name == "light"
    assert front_ends.service.variants.variant_for("camera") is None


def test_streams_and_shared_memory_work_through_the_variant(front_ends: FrontEnds) -> None:
    front_ends.choice.chosen = {"heavy": "light"}
    key = f"/variant_in_{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("variant_in", key, VALUE.nbytes)
    try:
        shm.set_shared_memory_region(handle, [VALUE])
        with triton.InferenceServerClient(front_ends.grpc) as client:
            client.register_system_shared_memory("variant_in", key, VALUE.nbytes)
            given = triton.InferInput("IN", [1, WIDTH], "FP32")
            given.set_shared_memory("variant_in", VALUE.nbytes)
            assert client.infer("heavy", [given]).as_numpy("OUT")[0, 1] == 3.0
            client.unregister_system_shared_memory("variant_in")
        with TritonStream(front_ends.grpc) as stream:
            for _ in range(3):
                stream.send("heavy", [tensor(triton)])
                assert variant_in(stream.result().get_response()) == "light"
    finally:
        shm.destroy_shared_memory_region(handle)


def test_requests_succeed_while_the_lighter_variant_is_loaded_and_unloaded(front_ends: FrontEnds) -> None:
    front_ends.choice.chosen = {"heavy": "light"}
    seen: set[float] = set()
    done = threading.Event()

    def unload_and_load() -> None:
        for _ in range(3):
            front_ends.service.unload_model("light")
            front_ends.service.load_model("light")
        done.set()

    thread = threading.Thread(target=unload_and_load)
    thread.start()
    while not done.is_set():
        seen.add(ask_grpc(front_ends, "heavy")[0])
    thread.join(30)
    assert seen <= {2.0, 3.0}
    assert ask_grpc(front_ends, "heavy") == (3.0, "heavy", "3", "light")
