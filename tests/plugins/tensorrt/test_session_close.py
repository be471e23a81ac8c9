"""Order in which an instance frees TensorRT's objects, also after a failed opening."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from edge_server.backends.base import ModelFile
from edge_server.backends.cuda.cuda_ctypes import CudaFault
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import LoadError
from edge_server.plugins.tensorrt import session as sessions
from edge_server.plugins.tensorrt.cuda_graphs import CudaGraphs
from edge_server.plugins.tensorrt.library_adapter import TensorRTLibrary

onnx = pytest.importorskip("onnx")
FLOAT = onnx.TensorProto.FLOAT
SPEC = {
    "inputs": (InputSpec("X", DType.FP32, (4,)),),
    "outputs": (OutputSpec("Y", DType.FP32, (4,)),),
    "max_batch_size": 8,
    "config_json": '{"optimization": {"cuda": {"graphs": true, "graph_spec": [{"batch_size": 2}, {"batch_size": 4}]}}}',
}


@pytest.fixture
def plan(write_onnx: Callable[..., ModelFile], write_plan: Callable[..., ModelFile]) -> ModelFile:
    """Y = X + X, FP32 [1..8, 4]."""
    node = onnx.helper.make_node("Add", ["X", "X"], ["Y"])
    return write_plan(
        write_onnx([node], [("X", FLOAT, ["n", 4])], [("Y", FLOAT, ["n", 4])]), {"X": ([1, 4], [4, 4], [8, 4])}
    )


@pytest.fixture
def left_at_release(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Number of created execution contexts, and of remaining ones at each release of an engine."""
    made: list[weakref.ref[Any]] = []
    seen: list[tuple[int, int]] = []
    make_context, begin = TensorRTLibrary.make_context, sessions.TensorRTSession.__init__

    def watched(self: TensorRTLibrary, engine: Any, *, has_own_memory: bool) -> Any:
        context = make_context(self, engine, has_own_memory=has_own_memory)
        made.append(weakref.ref(context))
        return context

    def begun(self: Any, *given: Any) -> None:
        def release() -> None:
            # The double itself keeps whatever it has recorded.
            gpu.double._recorded.clear()
            seen.append((len(made), sum(one() is not None for one in made)))
            given[-1]()

        begin(self, *given[:-1], release)

    monkeypatch.setattr(TensorRTLibrary, "make_context", watched)
    monkeypatch.setattr(sessions.TensorRTSession, "__init__", begun)
    return seen


def test_execution_contexts_are_destroyed_before_the_engine(
    plan: ModelFile, open_session: Callable[..., Any], left_at_release: list[tuple[int, int]]
) -> None:
    open_session(plan, **SPEC).close()
    assert left_at_release == [(3, 0)]


def test_execution_contexts_are_destroyed_before_the_engine_if_a_capture_loses_the_gpu(
    gpu: Any,
    plan: ModelFile,
    open_session: Callable[..., Any],
    left_at_release: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, before = CudaGraphs.record, gpu.live()

    def fail_at_four(self: CudaGraphs, engine: Any, stream: int, rows: int) -> None:
        if rows == 4:
            raise CudaFault(700, "failed as told")
        record(self, engine, stream, rows)

    monkeypatch.setattr(CudaGraphs, "record", fail_at_four)
    with pytest.raises(LoadError, match="failed as told"):
        open_session(plan, **SPEC)
    assert left_at_release == [(2, 0)]
    assert gpu.live() == before
