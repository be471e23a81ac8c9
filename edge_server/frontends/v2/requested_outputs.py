"""Outputs as a client asked for them: classes instead of numbers, and results placed in shared memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge_server.core.device_tensor import DeviceTensor
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import Cancelled, InvalidRequest
from edge_server.memory.region_pins import RegionRef, Regions, RegionView, RequestRegions
from edge_server.protocol.raw_tensors import raw_from_tensor, raw_size

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output as asked for. `binary` None: as the request's default says. `classification` 0: the tensor itself,
    k: the k best classes. `region` None: in the response."""

    name: str
    binary: bool | None = None
    classification: int = 0
    region: RegionRef | None = None


def classify(tensor: Tensor, k: int, labels: Sequence[str], has_batch: bool) -> Tensor:
    """Return the `k` highest values as BYTES strings "score:index" or "score:index:label", best first.

    The shape is (rows, k) when `has_batch`, else (k,); `k` is cut to the count of classes. Equal scores keep index
    order, NaN comes last. Scores are written as C's printf writes %f (numbers with a fraction) or %d.
    Raises InvalidRequest for BYTES and BOOL, which have no order of that kind.
    """
    if tensor.dtype in (DType.BYTES, DType.BOOL):
        raise InvalidRequest(
            f"class result not available for output '{tensor.name}' due to unsupported type '{tensor.dtype.value}'"
        )
    if k < 1:
        raise InvalidRequest(f"classification of output '{tensor.name}' must ask for at least one class, got {k}")
    has_rows = has_batch and tensor.array.ndim > 0
    rows = tensor.array.shape[0] if has_rows else 1
    classes = tensor.array.size // rows if rows else 0
    scores = _numbers(tensor).reshape(rows, classes)
    kept = min(k, classes)
    best = _best(scores, kept)
    texts = np.empty((rows, kept), dtype=object)
    for row in range(rows):
        for place, index in enumerate(best[row].tolist()):
            texts[row, place] = _class_text(scores[row, index].item(), index, labels)
    return Tensor(tensor.name, DType.BYTES, texts if has_rows else texts.reshape(kept))


def _numbers(tensor: Tensor) -> npt.NDArray[np.generic]:
    if tensor.dtype is DType.BF16:
        widened: npt.NDArray[np.generic] = np.left_shift(tensor.array.astype(np.uint32), 16).view(np.float32)
        return widened
    return tensor.array


def _best(scores: npt.NDArray[np.generic], kept: int) -> npt.NDArray[np.intp]:
    """Return column indices of the `kept` highest scores of each row, best first."""
    # Ranking upwards on the reversed columns and reading backwards keeps equal scores in index order. Integers cannot
    # simply be negated: the lowest one has no opposite, and unsigned ones have none at all.
    flipped = scores[:, ::-1]
    if scores.dtype.kind == "f":
        flipped = np.where(np.isnan(flipped), -np.inf, flipped)
    order = np.argsort(flipped, axis=1, kind="stable")[:, ::-1][:, :kept]
    best: npt.NDArray[np.intp] = scores.shape[1] - 1 - order
    return best


def _class_text(score: int | float, index: int, labels: Sequence[str]) -> bytes:
    text = f"{score:f}" if isinstance(score, float) else str(score)
    if index < len(labels) and labels[index]:
        return f"{text}:{index}:{labels[index]}".encode()
    return f"{text}:{index}".encode()


def place_in_pin(tensor: Tensor, region: RegionRef, pin: RegionView) -> int:
    """Write the tensor's wire bytes into an already pinned region and return their count.

    Raises InvalidRequest, before a byte is written, when the client's region is too small.
    """
    size = raw_size(tensor)
    if size > region.byte_size:
        raise InvalidRequest(
            f"shared memory size specified with the request for output '{tensor.name}' ({region.byte_size} bytes) "
            f"should be at least {size} bytes to hold the results"
        )
    if not _lies_there(tensor, pin):
        pin.write(raw_from_tensor(tensor))
    return size


def _lies_there(tensor: Tensor, pin: RegionView) -> bool:
    """Return whether the backend has written the tensor to the region itself."""
    if pin.device is None or not isinstance(tensor, DeviceTensor):
        return False
    piece = tensor.elements.piece
    return piece is not None and pin.device.is_at(piece)


class OutputPlaces:
    """The shared memory that one request's outputs go to. Pinned before anything is computed: a missing region is found
    out then, and one that is unregistered meanwhile stays mapped until `release`. Thread-safe."""

    def __init__(self, outputs: Iterable[RequestedOutput], regions: Regions) -> None:
        """Raises what the registry raises; nothing stays pinned then."""
        self._pins = RequestRegions(regions)
        self._lock = threading.Lock()
        self._is_released = False
        try:
            self._places = {item.name: self._pins.place(item.region) for item in outputs if item.region is not None}
        except BaseException:
            self._pins.release()
            raise

    def write(self, tensor: Tensor, region: RegionRef) -> int:
        """Write an output to its place, and return the count of bytes. Raises what `place_in_pin` raises, and Cancelled
        after `release`."""
        with self._lock:
            if self._is_released:
                raise Cancelled(f"output '{tensor.name}' is not written to its region: the request is over")
            return place_in_pin(tensor, region, self._places[tensor.name])

    def on_gpus(self) -> list[str]:
        """Return the names of the outputs whose place is in a GPU's memory."""
        return [name for name, place in self._places.items() if place.device is not None]

    def release(self) -> None:
        """Give the memory back, once what is being written is done."""
        with self._lock:
            self._is_released = True
            self._pins.release()
