"""Agreement of a model's answers to pictures in another precision with those in its usual one, and how much of it each
task needs.

The tolerances of a precision are here alone. Runtimes at equal precision are held to a strict one instead, see
`SelectionRule` and `edge_answers`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.core.batch import Array
from edge_server.core.output_difference import compare_outputs
from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]


MAX_PICTURES = 200
"""Maximum number of pictures of a folder, the first by name."""
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

MIN_SAME = 0.99
"""Least fraction of pictures with the same best class, and of boxes that are found again."""
MAX_SCORE_DIFFERENCE = 0.1
"""Greatest difference of a class's probability or of a box's score. A weaker box above the threshold may be lost."""
MIN_MEAN_IOU = 0.9
"""Least mean overlap (intersection over union) of boxes that are found again."""
MAX_RELATIVE = 0.01
"""Greatest difference of other outputs, such as masks and maps, relative to their greatest value."""
_SAME_BOX_IOU = 0.5

SCORES, BOXES, THRESHOLD = "edge:scores", "edge:boxes", "edge:threshold"
"""Names in an answer: the probability of each class; a row of x_min, y_min, x_max, y_max, score and class for each box;
the score from which on a box counts. An answer of neither has the model's outputs."""


class PictureAgreement(NamedTuple):
    """`text` says for people how far the answers agree; `problem` says why that is not enough, or is ""."""

    text: str
    problem: str


def find_pictures(path: Path) -> list[Path]:
    """Return a picture, or those of a folder, by name. Raises InvalidRequest if there is none."""
    if path.is_file():
        return [path]
    try:
        found = sorted(item for item in path.iterdir() if item.suffix.lower() in _SUFFIXES and item.is_file())
    except OSError as error:
        raise InvalidRequest(f"--picture={path}: there is no such file or folder: {error.strerror}") from None
    if not found:
        raise InvalidRequest(f"--picture={path}: the folder holds no picture ({', '.join(_SUFFIXES)})")
    return found[:MAX_PICTURES]


def compare_answers(expected: Sequence[Mapping[str, Array]], found: Sequence[Mapping[str, Array]]) -> PictureAgreement:
    """Compare the answers to the same pictures; `expected` are those in the usual precision."""
    if all(SCORES in answer for answer in expected):
        return _compare_classes([_floats(one, SCORES) for one in expected], [_floats(one, SCORES) for one in found])
    if all(BOXES in answer for answer in expected):
        return _compare_boxes(expected, found)
    relative = compare_outputs(expected, found).relative
    text = f"outputs for {_count(len(expected), 'picture')} differ by up to {relative:.2g} of their greatest value"
    return PictureAgreement(text, "" if relative <= MAX_RELATIVE else f"more than {MAX_RELATIVE:g}")


def _compare_classes(expected: Sequence[Floats], found: Sequence[Floats]) -> PictureAgreement:
    pairs = [(one, two) for one, two in zip(expected, found, strict=True) if one.shape == two.shape and one.size]
    same = sum(int(one.argmax()) == int(two.argmax()) for one, two in pairs)
    difference = max((float(np.abs(one - two).max()) for one, two in pairs), default=0.0)
    text = (
        f"the same best class in {same} of {_count(len(expected), 'picture')}, scores differ by up to {difference:.2g}"
    )
    if same < MIN_SAME * len(expected):
        return PictureAgreement(text, "too few best classes agree")
    return PictureAgreement(text, "" if difference <= MAX_SCORE_DIFFERENCE else "scores differ too much")


def _compare_boxes(expected: Sequence[Mapping[str, Array]], found: Sequence[Mapping[str, Array]]) -> PictureAgreement:
    overlaps: list[float] = []
    difference, count = 0.0, 0
    for one, two in zip(expected, found, strict=True):
        least = float(one[THRESHOLD][0]) + MAX_SCORE_DIFFERENCE
        left = list(_floats(two, BOXES))
        for box in _floats(one, BOXES):
            best = max(left, key=functools.partial(_iou, box), default=None)
            if best is not None and _iou(box, best) >= _SAME_BOX_IOU:
                left = [other for other in left if other is not best]
                overlaps.append(_iou(box, best))
                difference, count = max(difference, abs(float(box[4] - best[4]))), count + 1
            else:
                count += bool(box[4] >= least)
        count += sum(bool(other[4] >= least) for other in left)
    pictures = _count(len(expected), "picture")
    if not count:
        return PictureAgreement(f"no box in {pictures}", "the pictures show nothing to compare")
    mean = statistics.mean(overlaps) if overlaps else 0.0
    text = (
        f"{len(overlaps)} of {_count(count, 'box', 'es')} in {pictures} found again, with a mean IoU of {mean:.3f}, "
        f"scores differ by up to {difference:.2g}"
    )
    if len(overlaps) < MIN_SAME * count:
        return PictureAgreement(text, "too few boxes are found again")
    if mean < MIN_MEAN_IOU:
        return PictureAgreement(text, "boxes are at other places")
    return PictureAgreement(text, "" if difference <= MAX_SCORE_DIFFERENCE else "scores differ too much")


def _floats(answer: Mapping[str, Array], name: str) -> Floats:
    return answer[name].astype(np.float32)


def _iou(one: Floats, two: Floats) -> float:
    """Return the overlap of two boxes, 0 for those of two classes."""
    if one[5] != two[5]:
        return 0.0
    sides = np.minimum(one[2:4], two[2:4]) - np.maximum(one[:2], two[:2])
    shared = float(sides.clip(0).prod())
    whole = float((one[2:4] - one[:2]).prod() + (two[2:4] - two[:2]).prod()) - shared
    return shared / whole if whole > 0 else 0.0


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
