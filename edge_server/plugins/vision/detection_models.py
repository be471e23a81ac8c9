"""Choice of the model that detects objects, for clients that name none, such as video recorders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BadModelConfig, InvalidRequest, UnknownModel
from edge_server.service import Handle, InferenceService

if TYPE_CHECKING:
    from edge_server.plugins.vision.image_plan import ImagePlan
    from edge_server.plugins.vision.outputs.detections import DetectionDecoder


def ready_detection_models(service: InferenceService) -> list[Handle]:
    """Return the handles on the ready models with detections, by name."""
    names = sorted({entry.name for entry in service.repository_index(only_ready=True)})
    models = [service.find(name, None) for name in names]
    return [one for one in models if "detection_head" in one.spec.all_parameters]


def find_detection_model(service: InferenceService, how_to_name: str) -> Handle:
    """Return the handle on the model for a client that names none: the model with the parameter `deepstack`, else the
    only one with detections.

    Raises UnknownModel, whose message ends with `how_to_name`: what names a model on this wire."""
    found = ready_detection_models(service)
    stated = [one for one in found if "detection_head" in one.spec.parameters]
    chosen = [one for one in found if one.spec.parameters.get("deepstack", "").strip().lower() in ("true", "1")]
    candidates = chosen or stated or found
    if len(candidates) == 1:
        return candidates[0]
    given = ", ".join(f"'{one.spec.name}'" for one in candidates) or "none"
    raise UnknownModel(
        "expected one ready model with the parameter 'deepstack: true', or a single one with 'detection_head', "
        f"given {given}; {how_to_name} names a model"
    )


def plan_detection(spec: ModelSpec) -> tuple[ImagePlan, DetectionDecoder]:
    """Return the plan of the model's input and the decoder of its detections. Raises InvalidRequest."""
    # Imported for the first image: a server without images saves the memory.
    from edge_server.plugins.vision.image_plan import make_image_plan
    from edge_server.plugins.vision.perception_decoder import make_perception_decoder

    try:
        images, perception = make_image_plan(spec), make_perception_decoder(spec)
    except BadModelConfig as error:
        raise InvalidRequest(f"model '{spec.name}' cannot take an image: {error.message}") from None
    if images is None or perception is None or perception.detections is None:
        raise InvalidRequest(
            f"model '{spec.name}' does not detect objects: its configuration has no parameter 'detection_head'"
            + spec.unrecognised_note
        )
    return images, perception.detections
