"""Test of the layouts that a new model may have: what each of them sees in a picture and in noise.

A model whose layout is not certain is also tried with other scales and orders of the colours, which no file states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from edge_server.backends.isolation.npz_tensor_files import Tensors
from edge_server.core.model_spec import ModelSpec, Recognised
from edge_server.errors import EdgeServerError, Unsupported
from edge_server.plugins.vision.detector_sample_check import make_noise
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.plugins.vision.layout_check import check_layout
from edge_server.plugins.vision.layout_recognition import recognise
from edge_server.plugins.vision.layout_search import LayoutMatch, candidates
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize
from edge_server.plugins.vision.outputs.output_parameters import Activation
from edge_server.plugins.vision.outputs.output_tensors import FloatArray
from edge_server.plugins.vision.perception_decoder import Perception, PerceptionDecoder, make_perception_decoder
from edge_server.plugins.vision.resize import Color, FittedPicture

MAX_SEEN = 5
"""Maximum number of detections and classes in a text."""
SCALES: Mapping[str, Mapping[str, str]] = {
    "pixels / 255": {"image_scale": "1/255"},
    "pixels 0 to 255": {"image_scale": "1"},
    "ImageNet's mean": {"image_scale": "1/255", "image_mean": "0.485,0.456,0.406", "image_stddev": "0.229,0.224,0.225"},
    "-1 to 1": {"image_scale": "1", "image_mean": "127.5", "image_stddev": "127.5"},
}
"""Usual scales of the values, by their name in the report."""
SCALE_KEYS = ("image_scale", "image_mean", "image_stddev")
COLORS = ("rgb", "bgr")
MAX_SAMPLE_BYTES = 128 << 20
"""Size of the inputs from which on no more scales and colours are tried."""
MIN_SCORE = 0.4
"""Least score of something in the picture that speaks for a layout."""
MIN_RATIO = 2.0
"""Least ratio of that score to the best one of other layouts."""
MAX_RATIO = 1.25
"""Greatest ratio of the score with another scale to that with the usual one. Networks see much at a wrong scale."""

_MAX_SUM_ERROR = 0.02
"""Greatest difference of the sum of probabilities from 1, of 16-bit numbers."""


class TrialFinding(NamedTuple):
    """What a model sees in a picture and in noise if it has a layout. None: not tried.

    `problems` are reasons why the layout may be wrong. It `is_possible` unless one of them is certain.
    """

    picture: Perception | None = None
    noise: Perception | None = None
    problems: tuple[str, ...] = ()
    is_possible: bool = True


class Reading(NamedTuple):
    """A layout with one scale and colour order. `is_usual`: with those that models of the layout usually have."""

    match: LayoutMatch
    is_usual: bool
    finding: TrialFinding

    @property
    def title(self) -> str:
        parameters = self.match.parameters
        if self.match.is_certain or "image_color" not in parameters:
            return self.match.title
        scale = {"image_scale": "1"} | {key: parameters[key] for key in SCALE_KEYS if key in parameters}
        numbers = ", ".join(f"{key.removeprefix('image_')} {text}" for key, text in scale.items())
        name = next((name for name, known in SCALES.items() if known == scale), numbers)
        crop = ", cut to its middle" if parameters.get("image_fit") == "crop" else ""
        return f"{self.match.title}; {parameters['image_color']}, {name}{crop}"

    @property
    def is_shown(self) -> bool:
        """Whether it may be the right one, and not only a variant that saw nothing."""
        if self.match.is_certain:
            return True
        is_classifier = self.class_score > 0 and self.match.parameters.get("image_color") == COLORS[0]
        return self.finding.is_possible and (self.is_usual or self.score > 0 or is_classifier)

    @property
    def lacks_class_names(self) -> bool:
        return self.match.class_count > 0 and not self.match.labels

    def describe(self) -> str:
        """Return the detections in the picture and the problems, as text."""
        if self.finding.picture is None:
            return "; ".join(self.finding.problems) or "not tried"
        return "; ".join((f"it sees {describe_seen(self.finding.picture)}", *self.finding.problems))

    @property
    def best_class(self) -> str:
        """The best class of the picture as "'cup'" or "class 504", "" if there is none."""
        if self.class_score == 0 or self.finding.picture is None:
            return ""
        best = max(self.finding.picture.classes, key=lambda item: item.score)
        return f"'{best.label}'" if best.label else f"class {best.index}"

    @property
    def class_score(self) -> float:
        """The score of the best class of the picture, 0 if there is none or it is no probability."""
        seen = self.finding.picture
        best = max((item.score for item in seen.classes), default=0.0) if seen is not None else 0.0
        return best if 0 <= best <= 1 else 0.0

    @property
    def score(self) -> float:
        """The best score in the picture, 0 if that is no evidence: if the layout may be wrong, or sees as much in
        noise."""
        seen, noise = self.finding.picture, self.finding.noise
        if seen is None or noise is None or self.finding.problems or len(noise.detections) >= len(seen.detections):
            return 0.0
        return max((item.score for item in seen.detections), default=0.0)


class PictureTrial:
    """Trial of all layouts that fit a model. `notes` say what else the server recognises, why metadata of a known
    exporter do not fit, and that there is no OpenCV to read the picture.

    `samples` are the inputs on which to run the model; `evaluate` takes its outputs.
    """

    def __init__(
        self, spec: ModelSpec, metadata: Mapping[str, str], picture: bytes, class_names: tuple[str, ...] = ()
    ) -> None:
        """`class_names` as for `candidates`. Raises InvalidRequest for a picture that cannot be read."""
        self._spec = spec
        matches = candidates(spec, metadata, class_names)
        # Of readings with equal parameters the first: it is the usual one of its layout.
        different: dict[frozenset[tuple[str, str]], Reading] = {}
        for reading in (reading for match in matches for reading in _variants(match)):
            different.setdefault(frozenset(reading.match.parameters.items()), reading)
        self._readings = list(different.values())
        recognised = recognise(spec, metadata)
        is_explained = recognised is not None and (not self._readings or not recognised.parameters)
        self.notes = [recognised.note] if recognised is not None and is_explained else []
        self._inputs: dict[tuple[tuple[str, str], ...], _FittedSamples] = {}
        try:
            self._fit_picture(picture)
        except Unsupported as error:
            self.notes.append(error.message)

    def _fit_picture(self, picture: bytes) -> None:
        size_bytes = 0
        for reading in self._readings:
            key = image_parameters(reading.match)
            if key in self._inputs or (size_bytes > MAX_SAMPLE_BYTES and not reading.is_usual):
                continue
            images = make_image_plan(with_match(self._spec, reading.match))
            if images is not None and images.color is not Color.DEPTH:
                fitted = self._inputs[key] = _FittedSamples.make(self._spec.name, images, picture)
                size_bytes += sum(array.nbytes for sample in fitted.samples for array in sample.values())

    @property
    def readings(self) -> Sequence[Reading]:
        """The layouts before the trial."""
        return self._readings

    @property
    def samples(self) -> list[Tensors]:
        return [sample for fitted in self._inputs.values() for sample in fitted.samples]

    def evaluate(self, outputs: Sequence[Tensors]) -> list[Reading]:
        """Return the layouts with what they make of the outputs for `samples`, the likeliest first.

        Without outputs they are not tried."""
        pairs = dict(zip(self._inputs, zip(outputs[::2], outputs[1::2], strict=True), strict=False))
        found = []
        for reading in self._readings:
            key = image_parameters(reading.match)
            if key in pairs:
                reading = reading._replace(finding=self._try_match(reading.match, self._inputs[key], pairs[key]))
            found.append(reading)
        # Not by the score of a class: with too large values a classifier is sure of any.
        return sorted(found, key=lambda one: (one.score, not one.finding.problems, one.is_usual), reverse=True)

    def _try_match(self, match: LayoutMatch, fitted: _FittedSamples, outputs: tuple[Tensors, Tensors]) -> TrialFinding:
        spec = with_match(self._spec, match)
        decoder = make_perception_decoder(spec)
        if decoder is None:
            return TrialFinding()
        item = 0 if spec.max_batch_size > 0 else None
        returns = decoder.what
        if decoder.detections is not None:  # its classes are those of the boxes
            returns = replace(returns, top_k=0)
        try:
            picture, noise = (
                decoder.decode(given, item, fit, returns, model=spec.name)
                for given, fit in zip(outputs, fitted.fits, strict=True)
            )
            impossible, doubtful = _problems(spec, fitted.images, decoder, outputs[0], item)
            if decoder.classes is not None and not match.is_certain:
                scores = decoder.classes.tensor.select_floats(outputs[0], item, model=spec.name)
                impossible = _class_problems(scores, decoder.classes.activation)
        except EdgeServerError as error:
            return TrialFinding(problems=(error.message,), is_possible=False)
        return TrialFinding(picture, noise, (*impossible, *doubtful), is_possible=not impossible)


class _FittedSamples(NamedTuple):
    """A picture and noise as inputs of a model."""

    images: ImagePlan
    samples: tuple[Tensors, Tensors]
    fits: tuple[FittedPicture, FittedPicture]

    @classmethod
    def make(cls, model: str, images: ImagePlan, picture: bytes) -> _FittedSamples:
        seen, picture_fit = images.fit_file(picture, model=model)
        unseen, noise_fit = images.fit(make_noise(), Color.BGR, model=model)
        samples = tuple({name: item.array for name, item in images.inputs(image).items()} for image in (seen, unseen))
        return cls(images, (samples[0], samples[1]), (picture_fit, noise_fit))


def describe_seen(seen: Perception) -> str:
    """Return the best of what was seen, with scores and places, or "nothing"."""
    found = [
        f"{item.label or item.class_index} {item.score:.2f} at {item.x_min:.0f},{item.y_min:.0f} to "
        f"{item.x_max:.0f},{item.y_max:.0f}"
        for item in seen.detections
    ]
    found += [f"{item.label or item.index} {item.score:.2f}" for item in seen.classes]
    if seen.mask is not None:
        found.append(f"a mask of {seen.mask.width}x{seen.mask.height}")
    if (dense := seen.dense_map) is not None:
        found.append(f"a map of {dense.kind.replace('_', ' ')}, {dense.minimum:.3g} to {dense.maximum:.3g}")
    rest = f" and {len(found) - MAX_SEEN} more" if len(found) > MAX_SEEN else ""
    return "; ".join(found[:MAX_SEEN]) + rest if found else "nothing"


def decide(readings: Sequence[Reading]) -> Reading | None:
    """Return the layout that is certain, or the usual reading of the one that alone sees something in the picture; None
    if there is none."""
    certain = [reading for reading in readings if reading.match.is_certain]
    if certain:
        return certain[0] if len(certain) == 1 and certain[0].finding.is_possible else None
    best = max(readings, key=lambda reading: reading.score, default=None)
    if best is None or best.score < MIN_SCORE:
        return None
    if any(reading.score * MIN_RATIO > best.score for reading in readings if reading.match.layout != best.match.layout):
        return None
    usual = next(reading for reading in readings if reading.is_usual and reading.match.layout == best.match.layout)
    return usual if best.score <= usual.score * MAX_RATIO else None


def describe_choice(chosen: Reading, readings: Sequence[Reading]) -> str:
    """Return why `decide` took a layout that is not certain, as text."""
    seeing = [reading for reading in readings if reading.score > 0]
    same = sum(reading.match.layout == chosen.match.layout for reading in seeing)
    is_alone = same == len(seeing)
    reason = "alone sees something" if is_alone else "sees far more than the others"
    text = f"the file does not say it, but {chosen.match.layout} {reason} in the picture"
    if same > 1:
        text += f", in {same} combinations of scale and colour order: the usual one is taken"
    return text


def _variants(match: LayoutMatch) -> Iterator[Reading]:
    yield Reading(match, True, TrialFinding())
    parameters = match.parameters
    if match.is_certain or parameters.get("image_color") not in COLORS:
        return
    others = {key: text for key, text in parameters.items() if key not in (*SCALE_KEYS, "image_color")}
    if match.task == "classify" and others.pop("image_resize", ""):
        # Who does not train as torchvision does cuts no picture either.
        others["image_fit"] = "stretch"
        others.pop("image_interpolation", "")
    for scale in SCALES.values():
        for color in COLORS:
            changed = {**scale, "image_color": color, **others}
            if changed != parameters:
                yield Reading(match._replace(parameters=changed), False, TrialFinding())


def image_parameters(match: LayoutMatch) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(item for item in match.parameters.items() if "image_" in item[0]))


def with_match(spec: ModelSpec, match: LayoutMatch) -> ModelSpec:
    return replace(spec, recognised=Recognised(match.parameters, match.labels, ""))


def _problems(
    spec: ModelSpec, images: ImagePlan, decoder: PerceptionDecoder, outputs: Tensors, item: int | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the faults that disprove the answer of a detector, and those that are only doubts."""
    if decoder.detections is None:
        return (), ()
    arrays = decoder.detections.select(outputs, item, model=spec.name)
    size = NetworkSize(images.rule.width, images.rule.height)
    findings = check_layout(decoder.detections.declaration, size, arrays)
    return findings.impossible, findings.doubtful


def _class_problems(scores: FloatArray, activation: Activation) -> tuple[str, ...]:
    """Return why scores of classes need another activation."""
    are_fractions = bool(((scores >= 0) & (scores <= 1)).all())
    if activation is Activation.SOFTMAX and are_fractions and abs(float(scores.sum()) - 1) < _MAX_SUM_ERROR:
        return ("the scores are probabilities already: they need no softmax",)
    if activation is Activation.NONE and not are_fractions:
        return (f"the scores {scores.min():.3g} to {scores.max():.3g} are no probabilities",)
    return ()
