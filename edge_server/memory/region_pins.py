"""Use of clients' shared memory by requests: keeps the memory mapped until each request that uses it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edge_server.core.device_tensor import DeviceArray, DevicePiece, DeviceTensor
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.protocol.raw_tensors import byte_size_mismatch, element_count, tensor_from_raw


class RegionRef(NamedTuple):
    """`byte_size` bytes from `offset` within the registered shared-memory region `name`."""

    name: str
    offset: int
    byte_size: int


class OutputRegion(Protocol):
    """Piece of a region to which outputs are written. `device` is set for a piece of GPU memory."""

    @property
    def device(self) -> DevicePiece | None: ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Copy `data` to the start of the piece, which must be pinned for writing. Device memory has no writable
        view."""


class RegionView(OutputRegion, Protocol):
    """Piece of a region, kept mapped. `view` is valid until `release`."""

    @property
    def view(self) -> memoryview: ...

    def release(self) -> None:
        """Release the piece. May be called from any thread. Further calls do nothing."""


class Regions(Protocol):
    """Registry of shared-memory regions, as codecs use it."""

    def pin(self, name: str, offset: int, byte_size: int, *, writable: bool = False) -> RegionView: ...


class RequestRegions:
    """Pieces that one request holds. `release` frees all of them, from any thread."""

    __slots__ = ("_held", "_regions")

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._held: list[RegionView] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def pin(self, region: RegionRef, *, writable: bool = False) -> memoryview:
        """Return a view of the piece, valid until `release`. Raises the registry's errors."""
        return self.pin_view(region, writable=writable).view

    def pin_view(self, region: RegionRef, *, writable: bool = True) -> RegionView:
        """Return the piece itself for writing. Raises the registry's errors."""
        pin = self._regions.pin(region.name, region.offset, region.byte_size, writable=writable)
        self._held.append(pin)
        return pin

    def tensor(self, name: str, dtype: DType, shape: Sequence[int], region: RegionRef, *, model: str) -> Tensor:
        """Pin a piece and return the tensor in it, as `tensor_in_region`. Raises the registry's errors too."""
        pin = self.pin_view(region, writable=False)
        return tensor_in_region(name, dtype, shape, pin, region.byte_size, model=model)

    def target(self, region: RegionRef) -> DevicePiece | None:
        """Return the GPU memory piece for an output; None if the region is not on a GPU. Raises the registry's errors.

        Held with the inputs, because a backend may write there even after the request is abandoned.
        """
        pin = self._regions.pin(region.name, region.offset, region.byte_size, writable=True)
        if pin.device is None:
            pin.release()
        else:
            self._held.append(pin)
        return pin.device

    def release(self) -> None:
        held, self._held = self._held, []
        for pin in held:
            pin.release()


def tensor_in_region(
    name: str, dtype: DType, shape: Sequence[int], pin: RegionView, byte_size: int, *, model: str
) -> Tensor:
    """Return the tensor in a pinned piece of `byte_size` bytes; GPU memory stays on the GPU. Raises InvalidRequest if
    shape and byte count do not match.

    Strings and booleans are copied to the host for checks, because a client may set their bytes to anything.
    """
    if pin.device is None or dtype in (DType.BYTES, DType.BOOL):
        return tensor_from_raw(name, dtype, shape, pin.view, model=model)
    count = element_count(name, shape, model=model)
    if byte_size != count * dtype.itemsize:
        raise byte_size_mismatch(name, model, count * dtype.itemsize, byte_size)
    if count == 0:
        return tensor_from_raw(name, dtype, shape, b"", model=model)
    return DeviceTensor(name, dtype, DeviceArray(dtype.numpy, shape, (pin.device,)))


def check_inside(name: str, region_bytes: int, offset: int, byte_size: int) -> None:
    """Raise InvalidRequest for a slice that is not inside the region `name` of `region_bytes`, with Triton's words."""
    if not 0 <= offset < region_bytes:
        raise InvalidRequest(
            f"Invalid offset for shared memory region: '{name}': {offset}, the region has {region_bytes} bytes"
        )
    if byte_size < 0 or offset + byte_size > region_bytes:
        raise InvalidRequest(
            f"Invalid offset + byte size for shared memory region: '{name}': {offset} + {byte_size}, "
            f"the region has {region_bytes} bytes"
        )
