"""View endpoints: live pictures of frame streams for people, and the results of one image file."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Response
from edge_server.core.tensor import Tensor
from edge_server.errors import BadModelConfig, Forbidden, InvalidRequest, ServingFault
from edge_server.frontends.access_control import is_this_machine
from edge_server.frontends.http.body_reader import Body
from edge_server.frontends.http.cross_site_check import CrossSiteCheck
from edge_server.frontends.http.generate_endpoints import GenerationRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.loop_dispatch import LoopDispatch, run_model
from edge_server.frontends.v2.json_parser import to_json
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from edge_server.core.frame_stream_types import Buffer, Mask
    from edge_server.streams.stream_view import StreamView
    from edge_server.vision.perception import Perception, PerceptionPlan
    from edge_server.vision.resize import FittedPicture

_WRITE_LIMIT_S = 10.0
"""A viewer that does not read a picture for this time is disconnected."""

_PICTURE_WAIT_S = 2.0
"""How long a request for one picture waits: a camera may be silent, and browsers open few connections to a server."""

PICTURE_TYPE = "multipart/x-mixed-replace"
"""Content type of Motion JPEG."""

_PICTURE_HEADERS = {
    "Cache-Control": "no-store",
    # A page of another site must not show the pictures.
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Accel-Buffering": "no",
}

_NOT_ALLOWED = (
    "camera pictures are shown to this machine only; to show them to other machines, require a key by "
    "--http-restricted-api=view:<key>=<value> or a token for 'view', or open them to everyone by --view-open"
)


class ViewEndpoints:
    """The handlers. Live on one event loop.

    `view` returns the view of a frame stream, see StreamRegistry.view. `is_guarded` returns whether requests of the
    category view need a key or a token: then other machines may look too. `is_open`: they may look without one.
    """

    def __init__(
        self,
        service: InferenceService,
        dispatch: LoopDispatch,
        cross_site_check: CrossSiteCheck,
        view: Callable[[str], AbstractContextManager[StreamView]],
        *,
        is_guarded: Callable[[], bool],
        is_open: bool,
    ) -> None:
        self._service = service
        self._dispatch = dispatch
        self._cross_site_check = cross_site_check
        self._view = view
        self._is_guarded = is_guarded
        self._is_open = is_open

    def check(self, request: GenerationRequest) -> None:
        """Raise Forbidden if a caller that the keys and tokens admit may not see pictures."""
        if self._is_guarded():
            return
        transport = request.connection.transport
        peer = None if transport is None else transport.get_extra_info("peername")
        if not self._is_open and not is_this_machine(peer[0] if peer else None):
            raise Forbidden(_NOT_ALLOWED)
        # Without a key, also where --http-allowed-origin lets other sites read everything else.
        self._cross_site_check.check_reader(request.target.head)

    async def picture(self, request: GenerationRequest) -> HttpResponse:
        """Respond with the next picture, or with 204 if none comes within a moment."""
        self.check(request)
        with self._view(request.target.names["stream"]) as view:
            try:
                is_there = await asyncio.wait_for(_comes(view), _PICTURE_WAIT_S)
            except asyncio.TimeoutError:
                is_there = False
            if not is_there:
                return HttpResponse(status=204, headers={"Cache-Control": "no-store"})
            jpeg = await asyncio.get_running_loop().run_in_executor(request.target.workers, view.jpeg)
        return HttpResponse(bytes(jpeg), headers={"Content-Type": "image/jpeg", **_PICTURE_HEADERS})

    async def pictures(self, request: GenerationRequest) -> None:
        """Send pictures with the results drawn in until the stream ends or the viewer leaves."""
        await self._send(request, _drawn)

    async def frames(self, request: GenerationRequest) -> None:
        """Send the results as JSON before each picture, until the stream ends or the viewer leaves."""
        await self._send(request, _apart)

    async def _send(self, request: GenerationRequest, parts_of: Callable[[StreamView], bytes]) -> None:
        self.check(request)
        connection, workers = request.connection, request.target.workers
        loop = asyncio.get_running_loop()
        with self._view(request.target.names["stream"]) as view:
            connection.begin_stream(200, {"Content-Type": f"{PICTURE_TYPE}; boundary=picture", **_PICTURE_HEADERS})
            while await _comes(view):
                parts = await loop.run_in_executor(workers, parts_of, view)
                try:
                    await asyncio.wait_for(connection.write(parts), _WRITE_LIMIT_S)
                except asyncio.TimeoutError:
                    raise ConnectionAbortedError("a viewer does not read the pictures") from None

    async def perception(self, request: GenerationRequest) -> HttpResponse:
        """Run a model on an image file and return its classes, detections and mask in the picture's pixels."""
        handle = self._service.find(request.target.names["model"], None)
        loop, workers = asyncio.get_running_loop(), request.target.workers
        try:
            body = await request.read_body()
            plan, tensor, fit = await loop.run_in_executor(workers, _prepare, handle.spec, body)
            del body
        finally:
            request.release_body()
        response = await run_model(handle, self._dispatch, tensor)
        return await loop.run_in_executor(workers, _perceived, handle.spec, plan, fit, response)


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
    from edge_server.streams.stream_view import MAX_SIDE

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
    from edge_server.vision.image_plan import image_plan
    from edge_server.vision.perception import perception_plan

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

    from edge_server.streams.stream_view import MAX_SIDE
    from edge_server.vision.decode import opencv

    classes = np.frombuffer(mask.data, np.uint8 if mask.encoding == "mono8" else "<u2").reshape(mask.height, mask.width)
    step = -(-max(mask.height, mask.width) // MAX_SIDE)
    is_done, png = opencv().imencode(".png", np.ascontiguousarray(classes[::step, ::step]).astype(np.uint8))
    if not is_done:
        raise ServingFault("OpenCV does not encode the mask")
    found, counts = np.unique(classes, return_counts=True)
    shares = sorted(zip((counts / classes.size).tolist(), found.tolist(), strict=True), reverse=True)
    return {
        "classes": [
            {"index": index, "label": mask.labels[index] if index < len(mask.labels) else "", "share": share}
            for share, index in shares
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
