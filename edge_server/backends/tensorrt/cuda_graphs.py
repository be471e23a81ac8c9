"""CUDA graphs of one instance: one recorded run per batch size, replayed in one launch. See `cuda_graph_sizes`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_server.backends.base import Array
from edge_server.backends.tensorrt.bindings import Bindings, ExecutionLane
from edge_server.backends.tensorrt.cuda_driver import Context
from edge_server.backends.tensorrt.cuda_graph_sizes import padded_size
from edge_server.backends.tensorrt.engine_profiles import EngineProfiles
from edge_server.backends.tensorrt.library_adapter import EngineFault, TensorRTLibrary
from edge_server.core.device_tensor import DeviceArray
from edge_server.core.tensorrt_engine import Shape


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """`rows` are those of a batch, None for a model that does not batch. A recording holds for one shape and its
    addresses, so each has an execution context of its own."""

    lane: ExecutionLane
    graph: int
    rows: int | None


class CudaGraphs:
    """By batch size, 0 for a model that does not batch. All execution contexts of the instance share one scratch
    memory, the plain one too: they never run at the same time. Used within the device's context, by one thread."""

    def __init__(
        self,
        library: TensorRTLibrary,
        context: Context,
        bindings: Bindings,
        profiles: EngineProfiles,
        *,
        has_rows: bool,
    ) -> None:
        self._library = library
        self._context = context
        self._bindings = bindings
        self._profiles = profiles
        self._skip = 1 if has_rows else 0
        self._by_size: dict[int, CudaGraph] = {}
        self._most: dict[str, Shape] = {}
        self._scratch = 0

    def are_possible(self) -> bool:
        """Return whether all shapes follow from the number of rows, and none from values."""
        return not self._bindings.has_values and self._profiles.are_fixed(self._skip)

    def share_memory(self, engine: Any, plain: ExecutionLane) -> None:
        """Allocate the scratch memory, and have the plain execution context use it; called before any `record`.

        Raises CudaFault.
        """
        first = self._profiles[self._profiles.first]
        self._most = {name: first[name].most for name in self._bindings.inputs}
        size = self._library.scratch_bytes(engine)
        self._scratch = self._context.allocate(size)
        self._library.give_memory(plain.context, self._scratch, size)

    def record(self, engine: Any, stream: int, rows: int) -> None:
        """Record the execution of one batch size, after one run of it that is not recorded. All tensors have memory.

        Nothing happens where no profile takes the size, or an output's size depends on the data. Raises EngineFault.
        """
        shapes = {name: self._sized(name, rows) for name in self._bindings.inputs}
        number = self._profiles.for_shapes(shapes)
        if number is None or self._bindings.growers:
            return
        lane = ExecutionLane(self._library, engine, self._bindings, stream, len(self._profiles), has_own_memory=False)
        self._library.give_memory(lane.context, self._scratch, self._library.scratch_bytes(engine))
        lane.use_profile(number)
        for name, shape in shapes.items():
            lane.context.set_input_shape(name, shape)
        lane.set_addresses()
        lane.execute()
        self._context.synchronise(stream)
        self._context.begin_capture(stream)
        try:
            with self._library.logger.heard() as heard:
                is_done = lane.context.execute_async_v3(stream)
        finally:
            graph = self._context.end_capture(stream)
        if not is_done or not graph:
            raise EngineFault(
                f"batch size {rows} cannot be recorded as a CUDA graph: {heard.words() or 'no reason given'}"
            )
        self._by_size[rows] = CudaGraph(lane, graph, rows or None)

    def find(self, inputs: Mapping[str, Array | DeviceArray], rows: int) -> CudaGraph | None:
        """Return the recording that takes inputs of so many rows, None when there is none."""
        size = padded_size(tuple(self._by_size), rows)
        if size is None:
            return None
        skip, names = self._skip, self._bindings.inputs
        fits = all(inputs[name].shape[skip:] == self._sized(name, size)[skip:] for name in names)
        fits = fits and all(len(inputs[name]) == rows for name in names if skip)
        return self._by_size[size] if fits else None

    def drop(self) -> None:
        """Let go of recordings and their execution contexts; the memory is given back by `free`, after the others'."""
        for recording in self._by_size.values():
            self._context.destroy_graph(recording.graph)
            recording.lane.drop()
        self._by_size.clear()

    def free(self) -> None:
        """Give the scratch memory back."""
        if self._scratch:
            self._context.free(self._scratch)
        self._scratch = 0

    def _sized(self, name: str, rows: int) -> Shape:
        most = self._most[name]
        return (rows, *most[1:]) if rows and self._skip else most
