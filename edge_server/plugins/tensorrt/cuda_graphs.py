"""CUDA graphs of one model instance: records the execution of some batch sizes, and replays the one that fits a batch.

A recorded execution is launched as a whole instead of kernel by kernel. The configuration enables graphs as in Triton,
`optimization { cuda { graphs: true } }`, with `graph_spec { batch_size: 4 }` for each size; or with onnxruntime's
parameter `trt_cuda_graph_enable`. Without sizes these are recorded: 1, the preferred batch sizes, and max_batch_size. A
batch between two sizes is padded with rows of zeros to the next size, because rows of a batch do not depend on each
other. A size that cannot be recorded is left out, with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_server.backends.base import Array
from edge_server.backends.cuda.cuda_ctypes import CudaContext, CudaFault
from edge_server.backends.option_parsers import yes_or_no
from edge_server.core.device_tensor import DeviceArray
from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BadModelConfig
from edge_server.plugins.tensorrt.engine_order import Shape
from edge_server.plugins.tensorrt.execution_context import Bindings, ExecutionContext
from edge_server.plugins.tensorrt.library_adapter import EngineFault, TensorRTLibrary
from edge_server.plugins.tensorrt.optimization_profiles import EngineProfiles


def configured_graph_sizes(spec: ModelSpec) -> tuple[int, ...]:
    """Return the batch sizes to record, ascending; none if graphs are off. 0 stands for a model without batching.

    Raises BadModelConfig.
    """
    cuda: dict[str, Any] = json.loads(spec.config_json).get("optimization", {}).get("cuda", {})
    is_enabled = bool(cuda.get("graphs")) or yes_or_no(spec.name, spec.parameters, "trt_cuda_graph_enable", False)
    if not is_enabled:
        return ()
    configured = sorted({int(item.get("batch_size", 0)) for item in cuda.get("graph_spec", [])})
    if spec.max_batch_size == 0:
        return (0,)
    for size in configured:
        if not 1 <= size <= spec.max_batch_size:
            raise BadModelConfig(
                f"model '{spec.name}': graph_spec batch_size: expected 1 to max_batch_size {spec.max_batch_size}, "
                f"given {size}"
            )
    if configured:
        return tuple(configured)
    preferred = spec.dynamic_batching.preferred_batch_sizes if spec.dynamic_batching is not None else ()
    return tuple(sorted({1, spec.max_batch_size, *(size for size in preferred if size <= spec.max_batch_size)}))


def padded_size(sizes: Sequence[int], rows: int) -> int | None:
    """Return the smallest recorded size for this number of rows, None if there is none. `sizes` must ascend."""
    return next((size for size in sizes if size >= rows), None)


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """One recording. `rows` is its batch size, None for a model without batching.

    A recording is valid for one shape and its addresses, so each has an execution context of its own.
    """

    execution: ExecutionContext
    graph: int
    rows: int | None


class CudaGraphs:
    """The recordings of one instance, by batch size (0 for a model without batching).

    All execution contexts of the instance, with and without a recording, share one scratch memory, because they never
    run at the same time. Used within the device's context, by one thread.
    """

    def __init__(
        self,
        library: TensorRTLibrary,
        context: CudaContext,
        bindings: Bindings,
        profiles: EngineProfiles,
        *,
        has_rows: bool,
    ) -> None:
        self._library = library
        self._context = context
        self._bindings = bindings
        self._profiles = profiles
        self._row_dims = 1 if has_rows else 0
        self._by_size: dict[int, CudaGraph] = {}
        self._largest: dict[str, Shape] = {}
        self._scratch = 0

    def are_possible(self) -> bool:
        """Return whether all shapes depend on the number of rows alone, and none on values of tensors."""
        return not self._bindings.has_shape_tensors and self._profiles.are_fixed(self._row_dims)

    def share_memory(self, engine: Any, plain: ExecutionContext) -> None:
        """Allocate the scratch memory, and give it to the plain execution context. Call it before `record`.

        Raises CudaFault.
        """
        first = self._profiles[self._profiles.first]
        self._largest = {name: first[name].most for name in self._bindings.inputs}
        size = self._library.scratch_bytes(engine)
        self._scratch = self._context.allocate(size)
        self._library.set_context_memory(plain.context, self._scratch, size)

    def record(self, engine: Any, stream: int, rows: int) -> None:
        """Record the execution of one batch size, after one run without recording. All tensors must have memory.

        Raises EngineFault and CudaFault if it cannot be recorded. The stream can still be used, unless the CUDA context
        is lost.
        """
        shapes = {name: self._shape_for(name, rows) for name in self._bindings.inputs}
        number = self._profiles.for_shapes(shapes)
        if number is None or self._bindings.dynamic_outputs:
            raise EngineFault("no profile takes it" if number is None else "the size of an output depends on the data")
        execution = ExecutionContext(
            self._library, engine, self._bindings, stream, len(self._profiles), has_own_memory=False
        )
        try:
            scratch_bytes = self._library.scratch_bytes(engine)
            self._library.set_context_memory(execution.context, self._scratch, scratch_bytes)
            execution.use_profile(number)
            for name, shape in shapes.items():
                execution.context.set_input_shape(name, shape)
            execution.set_addresses()
            execution.execute()
            self._context.synchronise(stream)
            graph = self._capture(execution, stream)
        except BaseException:
            execution.destroy()
            raise
        self._by_size[rows] = CudaGraph(execution, graph, rows or None)

    def _capture(self, execution: ExecutionContext, stream: int) -> int:
        """Return the graph of one run. Raises EngineFault with the reasons of TensorRT and CUDA."""
        self._context.begin_capture(stream)
        graph, broken = 0, ""
        with self._library.logger.captured() as errors:
            try:
                is_done = execution.context.execute_async_v3(stream)
            finally:
                # Always ended, or the stream stays in capture mode. A capture that TensorRT broke ends with an error.
                try:
                    graph = self._context.end_capture(stream)
                except CudaFault as error:
                    broken = str(error)
        if is_done and graph:
            return graph
        if graph:
            self._context.destroy_graph(graph)
        raise EngineFault("; ".join(filter(None, (errors.text(), broken))) or "no reason given")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The recorded batch sizes."""
        return tuple(self._by_size)

    def find(self, inputs: Mapping[str, Array | DeviceArray], rows: int) -> CudaGraph | None:
        """Return the recording for inputs with this number of rows, None if there is none."""
        size = padded_size(self.sizes, rows)
        if size is None:
            return None
        skip, names = self._row_dims, self._bindings.inputs
        fits = all(inputs[name].shape[skip:] == self._shape_for(name, size)[skip:] for name in names)
        fits = fits and all(len(inputs[name]) == rows for name in names if skip)
        return self._by_size[size] if fits else None

    def destroy(self) -> None:
        """Destroy the recordings and their execution contexts. `free` frees the scratch memory after all contexts."""
        for recording in self._by_size.values():
            self._context.destroy_graph(recording.graph)
            recording.execution.destroy()
        self._by_size.clear()

    def free(self) -> None:
        """Free the scratch memory."""
        if self._scratch:
            self._context.free(self._scratch)
        self._scratch = 0

    def _shape_for(self, name: str, rows: int) -> Shape:
        largest = self._largest[name]
        return (rows, *largest[1:]) if rows and self._row_dims else largest
