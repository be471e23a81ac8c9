"""Shared-memory regions as requests use them: pinned from decoding until nobody needs the bytes any more."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RegionRef:
    """`byte_size` bytes from `offset` within the registered shared-memory region `name`."""

    name: str
    offset: int
    byte_size: int


class Pin(Protocol):
    """A piece of a region kept mapped; `view` is valid until `release`."""

    view: memoryview

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Copy `data` to the start of the piece, which was pinned for writing; device memory has no view."""

    def release(self) -> None: ...


class Regions(Protocol):
    """What codecs need of the registry of shared-memory regions."""

    def pin(self, name: str, offset: int, byte_size: int, *, writable: bool = False) -> Pin: ...


class Pins:
    """The pieces that one request holds. `release` lets go of all of them, once, from any thread."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._held: list[Pin] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._held)

    def pin(self, region: RegionRef, *, writable: bool = False) -> memoryview:
        """Return a view of the piece, valid until `release`. Raises what the registry raises."""
        return self.place(region, writable=writable).view

    def place(self, region: RegionRef, *, writable: bool = True) -> Pin:
        """Return the piece itself, to be written to. Raises what the registry raises."""
        pin = self._regions.pin(region.name, region.offset, region.byte_size, writable=writable)
        self._held.append(pin)
        return pin

    def release(self) -> None:
        with self._lock:
            held, self._held = self._held, []
        for pin in held:
            pin.release()
