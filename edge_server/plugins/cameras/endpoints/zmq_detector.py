"""Server of Frigate's detector protocol over ZeroMQ (type `zmq`): receives frames, and answers each with its 20 best
objects.

The messages are those of frigate/detectors/plugins/zmq_ipc.py (Frigate 0.17). A client sends [header] to ask for a
model, and [header, data] for a frame or a model's file; the headers are JSON. It waits 30 s for a model, and by default
200 ms for a frame; then it opens a new socket and asks for the model again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import (
    EdgeServerError,
    Forbidden,
    InvalidRequest,
    QueueFull,
    ServingFault,
    Unsupported,
    install_hint,
)
from edge_server.frontends.loop_dispatch import LoopDispatch, run_model
from edge_server.plugins.vision.detection_models import find_detection_model, plan_detection
from edge_server.service import Handle, InferenceService

if TYPE_CHECKING:
    import numpy.typing as npt
    import zmq.asyncio

    from edge_server.core.tensor import Tensor
    from edge_server.plugins.vision.outputs.detections import DetectionDecoder
    from edge_server.plugins.vision.resize import FittedPicture
    from edge_server.protocol.frame_messages import Detection

log = logging.getLogger(__name__)

ROWS = 20
MAX_FRAME_BYTES = 16 << 20
"""Maximum size of one part of a message; a larger one ends the client's connection. A frame of Frigate has 0.3 MB."""

MAX_RUNNING = 16
"""Maximum number of frames at a time. A client that stopped waiting sends a new frame, and the old one still runs."""

MAX_CLIENTS = 64
"""Maximum number of clients whose model is remembered, and of requests at a time."""

_MODEL_WAIT_S = 20.0
_MODEL_POLL_S = 0.25


class ZmqDetector:
    """Answers frames on one ZeroMQ address. Lives on one event loop.

    A client gets the model that has the name of its model file, without the suffix; else the model that
    `find_detection_model` chooses. A request that fails is answered with JSON that names the error: Frigate logs it as
    an unexpected reply, and has no detections for the frame.
    """

    def __init__(self, service: InferenceService, address: str, needs_key: Callable[[], bool]) -> None:
        """`address`: ipc://PATH, or tcp://HOST:PORT. `needs_key`: whether inference needs a key or a token, also since
        a reload."""
        self._service = service
        self._needs_key = needs_key
        self._address = address
        self._socket: zmq.asyncio.Socket | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._frames = 0
        self._models: OrderedDict[bytes, str] = OrderedDict()
        """Client -> the model that it asked for. The least recently used client is forgotten first."""
        self._last_error = ""

    def start(self) -> None:
        """Listen. Call it on the event loop. Raises Unsupported without pyzmq, ServingFault for an address in use."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise Unsupported(
                f"--frigate-zmq needs pyzmq, which does not import here ({error}); {install_hint('frigate')}"
            ) from None
        self._dispatch = LoopDispatch(asyncio.get_running_loop())
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RCVHWM, MAX_RUNNING)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(self._address)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ServingFault(f"--frigate-zmq={self._address}: cannot listen: {error.strerror}") from None
        self._socket = socket
        self._receiver = asyncio.create_task(self._receive(socket))

    async def stop(self) -> None:
        """Stop listening; frames that run get no response."""
        tasks = [task for task in (self._receiver, *self._running) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._context.destroy()

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            client, *parts = await socket.recv_multipart()
            # REQ sockets put an empty part before the message, and expect one.
            envelope = [client, b""] if parts[:1] == [b""] else [client]
            task = asyncio.create_task(self._respond(socket, envelope, parts[len(envelope) - 1 :]))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _respond(self, socket: zmq.asyncio.Socket, envelope: list[bytes], message: list[bytes]) -> None:
        try:
            response = await self._response(envelope[0], message)
        except EdgeServerError as error:
            if error.message != self._last_error:  # not the same line for each frame
                log.warning("a frame of Frigate failed: %s", error.message)
            self._last_error = error.message
            response = [_json({"error": error.message})]
        await socket.send_multipart([*envelope, *response])

    async def _response(self, client: bytes, message: list[bytes]) -> list[bytes]:
        if self._needs_key():
            raise Forbidden("inference needs a key here, and clients of Frigate send none")
        if len(self._running) > MAX_CLIENTS:
            raise QueueFull(f"{MAX_CLIENTS} requests of Frigate are running, which is the maximum")
        header = _header(message)
        if header.get("model_data"):
            log.warning("a model that Frigate sent was refused: models are loaded from the repository only")
            return [_json({"model_saved": False, "model_loaded": False})]
        if header.get("model_request"):
            return [_json(await self._accept(client, PurePath(str(header.get("model_name", ""))).stem))]
        if self._frames == MAX_RUNNING:
            raise QueueFull(f"{MAX_RUNNING} frames of Frigate are running, which is the maximum")
        self._frames += 1
        try:
            rows = await self._detect(self._models.get(client), _image(header, message))
        finally:
            self._frames -= 1
        self._last_error = ""
        return [_json({"shape": [ROWS, 6], "dtype": "float32"}), rows.tobytes()]

    async def _detect(self, model: str | None, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        handle = self._model_named("") if model is None else self._service.find(model, None)
        spec = handle.spec
        if spec.is_decoupled:
            raise Unsupported(f"model '{spec.name}' is decoupled: frames need exactly one response")
        inputs, fit, decoder = await asyncio.to_thread(_fitted, spec, image)
        response = await run_model(handle, self._dispatch, inputs)
        outputs = {output.name: output.array for output in response.outputs}
        item = 0 if spec.max_batch_size else None
        found = await asyncio.to_thread(decoder.decode, outputs, item, fit, model=spec.name)
        return _rows(found, fit)

    async def _accept(self, client: bytes, name: str) -> dict[str, bool]:
        """Choose the client's model, and wait until it is ready."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _MODEL_WAIT_S
        while True:
            try:
                spec = self._model_named(name).spec
                await asyncio.to_thread(plan_detection, spec)
            except EdgeServerError as error:
                if loop.time() >= until:
                    log.warning("Frigate asked for the model '%s': %s", name[:100], error.message)
                    # "Not available" would make Frigate send its file.
                    return {"model_available": True, "model_loaded": False}
                await asyncio.sleep(_MODEL_POLL_S)
                continue
            self._models[client] = spec.name
            self._models.move_to_end(client)
            while len(self._models) > MAX_CLIENTS:
                self._models.popitem(last=False)
            return {"model_available": True, "model_loaded": True}

    def _model_named(self, name: str) -> Handle:
        """Return the handle on the model of this name, else on the one for clients that name none."""
        if any(entry.name == name for entry in self._service.repository_index()):
            return self._service.find(name, None)
        return find_detection_model(self._service, "the file in Frigate's model.path")


def _json(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _header(message: Sequence[bytes]) -> dict[str, Any]:
    """Return the header of a message of one or two parts. Raises InvalidRequest."""
    if len(message) in (1, 2):
        try:
            header = json.loads(message[0][:4096])
        except (ValueError, RecursionError):
            header = None
        if isinstance(header, dict):
            return header
    raise InvalidRequest("expected a JSON object of at most 4,096 bytes, and at most one more part, as Frigate sends")


def _image(header: dict[str, Any], message: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """Return the frame, a view of the message, `(height, width, 3)`. Raises InvalidRequest."""
    dtype, shape = header.get("dtype"), header.get("shape")
    lengths = [length for length in shape if type(length) is int and length > 0] if isinstance(shape, list) else []
    if lengths != shape or len(lengths) != 4 or (lengths[0], lengths[3], dtype) != (1, 3, "uint8"):
        raise InvalidRequest(
            "expected frames of type uint8 and shape [1, height, width, 3] in RGB, which is Frigate's default (model: "
            f"input_tensor nhwc, input_dtype int, input_pixel_format rgb), given {str(dtype)[:20]} {str(shape)[:60]}"
        )
    data = message[1] if len(message) == 2 else b""
    if len(data) != math.prod(lengths):
        raise InvalidRequest(f"expected {math.prod(lengths)} bytes for the shape {lengths}, given {len(data)}")
    return np.frombuffer(data, np.uint8).reshape(lengths[1:])


def _fitted(spec: ModelSpec, image: npt.NDArray[np.uint8]) -> tuple[dict[str, Tensor], FittedPicture, DetectionDecoder]:
    from edge_server.plugins.vision.resize import Color

    images, decoder = plan_detection(spec)
    tensor, fit = images.fit(image, Color.RGB, model=spec.name)
    return images.inputs(tensor), fit, decoder


def _rows(found: Sequence[Detection], fit: FittedPicture) -> npt.NDArray[np.float32]:
    """Return 20 rows of class, score, y_min, x_min, y_max, x_max, best first, then zeros. Positions are 0 to 1."""
    rows = np.zeros((ROWS, 6), np.float32)
    for row, item in zip(rows, found):  # noqa: B905 - at most 20 of them
        row[:2] = item.class_index, item.score
        row[2:] = item.y_min / fit.height, item.x_min / fit.width, item.y_max / fit.height, item.x_max / fit.width
    return rows
