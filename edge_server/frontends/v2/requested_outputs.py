"""Conversion of output tensors as a request asked for them: to classification strings, or into shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.core.device_tensor import DeviceTensor
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import Cancelled, InvalidRequest
from edge_server.memory.region_pins import OutputRegion, RegionRef, Regions, RequestRegions
from edge_server.protocol.raw_tensors import raw_from_tensor, raw_size

if TYPE_CHECKING:
    import numpy.typing as npt


class RequestedOutput(NamedTuple):
    """A requested output.

    `binary` None means the default of the request. `classification` is the number of best classes to return, 0 for the
    tensor itself. `region` None means that the response carries the output.
    """

    name: str
    binary: bool | None = None
    classification: int = 0
    region: RegionRef | None = None


def classify(tensor: Tensor, k: int, labels: Sequence[str], has_batch: bool) -> Tensor:
    """Return the `k` highest values as BYTES strings "score:index" or "score:index:label", best first.

    The shape is (rows, k) when `has_batch`, else (k,); `k` is at most the number of classes. Equal scores keep the
    order of their indices, NaN is last. Scores have the format of C's printf, %f for floating point, else %d. Raises
    InvalidRequest for BYTES and BOOL.
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
    numbers: npt.NDArray[np.generic] = tensor.array
    if tensor.dtype is DType.BF16:
        numbers = np.left_shift(numbers.astype(np.uint32), 16).view(np.float32)
    scores = numbers.reshape(rows, classes)
    kept = min(k, classes)
    best = _best_columns(scores, kept)
    texts = np.empty((rows, kept), dtype=object)
    for row in range(rows):
        for rank, index in enumerate(best[row].tolist()):
            score = scores[row, index].item()
            text = f"{score:f}:{index}" if isinstance(score, float) else f"{score}:{index}"
            if index < len(labels) and labels[index]:
                text = f"{text}:{labels[index]}"
            texts[row, rank] = text.encode()
    return Tensor(tensor.name, DType.BYTES, texts if has_rows else texts.reshape(kept))


def _best_columns(scores: npt.NDArray[np.generic], kept: int) -> npt.NDArray[np.intp]:
    """Return column indices of the `kept` highest scores of each row, best first."""
    # An ascending sort of the reversed columns, read backwards, keeps equal scores in the order of their indices.
    # Integers cannot be negated instead: the lowest one and unsigned ones have no negative.
    flipped = scores[:, ::-1]
    if scores.dtype.kind == "f":
        flipped = np.where(np.isnan(flipped), -np.inf, flipped)
    order = np.argsort(flipped, axis=1, kind="stable")[:, ::-1][:, :kept]
    best: npt.NDArray[np.intp] = scores.shape[1] - 1 - order
    return best


def write_to_region(tensor: Tensor, region: RegionRef, pin: OutputRegion) -> int:
    """Write the raw bytes of a tensor into a pinned region, and return their count.

    Raises InvalidRequest if the client's region is too small; nothing is written then.
    """
    raw: bytes | memoryview | None = None
    if isinstance(tensor, DeviceTensor) and _is_written(tensor, pin):
        size = raw_size(tensor)
    else:
        raw = raw_from_tensor(tensor)
        size = len(raw)
    if size > region.byte_size:
        raise InvalidRequest(
            f"shared memory size specified with the request for output '{tensor.name}' ({region.byte_size} bytes) "
            f"should be at least {size} bytes to hold the results"
        )
    if raw is not None:
        pin.write(raw)
    return size


def _is_written(tensor: DeviceTensor, pin: OutputRegion) -> bool:
    """Return whether the backend has already written the tensor to the region."""
    piece = tensor.elements.piece
    return pin.device is not None and piece is not None and pin.device.is_at(piece)


class OutputPlaces:
    """The shared memory of one request's outputs. Thread-safe.

    The regions are pinned before the model runs, so that a missing region is an early error. A region that is
    unregistered meanwhile stays mapped until `release`.
    """

    __slots__ = ("_is_released", "_lock", "_release", "pieces")

    def __init__(self, pieces: Mapping[str, OutputRegion], release: Callable[[], None]) -> None:
        """`pieces` are pinned, by name of the output. `release` releases them."""
        self.pieces = pieces
        self._release = release
        self._lock = threading.Lock()
        self._is_released = False

    def write(self, tensor: Tensor, region: RegionRef) -> int:
        """Write an output to its region, and return the number of bytes.

        Raises the errors of `write_to_region`, and Cancelled after `release`.
        """
        with self._lock:
            if self._is_released:
                raise Cancelled(f"output '{tensor.name}' is not written to its region: the request is over")
            return write_to_region(tensor, region, self.pieces[tensor.name])

    def release(self) -> None:
        """Wait for a running write, then release the regions."""
        with self._lock:
            if not self._is_released:
                self._is_released = True
                self._release()


def pin_places(outputs: Iterable[RequestedOutput], regions: Regions) -> OutputPlaces:
    """Pin the regions of outputs. Raises the errors of the registry; nothing stays pinned then."""
    pins = RequestRegions(regions)
    try:
        pieces = {item.name: pins.pin_view(item.region) for item in outputs if item.region is not None}
    except BaseException:
        pins.release()
        raise
    return OutputPlaces(pieces, pins.release)
