"""ONNX Runtime session: runs on the host or bound to a GPU, with conversion of strings and bfloat16."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_server.backends.base import Array, Session, SessionInfo
from edge_server.backends.onnxruntime_io_binding import BoundRun
from edge_server.backends.onnxruntime_tensor_info import TYPES
from edge_server.backends.runtime_library import readable, words
from edge_server.core.device_tensor import DeviceArray, DevicePiece, to_host_array
from edge_server.core.tensor import DType
from edge_server.errors import BackendError

_ONNX_BF16 = 16
"""TensorProto.BFLOAT16."""


@dataclass(frozen=True, slots=True)
class OnnxRuntimeLibrary:
    """The module onnxruntime, and all exception classes that it raises."""

    ort: Any
    failures: tuple[type[Exception], ...]

    def ort_value(self, array: Array, is_bf16: bool) -> Any:
        """Return an OrtValue over `array` (bf16 patterns arrive as uint16)."""
        make_value = self.ort.OrtValue
        if is_bf16:
            return make_value.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BF16)
        return make_value.ortvalue_from_numpy(array)


class OnnxSession(Session):
    """One instance's use of a shared InferenceSession."""

    def __init__(
        self,
        library: OnnxRuntimeLibrary,
        model: str,
        info: SessionInfo,
        session: Any,
        run_options: Any,
        bound: BoundRun | None,
        give_back: Callable[[], None],
    ) -> None:
        """`bound` runs a session on a GPU that is this instance's alone. `give_back` ends the share of the session."""
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
            name: array if isinstance(array, DeviceArray) and bound.can_take(array) else readable(to_host_array(array))
            for name, array in inputs.items()
        }
        try:
            return dict(zip(names, bound.run(names, feeds, targets), strict=True))
        except self._failures as error:
            said = words(error)
        raise BackendError(f"model '{self._model}': onnxruntime failed: {said}")

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        names = list(outputs)
        feeds = {name: readable(array) for name, array in inputs.items()}
        if self._strings:
            feeds.update({name: self._decoded(name, feeds[name]) for name in feeds.keys() & self._strings})
        try:
            arrays = self._run(names, feeds)
        except self._failures as error:
            said = words(error)
        else:
            found = dict(zip(names, arrays, strict=True))
            found.update({name: _encoded(found[name]) for name in found.keys() & self._strings})
            return found
        # Raised outside the handler: the runtime's exception would keep its frames, and the batch with them, alive.
        raise BackendError(f"model '{self._model}': onnxruntime failed: {said}")

    def _run(self, names: list[str], feeds: Mapping[str, Array]) -> list[Array]:
        if self._bound is not None:
            # Without targets all of it comes back as arrays of the host.
            return self._bound.run(names, feeds)  # type: ignore[return-value]
        if self._bf16:
            return self._run_bf16(names, feeds)
        arrays: list[Array] = self._session.run(names, feeds, self._run_options)
        return arrays

    def _run_bf16(self, names: list[str], feeds: Mapping[str, Array]) -> list[Array]:
        """Run with OrtValues, the only form in which onnxruntime takes and gives bfloat16."""
        values = {name: self._library.ort_value(array, name in self._bf16) for name, array in feeds.items()}
        results = self._session.run_with_ort_values(names, values, self._run_options)
        return [
            _bf16_patterns(value) if name in self._bf16 else np.array(value.numpy())
            for name, value in zip(names, results, strict=True)
        ]

    def _decoded(self, name: str, array: Array) -> Array:
        """Return strings as onnxruntime wants them: str in place of UTF-8 bytes."""
        decoded = np.empty(array.shape, dtype=object)
        try:
            decoded.reshape(-1)[:] = [value.decode() if isinstance(value, bytes) else value for value in array.flat]
        except UnicodeDecodeError as error:
            said = words(error)
        else:
            return decoded
        raise BackendError(f"model '{self._model}': input '{name}' holds a string that is not UTF-8: {said}")

    def close(self) -> None:
        self._session = self._bound = None
        self._give_back()


def _encoded(array: Array) -> Array:
    """Return onnxruntime's str elements as UTF-8 bytes."""
    encoded = np.empty(array.shape, dtype=object)
    encoded.reshape(-1)[:] = [str(value).encode() for value in array.flat]
    return encoded


def _bf16_patterns(value: Any) -> Array:
    """Copy a bfloat16 OrtValue's bit patterns; numpy() does not give them."""
    size = value.tensor_size_in_bytes()
    if size == 0:
        return np.empty(value.shape(), dtype=DType.BF16.numpy)
    memory = (ctypes.c_char * size).from_address(value.data_ptr())
    patterns: Array = np.frombuffer(memory, dtype=DType.BF16.numpy).reshape(value.shape()).copy()
    return patterns
