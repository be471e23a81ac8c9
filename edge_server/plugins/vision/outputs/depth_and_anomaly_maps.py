"""Decoder of outputs with a number for each pixel: depth of the scene, and anomaly maps of inspection models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BackendError, BadModelConfig, InvalidRequest
from edge_server.plugins.vision.decode import opencv
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize
from edge_server.plugins.vision.outputs.output_parameters import AnomalyDeclaration, DepthDeclaration, DepthKind
from edge_server.plugins.vision.outputs.output_tensors import (
    FloatArray,
    OutputTensor,
    choose_output,
    drop_batch_dim,
)
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import DenseMap, Detection
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatMap = npt.NDArray[np.float32]

MAX_REGIONS = 100
"""Most anomalous regions of a frame, those with the highest values."""

ANOMALY_LABEL = "anomaly"
MAX_SIDE = 32766
"""Longest side of a frame with a map, in pixels: OpenCV's interpolation takes no longer ones."""

_LEVELS = 65535


@record(frozen=True, slots=True)
class DenseMapDecoder:
    """Decodes one output to a map of the frame. `size` is the size of the network's input.

    `kind` is that of DenseMap. `scale` multiplies the network's numbers. `score` is the output with the anomaly score
    of the frame; None: it is the maximum of the map. Anomalous regions have values of at least `threshold`; None: none
    are looked for.
    """

    tensor: OutputTensor
    kind: str
    scale: float
    score: OutputTensor | None
    threshold: float | None
    size: NetworkSize

    @property
    def output_names(self) -> tuple[str, ...]:
        return (self.tensor.name,) if self.score is None else (self.tensor.name, self.score.name)

    def decode(
        self, outputs: Mapping[str, npt.NDArray[Any]], item: int | None, fit: FittedPicture, *, model: str
    ) -> DenseMap:
        """Return the map of the frame, between the network's numbers by bilinear interpolation.

        Metric depth is 32FC1, with NaN where the network gives no number or did not see the frame. Other kinds are
        mono16, where such pixels have the least value. Raises BackendError for an output of another shape, and
        InvalidRequest for a frame with a side over MAX_SIDE.
        """
        if max(fit.width, fit.height) > MAX_SIDE:
            raise InvalidRequest(
                f"model '{model}': expected a frame with sides of at most {MAX_SIDE} pixels for a map, given "
                f"{fit.width}x{fit.height}"
            )
        small = self._select(outputs, item, model=model)
        full = _scale_to_frame(small, fit, self.size)
        minimum, maximum = float(full.min()), float(full.max())
        if not (np.isfinite(minimum) and np.isfinite(maximum)):
            is_number = np.isfinite(full)
            numbers = full[is_number]
            minimum, maximum = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 0.0)
            full[~is_number] = np.nan if self.kind == "metric_depth" else minimum
        score = 0.0
        if self.threshold is not None:
            score = self._score(outputs, item, small, model=model)
        if self.kind == "metric_depth":
            encoding, octets = "32FC1", full.astype("<f4", copy=False).reshape(-1).view(np.uint8).data
        else:
            encoding, octets = "mono16", _as_levels(full, minimum, maximum)
        return DenseMap(self.kind, fit.height, fit.width, encoding, octets, minimum, maximum, score)

    def find_regions(
        self, outputs: Mapping[str, npt.NDArray[Any]], item: int | None, fit: FittedPicture, *, model: str
    ) -> tuple[Detection, ...]:
        """Return a box for each connected anomalous region, the one with the highest value first."""
        if self.threshold is None:
            return ()
        small = self._select(outputs, item, model=model)
        is_anomalous = (small >= self.threshold) & (small < np.inf)
        _, regions, stats, _ = opencv().connectedComponentsWithStats(is_anomalous.view(np.uint8))
        highest = np.full(len(stats), -np.inf, np.float32)
        anomalous = np.flatnonzero(regions)
        np.maximum.at(highest, regions.ravel()[anomalous], small.ravel()[anomalous])
        # The first is the rest of the map.
        order = 1 + np.argsort(-highest[1:], kind="stable")[:MAX_REGIONS]
        left, top, width, height = stats[order, :4].T * (
            np.array([[self.size.width / small.shape[1]], [self.size.height / small.shape[0]]] * 2)
        )
        x_min, y_min = fit.to_original(left, top)
        x_max, y_max = fit.to_original(left + width, top + height)
        boxes = np.stack((x_min, y_min, x_max, y_max), axis=1)
        boxes = np.clip(boxes, 0, (fit.width, fit.height, fit.width, fit.height)).tolist()
        return tuple(
            Detection(box[0], box[1], box[2], box[3], score, 0, ANOMALY_LABEL)
            for box, score in zip(boxes, highest[order].tolist(), strict=True)
            if box[2] > box[0] and box[3] > box[1]
        )

    def _select(self, outputs: Mapping[str, npt.NDArray[Any]], item: int | None, *, model: str) -> FloatMap:
        """Return the network's map, (height, width), scaled."""
        values = self.tensor.select_floats(outputs, item, model=model)
        shape = values.shape
        while values.ndim > 2 and values.shape[0] == 1:
            values = values[0]
        if values.ndim == 3 and values.shape[2] == 1:
            values = values[..., 0]
        if values.ndim != 2 or 0 in values.shape:
            raise BackendError(
                f"model '{model}', output '{self.tensor.name}': expected a map [1, height, width], given shape "
                f"{list(shape)}"
            )
        small: FloatMap = np.asarray(values * self.scale, np.float32)
        return small

    def _score(
        self, outputs: Mapping[str, npt.NDArray[Any]], item: int | None, small: FloatMap, *, model: str
    ) -> float:
        if self.score is None:
            numbers = small[np.isfinite(small)]
            return float(numbers.max()) if numbers.size else 0.0
        value: FloatArray = self.score.select_floats(outputs, item, model=model)
        if value.size != 1:
            raise BackendError(
                f"model '{model}', output '{self.score.name}': expected one score, given shape {list(value.shape)}"
            )
        score = float(value.reshape(()))
        return score if np.isfinite(score) else 0.0


def _as_levels(full: FloatMap, minimum: float, maximum: float) -> memoryview:
    """Return the numbers as levels of 16 bits from the least to the greatest one. Changes `full`."""
    # In place: a frame has millions of pixels.
    full -= np.float32(minimum)
    full *= np.float32(_LEVELS / (maximum - minimum or 1.0))
    full += np.float32(0.5)
    np.clip(full, 0, _LEVELS, out=full)
    return full.astype("<u2").reshape(-1).view(np.uint8).data


def _scale_to_frame(small: FloatMap, fit: FittedPicture, size: NetworkSize) -> FloatMap:
    """Return the map in the size of the frame. What the network did not see is NaN."""
    height, width = small.shape
    scale_x, scale_y = width / size.width, height / size.height
    across, down = fit.scale_x * scale_x, fit.scale_y * scale_y
    # OpenCV counts from the centres of pixels.
    to_map = np.array([
        [across, 0, (0.5 * fit.scale_x + fit.offset_x) * scale_x - 0.5],
        [0, down, (0.5 * fit.scale_y + fit.offset_y) * scale_y - 0.5],
    ])  # fmt: skip
    cv2 = opencv()
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    full: FloatMap = cv2.warpAffine(
        small, to_map, (fit.width, fit.height), flags=flags, borderMode=cv2.BORDER_REPLICATE
    )
    columns = (np.arange(fit.width) + 0.5) * fit.scale_x + fit.offset_x
    rows = (np.arange(fit.height) + 0.5) * fit.scale_y + fit.offset_y
    unseen_columns, unseen_rows = (columns < 0) | (columns >= size.width), (rows < 0) | (rows >= size.height)
    if unseen_columns.any():
        full[:, unseen_columns] = np.nan
    full[unseen_rows] = np.nan
    return full


def make_depth_decoder(spec: ModelSpec, declaration: DepthDeclaration, size: NetworkSize) -> DenseMapDecoder:
    """Return the decoder of a model's depth. Raises BadModelConfig for unsuitable dims."""
    tensor = _map_tensor(spec, "depth_output", declaration.output)
    is_metric = declaration.kind is DepthKind.METRIC
    scale = declaration.scale if is_metric else 1.0
    return DenseMapDecoder(tensor, f"{declaration.kind.value}_depth", scale, None, None, size)


def make_anomaly_decoder(spec: ModelSpec, declaration: AnomalyDeclaration, size: NetworkSize) -> DenseMapDecoder:
    """Return the decoder of a model's anomaly map. Raises BadModelConfig for unsuitable dims."""
    tensor = _map_tensor(spec, "anomaly_output", declaration.output)
    score = None
    if declaration.score_output is not None:
        output = choose_output(spec, "anomaly_score_output", declaration.score_output)
        score = OutputTensor(output.name, output.dtype, 1)
    return DenseMapDecoder(tensor, "anomaly", 1.0, score, declaration.threshold, size)


def _map_tensor(spec: ModelSpec, key: str, name: str | None) -> OutputTensor:
    output = choose_output(spec, key, name)
    dims = drop_batch_dim(spec, output, 2 if len(output.dims) < 4 else 3)
    sides = [dim for dim in dims if dim != 1]
    if len(sides) > 2 or len(dims) < 2:
        raise BadModelConfig(
            f"model '{spec.name}', output '{output.name}': expected a map [1, height, width] or [height, width] for "
            f"{key}, given {list(output.dims)}"
        )
    return OutputTensor(output.name, output.dtype, len(dims))
