"""Addition of a model to a repository: copies it, looks into it, tries it, writes its configuration, moves it into
place."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import InvalidRequest, LoadError
from edge_server.plugins.add.new_model import NewModelFiles, copy_files, move_into_place, staging_folder
from edge_server.plugins.add.picture_trial import PictureTrial, Reading
from edge_server.plugins.add.runtime_trial import RuntimeTrial, try_runtimes
from edge_server.plugins.add.written_config import write_config
from edge_server.plugins.tuning.trial.stored_times import store_times
from edge_server.repository.resolve_version import ResolveOptions, resolve
from edge_server.repository.runtime_times import MIN_RATIO
from edge_server.repository.scan import Scanner

_MIN_TIME_MS = 1.0
"""Time below which other work of a request takes longer than the model, so that runtimes are not compared."""


class TriedModel(NamedTuple):
    """A new model, the layouts that it may have with what each sees, and the times of each runtime.

    `notes` say why something was not recognised or not tried.
    """

    files: NewModelFiles
    spec: ModelSpec
    readings: Sequence[Reading]
    trials: Sequence[RuntimeTrial]
    notes: Sequence[str]

    @property
    def faster_backend(self) -> str:
        """The backend that was faster than the default one, by the rule of `runtime_times`, or ""."""
        shortest_ms = {item.backend: min(item.times_ms) for item in self.trials if item.times_ms}
        default_ms = shortest_ms.get(self.spec.backend, 0.0)
        fastest = min(shortest_ms, key=lambda backend: shortest_ms[backend], default="")
        is_faster = default_ms > _MIN_TIME_MS and default_ms >= MIN_RATIO * shortest_ms[fastest]
        return fastest if is_faster else ""


def add_model(
    files: NewModelFiles,
    name: str,
    repository: Path,
    picture: Path,
    settings: Mapping[str, Mapping[str, str]],
    choose: Callable[[TriedModel], Reading | None],
    state_dir: str = "",
) -> tuple[TriedModel, Reading | None, Path]:
    """Add a model to a repository. Return the trial, the chosen layout, and the model's folder. *Blocking* for seconds.

    `settings` are the server's for each backend. `choose` returns the layout to configure, None for none. The times of
    the runtimes are stored in `state_dir`, "" for nowhere, where a server finds them. Raises AlreadyExists for a name
    in use, LoadError if no runtime opens the model, and InvalidRequest for a picture or a repository that cannot be
    used. Then nothing is left behind.
    """
    with staging_folder(repository) as staging, tempfile.TemporaryDirectory(prefix="edge-add-") as scratch:
        folder = copy_files(files, staging / name)
        try:
            tried = _try_model(files, folder, picture, settings, Path(scratch))
            chosen = choose(tried)
            write_config(folder, tried.spec, files.backend, chosen, tried.readings, _remarks(tried))
            _resolve(folder)  # what was written must load
        except LoadError as error:
            message = _name_sources(error.message, files, folder)
            is_named = str(files.path) in message
            raise type(error)(message if is_named else f"'{files.path}': {message}") from error
        if tried.trials and not any(-1 in item.dims for item in tried.spec.inputs):
            # Before a watching server loads it. A move keeps the file, so that it is not read again.
            times = {item.backend: min(item.times_ms, default=None) for item in tried.trials}
            store_times(state_dir, folder / "1" / files.copies[0][1], times)
        return tried, chosen, move_into_place(folder, repository)


def _name_sources(message: str, files: NewModelFiles, folder: Path) -> str:
    """Return the message with the files that were given in place of their copies in the staging folder."""
    for source, target in files.copies:
        message = message.replace(f"model '{folder.name}' version 1, file '{target}'", f"'{source}'")
        message = message.replace(str(folder / "1" / target), str(source))
    return message.replace(str(folder), str(files.path))


def _try_model(
    files: NewModelFiles, folder: Path, picture: Path, settings: Mapping[str, Mapping[str, str]], scratch: Path
) -> TriedModel:
    spec, metadata = _resolve(folder)
    if spec.is_decoupled:  # a language model: no request tells how fast it is
        return TriedModel(files, spec, (), (), ())
    trial = PictureTrial(spec, metadata, picture)
    notes = trial.notes
    trials: Sequence[RuntimeTrial] = ()
    try:
        trials = [
            item._replace(reason=_name_sources(item.reason, files, folder))
            for item in try_runtimes(folder.parent, folder.name, spec.backend, trial.samples, settings, scratch)
        ]
    except InvalidRequest as error:  # a Python model
        notes.append(f"not tried: {error.message}")
    outputs = next((item.outputs for item in trials if item.outputs), ())
    return TriedModel(files, spec, trial.evaluate(outputs), trials, notes)


def _resolve(folder: Path) -> tuple[ModelSpec, Mapping[str, str]]:
    """Return the specification of the model in a folder, and the metadata of its file. Raises LoadError."""
    found: dict[str, str] = {}

    def keep_metadata(spec: ModelSpec, metadata: Mapping[str, str]) -> None:
        found.update(metadata)

    model = Scanner([folder.parent]).find(folder.name)
    if model is None:
        raise LoadError(f"'{folder}' was removed while it was read")
    return resolve(model, 1, ResolveOptions(recognisers=(keep_metadata,))).spec, found


def _remarks(tried: TriedModel) -> list[str]:
    lines = [
        f"Written by `edge-server add {tried.files.path.name}` on {time.strftime('%Y-%m-%d')}. Change it as you like: "
        "a server that watches the repository loads it again."
    ]
    measured = sorted((item for item in tried.trials if item.times_ms), key=lambda item: item.median_ms)
    lines += [f"  {item.runtime}, {item.precision}: {item.median_ms:.3g} ms for one run here" for item in measured]
    if tried.faster_backend:
        lines.append(f'backend: "{tried.faster_backend}" would choose it; {tried.spec.backend} is the default.')
    return lines
