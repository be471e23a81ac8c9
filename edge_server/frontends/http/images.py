"""Image files as whole request bodies, for models that declare how an image becomes their input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edge_server.core.message import Parameter, Request
from edge_server.core.model import ModelSpec
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.frontends.http.body import Body
from edge_server.frontends.v2.json_codec import DecodedRequest
from edge_server.frontends.v2.outputs import RequestedOutput
from edge_server.frontends.v2.regions import Pins, Regions

if TYPE_CHECKING:
    from edge_server.vision.plan import ImagePlan


class ImageBodies:
    """Turns image bodies into requests. Usable from any thread; keeps one plan a model until its spec is replaced."""

    def __init__(self) -> None:
        self._plans: dict[str, tuple[ModelSpec, ImagePlan]] = {}

    def decode(
        self,
        body: Body,
        spec: ModelSpec,
        regions: Regions,
        *,
        version: int | None,
        extra: Mapping[str, Parameter],
    ) -> DecodedRequest:
        """Return the request for one image; with `image_top_k` declared every output is asked for as classes.

        Raises InvalidRequest for a model that takes no images or declares them wrongly, and for a damaged image.
        """
        plan = self._plan(spec)
        tensor = plan.tensor(body, model=spec.name)
        outputs = (
            {output.name: RequestedOutput(output.name, False, plan.top_k) for output in spec.outputs}
            if plan.top_k
            else {}
        )
        request = Request(
            model=spec.name,
            version=version,
            inputs={tensor.name: tensor},
            outputs=tuple(outputs),
            parameters=extra,
        )
        return DecodedRequest(request, outputs, False, Pins(regions))

    def _plan(self, spec: ModelSpec) -> ImagePlan:
        known = self._plans.get(spec.name)
        if known is not None and known[0] is spec:
            return known[1]
        # Not before an image comes: a server that gets none needs no memory for what reads them.
        from edge_server.vision.plan import image_plan

        try:
            plan = image_plan(spec)
        except BadModelConfig as error:
            raise InvalidRequest(f"model '{spec.name}' cannot take an image as a body: {error.message}") from None
        if plan is None:
            raise InvalidRequest(
                f"model '{spec.name}' does not take an image as a body: its configuration has no parameters "
                "'image_...' or 'network_image_...' that say how an image becomes its input"
            )
        self._plans[spec.name] = (spec, plan)
        return plan
