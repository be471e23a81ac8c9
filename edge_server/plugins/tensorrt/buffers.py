"""Memory for the inputs and outputs of a TensorRT run: page-locked host memory and device memory, with the copies
between them.

On a board whose GPU shares the CPU's memory, the host memory is mapped instead and nothing is copied. Buffers grow and
are kept, because large allocations fail on such boards once their memory is fragmented.

A tensor whose format is not linear is converted in host memory: clients send and get row-major arrays.

If a client's tensor lies on the GPU, TensorRT reads it there, or it is copied on the device. It is not copied through
the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edge_server.backends.base import Array
from edge_server.backends.cuda.cuda_ctypes import CudaContext, HostBlock
from edge_server.core.device_tensor import DeviceArray, DevicePiece
from edge_server.core.tensor import DType
from edge_server.plugins.tensorrt.library_adapter import TensorInfo

_ALIGNMENT = 256
"""Alignment of addresses for IExecutionContext::setTensorAddress. Tensors at other addresses are copied first."""


class TensorBuffer:
    """The memory of one tensor. Used within its context, by one thread at a time.

    `address` is the address that TensorRT uses: on the host for shape tensors, else on the device. `strides` are those
    of TensorRTLibrary.strides for the shape in use; only a tensor that is not linear needs them.
    """

    def __init__(self, info: TensorInfo, context: CudaContext, *, is_mapped: bool) -> None:
        self.info = info
        self._context = context
        self._is_mapped = is_mapped and not info.is_on_host
        self._has_device = not (self._is_mapped or info.is_on_host)
        self._host: HostBlock | None = None
        self._device = 0
        self._capacity = 0
        self._borrowed = 0
        """Address of a client's memory that is used for this run, 0 for none."""
        self._item_bytes = np.dtype(info.dtype.numpy).itemsize
        self.strides: Sequence[int] = ()

    @property
    def address(self) -> int:
        if self._has_device:
            return self._borrowed or self._device
        if self._host is None:
            return 0
        return self._host.device_address if self._is_mapped else self._host.address

    def reserve(self, shape: Sequence[int]) -> bool:
        """Make the buffer large enough for that shape. Return whether the address changed. Raises CudaFault."""
        return self.reserve_bytes(self._byte_count(shape))

    def reserve_bytes(self, byte_count: int) -> bool:
        if self._host is not None and byte_count <= self._capacity:
            return False
        self.free()
        self._host = self._context.allocate_host(byte_count, is_mapped=self._is_mapped)
        if self._has_device:
            self._device = self._context.allocate(byte_count)
        self._capacity = byte_count
        return True

    def can_use(self, array: DeviceArray, device_id: int) -> bool:
        """Return whether the elements can stay on the GPU: they are on this one, of the engine's type and format."""
        is_here = all(isinstance(part, np.ndarray) or part.device_id == device_id for part in array.parts)
        return is_here and self._has_device and self.info.is_linear and array.dtype == self.info.dtype.numpy

    def upload(
        self, array: Array | DeviceArray, stream: int, rows: int | None = None, *, is_recorded: bool = False
    ) -> None:
        """Start to copy an array to the GPU. Rows beyond the array's, up to `rows`, become zeros.

        `can_use` must be true for a DeviceArray. One that lies on the GPU in one piece is not copied: `address` is its
        address until `release_borrowed`. A recorded run (`is_recorded`) always copies, because its addresses are fixed.
        """
        if isinstance(array, DeviceArray):
            piece = array.piece
            if piece is not None and not is_recorded and piece.address % _ALIGNMENT == 0:
                self._borrowed = piece.address
            else:
                self._copy_parts(array, stream, rows)
            return
        shape = array.shape if rows is None else (rows, *array.shape[1:])
        byte_count = self._byte_count(shape)
        if not self.info.is_linear:
            self._pack(array, shape, byte_count)
        elif rows is None:
            np.copyto(self._view(shape), array, casting="unsafe")
        else:
            view = self._view(shape)
            np.copyto(view[: len(array)], array, casting="unsafe")
            view[len(array) :] = 0
        if self._has_device and self._host is not None:
            self._context.copy_to_device(self._device, self._host.address, byte_count, stream)

    def release_borrowed(self) -> None:
        """Forget the address of a client's memory."""
        self._borrowed = 0

    def _copy_parts(self, array: DeviceArray, stream: int, rows: int | None) -> None:
        """Start to copy the parts into the buffer. Parts on the device are copied on the device."""
        assert self._host is not None
        if any(isinstance(part, np.ndarray) for part in array.parts):
            start = 0
            for part in array.parts:
                if isinstance(part, np.ndarray):
                    self._host.array[start : start + part.nbytes] = (
                        np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                    )
                start += part.nbytes if isinstance(part, np.ndarray) else part.byte_size
            # One copy for all host parts. The copies on the device overwrite the gaps, as a stream keeps order.
            self._context.copy_to_device(self._device, self._host.address, array.nbytes, stream)
        start = 0
        for part in array.parts:
            size = part.nbytes if isinstance(part, np.ndarray) else part.byte_size
            if not isinstance(part, np.ndarray):
                self._context.copy_on_device(self._device + start, part.address, size, stream)
            start += size
        padding = 0 if rows is None else (rows - len(array)) * (array.nbytes // len(array))
        if padding:
            self._context.fill_zero(self._device + array.nbytes, padding, stream)

    def copy_to_target(
        self, shape: Sequence[int], dtype: DType, piece: DevicePiece, device_id: int, stream: int
    ) -> DeviceArray | None:
        """Start to copy the output to a client's memory on the GPU. Return None if that is impossible."""
        size = math.prod(shape) * self._item_bytes
        is_fit = self._has_device and piece.device_id == device_id and 0 < size <= piece.byte_size
        if not is_fit or not self.info.is_linear or dtype.numpy != self.info.dtype.numpy:
            return None
        self._context.copy_on_device(piece.address, self._device, size, stream)
        return DeviceArray(dtype.numpy, shape, (piece,))

    def download(self, shape: Sequence[int], stream: int) -> None:
        """Start to copy the output to the host."""
        if self._has_device and self._host is not None:
            self._context.copy_to_host(self._host.address, self._device, self._byte_count(shape), stream)

    def copy_downloaded(self, shape: Sequence[int], dtype: DType, rows: int | None = None) -> Array:
        """Return a copy of the downloaded output, or of its first `rows`, in that type. Synchronise first."""
        view = self._view(shape) if self.info.is_linear else self._unpacked(shape)
        chosen = view if rows is None else view[:rows]
        return chosen.astype(dtype.numpy, copy=True)

    def free(self) -> None:
        """Free the memory. May be called again."""
        host, self._host = self._host, None
        device, self._device = self._device, 0
        self._capacity = 0
        if host is not None:
            self._context.free_host(host)
        if device:
            self._context.free(device)

    def _byte_count(self, shape: Sequence[int]) -> int:
        if self.info.is_linear:
            return math.prod(shape) * self._item_bytes
        # As in NVIDIA's trtexec (samples/common/sampleUtils.cpp, volume): the longest dimension, with its gaps.
        size, dim = self.info.vector_size, self.info.vector_dim
        steps = [step if axis == dim else step * size for axis, step in enumerate(self.strides)]
        return max(n * step for n, step in zip(self._whole_vectors(shape), steps, strict=True)) * self._item_bytes

    def _whole_vectors(self, shape: Sequence[int]) -> list[int]:
        """Return the shape with whole vectors in the dimension that is stored in vectors."""
        size = self.info.vector_size
        return [-(-n // size) * size if axis == self.info.vector_dim else n for axis, n in enumerate(shape)]

    def _packed_view(self, shape: Sequence[int]) -> Array:
        """Return the memory as the format has it: the place within a vector is a dimension behind `vector_dim`.

        Raises ValueError if the strides leave the memory.
        """
        assert self._host is not None
        size, dim = self.info.vector_size, self.info.vector_dim
        sizes, steps = self._whole_vectors(shape), [step * size * self._item_bytes for step in self.strides]
        if dim >= 0:
            sizes[dim : dim + 1] = sizes[dim] // size, size
            steps.insert(dim + 1, self._item_bytes)
        view: Array = np.ndarray(sizes, self.info.dtype.numpy, self._host.array, strides=steps)
        return view

    def _pack(self, array: Array, shape: Sequence[int], byte_count: int) -> None:
        """Write an array of that shape, or of fewer rows, in the engine's format, with zeros in all gaps."""
        assert self._host is not None
        whole = np.zeros(self._whole_vectors(shape), self.info.dtype.numpy)
        whole[tuple(map(slice, array.shape))] = array
        self._host.array[:byte_count] = 0
        packed = self._packed_view(shape)
        packed[...] = whole.reshape(packed.shape)

    def _unpacked(self, shape: Sequence[int]) -> Array:
        """Return the output in memory as an array of that shape."""
        whole: Array = self._packed_view(shape).reshape(self._whole_vectors(shape))
        return whole[tuple(map(slice, shape))]

    def _view(self, shape: Sequence[int]) -> Array:
        assert self._host is not None
        size = math.prod(shape) * self._item_bytes
        view: Array = self._host.array[:size].view(self.info.dtype.numpy).reshape(tuple(shape))
        return view


class DynamicOutput:
    """Memory of an output whose size depends on the data. TensorRT requests it during the run.

    The memory is kept for the next run. An exception must not pass through TensorRT: `allocate` returns 0 instead, and
    `fault` holds the exception.
    """

    def __init__(self, buffer: TensorBuffer) -> None:
        self.buffer = buffer
        self.shape: tuple[int, ...] = ()
        self.fault: Exception | None = None

    def reset(self) -> None:
        self.shape, self.fault = (), None

    def allocate(self, byte_count: int) -> int:
        try:
            self.buffer.reserve_bytes(byte_count)
        except Exception as error:  # noqa: BLE001 - the session raises it after TensorRT has returned
            self.fault = error
            return 0
        return self.buffer.address

    def set_shape(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
