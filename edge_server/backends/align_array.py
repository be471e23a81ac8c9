"""Aligned, contiguous and, where a runtime needs it, writable numpy arrays, without a copy where possible."""

from __future__ import annotations

import numpy as np

from edge_server.backends.base import Array


def readable(array: Array) -> Array:
    """Return the array if a runtime can read it in place, else an aligned, contiguous copy."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.array(array, order="C")


def writable(array: Array) -> Array:
    """Return a writable array over the same memory, for a binding that refuses read-only inputs but only reads them.

    The result keeps the memory alive, because a model may keep its input for the next run.
    """
    ready = readable(array)
    return ready if ready.flags.writeable else np.asarray(_WritableView(ready))


class _WritableView:
    """Presents an array's memory to numpy as writable."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, array: Array) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._array = array
