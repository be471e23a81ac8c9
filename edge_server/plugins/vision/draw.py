"""Drawing of results (boxes, masks, keypoints, classes) into a picture, for annotated JPEGs. Lines and text scale with
the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge_server.errors import InvalidRequest, ServingFault
from edge_server.plugins.vision.decode import opencv
from edge_server.plugins.vision.outputs.detections import MAX_POSITION
from edge_server.plugins.vision.perception_decoder import Overlay, Perception
from edge_server.protocol.frame_messages import ClassScore, DenseMap, Detection, Keypoint, Mask, ObjectMask

if TYPE_CHECKING:
    import numpy.typing as npt

    Pixels: TypeAlias = npt.NDArray[np.uint8]

DEFAULT_QUALITY = 85
"""JPEG quality if the stream does not state it: no visible blocks, a tenth of the raw size or less."""

MAX_SIDE = 65500
"""Maximum side of a picture that the JPEG library writes, in pixels."""

MAX_CLASSES = 10
"""Maximum number of classes listed in the picture's corner."""

_MAX_LETTERS = 40
_MASK_OPACITY = 0.45
_MAP_OPACITY = 0.6
# Blue, green, red. Neighbours differ in hue, and each contrasts with asphalt, grass, skin and sky.
_COLORS = np.array(
    [
        (80, 220, 60), (255, 144, 30), (40, 110, 255), (230, 60, 230), (20, 215, 250), (90, 60, 230),
        (200, 200, 0), (0, 165, 255), (210, 120, 150), (120, 240, 190), (255, 190, 130), (150, 110, 255),
    ],
    np.uint8,
)  # fmt: skip
_ACTIVE_OPACITY = 0.2
_OVERLAY = (255, 235, 120)
_WHITE, _BLACK, _PANEL = (255, 255, 255), (0, 0, 0), (32, 32, 32)


def annotated_jpeg(bgr: Pixels, perception: Perception, quality: int = 0, *, max_side: int = 0) -> bytes:
    """Return the frame as JPEG with masks, boxes, keypoints and best classes drawn in.

    `bgr` (height, width, 3) is not changed. `quality` is 1..100; 0 means DEFAULT_QUALITY. A picture with a side over
    `max_side` pixels is reduced to it; 0: never. Raises InvalidRequest for a frame with a side over MAX_SIDE.
    """
    height, width = bgr.shape[:2]
    if max(height, width) > MAX_SIDE:
        raise InvalidRequest(f"annotated JPEG: expected sides of at most {MAX_SIDE} pixels, given {width}x{height}")
    cv2 = opencv()
    canvas = annotated(bgr, perception)
    if 0 < max_side < max(height, width):
        scale = max_side / max(height, width)
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        canvas = cv2.resize(canvas, size, interpolation=cv2.INTER_AREA)
    is_done, data = cv2.imencode(".jpg", canvas, (cv2.IMWRITE_JPEG_QUALITY, quality or DEFAULT_QUALITY))
    if not is_done:
        raise ServingFault(f"annotated JPEG: OpenCV does not encode a picture of {width}x{height}")
    return bytes(data)


def annotated(bgr: Pixels, perception: Perception) -> Pixels:
    """Return a copy of the frame with the results drawn in."""
    canvas = np.array(bgr, np.uint8, order="C")
    pen = _Pen(opencv(), canvas)
    if perception.mask is not None:
        pen.tint(perception.mask)
    if perception.dense_map is not None:
        pen.color_by(perception.dense_map)
    for overlay in perception.overlays:
        pen.overlay(overlay)
    pen.name_overlays(perception.overlays)
    # The best is drawn last, on top of the others.
    for detection in reversed(perception.detections):
        if detection.mask is not None:
            pen.fill(detection.mask, _color(detection.class_index))
    for detection in reversed(perception.detections):
        pen.outline(detection)
    for detection in reversed(perception.detections):
        pen.name(detection)
    pen.list_classes(perception.classes[:MAX_CLASSES])
    return canvas


@dataclass(slots=True)
class _Text:
    """A line of text and its size in pixels; `below` is the part under the baseline."""

    letters: str
    width: int
    height: int
    below: int


class _Pen:
    """Draws on one canvas. Sizes scale from 640x480, where a line is 2 pixels wide."""

    def __init__(self, cv2: ModuleType, canvas: Pixels) -> None:
        self._cv2 = cv2
        self._canvas = canvas
        self._height, self._width = canvas.shape[:2]
        scale = max(0.6, math.sqrt(self._height * self._width / (640 * 480)))
        self._line = max(1, round(2 * scale))
        self._dot = max(2, round(3 * scale))
        self._letters = 0.48 * scale
        self._stroke = max(1, round(1.1 * scale))
        self._gap = max(2, round(4 * scale))

    def tint(self, mask: Mask) -> None:
        """Blend the classes' colours into the picture, except class 0, the background of most models."""
        if mask.encoding == "mono8":
            classes = np.frombuffer(mask.data, np.uint8)
        else:
            wide = np.frombuffer(mask.data, "<u2")
            # 252 is a multiple of the palette's 12 colours, so that a class keeps its colour.
            classes = np.where(wide == 0, 0, (wide - 1) % 252 + 1).astype(np.uint8)
        classes = classes.reshape(mask.height, mask.width)
        table = _COLORS[np.arange(-1, 255) % len(_COLORS)]
        colors = self._cv2.applyColorMap(classes, table[:, None])
        mixed = self._cv2.addWeighted(self._canvas, 1 - _MASK_OPACITY, colors, _MASK_OPACITY, 0)
        self._cv2.copyTo(mixed, classes, self._canvas)

    def color_by(self, dense: DenseMap) -> None:
        """Blend the colours of a map into the picture: red is near or anomalous. Pixels without a number stay."""
        values = dense.values()
        is_number = np.isfinite(values)
        low, high = dense.minimum, dense.maximum
        if dense.kind == "anomaly":
            low, high = min(low, 0.0), max(high, 1.0)
        levels = np.where(is_number, (values - low) * (255 / (high - low or 1.0)), 0).astype(np.uint8)
        if dense.kind in ("metric_depth", "relative_depth"):
            levels = 255 - levels
        colors = self._cv2.applyColorMap(levels, self._cv2.COLORMAP_TURBO)
        mixed = self._cv2.addWeighted(self._canvas, 1 - _MAP_OPACITY, colors, _MAP_OPACITY, 0)
        self._cv2.copyTo(mixed, is_number.view(np.uint8), self._canvas)

    def fill(self, mask: ObjectMask, color: tuple[int, int, int]) -> None:
        """Blend the colour into an object's pixels, and draw its outline."""
        pixels = mask.pixels().view(np.uint8)
        area = self._canvas[mask.y : mask.y + mask.height, mask.x : mask.x + mask.width]
        mixed = self._cv2.addWeighted(area, 1 - _MASK_OPACITY, np.full_like(area, color), _MASK_OPACITY, 0)
        self._cv2.copyTo(mixed, pixels, area)
        contours, _ = self._cv2.findContours(pixels, self._cv2.RETR_CCOMP, self._cv2.CHAIN_APPROX_SIMPLE)
        self._cv2.drawContours(self._canvas, contours, -1, color, max(1, self._line // 2), offset=(mask.x, mask.y))

    def overlay(self, overlay: Overlay) -> None:
        """Draw a polygon, filled lightly while it is active, or a line with an arrow to its right."""
        points = np.array(overlay.points) * (self._width, self._height)
        lines = [self._sixteenths(points).astype(np.int32)]
        if overlay.is_closed and overlay.is_active:
            filled = self._canvas.copy()
            self._cv2.fillPoly(filled, lines, _OVERLAY, shift=4)
            self._canvas[:] = self._cv2.addWeighted(self._canvas, 1 - _ACTIVE_OPACITY, filled, _ACTIVE_OPACITY, 0)
        if not overlay.is_closed:
            lines.append(self._sixteenths(self._arrow(points)).astype(np.int32))
        # A dark edge, so that it is seen on any ground.
        for color, width in ((_BLACK, self._line + 2), (_OVERLAY, self._line)):
            self._cv2.polylines(self._canvas, lines, overlay.is_closed, color, width, self._cv2.LINE_AA, 4)

    def name_overlays(self, overlays: Sequence[Overlay]) -> None:
        """Write the texts of overlays, each at its highest point, or lower if it would cover another text."""
        names: list[tuple[int, int, int]] = []
        for overlay in overlays:
            text = self._measure(overlay.text)
            wide, high = text.width + 2 * self._gap, text.height + text.below + 2 * self._gap
            # Where the boxes of objects that stand in the zone seldom are.
            x, y = min(overlay.points, key=itemgetter(1))
            # Off the left edge, where a label looks cut off.
            left = max(0, min(max(round(x * self._width), self._gap), self._width - wide))
            top = max(0, min(round(y * self._height), self._height - high))
            for other_top, other_left, other_wide in sorted(names):
                is_beside = left >= other_left + other_wide or other_left >= left + wide
                if not is_beside and abs(top - other_top) < high and other_top + 2 * high <= self._height:
                    top = other_top + high
            names.append((top, left, wide))
            self._cv2.rectangle(self._canvas, (left, top), (left + wide - 1, top + high - 1), _PANEL, -1)
            self._write(text, left + self._gap, top + self._gap, _OVERLAY)

    def _arrow(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return an arrow from the middle of the longest part of a line to its right."""
        parts = np.diff(points, axis=0)
        longest = int(np.hypot(*parts.T).argmax())
        along = parts[longest] / max(np.hypot(*parts[longest]), 1e-9)
        right = np.array((-along[1], along[0]))
        middle = points[longest] + parts[longest] / 2
        size = 10 * self._line
        tip, wing = middle + size * right, size * 0.35
        return np.array((middle, tip, tip - wing * (right + along), tip, tip - wing * (right - along)))

    def outline(self, found: Detection) -> None:
        """Draw the box and the keypoints."""
        color = _color(found.class_index)
        if found.rotated is None:
            corner, opposite = self._corners(found)
            self._cv2.rectangle(self._canvas, corner, opposite, color, self._line)
        else:
            corners = np.clip(found.rotated.corners(), -MAX_POSITION, MAX_POSITION)
            points = self._sixteenths(corners).astype(np.int32)
            self._cv2.polylines(self._canvas, [points], True, color, self._line, self._cv2.LINE_AA, 4)
        for index, point in enumerate(found.keypoints):
            self._point(point, _color(found.class_index + 1 + index))

    def _corners(self, found: Detection) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the first and the last pixel of a box in continuous coordinates."""
        left, top = math.floor(found.x_min), math.floor(found.y_min)
        return (left, top), (max(left, math.ceil(found.x_max) - 1), max(top, math.ceil(found.y_max) - 1))

    def _point(self, point: Keypoint, color: tuple[int, int, int]) -> None:
        if not (0 <= point.x < self._width and 0 <= point.y < self._height):
            return
        # Tenths of a pixel matter here.
        x, y = self._sixteenths(np.array((point.x, point.y))).tolist()
        centre = (round(x), round(y))
        for radius, shade in ((self._dot + 1, _BLACK), (self._dot, color)):
            self._cv2.circle(self._canvas, centre, radius * 16, shade, -1, self._cv2.LINE_AA, 4)

    def _sixteenths(self, positions: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return continuous coordinates as OpenCV takes them with shift 4: 16ths of a pixel from a pixel's centre."""
        return np.rint((positions - 0.5) * 16)

    def name(self, found: Detection) -> None:
        """Write label, track and score on a plate above the box, or inside its upper edge if there is no room. The
        plate of an oriented box is at its uppermost corner."""
        track = f" #{found.track_id}" if found.track_id else ""
        text = self._measure(f"{found.text or found.class_name}{track} {found.score:.2f}")
        color = _color(found.class_index)
        (left, top), _ = self._corners(found)
        if found.rotated is not None:
            x, _ = min(found.rotated.corners(), key=itemgetter(1))
            left = math.floor(min(max(x, 0.0), self._width))
        left -= self._line // 2
        wide, high = text.width + 2 * self._gap, text.height + text.below + 2 * self._gap
        left = max(0, min(left, self._width - wide))
        above = top - self._line // 2 - high
        top = above if above >= 0 else top
        self._cv2.rectangle(self._canvas, (left, top), (left + wide - 1, top + high - 1), color, -1)
        blue, green, red = color
        # The more readable one on that colour (luma of ITU-R BT.601).
        ink = _BLACK if 0.114 * blue + 0.587 * green + 0.299 * red > 110 else _WHITE
        self._write(text, left + self._gap, top + self._gap, ink)

    def list_classes(self, classes: Sequence[ClassScore]) -> None:
        """List the best classes on a dark panel in the upper left corner, each with a bar proportional to its score."""
        if not classes:
            return
        texts = [self._measure(f"{best.score:.2f}  {best.class_name}") for best in classes]
        row = max(text.height + text.below for text in texts) + 2 * self._gap
        wide = min(self._width, max(text.width for text in texts) + 4 * self._gap)
        panel = self._canvas[: min(self._height, row * len(texts) + 2 * self._gap), :wide]
        panel[:] = self._cv2.addWeighted(panel, 0.3, np.full_like(panel, _PANEL), 0.7, 0)
        for index, (best, text) in enumerate(zip(classes, texts, strict=True)):
            top = self._gap + index * row
            bar = round((wide - 2 * self._gap) * min(max(best.score, 0.0), 1.0))
            if bar:
                last = (self._gap + bar - 1, top + row - self._gap // 2 - 2)
                self._cv2.rectangle(self._canvas, (self._gap, top), last, (150, 95, 30), -1)
            self._write(text, 2 * self._gap, top + self._gap - self._gap // 4, _WHITE)

    def _measure(self, letters: str) -> _Text:
        # OpenCV's fonts are ASCII only.
        plain = letters.encode("ascii", "replace").decode()
        if len(plain) > _MAX_LETTERS:
            plain = f"{plain[: _MAX_LETTERS - 3 - 5]}...{plain[-5:]}"
        face = self._cv2.FONT_HERSHEY_SIMPLEX
        (width, height), below = self._cv2.getTextSize(plain, face, self._letters, self._stroke)
        return _Text(plain, width, height, below)

    def _write(self, text: _Text, left: int, top: int, ink: tuple[int, int, int]) -> None:
        face = self._cv2.FONT_HERSHEY_SIMPLEX
        at = (left, top + text.height + text.below // 3)
        self._cv2.putText(self._canvas, text.letters, at, face, self._letters, ink, self._stroke, self._cv2.LINE_AA)


def _color(index: int) -> tuple[int, int, int]:
    blue, green, red = _COLORS[index % len(_COLORS)].tolist()
    return blue, green, red
