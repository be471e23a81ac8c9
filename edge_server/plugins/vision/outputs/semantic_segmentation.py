"""Decoder of segmentation outputs: makes a mask with the class of each pixel of the frame from the class scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from edge_server.core.model_spec import ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BadModelConfig
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize
from edge_server.plugins.vision.outputs.output_parameters import Activation, MaskDeclaration, MaskLayout
from edge_server.plugins.vision.outputs.output_tensors import (
    FloatArray,
    OutputTensor,
    as_floats,
    choose_output,
    drop_batch_dim,
)
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import Mask
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

    ClassIndices: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

BAND_PIXELS = 1 << 16
"""Number of pixels processed at a time, so that they stay in the processor's cache."""


@record(frozen=True, slots=True)
class MaskDecoder:
    """Decodes one output to a mask of the frame. `size` is the size of the network's input."""

    tensor: OutputTensor
    layout: MaskLayout
    threshold: float
    unseen: int
    labels: tuple[str, ...]
    size: NetworkSize

    def decode(
        self, outputs: Mapping[str, npt.NDArray[Any]], item: int | None, fit: FittedPicture, *, model: str
    ) -> Mask:
        """Return the class of each pixel of the frame, taken from the network's pixel under its centre.

        Raises BackendError for an output of another shape than declared.
        """
        values = self.tensor.select(outputs, item, model=model)
        if values.ndim == 3 and self.layout is MaskLayout.INDEX and values.shape[0] == 1:
            values = values[0]
        if values.ndim != self.tensor.rank or 0 in values.shape:
            raise BackendError(
                f"model '{model}', output '{self.tensor.name}': expected {self.tensor.rank} dimensions "
                f"({self.layout.value}), given shape {list(values.shape)}"
            )
        data = self._scale_to_frame(self._find_classes(values), fit)
        encoding = "mono8" if data.dtype == np.uint8 else "mono16"
        return Mask(fit.height, fit.width, encoding, data.reshape(-1).view(np.uint8).data, self.labels)

    def _find_classes(self, values: npt.NDArray[Any]) -> ClassIndices:
        """Return the class of each of the network's pixels."""
        if self.layout is MaskLayout.INDEX:
            numbers = as_floats(values, self.tensor.dtype) if self.tensor.dtype is DType.BF16 else values
            # A value that cannot be an index becomes 0.
            indices = np.where((numbers >= 0) & (numbers <= 65535), numbers, 0)
            return indices.astype(np.uint8 if indices.max() <= 255 else np.uint16)
        scores = as_floats(values, self.tensor.dtype)
        axis = 0 if self.layout is MaskLayout.CHW else 2
        if scores.shape[axis] == 1:
            return np.asarray(scores.squeeze(axis) >= self.threshold, np.uint8)
        return argmax_chw(scores) if self.layout is MaskLayout.CHW else argmax_hwc(scores)

    def _scale_to_frame(self, small: ClassIndices, fit: FittedPicture) -> ClassIndices:
        """Scale the mask to the frame. Columns come first, while there are few rows; then whole rows are copied."""
        height, width = small.shape
        columns, is_column = _source_pixels(fit.width, fit.scale_x, fit.offset_x, self.size.width, width)
        rows, is_row = _source_pixels(fit.height, fit.scale_y, fit.offset_y, self.size.height, height)
        is_whole = bool(is_column.all() and is_row.all())
        if not is_whole and self.unseen > 255:
            small = small.astype(np.uint16)
        wide = small.take(columns, axis=1)
        full = wide.take(rows, axis=0)
        if not is_whole:
            full[:, ~is_column] = self.unseen
            full[~is_row] = self.unseen
        return full.astype(full.dtype.newbyteorder("<"), copy=False)


def _source_pixels(
    length: int, scale: float, offset: float, network: int, mask: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return, for each of `length` pixels of the frame, the mask pixel under its centre, and whether there is one.

    `network` and `mask` are the lengths of the network's input and of its mask along the same side.
    """
    positions = (np.arange(length) + 0.5) * scale + offset
    is_seen = (positions >= 0) & (positions < network)
    return np.clip(positions * (mask / network), 0, mask - 1).astype(np.intp), is_seen


def argmax_chw(planes: FloatArray) -> ClassIndices:
    """Return the class with the largest score of (classes, height, width) at each pixel, the first among equals.

    NaN never wins. Bands of rows stay in the cache: 21 classes of 512x512 take 4 ms, against 23 ms for argmax along the
    first dimension.
    """
    count, height, width = planes.shape
    kind = np.uint8 if count <= 256 else np.uint16
    found = np.zeros((height, width), kind)
    step = max(1, BAND_PIXELS // width)
    for top in range(0, height, step):
        indices, band = found[top : top + step], planes[:, top : top + step]
        best = np.fmax(band[0], -np.inf)
        for class_index in range(1, count):
            is_better = band[class_index] > best
            np.fmax(best, band[class_index], out=best)
            # Later class indices are larger, so the last better one wins.
            np.maximum(indices, is_better * kind(class_index), out=indices)
    return found


def argmax_hwc(channels: FloatArray) -> ClassIndices:
    """Return the same as `argmax_chw` for (height, width, classes), where argmax is fast."""
    is_none = np.isnan(channels)
    if is_none.any():
        channels = np.where(is_none, -np.inf, channels)
    found: ClassIndices = channels.argmax(axis=2).astype(np.uint8 if channels.shape[2] <= 256 else np.uint16)
    return found


def make_mask_decoder(spec: ModelSpec, declaration: MaskDeclaration, size: NetworkSize) -> MaskDecoder:
    """Return the decoder of a model's mask. Raises BadModelConfig for unsuitable dims."""
    output = choose_output(spec, "mask_output", declaration.output)
    layout = declaration.layout or _find_layout(spec, output)
    rank = 2 if layout is MaskLayout.INDEX else 3
    dims = drop_batch_dim(spec, output, rank)
    if layout is MaskLayout.INDEX and len(dims) == 3 and dims[0] == 1:
        dims = dims[1:]
    if len(dims) != rank:
        raise BadModelConfig(
            f"model '{spec.name}', output '{output.name}': expected {rank} dims for mask_layout {layout.value}, "
            f"given {list(output.dims)}"
        )
    threshold = declaration.threshold
    if declaration.activation is Activation.SIGMOID:
        # Scores are compared with the score whose sigmoid is the threshold, which is cheaper than their sigmoid.
        if threshold in (0.0, 1.0):
            threshold = -math.inf if threshold == 0.0 else math.inf
        else:
            threshold = math.log(threshold / (1 - threshold))
    return MaskDecoder(
        OutputTensor(output.name, output.dtype, rank),
        layout,
        threshold,
        declaration.unseen,
        spec.labels_of(output),
        size,
    )


def _find_layout(spec: ModelSpec, output: OutputSpec) -> MaskLayout:
    """Return the layout by type and dims: integers are indices, and the shortest of three sides counts classes.

    Raises BadModelConfig if type and dims are ambiguous.
    """
    dims = drop_batch_dim(spec, output, 3)
    is_integer = output.dtype is not DType.BF16 and output.dtype.numpy.kind in "iu"
    if len(dims) == 2 or (is_integer and len(dims) == 3 and dims[0] in (1, -1)):
        return MaskLayout.INDEX
    if len(dims) == 3:
        first, second, third = (math.inf if dim == -1 else dim for dim in dims)
        if first < min(second, third):
            return MaskLayout.CHW
        if third < min(first, second):
            return MaskLayout.HWC
    raise BadModelConfig(
        f"model '{spec.name}', output '{output.name}': expected mask_layout stated (planar, packed or index), as its "
        f"dims do not tell, given {list(output.dims)}"
    )
