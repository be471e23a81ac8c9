"""EngineBuildQueue with a fake GPU behind real builders: GPUs that are lost, and caches that are shared."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from edge_server.backends.isolation.json_child_process import JsonProcess
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import DeviceLost
from edge_server.plugins.tensorrt.builds.build_process import Bounds
from edge_server.plugins.tensorrt.builds.build_queue import EngineBuildQueue
from edge_server.plugins.tensorrt.builds.build_registry import MAX_ATTEMPTS
from edge_server.plugins.tensorrt.builds.build_report import engine_rows
from edge_server.plugins.tensorrt.builds.builder import ServingCallbacks
from edge_server.plugins.tensorrt.builds.engine_cache import EngineCache, EngineCacheFault
from edge_server.plugins.tensorrt.builds.engine_key import GpuIdentity
from edge_server.plugins.tensorrt.engine_order import EngineOrder, Range
from edge_server.serving.execution.gpu_state import Gpus
from tests.kit.child_processes import children_of
from tests.kit.eventually import eventually

SPEC = ModelSpec(
    "sums", "tensorrt_rtx", "", 4, (InputSpec("X", DType.FP32, (4,)),), (OutputSpec("Y", DType.FP32, (4,)),), ()
)
REASON = "GPU 0 is lost to this process: it has fallen off the bus"


@dataclass
class Server:
    """The environment of the build queue: no model serves, and no upload is running."""

    gpus: Gpus = field(default_factory=Gpus)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    renewed: list[str] = field(default_factory=list)
    pause: str = ""

    def side(self) -> ServingCallbacks:
        return ServingCallbacks(
            serving=lambda name, version: None,
            is_settled=lambda name: True,
            renew=lambda name, version, mark: not self.renewed.append(mark),
            may_build=lambda: self.pause,
            publish=lambda kind, /, **fields: self.events.append((kind, fields)),
            lost_gpus=self.gpus.lost_gpus,
        )

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events if kind != "engine.build_progress"]


@pytest.fixture
def order(tmp_path: Path) -> EngineOrder:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["X", "X"], ["Y"])],
        "sums",
        [value("X", TensorProto.FLOAT, ["n", 4])],
        [value("Y", TensorProto.FLOAT, ["n", 4])],
    )
    path = tmp_path / "models" / "sums" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    profile = {"X": Range((1, 4), (4, 4), (4, 4))}
    return EngineOrder("sums", 1, path, "tensorrt_rtx", "1.7", 0, "fp32", (profile,), spec=SPEC)


@pytest.fixture
def make_queue(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[Server], EngineBuildQueue]]:
    """Return a function that makes build queues on one cache folder, which are closed at the end."""
    fake_gpu.install(monkeypatch)
    for name, value in fake_gpu.environment(tmp_path / "engines").items():
        monkeypatch.setenv(name, value)
    made: list[EngineBuildQueue] = []

    def make(server: Server) -> EngineBuildQueue:
        cache = EngineCache(tmp_path / "engines")
        cache.open()
        made.append(EngineBuildQueue(cache, GpuIdentity(), Bounds(60.0), server.side()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def state(make_queue: EngineBuildQueue) -> str:
    return make_queue.report().engines[0].state


def children() -> list[int]:
    return children_of(os.getpid(), "edge_server.plugins.tensorrt")


def test_no_engine_is_built_for_a_lost_gpu_and_the_reason_is_reported(
    make_queue: Callable[[Server], EngineBuildQueue], order: EngineOrder, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    server.gpus.mark_lost(0, "it has fallen off the bus")
    mine = make_queue(server)
    assert mine.find(order) is None
    mine.start()
    assert eventually(lambda: state(mine) == "failed")
    told = mine.report().engines[0]
    assert (told.reason, told.retry_s, told.attempt_count) == (REASON, None, 0)
    assert server.kinds() == ["engine.build_failed"]
    assert server.events[0][1]["reason"] == REASON
    assert f"engine for model 'sums' version 1 is not built: {REASON}" in caplog.text
    with pytest.raises(DeviceLost, match=f"model 'sums': no engine is built: {REASON}"):
        mine.order_again("sums")
    assert mine.find(order) is None
    assert state(mine) == "failed"


def test_a_build_ends_if_its_gpu_is_lost(make_queue: Callable[[Server], EngineBuildQueue], order: EngineOrder) -> None:
    server = Server()
    mine = make_queue(server)
    assert mine.find(order) is None
    mine.start()
    assert eventually(children)
    # It cannot be done before it was seen.
    server.pause = "the box is HOT"
    assert eventually(lambda: state(mine) == "paused")
    server.gpus.mark_lost(0, "it has fallen off the bus")
    assert eventually(lambda: state(mine) == "cancelled")
    assert mine.report().engines[0].reason == REASON
    assert children() == []
    assert server.kinds()[-1] == "engine.build_cancelled"
    with pytest.raises(DeviceLost, match=REASON):
        mine.order_again("sums")
    server.pause = ""
    assert state(mine) == "cancelled"
    assert server.renewed == []


def test_a_lost_gpu_does_not_prevent_a_build_for_another(
    make_queue: Callable[[Server], EngineBuildQueue], order: EngineOrder
) -> None:
    server = Server()
    server.gpus.mark_lost(1, "it has fallen off the bus")
    mine = make_queue(server)
    assert mine.find(order) is None
    mine.start()
    assert eventually(lambda: server.renewed)
    assert state(mine) == "ready"
    assert mine.find(order) is not None


def test_log_status_and_report_say_how_many_layers_the_dla_can_run(
    make_queue: Callable[[Server], EngineBuildQueue], order: EngineOrder, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_DLA_CORES", "2")
    on_dla = replace(order, precision="best", options={"trt_dla_enable": "1", "trt_dla_core": "1"})
    queue = make_queue(Server())
    assert queue.find(on_dla) is None
    queue.start()
    assert eventually(lambda: state(queue) == "ready")
    report = queue.report().as_json()
    found, layers = report["engines"][0]["dla_layers"]  # type: ignore[index]
    # The graph is in f32, which a DLA does not have.
    assert (found, layers > 0) == (0, True)
    assert f"0 of {layers} layers can run on the DLA" in engine_rows(report)[1].text
    # It is logged when the engine is ready, on the thread that built it.
    assert eventually(lambda: any(record.levelname == "WARNING" for record in caplog.records))
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        f"engine for model 'sums' version 1: the DLA can run 0 of its {layers} layers, the GPU runs the others"
    ]


def test_of_two_servers_with_one_cache_one_builds_and_both_reload(
    make_queue: Callable[[Server], EngineBuildQueue], order: EngineOrder
) -> None:
    servers = Server(), Server()
    both = [make_queue(server) for server in servers]
    for one in both:
        assert one.find(order) is None
    for one in both:
        one.start()
    assert eventually(lambda: all(server.renewed for server in servers))
    assert sorted(server.kinds() for server in servers) == [["engine.build_started", "engine.ready"], ["engine.ready"]]
    assert [one.report().engines[0].state for one in both] == ["ready", "ready"]
    assert servers[0].renewed == servers[1].renewed
    # A reload by hand finds it as any other engine.
    assert [one.find(order) is not None for one in both] == [True, True]


def test_waiting_for_another_process_can_be_cancelled(
    make_queue: Callable[[Server], EngineBuildQueue], order: EngineOrder
) -> None:
    server = Server()
    mine = make_queue(server)
    assert mine.find(order) is None
    other = EngineCache(mine.cache._folder)
    (build,) = mine._registry.all()
    claim = other.claim(build.key)
    assert claim is not None
    with claim:
        mine.start()
        words = f"waits: process {os.getpid()} on "
        assert eventually(lambda: mine.report().engines[0].phase.startswith(words))
        assert "builds it" in mine.report().engines[0].phase
        assert mine.cancel("sums") == 1
        assert state(mine) == "cancelled"
    assert server.kinds() == ["engine.build_cancelled"]


def test_an_unwritable_cache_is_not_retried_forever(
    make_queue: Callable[[Server], EngineBuildQueue], order: EngineOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_server.plugins.tensorrt.builds.build_registry._FIRST_RETRY_S", 0.0)
    server = Server()
    mine = make_queue(server)
    assert mine.find(order) is None

    def full(key: object) -> None:
        raise EngineCacheFault("no space left on device")

    monkeypatch.setattr(mine.cache, "claim", full)
    mine.start()
    assert eventually(lambda: state(mine) == "failed" and mine.report().engines[0].attempt_count >= MAX_ATTEMPTS)
    told = mine.report().engines[0]
    assert (told.attempt_count, told.retry_s, told.reason) == (MAX_ATTEMPTS, None, "no space left on device")
    assert mine.order_again("sums") == 1


def test_a_model_on_a_failing_disk_waits_while_others_are_built(
    make_queue: Callable[[Server], EngineBuildQueue], order: EngineOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    mine = make_queue(server)
    assert mine.find(order) is None
    plain = Path.exists
    is_away = True

    def exists(path: Path, *more: Any, **named: Any) -> bool:
        if is_away and path == order.path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return plain(path, *more, **named)

    monkeypatch.setattr(Path, "exists", exists)
    mine.start()
    assert eventually(lambda: "Stale file handle" in mine.report().engines[0].phase)
    assert state(mine) == "waiting"
    is_away = False
    assert eventually(lambda: server.renewed)
    assert state(mine) == "ready"


def test_without_an_available_thread_no_process_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "edge-child-err":
            raise RuntimeError("can't start new thread")
        plain(thread)

    def pipes() -> set[str]:
        """By their inodes: files of other tests may be closed at any time, as objects of theirs are freed."""
        links = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.add(os.readlink(f"/proc/self/fd/{name}"))
        return {link for link in links if link.startswith("pipe:")}

    before = pipes()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="the system grants no thread"):
        JsonProcess("edge_server.plugins.tensorrt.builds.build_process_main")
    assert children() == []
    assert pipes() <= before
    assert "edge-child-out" not in [thread.name for thread in threading.enumerate()]


def test_a_hung_builder_does_not_delay_the_stop(
    make_queue: Callable[[Server], EngineBuildQueue],
    order: EngineOrder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("edge_server.plugins.tensorrt.builds.build_queue._END_TIMEOUT_S", 0.01, raising=False)
    mine = make_queue(Server())
    assert mine.find(order) is None
    is_stuck, is_over = threading.Event(), threading.Event()

    def hang(build: object) -> None:
        is_stuck.set()
        assert is_over.wait(60)

    monkeypatch.setattr(mine, "_make", hang)
    mine.start()
    assert is_stuck.wait(60)
    try:
        mine.close()
        assert mine._thread is not None
        assert mine._thread.is_alive()
        assert "it is left behind" in caplog.text
    finally:
        is_over.set()
        assert mine._thread is not None
        mine._thread.join()
