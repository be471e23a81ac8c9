"""Bridge between ROS and a server: sends the frames of camera topics, and publishes the results as topics.

It needs no ROS library: a `Transport` connects it to ROS, and all cameras share that connection, one node of ROS. Each
camera has a stream to the server of its own. Models, and the topic of one camera, can be changed while it runs.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from edge_server.client import StreamError
from edge_server.errors import EdgeServerError, NotReady
from edge_server.plugins.ros.bridge_parameters import BridgeParameters, check_named_once
from edge_server.plugins.ros.camera_bridge import CameraBridge
from edge_server.plugins.ros.diagnostics import Diagnostics
from edge_server.plugins.ros.messages.message_conversion import MessageKind
from edge_server.plugins.ros.result_publishers import advertise_if_installed
from edge_server.plugins.ros.transports.transport import Qos, Transport
from edge_server.plugins.ros.transports.udp_sockets import PacketDrops

SPIN_S = 0.2
"""Longest time between two calls of `Bridge.tick`."""

_COUNT_INTERVAL_S = 1.0
_COUNTS_OF_A_REPORT = 5

log = logging.getLogger(__name__)


class Bridge:
    """Connects the cameras of one transport to a server at `address`, with `parameters` for each camera.

    `run` blocks; any thread or signal handler may call `stop`. A program with a loop of its own calls `open`, then
    `tick` each SPIN_S, then `close`, all on the thread that runs the transport's callbacks. Raises InvalidRequest when
    two cameras have a topic in common.
    """

    def __init__(
        self,
        parameters: Sequence[BridgeParameters],
        transport: Transport,
        address: str,
        *,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        diagnostics_topic = diagnostics.topic if diagnostics is not None else ""
        check_named_once([diagnostics_topic, *(topic for camera in parameters for topic in camera.topics)])
        self.address = address
        self.cameras = [CameraBridge(camera, transport, address, self._fail) for camera in parameters]
        self._transport = transport
        self._diagnostics = diagnostics
        self._stopping = threading.Event()
        self._counted_at = 0.0
        self._counts_to_report = _COUNTS_OF_A_REPORT
        self._packet_drops = PacketDrops()
        self._switches: queue.SimpleQueue[tuple[Sequence[BridgeParameters], Future[None]]] = queue.SimpleQueue()
        self._failure: Exception | None = None

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    def run(self) -> None:
        """Run until `stop`, or until the transport ends or all cameras have failed; then close all.

        Raises the error that ended it, if any.
        """
        try:
            self.open()
            while not self._stopping.is_set() and self._transport.spin(SPIN_S):
                self.tick()
        finally:
            self.close()
        if self._failure is not None:
            raise self._failure

    def open(self) -> None:
        """Open the topics and the streams."""
        for camera in self.cameras:
            camera.open()
        if self._diagnostics is not None:
            qos = Qos("DEFAULT", 10)
            if advertise_if_installed(self._transport, self._diagnostics.topic, MessageKind.DIAGNOSTICS, qos):
                self._diagnostics.start()
            else:
                self._diagnostics = None
        self._counted_at = time.monotonic()

    def tick(self) -> None:
        """Do what is due: switch, count, report. Raises the error that ended the bridge, if any."""
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(queue.Empty):
            parameters, done = self._switches.get_nowait()
            if done.set_running_or_notify_cancel():
                try:
                    for camera, changed in zip(self.cameras, parameters, strict=True):
                        camera.switch(changed)
                except EdgeServerError as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)
        now = time.monotonic()
        if now - self._counted_at >= _COUNT_INTERVAL_S:
            self._count(now)

    def close(self) -> None:
        """Close the streams and the transport."""
        self._stopping.set()
        for camera in self.cameras:
            camera.close()
        if self._diagnostics is not None:
            self._diagnostics.close()
        self._transport.close()

    def switch(self, parameters: Sequence[BridgeParameters], timeout_s: float) -> None:
        """Have `tick` switch each camera to its part of `parameters`. For another thread than that of `tick`.

        With one camera its image topic may change, too. Raises EdgeServerError, and nothing has changed then.
        """
        done: Future[None] = Future()
        self._switches.put((parameters, done))
        try:
            done.result(timeout_s)
        except FutureTimeoutError:
            if done.cancel():
                raise NotReady("the bridge is ending, or its thread is busy") from None
            done.result()

    def _fail(self, error: Exception) -> None:
        """End the bridge, unless the server ended the stream of a camera while another camera has not failed."""
        if isinstance(error, StreamError) and any(camera.failure is None for camera in self.cameras):
            failed = ", ".join(camera.parameters.image_topic for camera in self.cameras if camera.failure is not None)
            log.error("no results for %s; the other cameras go on: %s", failed, error)
            return
        self._failure = error
        self._stopping.set()

    def _count(self, now: float) -> None:
        """End the counts of this second; publish diagnostics, and log lines when they are due."""
        seconds, self._counted_at = now - self._counted_at, now
        for camera in self.cameras:
            camera.count(seconds)
        self._counts_to_report -= 1
        if self._counts_to_report == 0:
            self._counts_to_report = _COUNTS_OF_A_REPORT
            for camera in self.cameras:
                camera.report()
            if lost := self._packet_drops.explain(max(camera.largest_frame for camera in self.cameras)):
                log.warning("%s: %s", ", ".join(camera.parameters.image_topic for camera in self.cameras), lost)
        if self._diagnostics is not None:
            statuses = [status for camera in self.cameras for status in camera.statuses(self._diagnostics)]
            self._transport.publish(self._diagnostics.topic, self._diagnostics.make_message(*statuses))
