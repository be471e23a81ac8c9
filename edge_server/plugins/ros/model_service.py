"""Service `~/set_model`: changes the model of a bridge that runs, and the image topic of one with a single camera."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge_server.client import Frame, StreamOpened
from edge_server.errors import EdgeServerError, InvalidRequest, NotReady, ServingFault, Unsupported
from edge_server.plugins.ros.bridge import Bridge
from edge_server.plugins.ros.bridge_log import describe_server
from edge_server.plugins.ros.bridge_parameters import BridgeParameters
from edge_server.plugins.ros.transports.transport import ServiceTransport, Transport

SERVICE = "~/set_model"
SERVICE_TYPE = "edge_server_interfaces/srv/SetModel"
TRIAL_S = 20.0
"""Longest time for a new model to open a stream and answer one frame, its first one."""

_SWITCH_S = 5.0
_MAX_VERSION = 2**31 - 1


log = logging.getLogger(__name__)


class ModelService:
    """Answers requests of SetModel for the bridge that is attached. A model that cannot answer leaves the one that
    serves.

    `on_changed` is called with the new parameters of each camera after a change, on the service's thread.
    """

    def __init__(self, on_changed: Callable[[Sequence[BridgeParameters]], None] = lambda _: None) -> None:
        self._on_changed = on_changed
        self._bridge: Bridge | None = None
        self._is_served = False
        self._lock = threading.Lock()

    def serve(self, transport: Transport) -> None:
        """Serve on a transport, if it has services and the package of the type is installed."""
        if isinstance(transport, ServiceTransport):
            try:
                transport.serve(SERVICE, SERVICE_TYPE, self.set_model)
                self._is_served = True
            except Unsupported as error:
                log.info("no service %s: %s", SERVICE, error)

    def attach(self, bridge: Bridge | None) -> None:
        """Change this bridge from now on; None refuses requests."""
        self._bridge = bridge
        for camera in bridge.cameras if bridge is not None else ():
            camera.keeps_frame = self._is_served

    def set_model(self, request: Any) -> Mapping[str, object]:
        """Return the fields of the response: `success`, and `message`, which says why not."""
        if not self._lock.acquire(blocking=False):
            return {"success": False, "message": "another request changes the model now"}
        try:
            return {"success": True, "message": self._change(request)}
        except EdgeServerError as error:
            return {"success": False, "message": error.message}
        finally:
            self._lock.release()

    def _change(self, request: Any) -> str:
        bridge = self._bridge
        if bridge is None:
            raise NotReady("the node is not active")
        if not 0 <= request.model_version <= _MAX_VERSION:
            raise InvalidRequest(f"model_version: expected 0 to {_MAX_VERSION}, got {request.model_version}")
        if not (request.model_name or request.image_topic):
            raise InvalidRequest("expected model_name or image_topic, both are empty")
        if request.image_topic and len(bridge.cameras) > 1:
            raise InvalidRequest(f"image_topic: expected '' for a bridge of {len(bridge.cameras)} cameras")
        changes = [_changed(camera.parameters, request) for camera in bridge.cameras]
        for camera, parameters in zip(bridge.cameras, changes, strict=True):
            # A picture of another camera may be of another kind.
            frame = camera.last_frame if parameters.image_topic == camera.parameters.image_topic else None
            opened = try_model(parameters, bridge.address, frame)
        bridge.switch(changes, _SWITCH_S)
        self._on_changed(changes)
        topics = ", ".join(parameters.image_topic for parameters in changes)
        return f"{topics} goes to {describe_server(opened)}"


def _changed(before: BridgeParameters, request: Any) -> BridgeParameters:
    topic = request.image_topic or before.image_topic
    if topic != before.image_topic and before.detections3d_topic:
        raise InvalidRequest(f"image_topic: {before.depth_topic} gives the depth of {before.image_topic} alone")
    return dataclasses.replace(
        before,
        model_name=request.model_name or before.model_name,
        model_version=request.model_version if request.model_name else before.model_version,
        image_topic=topic,
    )


def try_model(
    parameters: BridgeParameters, address: str, frame: Frame | None = None, timeout_s: float | None = None
) -> StreamOpened:
    """Open a stream of its own to the model of `parameters`, and have it answer `frame`, if any; return the server's
    first message.

    A frame that the server drops, because it is hot for example, proves nothing against the model. Raises StreamError
    when the model is missing or takes no pictures, ServingFault with the error of the frame, NotReady after
    `timeout_s`, TRIAL_S unless given.
    """
    limit_s = timeout_s or TRIAL_S
    found: list[StreamOpened] = []
    is_over_time = threading.Event()

    def note_opened(opened: StreamOpened) -> None:
        found.append(opened)
        stream.finish()

    def give_up() -> None:
        is_over_time.set()
        stream.close()

    stream = parameters.open_stream(address, on_opened=note_opened, is_trial=True)
    if frame is not None:
        stream.send(frame)
    limit = threading.Timer(limit_s, give_up)
    limit.daemon = True
    limit.start()
    try:
        results = list(stream.results())
    finally:
        limit.cancel()
        stream.close()
    if is_over_time.is_set() or not found:
        raise NotReady(f"model '{parameters.model_name}' on {address} did not answer within {limit_s:g} s")
    if frame is not None and stream.counters().lost:
        raise ServingFault(f"model '{parameters.model_name}' on {address} gave no result for a picture")
    if results and results[0].error_code:
        raise ServingFault(f"model '{parameters.model_name}' failed for a picture of {parameters.image_topic}: "
                           f"{results[0].error_code}: {results[0].error}")  # fmt: skip
    return found[0]
