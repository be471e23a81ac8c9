"""TensorRT session: one instance with its own stream and execution context on a shared engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_server.backends.base import Array, Session, SessionInfo
from edge_server.backends.runtime_library import words
from edge_server.backends.tensorrt.bindings import Bindings, ExecutionLane
from edge_server.backends.tensorrt.cuda_driver import Context, CudaFault
from edge_server.backends.tensorrt.cuda_graphs import CudaGraphs
from edge_server.backends.tensorrt.engine_profiles import EngineProfiles
from edge_server.backends.tensorrt.library_adapter import EngineFault, TensorInfo, TensorRTLibrary
from edge_server.backends.tensorrt.shape_tensors import check_marks
from edge_server.core.device_tensor import DeviceArray, DevicePiece
from edge_server.core.tensor import DType
from edge_server.core.tensorrt_engine import Shape
from edge_server.errors import BackendError, EdgeServerError, OutOfMemory, SessionLost

_FAULTS = (EngineFault, CudaFault, RuntimeError, TypeError, ValueError, OverflowError)
"""What TensorRT, its bindings and the driver raise."""

_NOWHERE: Mapping[str, DevicePiece] = {}


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How an engine is used. `dtypes` are those that requests and answers have, by tensor's name, where they may differ
    from the engine's (TensorRT before 10 has no 64-bit integers). `shape_tensors` says by tensor's name whether it must
    be one of values that are shapes; what is not in there may be either. `allowed` are numbers of profiles, () for all.
    `graph_sizes`: see graphs.captured_sizes."""

    model: str
    has_rows: bool
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    shape_tensors: Mapping[str, bool] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()
    graph_sizes: tuple[int, ...] = ()
    is_mapped: bool = False
    device_id: int = 0


class TensorRTSession(Session):
    """See base.Session. Everything happens within the device's primary context, on one stream."""

    def __init__(
        self,
        library: TensorRTLibrary,
        engine: Any,
        context: Context,
        terms: EngineUse,
        info: SessionInfo,
        release: Callable[[], None],
    ) -> None:
        """`release` gives back the engine's share; called within the context, once, at the end. Raises EngineFault and
        CudaFault; the engine's share is given back then too, the context is not."""
        self.info = info
        self.takes_device_memory = not terms.is_mapped
        self._library = library
        self._context = context
        self._terms = terms
        self._release = release
        try:
            tensors = library.tensors(engine)
            self._bindings = Bindings(tensors, context, is_mapped=terms.is_mapped)
            given = tuple(self._bindings.inputs.values())
            self._profiles = EngineProfiles(library, engine, given, terms.allowed)
        except BaseException:
            release()
            raise
        self._inputs, self._outputs, self._slots = self._bindings.inputs, self._bindings.outputs, self._bindings.slots
        self._plain: ExecutionLane | None = None
        self._recordings: CudaGraphs | None = None
        """None where each run is launched kernel by kernel."""
        self._stream = 0
        self._engine: Any = engine
        with context.current():
            try:
                self._open(tensors)
            except BaseException:
                self._drop()
                raise

    # -- opening ------------------------------------------------------------------------------------------------------

    def _open(self, tensors: Sequence[TensorInfo]) -> None:
        self._profiles.check_allowed()
        check_marks(tensors, self._terms.shape_tensors)
        self._stream = self._context.make_stream()
        recordings = self._make_recordings()
        plain = self._plain = ExecutionLane(
            self._library, self._engine, self._bindings, self._stream, len(self._profiles),
            has_own_memory=recordings is None,
        )  # fmt: skip
        if recordings is not None:
            recordings.share_memory(self._engine, plain)
        plain.use_profile(self._profiles.first)
        self._make_room(plain)
        if recordings is not None:
            for rows in self._terms.graph_sizes:
                recordings.record(self._engine, self._stream, rows)

    def _make_recordings(self) -> CudaGraphs | None:
        terms = self._terms
        if not terms.graph_sizes:
            return None
        recordings = CudaGraphs(self._library, self._context, self._bindings, self._profiles, has_rows=terms.has_rows)
        if recordings.are_possible():
            self._recordings = recordings
        return self._recordings

    def _make_room(self, plain: ExecutionLane) -> None:
        """Have memory for the largest shapes, so that addresses stay: recordings hold them. Outputs whose size depends
        on the data get an allocator."""
        for number in self._profiles.allowed:
            profile = self._profiles[number]
            plain.use_profile(number)
            for name in self._inputs:
                if name in profile:
                    self._slots[name].make_room(profile[name].most)
                    plain.context.set_input_shape(name, profile[name].most)
            for name, shape in plain.output_shapes().items():
                if min(shape, default=0) >= 0:
                    self._slots[name].make_room(shape)
        self._bindings.grow_the_rest(self._library)
        plain.use_profile(self._profiles.first)

    @property
    def output_names(self) -> list[str]:
        return list(self._outputs)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        # Without targets all of it comes back as arrays of the host.
        return self._translated(self._run, inputs, outputs)  # type: ignore[return-value]

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], outputs: Sequence[str], targets: Mapping[str, DevicePiece]
    ) -> dict[str, Array | DeviceArray]:
        return self._translated(self._run_there, inputs, outputs, targets)

    def _run_there(
        self, inputs: Mapping[str, Array | DeviceArray], outputs: Sequence[str], targets: Mapping[str, DevicePiece]
    ) -> dict[str, Array | DeviceArray]:
        usable = {name: self._usable(name, array) for name, array in inputs.items()}
        try:
            return self._run(usable, outputs, targets)
        except BaseException:
            # What was begun still reads the client's memory, which is given back once this is told.
            with contextlib.suppress(CudaFault):
                self._context.synchronise(self._stream)
            raise
        finally:
            self._bindings.end_loans()

    def _usable(self, name: str, array: Array | DeviceArray) -> Array | DeviceArray:
        if not isinstance(array, DeviceArray):
            return array
        slot = self._slots.get(name)
        return array if slot is not None and slot.can_take(array, self._terms.device_id) else array.host()

    def _translated(
        self, run: Callable[..., dict[str, Array | DeviceArray]], *given: object
    ) -> dict[str, Array | DeviceArray]:
        failure: EdgeServerError
        try:
            with self._context.current():
                return run(*given)
        except CudaFault as error:
            failure = self._of_driver(error)
        except _FAULTS as error:
            failure = BackendError(f"model '{self._terms.model}': {self._library.name}: {words(error)}")
        raise failure

    def _of_driver(self, error: CudaFault) -> EdgeServerError:
        said = f"model '{self._terms.model}': CUDA: {words(error)}"
        if error.is_context_lost:
            return SessionLost(f"{said}; the process has lost the GPU and must be started anew")
        return OutOfMemory(said) if error.is_out_of_memory else BackendError(said)

    def _run(
        self,
        inputs: Mapping[str, Array | DeviceArray],
        outputs: Sequence[str],
        targets: Mapping[str, DevicePiece] = _NOWHERE,
    ) -> dict[str, Array | DeviceArray]:
        absent = self._inputs.keys() - inputs.keys()
        if absent:
            raise EngineFault(f"input '{min(absent)}' is missing")
        recording = keep = None
        if self._recordings is not None:
            # Where there are recordings, no input is one of values: every one has the rows of the batch.
            rows = len(next(iter(inputs.values()))) if self._terms.has_rows and inputs else 0
            recording = self._recordings.find(inputs, rows)
        if recording is None:
            shapes = self._run_plain(inputs)
        else:
            for name in self._inputs:
                self._slots[name].put(inputs[name], self._stream, recording.rows, is_recorded=True)
            self._context.launch(recording.graph, self._stream)
            shapes = recording.lane.output_shapes()
            keep = rows if recording.rows is not None else None
        placed = self._hand_over(targets, shapes, outputs, keep) if targets else {}
        for name in outputs:
            if name not in placed:
                self._slots[name].fetch(shapes[name], self._stream)
        self._context.synchronise(self._stream)
        return {
            name: placed[name] if name in placed else self._slots[name].take(shapes[name], self._dtype(name), keep)
            for name in outputs
        }

    def _hand_over(
        self, targets: Mapping[str, DevicePiece], shapes: Mapping[str, Shape], outputs: Sequence[str], rows: int | None
    ) -> dict[str, DeviceArray]:
        """Begin to write outputs to clients' memory on the GPU; return those where that is possible."""
        found: dict[str, DeviceArray] = {}
        for name in targets.keys() & set(outputs):
            shape = shapes[name] if rows is None else (rows, *shapes[name][1:])
            terms, slot = self._terms, self._slots[name]
            array = slot.hand_over(shape, self._dtype(name), targets[name], terms.device_id, self._stream)
            if array is not None:
                found[name] = array
        return found

    def _run_plain(self, inputs: Mapping[str, Array | DeviceArray]) -> dict[str, Shape]:
        """Launch the engine, and return the shapes of its outputs."""
        lane, growers = self._plain, self._bindings.growers
        assert lane is not None, "made when the session was opened"
        shapes = {name: inputs[name].shape for name in self._inputs}
        lane.use_profile(self._profiles.for_inputs(inputs, shapes, lane.profile))
        with self._library.logger.heard() as heard:
            for name in self._inputs:
                slot = self._slots[name]
                slot.make_room(shapes[name])
                slot.put(inputs[name], self._stream)
                # A false answer is of no shape that TensorRT takes; `infer_shapes` and the run would say less.
                if not slot.info.is_on_host and not lane.context.set_input_shape(name, shapes[name]):
                    raise EngineFault(heard.words() or f"input '{name}' cannot have the shape {list(shapes[name])}")
                lane.context.set_tensor_address(name, slot.address)
            unknown = lane.context.infer_shapes()
            if unknown:
                raise EngineFault(heard.words() or f"the shape of '{unknown[0]}' cannot be told")
        known = lane.output_shapes()
        for name, shape in known.items():
            if name not in growers:
                self._slots[name].make_room(shape)
        lane.set_addresses()
        for grower, _ in growers.values():
            grower.begin()
        lane.execute()
        if growers:
            # Shapes that depend on data are told while the stream works.
            self._context.synchronise(self._stream)
        for name, (grower, _) in growers.items():
            if grower.fault is not None:
                raise grower.fault
            known[name] = grower.shape
        return known

    def _dtype(self, name: str) -> DType:
        return self._terms.dtypes.get(name, self._outputs[name].dtype)

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        # A device that is gone cannot be tidied up.
        with contextlib.suppress(CudaFault), self._context.current():
            self._drop()
        with contextlib.suppress(CudaFault):
            self._context.close()

    def _drop(self) -> None:
        """Let go of everything, newest first: TensorRT's objects end within the context that they were made in."""
        if self._recordings is not None:
            self._recordings.drop()
        if self._plain is not None:
            self._plain.drop()
        self._bindings.free()
        if self._recordings is not None:
            self._recordings.free()
        if self._stream:
            self._context.destroy_stream(self._stream)
        self._stream = 0
        self._engine = None
        self._release()
