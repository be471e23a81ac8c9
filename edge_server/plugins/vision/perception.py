"""Perception: output tensors to classes, detections and a mask in the coordinates of the original frame.

`heads.output_parameters` documents the keys. This module checks them against the model's outputs, once per model
version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.plugins.vision.heads.box_candidates import NetworkSize
from edge_server.plugins.vision.heads.classification import ClassPlan, class_plan, implied_class_plan
from edge_server.plugins.vision.heads.detections import DetectionPlan, detection_plan
from edge_server.plugins.vision.heads.output_parameters import read_declaration
from edge_server.plugins.vision.heads.segmentation import MaskPlan, mask_plan
from edge_server.plugins.vision.image_parameters import MAX_TOP_K
from edge_server.plugins.vision.image_plan import image_plan
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import ClassScore, Detection, Mask, Returns

if TYPE_CHECKING:
    import numpy.typing as npt

DEFAULT_TOP_K = 5
"""Number of classes to return if neither the stream nor `image_top_k` states it."""


@dataclass(frozen=True, slots=True)
class Perception:
    """Results of one frame; empty or None if not requested."""

    classes: tuple[ClassScore, ...] = ()
    detections: tuple[Detection, ...] = ()
    mask: Mask | None = None


@dataclass(frozen=True, slots=True)
class PerceptionPlan:
    """Output plan of one model. Immutable and thread-safe. A field of None is not declared.

    `top_k` is the number of classes to return if a stream does not state it.
    """

    classes: ClassPlan | None
    detections: DetectionPlan | None
    mask: MaskPlan | None
    top_k: int

    @property
    def what(self) -> Returns:
        """The declared results: the default of a stream that requests none."""
        return Returns(
            top_k=0 if self.classes is None else self.top_k,
            has_detections=self.detections is not None,
            has_mask=self.mask is not None,
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names of the first declared result that has some, in the order detections, mask, classes."""
        declared = (plan.labels for plan in (self.detections, self.mask, self.classes) if plan is not None)
        return next((labels for labels in declared if labels), ())

    @property
    def track_threshold(self) -> float | None:
        """Least score that starts a track in a frame stream; None: no tracking."""
        return None if self.detections is None else self.detections.declaration.track_threshold

    def settle(self, returns: Returns, *, model: str) -> Returns:
        """Return the settled results of a stream's `Returns`.

        A request for an annotated picture alone draws the declared results. Raises InvalidRequest, with the missing
        configuration key, for classes, detections or a mask that the model does not declare.
        """
        returns_nothing = not (returns.tensors or returns.top_k or returns.has_detections or returns.has_mask)
        if returns_nothing:
            what = self.what
            return replace(returns, top_k=what.top_k, has_detections=what.has_detections, has_mask=what.has_mask)
        for is_requested, plan, noun, key in (
            (returns.top_k, self.classes, "classes", "image_top_k' or 'class_output"),
            (returns.has_detections, self.detections, "detections", "detection_head"),
            (returns.has_mask, self.mask, "a mask", "mask_output"),
        ):
            if is_requested and plan is None:
                raise InvalidRequest(
                    f"model '{model}' cannot answer with {noun}: its configuration has no parameter '{key}'"
                )
        return returns

    def output_names(self, returns: Returns) -> tuple[str, ...]:
        """Return the outputs that `read` needs for settled results, besides the tensors that these name."""
        names: dict[str, None] = {}
        if returns.top_k and self.classes is not None:
            names[self.classes.slot.name] = None
        if returns.has_detections and self.detections is not None:
            names.update((slot.name, None) for slot in self.detections.slots)
        if returns.has_mask and self.mask is not None:
            names[self.mask.slot.name] = None
        return tuple(names)

    def read(
        self,
        outputs: Mapping[str, npt.NDArray[Any]],
        row: int | None,
        fit: FittedPicture,
        returns: Returns,
        *,
        model: str,
    ) -> Perception:
        """Return the results requested by `returns`, from one row of a batch. `fit` places the frame in the input.

        `row` None: the model does not batch, and the outputs belong to this frame alone. Raises BackendError for
        outputs of undeclared shapes. The outputs are not changed, and the results do not refer to them.
        """
        top_k = min(returns.top_k, MAX_TOP_K)
        # A network may return any value: overflows and NaN are detected and dropped where they matter.
        with np.errstate(all="ignore"):
            return Perception(
                self.classes.read(outputs, row, top_k, model=model) if self.classes and top_k else (),
                self.detections.read(outputs, row, fit, model=model)
                if self.detections and returns.has_detections
                else (),
                self.mask.read(outputs, row, fit, model=model) if self.mask and returns.has_mask else None,
            )


def perception_plan(spec: ModelSpec) -> PerceptionPlan | None:
    """Return the output plan of a model, or None if its configuration declares nothing about its outputs.

    Call it once per version. Raises BadModelConfig if the declaration is wrong in itself or does not match the outputs.
    """
    declared = read_declaration(spec.name, spec.parameters)
    classes = None if declared.classes is None else class_plan(spec, declared.classes)
    detections = mask = None
    if declared.detections is not None:
        detections = detection_plan(spec, declared.detections, _network_size(spec, "detection_head"))
    if declared.mask is not None:
        mask = mask_plan(spec, declared.mask, _network_size(spec, "mask_output"))
    if (classes, detections, mask) == (None, None, None):
        classes = implied_class_plan(spec)
        if classes is None:
            return None
    images = image_plan(spec)
    stated = None if images is None else images.top_k
    return PerceptionPlan(classes, detections, mask, stated or DEFAULT_TOP_K)


def _network_size(spec: ModelSpec, key: str) -> NetworkSize:
    images = image_plan(spec)
    if images is None:
        raise BadModelConfig(
            f"model '{spec.name}', parameter '{key}': expected parameters 'image_...' or 'network_image_...' beside "
            "it, which say how a frame becomes the input, given none"
        )
    return NetworkSize(images.rule.width, images.rule.height)
