"""ROS 1 as a transport of the bridge, through the rospy that is installed.

rospy is on no package index: it comes with ROS 1 Noetic, or with Debian and Ubuntu (`apt install python3-rospy
python3-sensor-msgs`; a virtual environment made with --system-site-packages sees it). It is plain Python: any
interpreter imports it that finds its folder on PYTHONPATH and has PyYAML.

A rospy node that started before its master waits without end, and one whose master was restarted is forgotten without
notice. Here a thread of the transport looks after both: it asks the master every `check_s` whether it knows the node,
and registers what is missing. Frames that flow between living nodes go on flowing meanwhile.
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

from edge_server.core.frame import FrameHeader
from edge_server.errors import EdgeServerError, InvalidRequest, ServingFault, Unsupported
from edge_server.ros.bridge import Qos
from edge_server.ros.message_conversion import (
    ClassificationMessage,
    CompressedImageMessage,
    DetectionMessage,
    DetectionsMessage,
    ImageMessage,
    MessageKind,
    OutgoingMessage,
)
from edge_server.ros.ros1_types import CHECKSUMS, TYPES, full_text

RECEIVE_BUFFER_BYTES = 64 * 1024 * 1024
"""rospy throws old messages away only within what one read of the socket brought. With its default of 64 KiB the frames
of a slow subscriber queue up in the kernel and grow old; one read must be able to bring several of the largest. VGA at
30 Hz, 200 ms a callback: frames were 1.2 s old in the median with rospy's default, 0.4 s with this."""

CHECK_S = 2.0
_JOIN_S = 5.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Subscription:
    """A topic that is listened to; `handle` is rospy's Subscriber, once there is a node."""

    topic: str
    kind: MessageKind
    depth: int
    callback: Callable[[Any], None]
    handle: Any = None


@dataclass(slots=True)
class _Publication:
    """A topic that is offered; `handle` is rospy's Publisher, once there is a node."""

    topic: str
    kind: MessageKind
    depth: int
    handle: Any = None


class Ros1Transport:
    """One rospy node. A process has one at most, and none after it was closed: rospy cannot start twice.

    The master is ROS_MASTER_URI's, as for any node. What is published while there is no master is lost.
    """

    def __init__(self, node_name: str = "edge_server_bridge", *, check_s: float = CHECK_S) -> None:
        self._rospy = _import_ros("rospy")
        self._rosgraph = _import_ros("rosgraph")
        if not self._rosgraph.names.is_legal_base_name(node_name):
            raise InvalidRequest(f"'{node_name}' is not a legal name of a ROS node: letters, digits and '_', no '/'")
        self._classes = message_classes()
        self._name = node_name
        self._check_s = check_s
        self._wanted: list[_Subscription | _Publication] = []
        self._lock = threading.Lock()
        self._has_node = False
        self._has_master = True
        self._failure: EdgeServerError | None = None
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._keeper = threading.Thread(target=self._keep_registered, name="ros1-master", daemon=True)
        self._keeper.start()

    def subscribe(self, topic: str, kind: MessageKind, qos: Qos, callback: Callable[[Any], None]) -> None:
        """Listen to a topic. ROS 1 knows no quality of service but the depth; `callback` runs on rospy's threads."""
        self._want(_Subscription(topic, kind, qos.depth, callback))

    def advertise(self, topic: str, kind: MessageKind, qos: Qos) -> None:
        self._want(_Publication(topic, kind, qos.depth))

    def _want(self, one: _Subscription | _Publication) -> None:
        if not self._rosgraph.names.is_legal_name(one.topic):
            raise InvalidRequest(f"'{one.topic}' is not a legal name of a ROS topic")
        with self._lock:
            self._wanted.append(one)
        self._wake.set()

    def publish(self, topic: str, message: OutgoingMessage) -> None:
        """Publish; without a master nobody listens and nothing is sent. Raises InvalidRequest for other topics."""
        with self._lock:
            found = next((one for one in self._wanted if isinstance(one, _Publication) and one.topic == topic), None)
        if found is None or found.kind is not message.kind:
            raise InvalidRequest(f"topic '{topic}' was not advertised for {TYPES[message.kind]}")
        # A node that was told to end refuses to publish; `spin` says so to the bridge.
        if found.handle is not None and not self._rospy.is_shutdown():
            found.handle.publish(to_ros1(message, self._classes))

    def spin(self, timeout_s: float) -> bool:
        """Wait; callbacks come on threads of their own. Raises what made it impossible to start the node."""
        is_over = self._ended.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        return not is_over

    def close(self) -> None:
        self._ended.set()
        self._wake.set()
        self._rospy.signal_shutdown("the bridge ended")
        # A master that hangs may keep the thread; it is a daemon.
        self._keeper.join(_JOIN_S)

    def _keep_registered(self) -> None:
        while not self._ended.is_set():
            try:
                if not self._has_node:
                    self._start_node()
                self._register()
                self._note_master(True)
            except self._rospy.ROSException as error:
                if not self._ended.is_set():
                    self._failure = ServingFault(f"the ROS node '{self._name}' could not be started: {error}")
                self._ended.set()
            except Exception as error:  # noqa: BLE001 - the boundary of a thread that nobody would miss
                # Of rosgraph and xmlrpc, also ValueError, TypeError and worse: for an address that is none, and for an
                # answer that is no master's.
                self._note_master(False, error)
            self._wake.wait(self._check_s)
            self._wake.clear()

    def _start_node(self) -> None:
        # rospy would wait for the master itself, but without an end.
        self._rosgraph.Master("/" + self._name).getPid()
        with _root_logger_kept():
            self._rospy.init_node(self._name, anonymous=True, disable_signals=True, disable_rostime=True, argv=[])
        self._rospy.on_shutdown(self._ended.set)
        self._has_node = True

    def _register(self) -> None:
        """Open what is new; tell a master that does not know this node about everything that is open."""
        node = self._rospy.get_caller_id()
        master = self._rosgraph.Master(node)
        with self._lock:
            wanted = list(self._wanted)
        is_known = not any(one.handle is not None for one in wanted) or _knows(master, node, self._rosgraph)
        for one in wanted:
            if one.handle is None:
                self._open(one)
            elif not is_known:
                self._introduce(one, master)
        if not is_known:
            log.warning("the ROS master was restarted; %s is registered with it again", node)

    def _open(self, one: _Subscription | _Publication) -> None:
        message_class = self._classes[TYPES[one.kind]]
        if isinstance(one, _Publication):
            one.handle = self._rospy.Publisher(one.topic, message_class, queue_size=one.depth, tcp_nodelay=True)
            return
        one.handle = self._rospy.Subscriber(
            one.topic, message_class, one.callback,
            queue_size=one.depth, buff_size=RECEIVE_BUFFER_BYTES, tcp_nodelay=True,
        )  # fmt: skip

    def _introduce(self, one: _Subscription | _Publication, master: Any) -> None:
        """Register with a new master, by the calls that rospy makes when a topic is opened: opening it anew would cut
        connections that still stand."""
        uri = self._rospy.get_node_uri()
        if isinstance(one, _Publication):
            master.registerPublisher(one.handle.resolved_name, TYPES[one.kind], uri)
            return
        publishers = master.registerSubscriber(one.handle.resolved_name, TYPES[one.kind], uri)
        if publishers:
            with xmlrpc.client.ServerProxy(uri) as node:
                node.publisherUpdate("/master", one.handle.resolved_name, publishers)

    def _note_master(self, is_there: bool, error: Exception | None = None) -> None:
        """Log when the master comes and goes, once each."""
        if is_there != self._has_master and not self._ended.is_set():
            if is_there:
                log.info("the ROS master is there")
            else:
                log.warning("no ROS master at %s, asking again every %g s: %s",
                            self._rosgraph.get_master_uri(), self._check_s, error)  # fmt: skip
        self._has_master = is_there


def open_transport(node_name: str, environment: Mapping[str, str]) -> Ros1Transport:
    """Return a transport of that name, to which a number is added; rospy reads ROS_MASTER_URI and the like itself."""
    if not environment.get("ROS_MASTER_URI"):
        log.info("ROS_MASTER_URI is not set: the ROS master is taken to be on this machine")
    return Ros1Transport(node_name)


def _knows(master: Any, node: str, rosgraph: Any) -> bool:
    try:
        master.lookupNode(node)
    except rosgraph.MasterError:
        return False
    return True


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
def _root_logger_kept() -> Iterator[None]:
    """rospy's own configuration of logging replaces the handlers of whoever was there before."""
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
    """Return the Python classes of all message types dealt with, those of vision_msgs freshly generated.

    Raises Unsupported where ROS 1 is missing, ServingFault when a generated class has not the checksum it must have.
    """
    installed, maker = _import_ros("sensor_msgs.msg"), _import_ros("genpy.dynamic")
    classes: dict[str, Any] = {
        "sensor_msgs/Image": installed.Image,
        "sensor_msgs/CompressedImage": installed.CompressedImage,
    }
    for name, checksum in CHECKSUMS.items():
        made = maker.generate_dynamic(name, full_text(name))
        if made[name]._md5sum != checksum:
            raise ServingFault(f"genpy computes the checksum {made[name]._md5sum} for {name}, expected {checksum}")
        # The parts of Detection2DArray go with it; sensor_msgs stays that of the installation.
        classes.update((part, one) for part, one in made.items() if part.startswith("vision_msgs/"))
    return classes


def to_ros1(message: OutgoingMessage, classes: dict[str, Any]) -> Any:
    """Return a message as an object of its rospy class; `classes` are those of `message_classes`.

    ROS 1 names a class by its number alone: labels are not sent.
    """
    made = classes[TYPES[message.kind]]()
    _copy_header(message.header, made.header)
    if isinstance(message, DetectionsMessage):
        made.detections = [_detection(box, message.header, classes) for box in message.detections]
    elif isinstance(message, ClassificationMessage):
        made.results = [
            classes["vision_msgs/ObjectHypothesis"](id=one.class_index, score=one.score) for one in message.results
        ]
    elif isinstance(message, CompressedImageMessage):
        made.format, made.data = message.format, bytes(message.data)
    else:
        _copy_image(message, made)
    return made


def _detection(box: DetectionMessage, header: FrameHeader, classes: dict[str, Any]) -> Any:
    made = classes["vision_msgs/Detection2D"]()
    _copy_header(header, made.header)
    made.bbox.center.x, made.bbox.center.y = box.center_x, box.center_y
    made.bbox.size_x, made.bbox.size_y = box.size_x, box.size_y
    found = classes["vision_msgs/ObjectHypothesisWithPose"]()
    found.id, found.score = box.hypothesis.class_index, box.hypothesis.score
    made.results = [found]
    return made


def _copy_image(message: ImageMessage, made: Any) -> None:
    made.height, made.width, made.step = message.height, message.width, message.step
    made.encoding, made.is_bigendian = message.encoding, int(message.is_bigendian)
    made.data = bytes(message.data)


def _copy_header(header: FrameHeader, made: Any) -> None:
    """The sequence number is rospy's own: it counts what a publisher sends."""
    made.stamp.secs, made.stamp.nsecs, made.frame_id = header.sec, header.nanosec, header.frame_id
