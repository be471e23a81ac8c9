"""Parts of new models that read text: which file is the text detector and which the recogniser, and where the list of
characters is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edge_server.backends import onnx_file_info
from edge_server.core.model_spec import ModelSpec
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.plugins.add.picture_trial import Reading, TrialFinding
from edge_server.plugins.add.text_trial import read_text_lines
from edge_server.plugins.vision.exporters.exported_metadata import UnfitMetadataError
from edge_server.plugins.vision.layout_recognition import recognise, recognise_text_reader
from edge_server.plugins.vision.layout_search import LayoutMatch, candidates
from edge_server.plugins.vision.outputs.output_parameters import HeadKind
from edge_server.plugins.vision.text_reading import is_recogniser, make_recogniser
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.model_config.pbtxt import read_file
from edge_server.repository.resolve_version import ResolveOptions, resolve

READER = "text-reader"
"""`LayoutMatch.layout` of a recogniser of text."""
_MAX_SEARCHED = 1000
"""Maximum number of models of a repository among which a recogniser is searched."""
_MIN_SCORES = 97
"""Scores of the smallest usual recogniser, of English: a blank, and 96 characters with the space."""


def is_text_detector(spec: ModelSpec, metadata: Mapping[str, str]) -> bool:
    """Return whether a model may be a detector of text."""
    return any(match.task == "text" for match in candidates(spec, metadata))


def read_as_recogniser(spec: ModelSpec, metadata: Mapping[str, str], text_files: Sequence[Path]) -> Reading | None:
    """Return the reading of a recogniser of text, with its characters as labels, or None if it is none.

    The characters come from the first of `text_files` that has as many as the model, else from the metadata.
    Raises InvalidRequest if all of these files have other numbers of characters.
    """
    if not is_recogniser(spec):
        return None
    (output,) = spec.outputs
    characters, source = _find_characters(output.dims[-1], text_files)
    if not characters:
        try:
            recognised = recognise_text_reader(spec, metadata)
        except UnfitMetadataError as error:
            raise InvalidRequest(error.args[0]) from None
        if recognised is None:
            return None
        characters, source = recognised.labels[output.name], "its metadata"
    title = f"recogniser of text, {len(characters)} characters"
    evidence = f"the characters are in {source}, and output '{output.name}' has a score for each and for a blank"
    match = LayoutMatch(READER, "read", title, {}, {output.name: characters}, True, evidence)
    return Reading(match, True, TrialFinding())


def describe_missing_characters(spec: ModelSpec) -> str:
    """Return which list of characters the model lacks; "" if its shapes are not those of a recogniser of text.

    Detectors of many classes have such shapes, too.
    """
    count = spec.outputs[0].dims[-1] if is_recogniser(spec) else 0
    if count < _MIN_SCORES or spec.outputs[0].dims[-2] != -1:
        return ""
    return (
        f"if it reads text: it has no list of its characters. Name one, a file that ends in .txt with {count - 2} or "
        f"{count - 1} lines, behind the model"
    )


def _find_characters(count: int, files: Sequence[Path]) -> tuple[tuple[str, ...], str]:
    """Return the list of a file that has a character for each of `count` scores but the blank, and its name."""
    given = []
    for path in files:
        found = read_text_lines(path)
        # PaddleOCR adds a space to most lists.
        for characters in (found, (*found, " ")):
            if count == len(characters) + 1:
                return characters, f"'{path.name}'"
        given.append(f"{len(found)} in '{path.name}'")
    if files:
        raise InvalidRequest(
            f"expected a list of {count - 2} or {count - 1} characters for {count} scores, given {', '.join(given)}"
        )
    return (), ""


def with_text_model(detector: Reading, recogniser: str) -> Reading:
    """Return the reading of a text detector whose lines `recogniser` reads."""
    match = detector.match
    return detector._replace(match=match._replace(parameters={**match.parameters, "detection_text_model": recogniser}))


def find_recognisers(repository: Path) -> list[str]:
    """Return the names of the recognisers of text in a repository, among its first ONNX models."""
    found = []
    for name, model in sorted(Scanner([repository]).scan().models.items())[:_MAX_SEARCHED]:
        version = max((item.number for item in model.versions), default=0)
        if not _has_shapes_of_recogniser(model.path / str(version) / "model.onnx"):
            continue
        try:
            make_recogniser(resolve(model, version, ResolveOptions(recognisers=(recognise,))).spec)
        except EdgeServerError:
            continue
        found.append(name)
    return found


def find_unread_detectors(repository: Path) -> list[str]:
    """Return the names of the text detectors in a repository whose configurations name no recogniser."""
    found = []
    for name, model in sorted(Scanner([repository]).scan().models.items())[:_MAX_SEARCHED]:
        try:
            parameters = read_file(model.path / "config.pbtxt", name).parameters
        except EdgeServerError:
            continue
        head = parameters.get("detection_head")
        is_detector = head is not None and head.string_value == HeadKind.DBNET.value
        if is_detector and "detection_text_model" not in parameters:
            found.append(name)
    return found


def _has_shapes_of_recogniser(path: Path) -> bool:
    """Return whether an ONNX file may be a recogniser, without loading the model, which may take long."""
    try:
        inputs, outputs = onnx_file_info.declared(path)
    except (OSError, ValueError):
        return False
    ranks = [None if item.dims is None else len(item.dims) for item in (*inputs, *outputs)]
    return len(inputs) == len(outputs) == 1 and ranks[0] in (None, 4) and ranks[1] in (None, 3)
