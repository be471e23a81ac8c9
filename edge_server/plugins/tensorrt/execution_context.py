"""Execution of a TensorRT engine for one model instance: binds the GPU memory of inputs and outputs to TensorRT's
execution context, and starts runs."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from edge_server.backends.cuda.cuda_ctypes import CudaContext
from edge_server.plugins.tensorrt.buffers import DynamicOutput, TensorBuffer
from edge_server.plugins.tensorrt.engine_order import Shape
from edge_server.plugins.tensorrt.library_adapter import EngineFault, TensorInfo, TensorRTLibrary


class Bindings:
    """The memory of all tensors, by name. An output whose size depends on the data has a DynamicOutput."""

    def __init__(self, tensors: Sequence[TensorInfo], context: CudaContext, *, is_mapped: bool) -> None:
        self.inputs = {item.name: item for item in tensors if item.is_input}
        self.outputs = {item.name: item for item in tensors if not item.is_input}
        self.buffers = {item.name: TensorBuffer(item, context, is_mapped=is_mapped) for item in tensors}
        self.dynamic_outputs: dict[str, tuple[DynamicOutput, Any]] = {}
        self.converted = tuple(item for item in tensors if not item.is_linear)
        """The tensors whose format is not row-major."""

    @property
    def has_shape_tensors(self) -> bool:
        """Whether any tensor is a shape tensor, which TensorRT reads on the host."""
        return any(item.is_on_host for item in (*self.inputs.values(), *self.outputs.values()))

    def add_output_allocators(self, library: TensorRTLibrary) -> None:
        """Give an allocator to each output without memory: its size is known only after a run. Raises EngineFault."""
        for name, item in self.outputs.items():
            if self.buffers[name].address == 0 and not item.is_on_host:
                if not item.is_linear:
                    raise item.format_fault("and its size depends on the data or on a shape tensor")
                output = DynamicOutput(self.buffers[name])
                allocator = library.make_output_allocator(output.allocate, output.set_shape)
                self.dynamic_outputs[name] = output, allocator

    def release_borrowed(self) -> None:
        """Forget the addresses of clients' memory."""
        for buffer in self.buffers.values():
            buffer.release_borrowed()

    def free(self) -> None:
        """Free all memory."""
        self.dynamic_outputs.clear()
        for buffer in self.buffers.values():
            buffer.free()
        self.buffers.clear()


class ExecutionContext:
    """An execution context of TensorRT on the instance's stream, with its profile, shapes and addresses."""

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
        """Without `has_own_memory`, TensorRTLibrary.set_context_memory must be called before the first run."""
        self.context = library.make_context(engine, has_own_memory=has_own_memory)
        self.profile = -1
        self._library = library
        self._bindings = bindings
        self._stream = stream
        self._profile_count = profile_count

    def use_profile(self, number: int) -> None:
        """Select the profile, unless it is selected already. Raises EngineFault."""
        if self.profile == number:
            return
        if self._profile_count > 1:
            with self._library.logger.captured() as errors:
                is_selected = self.context.set_optimization_profile_async(number, self._stream)
            if not is_selected:
                raise EngineFault(f"profile {number} cannot be used: {errors.text() or 'no reason was given'}")
        self.profile = number

    def set_strides(self, names: Container[str]) -> None:
        """Tell the buffers of these tensors the strides of formats that are not linear, for the shapes in use.

        Raises EngineFault.
        """
        for item in self._bindings.converted:
            if item.name in names:
                self._bindings.buffers[item.name].strides = self._library.strides(self.context, item)

    def set_addresses(self) -> None:
        """Set the address of every tensor, or its allocator."""
        buffers, dynamic_outputs = self._bindings.buffers, self._bindings.dynamic_outputs
        for name in self._bindings.inputs:
            self.context.set_tensor_address(name, buffers[name].address)
        for name in self._bindings.outputs:
            dynamic = dynamic_outputs.get(name)
            if dynamic is None:
                self.context.set_tensor_address(name, buffers[name].address)
            else:
                self.context.set_output_allocator(name, dynamic[1])

    def execute(self) -> None:
        """Launch the engine. Raises EngineFault, or CudaFault if there is no memory for an output."""
        with self._library.logger.captured() as errors:
            is_done = self.context.execute_async_v3(self._stream)
        if not is_done:
            outputs = self._bindings.dynamic_outputs.values()
            fault = next((output.fault for output, _ in outputs if output.fault is not None), None)
            raise fault or EngineFault(errors.text() or "the run was refused")

    def destroy(self) -> None:
        """Destroy TensorRT's context now, even if a traceback still refers to this object."""
        self.context = None

    def output_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the outputs, with -1 for a dimension that depends on the data."""
        return {name: tuple(self.context.get_tensor_shape(name)) for name in self._bindings.outputs}
