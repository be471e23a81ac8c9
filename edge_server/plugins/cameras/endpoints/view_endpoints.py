"""View endpoints: live pictures of frame streams for people, and the results of one image file."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Response
from edge_server.core.tensor import Tensor
from edge_server.errors import BadModelConfig, InvalidRequest, ServingFault
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.body_reader import Body
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import MOTION_JPEG_TYPE, HttpResponse, json_response
from edge_server.frontends.http.routes import Route
from edge_server.frontends.loop_dispatch import run_model
from edge_server.frontends.v2.json_parser import to_json
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from edge_server.plugins.cameras.streams.stream_view import StreamView
    from edge_server.plugins.vision.perception import Perception, PerceptionPlan
    from edge_server.plugins.vision.resize import FittedPicture
    from edge_server.protocol.frame_messages import Buffer, Mask

_WRITE_LIMIT_S = 10.0
"""A viewer that does not read a picture for this time is disconnected."""

_PICTURE_WAIT_S = 2.0
"""How long a request for one picture waits: a camera may be silent, and browsers open few connections to a server."""

_PICTURE_HEADERS = {
    "Cache-Control": "no-store",
    # A page of another site must not show the pictures.
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Accel-Buffering": "no",
}


_SCHEMAS = "edge_server.plugins.cameras.endpoints.schemas"


class ViewEndpoints:
    """The handlers. `view` returns the view of a frame stream, see StreamRegistry.view."""

    def __init__(
        self,
        service: InferenceService,
        access: AccessCheck,
        view: Callable[[str], AbstractContextManager[StreamView]],
    ) -> None:
        self._service = service
        self._access = access
        self._view = view

    def routes(self) -> Sequence[Route]:
        perception = "Classes, detections and mask of an image file"
        pictures = "Live pictures of a frame stream with its results drawn in, as MJPEG"
        frames = "Live pictures of a frame stream, and before each a part of JSON with its results"
        picture = "The next picture of a frame stream with its results drawn in, as JPEG"
        model, schema = "/edge/v1/models/{model}", f"{_SCHEMAS}:PERCEPTION"
        view = partial(Route, "GET", category="view")
        stream, motion = "/edge/v1/streams/{stream}", f"{_SCHEMAS}:MOTION_JPEG"
        return (
            Route("POST", f"{model}/perception", "inference", perception, self.perception, schema=schema),
            view(f"{stream}/view", summary=pictures, handler=self.pictures, schema=motion),
            view(f"{stream}/frames", summary=frames, handler=self.frames, schema=motion),
            view(f"{stream}/picture", summary=picture, handler=self.picture, schema=f"{_SCHEMAS}:PICTURE"),
        )

    async def picture(self, request: HttpRequest) -> HttpResponse:
        """Respond with the next picture, or with 204 if none comes within a moment."""
        self._access.check_pictures(request.head, request.peer)
        with self._view(request.names["stream"]) as view:
            try:
                is_there = await asyncio.wait_for(_comes(view), _PICTURE_WAIT_S)
            except asyncio.TimeoutError:
                is_there = False
            if not is_there:
                return HttpResponse(status=204, headers={"Cache-Control": "no-store"})
            jpeg = await request.run_on_worker(view.jpeg)
        return HttpResponse(bytes(jpeg), headers={"Content-Type": "image/jpeg", **_PICTURE_HEADERS})

    async def pictures(self, request: HttpRequest) -> None:
        """Send pictures with the results drawn in until the stream ends or the viewer leaves."""
        await self._send(request, _drawn)

    async def frames(self, request: HttpRequest) -> None:
        """Send the results as JSON before each picture, until the stream ends or the viewer leaves."""
        await self._send(request, _apart)

    async def _send(self, request: HttpRequest, parts_of: Callable[[StreamView], bytes]) -> None:
        self._access.check_pictures(request.head, request.peer)
        with self._view(request.names["stream"]) as view:
            await request.begin_stream(
                200, {"Content-Type": f"{MOTION_JPEG_TYPE}; boundary=picture", **_PICTURE_HEADERS}
            )
            while await _comes(view):
                parts = await request.run_on_worker(partial(parts_of, view))
                try:
                    await asyncio.wait_for(request.write(parts), _WRITE_LIMIT_S)
                except asyncio.TimeoutError:
                    raise ConnectionAbortedError("a viewer does not read the pictures") from None

    async def perception(self, request: HttpRequest) -> HttpResponse:
        """Run a model on an image file and return its classes, detections and mask in the picture's pixels."""
        handle = self._service.find(request.names["model"], None)
        try:
            body = await request.read_body()
            plan, tensor, fit = await request.run_on_worker(partial(_prepare, handle.spec, body))
            del body
        finally:
            request.release_body()
        response = await run_model(handle, request.context.dispatch, tensor)
        return await request.run_on_worker(partial(_perceived, handle.spec, plan, fit, response))


async def _comes(view: StreamView) -> bool:
    """Wait for the next picture of a stream. Return False when the stream has ended."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def tell() -> None:
        loop.call_soon_threadsafe(arrived.set)

    view.ask(tell)
    try:
        await arrived.wait()
    finally:
        view.forget(tell)
    return not view.is_over


def _part(content_type: str, data: Buffer) -> bytes:
    head = f"--picture\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}\r\n\r\n"
    return b"".join((head.encode(), data, b"\r\n"))


def _drawn(view: StreamView) -> bytes:
    return _part("image/jpeg", view.jpeg())


def _apart(view: StreamView) -> bytes:
    from edge_server.plugins.cameras.streams.stream_view import MAX_SIDE

    found = view.frame()
    if found is None:
        return b""
    frame, jpeg = found
    height, width = frame.picture.pixels.shape[:2]
    stamp = {"sec": frame.header.sec, "nanosec": frame.header.nanosec}
    head = {
        "stamp": stamp,
        "frame_id": frame.header.frame_id,
        "seq": frame.header.seq,
        "width": width,
        "height": height,
        "picture_scale": min(1.0, MAX_SIDE / max(height, width)),
    }
    return _part("application/json", to_json(head | _findings(frame.seen))) + _part("image/jpeg", jpeg)


def _prepare(spec: ModelSpec, body: Body) -> tuple[PerceptionPlan, Tensor, FittedPicture]:
    """Return the plan for the outputs and the input tensor. Raises InvalidRequest and Unsupported."""
    # Imported for the first image: a server without images saves the memory.
    from edge_server.plugins.vision.image_plan import image_plan
    from edge_server.plugins.vision.perception import perception_plan

    try:
        images, plan = image_plan(spec), perception_plan(spec)
    except BadModelConfig as error:
        raise InvalidRequest(f"model '{spec.name}' cannot take an image: {error.message}") from None
    if images is None or plan is None:
        raise InvalidRequest(
            f"model '{spec.name}' does not give classes or detections for an image: its configuration must say by "
            "parameters how an image becomes its input and what its outputs mean"
        )
    return plan, *images.fit_file(memoryview(body), model=spec.name)


def _perceived(spec: ModelSpec, plan: PerceptionPlan, fit: FittedPicture, response: Response) -> HttpResponse:
    outputs = {tensor.name: tensor.array for tensor in response.outputs}
    row = 0 if spec.max_batch_size else None
    seen = plan.read(outputs, row, fit, plan.what, model=spec.name)
    head = {"model": spec.name, "version": str(response.version), "width": fit.width, "height": fit.height}
    return json_response(head | _findings(seen) | ({} if seen.mask is None else {"mask": _mask(seen.mask)}))


def _mask(mask: Mask) -> dict[str, Any]:
    """Return the share of the picture that each class has, the largest first, and the classes of its pixels as PNG.

    The PNG has one byte for each pixel, the lowest eight bits of the class index, and sides of at most MAX_SIDE pixels.
    """
    import numpy as np

    from edge_server.plugins.cameras.streams.stream_view import MAX_SIDE
    from edge_server.plugins.vision.decode import opencv

    classes = np.frombuffer(mask.data, np.uint8 if mask.encoding == "mono8" else "<u2").reshape(mask.height, mask.width)
    step = -(-max(mask.height, mask.width) // MAX_SIDE)
    is_done, png = opencv().imencode(".png", np.ascontiguousarray(classes[::step, ::step]).astype(np.uint8))
    if not is_done:
        raise ServingFault("OpenCV does not encode the mask")
    found, counts = np.unique(classes, return_counts=True)
    fractions = sorted(zip((counts / classes.size).tolist(), found.tolist(), strict=True), reverse=True)
    return {
        "classes": [
            {"index": index, "label": mask.labels[index] if index < len(mask.labels) else "", "share": fraction}
            for fraction, index in fractions
        ],
        "png": base64.b64encode(bytes(png)).decode(),
    }


def _findings(seen: Perception) -> dict[str, Any]:
    """Return classes and detections as JSON, in pixels of the frame. `track_id` is there for tracked objects."""
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
            }
            for item in seen.detections
        ],
    }
