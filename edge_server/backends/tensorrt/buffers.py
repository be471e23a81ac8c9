"""Buffers for tensors on their way to the GPU and back: page-locked host memory and device memory.

On a board whose GPU shares the CPU's memory the host's is mapped instead, and nothing is copied. Buffers grow and are
kept: such boards fail big allocations once their memory is in pieces.

Where a client's tensor lies on the GPU, TensorRT reads it there, or it is copied on the device: never by the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edge_server.backends.base import Array
from edge_server.backends.tensorrt.cuda_driver import Context, HostBlock
from edge_server.backends.tensorrt.library_adapter import TensorInfo
from edge_server.core.device_tensor import DeviceArray, DevicePiece
from edge_server.core.tensor import DType

_ALIGNMENT = 256
"""IExecutionContext::setTensorAddress: what addresses have to be multiples of. Others are copied on the device."""


class TensorBuffer:
    """The memory of one tensor. Used within its context, by one thread at a time.

    `address` is where TensorRT finds the tensor: on the host for values that shapes depend on.
    """

    def __init__(self, info: TensorInfo, context: Context, *, is_mapped: bool) -> None:
        self.info = info
        self._context = context
        self._is_mapped = is_mapped and not info.is_on_host
        self._has_device = not (self._is_mapped or info.is_on_host)
        self._host: HostBlock | None = None
        self._device = 0
        self._capacity = 0
        self._lent = 0
        self._item_bytes = np.dtype(info.dtype.numpy).itemsize

    @property
    def address(self) -> int:
        if self._has_device:
            return self._lent or self._device
        if self._host is None:
            return 0
        return self._host.device_address if self._is_mapped else self._host.address

    def make_room(self, shape: Sequence[int]) -> bool:
        """Have memory for a tensor of that shape; return whether the address changed. Raises CudaFault."""
        return self.make_room_for_bytes(math.prod(shape) * self._item_bytes)

    def make_room_for_bytes(self, byte_count: int) -> bool:
        if self._host is not None and byte_count <= self._capacity:
            return False
        self.free()
        self._host = self._context.allocate_host(byte_count, is_mapped=self._is_mapped)
        if self._has_device:
            self._device = self._context.allocate(byte_count)
        self._capacity = byte_count
        return True

    def can_take(self, array: DeviceArray, device_id: int) -> bool:
        """Return whether elements on GPUs need not come to the host: they are on this one, and of the engine's type."""
        is_here = all(isinstance(part, np.ndarray) or part.device_id == device_id for part in array.parts)
        return is_here and self._has_device and array.dtype == self.info.dtype.numpy

    def put(
        self, array: Array | DeviceArray, stream: int, rows: int | None = None, *, is_recorded: bool = False
    ) -> None:
        """Begin to bring an array to the GPU; with `rows` more rows than it has, the rest are zeros. A DeviceArray must
        be one that `can_take` is true of.

        What lies on the GPU in one piece is not moved, `address` is it until `end_loan`; unless the run `is_recorded`,
        whose addresses stay.
        """
        if isinstance(array, DeviceArray):
            piece = array.piece
            if piece is not None and not is_recorded and piece.address % _ALIGNMENT == 0:
                self._lent = piece.address
            else:
                self._join(array, stream, rows)
            return
        shape = array.shape if rows is None else (rows, *array.shape[1:])
        view = self._view(shape)
        if rows is None:
            np.copyto(view, array, casting="unsafe")
        else:
            np.copyto(view[: len(array)], array, casting="unsafe")
            view[len(array) :] = 0
        if self._has_device and self._host is not None:
            self._context.copy_in(self._device, self._host.address, view.nbytes, stream)

    def end_loan(self) -> None:
        """Know nothing any more of memory that is not its own."""
        self._lent = 0

    def _join(self, array: DeviceArray, stream: int, rows: int | None) -> None:
        """Begin to copy parts into the memory of its own: on the device those that are there."""
        assert self._host is not None
        if any(isinstance(part, np.ndarray) for part in array.parts):
            start = 0
            for part in array.parts:
                if isinstance(part, np.ndarray):
                    self._host.array[start : start + part.nbytes] = (
                        np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                    )
                start += part.nbytes if isinstance(part, np.ndarray) else part.byte_size
            # All in one, and then what lies on the device over it: a stream keeps order.
            self._context.copy_in(self._device, self._host.address, array.nbytes, stream)
        start = 0
        for part in array.parts:
            size = part.nbytes if isinstance(part, np.ndarray) else part.byte_size
            if not isinstance(part, np.ndarray):
                self._context.copy_within(self._device + start, part.address, size, stream)
            start += size
        padding = 0 if rows is None else (rows - len(array)) * (array.nbytes // len(array))
        if padding:
            self._context.clear(self._device + array.nbytes, padding, stream)

    def hand_over(
        self, shape: Sequence[int], dtype: DType, piece: DevicePiece, device_id: int, stream: int
    ) -> DeviceArray | None:
        """Begin to copy what the GPU wrote to a client's memory on it; None where that is not possible."""
        size = math.prod(shape) * self._item_bytes
        is_fit = self._has_device and piece.device_id == device_id and 0 < size <= piece.byte_size
        if not is_fit or dtype.numpy != self.info.dtype.numpy:
            return None
        self._context.copy_within(piece.address, self._device, size, stream)
        return DeviceArray(dtype.numpy, shape, (piece,))

    def fetch(self, shape: Sequence[int], stream: int) -> None:
        """Begin to bring what the GPU wrote to the host."""
        if self._has_device and self._host is not None:
            self._context.copy_out(self._host.address, self._device, math.prod(shape) * self._item_bytes, stream)

    def take(self, shape: Sequence[int], dtype: DType, rows: int | None = None) -> Array:
        """Return a copy of what was fetched, of the caller's type, once the stream is done; the first `rows` only."""
        view = self._view(shape)
        chosen = view if rows is None else view[:rows]
        return chosen.astype(dtype.numpy, copy=True)

    def free(self) -> None:
        """Give the memory back. May be called again."""
        host, self._host = self._host, None
        device, self._device = self._device, 0
        self._capacity = 0
        if host is not None:
            self._context.free_host(host)
        if device:
            self._context.free(device)

    def _view(self, shape: Sequence[int]) -> Array:
        assert self._host is not None
        size = math.prod(shape) * self._item_bytes
        view: Array = self._host.array[:size].view(self.info.dtype.numpy).reshape(tuple(shape))
        return view


class Grower:
    """The memory of an output whose size depends on the data: TensorRT asks for it while it runs.

    What it asks for is kept for the next run. An error in here must not be raised through TensorRT: 0 is told to it,
    and `fault` says why.
    """

    def __init__(self, slot: TensorBuffer) -> None:
        self.slot = slot
        self.shape: tuple[int, ...] = ()
        self.fault: Exception | None = None

    def begin(self) -> None:
        self.shape, self.fault = (), None

    def allocate(self, byte_count: int) -> int:
        try:
            self.slot.make_room_for_bytes(byte_count)
        except Exception as error:  # noqa: BLE001 - handed on by the session once TensorRT has come back
            self.fault = error
            return 0
        return self.slot.address

    def notify(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
