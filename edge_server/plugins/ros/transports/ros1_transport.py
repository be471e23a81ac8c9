"""ROS 1 transport: subscribes and publishes with an installed rospy.

rospy is not on a package index: it comes with ROS 1 Noetic, or with Debian and Ubuntu (`apt install python3-rospy
python3-sensor-msgs`, for a virtual environment made with --system-site-packages). It is plain Python: any interpreter
with PyYAML can import it when its folder is on PYTHONPATH.

A rospy node that starts before its master waits without a limit, and a restarted master does not know its nodes. A
thread of the transport handles both: it asks the master every `check_s` whether it knows the node, and registers
missing topics. Messages between existing nodes are not interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import xmlrpc.client
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edge_server.errors import EdgeServerError, InvalidRequest, ServingFault, Unsupported
from edge_server.plugins.ros.messages.message_conversion import (
    ClassificationMessage,
    CompressedImageMessage,
    Detection3DMessage,
    DetectionMessage,
    Detections3DMessage,
    DetectionsMessage,
    DiagnosticsMessage,
    DiagnosticStatus,
    ImageMessage,
    MessageKind,
    OutgoingMessage,
    VisionInfoMessage,
)
from edge_server.plugins.ros.messages.ros1_types import CHECKSUMS, TYPES, full_text
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.protocol.frame_messages import FrameHeader

RECEIVE_BUFFER_BYTES = 64 * 1024 * 1024
"""Receive buffer of rospy, which drops old messages only within one read of the socket. With its default of 64 KiB the
frames of a slow subscriber wait in the kernel; one read must hold several large frames. With VGA at 30 Hz and 200 ms a
callback, the median age of frames was 1.2 s with rospy's default, and 0.4 s with this value."""

CHECK_S = 2.0
_JOIN_S = 5.0

_GENERATED = ("vision_msgs/", "diagnostic_msgs/")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Subscription:
    """A subscribed topic; `handle` is rospy's Subscriber, None before the node exists."""

    topic: str
    kind: MessageKind
    depth: int
    callback: Callable[[Any], None]
    handle: Any = None


@dataclass(slots=True)
class _Publication:
    """An advertised topic; `handle` is rospy's Publisher, None before the node exists."""

    topic: str
    kind: MessageKind
    depth: int
    is_latched: bool
    handle: Any = None


class Ros1Transport:
    """Transport with one rospy node. A process can have only one in its lifetime, because rospy cannot start twice.

    The master is that of ROS_MASTER_URI. Messages published without a master are lost.
    """

    def __init__(self, node_name: str = "edge_server_bridge", *, check_s: float = CHECK_S) -> None:
        self._rospy = _import_ros("rospy")
        self._rosgraph = _import_ros("rosgraph")
        if not self._rosgraph.names.is_legal_base_name(node_name):
            raise InvalidRequest(f"'{node_name}' is not a legal name of a ROS node: letters, digits and '_', no '/'")
        self._classes = message_classes()
        self._name = node_name
        self._check_s = check_s
        self._topics: list[_Subscription | _Publication] = []
        self._lock = threading.Lock()
        self._has_node = False
        self._has_master = True
        self._failure: EdgeServerError | None = None
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._registrar = threading.Thread(target=self._register_repeatedly, name="ros1-master", daemon=True)
        self._registrar.start()

    def subscribe(self, topic: str, kind: MessageKind, qos: Qos, callback: Callable[[Any], None]) -> None:
        """Subscribe to a topic. ROS 1 has no quality of service except the depth; `callback` runs on rospy's
        threads."""
        self._add_topic(_Subscription(topic, kind, qos.depth, callback))

    def advertise(self, topic: str, kind: MessageKind, qos: Qos) -> None:
        if kind not in TYPES:
            raise Unsupported(f"topic '{topic}': ROS 1 has no {kind.value.replace('/msg/', '/')}")
        self._add_topic(_Publication(topic, kind, qos.depth, qos.is_transient_local))

    def _add_topic(self, one: _Subscription | _Publication) -> None:
        if not self._rosgraph.names.is_legal_name(one.topic):
            raise InvalidRequest(f"'{one.topic}' is not a legal name of a ROS topic")
        with self._lock:
            self._topics.append(one)
        self._wake.set()

    def publish(self, topic: str, message: OutgoingMessage) -> None:
        """Publish; without a master nothing is sent. Raises InvalidRequest for a topic that is not advertised."""
        with self._lock:
            found = next((one for one in self._topics if isinstance(one, _Publication) and one.topic == topic), None)
        if found is None or found.kind is not message.kind:
            raise InvalidRequest(f"topic '{topic}' was not advertised for {TYPES[message.kind]}")
        # A node that shuts down refuses to publish; `spin` reports the shutdown to the bridge.
        if found.handle is not None and not self._rospy.is_shutdown():
            found.handle.publish(to_ros1(message, self._classes))

    def spin(self, timeout_s: float) -> bool:
        """Wait; callbacks run on rospy's threads. Raises the error that prevented the start of the node."""
        is_over = self._ended.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        return not is_over

    def explain_silence(self, topic: str) -> str:
        # rospy itself logs publishers of another type.
        return ""

    def close(self) -> None:
        self._ended.set()
        self._wake.set()
        self._rospy.signal_shutdown("the bridge ended")
        # A hanging master may block the thread, which is a daemon.
        self._registrar.join(_JOIN_S)

    def _register_repeatedly(self) -> None:
        while not self._ended.is_set():
            try:
                if not self._has_node:
                    # rospy would wait for the master itself, but without a limit.
                    self._rosgraph.Master("/" + self._name).getPid()
                    with _keep_root_logger():
                        self._rospy.init_node(
                            self._name, anonymous=True, disable_signals=True, disable_rostime=True, argv=[]
                        )
                    self._rospy.on_shutdown(self._ended.set)
                    self._has_node = True
                self._register_topics()
                self._log_master(True)
            except self._rospy.ROSException as error:
                if not self._ended.is_set():
                    self._failure = ServingFault(f"the ROS node '{self._name}' could not be started: {error}")
                self._ended.set()
            except Exception as error:  # noqa: BLE001 - a thread's boundary; logged, and tried again
                # rosgraph and xmlrpc raise many types, also ValueError and TypeError, for an invalid address or a
                # response that is not from a master.
                self._log_master(False, error)
            self._wake.wait(self._check_s)
            self._wake.clear()

    def _register_topics(self) -> None:
        """Open new topics; register the open ones again with a master that does not know this node."""
        node = self._rospy.get_caller_id()
        master = self._rosgraph.Master(node)
        with self._lock:
            topics = list(self._topics)
        is_known = True
        if any(one.handle is not None for one in topics):
            try:
                master.lookupNode(node)
            except self._rosgraph.MasterError:
                is_known = False
        for one in topics:
            if one.handle is None:
                self._open_topic(one)
            elif not is_known:
                self._register_again(one, master)
        if not is_known:
            log.warning("the ROS master was restarted; %s is registered with it again", node)

    def _open_topic(self, one: _Subscription | _Publication) -> None:
        message_class = self._classes[TYPES[one.kind]]
        if isinstance(one, _Publication):
            one.handle = self._rospy.Publisher(
                one.topic, message_class, queue_size=one.depth, tcp_nodelay=True, latch=one.is_latched
            )
            return
        one.handle = self._rospy.Subscriber(
            one.topic, message_class, one.callback,
            queue_size=one.depth, buff_size=RECEIVE_BUFFER_BYTES, tcp_nodelay=True,
        )  # fmt: skip

    def _register_again(self, one: _Subscription | _Publication, master: Any) -> None:
        """Register an open topic with a new master, by the calls of rospy. Opening it again would close its existing
        connections."""
        uri = self._rospy.get_node_uri()
        if isinstance(one, _Publication):
            master.registerPublisher(one.handle.resolved_name, TYPES[one.kind], uri)
            return
        publishers = master.registerSubscriber(one.handle.resolved_name, TYPES[one.kind], uri)
        if publishers:
            with xmlrpc.client.ServerProxy(uri) as node:
                node.publisherUpdate("/master", one.handle.resolved_name, publishers)

    def _log_master(self, is_there: bool, error: Exception | None = None) -> None:
        """Log that the master is found or lost, once each."""
        if is_there != self._has_master and not self._ended.is_set():
            if is_there:
                log.info("the ROS master is there")
            else:
                log.warning("no ROS master at %s, asking again every %g s: %s",
                            self._rosgraph.get_master_uri(), self._check_s, error)  # fmt: skip
        self._has_master = is_there


def open_transport(node_name: str, environment: Mapping[str, str]) -> Ros1Transport:
    """Return a transport with this name plus a number. rospy reads ROS_MASTER_URI and similar variables itself."""
    if not environment.get("ROS_MASTER_URI"):
        log.info("ROS_MASTER_URI is not set: the ROS master is taken to be on this machine")
    return Ros1Transport(node_name)


def _import_ros(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(
            f"the transport ros1 needs {module}, which this Python cannot import ({error}): source the setup.bash of "
            "ROS 1, or apt install python3-rospy python3-sensor-msgs and use a virtual environment made with "
            "--system-site-packages"
        ) from None


@contextlib.contextmanager
def _keep_root_logger() -> Iterator[None]:
    """Restore the root logger's handlers and level, which rospy's logging configuration replaces."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in handlers:
            if handler not in root.handlers:
                root.addHandler(handler)


def message_classes() -> dict[str, Any]:
    """Return the Python classes of all message types; those of vision_msgs and diagnostic_msgs are
    generated.

    Raises Unsupported without ROS 1, ServingFault when a generated class has a wrong checksum.
    """
    installed, maker = _import_ros("sensor_msgs.msg"), _import_ros("genpy.dynamic")
    classes: dict[str, Any] = {
        "sensor_msgs/Image": installed.Image,
        "sensor_msgs/CompressedImage": installed.CompressedImage,
        "sensor_msgs/CameraInfo": installed.CameraInfo,
    }
    for name, checksum in CHECKSUMS.items():
        made = maker.generate_dynamic(name, full_text(name))
        if made[name]._md5sum != checksum:
            raise ServingFault(f"genpy computes the checksum {made[name]._md5sum} for {name}, expected {checksum}")
        # Include the parts of Detection2DArray, but use the installed sensor_msgs.
        classes.update((part, one) for part, one in made.items() if part.startswith(_GENERATED))
    return classes


def to_ros1(message: OutgoingMessage, classes: dict[str, Any]) -> Any:
    """Return a message as an object of its rospy class; `classes` are those of `message_classes`.

    ROS 1 identifies a class by its number only: labels are not sent.
    """
    made = classes[TYPES[message.kind]]()
    _copy_header(message.header, made.header)
    if isinstance(message, DetectionsMessage):
        made.detections = [_make_detection(box, message.header, classes) for box in message.detections]
    elif isinstance(message, Detections3DMessage):
        made.detections = [_make_detection3d(box, message.header, classes) for box in message.detections]
    elif isinstance(message, ClassificationMessage):
        made.results = [
            classes["vision_msgs/ObjectHypothesis"](id=one.class_index, score=one.score) for one in message.results
        ]
    elif isinstance(message, VisionInfoMessage):
        made.method, made.database_location = message.method, message.database_location
        made.database_version = message.database_version
    elif isinstance(message, DiagnosticsMessage):
        made.status = [_make_status(one, classes) for one in message.statuses]
    elif isinstance(message, CompressedImageMessage):
        made.format, made.data = message.format, bytes(message.data)
    elif isinstance(message, ImageMessage):
        made.height, made.width, made.step = message.height, message.width, message.step
        made.encoding, made.is_bigendian = message.encoding, int(message.is_bigendian)
        made.data = bytes(message.data)
    return made


def _make_detection(box: DetectionMessage, header: FrameHeader, classes: dict[str, Any]) -> Any:
    made = classes["vision_msgs/Detection2D"]()
    _copy_header(header, made.header)
    made.bbox.center.x, made.bbox.center.y, made.bbox.center.theta = box.center_x, box.center_y, box.theta
    made.bbox.size_x, made.bbox.size_y = box.size_x, box.size_y
    found = classes["vision_msgs/ObjectHypothesisWithPose"]()
    found.id, found.score = box.hypothesis.class_index, box.hypothesis.score
    made.results = [found]
    return made


def _make_detection3d(box: Detection3DMessage, header: FrameHeader, classes: dict[str, Any]) -> Any:
    made = classes["vision_msgs/Detection3D"]()
    _copy_header(header, made.header)
    found = classes["vision_msgs/ObjectHypothesisWithPose"]()
    found.id, found.score = box.hypothesis.class_index, box.hypothesis.score
    for pose in (made.bbox.center, found.pose.pose):
        pose.position.x, pose.position.y, pose.position.z = box.x, box.y, box.z
        pose.orientation.z, pose.orientation.w = box.orientation
    made.bbox.size.x, made.bbox.size.y, made.bbox.size.z = box.size_x, box.size_y, box.size_z
    made.results = [found]
    return made


def _make_status(one: DiagnosticStatus, classes: dict[str, Any]) -> Any:
    pair = classes["diagnostic_msgs/KeyValue"]
    return classes["diagnostic_msgs/DiagnosticStatus"](
        level=int(one.level), name=one.name, message=one.message, hardware_id=one.hardware_id,
        values=[pair(key=key, value=value) for key, value in one.values.items()],
    )  # fmt: skip


def _copy_header(header: FrameHeader, made: Any) -> None:
    """Copy stamp and frame id. rospy sets the sequence number itself."""
    made.stamp.secs, made.stamp.nsecs, made.frame_id = header.sec, header.nanosec, header.frame_id
