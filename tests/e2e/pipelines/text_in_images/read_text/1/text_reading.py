"""From an image to its lines of text: the processing before, between and after the two networks.

This module does not run the networks: `detect` and `recognise` are functions that call them. Arrays are numpy's,
images are [height, width, 3] of uint8 in OpenCV's channel order, blue first.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

DETECTOR_STEP = 32
"""Both sides of what the detector sees are multiples of this."""
LONGEST_SIDE = 960
LINE_HEIGHT = 48
WIDTH_STEP = 64
"""Lines are padded to a multiple of this, so that lines of about the same length share a batch."""
INK = 0.3
SURE = 0.6
GROWTH = 1.6
"""The detector marks the cores of lines; a box is grown by area / circumference times this to hold whole letters."""
SMALLEST_SIDE = 3.0

_MEAN = np.array([0.485, 0.456, 0.406], np.float32) * 255
_STDDEV = np.array([0.229, 0.224, 0.225], np.float32) * 255


@dataclass(frozen=True)
class Line:
    """One line of text: its corners [4, 2] in pixels of the picture, clockwise from the upper left."""

    corners: np.ndarray
    score: float


@dataclass(frozen=True)
class Group:
    """Lines of one padded width: `rows` [lines, 3, 48, width] for the recogniser, `members` their places among all."""

    members: list[int]
    rows: np.ndarray


def decode(encoded: bytes) -> np.ndarray:
    """Return the picture in a JPEG, PNG or the like. Raises ValueError for anything else."""
    data = np.frombuffer(encoded, np.uint8)
    picture = cv2.imdecode(data, cv2.IMREAD_COLOR) if data.size else None
    if picture is None:
        raise ValueError(f"IMAGE holds {data.size} bytes that are not a picture")
    return picture


def to_detector(picture: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the detector's input [1, 3, H, W] and the factor by which the picture was shrunk into it."""
    scale = min(1.0, LONGEST_SIDE / max(picture.shape[:2]))
    if scale < 1.0:
        picture = cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    height, width = picture.shape[:2]
    down, right = -height % DETECTOR_STEP, -width % DETECTOR_STEP
    padded = cv2.copyMakeBorder(picture, 0, down, 0, right, cv2.BORDER_REPLICATE)
    values = (padded.astype(np.float32) - _MEAN) / _STDDEV
    return np.ascontiguousarray(values.transpose(2, 0, 1)[None]), scale


def find_lines(ink: np.ndarray, scale: float) -> list[Line]:
    """Return the lines in the detector's map [H, W] of probabilities, from top to bottom."""
    contours, _ = cv2.findContours((ink > INK).astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    lines = []
    for contour in contours:
        centre, (width, height), angle = cv2.minAreaRect(contour)
        if min(width, height) < SMALLEST_SIDE:
            continue
        score = _mean_inside(ink, contour)
        if score < SURE:
            continue
        grown = width * height * GROWTH / (width + height)
        box = (centre, (width + grown, height + grown), angle)
        lines.append(Line(_clockwise(cv2.boxPoints(box)) / scale, score))
    return sorted(lines, key=lambda line: (line.corners[:, 1].min(), line.corners[:, 0].min()))


def _mean_inside(ink: np.ndarray, contour: np.ndarray) -> float:
    left, top, width, height = cv2.boundingRect(contour)
    mask = np.zeros((height, width), np.uint8)
    cv2.fillPoly(mask, [contour - np.array([left, top])], 1)
    return float(cv2.mean(ink[top : top + height, left : left + width], mask)[0])


def _clockwise(points: np.ndarray) -> np.ndarray:
    """Return four corners from the upper left on, in the direction in which a clock's hand goes."""
    by_x = points[np.argsort(points[:, 0], kind="stable")]
    left, right = (pair[np.argsort(pair[:, 1])] for pair in (by_x[:2], by_x[2:]))
    return np.array([left[0], right[0], right[1], left[1]], np.float32)


def to_recogniser(picture: np.ndarray, lines: list[Line], most: int) -> list[Group]:
    """Cut the lines out, straighten them, and group those of about the same width, at most `most` in a group."""
    cut = [_cut(picture, line.corners) for line in lines]
    order = sorted(range(len(cut)), key=lambda index: cut[index].shape[1])
    groups: dict[int, list[list[int]]] = {}
    for index in order:
        width = cut[index].shape[1]
        batches = groups.setdefault(width + -width % WIDTH_STEP, [[]])
        if len(batches[-1]) == most:
            batches.append([])
        batches[-1].append(index)
    return [
        Group(members, _rows([cut[index] for index in members], width))
        for width, batches in groups.items()
        for members in batches
    ]


def _cut(picture: np.ndarray, corners: np.ndarray) -> np.ndarray:
    height = max(np.linalg.norm(corners[3] - corners[0]), np.linalg.norm(corners[2] - corners[1]))
    width = max(np.linalg.norm(corners[1] - corners[0]), np.linalg.norm(corners[2] - corners[3]))
    size = (max(1, round(float(width / height) * LINE_HEIGHT)), LINE_HEIGHT)
    target = np.array([[0, 0], [size[0], 0], size, [0, LINE_HEIGHT]], np.float32)
    matrix = cv2.getPerspectiveTransform(corners, target)
    return cv2.warpPerspective(picture, matrix, size, flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)


def _rows(pictures: list[np.ndarray], width: int) -> np.ndarray:
    rows = np.zeros((len(pictures), 3, LINE_HEIGHT, width), np.float32)
    for row, picture in zip(rows, pictures, strict=True):
        row[:, :, : picture.shape[1]] = picture.transpose(2, 0, 1).astype(np.float32) / 127.5 - 1
    return rows


def spell(scores: np.ndarray, alphabet: list[str]) -> list[str]:
    """Return the text of each row of the recogniser's scores [rows, steps, 1 + letters], blank first (CTC)."""
    found = []
    for row in scores.argmax(2):
        is_new = np.concatenate(([True], row[1:] != row[:-1]))
        found.append("".join(alphabet[index - 1] for index in row[is_new & (row > 0)]).strip())
    return found


def read_alphabet(character: str) -> list[str]:
    """Return the letters that the recogniser's metadata lists one a line; a space, which it leaves out, comes last."""
    return [*character.split("\n"), " "]
