"""Class names of a new model: a text file with a line for each class, named behind the model or beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import InvalidRequest
from edge_server.plugins.add.new_model import NewModelFiles
from edge_server.plugins.add.text_trial import read_text_lines
from edge_server.plugins.vision.layout_search import candidates

_MAX_FILES = 8
"""Maximum number of files beside a model that are read."""


class ClassNames(NamedTuple):
    """Names of classes, empty for those of the model file, and notes about the files that were read."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_class_names(
    spec: ModelSpec, metadata: Mapping[str, str], files: NewModelFiles, given: Sequence[Path]
) -> ClassNames:
    """Return the lines of the first file that has as many as the model may have classes.

    `given` are files that the user names, which win over the metadata; without them those beside the model are read,
    if the metadata have no names. Raises InvalidRequest if none of the `given` files fits.
    """
    matches = candidates(spec, metadata)
    counts = sorted({match.class_count for match in matches if match.class_count})
    if not given and (not counts or any(match.labels for match in matches)):
        return ClassNames()
    expected = " or ".join(map(str, counts))
    wrong = []
    for path in given or files.label_files[:_MAX_FILES]:
        try:
            names = read_text_lines(path)
        except InvalidRequest as error:
            if given:
                raise
            wrong.append(error.message)
            continue
        if len(names) in counts:
            return ClassNames(names, (f"the class names are the {len(names)} lines of '{path.name}'",))
        wrong.append(f"'{path.name}' has {len(names)} lines, expected {expected}, one for each class")
    if given and not counts:
        raise InvalidRequest(f"'{given[0]}': expected a recogniser of text or a classifier, given '{files.path}'")
    if given:
        raise InvalidRequest("; ".join(wrong))
    return ClassNames((), tuple(f"{reason}: not used" for reason in wrong))
