"""Class `Tensor`: a name, a KServe data type and a numpy array, passed through the server without copies."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt


class _NumpyTypes:
    """Sets the numpy type of all data types at the first access, and then removes itself. numpy may load late."""

    def __get__(self, member: DType | None, owner: type[DType]) -> np.dtype[np.generic]:
        for other in owner:
            vars(other)["numpy"] = np.dtype(other.numpy_name)
        with contextlib.suppress(AttributeError):  # another thread may remove it at the same time
            del owner.numpy
        if member is None:
            raise AttributeError("only a member has a numpy type")
        found: np.dtype[np.generic] = vars(member)["numpy"]
        return found


class DType(enum.Enum):
    """A KServe v2 data type. The value is its v2 name ("FP32", "BYTES", ...).

    `itemsize`: bytes per element on the wire; 0 for BYTES, whose elements vary.
    `numpy`: element type of its arrays. BYTES is an object array of `bytes`. BF16, which numpy does not have, is an
    array of uint16 bit patterns (the upper half of the FP32 pattern).
    `number`: value of inference.DataType in Triton's model_config.proto.
    """

    itemsize: int
    number: int
    numpy_name: str
    if TYPE_CHECKING:
        numpy: np.dtype[np.generic]
    else:
        numpy = _NumpyTypes()

    def __new__(cls, name: str, number: int, itemsize: int, numpy_name: str) -> DType:
        member = object.__new__(cls)
        member._value_ = name
        member.number = number
        member.itemsize = itemsize
        member.numpy_name = numpy_name
        return member

    BOOL = ("BOOL", 1, 1, "bool")
    UINT8 = ("UINT8", 2, 1, "u1")
    UINT16 = ("UINT16", 3, 2, "<u2")
    UINT32 = ("UINT32", 4, 4, "<u4")
    UINT64 = ("UINT64", 5, 8, "<u8")
    INT8 = ("INT8", 6, 1, "i1")
    INT16 = ("INT16", 7, 2, "<i2")
    INT32 = ("INT32", 8, 4, "<i4")
    INT64 = ("INT64", 9, 8, "<i8")
    FP16 = ("FP16", 10, 2, "<f2")
    FP32 = ("FP32", 11, 4, "<f4")
    FP64 = ("FP64", 12, 8, "<f8")
    BYTES = ("BYTES", 13, 0, "O")
    BF16 = ("BF16", 14, 2, "<u2")

    @property
    def config_name(self) -> str:
        """The name in config.pbtxt: "TYPE_FP32"; BYTES is "TYPE_STRING" there."""
        return "TYPE_STRING" if self is DType.BYTES else f"TYPE_{self.value}"

    @classmethod
    def from_numpy(cls, dtype: npt.DTypeLike) -> DType:
        """Return the KServe type of a numpy dtype. Strings (StringDType too) and objects are BYTES. Raises KeyError if
        there is none."""
        found = np.dtype(dtype)
        if found.kind in "OSTU":
            return cls.BYTES
        return _by_numpy()[found.newbyteorder("<")]


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Return whether an array of this shape has these dims, in which -1 is any size."""
    return len(shape) == len(dims) and all(want in (-1, size) for want, size in zip(dims, shape, strict=True))


STRING_PREFIX_BYTES = 4
"""Size of the length before each string in KServe's raw form."""

BY_NAME: dict[str, DType] = {member.value: member for member in DType}
BY_CONFIG_NAME: dict[str, DType] = {member.config_name: member for member in DType}


@functools.cache
def _by_numpy() -> dict[np.dtype[np.generic], DType]:
    return {member.numpy: member for member in DType if member not in (DType.BYTES, DType.BF16)}


def bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bit patterns of the nearest BF16 numbers."""
    bits = values.view(np.uint32)
    # Adding 0x7FFF, and 1 more if the kept part is odd, rounds to nearest with ties to even.
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def split_strings(data: bytes | memoryview) -> Iterator[bytes]:
    """Yield the strings of KServe's raw form, each after its length in 4 bytes, little-endian.

    Raises ValueError for one that is cut off.
    """
    end = 0
    while end < len(data):
        begin = end + STRING_PREFIX_BYTES
        end = begin + int.from_bytes(data[begin - STRING_PREFIX_BYTES : begin], "little")
        if begin > len(data) or end > len(data):
            raise ValueError("a string, or its length, is cut off")
        yield bytes(data[begin:end])


@record(slots=True)
class Tensor:
    """One named tensor of a request or a response. Do not change it after it is made.

    `array.shape` is the tensor's shape with the batch dimension, `array.dtype` is `dtype.numpy`. The array may be a
    read-only view of a received body or of a shared-memory region. It is valid until its request ends.
    """

    name: str
    dtype: DType
    array: npt.NDArray[np.generic]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes
