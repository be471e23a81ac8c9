"""Positions and sizes of detected objects: median of the depths in a box, times the direction of the box's centre.

Depth images follow REP 118: 16UC1 in millimetres, 0 where there is no measurement, or 32FC1 in metres, where NaN and
infinities are none. They must be registered: drawn as the camera of the frames sees them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

_GRID_SIZE = 32
_GRID = (np.arange(_GRID_SIZE) + 0.5) / _GRID_SIZE - 0.5
"""Where depths are read: 32 x 32 places, in parts of the width and height of what is measured. More pixels would change
a median by less than the noise of a depth camera."""

_BOXES_AT_ONCE = 64
"""Bounds the memory for a frame with a thousand detections."""

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


@np.errstate(all="ignore")
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
    parts = [slice(start, start + _BOXES_AT_ONCE) for start in range(0, max(len(boxes), 1), _BOXES_AT_ONCE)]
    medians, spreads = np.concatenate(
        [measure_depths(depth, result.detections[part], boxes[part], frame_size) for part in parts], axis=1
    )
    points = camera.find_directions(outlines, *frame_size) * medians[:, None, None]
    center, upper_left, upper_right, lower_right, lower_left = points.swapaxes(0, 1)
    along_width = (upper_right - upper_left + lower_right - lower_left) / 2
    along_height = (lower_left - upper_left + lower_right - upper_right) / 2
    # Lens distortion would turn upright boxes by a fraction of a degree: they stay upright.
    angles = np.array([box.angle for box in boxes])
    thetas = np.where(angles == 0, 0.0, np.arctan2(along_width[:, 1], along_width[:, 0]))
    sizes = np.hypot(*along_width.T), np.hypot(*along_height.T), spreads
    rows = np.stack((*center.T, medians, *sizes, thetas), axis=1)
    placed = [
        Detection3DMessage(
            *(x, y, z, size_x, size_y, size_z, theta),
            make_hypothesis(found.label, found.class_index, found.score, has_numbers),
            str(found.track_id) if found.track_id else "",
        )
        for found, (x, y, z, size_x, size_y, size_z, theta) in zip(result.detections, rows.tolist(), strict=True)
        if math.isfinite(x + y + z + size_x + size_y + size_z + theta)
    ]
    return Detections3DMessage(result.header, tuple(placed))


def measure_depths(
    depth: DepthImage, detections: Sequence[Detection], boxes: Sequence[RotatedBox], frame_size: tuple[int, int]
) -> npt.NDArray[np.float64]:
    """Return the median depth of each object, and the extent of its visible surface in depth: (2, objects), in metres.

    Pixels of an object are those of its mask, or without a mask those of the inner part of its box. NaN: too few of
    them have a depth.
    """
    # A box between the corners of pixels has a mask without pixels.
    masks = [one.mask if one.mask and one.mask.width and one.mask.height else None for one in detections]
    regions = np.array(
        [
            (box.x, box.y, box.width * INNER_PART, box.height * INNER_PART, box.angle)
            if mask is None
            else (mask.x + mask.width / 2, mask.y + mask.height / 2, mask.width, mask.height, 0.0)
            for box, mask in zip(boxes, masks, strict=True)
        ]
    ).reshape(-1, 5)
    center_x, center_y, width, height, angle = regions.T[:, :, None, None]
    across, down, cosine, sine = _GRID[None, :] * width, _GRID[:, None] * height, np.cos(angle), np.sin(angle)
    x = (center_x + across * cosine - down * sine).reshape(-1, _GRID_SIZE**2)
    y = (center_y + across * sine + down * cosine).reshape(-1, _GRID_SIZE**2)
    is_own = (x >= 0) & (y >= 0) & (x < frame_size[0]) & (y < frame_size[1])
    x, y = np.where(is_own, x, 0), np.where(is_own, y, 0)
    for index, mask in enumerate(masks):
        if mask is not None:
            columns = np.clip(x[index].astype(int) - mask.x, 0, mask.width - 1)
            is_own[index] &= mask.pixels()[np.clip(y[index].astype(int) - mask.y, 0, mask.height - 1), columns]
    depth_height, depth_width = depth.values.shape
    # A product can be rounded up to the image's height or width.
    rows = np.minimum((y * (depth_height / frame_size[1])).astype(int), depth_height - 1)
    columns = np.minimum((x * (depth_width / frame_size[0])).astype(int), depth_width - 1)
    depths = depth.values[rows, columns].astype(np.float32)
    # NaN is not greater than 0.
    is_valid = is_own & (depths > 0) & (depths < np.inf)
    counts = is_valid.sum(axis=1)
    ordered = np.sort(np.where(is_valid, depths, np.inf), axis=1)
    # The lower one of two middle values, because their mean could lie between an object and the wall behind it.
    middles = np.maximum(counts - 1, 0) // 2
    medians = _pick(ordered, middles)
    reach = _SPREAD_DEVIATIONS * _pick(np.sort(np.abs(ordered - medians[:, None]), axis=1), middles)
    first = (ordered < (medians - reach)[:, None]).sum(axis=1)
    last = np.maximum((ordered <= (medians + reach)[:, None]).sum(axis=1) - 1, first)
    spreads = _pick(ordered, first + 0.95 * (last - first)) - _pick(ordered, first + 0.05 * (last - first))
    is_known = counts >= np.maximum(1, MIN_VALID_FRACTION * is_own.sum(axis=1))
    return np.stack((medians, spreads)) * np.where(is_known, depth.unit_m, np.nan)


def _pick(rows: npt.NDArray[np.float32], indices: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return one value of each row, by its index rounded down."""
    picked: npt.NDArray[np.float64] = np.take_along_axis(rows, indices.astype(int)[:, None], axis=1)[:, 0].astype(float)
    return picked
