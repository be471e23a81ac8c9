"""Positions and sizes of detected objects: median of the depths in a box, times the direction of the box's centre.

Depth images follow REP 118: 16UC1 in millimetres, 0 where there is no measurement, or 32FC1 in metres, where NaN and
infinities are none. They must be registered: drawn as the camera of the frames sees them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.depth.camera_model import CameraModel, check_same_view
from edge_server.plugins.ros.messages.message_conversion import (
    Detection3DMessage,
    Detections3DMessage,
    box_of,
    make_hypothesis,
    read_header,
    view_bytes,
)
from edge_server.protocol.frame_messages import Detection, FrameResult, RotatedBox

if TYPE_CHECKING:
    import numpy.typing as npt

INNER_PART = 0.5
"""Part of a box's width and height in which depths are read: near its edges a box shows what is behind the object."""

MIN_VALID_FRACTION = 0.25
"""Part of the pixels that must have a depth: with fewer the object itself, dark or of glass, may have none."""

_MAX_SAMPLES = 32
_SPREAD_DEVIATIONS = 4.5
"""Depths that differ by more than this times the median deviation are of other things: 3 sigma of normal noise."""

_UNITS = {"16UC1": ("u2", 0.001), "32FC1": ("f4", 1.0)}


class DepthImage(NamedTuple):
    """Depth image: `values` (height, width) are a view of the message, in units of `unit_m` metres.

    `byte_size` is that of the message's data.
    """

    stamp_ns: int
    values: npt.NDArray[Any]
    unit_m: float
    byte_size: int


class MeasuredDepth(NamedTuple):
    """Median depth of an object, and the extent of its visible surface in depth, in metres."""

    median: float
    spread: float


def read_depth_image(message: Any) -> DepthImage:
    """Return the depth image of a sensor_msgs/Image. Raises InvalidRequest for another encoding or too few bytes."""
    header, encoding = read_header(message), str(message.encoding)
    if encoding not in _UNITS:
        raise InvalidRequest(f"expected depth as 16UC1 (millimetres) or 32FC1 (metres), given '{encoding}'")
    code, unit_m = _UNITS[encoding]
    item = np.dtype((">" if message.is_bigendian else "<") + code)
    height, width, data = int(message.height), int(message.width), view_bytes(message.data)
    step = int(message.step) or width * item.itemsize
    if height < 1 or width < 1 or step < width * item.itemsize or len(data) < step * height:
        raise InvalidRequest(
            f"expected {height} rows of {step} bytes with {width} pixels of {encoding}, given {len(data)} bytes"
        )
    values: npt.NDArray[Any] = np.ndarray((height, width), item, data, strides=(step, item.itemsize))
    return DepthImage(header.sec * 1_000_000_000 + header.nanosec, values, unit_m, len(data))


def detections3d_message(
    result: FrameResult, depth: DepthImage, camera: CameraModel, *, has_numbers: bool = False
) -> Detections3DMessage:
    """Return the detections of a frame that have a depth, in the optical frame of the camera.

    Raises InvalidRequest when frame, depth image and calibration cannot have the same field of view.
    """
    frame_size = result.width, result.height
    depth_size = depth.values.shape[1], depth.values.shape[0]
    check_same_view("the image", frame_size, "its depth image", depth_size)
    boxes = [box_of(found) for found in result.detections]
    outlines = np.array([((box.x, box.y), *box.corners()) for box in boxes], np.float64).reshape(-1, 5, 2)
    directions = camera.find_directions(outlines, *frame_size)
    placed = []
    for found, box, outline in zip(result.detections, boxes, directions, strict=True):
        if not np.isfinite(outline).all():
            continue
        measured = measure_depth(depth, found, box, frame_size)
        if measured is not None:
            placed.append(_place(found, box, outline, measured, has_numbers))
    return Detections3DMessage(result.header, tuple(placed))


def measure_depth(
    depth: DepthImage, found: Detection, box: RotatedBox, frame_size: tuple[int, int]
) -> MeasuredDepth | None:
    """Return the depth of an object, or None if too few of its pixels have one.

    Pixels are those of the object's mask, or without a mask those of the inner part of its box; of many, a grid.
    """
    # A box between the corners of pixels has a mask without pixels.
    part, mask = INNER_PART, found.mask if found.mask and found.mask.width and found.mask.height else None
    if mask is not None:
        part, box = 1.0, RotatedBox(mask.x + mask.width / 2, mask.y + mask.height / 2, mask.width, mask.height, 0.0)
    rows, columns = depth.values.shape
    scale_x, scale_y = columns / frame_size[0], rows / frame_size[1]
    across = _spaced(box.width * part, scale_x)[None, :]
    down = _spaced(box.height * part, scale_y)[:, None]
    cosine, sine = math.cos(box.angle), math.sin(box.angle)
    x = (box.x + across * cosine - down * sine).reshape(-1)
    y = (box.y + across * sine + down * cosine).reshape(-1)
    is_inside = (x >= 0) & (y >= 0) & (x < frame_size[0]) & (y < frame_size[1])
    if mask is not None:
        is_inside &= mask.pixels()[(y - mask.y).astype(int), (x - mask.x).astype(int)]
    x, y = x[is_inside], y[is_inside]
    # A product can be rounded up to the image's height or width.
    row_numbers = np.minimum((y * scale_y).astype(int), rows - 1)
    column_numbers = np.minimum((x * scale_x).astype(int), columns - 1)
    depths = depth.values[row_numbers, column_numbers].astype(np.float32)
    # NaN is not greater than 0.
    valid = np.sort(depths[(depths > 0) & (depths < np.inf)])
    if not len(valid) or len(valid) < MIN_VALID_FRACTION * len(depths):
        return None
    # The lower one of two middle values, because their mean could lie between an object and the wall behind it.
    middle = (len(valid) - 1) // 2
    median = valid[middle]
    reach = _SPREAD_DEVIATIONS * np.partition(np.abs(valid - median), middle)[middle]
    first, last = np.searchsorted(valid, median - reach), np.searchsorted(valid, median + reach, "right") - 1
    spread = valid[int(first + 0.95 * (last - first))] - valid[int(first + 0.05 * (last - first))]
    return MeasuredDepth(float(median) * depth.unit_m, float(spread) * depth.unit_m)


def _spaced(length: float, scale: float) -> npt.NDArray[np.float64]:
    """Return up to 32 positions from -length/2 to length/2, one a pixel of a depth image, in pixels of the frame."""
    count = max(1, min(_MAX_SAMPLES, math.ceil(length * scale)))
    positions: npt.NDArray[np.float64] = ((np.arange(count) + 0.5) / count - 0.5) * length
    return positions


def _place(
    found: Detection,
    box: RotatedBox,
    outline: npt.NDArray[np.float64],
    measured: MeasuredDepth,
    has_numbers: bool,
) -> Detection3DMessage:
    """Return the detection at its depth. `outline` are the directions of the centre and the four corners."""
    center, upper_left, upper_right, lower_right, lower_left = outline * measured.median
    along_width = (upper_right - upper_left + lower_right - lower_left) / 2
    along_height = (lower_left - upper_left + lower_right - upper_right) / 2
    return Detection3DMessage(
        x=float(center[0]),
        y=float(center[1]),
        z=measured.median,
        size_x=float(np.hypot(*along_width)),
        size_y=float(np.hypot(*along_height)),
        size_z=measured.spread,
        theta=math.atan2(along_width[1], along_width[0]) if box.angle else 0.0,
        hypothesis=make_hypothesis(found.label, found.class_index, found.score, has_numbers),
        track_id=str(found.track_id) if found.track_id else "",
    )
