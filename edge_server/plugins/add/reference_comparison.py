"""Comparison of a new model's outputs for a picture with those of the user's training program, and search for the
preprocessing that gives the same numbers.

The file of `--compare` is JSON: `scores` are the numbers of an output, nested as its dimensions or flat, or an object
with those of each output by name. `labels` may name the classes in their order.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_server.backends.isolation.npz_tensor_files import Tensors
from edge_server.core.model_spec import ModelSpec
from edge_server.core.output_difference import compare_arrays
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.plugins.add.picture_trial import (
    COLORS,
    MAX_SAMPLE_BYTES,
    SCALE_KEYS,
    SCALES,
    Reading,
    TrialFinding,
    image_parameters,
    with_match,
)
from edge_server.plugins.vision.image_plan import make_image_plan
from edge_server.plugins.vision.resize import Color

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

TOLERANCE = 0.05
"""Greatest difference, relative to the greatest value of the reference, that another decoder of pictures or another way
to resize makes."""
_MAX_FILE_BYTES = 64 << 20
_SHOWN = 5
_MAX_SUM_ERROR = 0.02
_FITS: Sequence[Mapping[str, str]] = (
    {"image_fit": "stretch"},
    {"image_fit": "letterbox"},
    {"image_fit": "crop"},
    {"image_fit": "crop", "image_resize": "{R}"},
)
_FIT_KEYS = ("image_fit", "image_resize", "image_crop_offset", "image_pad_value")
_PARTS = {
    "the order of the channels": ("image_color",),
    "the scale of the values": SCALE_KEYS,
    "the fit of the picture": _FIT_KEYS,
}
"""What a preprocessing may do otherwise, and its parameters."""


class ReferenceScores(NamedTuple):
    """`outputs` by name; "" is the name of a single one that the file does not name. `file_name` is for messages."""

    file_name: str
    outputs: Mapping[str, Floats]
    labels: tuple[str, ...]


def read_reference(path: Path) -> ReferenceScores:
    """Read the file of `--compare`. Raises InvalidRequest."""
    expected = (
        'expected {"scores": [0.1, ...]}, or {"scores": {"OUTPUT": [0.1, ...]}}, and perhaps "labels": ["cup", ...]'
    )
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise InvalidRequest(f"--compare={path}: more than {_MAX_FILE_BYTES >> 20} MiB")
        document: Any = json.loads(content)
        given = document["scores"]
        named = given if isinstance(given, dict) else {"": given}
        outputs = {str(name): np.asarray(values, np.float64).ravel() for name, values in named.items()}
        labels = tuple(map(str, document.get("labels", ())))
    except OSError as error:
        raise InvalidRequest(f"--compare={path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"--compare={path}: {expected}: {error!r}") from None
    if not outputs or not all(values.size and np.isfinite(values).all() for values in outputs.values()):
        raise InvalidRequest(f"--compare={path}: {expected}, all of them finite numbers")
    return ReferenceScores(path.name, outputs, labels)


class Attempt(NamedTuple):
    """Outputs of one preprocessing, without dimensions of 1, and their difference to the reference.

    `parameters` are those of the picture.

    `remark` says what had to be done to the numbers, or is "".
    """

    parameters: Mapping[str, str]
    outputs: Mapping[str, Floats]
    difference: float
    remark: str

    @property
    def fits(self) -> bool:
        return self.difference <= TOLERANCE


class ScoreComparison:
    """Preprocessings to try for a picture. `samples` are the inputs on which to run the model; `evaluate` takes its
    outputs."""

    def __init__(
        self, spec: ModelSpec, readings: Sequence[Reading], picture: bytes, reference: ReferenceScores
    ) -> None:
        """Raises InvalidRequest for a model that takes no pictures."""
        self.reference = reference
        self.attempts: Sequence[Attempt] = ()
        self._inputs: dict[tuple[tuple[str, str], ...], Tensors] = {}
        size_bytes = 0
        for reading, image in _preprocessings(spec, readings):
            key = tuple(sorted(image.items()))
            if key in self._inputs or size_bytes > MAX_SAMPLE_BYTES:
                continue
            changed = {name: text for name, text in reading.match.parameters.items() if "image_" not in name} | image
            try:
                plan = make_image_plan(with_match(spec, reading.match._replace(parameters=changed)))
            except BadModelConfig:
                continue  # a combination that this input cannot have
            if plan is not None and plan.color is not Color.DEPTH:
                tensor, _ = plan.fit_file(picture, model=spec.name)
                self._inputs[key] = {name: item.array for name, item in plan.inputs(tensor).items()}
                size_bytes += tensor.array.nbytes
        if not self._inputs:
            raise InvalidRequest(f"--compare: it is not known how '{spec.name}' takes a picture")

    @property
    def samples(self) -> list[Tensors]:
        return list(self._inputs.values())

    def evaluate(self, outputs: Sequence[Tensors]) -> None:
        """Set `attempts`, the nearest to the reference first.

        Raises InvalidRequest if no output has as many numbers.
        """
        found = [
            _compare(self.reference, dict(key), tensors) for key, tensors in zip(self._inputs, outputs, strict=True)
        ]
        self.attempts = sorted(found, key=lambda attempt: attempt.difference)

    def attempt_of(self, reading: Reading) -> Attempt | None:
        wanted = dict(image_parameters(reading.match))
        return next((attempt for attempt in self.attempts if attempt.parameters == wanted), None)

    def choose(self, readings: Sequence[Reading], usual: Reading) -> Reading:
        """Return the layout of `usual` with the preprocessing that gives the reference's numbers."""
        best = self.attempts[0].parameters
        others = {name: text for name, text in usual.match.parameters.items() if "image_" not in name}
        stated = ", ".join(f"{key} {text}" for key, text in best.items())
        evidence = f"with {stated} its outputs are those of {self.reference.file_name}"
        parameters = {**others, **best}
        tried = next((reading for reading in readings if dict(reading.match.parameters) == parameters), None)
        match = usual.match._replace(parameters=parameters, is_certain=True, evidence=evidence, doubts=())
        return Reading(match, True, TrialFinding() if tried is None else tried.finding)

    def rows(self, ours: Attempt, labels: Sequence[str]) -> list[tuple[str, str, str]]:
        """Return the reference's greatest numbers beside ours; of outputs of many rows those that differ most.

        Only the numbers of a classifier's output, one for each label, get the labels.
        """
        found = []
        for name, expected in self.reference.outputs.items():
            is_classes = ours.outputs[name].ndim < 2
            given = ours.outputs[name].ravel()
            order = np.argsort(-expected if is_classes else -np.abs(expected - given), kind="stable")[:_SHOWN].tolist()
            best = int(given.argmax())
            for index in (*order, *([best] if is_classes and best not in order else [])):
                label = labels[index] if is_classes and given.size == len(labels) else ""
                title = " ".join(filter(None, (name, str(index), label)))
                found.append((title, f"{expected[index]:.4g}", f"{given[index]:.4g}"))
        return found

    def find_problem(self, ours: Attempt, labels: Sequence[str]) -> str:
        """Return the problem of our numbers or labels in words, with its likeliest cause; empty if they agree."""
        wanted = self.reference.labels
        if not ours.fits:
            return f"They differ by {ours.difference:.2g} of the greatest value: {self._describe_mistake(ours)}."
        if not wanted or not labels or tuple(labels) == wanted:
            return ""
        is_shifted = tuple(labels[1:]) == wanted[: len(labels) - 1] or tuple(labels[:-1]) == wanted[1 : len(labels)]
        how = "are shifted by one" if is_shifted else "are others"
        return f"The numbers agree, but the labels {how}: {_first_difference(labels, wanted)}."

    def _describe_mistake(self, ours: Attempt) -> str:
        best = self.attempts[0]
        if best.fits:
            changes = [
                f"{part} ({', '.join(_states(best.parameters, keys))} instead of "
                f"{', '.join(_states(ours.parameters, keys))})"
                for part, keys in _PARTS.items()
                if _states(best.parameters, keys) != _states(ours.parameters, keys)
            ]
            remark = f", {best.remark}" if best.remark else ""
            return f"the reference's numbers come with {' and '.join(changes) or 'the same pixels'}{remark}"
        for shift, attempt in itertools.product((1, -1), self.attempts):
            rolled = [np.roll(given, shift) for given in attempt.outputs.values()]
            if max(map(_difference, self.reference.outputs.values(), rolled)) <= TOLERANCE:
                return f"the reference's classes are shifted by {shift:+d}, perhaps by a class of the background"
        return (
            f"none of {len(self.attempts)} usual preprocessings gives the reference's numbers, the nearest differs by "
            f"{best.difference:.2g}, so the picture or the weights may be others"
        )


def _preprocessings(spec: ModelSpec, readings: Sequence[Reading]) -> Iterator[tuple[Reading, dict[str, str]]]:
    """Yield parameters of the picture, those of the readings first, then combinations with the fewest changes first."""
    for reading in readings:
        yield reading, dict(image_parameters(reading.match))
    for usual in (reading for reading in readings if reading.is_usual):
        own = dict(image_parameters(usual.match))
        plan = make_image_plan(with_match(spec, usual.match))
        if plan is None or own.get("image_color") not in COLORS:
            continue
        side = round(min(plan.rule.width, plan.rule.height) * 8 / 7)
        choices: list[list[tuple[Mapping[str, str], tuple[str, ...]]]] = [
            [({}, ()), *(({"image_color": color}, ("image_color",)) for color in COLORS)],
            [({}, ()), *((scale, SCALE_KEYS) for scale in SCALES.values())],
            [({}, ()), *((fit, _FIT_KEYS) for fit in _FITS)],
        ]
        combined = sorted(itertools.product(*choices), key=lambda parts: sum(bool(keys) for _, keys in parts))
        for parts in combined:
            image = dict(own)
            for part, keys in parts:
                image = {name: text for name, text in image.items() if name not in keys}
                image |= {name: text.format(R=side) for name, text in part.items()}
            yield usual, image


def _compare(reference: ReferenceScores, parameters: Mapping[str, str], tensors: Tensors) -> Attempt:
    outputs: dict[str, Floats] = {}
    worst, remark = 0.0, ""
    for name, expected in reference.outputs.items():
        named = tensors if not name else [name] if name in tensors else []
        source = next((other for other in named if tensors[other].size == expected.size), None)
        if source is None:
            sizes = ", ".join(f"'{other}' {array.size}" for other, array in tensors.items())
            raise InvalidRequest(
                f"--compare: {expected.size} numbers{f' of output {name!r}' if name else ''} are in "
                f"{reference.file_name}, the model's outputs have {sizes} for a picture"
            )
        given = tensors[source].astype(np.float64).squeeze()
        difference = _difference(expected, given)
        if _is_distribution(expected) and not _is_distribution(given):
            difference, remark = _nearer(difference, remark, expected, _softmax(given), "and a softmax after the model")
        elif _is_distribution(given) and not _is_distribution(expected):
            difference, remark = _nearer(
                difference, remark, _softmax(expected), given, "and are taken before the model's softmax"
            )
        outputs[name], worst = given, max(worst, difference)
    return Attempt(parameters, outputs, worst, remark)


def _difference(expected: Floats, given: Floats) -> float:
    """Return the greatest difference, relative to the greatest value expected.

    In each column of an output of many rows, because boxes in pixels are greater than scores, which count as they are.
    """
    if given.ndim < 2:
        return compare_arrays(expected, given.ravel()).relative
    columns = tuple(axis for axis in range(given.ndim) if axis != int(np.argmin(given.shape)))
    wanted = expected.reshape(given.shape)
    scale = np.maximum(np.abs(wanted).max(axis=columns, keepdims=True), 1.0)
    found = float((np.abs(wanted - given) / scale).max())
    return found if math.isfinite(found) else math.inf


def _nearer(difference: float, remark: str, expected: Floats, given: Floats, other: str) -> tuple[float, str]:
    changed = _difference(expected, given)
    return (changed, other) if changed < difference else (difference, remark)


def _is_distribution(values: Floats) -> bool:
    if values.ndim != 1 or values.size < 2 or (values < 0).any():
        return False
    return math.isclose(values.sum(), 1, abs_tol=_MAX_SUM_ERROR)


def _softmax(values: Floats) -> Floats:
    powers = np.exp(values - values.max())
    found: Floats = powers / powers.sum()
    return found


def _states(parameters: Mapping[str, str], keys: Sequence[str]) -> list[str]:
    """Return the stated parameters among these keys in words, such as "image_scale 1/255", or "none stated"."""
    return [f"{key} {parameters[key]}" for key in keys if key in parameters] or ["none stated"]


def _first_difference(labels: Sequence[str], wanted: Sequence[str]) -> str:
    index = next((i for i, (one, two) in enumerate(zip(labels, wanted, strict=False)) if one != two), None)
    if index is None:
        return f"{len(labels)} are here, {len(wanted)} in the reference"
    return f"class {index} is '{labels[index]}' here and '{wanted[index]}' in the reference"
