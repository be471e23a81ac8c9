"""Camera frames and what comes back for them: the nouns of the frame stream, free of any wire.

Names follow ROS: a frame is what sensor_msgs/Image or sensor_msgs/CompressedImage says, a detection converts to
vision_msgs/Detection2D field by field. All pixel coordinates are continuous, in the frame as the camera took it, from
the upper left corner of its upper left pixel.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from edge_server.core.tensor import Tensor

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class DropReason(enum.Enum):
    """Why a frame got no result. The value is its number on the wire."""

    OTHER = 0
    """A reason that this version has no word for; never given by it."""
    NEWER = 1
    """A newer frame of the same stream took its place in the mailbox."""
    MAX_AGE = 2
    """It had waited longer than `max_age_ms` when its turn came."""
    DEADLINE = 3
    """Its result could not be, or was not, ready within `deadline_ms`."""
    MAX_FPS = 4
    """It came sooner than `max_fps` allows."""
    SLOW_READER = 5
    """The client does not take the results of the stream."""
    GOVERNOR = 6
    """Heat, power or memory: the box does less for now."""
    CLOSED = 7
    """The stream ended while it waited or ran."""


@dataclass(frozen=True, slots=True)
class Returns:
    """What a stream wants back for each frame; any of these together, nothing stated means what the model declares.

    `tensors` are names of outputs, ("*",) for all of them. `top_k` 0 asks for no classes. `has_annotated_jpeg` asks
    for the frame as JPEG with the results drawn in, of `jpeg_quality` 1..100 (0: the server chooses).
    """

    tensors: tuple[str, ...] = ()
    top_k: int = 0
    has_detections: bool = False
    has_mask: bool = False
    has_annotated_jpeg: bool = False
    jpeg_quality: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the frames of a stream wait and when they are dropped. 0 leaves a limit out.

    `depth`: how many frames wait at most (ROS: keep_last); the oldest gives way. `max_age_ms`: frames that waited
    longer are not started (ROS: lifespan). `deadline_ms`: results later than this after arrival are not wanted.
    `max_fps`: more frames a second than that are not taken. `weight`: share of the model beside streams of the same
    priority. `priority`: 1 goes before 2, and so on; 0 is the normal one, 2. `notifies_drops`: each drop is told at
    once, beside the counts that every result carries.
    """

    depth: int = 1
    max_age_ms: int = 0
    deadline_ms: int = 0
    max_fps: float = 0.0
    weight: float = 1.0
    priority: int = 0
    notifies_drops: bool = False


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """The opening message of a stream. `version` 0 is the newest that serves, frame by frame.

    `stream_id` names the camera: a stream that opens with the id of an earlier one goes on counting, and ends that one
    if it still stands. "" lets the server choose a name.
    """

    model: str
    version: int = 0
    stream_id: str = ""
    returns: Returns = Returns()
    delivery: Delivery = Delivery()
    client: str = ""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """std_msgs/Header and a sequence number. Echoed as it came; the server reads nothing from it.

    `sec` holds ROS 1's uint32 as well as ROS 2's int32.
    """

    sec: int = 0
    nanosec: int = 0
    frame_id: str = ""
    seq: int = 0


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """`byte_size` bytes from `offset` within the registered shared-memory region `name`."""

    name: str
    offset: int
    byte_size: int


@dataclass(slots=True)
class Frame:
    """One picture of a camera: either raw (`encoding` is set) or a file (`format` is set), in `data` or in `region`.

    Raw: sensor_msgs/Image. `height` rows of `step` bytes each, of which the first part holds `width` pixels of
    `encoding` ("rgb8", "bayer_rggb8", "16UC1", ...); `step` 0 means rows without padding. Encoded: `format` is
    CompressedImage's ("jpeg", "png", "bgr8; jpeg compressed bgr8"). `age_us` is how old the frame was when it was
    sent, as far as its sender knows. `data` may be a view of a received message.
    """

    header: FrameHeader
    height: int = 0
    width: int = 0
    encoding: str = ""
    step: int = 0
    is_bigendian: bool = False
    format: str = ""
    region: RegionSlice | None = None
    age_us: int = 0
    data: Buffer = b""


@dataclass(frozen=True, slots=True)
class Keypoint:
    x: float
    y: float
    score: float = 1.0


@dataclass(frozen=True, slots=True)
class Detection:
    """One object found. The box lies within the frame; `label` is "" where the model has no labels."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float
    score: float
    class_index: int
    label: str = ""
    keypoints: tuple[Keypoint, ...] = ()


@dataclass(frozen=True, slots=True)
class ClassScore:
    index: int
    score: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Mask:
    """Semantic segmentation in the frame's own pixels: `data` holds height * width class indices, a byte each, row by
    row ("mono8"), or two bytes each, little-endian ("mono16"), where there are more than 256 classes."""

    height: int
    width: int
    encoding: str
    data: Buffer
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """When a frame passed each station. `received_unix_ns` is the server's wall clock; the others are microseconds of
    its monotonic clock since then: taken from the mailbox, handed to the model's queue, begun to compute, result ready.
    """

    received_unix_ns: int = 0
    taken_us: int = 0
    queued_us: int = 0
    started_us: int = 0
    finished_us: int = 0


@dataclass(frozen=True, slots=True)
class StreamCounts:
    """Totals of a stream id, over all its connections. What waits or runs is in `received` only, so
    received = answered + sum(dropped.values()) + waiting."""

    received: int = 0
    answered: int = 0
    dropped: Mapping[DropReason, int] = field(default_factory=dict)


@dataclass(slots=True)
class FrameResult:
    """The answer to one frame. With `error_code` (a word of errors.ErrorCode) set, there is an error and nothing else.

    `dropped` counts the drops since the result before this one; the Python client adds, as NEWER, the frames that it
    dropped before sending them. `runtime` says what computed it, as `status` does.
    `governor` is the state of heat and power, with `governor_detail` in plain words. `variant` is the model that
    really answered where a lighter one stands in, else "".
    """

    header: FrameHeader
    times: FrameTimes = FrameTimes()
    dropped: Mapping[DropReason, int] = field(default_factory=dict)
    counts: StreamCounts = StreamCounts()
    model: str = ""
    version: int = 0
    variant: str = ""
    runtime: str = ""
    governor: str = ""
    governor_detail: str = ""
    height: int = 0
    width: int = 0
    batch_size: int = 0
    tensors: tuple[Tensor, ...] = ()
    classes: tuple[ClassScore, ...] = ()
    detections: tuple[Detection, ...] = ()
    mask: Mask | None = None
    annotated_jpeg: Buffer = b""
    error_code: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The server's first message: under which name the stream counts, what serves it, and the counts so far."""

    stream_id: str
    model: str
    version: int
    runtime: str
    labels: tuple[str, ...] = ()
    counts: StreamCounts = StreamCounts()
    server: str = ""


@dataclass(frozen=True, slots=True)
class FrameDropped:
    """Notice of one dropped frame, for streams that ask for it."""

    header: FrameHeader
    reason: DropReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Credit:
    """Nothing but leave to send more frames: see `frames_allowed` of the message around it."""


ClientMessage: TypeAlias = "StreamRequest | Frame"
ServerMessage: TypeAlias = "StreamOpened | FrameResult | FrameDropped | Credit"
