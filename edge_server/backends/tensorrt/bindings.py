"""Bindings of one instance: the addresses of an engine's inputs and outputs in an execution context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_server.backends.tensorrt.buffers import Grower, TensorBuffer
from edge_server.backends.tensorrt.cuda_driver import Context
from edge_server.backends.tensorrt.library_adapter import EngineFault, TensorInfo, TensorRTLibrary
from edge_server.core.tensorrt_engine import Shape


class Bindings:
    """The memory of all tensors, by name; outputs whose size depends on the data have a Grower, and an allocator."""

    def __init__(self, tensors: Sequence[TensorInfo], context: Context, *, is_mapped: bool) -> None:
        self.inputs = {item.name: item for item in tensors if item.is_input}
        self.outputs = {item.name: item for item in tensors if not item.is_input}
        self.slots = {item.name: TensorBuffer(item, context, is_mapped=is_mapped) for item in tensors}
        self.growers: dict[str, tuple[Grower, Any]] = {}

    @property
    def has_values(self) -> bool:
        """Whether any tensor is one of values that are shapes, which TensorRT reads on the host."""
        return any(item.is_on_host for item in (*self.inputs.values(), *self.outputs.values()))

    def grow_the_rest(self, library: TensorRTLibrary) -> None:
        """Give an allocator to the outputs that have no memory yet: their size is told by the run."""
        for name, item in self.outputs.items():
            if self.slots[name].address == 0 and not item.is_on_host:
                grower = Grower(self.slots[name])
                self.growers[name] = grower, library.make_allocator(grower.allocate, grower.notify)

    def end_loans(self) -> None:
        """Know nothing any more of clients' memory."""
        for slot in self.slots.values():
            slot.end_loan()

    def free(self) -> None:
        """Give all memory back."""
        self.growers.clear()
        for slot in self.slots.values():
            slot.free()
        self.slots.clear()


class ExecutionLane:
    """An execution context on the instance's stream, in one state: its profile, its shapes, its addresses."""

    def __init__(
        self,
        library: TensorRTLibrary,
        engine: Any,
        bindings: Bindings,
        stream: int,
        profile_count: int,
        *,
        has_own_memory: bool,
    ) -> None:
        """Without `has_own_memory` it is given some before its first run, see Library.give_memory."""
        self.context = library.make_context(engine, has_own_memory=has_own_memory)
        self.profile = -1
        self._library = library
        self._bindings = bindings
        self._stream = stream
        self._profile_count = profile_count

    def use_profile(self, number: int) -> None:
        """Make it the context's profile, if it is not. Raises EngineFault."""
        if self.profile == number:
            return
        if self._profile_count > 1 and not self.context.set_optimization_profile_async(number, self._stream):
            raise EngineFault(f"profile {number} cannot be used")
        self.profile = number

    def set_addresses(self) -> None:
        """Tell where every tensor lies, or whom to ask for memory."""
        slots, growers = self._bindings.slots, self._bindings.growers
        for name in self._bindings.inputs:
            self.context.set_tensor_address(name, slots[name].address)
        for name in self._bindings.outputs:
            grown = growers.get(name)
            if grown is None:
                self.context.set_tensor_address(name, slots[name].address)
            else:
                self.context.set_output_allocator(name, grown[1])

    def execute(self) -> None:
        """Launch the engine. Raises EngineFault, and CudaFault where there is no memory for an output."""
        with self._library.logger.heard() as heard:
            is_done = self.context.execute_async_v3(self._stream)
        if not is_done:
            growers = self._bindings.growers.values()
            fault = next((grower.fault for grower, _ in growers if grower.fault is not None), None)
            raise fault or EngineFault(heard.words() or "the run was refused")

    def drop(self) -> None:
        """End the execution context here and now, whoever still knows of the lane: the trace of an error may."""
        self.context = None

    def output_shapes(self) -> dict[str, Shape]:
        """Return the shapes of outputs as far as they are known: -1 for a dimension that depends on the data."""
        return {name: tuple(self.context.get_tensor_shape(name)) for name in self._bindings.outputs}
