"""GPU runs of ONNX Runtime with I/O binding: results stay on the device until the last one is ready.

Without it onnxruntime waits for the device at each output. On the CPU it gains nothing, see the class's text.

A tensor of a client's that lies on the GPU is bound where it lies. An output for a client's memory there stays on the
device too, and is copied on it: of what size it is going to be nobody knows when it is bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_server.backends.base import Array
from edge_server.core.device_tensor import DeviceArray, DevicePiece

_HOST_ONLY = frozenset(("tensor(string)", "tensor(bfloat16)"))
"""Types that numpy lacks, or that devices do: models with one run without binding."""

_ALIGNMENT = 256
"""What addresses have to be multiples of to be bound: those of onnxruntime's own allocators are, and kernels count on
their reading many elements at a time."""

_ELEMENTS = {
    "tensor(bool)": "?", "tensor(double)": "f8", "tensor(float)": "f4", "tensor(float16)": "f2", "tensor(int16)": "i2",
    "tensor(int32)": "i4", "tensor(int64)": "i8", "tensor(int8)": "i1", "tensor(uint16)": "u2", "tensor(uint32)": "u4",
    "tensor(uint64)": "u8", "tensor(uint8)": "u1",
}  # fmt: skip
"""Types of outputs that can be bound -> numpy's."""

_NOWHERE: Mapping[str, DevicePiece] = {}


class BoundRun:
    """One InferenceSession that nobody else runs, with one binding that is used for run after run.

    Inputs are copied to the device by onnxruntime as it begins. `device` is "cuda" but for tests, which bind to "cpu".
    """

    def __init__(self, session: Any, run_options: Any, device: str, device_id: int) -> None:
        self._session = session
        self._run_options = run_options
        self._device = device
        self._device_id = device_id
        self._binding = session.io_binding()

    @classmethod
    def of(cls, session: Any, run_options: Any, device: str, device_id: int | None) -> BoundRun | None:
        """Return the bound runner of a session; None if it is not on a GPU or has tensors that cannot be bound."""
        nodes = (*session.get_inputs(), *session.get_outputs())
        if device_id is None or any(node.type in _HOST_ONLY or "tensor" not in node.type for node in nodes):
            return None
        return cls(session, run_options, device, device_id)

    def can_take(self, array: DeviceArray) -> bool:
        """Return whether elements can be bound where they lie: in one piece of this GPU, at an address for any type."""
        piece = array.piece
        return piece is not None and piece.device_id == self._device_id and piece.address % _ALIGNMENT == 0

    def run(
        self,
        outputs: Sequence[str],
        feeds: Mapping[str, Array | DeviceArray],
        targets: Mapping[str, DevicePiece] = _NOWHERE,
    ) -> list[Array | DeviceArray]:
        """Return the outputs in the order named, as arrays of the host's that belong to the caller; those that fit into
        their target are written there. A DeviceArray must be one that `can_take` is true of.

        Raises what onnxruntime raises, and ServingFault; nothing of a failed run stays bound.
        """
        binding = self._binding
        try:
            self._bind(outputs, feeds)
            self._session.run_with_iobinding(binding, self._run_options)
            if targets:
                return self._results(outputs, targets)
            arrays: list[Array | DeviceArray] = binding.copy_outputs_to_cpu()
            if self._device == "cpu":
                # Nothing was copied: the arrays are the binding's own.
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

    def _results(self, outputs: Sequence[str], targets: Mapping[str, DevicePiece]) -> list[Array | DeviceArray]:
        found: list[Array | DeviceArray] = []
        for name, value in zip(outputs, self._binding.get_outputs(), strict=True):
            placed = self._placed(value, targets[name]) if name in targets else None
            # numpy() copies from a device; of the CPU's it is a view, which ends with the binding.
            found.append(np.array(value.numpy()) if placed is None else placed)
        return found

    def _placed(self, value: Any, piece: DevicePiece) -> DeviceArray | None:
        """Copy an output to a client's memory on this GPU; None where it is not there, or does not fit."""
        size = value.tensor_size_in_bytes()
        is_here = value.device_name() == self._device and piece.device_id == self._device_id
        if not is_here or not 0 < size <= piece.byte_size:
            return None
        piece.copy_from(self._device_id, value.data_ptr(), size)
        return DeviceArray(np.dtype(_ELEMENTS[value.data_type()]), value.shape(), (piece,))
