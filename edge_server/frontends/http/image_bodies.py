"""Image request bodies: an image file becomes the input of a model that declares the conversion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Parameter, Request
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.frontends.http.body_reader import Body
from edge_server.frontends.v2.json_codec import DecodedRequest
from edge_server.frontends.v2.requested_outputs import RequestedOutput
from edge_server.memory.region_pins import Regions, RequestRegions

if TYPE_CHECKING:
    from edge_server.plugins.vision.image_plan import ImagePlan

FORM_TYPE = "multipart/form-data"

MAX_PARTS = 16
"""Maximum number of parts of a form."""

_BOUNDARY = re.compile(r';[ \t]*boundary[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
"""The parameter of a Content-Type: a quoted text or a token. The standard library's email.message raises TypeError and
UnicodeEncodeError for some headers."""

_MAX_HEADERS_BYTES = 8 * 1024
"""Of a part. The rest is not read."""


def is_image_body(content_type: str) -> bool:
    """Return whether a body of this type is an image file, alone or as the only part of a form."""
    return content_type.startswith(("image/", FORM_TYPE))


def form_file(body: Body, content_type: str) -> memoryview:
    """Return the file in a form with one part, as `curl -F image=@frame.jpg` sends it. Raises InvalidRequest."""
    parts = form_parts(body, content_type)
    if len(parts) != 1:
        raise InvalidRequest(f"a body of type {FORM_TYPE} must have one part, an image file")
    return parts[0][1]


def form_parts(body: Body, content_type: str) -> list[tuple[str, memoryview]]:
    """Return the parts of a form: the name of each, and its content as a view.

    Raises InvalidRequest for a malformed form and for more than MAX_PARTS parts.
    """
    given = _BOUNDARY.search(content_type)
    quoted, token = (None, "") if given is None else given.groups()
    text = token if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
    boundary = re.escape(text.encode("utf-8", "surrogateescape"))
    view = memoryview(body)
    delimiters = list(
        islice(re.finditer(rb"(?:\A|\r\n)--" + boundary + rb"(--)?[ \t]*(?=\r\n|\Z)", view), MAX_PARTS + 1)
    )
    is_closed = [bool(delimiter[1]) for delimiter in delimiters]
    malformed = InvalidRequest(
        f"a body of type {FORM_TYPE} must have 1 to {MAX_PARTS} parts with headers, and its boundary at the end"
    )
    if not boundary or len(delimiters) < 2 or is_closed != [False] * (len(delimiters) - 1) + [True]:
        raise malformed
    parts = []
    for this, following in pairwise(delimiters):
        # A part must have headers, as curl and browsers send them.
        headers = re.compile(rb"\r\n\r\n").search(view, this.end(), following.start())
        if headers is None:
            raise malformed
        lines = bytes(view[this.end() : headers.start()][:_MAX_HEADERS_BYTES])
        name = re.search(rb';[ \t]*name="([^"\r\n]*)"', lines)
        content = view[headers.end() : following.start()]
        parts.append(("" if name is None else name[1].decode("utf-8", "replace"), content))
    return parts


class ImageBodies:
    """Decoder of image bodies. Caches the conversion plan of each model until its spec changes. Thread-safe."""

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
        """Return the request for one image. If the model declares `image_top_k`, each output is requested as classes.

        Raises InvalidRequest for a damaged image, and for a model that declares no valid image input.
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
        return DecodedRequest(request, outputs, False, RequestRegions(regions))

    def _plan(self, spec: ModelSpec) -> ImagePlan:
        cached = self._plans.get(spec.name)
        if cached is not None and cached[0] is spec:
            return cached[1]
        # Imported for the first image: a server without images saves the memory.
        from edge_server.plugins.vision.image_plan import image_plan

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
