"""HTTP handlers of DeepStack's object detection API, which video recorders such as Frigate and Blue Iris use.

The paths are /v1/vision/detection, and /v1/vision/custom/{model}, which names the model. /v1/vision/custom/list is
CodeProject.AI's: Blue Iris asks it for the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Response
from edge_server.errors import EdgeServerError, InvalidRequest, Unsupported
from edge_server.frontends.http.body_reader import Body
from edge_server.frontends.http.inference_route import DECOUPLED
from edge_server.frontends.http.multipart_form import form_parts
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, error_response, json_response
from edge_server.frontends.json_text import to_json
from edge_server.frontends.loop_dispatch import run_model
from edge_server.plugins.vision.detection_models import find_detection_model, plan_detection, ready_detection_models
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from edge_server.plugins.vision.resize import FittedPicture
    from edge_server.protocol.frame_messages import Detection

MAX_PREDICTIONS = 20
"""Maximum number of objects in a response, the best. Frigate's client has room for 20, and fails with more."""


class DeepStackEndpoints:
    """The handlers. The `api_key` of a form is ignored: access is checked by headers."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def detect(self, request: HttpRequest) -> HttpResponse:
        """Respond with the objects in the image of a form, in pixels of the image."""
        try:
            return json_response({"success": True, "predictions": await self._detect(request)})
        except EdgeServerError as error:
            response = error_response(error)
            response.body = to_json({"success": False, "error": error.message})
            return response

    async def models(self, request: HttpRequest) -> HttpResponse:
        """Respond with the names of the ready models that detect objects."""
        request.release_body()
        names = [handle.spec.name for handle in ready_detection_models(self._service)]
        return json_response({"success": True, "models": names})

    async def _detect(self, request: HttpRequest) -> list[dict[str, Any]]:
        name = request.names.get("model")
        if name is None:
            handle = find_detection_model(self._service, "/v1/vision/custom/NAME")
        else:
            handle = self._service.find(name, None)
        if handle.spec.is_decoupled:
            raise Unsupported(DECOUPLED)
        content_type = request.head.headers.get("Content-Type") or ""
        try:
            body = await request.read_body()
            image = await request.run_on_worker(partial(_Image, handle.spec, body, content_type))
            del body
        finally:
            request.release_body()
        response = await run_model(handle, request.context.dispatch, image.inputs)
        return await request.run_on_worker(partial(image.predictions, response))


class _Image:
    """The image of a form, fitted into a model's input."""

    def __init__(self, spec: ModelSpec, body: Body, content_type: str) -> None:
        """Raises InvalidRequest and Unsupported."""
        form = dict(form_parts(body, content_type))
        if not form.get("image"):
            given = ", ".join(f"'{name[:40]}'" for name in form)
            raise InvalidRequest(f"expected a form with a file named 'image', given {given}")
        self._spec = spec
        self._least_score = _least_score(form)
        images, self._decoder = plan_detection(spec)
        self._fit: FittedPicture
        tensor, self._fit = images.fit_file(form["image"], model=spec.name)
        self.inputs = images.inputs(tensor)

    def predictions(self, response: Response) -> list[dict[str, Any]]:
        """Return the objects, best first. Raises BackendError for outputs of undeclared shapes."""
        outputs = {tensor.name: tensor.array for tensor in response.outputs}
        item = 0 if self._spec.max_batch_size else None
        found = self._decoder.decode(outputs, item, self._fit, model=self._spec.name)
        return [_prediction(one) for one in found if one.score >= self._least_score][:MAX_PREDICTIONS]


def _least_score(form: Mapping[str, memoryview]) -> float:
    text = bytes(form.get("min_confidence", b"")[:40]).decode("utf-8", "replace").strip()
    try:
        least = float(text or 0)
    except ValueError:
        least = -1.0
    if not 0 <= least <= 1:
        raise InvalidRequest(f"expected min_confidence from 0 to 1, given '{text}'")
    return least


def _prediction(item: Detection) -> dict[str, Any]:
    return {
        "label": item.class_name,
        "confidence": item.score,
        "x_min": round(item.x_min),
        "y_min": round(item.y_min),
        "x_max": round(item.x_max),
        "y_max": round(item.y_max),
    }
