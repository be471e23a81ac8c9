"""Segmentation head: class scores per network pixel to a class mask of the frame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from edge_server.core.model_spec import ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BadModelConfig
from edge_server.plugins.vision.heads.box_candidates import NetworkSize
from edge_server.plugins.vision.heads.output_parameters import Activation, MaskDeclaration, MaskLayout
from edge_server.plugins.vision.heads.output_tensors import HeadOutput, Reals, frame_dims, named_output, reals
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import Mask

if TYPE_CHECKING:
    import numpy.typing as npt

    ClassIndices: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

BAND_PIXELS = 1 << 16
"""Number of pixels processed at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """Conversion of one output to a mask of the frame. `size` is the size of the network's input."""

    slot: HeadOutput
    layout: MaskLayout
    threshold: float
    unseen: int
    labels: tuple[str, ...]
    size: NetworkSize

    def read(self, outputs: Mapping[str, npt.NDArray[Any]], row: int | None, fit: FittedPicture, *, model: str) -> Mask:
        """Return the class of each pixel of the frame, taken from the network's pixel under its centre.

        Raises BackendError for an output of another shape than declared.
        """
        picked = self.slot.pick(outputs, row, model=model)
        if picked.ndim == 3 and self.layout is MaskLayout.INDEX and picked.shape[0] == 1:
            picked = picked[0]
        if picked.ndim != self.slot.rank or 0 in picked.shape:
            raise BackendError(
                f"model '{model}', output '{self.slot.name}': expected {self.slot.rank} dimensions "
                f"({self.layout.value}), given shape {list(picked.shape)}"
            )
        small = self._classes(picked)
        data = self._to_frame(small, fit)
        encoding = "mono8" if data.dtype == np.uint8 else "mono16"
        return Mask(fit.height, fit.width, encoding, data.reshape(-1).view(np.uint8).data, self.labels)

    def _classes(self, picked: npt.NDArray[Any]) -> ClassIndices:
        """Return the class of each of the network's pixels."""
        if self.layout is MaskLayout.INDEX:
            return _as_indices(reals(picked, self.slot.dtype) if self.slot.dtype is DType.BF16 else picked)
        scores = reals(picked, self.slot.dtype)
        axis = 0 if self.layout is MaskLayout.PLANAR else 2
        if scores.shape[axis] == 1:
            return np.asarray(scores.squeeze(axis) >= self.threshold, np.uint8)
        return strongest_plane(scores) if self.layout is MaskLayout.PLANAR else strongest_channel(scores)

    def _to_frame(self, small: ClassIndices, fit: FittedPicture) -> ClassIndices:
        """Scale the mask to the frame. Columns come first, while there are few rows; then whole rows are copied."""
        height, width = small.shape
        columns, is_column = _sources(fit.width, fit.scale_x, fit.offset_x, self.size.width, width)
        rows, is_row = _sources(fit.height, fit.scale_y, fit.offset_y, self.size.height, height)
        is_whole = bool(is_column.all() and is_row.all())
        if not is_whole and self.unseen > 255:
            small = small.astype(np.uint16)
        wide = small.take(columns, axis=1)
        full = wide.take(rows, axis=0)
        if not is_whole:
            full[:, ~is_column] = self.unseen
            full[~is_row] = self.unseen
        return full.astype(full.dtype.newbyteorder("<"), copy=False)


def _sources(
    length: int, scale: float, offset: float, network: int, mask: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return, for each of `length` pixels of the frame, the mask pixel under its centre, and whether there is one.

    `network` and `mask` are the lengths of the network's input and of its mask along the same side.
    """
    positions = (np.arange(length) + 0.5) * scale + offset
    is_seen = (positions >= 0) & (positions < network)
    return np.clip(positions * (mask / network), 0, mask - 1).astype(np.intp), is_seen


def strongest_plane(planes: Reals) -> ClassIndices:
    """Return the class with the largest score of (classes, height, width) at each pixel, the first among equals.

    NaN never wins. Bands of rows stay in the cache: 21 classes of 512x512 take 4 ms, against 23 ms for argmax along the
    first dimension.
    """
    count, height, width = planes.shape
    kind = np.uint8 if count <= 256 else np.uint16
    found = np.zeros((height, width), kind)
    step = max(1, BAND_PIXELS // width)
    for top in range(0, height, step):
        index, band = found[top : top + step], planes[:, top : top + step]
        best = np.fmax(band[0], -np.inf)
        for number in range(1, count):
            is_better = band[number] > best
            np.fmax(best, band[number], out=best)
            # Later class numbers are larger, so the last better one wins.
            np.maximum(index, is_better * kind(number), out=index)
    return found


def strongest_channel(channels: Reals) -> ClassIndices:
    """Return the same as `strongest_plane` for (height, width, classes), where argmax is fast."""
    is_none = np.isnan(channels)
    if is_none.any():
        channels = np.where(is_none, -np.inf, channels)
    found: ClassIndices = channels.argmax(axis=2).astype(np.uint8 if channels.shape[2] <= 256 else np.uint16)
    return found


def _as_indices(picked: npt.NDArray[Any]) -> ClassIndices:
    """Return class indices in the smallest type that holds them; a value that cannot be an index becomes 0."""
    is_index = (picked >= 0) & (picked <= 65535)
    indices = np.where(is_index, picked, 0)
    return indices.astype(np.uint8 if indices.max() <= 255 else np.uint16)


def mask_plan(spec: ModelSpec, declaration: MaskDeclaration, size: NetworkSize) -> MaskPlan:
    """Return the plan that converts a model's output to a mask. Raises BadModelConfig for unsuitable dims."""
    output = named_output(spec, "mask_output", declaration.output)
    layout = declaration.layout or _layout(spec, output)
    rank = 2 if layout is MaskLayout.INDEX else 3
    dims = frame_dims(spec, output, rank)
    if layout is MaskLayout.INDEX and len(dims) == 3 and dims[0] == 1:
        dims = dims[1:]
    if len(dims) != rank:
        raise BadModelConfig(
            f"model '{spec.name}', output '{output.name}': expected {rank} dims for mask_layout {layout.value}, "
            f"given {list(output.dims)}"
        )
    threshold = declaration.threshold
    if declaration.activation is Activation.SIGMOID:
        threshold = _logit(threshold)
    return MaskPlan(
        HeadOutput(output.name, output.dtype, rank), layout, threshold, declaration.unseen, output.labels, size
    )


def _logit(probability: float) -> float:
    """Return the score whose sigmoid is `probability`."""
    if probability in (0.0, 1.0):
        return -math.inf if probability == 0.0 else math.inf
    return math.log(probability / (1 - probability))


def _layout(spec: ModelSpec, output: OutputSpec) -> MaskLayout:
    """Return the layout by type and dims: integers are indices, and the shortest of three sides counts classes.

    Raises BadModelConfig if type and dims are ambiguous.
    """
    dims = frame_dims(spec, output, 3)
    is_integer = output.dtype is not DType.BF16 and output.dtype.numpy.kind in "iu"
    if len(dims) == 2 or (is_integer and len(dims) == 3 and dims[0] in (1, -1)):
        return MaskLayout.INDEX
    if len(dims) == 3:
        first, second, third = (math.inf if dim == -1 else dim for dim in dims)
        if first < min(second, third):
            return MaskLayout.PLANAR
        if third < min(first, second):
            return MaskLayout.PACKED
    raise BadModelConfig(
        f"model '{spec.name}', output '{output.name}': expected mask_layout stated (planar, packed or index), as its "
        f"dims do not tell, given {list(output.dims)}"
    )
