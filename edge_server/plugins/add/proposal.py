"""Proposals of what a model's pictures and outputs mean, and their test with a picture and with noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_server.backends.base import Array
from edge_server.core.model_spec import ModelSpec, Recognised
from edge_server.errors import EdgeServerError
from edge_server.plugins.tuning.trial.tensor_files import Tensors
from edge_server.plugins.vision.detector_sample_check import check_layout
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize
from edge_server.plugins.vision.perception import Perception, PerceptionDecoder, make_perception_decoder
from edge_server.plugins.vision.recognition import recognise
from edge_server.plugins.vision.resize import Color, FittedPicture
from edge_server.protocol.frame_messages import Returns

NOISE_SIZE = (480, 640)


class Proposal(NamedTuple):
    """Image and output parameters, and the labels of outputs, that a model may need. `title` says what it is then,
    `evidence` what speaks for it, and each of `doubts` what nothing proves."""

    title: str
    parameters: Mapping[str, str]
    labels: Mapping[str, tuple[str, ...]]
    is_certain: bool
    evidence: str
    doubts: tuple[str, ...] = ()


class PictureFinding(NamedTuple):
    """What a proposal makes of a model's answers to a picture and to noise.

    `problems` are reasons why the proposal may be wrong. It `is_possible` unless one is certain.
    """

    picture: Perception
    noise: Perception
    problems: tuple[str, ...]
    is_possible: bool


class PictureTrial:
    """Test of a proposal with a picture. Raises BadModelConfig for one that does not fit the model, InvalidRequest for
    a picture that cannot be read, and Unsupported without OpenCV."""

    def __init__(self, spec: ModelSpec, proposal: Proposal, picture: Path) -> None:
        recognised = Recognised(proposal.parameters, proposal.labels, proposal.evidence)
        self.spec = replace(spec, recognised=recognised)
        self.proposal = proposal
        self.samples: tuple[Tensors, ...] = ()
        self._images = make_image_plan(self.spec)
        self._decoder = make_perception_decoder(self.spec)
        self._fits: tuple[FittedPicture, ...] = ()
        if self._images is not None and self._images.color is not Color.DEPTH:
            noise = np.random.default_rng(2026).integers(0, 256, (*NOISE_SIZE, 3), np.uint8)
            fitted = (
                self._images.fit_file(picture.read_bytes(), model=spec.name),
                self._images.fit(noise, Color.BGR, model=spec.name),
            )
            self.samples = tuple({tensor.name: tensor.array} for tensor, _ in fitted)
            self._fits = tuple(fit for _, fit in fitted)

    def evaluate(self, outputs: tuple[Mapping[str, Array], Mapping[str, Array]]) -> PictureFinding:
        """Return what the proposal makes of the outputs for the picture and for noise."""
        images, decoder = self._images, self._decoder
        if images is None or decoder is None:
            return PictureFinding(Perception(), Perception(), (), is_possible=True)
        item = 0 if self.spec.max_batch_size > 0 else None
        try:
            seen = [
                decoder.decode(given, item, fit, _wanted(decoder), model=self.spec.name)
                for given, fit in zip(outputs, self._fits, strict=True)
            ]
            impossible, doubtful = _problems(self.spec, images, decoder, outputs[0], item)
        except EdgeServerError as error:
            return PictureFinding(Perception(), Perception(), (error.message,), is_possible=False)
        return PictureFinding(seen[0], seen[1], (*impossible, *doubtful), is_possible=not impossible)


def _wanted(decoder: PerceptionDecoder) -> Returns:
    what = decoder.what
    return what if decoder.detections is None else replace(what, top_k=0)


def _problems(
    spec: ModelSpec, images: ImagePlan, decoder: PerceptionDecoder, outputs: Mapping[str, Array], item: int | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is impossible, and what is doubtful, about the answer of a detector."""
    if decoder.detections is None:
        return (), ()
    arrays = decoder.detections.select(outputs, item, model=spec.name)
    size = NetworkSize(images.rule.width, images.rule.height)
    findings = check_layout(decoder.detections.declaration, size, arrays)
    return findings.impossible, findings.doubtful


def propose(spec: ModelSpec, metadata: Mapping[str, str]) -> tuple[tuple[Proposal, ...], str]:
    """Return what the model may be, and a note if its metadata are known but do not fit."""
    found = recognise(spec, metadata)
    if found is None:
        return (), ""
    if not found.parameters:
        return (), found.note
    title = found.note.rpartition(": ")[2]
    return (Proposal(title, found.parameters, found.labels, True, "its metadata say it"),), ""
