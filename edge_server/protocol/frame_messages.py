"""Data classes of the messages of a frame stream (frames, results, drop notices, settings), without their encoding.

Names follow ROS. A frame has the fields of sensor_msgs/Image or sensor_msgs/CompressedImage. A detection converts to
vision_msgs/Detection2D field by field. Pixel coordinates are continuous, in the original camera frame; the origin is
the upper left corner of the upper left pixel.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from edge_server.core.tensor import Tensor
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class DropReason(enum.Enum):
    """Why a frame got no result. The value is its number on the wire."""

    OTHER = 0
    """A reason that this version does not know. This version never sends it."""
    NEWER = 1
    """A newer frame of the same stream replaced it in the mailbox."""
    MAX_AGE = 2
    """It waited longer than `max_age_ms`."""
    DEADLINE = 3
    """It did not run, because its result could not have been ready within `deadline_ms`."""
    MAX_FPS = 4
    """It arrived sooner than `max_fps` allows."""
    SLOW_READER = 5
    """The results of earlier frames are not read yet: by the client, or by the server that opened the camera itself."""
    GOVERNOR = 6
    """The governor limits the work because of heat, power or memory."""
    CLOSED = 7
    """The stream ended before the result was ready."""


@record(frozen=True, slots=True)
class Returns:
    """The results that a stream requests for each frame. If nothing is set, the model's declaration decides.

    `tensors` are names of outputs, ("*",) for all. `top_k` 0 requests no classes. `has_mask` requests the mask of the
    frame, or detections with the mask of each object, whichever the model has. `has_map` requests the map of depth or
    anomaly. `has_annotated_jpeg` requests the frame
    as JPEG with the results drawn in, of `jpeg_quality` 1..100 (0: the server chooses).
    """

    tensors: tuple[str, ...] = ()
    top_k: int = 0
    has_detections: bool = False
    has_mask: bool = False
    has_annotated_jpeg: bool = False
    jpeg_quality: int = 0
    has_map: bool = False


@record(frozen=True, slots=True)
class Delivery:
    """Delivery policy of a stream: how frames wait and when they are dropped. 0 means no limit.

    `depth`: most waiting frames (ROS: keep_last); a new frame replaces the oldest. `max_age_ms`: frames that waited
    longer are dropped (ROS: lifespan). `deadline_ms`: frames whose results would come later after arrival are dropped;
    if the time passes while a frame runs, its result is late (`FrameResult.is_late`). `max_fps`: most frames per
    second. `weight`: share of the model among streams of the same priority. `priority`: 1 goes before 2, and so on; 0
    means the normal priority, 2. `notifies_drops`: the server reports each drop at once, in addition to the counts in
    each result.
    """

    depth: int = 1
    max_age_ms: int = 0
    deadline_ms: int = 0
    max_fps: float = 0.0
    weight: float = 1.0
    priority: int = 0
    notifies_drops: bool = False


@record(frozen=True, slots=True)
class StreamRequest:
    """The first message of a stream. `version` 0: each frame uses the newest version that serves.

    `stream_id` names the camera. A stream with the id of an earlier stream continues its counts, and closes the earlier
    stream if it is still open. "" lets the server choose a name.
    """

    model: str
    version: int = 0
    stream_id: str = ""
    returns: Returns = Returns()
    delivery: Delivery = Delivery()
    client: str = ""


@record(frozen=True, slots=True)
class FrameHeader:
    """std_msgs/Header and a sequence number. The server returns it unchanged. Only tracking reads it: the stamp.

    `sec` holds a uint32; ROS 2 reads the same bits as an int32.
    """

    sec: int = 0
    nanosec: int = 0
    frame_id: str = ""
    seq: int = 0


@record(frozen=True, slots=True)
class RegionSlice:
    """`byte_size` bytes from `offset` within the registered shared-memory region `name`."""

    name: str
    offset: int
    byte_size: int


@record(slots=True)
class Frame:
    """One camera image in `data` or in `region`: raw (`encoding` is set) or encoded (a file, `encoding` is not set).

    Raw: sensor_msgs/Image. `height` rows of `step` bytes; each row begins with `width` pixels of `encoding` ("rgb8",
    "bayer_rggb8", "16UC1", ...). `step` 0 means rows without padding. Encoded: `format` is that of CompressedImage
    ("jpeg", "png", "bgr8; jpeg compressed bgr8") or empty, the file says its codec. `age_us` is the frame's age when
    it was sent, as the sender knows it. `data` may be a view of a received message.
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


@record(frozen=True, slots=True)
class Keypoint:
    """One keypoint of a detection, in pixels."""

    x: float
    y: float
    score: float = 1.0


@record(frozen=True, slots=True)
class RotatedBox:
    """Rectangle of any direction, in pixels of the frame. `x` and `y` are its centre. It may reach out of the frame.

    `angle` is in radians, at least 0 and less than pi/2: between the x axis and the sides of length `width`, clockwise
    in the picture (x to the right, y down).
    """

    x: float
    y: float
    width: float
    height: float
    angle: float

    def corners(self) -> tuple[tuple[float, float], ...]:
        """Return the four corners (x, y), clockwise in the picture, from the one that is upper left at angle 0."""
        cosine, sine = math.cos(self.angle), math.sin(self.angle)
        return tuple(
            (
                self.x + (right * self.width * cosine - down * self.height * sine) / 2,
                self.y + (right * self.width * sine + down * self.height * cosine) / 2,
            )
            for right, down in ((-1, -1), (1, -1), (1, 1), (-1, 1))
        )


@record(frozen=True, slots=True)
class ObjectMask:
    """Pixels of one object, in the rectangle of `width` x `height` pixels from column `x` and row `y` of the frame.

    The rectangle holds the pixels whose upper left corners lie in the object's box. `data` has one bit per pixel, row
    by row without padding between rows, the highest bit of a byte first (numpy.packbits).
    """

    x: int
    y: int
    width: int
    height: int
    data: Buffer

    def pixels(self) -> npt.NDArray[np.bool_]:
        """Return whether each pixel belongs to the object, (height, width). Raises ValueError for data of another
        size."""
        count = self.width * self.height
        if len(self.data) != (count + 7) // 8:
            raise ValueError(
                f"expected {(count + 7) // 8} bytes for a mask of {self.width}x{self.height}, given {len(self.data)}"
            )
        bits = np.unpackbits(np.frombuffer(self.data, np.uint8), count=count)
        return bits.view(np.bool_).reshape(self.height, self.width)


class ZonePresence(NamedTuple):
    """A zone that an object is in, and for how many seconds. `is_loitering`: for at least the `loitering_s` of the
    zone."""

    zone: str
    seconds: float
    is_loitering: bool = False


@record(frozen=True, slots=True)
class Detection:
    """One detected object. The box lies within the frame. `label` is "" if the model has no labels.

    `track_id` is the same number, above 0, in all frames of a stream that show this object; 0 if the object is not
    tracked, or not yet. `mask` is None if the model gives no masks, if none was requested, and for weaker detections
    beyond the server's limits on masks. `rotated` is the object's oriented box, None if the model gives only upright
    boxes; then the box is the part of its upright bounding box that lies within the frame. `zones` are those of a
    camera that the server opens; no message has them. `text` is what a recogniser reads in the box, with `text_score`,
    the mean probability of its characters; "" and 0 if it reads nothing, or if the model reads no text.
    """

    x_min: float
    y_min: float
    x_max: float
    y_max: float
    score: float
    class_index: int
    label: str = ""
    keypoints: tuple[Keypoint, ...] = ()
    track_id: int = 0
    mask: ObjectMask | None = None
    rotated: RotatedBox | None = None
    zones: tuple[ZonePresence, ...] = ()
    text: str = ""
    text_score: float = 0.0

    @property
    def class_name(self) -> str:
        """The label, or "class 7" if there is none."""
        return self.label or f"class {self.class_index}"


@record(frozen=True, slots=True)
class ClassScore:
    """Score of one class. `label` is "" if the model has no labels."""

    index: int
    score: float
    label: str = ""

    @property
    def class_name(self) -> str:
        """The label, or "class 7" if there is none."""
        return self.label or f"class {self.index}"


@record(frozen=True, slots=True)
class Mask:
    """Semantic segmentation, one class index per pixel of the frame, row by row.

    `encoding` is "mono8" (one byte each), or "mono16" (two bytes, little-endian) for more than 256 classes.
    """

    height: int
    width: int
    encoding: str
    data: Buffer
    labels: tuple[str, ...] = ()


@record(frozen=True, slots=True)
class DenseMap:
    """A number for each pixel of the frame, row by row, little-endian.

    `kind` is "metric_depth" (in metres), "relative_depth" (no unit, greater is farther), "inverse_depth" (no unit,
    greater is nearer) or "anomaly". `encoding` is "32FC1", with NaN for pixels without a number, or "mono16", where 0
    means `minimum` and 65535 `maximum`. Both are those of this map. `score` is the anomaly of the whole frame.
    """

    kind: str
    height: int
    width: int
    encoding: str
    data: Buffer
    minimum: float
    maximum: float
    score: float = 0.0

    def summary(self) -> dict[str, str | int | float]:
        """Return kind, size and range, and the score of an anomaly map: all but the pixels."""
        facts: dict[str, str | int | float] = {
            "kind": self.kind, "height": self.height, "width": self.width, "minimum": self.minimum,
            "maximum": self.maximum,
        }  # fmt: skip
        return facts | ({"score": self.score} if self.kind == "anomaly" else {})

    def values(self) -> npt.NDArray[np.float32]:
        """Return the numbers, (height, width). Raises ValueError for data of another size or encoding."""
        item_type = {"32FC1": "<f4", "mono16": "<u2"}.get(self.encoding)
        if item_type is None:
            raise ValueError(f"expected a map of 32FC1 or mono16, given '{self.encoding}'")
        numbers: npt.NDArray[np.float32] = np.frombuffer(self.data, item_type).astype(np.float32, copy=False)
        if self.encoding == "mono16":
            numbers = numbers * np.float32((self.maximum - self.minimum) / 65535) + np.float32(self.minimum)
        return numbers.reshape(self.height, self.width)


@record(frozen=True, slots=True)
class FrameTimes:
    """Times of a frame. `received_unix_ns` is the server's wall clock. The others are microseconds since then, of the
    monotonic clock: taken from the mailbox, put into the model's queue, computation started, result ready."""

    received_unix_ns: int = 0
    taken_us: int = 0
    queued_us: int = 0
    started_us: int = 0
    finished_us: int = 0


@record(frozen=True, slots=True)
class StreamCounts:
    """Totals of a stream id over all its connections. Frames that wait or run count only in `received`:
    received = answered + sum(dropped.values()) + waiting. `late` of the answered ones were late."""

    received: int = 0
    answered: int = 0
    dropped: Mapping[DropReason, int] = field(default_factory=dict)
    late: int = 0


class ZoneCounts(NamedTuple):
    """Objects in a zone: how many of each class now, also 0 of those that were there before, how many entered since the
    start, and how many of each class loiter; None if the zone does not watch that. An object that is hidden for a
    moment counts."""

    zone: str
    counts: Mapping[str, int]
    entered: int
    loitering: Mapping[str, int] | None = None


class LineCounts(NamedTuple):
    """Crossings of a line in each direction since the start."""

    line: str
    in_count: int
    out_count: int


class ZoneEvent(NamedTuple):
    """An object entered or left a zone, loiters in it, or crossed a line.

    `kind` is ZONE_ENTERED, ZONE_LEFT, ZONE_LOITERING or LINE_CROSSED. `seconds` is the time in the zone of an object
    that loiters or left. `direction` of a crossing is "in" or "out".
    """

    kind: str
    name: str
    label: str
    track_id: int
    seconds: float = 0.0
    direction: str = ""


ZONE_ENTERED, ZONE_LEFT, ZONE_LOITERING = "zone.entered", "zone.left", "zone.loitering"
LINE_CROSSED = "line.crossed"


class ZoneReport(NamedTuple):
    """State of a camera's zones and lines after a frame, and what happened in it."""

    zones: tuple[ZoneCounts, ...] = ()
    lines: tuple[LineCounts, ...] = ()
    events: tuple[ZoneEvent, ...] = ()


@record(slots=True)
class FrameResult:
    """The result of one frame. If `error_code` (a value of errors.ErrorCode) is set, it contains only the error.

    `dropped` counts the drops since the previous result. The Python client adds, as NEWER, the frames that it dropped
    before sending. `runtime` names the runtime, as `status` does. `governor` is the governor's state, with
    `governor_detail` as text. `variant` is the model variant that answered instead of the requested model, else "".
    `is_late`: the deadline passed while the frame ran. `zones` is that of a camera that the server opens, if it has
    zones or lines; no message has it.
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
    is_late: bool = False
    zones: ZoneReport | None = None
    dense_map: DenseMap | None = None


@record(frozen=True, slots=True)
class StreamOpened:
    """The server's first message: the stream id, the model that serves the stream, and the counts so far."""

    stream_id: str
    model: str
    version: int
    runtime: str
    labels: tuple[str, ...] = ()
    counts: StreamCounts = StreamCounts()
    server: str = ""


@record(frozen=True, slots=True)
class FrameDropped:
    """Notice of one dropped frame, for streams with `notifies_drops`."""

    header: FrameHeader
    reason: DropReason
    detail: str = ""


@record(frozen=True, slots=True)
class Credit:
    """Permission to send more frames. The number is in `frames_allowed` of the enclosing message."""


ClientMessage: TypeAlias = "StreamRequest | Frame"
ServerMessage: TypeAlias = "StreamOpened | FrameResult | FrameDropped | Credit"
