"""Import and export of arrays by DLPack, the protocol by which frameworks share arrays. Arrays in GPU memory are copied
to the host; all others share their memory.

numpy's exporter refuses read-only arrays and has no bfloat16, so the structures of dlpack.h (version 0.8, unversioned)
are defined here: DLTensor {data, device {type, id}, ndim, dtype {code, bits, lanes}, shape, strides, byte_offset} and
DLManagedTensor {DLTensor, manager_ctx, deleter}.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.base import Array
from edge_server.core.tensor import DType
from edge_server.plugins.python_models.error_translation import TritonModelException

if TYPE_CHECKING:
    from edge_server.backends.cuda.cuda_devices import CudaDevices

CPU_DEVICE = (1, 0)
"""kDLCPU, device 0."""

_HOST_DEVICES = (1, 3)
"""kDLCPU, kDLCUDAHost: memory that the CPU can read."""

_GPU_DEVICE = 2
"""kDLCUDA."""

_DEFAULT_STREAM = 1
"""CUDA's legacy default stream, in which a copy by the driver waits for its turn."""

_NAME = b"dltensor"
_USED_NAME = b"used_dltensor"

_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT = 4


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DLManagedTensor._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# The destructor sees a capsule whose last reference is gone, so it may use only the bare address.
_is_valid_address = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_of_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))

# Reentrant: the garbage collector may destroy a capsule while one is entered.
_lock = threading.RLock()
_exported: dict[int, tuple[Any, ...]] = {}
"""Address of an exported structure -> all objects that it points to, until the consumer deletes it."""


def export_tensor(array: Array, dtype: DType) -> object:
    """Return a capsule over the array's memory. The memory is kept until the consumer deletes the tensor."""
    if dtype is DType.BYTES:
        raise TritonModelException("a tensor of strings has no DLPack form")
    managed = _DLManagedTensor()
    tensor = managed.tensor
    shape = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
    strides = (ctypes.c_int64 * max(1, array.ndim))(*(step // array.itemsize for step in array.strides))
    tensor.data = array.__array_interface__["data"][0]
    tensor.device = _DLDevice(*CPU_DEVICE)
    tensor.ndim = array.ndim
    tensor.dtype = _DLDataType(_BFLOAT if dtype is DType.BF16 else _CODES[array.dtype.kind], 8 * array.itemsize, 1)
    tensor.shape, tensor.strides, tensor.byte_offset = shape, strides, 0
    managed.deleter = _delete_exported
    address = ctypes.addressof(managed)
    with _lock:
        _exported[address] = (managed, array, shape, strides)
    return _new_capsule(address, _NAME, _destroy_capsule)


def _release_exported(address: int) -> None:
    with _lock:
        _exported.pop(address, None)


def _on_capsule_destroyed(capsule: int) -> None:
    # A consumer renames the capsule, and deletes the tensor itself.
    if _is_valid_address(capsule, _NAME):
        _release_exported(_pointer_of_address(capsule, _NAME))


_delete_exported = _Deleter(_release_exported)
_destroy_capsule = _Destructor(_on_capsule_destroyed)


class _ForeignMemory:
    """Memory of another library as numpy's array interface. It is released with the last array over it."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, managed: _DLManagedTensor, kind: np.dtype[np.generic]) -> None:
        tensor = managed.tensor
        shape = tuple(tensor.shape[: tensor.ndim])
        strides = None
        if tensor.strides and tensor.ndim:
            strides = tuple(step * kind.itemsize for step in tensor.strides[: tensor.ndim])
        self.__array_interface__ = {
            "data": ((tensor.data or 0) + tensor.byte_offset, False),
            "shape": shape,
            "strides": strides,
            "typestr": kind.str,
            "version": 3,
        }


def import_tensor(source: Any) -> tuple[Array, DType]:
    """Return an array over the memory of a capsule or of an object with `__dlpack__`, and its element type. A tensor in
    GPU memory is copied to the host; its array is read-only.

    Raises TritonModelException for memory that can be neither read nor copied, and for types that have no tensor type.
    """
    capsule = source
    if not _is_valid(source, _NAME):
        if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
            raise TritonModelException(
                f"from_dlpack takes a DLPack capsule or an object with __dlpack__ and __dlpack_device__, "
                f"got {type(source).__name__}"
            )
        device = int(source.__dlpack_device__()[0])
        _check_device(device)
        capsule = source.__dlpack__(stream=_DEFAULT_STREAM) if device == _GPU_DEVICE else source.__dlpack__()
    if not _is_valid(capsule, _NAME):
        raise TritonModelException("the DLPack capsule was consumed before, or is of a newer kind than 'dltensor'")
    address = _pointer_of(capsule, _NAME)
    managed = _DLManagedTensor.from_address(address)
    _check_device(managed.tensor.device.type)
    kind, dtype = _kind(managed.tensor.dtype)
    if managed.tensor.device.type == _GPU_DEVICE:
        # The capsule still owns the tensor, and deletes it.
        return _copy_from_gpu(managed.tensor, kind), dtype
    foreign = _ForeignMemory(managed, kind)
    _rename(capsule, _USED_NAME)
    if managed.deleter:
        weakref.finalize(foreign, managed.deleter, address).atexit = False
    return np.asarray(foreign), dtype


def _check_device(device: int) -> None:
    if device not in (*_HOST_DEVICES, _GPU_DEVICE):
        raise TritonModelException(
            f"from_dlpack takes tensors in the memory of the CPU or of an NVIDIA GPU, got one of DLPack device {device}"
        )


def _copy_from_gpu(tensor: _DLTensor, kind: np.dtype[np.generic]) -> Array:
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_in_one_piece(shape, tensor.strides[: tensor.ndim]):
        raise TritonModelException(
            "from_dlpack copies a tensor from a GPU only if its elements are in one piece in row order: "
            "call its contiguous() first"
        )
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    try:
        read = _gpus().read(tensor.device.id, (tensor.data or 0) + tensor.byte_offset, size)
    except OSError as error:
        raise TritonModelException(f"from_dlpack cannot copy the tensor from GPU {tensor.device.id}: {error}") from None
    array: Array = np.frombuffer(read, np.uint8).view(kind).reshape(shape)
    return array


def _is_in_one_piece(shape: tuple[int, ...], strides: list[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


@functools.cache
def _gpus() -> CudaDevices:
    # Here, because most models have no tensor on a GPU.
    from edge_server.backends.cuda.cuda_devices import CudaDevices

    return CudaDevices()


def _kind(given: _DLDataType) -> tuple[np.dtype[np.generic], DType]:
    """Return the numpy type and the tensor type of a DLPack type."""
    if given.lanes == 1:
        if given.code == _BFLOAT and given.bits == 16:
            return DType.BF16.numpy, DType.BF16
        letter = next((letter for letter, code in _CODES.items() if code == given.code), "")
        name = "?" if letter == "b" and given.bits == 8 else f"<{letter}{given.bits // 8}"
        try:
            return np.dtype(name), DType.from_numpy(name)
        except (TypeError, KeyError):
            pass
    raise TritonModelException(
        f"from_dlpack: no tensor type for DLPack code {given.code}, {given.bits} bits, {given.lanes} lanes"
    )
