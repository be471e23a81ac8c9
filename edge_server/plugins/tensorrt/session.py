"""Session of one TensorRT instance: runs batches on an engine that a device's instances share, with its own CUDA
stream."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edge_server.backends.base import Array, Session, SessionInfo
from edge_server.backends.cuda.cuda_ctypes import CudaContext, CudaFault
from edge_server.backends.runtime_errors import message_line
from edge_server.core.device_tensor import DeviceArray, DevicePiece
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, EdgeServerError, InvalidRequest, OutOfMemory, SessionLost
from edge_server.plugins.tensorrt.cuda_graphs import CudaGraphs
from edge_server.plugins.tensorrt.engine_order import Shape
from edge_server.plugins.tensorrt.execution_context import Bindings, ExecutionContext
from edge_server.plugins.tensorrt.library_adapter import EngineFault, ShapeFault, TensorInfo, TensorRTLibrary
from edge_server.plugins.tensorrt.optimization_profiles import EngineProfiles

log = logging.getLogger(__name__)

_FAULTS = (EngineFault, CudaFault, RuntimeError, TypeError, ValueError, OverflowError)
"""Exceptions of TensorRT, its bindings and the driver."""

_NO_TARGETS: Mapping[str, DevicePiece] = {}


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Use of an engine for one model.

    `dtypes`: the types of requests and responses by tensor name, where they may differ from the engine's (TensorRT
    before 10 has no 64-bit integers). `shape_tensors`: by tensor name, whether it must be a shape tensor; others may be
    either. `allowed`: numbers of the allowed profiles, () for all. `graph_sizes`: see
    cuda_graphs.configured_graph_sizes. `shares_profiles`: see TensorRTLibrary.shares_profiles. `is_mapped`: the GPU
    shares the CPU's memory.
    """

    model: str
    has_rows: bool
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    shape_tensors: Mapping[str, bool] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()
    graph_sizes: tuple[int, ...] = ()
    shares_profiles: bool = True
    is_mapped: bool = False
    device_id: int = 0


class TensorRTSession(Session):
    """See base.Session. All work happens within the device's primary context, on one stream."""

    is_repeatable = True

    def __init__(
        self,
        library: TensorRTLibrary,
        engine: Any,
        context: CudaContext,
        use: EngineUse,
        info: SessionInfo,
        release: Callable[[], None],
    ) -> None:
        """`release` releases the share in the engine. It is called once at the end, within the context.

        Raises EngineFault and CudaFault. The share is released then, the context is not.
        """
        self.info = info
        self.takes_device_memory = not use.is_mapped
        self._library = library
        self._context = context
        self._use = use
        self._release = release
        try:
            tensors = library.tensors(engine)
            self._bindings = Bindings(tensors, context, is_mapped=use.is_mapped)
            inputs = tuple(self._bindings.inputs.values())
            self._profiles = EngineProfiles(library, engine, inputs, use.allowed)
        except BaseException:
            release()
            raise
        self._inputs, self._outputs = self._bindings.inputs, self._bindings.outputs
        if self._bindings.converted:
            formats = ", ".join(f"{item.name}: {item.format}" for item in self._bindings.converted)
            self._add_option("formats", formats)
        self._buffers = self._bindings.buffers
        self._plain: ExecutionContext | None = None
        self._graphs: CudaGraphs | None = None
        """None if every run is launched kernel by kernel."""
        self._stream = 0
        self._engine: Any = engine
        with context.current():
            try:
                self._open(tensors)
            except BaseException:
                self._free_all()
                raise

    # -- opening ------------------------------------------------------------------------------------------------------

    def _open(self, tensors: Sequence[TensorInfo]) -> None:
        self._profiles.check_allowed()
        for item in tensors:
            is_marked = self._use.shape_tensors.get(item.name, item.is_on_host)
            if is_marked != item.is_on_host:
                raise EngineFault(
                    f"{'input' if item.is_input else 'output'} '{item.name}' is {'a' if item.is_on_host else 'no'} "
                    f"shape tensor, the configuration says is_shape_tensor: {str(is_marked).lower()}"
                )
        self._stream = self._context.create_stream()
        graphs, reason = self._make_graphs()
        left_out = dict.fromkeys(self._use.graph_sizes, reason) if reason else {}
        self._graphs = graphs
        plain = self._plain = ExecutionContext(
            self._library, self._engine, self._bindings, self._stream, len(self._profiles),
            has_own_memory=graphs is None,
        )  # fmt: skip
        if graphs is not None:
            graphs.share_memory(self._engine, plain)
        plain.use_profile(self._profiles.first)
        self._reserve_buffers(plain)
        self._bindings.add_output_allocators(self._library)
        plain.use_profile(self._profiles.first)
        if graphs is not None:
            for rows in self._use.graph_sizes:
                try:
                    graphs.record(self._engine, self._stream, rows)
                except (EngineFault, CudaFault) as error:
                    if isinstance(error, CudaFault) and error.is_context_lost:
                        raise
                    left_out[rows] = message_line(error)
            self._add_option("cuda_graphs", ",".join(map(str, graphs.sizes)))
        if left_out:
            log.warning(
                "model '%s': no CUDA graph for the batch sizes %s, which run without one: %s", self._use.model,
                ", ".join(map(str, left_out)), "; ".join(dict.fromkeys(left_out.values())),
            )  # fmt: skip

    def _make_graphs(self) -> tuple[CudaGraphs | None, str]:
        """Return the recorder of CUDA graphs, or None and the reason; without sizes to record there is no reason."""
        if not self._use.graph_sizes:
            return None, ""
        if not self._use.shares_profiles:
            return None, (
                f"{self._library.name} {self._library.version} allows only one execution context for a profile of "
                "this plan; version 10 allows more, and 8.6 for an engine that the server builds from an ONNX file"
            )
        has_rows = self._use.has_rows
        graphs = CudaGraphs(self._library, self._context, self._bindings, self._profiles, has_rows=has_rows)
        if not graphs.are_possible():
            return None, "it has shape tensors, or sizes besides the rows that vary"
        return graphs, ""

    def _reserve_buffers(self, plain: ExecutionContext) -> None:
        """Reserve memory for the largest shapes, so that addresses do not change: recordings contain them."""
        for number in self._profiles.allowed:
            profile = self._profiles[number]
            plain.use_profile(number)
            largest = {name: profile[name].most for name in self._inputs if name in profile}
            for name, shape in largest.items():
                plain.context.set_input_shape(name, shape)
            known = {name: shape for name, shape in plain.output_shapes().items() if min(shape, default=0) >= 0}
            plain.set_strides(largest.keys() | known.keys())
            for name, shape in {**largest, **known}.items():
                self._buffers[name].reserve(shape)

    def _add_option(self, name: str, value: str) -> None:
        self.info = replace(self.info, options={**self.info.options, name: value})

    @property
    def output_names(self) -> list[str]:
        return list(self._outputs)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        # Without targets all outputs are arrays on the host.
        return self._run_in_context(self._run, inputs, outputs)  # type: ignore[return-value]

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], outputs: Sequence[str], targets: Mapping[str, DevicePiece]
    ) -> dict[str, Array | DeviceArray]:
        return self._run_in_context(self._run_with_targets, inputs, outputs, targets)

    def _run_with_targets(
        self, inputs: Mapping[str, Array | DeviceArray], outputs: Sequence[str], targets: Mapping[str, DevicePiece]
    ) -> dict[str, Array | DeviceArray]:
        usable: dict[str, Array | DeviceArray] = {}
        for name, array in inputs.items():
            if isinstance(array, DeviceArray):
                buffer = self._buffers.get(name)
                if buffer is None or not buffer.can_use(array, self._use.device_id):
                    array = array.host()
            usable[name] = array
        try:
            return self._run(usable, outputs, targets)
        except BaseException:
            # Copies may still read the client's memory, which the caller releases after this.
            with contextlib.suppress(CudaFault):
                self._context.synchronise(self._stream)
            raise
        finally:
            self._bindings.release_borrowed()

    def _run_in_context(
        self, run: Callable[..., dict[str, Array | DeviceArray]], *arguments: object
    ) -> dict[str, Array | DeviceArray]:
        """Call `run` within the device's context. Raises EdgeServerError for any fault of CUDA or TensorRT."""
        failure: EdgeServerError
        try:
            with self._context.current():
                return run(*arguments)
        except CudaFault as error:
            said = f"model '{self._use.model}': CUDA: {message_line(error)}"
            if error.is_context_lost:
                failure = SessionLost(f"{said}; the process has lost the GPU and must be started anew")
            else:
                failure = OutOfMemory(said) if error.is_out_of_memory else BackendError(said)
        except ShapeFault as error:
            failure = InvalidRequest(f"model '{self._use.model}': {self._library.name}: {message_line(error)}")
        except _FAULTS as error:
            failure = BackendError(f"model '{self._use.model}': {self._library.name}: {message_line(error)}")
        raise failure

    def _run(
        self,
        inputs: Mapping[str, Array | DeviceArray],
        outputs: Sequence[str],
        targets: Mapping[str, DevicePiece] = _NO_TARGETS,
    ) -> dict[str, Array | DeviceArray]:
        absent = self._inputs.keys() - inputs.keys()
        if absent:
            raise EngineFault(f"input '{min(absent)}' is missing")
        recording = keep = None
        if self._graphs is not None:
            # With recordings there are no shape tensors, so every input has the rows of the batch.
            rows = len(next(iter(inputs.values()))) if self._use.has_rows and inputs else 0
            recording = self._graphs.find(inputs, rows)
        if recording is None:
            shapes = self._run_plain(inputs)
        else:
            recording.execution.set_strides(self._buffers)
            for name in self._inputs:
                self._buffers[name].upload(inputs[name], self._stream, recording.rows, is_recorded=True)
            self._context.launch_graph(recording.graph, self._stream)
            shapes = recording.execution.output_shapes()
            keep = rows if recording.rows is not None else None
        placed = self._copy_to_targets(targets, shapes, outputs, keep) if targets else {}
        for name in outputs:
            if name not in placed:
                self._buffers[name].download(shapes[name], self._stream)
        self._context.synchronise(self._stream)
        return {
            name: placed[name]
            if name in placed
            else self._buffers[name].copy_downloaded(shapes[name], self._dtype(name), keep)
            for name in outputs
        }

    def _copy_to_targets(
        self, targets: Mapping[str, DevicePiece], shapes: Mapping[str, Shape], outputs: Sequence[str], rows: int | None
    ) -> dict[str, DeviceArray]:
        """Start to copy outputs to clients' memory on the GPU. Return the ones for which that is possible."""
        found: dict[str, DeviceArray] = {}
        for name in targets.keys() & set(outputs):
            shape = shapes[name] if rows is None else (rows, *shapes[name][1:])
            buffer, device_id = self._buffers[name], self._use.device_id
            array = buffer.copy_to_target(shape, self._dtype(name), targets[name], device_id, self._stream)
            if array is not None:
                found[name] = array
        return found

    def _run_plain(self, inputs: Mapping[str, Array | DeviceArray]) -> dict[str, Shape]:
        """Launch the engine without a recording, and return the shapes of its outputs."""
        plain, dynamic_outputs = self._plain, self._bindings.dynamic_outputs
        assert plain is not None, "made when the session was opened"
        shapes = {name: inputs[name].shape for name in self._inputs}
        number = self._profiles.for_inputs(inputs, shapes, plain.profile, has_rows=self._use.has_rows)
        plain.use_profile(number)
        with self._library.logger.captured() as errors:
            for name in self._inputs:
                # False means that TensorRT cannot take the shape. `infer_shapes` and the run would report less.
                is_on_host = self._inputs[name].is_on_host
                if not is_on_host and not plain.context.set_input_shape(name, shapes[name]):
                    raise EngineFault(errors.text() or f"input '{name}' cannot have the shape {list(shapes[name])}")
            plain.set_strides(self._inputs)
            for name in self._inputs:
                buffer = self._buffers[name]
                buffer.reserve(shapes[name])
                buffer.upload(inputs[name], self._stream)
                plain.context.set_tensor_address(name, buffer.address)
            unknown = plain.context.infer_shapes()
            if unknown:
                raise EngineFault(errors.text() or f"the shape of '{unknown[0]}' cannot be told")
        known = plain.output_shapes()
        plain.set_strides(self._outputs)
        for name, shape in known.items():
            if name not in dynamic_outputs:
                self._buffers[name].reserve(shape)
        plain.set_addresses()
        for output, _ in dynamic_outputs.values():
            output.reset()
        plain.execute()
        if dynamic_outputs:
            # Their shapes are known only after the run.
            self._context.synchronise(self._stream)
        for name, (output, _) in dynamic_outputs.items():
            if output.fault is not None:
                raise output.fault
            known[name] = output.shape
        return known

    def _dtype(self, name: str) -> DType:
        return self._use.dtypes.get(name, self._outputs[name].dtype)

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        # On a device that is lost nothing can be freed.
        with contextlib.suppress(CudaFault), self._context.current():
            self._free_all()
        with contextlib.suppress(CudaFault):
            self._context.close()

    def _free_all(self) -> None:
        """Free everything, newest first: TensorRT's objects must end within their context."""
        if self._graphs is not None:
            self._graphs.destroy()
        if self._plain is not None:
            self._plain.destroy()
        self._bindings.free()
        if self._graphs is not None:
            self._graphs.free()
        if self._stream:
            self._context.destroy_stream(self._stream)
        self._stream = 0
        self._engine = None
        self._release()
