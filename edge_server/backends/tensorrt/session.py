"""One instance: a stream and an execution context of its own on an engine that instances of a device share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from edge_server.backends.base import Array, Session, SessionInfo
from edge_server.backends.runtime import words
from edge_server.backends.tensorrt.adapter import EngineFault, Library, TensorInfo
from edge_server.backends.tensorrt.buffers import Grower, Slot
from edge_server.backends.tensorrt.cuda import Context, CudaFault
from edge_server.backends.tensorrt.graphs import padded_size
from edge_server.backends.tensorrt.profiles import choose, misfit
from edge_server.backends.tensorrt.values import check_marks, values_of
from edge_server.core.device import DeviceArray, DevicePiece
from edge_server.core.engine import Profile, Shape
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, EdgeServerError, OutOfMemory, SessionLost
from edge_server.records import dataclass

_FAULTS = (EngineFault, CudaFault, RuntimeError, TypeError, ValueError, OverflowError)
"""What TensorRT, its bindings and the driver raise."""

_NOWHERE: Mapping[str, DevicePiece] = {}


@dataclass(frozen=True, slots=True)
class Terms:
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


@dataclass(slots=True)
class Lane:
    """An execution context in one state. `graph` is its recording, 0 where each run is launched kernel by kernel;
    a recording holds for one shape, so each has a context of its own."""

    context: Any
    rows: int | None = None
    graph: int = 0
    profile: int = -1


class TensorRTSession(Session):
    """See base.Session. Everything happens within the device's primary context, on one stream."""

    def __init__(
        self,
        library: Library,
        engine: Any,
        context: Context,
        terms: Terms,
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
        tensors = library.tensors(engine)
        self._inputs = {item.name: item for item in tensors if item.is_input}
        self._outputs = {item.name: item for item in tensors if not item.is_input}
        given = tuple(self._inputs.values())
        self._profiles: tuple[Profile, ...] = library.profiles(engine, given)
        self._of_values = tuple(item.name for item in given if item.is_on_host)
        self._choices = self._profiles
        """As the profiles, with the values of inputs whose values are shapes."""
        if self._of_values:
            values = library.value_profiles(engine, given)
            self._choices = tuple({**one, **other} for one, other in zip(self._profiles, values, strict=True))
        self._allowed = terms.allowed or tuple(range(len(self._profiles)))
        self._slots: dict[str, Slot] = {}
        self._growers: dict[str, tuple[Grower, Any]] = {}
        self._lanes: dict[int, Lane] = {}
        self._scratch = 0
        self._stream = 0
        self._engine: Any = engine
        self._plain = Lane(None)
        with context.current():
            try:
                self._open(tensors)
            except BaseException:
                self._drop()
                raise

    # -- opening ------------------------------------------------------------------------------------------------------

    def _open(self, tensors: Sequence[TensorInfo]) -> None:
        missing = [number for number in self._allowed if not 0 <= number < len(self._profiles)]
        if missing:
            raise EngineFault(
                f"it has {len(self._profiles)} profile(s), the instance group asks for number {missing[0]}"
            )
        check_marks(tensors, self._terms.shape_tensors)
        self._stream = self._context.make_stream()
        for item in tensors:
            self._slots[item.name] = Slot(item, self._context, is_mapped=self._terms.is_mapped)
        shares_memory = bool(self._terms.graph_sizes) and self._can_be_recorded()
        self._plain = Lane(self._library.make_context(self._engine, has_own_memory=not shares_memory))
        if shares_memory:
            size = self._library.scratch_bytes(self._engine)
            self._scratch = self._context.allocate(size)
            self._library.give_memory(self._plain.context, self._scratch, size)
        self._set_profile(self._plain, self._allowed[0])
        self._make_room()
        if shares_memory:
            for rows in self._terms.graph_sizes:
                self._record(rows)

    def _can_be_recorded(self) -> bool:
        """Return whether all shapes follow from the number of rows, and none from values."""
        is_plain = not any(item.is_on_host for item in (*self._inputs.values(), *self._outputs.values()))
        skip = 1 if self._terms.has_rows else 0
        fixed = all(
            one.least[skip:] == one.most[skip:] for number in self._allowed for one in self._profiles[number].values()
        )
        return is_plain and fixed

    def _make_room(self) -> None:
        """Have memory for the largest shapes, so that addresses stay: recordings hold them. Outputs whose size depends
        on the data get an allocator."""
        for number in self._allowed:
            profile = self._profiles[number]
            self._set_profile(self._plain, number)
            for name in self._inputs:
                if name in profile:
                    self._slots[name].make_room(profile[name].most)
                    self._plain.context.set_input_shape(name, profile[name].most)
            for name in self._outputs:
                shape = tuple(self._plain.context.get_tensor_shape(name))
                if min(shape, default=0) >= 0:
                    self._slots[name].make_room(shape)
        for name, item in self._outputs.items():
            if self._slots[name].address == 0 and not item.is_on_host:
                grower = Grower(self._slots[name])
                self._growers[name] = grower, self._library.make_allocator(grower.allocate, grower.notify)
        self._set_profile(self._plain, self._allowed[0])

    def _record(self, rows: int) -> None:
        """Record the execution of one batch size, after one run of it that is not recorded."""
        shapes = {name: self._sized(name, rows) for name in self._inputs}
        number = choose(self._profiles, self._allowed, shapes, self._allowed[0])
        if number is None or self._growers:
            return
        lane = Lane(self._library.make_context(self._engine, has_own_memory=False), rows or None)
        self._library.give_memory(lane.context, self._scratch, self._library.scratch_bytes(self._engine))
        self._set_profile(lane, number)
        for name, shape in shapes.items():
            lane.context.set_input_shape(name, shape)
        self._set_addresses(lane)
        self._execute(lane)
        self._context.synchronise(self._stream)
        self._context.begin_capture(self._stream)
        try:
            with self._library.logger.heard() as heard:
                is_done = lane.context.execute_async_v3(self._stream)
        finally:
            lane.graph = self._context.end_capture(self._stream)
        if not is_done or not lane.graph:
            raise EngineFault(
                f"batch size {rows} cannot be recorded as a CUDA graph: {heard.words() or 'no reason given'}"
            )
        self._lanes[rows] = lane

    def _sized(self, name: str, rows: int) -> Shape:
        most = self._profiles[self._allowed[0]][name].most
        return (rows, *most[1:]) if rows and self._terms.has_rows else most

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
            for slot in self._slots.values():
                slot.end_loan()

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
        # Where there are recordings, no input is one of values: every one has the rows of the batch.
        rows = len(next(iter(inputs.values()))) if self._lanes and self._terms.has_rows and inputs else 0
        lane = self._recorded(inputs, rows)
        if lane is None:
            lane = self._plain
            shapes = self._run_plain(inputs)
        else:
            for name in self._inputs:
                self._slots[name].put(inputs[name], self._stream, lane.rows, is_recorded=True)
            self._context.launch(lane.graph, self._stream)
            shapes = {name: tuple(lane.context.get_tensor_shape(name)) for name in self._outputs}
        keep = rows if lane.rows is not None else None
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

    def _recorded(self, inputs: Mapping[str, Array | DeviceArray], rows: int) -> Lane | None:
        if not self._lanes:
            return None
        size = padded_size(tuple(self._lanes), rows)
        if size is None:
            return None
        skip = 1 if self._terms.has_rows else 0
        fits = all(inputs[name].shape[skip:] == self._sized(name, size)[skip:] for name in self._inputs)
        fits = fits and all(len(inputs[name]) == rows for name in self._inputs if skip)
        return self._lanes[size] if fits else None

    def _run_plain(self, inputs: Mapping[str, Array | DeviceArray]) -> dict[str, Shape]:
        """Launch the engine, and return the shapes of its outputs."""
        lane = self._plain
        shapes = {name: inputs[name].shape for name in self._inputs}
        asked: Mapping[str, Shape] = shapes
        if self._of_values:
            asked = {**shapes, **{name: values_of(inputs[name]) for name in self._of_values}}
        number = choose(self._choices, self._allowed, asked, lane.profile)
        if number is None:
            raise EngineFault(misfit(self._choices, self._allowed, asked, self._of_values))
        self._set_profile(lane, number)
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
        known = {name: tuple(lane.context.get_tensor_shape(name)) for name in self._outputs}
        for name, shape in known.items():
            if name not in self._growers:
                self._slots[name].make_room(shape)
        self._set_addresses(lane)
        for grower, _ in self._growers.values():
            grower.begin()
        self._execute(lane)
        if self._growers:
            # Shapes that depend on data are told while the stream works.
            self._context.synchronise(self._stream)
        for name, (grower, _) in self._growers.items():
            if grower.fault is not None:
                raise grower.fault
            known[name] = grower.shape
        return known

    def _execute(self, lane: Lane) -> None:
        with self._library.logger.heard() as heard:
            is_done = lane.context.execute_async_v3(self._stream)
        if not is_done:
            fault = next((grower.fault for grower, _ in self._growers.values() if grower.fault is not None), None)
            raise fault or EngineFault(heard.words() or "the run was refused")

    def _set_addresses(self, lane: Lane) -> None:
        for name in self._inputs:
            lane.context.set_tensor_address(name, self._slots[name].address)
        for name in self._outputs:
            grown = self._growers.get(name)
            if grown is None:
                lane.context.set_tensor_address(name, self._slots[name].address)
            else:
                lane.context.set_output_allocator(name, grown[1])

    def _set_profile(self, lane: Lane, number: int) -> None:
        if lane.profile == number:
            return
        if len(self._profiles) > 1 and not lane.context.set_optimization_profile_async(number, self._stream):
            raise EngineFault(f"profile {number} cannot be used")
        lane.profile = number

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
        for lane in self._lanes.values():
            self._context.destroy_graph(lane.graph)
        self._lanes.clear()
        self._plain = Lane(None)
        self._growers.clear()
        for slot in self._slots.values():
            slot.free()
        if self._scratch:
            self._context.free(self._scratch)
        if self._stream:
            self._context.destroy_stream(self._stream)
        self._slots.clear()
        self._scratch = self._stream = 0
        self._engine = None
        self._release()
