"""Pinhole model of a camera, read from sensor_msgs/CameraInfo: from pixels to directions in the optical frame.

The optical frame of REP 103 has x to the right, y down and z forward. CameraInfo counts pixels from the centre of the
upper left pixel, frames from its upper left corner; here all pixels are counted from the corner, so that an image of
another resolution needs only a factor. Distortion models are those of sensor_msgs/distortion_models.hpp.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.transports.transport import base_topic

if TYPE_CHECKING:
    import numpy.typing as npt

_MAX_SIZE = 65_535
_MAX_ASPECT_DIFFERENCE = 0.02
_NEWTON_STEPS = 12
_MAX_RESIDUAL = 1e-9
_RECTIFIED = re.compile(r"(^|_)rect(_|$)")


class CameraModel(NamedTuple):
    """Camera of an image with `width` x `height` pixels. `fx`, `fy`, `cx` and `cy` are in pixels of it.

    `distortion` is k1, k2, p1, p2, k3, k4, k5, k6 of OpenCV, or () for an image without distortion.
    """

    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float
    distortion: tuple[float, ...] = ()

    def find_directions(self, points: npt.NDArray[np.float64], width: int, height: int) -> npt.NDArray[np.float64]:
        """Return x/z and y/z in the optical frame of `points` (..., 2), pixels of an image of `width` x `height` with
        the same field of view. A point that the lens cannot have drawn gives NaN. Raises InvalidRequest when the two
        sizes differ in their shape."""
        check_same_view("the image", (width, height), "its camera_info", (self.width, self.height))
        scale = self.width / width, self.height / height
        directions = (points * scale - (self.cx, self.cy)) / (self.fx, self.fy)
        return _undistort(directions, self.distortion) if self.distortion else directions


def check_same_view(name: str, size: tuple[int, int], other_name: str, other_size: tuple[int, int]) -> None:
    """Raise InvalidRequest unless one size (width, height) is the other one, scaled."""
    if min(size) < 1 or abs(size[0] * other_size[1] / (size[1] * other_size[0]) - 1) > _MAX_ASPECT_DIFFERENCE:
        raise InvalidRequest(
            f"expected one field of view, given {size[0]}x{size[1]} of {name} "
            f"and {other_size[0]}x{other_size[1]} of {other_name}"
        )


def read_camera_info(message: Any, *, is_rectified: bool) -> CameraModel:
    """Return the camera of a sensor_msgs/CameraInfo, with its binning and region of interest.

    A rectified image has the matrix P and no distortion, another one K and `d`. The fourth column of P, the baseline of
    a stereo pair, is not used. Raises InvalidRequest for a camera without calibration or with a distortion model that
    is not handled.
    """
    width, height = int(message.width), int(message.height)
    matrix = _numbers(message, "p", 12) if is_rectified else _numbers(message, "k", 9)
    fx, cx, fy, cy = (matrix[index] for index in ((0, 2, 5, 6) if is_rectified else (0, 2, 4, 5)))
    if not (0 < width <= _MAX_SIZE and 0 < height <= _MAX_SIZE):
        raise InvalidRequest(f"expected the size of the calibrated image, given {width}x{height}")
    if not (fx > 0 and fy > 0):
        raise InvalidRequest(
            f"expected a calibrated camera, given focal lengths {fx:g} and {fy:g} in {'P' if is_rectified else 'K'}"
        )
    region = message.roi
    binning = max(1, int(message.binning_x)), max(1, int(message.binning_y))
    return CameraModel(
        width=max(1, (int(region.width) or width) // binning[0]),
        height=max(1, (int(region.height) or height) // binning[1]),
        fx=fx / binning[0],
        fy=fy / binning[1],
        cx=(cx + 0.5 - int(region.x_offset)) / binning[0],
        cy=(cy + 0.5 - int(region.y_offset)) / binning[1],
        distortion=() if is_rectified else _read_distortion(message),
    )


def is_rectified_topic(topic: str) -> bool:
    """Return whether an image topic is named as one of rectified images, such as "image_rect_color"."""
    return bool(_RECTIFIED.search(base_topic(topic).rpartition("/")[2]))


def _numbers(message: Any, name: str, count: int = 0) -> list[float]:
    numbers = [float(number) for number in getattr(message, name, ())]
    if (count and len(numbers) != count) or not all(map(math.isfinite, numbers)):
        raise InvalidRequest(f"expected finite numbers in '{name}' of a camera_info, given {numbers[:12]}")
    return numbers


def _read_distortion(message: Any) -> tuple[float, ...]:
    given, model = _numbers(message, "d"), str(message.distortion_model)
    if not any(given):
        return ()
    if model not in ("plumb_bob", "rational_polynomial") or any(given[8:]):
        raise InvalidRequest(
            "expected the distortion model plumb_bob or rational_polynomial with up to 8 coefficients, "
            f"given '{model}' with {len(given)}; use the rectified image"
        )
    return (*given[:8], *(0.0,) * (8 - len(given)))


def _undistort(distorted: npt.NDArray[np.float64], distortion: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """Return the directions that the lens moved to `distorted`, by Newton's method; NaN where there is none."""
    k1, k2, p1, p2, k3, k4, k5, k6 = distortion
    given_x, given_y = distorted[..., 0], distorted[..., 1]
    x, y = given_x, given_y
    with np.errstate(all="ignore"):
        for _ in range(_NEWTON_STEPS):
            square = x * x + y * y
            above = 1 + square * (k1 + square * (k2 + square * k3))
            below = 1 + square * (k4 + square * (k5 + square * k6))
            radial = above / below
            slope = (
                k1 + square * (2 * k2 + square * 3 * k3) - radial * (k4 + square * (2 * k5 + square * 3 * k6))
            ) / below
            wrong_x = x * radial + 2 * p1 * x * y + p2 * (square + 2 * x * x) - given_x
            wrong_y = y * radial + p1 * (square + 2 * y * y) + 2 * p2 * x * y - given_y
            x_by_x = radial + 2 * x * x * slope + 2 * p1 * y + 6 * p2 * x
            y_by_y = radial + 2 * y * y * slope + 6 * p1 * y + 2 * p2 * x
            x_by_y = 2 * x * y * slope + 2 * p1 * x + 2 * p2 * y
            determinant = x_by_x * y_by_y - x_by_y * x_by_y
            residual = np.hypot(wrong_x, wrong_y)
            if not (residual > _MAX_RESIDUAL).any():
                break
            x = x - (wrong_x * y_by_y - wrong_y * x_by_y) / determinant
            y = y - (wrong_y * x_by_x - wrong_x * x_by_y) / determinant
        # Behind the fold of the polynomial the determinant is negative: no light comes from there.
        is_found = (residual <= _MAX_RESIDUAL) & (determinant > 0) & (radial > 0)
    return np.where(is_found[..., None], np.stack((x, y), axis=-1), np.nan)
