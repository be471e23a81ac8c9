"""Decoder of a model's output tensors to results in the coordinates of the original picture: classes, detections, a
mask, and a map of depth or anomaly.

`outputs.output_parameters` declares the keys. This module checks them against the model's outputs, once per model
version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.plugins.vision.image_parameters import DEFAULT_TOP_K, MAX_TOP_K
from edge_server.plugins.vision.image_plan import make_image_plan
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize
from edge_server.plugins.vision.outputs.classification import (
    ClassDecoder,
    make_class_decoder,
    make_implied_class_decoder,
)
from edge_server.plugins.vision.outputs.depth_and_anomaly_maps import (
    DenseMapDecoder,
    make_anomaly_decoder,
    make_depth_decoder,
)
from edge_server.plugins.vision.outputs.detections import DetectionDecoder, make_detection_decoder
from edge_server.plugins.vision.outputs.output_parameters import read_declaration
from edge_server.plugins.vision.outputs.semantic_segmentation import MaskDecoder, make_mask_decoder
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import ClassScore, DenseMap, Detection, Mask, Returns
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt


class Overlay(NamedTuple):
    """A polygon, or an open line with an arrow to its right, over a picture. Points are fractions of the picture."""

    text: str
    points: tuple[tuple[float, float], ...]
    is_closed: bool
    is_active: bool = False


@record(frozen=True, slots=True)
class Perception:
    """Results of one frame; empty or None if not requested. `overlays` are drawn over the picture, and sent nowhere."""

    classes: tuple[ClassScore, ...] = ()
    detections: tuple[Detection, ...] = ()
    mask: Mask | None = None
    overlays: tuple[Overlay, ...] = ()
    dense_map: DenseMap | None = None


@record(frozen=True, slots=True)
class PerceptionDecoder:
    """Decoder of one model's outputs. Immutable and thread-safe. A field of None is not declared.

    `top_k` is the number of classes to return if a stream does not state it.
    """

    classes: ClassDecoder | None
    detections: DetectionDecoder | None
    mask: MaskDecoder | None
    dense_map: DenseMapDecoder | None
    top_k: int

    @property
    def what(self) -> Returns:
        """The declared results: the default of a stream that requests none."""
        return Returns(
            top_k=0 if self.classes is None else self.top_k,
            has_detections=self.detections is not None or self._has_regions,
            has_mask=self.mask is not None or self._has_object_masks,
            has_map=self.dense_map is not None,
        )

    @property
    def _has_regions(self) -> bool:
        return self.dense_map is not None and self.dense_map.threshold is not None

    @property
    def _has_object_masks(self) -> bool:
        return self.detections is not None and self.detections.masks is not None

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names of the first declared result that has some, in the order detections, mask, classes."""
        declared = (decoder.labels for decoder in (self.detections, self.mask, self.classes) if decoder is not None)
        return next((labels for labels in declared if labels), ())

    @property
    def track_threshold(self) -> float | None:
        """Least score that starts a track in a frame stream; None: no tracking."""
        declaration = None if self.detections is None else self.detections.declaration
        return None if declaration is None or declaration.track is None else declaration.track_threshold

    @property
    def text_model(self) -> str:
        """Name of the model that reads the text in detections, see `text_reading`; "" without one."""
        return "" if self.detections is None else self.detections.declaration.text_model

    def settle(self, returns: Returns, *, model: str, note: str = "") -> Returns:
        """Return the settled results of a stream's `Returns`.

        A request for an annotated picture alone draws the declared results. Masks of objects are a part of detections,
        so requesting masks gives detections. Raises InvalidRequest, with the missing
        configuration key and `note`, for classes, detections or a mask that the model does not declare.
        """
        what = self.what
        if not (returns.tensors or returns.top_k or returns.has_detections or returns.has_mask or returns.has_map):
            return replace(
                returns, top_k=what.top_k, has_detections=what.has_detections, has_mask=what.has_mask,
                has_map=what.has_map,
            )  # fmt: skip
        for is_requested, is_declared, noun, key in (
            (returns.top_k, what.top_k, "classes", "image_top_k' or 'class_output"),
            (returns.has_detections, what.has_detections, "detections", "detection_head"),
            (returns.has_map, what.has_map, "a map", "depth_output' or 'anomaly_output"),
            (returns.has_mask, what.has_mask, "a mask", "mask_output' or 'detection_mask_coefficients"),
        ):
            if is_requested and not is_declared:
                raise InvalidRequest(
                    f"model '{model}' cannot answer with {noun}: its configuration has no parameter '{key}'{note}"
                )
        if returns.has_mask and self._has_object_masks:
            return replace(returns, has_detections=True)
        return returns

    def output_names(self, returns: Returns) -> tuple[str, ...]:
        """Return the outputs that `decode` needs for settled results, besides the tensors that these name."""
        names: dict[str, None] = {}
        if returns.top_k and self.classes is not None:
            names[self.classes.tensor.name] = None
        if returns.has_detections and self.detections is not None:
            names.update((tensor.name, None) for tensor in self.detections.tensors)
            if returns.has_mask and self.detections.masks is not None:
                names[self.detections.masks.tensor.name] = None
        if returns.has_mask and self.mask is not None:
            names[self.mask.tensor.name] = None
        if self.dense_map is not None and (returns.has_map or (returns.has_detections and self._has_regions)):
            names.update((name, None) for name in self.dense_map.output_names)
        return tuple(names)

    def decode(
        self,
        outputs: Mapping[str, npt.NDArray[Any]],
        item: int | None,
        fit: FittedPicture,
        returns: Returns,
        *,
        model: str,
    ) -> Perception:
        """Return the results requested by `returns`, from one item of a batch. `fit` places the frame in the input.

        `item` None: the model does not batch, and the outputs belong to this frame alone. Raises BackendError for
        outputs of undeclared shapes. The outputs are not changed, and the results do not refer to them.
        """
        top_k = min(returns.top_k, MAX_TOP_K)
        # A network may return any value: overflows and NaN are detected and dropped where they matter.
        with np.errstate(all="ignore"):
            detections: tuple[Detection, ...] = ()
            if self.detections and returns.has_detections:
                detections = self.detections.decode(outputs, item, fit, model=model, has_masks=returns.has_mask)
            elif self.dense_map and returns.has_detections:
                detections = self.dense_map.find_regions(outputs, item, fit, model=model)
            return Perception(
                self.classes.decode(outputs, item, top_k, model=model) if self.classes and top_k else (),
                detections,
                self.mask.decode(outputs, item, fit, model=model) if self.mask and returns.has_mask else None,
                dense_map=self.dense_map.decode(outputs, item, fit, model=model)
                if self.dense_map and returns.has_map
                else None,
            )


def make_perception_decoder(spec: ModelSpec) -> PerceptionDecoder | None:
    """Return the decoder of a model's outputs, or None if its configuration declares nothing about its outputs.

    Call it once per version. Raises BadModelConfig if the declaration is wrong in itself or does not match the outputs.
    """
    declared = read_declaration(spec.name, spec.all_parameters)
    classes = None if declared.classes is None else make_class_decoder(spec, declared.classes)
    detections = mask = None
    if declared.detections is not None:
        detections = make_detection_decoder(spec, declared.detections, _network_size(spec, "detection_head"))
    if declared.mask is not None:
        mask = make_mask_decoder(spec, declared.mask, _network_size(spec, "mask_output"))
    dense_map = None
    if declared.depth is not None:
        dense_map = make_depth_decoder(spec, declared.depth, _network_size(spec, "depth_output"))
    elif declared.anomaly is not None:
        dense_map = make_anomaly_decoder(spec, declared.anomaly, _network_size(spec, "anomaly_output"))
    if classes is None and detections is None and mask is None and dense_map is None:
        classes = make_implied_class_decoder(spec)
        if classes is None:
            return None
    images = make_image_plan(spec)
    stated = None if images is None else images.top_k
    return PerceptionDecoder(classes, detections, mask, dense_map, stated or DEFAULT_TOP_K)


def _network_size(spec: ModelSpec, key: str) -> NetworkSize:
    images = make_image_plan(spec)
    if images is None:
        raise BadModelConfig(
            f"model '{spec.name}', parameter '{key}': expected parameters 'image_...' or 'network_image_...' beside "
            "it, which say how a frame becomes the input, given none"
        )
    return NetworkSize(images.rule.width, images.rule.height)
