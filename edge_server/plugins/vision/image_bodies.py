"""Decoder of HTTP inference requests whose body is an image file (JPEG, PNG or a form): makes the input tensor of the
model."""

from __future__ import annotations

from edge_server.core.model_spec import ModelSpec
from edge_server.core.tensor import Tensor
from edge_server.errors import InvalidRequest
from edge_server.frontends.http.body_reader import Body
from edge_server.frontends.http.multipart_form import FORM_TYPE, form_parts
from edge_server.frontends.v2.requested_outputs import RequestedOutput
from edge_server.plugins.vision.image_plan import ImagePlan, required_image_plan


class ImageBodies:
    """Decoder of image bodies. Caches the conversion plan of each model until its spec changes. Thread-safe."""

    def __init__(self) -> None:
        self._plans: dict[str, tuple[ModelSpec, ImagePlan]] = {}

    def decode(
        self, content_type: str, body: Body, spec: ModelSpec
    ) -> tuple[dict[str, Tensor], dict[str, RequestedOutput]]:
        """Return the input made of an image file, alone or as the only part of a form, and the requested outputs.

        If the model declares `image_top_k`, each output is requested as classes. Raises InvalidRequest for a damaged
        image, and for a model that declares no valid image input.
        """
        image = picture_file(body, content_type)
        plan = self._plan(spec)
        tensor = plan.tensor(image, model=spec.name)
        outputs = {}
        if plan.top_k:
            outputs = {output.name: RequestedOutput(output.name, False, plan.top_k) for output in spec.outputs}
        return plan.inputs(tensor), outputs

    def _plan(self, spec: ModelSpec) -> ImagePlan:
        cached = self._plans.get(spec.name)
        if cached is not None and cached[0] is spec:
            return cached[1]
        plan = required_image_plan(spec, "an image as a body")
        self._plans[spec.name] = (spec, plan)
        return plan


def picture_file(body: Body, content_type: str) -> memoryview:
    """Return the body, or the file in a form with one part, as `curl -F image=@frame.jpg` sends it. Raises
    InvalidRequest."""
    if not content_type.startswith(FORM_TYPE):
        return memoryview(body)
    parts = form_parts(body, content_type)
    if len(parts) != 1:
        raise InvalidRequest(f"a body of type {FORM_TYPE} must have one part, an image file")
    return parts[0][1]
