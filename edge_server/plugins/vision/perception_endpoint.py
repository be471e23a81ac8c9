"""HTTP handler that runs a model on an image file, and returns classes, detections, a mask, and a number for each
pixel (depth or anomaly)."""

from __future__ import annotations

import base64
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Response
from edge_server.core.tensor import Tensor
from edge_server.errors import BadModelConfig, InvalidRequest, ServingFault
from edge_server.frontends.http.body_reader import Body
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.loop_dispatch import run_model
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from edge_server.plugins.vision.perception_decoder import Perception, PerceptionDecoder
    from edge_server.plugins.vision.resize import FittedPicture
    from edge_server.plugins.vision.text_reading import Pixels
    from edge_server.protocol.frame_messages import DenseMap, Mask

_MAX_MASK_SIDE = 960
"""Pixels of a mask in an answer. Larger masks lose rows and columns."""


async def perceive(service: InferenceService, request: HttpRequest) -> HttpResponse:
    """Run a model on an image file and return its classes, detections and mask in the picture's pixels."""
    handle = service.find(request.names["model"], None)
    try:
        body = await request.read_body()
        content_type = request.head.headers.get("Content-Type") or ""
        decoder, inputs, fit, picture = await request.run_on_worker(partial(_prepare, handle.spec, body, content_type))
        del body
    finally:
        request.release_body()
    response = await run_model(handle, request.context.dispatch, inputs)
    return await request.run_on_worker(partial(_decode, service, handle.spec, decoder, fit, picture, response))


def _prepare(
    spec: ModelSpec, body: Body, content_type: str
) -> tuple[PerceptionDecoder, dict[str, Tensor], FittedPicture, Pixels | None]:
    """Return the decoder of the outputs, the inputs, and the BGR picture if text is read in it.

    Raises InvalidRequest and Unsupported.
    """
    # Imported on the worker thread: that takes longer than the event loop may be held.
    from edge_server.plugins.vision.image_bodies import picture_file
    from edge_server.plugins.vision.image_plan import make_image_plan
    from edge_server.plugins.vision.perception_decoder import make_perception_decoder

    try:
        images, decoder = make_image_plan(spec), make_perception_decoder(spec)
    except BadModelConfig as error:
        raise InvalidRequest(f"model '{spec.name}' cannot take an image: {error.message}") from None
    if images is None or decoder is None:
        raise InvalidRequest(
            f"model '{spec.name}' does not give classes or detections for an image: its configuration must say by "
            "parameters how an image becomes its input and what its outputs mean" + spec.unrecognised_note
        )
    picture = None
    image = picture_file(body, content_type)
    tensor, fit = images.fit_file(image, model=spec.name)
    if decoder.text_model:
        from edge_server.plugins.vision.decode import decode_image

        picture = decode_image(image, as_gray=False, error_prefix=f"model '{spec.name}'")
    return decoder, images.inputs(tensor), fit, picture


def _decode(
    service: InferenceService,
    spec: ModelSpec,
    decoder: PerceptionDecoder,
    fit: FittedPicture,
    picture: Pixels | None,
    response: Response,
) -> HttpResponse:
    outputs = {tensor.name: tensor.array for tensor in response.outputs}
    item = 0 if spec.max_batch_size else None
    seen = decoder.decode(outputs, item, fit, decoder.what, model=spec.name)
    if picture is not None:
        from edge_server.plugins.vision.text_reading import read_text

        seen = replace(seen, detections=read_text(service, decoder.text_model, picture, seen.detections))
    head = {"model": spec.name, "version": str(response.version), "width": fit.width, "height": fit.height}
    body = head | results_as_json(seen)
    if seen.mask is not None:
        body["mask"] = _mask(seen.mask)
    if seen.dense_map is not None:
        body["map"] = seen.dense_map.summary() | {"png": _map_png(seen.dense_map)}
    return json_response(body)


def _mask(mask: Mask) -> dict[str, Any]:
    """Return the fraction of the picture that each class has, the largest first, and the classes of its pixels as PNG.

    The PNG has one byte for each pixel, the lowest eight bits of the class index, and sides of at most _MAX_MASK_SIDE
    pixels.
    """
    import numpy as np

    classes = np.frombuffer(mask.data, np.uint8 if mask.encoding == "mono8" else "<u2").reshape(mask.height, mask.width)
    step = -(-max(mask.height, mask.width) // _MAX_MASK_SIDE)
    found, counts = np.unique(classes, return_counts=True)
    fractions = sorted(zip((counts / classes.size).tolist(), found.tolist(), strict=True), reverse=True)
    return {
        "classes": [
            {"index": index, "label": mask.labels[index] if index < len(mask.labels) else "", "share": fraction}
            for fraction, index in fractions
        ],
        "png": _png(np.ascontiguousarray(classes[::step, ::step]).astype(np.uint8), "mask"),
    }


def _map_png(dense: DenseMap) -> str:
    """Return a map as PNG with one byte for each pixel, 255 for the maximum, and sides of at most _MAX_MASK_SIDE
    pixels."""
    import numpy as np

    step = -(-max(dense.height, dense.width) // _MAX_MASK_SIDE)
    values = np.nan_to_num(dense.values()[::step, ::step], nan=dense.minimum)
    levels = np.rint((values - dense.minimum) * (255 / (dense.maximum - dense.minimum or 1.0))).astype(np.uint8)
    return _png(levels, "map")


def _png(pixels: Pixels, what: str) -> str:
    """Return the pixels, (height, width), as PNG in Base64."""
    from edge_server.plugins.vision.decode import opencv

    is_done, png = opencv().imencode(".png", pixels)
    if not is_done:
        raise ServingFault(f"OpenCV does not encode the {what}")
    return base64.b64encode(bytes(png)).decode()


def results_as_json(seen: Perception) -> dict[str, Any]:
    """Return classes and detections as JSON, in pixels of the frame. `track_id` is there for tracked objects,
    `rotated` for oriented boxes, `polygons` for objects with a mask, and `text` for lines that were read."""
    from edge_server.plugins.vision.outputs.instance_masks import outline_polygons

    return {
        "classes": [{"index": item.index, "label": item.label, "score": item.score} for item in seen.classes],
        "detections": [
            {
                "x_min": item.x_min,
                "y_min": item.y_min,
                "x_max": item.x_max,
                "y_max": item.y_max,
                "score": item.score,
                "class_index": item.class_index,
                "label": item.label,
                "keypoints": [[point.x, point.y, point.score] for point in item.keypoints],
                **({"track_id": item.track_id} if item.track_id else {}),
                **({"rotated": asdict(item.rotated)} if item.rotated else {}),
                **({} if item.mask is None else {"polygons": outline_polygons(item.mask)}),
                **({"text": item.text, "text_score": item.text_score} if item.text else {}),
            }
            for item in seen.detections
        ],
    }
