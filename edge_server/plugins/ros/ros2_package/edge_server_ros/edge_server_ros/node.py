"""ROS 2 node: sends a camera topic to an edge_server, and publishes its results as topics.

It is a managed node: `configure` reads the parameters and asks the server for the model, `activate` opens topics
and stream, `deactivate` ends them. With the parameter `autostart` (the default) it does the first two itself,
again and again until the server has the model. All settings are parameters; config/params.yaml lists them.
`edge_server.plugins.ros.bridge` does the work. This file adds the states, ROS parameters, the ROS log, and signals.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import rclpy
from rcl_interfaces.msg import SetParametersResult
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions

from edge_server.client import StreamError
from edge_server.errors import EdgeServerError, ErrorCode, NotReady
from edge_server.plugins.ros.bridge import SPIN_S, Bridge
from edge_server.plugins.ros.bridge_log import describe_server
from edge_server.plugins.ros.bridge_parameters import BridgeParameters, check_named_once
from edge_server.plugins.ros.diagnostics import Diagnostics
from edge_server.plugins.ros.model_service import ModelService, try_model
from edge_server.plugins.ros.transports.rclpy_transport import RclpyTransport

RETRY_S = 2.0
OPEN_S = 5.0
"""Longest time of `configure`, which blocks the node: launch kills a program 5 s after it did not end by a signal."""

DEFAULTS: dict[str, Any] = {
    "autostart": True,
    "server_address": "127.0.0.1:8001",
    "server_http_url": "",
    "model_name": "efficientnet_lite0",
    "model_version": 0,
    "stream_id": "",
    "image_topic": "image",
    "image_is_compressed": False,
    "detections_topic": "detections_output",
    "classification_topic": "",
    "annotated_topic": "",
    "mask_topic": "",
    "map_topic": "",
    "detections3d_topic": "",
    "depth_topic": "",
    "camera_info_topic": "",
    "depth_tolerance_ms": 50,
    "image_is_rectified": False,
    "vision_info_topic": "vision_info",
    "label_info_topic": "label_info",
    "diagnostics_topic": "/diagnostics",
    "input_qos": "SENSOR_DATA",
    "output_qos": "DEFAULT",
    "input_queue_size": 1,
    "output_queue_size": 10,
    "top_k": 5,
    "jpeg_quality": 0,
    "class_id_is_number": False,
    "stamp_tells_age": False,
    "depth": 1,
    "max_age_ms": 0,
    "deadline_ms": 0,
    "max_fps": 0.0,
    "weight": 1.0,
    "priority": 0,
}


class EdgeServerNode(LifecycleNode):
    """The managed node. Call `tick` each SPIN_S between the callbacks of its executor, and `close` at the end."""

    def __init__(self) -> None:
        super().__init__("edge_server")
        log = logging.getLogger("edge_server")
        log.setLevel(logging.INFO)
        log.addHandler(RosLog(self.get_logger()))
        for name, value in DEFAULTS.items():
            self.declare_parameter(name, value)
        self.add_on_set_parameters_callback(self._check_parameters)
        self._bridge_parameters: BridgeParameters | None = None
        self._bridge: Bridge | None = None
        self._autostarts = bool(self.get_parameter("autostart").value)
        self._starts_at = 0.0
        self._problem: EdgeServerError | None = None
        self._last_warning = ""
        self._is_finalized = False
        self._changes_itself = False
        # For the node's life: a response to a request that is under way at `deactivate` could not be sent otherwise.
        self._service = ModelService(self._show_change)
        self._service.serve(RclpyTransport(node=self))

    def on_configure(self, state: Any) -> TransitionCallbackReturn:
        """Read the parameters, and ask the server for the model."""
        self._problem = None
        try:
            self._address, parameters = read_parameters(self)
            opened = try_model(parameters, self._address, timeout_s=OPEN_S)
        except EdgeServerError as error:
            return self._fail(error)
        self._bridge_parameters = parameters
        self._autostarts = False
        self.get_logger().info(f"the server has {describe_server(opened)}")
        return TransitionCallbackReturn.SUCCESS

    def on_activate(self, state: Any) -> TransitionCallbackReturn:
        """Open the topics and the stream."""
        given = self._bridge_parameters
        assert given is not None, "configure comes first"
        self._problem = None
        diagnostics = None
        if topic := self.get_parameter("diagnostics_topic").value:
            url = self.get_parameter("server_http_url").value
            diagnostics = Diagnostics(topic, self.get_fully_qualified_name(), self._address, url)
        bridge = Bridge([given], RclpyTransport(node=self), self._address, diagnostics=diagnostics)
        try:
            bridge.open()
        except EdgeServerError as error:
            bridge.close()
            return self._fail(error)
        self._bridge = bridge
        self._service.attach(bridge)
        return super().on_activate(state)

    def on_deactivate(self, state: Any) -> TransitionCallbackReturn:
        """End the topics and the stream. ERROR if the stream has failed."""
        self._close_bridge()
        if self._problem is not None:
            return TransitionCallbackReturn.ERROR
        return super().on_deactivate(state)

    def on_cleanup(self, state: Any) -> TransitionCallbackReturn:
        """Forget the parameters: the next `configure` reads them again."""
        self._bridge_parameters = None
        return super().on_cleanup(state)

    def on_shutdown(self, state: Any) -> TransitionCallbackReturn:
        """End everything; the process waits for its signal."""
        self._close_bridge()
        self._is_finalized, self._autostarts = True, False
        return super().on_shutdown(state)

    def on_error(self, state: Any) -> TransitionCallbackReturn:
        """Clean up after an error, so that the node can be configured again. rclpy does not log the exception of a
        transition."""
        self.get_logger().error(f"a transition from the state '{state.label}' failed; the node is unconfigured now")
        self._close_bridge()
        self._bridge_parameters = None
        return TransitionCallbackReturn.SUCCESS

    def tick(self) -> None:
        """Start when that is due, and run the bridge. Raises EdgeServerError when a start by itself can never succeed,
        or the stream has ended for good."""
        if self._autostarts and time.monotonic() >= self._starts_at:
            self._start()
        if self._bridge is None:
            return
        try:
            self._bridge.tick()
        except EdgeServerError as error:
            self._problem = error
            self.get_logger().error(error.message)
            self.trigger_deactivate()
            self._problem = None
            if self.get_parameter("autostart").value:
                raise

    def close(self) -> None:
        """End everything."""
        if not self._is_finalized:
            self.trigger_shutdown()

    def _start(self) -> None:
        self._problem = None
        if self.trigger_configure() == TransitionCallbackReturn.SUCCESS:
            self.trigger_activate()
        problem, self._problem = self._problem, None
        if problem is None:
            return
        is_passing = isinstance(problem, NotReady) or (
            isinstance(problem, StreamError) and (problem.heals or problem.code is ErrorCode.NOT_FOUND)
        )
        if not is_passing:
            raise problem
        self._starts_at = time.monotonic() + RETRY_S

    def _fail(self, error: EdgeServerError) -> TransitionCallbackReturn:
        """Keep and log an error; the same one only once while the node starts by itself."""
        self._problem = error
        if not self._autostarts or error.message != self._last_warning:
            self.get_logger().warning(error.message + ("; trying again" if self._autostarts else ""))
        self._last_warning = error.message
        return TransitionCallbackReturn.FAILURE

    def _close_bridge(self) -> None:
        bridge, self._bridge = self._bridge, None
        self._service.attach(None)
        if bridge is not None:
            bridge.close()

    def _show_change(self, changes: Sequence[BridgeParameters]) -> None:
        """Set the parameters to what the service ~/set_model has changed, for the next activation, too."""
        (changed,) = changes
        self._bridge_parameters = changed
        self._changes_itself = True
        names = ("model_name", "model_version", "image_topic")
        self.set_parameters([Parameter(name, value=getattr(changed, name)) for name in names])
        self._changes_itself = False

    def _check_parameters(self, given: Sequence[Any]) -> SetParametersResult:
        """Refuse changes that would have no effect before the next `configure`."""
        own = [one.name for one in given if one.name in DEFAULTS]
        if own and self._bridge_parameters is not None and not self._changes_itself:
            reason = f"'{own[0]}' is read by the transition configure; the service ~/set_model changes model and topic"
            return SetParametersResult(successful=False, reason=reason)
        return SetParametersResult(successful=True)


def read_parameters(node: Any) -> tuple[str, BridgeParameters]:
    """Return the server's address and the parameters of the bridge. Raises InvalidRequest for values out of range."""
    given = {name: node.get_parameter(name).value for name in DEFAULTS}
    # Remapped here: the server and other nodes get to know these two by their full names.
    for name in ("image_topic", "label_info_topic"):
        given[name] = given[name] and node.resolve_topic_name(given[name])
    parameters = BridgeParameters.from_values(given)
    check_named_once([*parameters.topics, given["diagnostics_topic"]])
    return given["server_address"], parameters


class RosLog(logging.Handler):
    """Passes Python's log lines to ROS. rclpy requires a separate line of code for each severity."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            self._logger.error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.warning(text)
        else:
            self._logger.info(text)


def main(args: Sequence[str] | None = None) -> int:
    """Run the node until SIGINT or SIGTERM; return the exit code."""
    # The context must exist until the last result: the bridge ends first, then ROS.
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    node = EdgeServerNode()
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        while not stopping.is_set():
            executor.spin_once(timeout_sec=SPIN_S)
            node.tick()
        node.close()
    except ExternalShutdownException:
        return 0
    except EdgeServerError as error:
        node.get_logger().fatal(error.message)
        return 1
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.try_shutdown()
    return 0
