"""Session of one instance of an ONNX model: runs batches on the CPU, or on a GPU with inputs and outputs in its memory
(I/O binding).

On a GPU, I/O binding keeps all outputs on the device until the last one is computed, and then copies them. Without it
onnxruntime waits for the device at each output. A client's input tensor that lies on the GPU is bound in place. An
output for a client's memory on the GPU is copied there on the device, because its size is not known when it is bound.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edge_server.backends.align_array import readable
from edge_server.backends.base import Array, Session, SessionInfo
from edge_server.backends.runtime_errors import message_line, run_error
from edge_server.core.device_tensor import DeviceArray, DevicePiece, to_host_array
from edge_server.core.tensor import DType
from edge_server.errors import BackendError

_ONNX_BF16 = 16
"""TensorProto.BFLOAT16."""

TYPES = {
    "tensor(bfloat16)": DType.BF16,
    "tensor(bool)": DType.BOOL,
    "tensor(double)": DType.FP64,
    "tensor(float)": DType.FP32,
    "tensor(float16)": DType.FP16,
    "tensor(int16)": DType.INT16,
    "tensor(int32)": DType.INT32,
    "tensor(int64)": DType.INT64,
    "tensor(int8)": DType.INT8,
    "tensor(string)": DType.BYTES,
    "tensor(uint16)": DType.UINT16,
    "tensor(uint32)": DType.UINT32,
    "tensor(uint64)": DType.UINT64,
    "tensor(uint8)": DType.UINT8,
}
"""onnxruntime's type name of an input or output -> element type."""


def declared_tensor(node: Any) -> tuple[str, DType, tuple[int, ...]]:
    """Return name, type and dims (-1: any size) of an input or output as declared in the file. Its type is in TYPES."""
    dims = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape or ())
    return node.name, TYPES[node.type], dims


_HOST_ONLY = frozenset(("tensor(string)", "tensor(bfloat16)"))
"""Types that numpy or devices lack. Models with one of them run without binding."""

_ALIGNMENT = 256
"""Alignment of addresses that can be bound. onnxruntime's own allocators align so, and its kernels rely on it."""

_ELEMENTS = {
    "tensor(bool)": "?", "tensor(double)": "f8", "tensor(float)": "f4", "tensor(float16)": "f2", "tensor(int16)": "i2",
    "tensor(int32)": "i4", "tensor(int64)": "i8", "tensor(int8)": "i1", "tensor(uint16)": "u2", "tensor(uint32)": "u4",
    "tensor(uint64)": "u8", "tensor(uint8)": "u1",
}  # fmt: skip
"""onnxruntime's type names of outputs that can be bound -> numpy type."""

_READABLE = 0x0101
"""NPY_ARRAY_C_CONTIGUOUS and NPY_ARRAY_ALIGNED of numpy's `flags.num`: what `readable` asks for, in one step."""

NO_TARGETS: Mapping[str, DevicePiece] = {}


class DeviceRuns(Protocol):
    """What runs an instance's batches on a GPU: one session, or one for each batch size."""

    def can_bind(self, array: DeviceArray) -> bool: ...

    def run(
        self,
        outputs: Sequence[str],
        feeds: Mapping[str, Array | DeviceArray],
        targets: Mapping[str, DevicePiece] = NO_TARGETS,
    ) -> list[Array | DeviceArray]: ...


class BoundRun:
    """One InferenceSession on a GPU, used by one instance, with one binding for all its runs.

    onnxruntime copies inputs to the device at the start of a run. `device` is "cuda", in tests "cpu".
    """

    def __init__(self, session: Any, run_options: Any, device: str, device_id: int) -> None:
        self._session = session
        self._run_options = run_options
        self._device = device
        self._device_id = device_id
        self._binding = session.io_binding()

    @classmethod
    def create(cls, session: Any, run_options: Any, device: str, device_id: int | None) -> BoundRun | None:
        """Return a BoundRun for the session; None if it is not on a GPU, or has tensors that cannot be bound."""
        nodes = (*session.get_inputs(), *session.get_outputs())
        if device_id is None or any(node.type in _HOST_ONLY or "tensor" not in node.type for node in nodes):
            return None
        return cls(session, run_options, device, device_id)

    def can_bind(self, array: DeviceArray) -> bool:
        """Return whether the elements can be bound in place: in one piece on this GPU, with an aligned address."""
        piece = array.piece
        return piece is not None and piece.device_id == self._device_id and piece.address % _ALIGNMENT == 0

    def run(
        self,
        outputs: Sequence[str],
        feeds: Mapping[str, Array | DeviceArray],
        targets: Mapping[str, DevicePiece] = NO_TARGETS,
    ) -> list[Array | DeviceArray]:
        """Run, and return the outputs in the given order, as arrays on the host or as written targets.

        An output that fits into its target is written there. The caller owns the arrays. `can_bind` must be true for
        each DeviceArray. Raises onnxruntime's exceptions and ServingFault. After a failed run nothing stays bound.
        """
        binding = self._binding
        try:
            self._bind(outputs, feeds)
            self._session.run_with_iobinding(binding, self._run_options)
            if targets:
                return self._outputs_in_targets(outputs, targets)
            arrays: list[Array | DeviceArray] = binding.copy_outputs_to_cpu()
            if self._device == "cpu":
                # On the CPU these arrays are the binding's own memory.
                arrays = [np.array(array) for array in arrays]
            return arrays
        finally:
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()

    def _bind(self, outputs: Sequence[str], feeds: Mapping[str, Array | DeviceArray]) -> None:
        for name, array in feeds.items():
            if isinstance(array, DeviceArray):
                assert array.piece is not None
                address, shape = array.piece.address, list(array.shape)
                self._binding.bind_input(name, self._device, self._device_id, array.dtype, shape, address)
            else:
                self._binding.bind_cpu_input(name, array)
        for name in outputs:
            self._binding.bind_output(name, self._device, self._device_id)

    def _outputs_in_targets(
        self, outputs: Sequence[str], targets: Mapping[str, DevicePiece]
    ) -> list[Array | DeviceArray]:
        found: list[Array | DeviceArray] = []
        for name, value in zip(outputs, self._binding.get_outputs(), strict=True):
            placed = self._copy_to_target(value, targets[name]) if name in targets else None
            # numpy() copies from a GPU. On the CPU it is a view, which is valid as long as the binding.
            found.append(np.array(value.numpy()) if placed is None else placed)
        return found

    def _copy_to_target(self, value: Any, piece: DevicePiece) -> DeviceArray | None:
        """Copy an output to a client's memory on this GPU; None if the memory is elsewhere or too small."""
        size = value.tensor_size_in_bytes()
        is_here = value.device_name() == self._device and piece.device_id == self._device_id
        if not is_here or not 0 < size <= piece.byte_size:
            return None
        piece.copy_from(self._device_id, value.data_ptr(), size)
        return DeviceArray(np.dtype(_ELEMENTS[value.data_type()]), value.shape(), (piece,))


@dataclass(frozen=True, slots=True)
class OnnxRuntimeLibrary:
    """The module onnxruntime, and its exception classes."""

    ort: Any
    failures: tuple[type[Exception], ...]

    def make_ort_value(self, array: Array, is_bf16: bool) -> Any:
        """Return an OrtValue over `array`. bfloat16 arrays contain bit patterns as uint16."""
        make_value = self.ort.OrtValue
        if is_bf16:
            return make_value.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BF16)
        return make_value.ortvalue_from_numpy(array)


class OnnxSession(Session):
    """One instance, on an InferenceSession that instances on the CPU share."""

    is_repeatable = True

    def __init__(
        self,
        library: OnnxRuntimeLibrary,
        model: str,
        info: SessionInfo,
        session: Any,
        run_options: Any,
        bound: DeviceRuns | None,
        give_back: Callable[[], None],
    ) -> None:
        """`bound` runs sessions on a GPU that only this instance uses. `give_back` releases all sessions."""
        self.info = info
        self.takes_device_memory = bound is not None
        self._bound = bound
        self._library = library
        self._failures = library.failures
        self._model = model
        self._session = session
        self._give_back = give_back
        self._run_options = run_options
        types = {node.name: TYPES.get(node.type) for node in (*session.get_inputs(), *session.get_outputs())}
        self._accepted = {
            node.name: tuple(dim if isinstance(dim, int) else -1 for dim in node.shape) for node in session.get_inputs()
        }
        self._strings = frozenset(name for name, dtype in types.items() if dtype is DType.BYTES)
        self._bf16 = frozenset(name for name, dtype in types.items() if dtype is DType.BF16)

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], outputs: Sequence[str], targets: Mapping[str, DevicePiece]
    ) -> Mapping[str, Array | DeviceArray]:
        bound = self._bound
        if bound is None:
            return super().run_on_device(inputs, outputs, targets)
        names = list(outputs)
        feeds = {
            name: array if isinstance(array, DeviceArray) and bound.can_bind(array) else readable(to_host_array(array))
            for name, array in inputs.items()
        }
        try:
            return dict(zip(names, bound.run(names, feeds, targets), strict=True))
        except self._failures as error:
            said = message_line(error)
        raise BackendError(f"model '{self._model}': onnxruntime failed: {said}")

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        feeds = inputs
        for name, array in inputs.items():
            if array.flags.num & _READABLE != _READABLE:
                feeds = {**feeds, name: readable(array)}
        if self._strings:
            strings = {name: self._decode_strings(name, feeds[name]) for name in feeds.keys() & self._strings}
            feeds = {**feeds, **strings}
        try:
            if self._bound is not None:
                # Without targets all outputs are arrays on the host.
                arrays: Sequence[Any] = self._bound.run(outputs, feeds)
            elif self._bf16:
                arrays = self._run_bf16(outputs, feeds)
            else:
                arrays = self._session.run(outputs, feeds, self._run_options)
        except self._failures as error:
            said = message_line(error)
        else:
            found: dict[str, Array] = {}
            for name in outputs:
                # By position: zip costs as much as all the rest here.
                found[name] = arrays[len(found)]
            if self._strings:
                found.update({name: _encode_strings(found[name]) for name in found.keys() & self._strings})
            return found
        # Raised outside the handler: a chained traceback would keep the batch in memory.
        raise run_error(self._model, "onnxruntime", said, inputs, self._accepted)

    def _run_bf16(self, names: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
        # OrtValues are the only form in which onnxruntime accepts and returns bfloat16.
        values = {name: self._library.make_ort_value(array, name in self._bf16) for name, array in feeds.items()}
        results = self._session.run_with_ort_values(names, values, self._run_options)
        return [
            _copy_bf16_patterns(value) if name in self._bf16 else np.array(value.numpy())
            for name, value in zip(names, results, strict=True)
        ]

    def _decode_strings(self, name: str, array: Array) -> Array:
        """Convert UTF-8 bytes to str, which onnxruntime expects. Raises BackendError."""
        decoded = np.empty(array.shape, dtype=object)
        try:
            decoded.reshape(-1)[:] = [value.decode() if isinstance(value, bytes) else value for value in array.flat]
        except UnicodeDecodeError as error:
            said = message_line(error)
        else:
            return decoded
        raise BackendError(f"model '{self._model}': input '{name}' holds a string that is not UTF-8: {said}")

    def close(self) -> None:
        self._session = self._bound = None
        self._give_back()


def _encode_strings(array: Array) -> Array:
    """Convert onnxruntime's str elements to UTF-8 bytes."""
    encoded = np.empty(array.shape, dtype=object)
    encoded.reshape(-1)[:] = [str(value).encode() for value in array.flat]
    return encoded


def _copy_bf16_patterns(value: Any) -> Array:
    """Return a copy of the bit patterns of a bfloat16 OrtValue, for which numpy() fails."""
    size = value.tensor_size_in_bytes()
    if size == 0:
        return np.empty(value.shape(), dtype=DType.BF16.numpy)
    memory = (ctypes.c_char * size).from_address(value.data_ptr())
    patterns: Array = np.frombuffer(memory, dtype=DType.BF16.numpy).reshape(value.shape()).copy()
    return patterns
