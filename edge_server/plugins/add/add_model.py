"""Main procedure of `edge-server add`: copies the files aside, inspects and tries them, writes config.pbtxt, and moves
the folder into the repository."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from edge_server.backends.isolation.npz_tensor_files import Tensors
from edge_server.core.model_spec import ModelSpec, Recognised
from edge_server.errors import InvalidRequest, LoadError, Unsupported
from edge_server.plugin import own_recognisers
from edge_server.plugins.add.class_names import find_class_names
from edge_server.plugins.add.new_model import (
    NewModelFiles,
    NewModels,
    check_is_free,
    check_name,
    copy_files,
    move_into_place,
    staging_folder,
)
from edge_server.plugins.add.picture_trial import PictureTrial, Reading
from edge_server.plugins.add.reference_comparison import ReferenceScores, ScoreComparison
from edge_server.plugins.add.runtime_trial import RuntimeTrial, try_opening, try_precisions, try_runtimes
from edge_server.plugins.add.text_models import (
    describe_missing_characters,
    find_recognisers,
    is_text_detector,
    read_as_recogniser,
    with_text_model,
)
from edge_server.plugins.add.text_trial import ReadLine, TextTrial, draw_page, drawn_lines, whole_picture
from edge_server.plugins.add.written_config import unbatched_lines, write_config
from edge_server.plugins.trials.precision_report import PrecisionReport
from edge_server.plugins.trials.stored_times import store_times
from edge_server.plugins.vision.demo_picture_path import PICTURE
from edge_server.plugins.vision.layout_search import joins_rows_of_batch
from edge_server.plugins.vision.text_reading import is_recogniser
from edge_server.protocol.frame_messages import Detection
from edge_server.repository.choice.runtime_times import MIN_RATIO, RuntimeTimes
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve

_MIN_TIME_MS = 1.0
"""Time below which other work of a request takes longer than the model, so that runtimes are not compared."""
_TABULAR_BATCH_SIZE = 1024
_MAX_TABULAR_MS = 1.0
"""Maximum time of one row of a tabular model, so that a full batch takes about a second at most."""


class TriedModel(NamedTuple):
    """A new model, the layouts that it may have with what each sees, and the times of each runtime.

    `notes` say why something was not recognised or not tried. `lines` are what a recogniser of text reads in the
    picture. `recognisers` are names of those that may read the lines of a text detector; `is_pair`: the only one
    is added with it. `is_unbatched`: it lists the rows of all pictures of a batch together, so that batches are off.
    `comparison`: with the scores of the user's training program, None if there are none. `recognised` is what a server
    reads from the file of a model without readings.
    """

    files: NewModelFiles
    spec: ModelSpec
    readings: Sequence[Reading]
    trials: Sequence[RuntimeTrial]
    notes: Sequence[str]
    lines: Sequence[ReadLine] = ()
    recognisers: Sequence[str] = ()
    is_pair: bool = False
    is_unbatched: bool = False
    comparison: ScoreComparison | None = None
    recognised: Recognised | None = None

    @property
    def faster_backend(self) -> str:
        """The backend that answers as the default one does and was faster, by the rule of `runtime_times`, or ""."""
        usable = [item for item in self.trials if item.times_ms and not item.disagreement]
        shortest_ms = {item.backend: min(item.times_ms) for item in usable}
        default_ms = shortest_ms.get(self.spec.backend, 0.0)
        fastest = min(shortest_ms, key=lambda backend: shortest_ms[backend], default="")
        is_faster = default_ms > _MIN_TIME_MS and default_ms >= MIN_RATIO * shortest_ms[fastest]
        return fastest if is_faster else ""

    @property
    def open_inputs(self) -> list[str]:
        """Names of inputs of free dimensions for which the trial chose a size, so that its times tell nothing."""
        has_samples = any(item.outputs for item in self.trials)
        return [] if has_samples else [item.name for item in self.spec.inputs if -1 in item.dims]

    @property
    def is_tabular(self) -> bool:
        """Whether the model takes rows of a fixed length, and returns values for each row."""
        has_rows = all(len(item.dims) <= 1 and -1 not in item.dims for item in self.spec.inputs)
        has_values = all(len(item.dims) <= 1 for item in self.spec.outputs)
        return has_rows and has_values and self.spec.max_batch_size > 0

    @property
    def tabular_batch_size(self) -> int:
        """The max_batch_size to write for a fast tabular model.

        0 for other models, and if the model file or the backend allows more.
        """
        is_limited = self.spec.has_default_batch_size and self.spec.max_batch_size < _TABULAR_BATCH_SIZE
        # No time is known where generated values are none that the model accepts, such as its categories.
        fastest_ms = min((item.median_ms for item in self.trials if item.times_ms), default=0.0)
        is_fast = bool(self.trials) and fastest_ms <= _MAX_TABULAR_MS
        return _TABULAR_BATCH_SIZE if self.is_tabular and is_limited and is_fast else 0


class AddedModel(NamedTuple):
    """A model in its place, its trial, and the layout that was chosen, None for none.

    `precisions`: how it does in other precisions, None if that was not tried.
    """

    tried: TriedModel
    chosen: Reading | None
    folder: Path
    precisions: PrecisionReport | None = None


class Addition:
    """Addition of new models to one repository.

    Layouts are tried on the first of `pictures`, precisions on all; without any on a portrait, or on drawn lines for
    models of text. `reference`: what the model should answer to the first picture. `settings` are the server's for each
    backend.
    `choose` returns the layout to configure, None for none. The times of the runtimes are stored in `times`,
    where a server finds them.
    """

    def __init__(
        self,
        repository: Path,
        pictures: Sequence[Path],
        settings: Mapping[str, Mapping[str, str]],
        choose: Callable[[TriedModel], Reading | None],
        times: RuntimeTimes,
        reference: ReferenceScores | None = None,
    ) -> None:
        self._reference = reference
        self._repository = repository
        self._pictures = pictures
        self._settings = settings
        self._choose = choose
        self._times = times

    def add(self, models: NewModels, name: str) -> list[AddedModel]:
        """Add the models, of which several must be a text detector and its recogniser. *Blocking* for seconds.

        `name` is that of the model, and of the detector; empty for those of the files. Raises AlreadyExists for a name
        in use, LoadError if no runtime opens a model, and InvalidRequest for a picture, models or a repository that
        cannot be used. Then nothing is left behind.
        """
        with staging_folder(self._repository) as staging, tempfile.TemporaryDirectory(prefix="edge-add-") as scratch:
            if len(models.files) > 1:
                if self._reference is not None:
                    raise InvalidRequest("--compare: expected one model, given several")
                return self._add_text_models(models, name, staging, Path(scratch))
            (files,) = models.files
            folder = copy_files(files, staging / (name or files.name))
            with _naming_sources(files, folder):
                tried = self._try_model(files, folder, Path(scratch), models.text_files)
                if any(reading.match.task == "text" for reading in tried.readings):
                    tried = tried._replace(recognisers=find_recognisers(self._repository))
                chosen = self._choose(tried)
                self._configure(folder, tried, chosen)
                precisions = self._try_precisions(folder, tried, chosen, Path(scratch))
            return [AddedModel(tried, chosen, move_into_place(folder, self._repository), precisions)]

    def _add_text_models(self, models: NewModels, name: str, staging: Path, scratch: Path) -> list[AddedModel]:
        detector, recogniser, notes = _sort_text_models(models, staging)
        names = name or detector.name, f"{name}_recogniser" if name else recogniser.name
        folders = [staging / item for item in names]
        for files, folder in zip((detector, recogniser), folders, strict=True):
            check_name(folder.name)
            check_is_free(self._repository, folder.name)
            if folder.exists():
                raise InvalidRequest(f"both models would be named '{folder.name}': choose a name with --name")
            (staging / f"{models.files.index(files)}").rename(folder)
        with _naming_sources(detector, folders[0]):
            tried = self._try_model(detector, folders[0], scratch, ())
            tried = tried._replace(notes=[*tried.notes, *notes], recognisers=[names[1]], is_pair=True)
            chosen = self._choose(tried)
            if chosen is None or chosen.match.task != "text":
                raise InvalidRequest(
                    f"'{detector.path}' finds no text in the picture, and nothing was added: try another with --picture"
                )
            chosen = with_text_model(chosen, names[1])
            self._configure(folders[0], tried, chosen)
        with _naming_sources(recogniser, folders[1]):
            seen = chosen.finding.picture
            lines = None if seen is None else seen.detections
            read = self._try_model(recogniser, folders[1], scratch, models.text_files, lines)
            reader = self._choose(read)
            self._configure(folders[1], read, reader)
        # The detector last: a server that watches then has its recogniser.
        places = [move_into_place(folder, self._repository) for folder in reversed(folders)]
        return [AddedModel(tried, chosen, places[1]), AddedModel(read, reader, places[0])]

    def _try_model(
        self,
        files: NewModelFiles,
        folder: Path,
        scratch: Path,
        text_files: Sequence[Path],
        lines: Sequence[Detection] | None = None,
    ) -> TriedModel:
        """Try a model. `lines` are those of the picture for a recogniser of text; None: all, or drawn ones."""
        spec, metadata = _resolve(folder)
        if spec.is_decoupled:  # a language model: no request tells how fast it is
            try:
                opened = try_opening(folder.parent, folder.name, self._settings, scratch)
            except InvalidRequest as error:  # a Python model
                return TriedModel(files, spec, (), (), (f"not tried: {error.message}",))
            return TriedModel(files, spec, (), (opened,), ())
        if is_unbatched := joins_rows_of_batch(spec, metadata):
            (folder / "config.pbtxt").write_text("\n".join(unbatched_lines(spec)), "utf-8")
            spec, metadata = _resolve(folder)
        reader = read_as_recogniser(spec, metadata, text_files)
        if reader is not None:
            return self._try_recogniser(files, folder, spec, reader, scratch, lines)
        names = find_class_names(spec, metadata, files, text_files)
        picture = self._read_picture(is_text=is_text_detector(spec, metadata))
        trial = PictureTrial(spec, metadata, picture, names.names)
        notes = [*trial.notes, *names.notes]
        if missing := describe_missing_characters(spec):
            notes.append(missing)
        comparison = None
        if self._reference is not None:
            comparison = ScoreComparison(spec, trial.readings, picture, self._reference)
        samples = [*trial.samples, *(comparison.samples if comparison is not None else ())]
        trials: Sequence[RuntimeTrial] = ()
        try:
            trials = self._try_runtimes(files, folder, spec, samples, scratch)
        except InvalidRequest as error:  # a Python model
            notes.append(f"not tried: {error.message}")
        outputs = next((item.outputs for item in trials if item.outputs), ())
        count = len(trial.samples)
        if comparison is not None and outputs:
            comparison.evaluate(outputs[count:])
        readings = trial.evaluate(outputs[:count])
        recognised = None
        if not readings:
            # The notes of the picture's trial have what is recognised of a vision model.
            results = (recognise(spec, metadata) for recognise in own_recognisers())
            recognised = next((item for item in results if item is not None and item.note not in trial.notes), None)
        return TriedModel(
            files, spec, readings, trials, notes, is_unbatched=is_unbatched, comparison=comparison,
            recognised=recognised,
        )  # fmt: skip

    def _try_recogniser(
        self,
        files: NewModelFiles,
        folder: Path,
        spec: ModelSpec,
        reader: Reading,
        scratch: Path,
        lines: Sequence[Detection] | None,
    ) -> TriedModel:
        with_characters = replace(spec, recognised=Recognised({}, reader.match.labels, ""))
        picture = self._read_picture(is_text=True)
        try:
            if lines is None:
                lines = drawn_lines() if not self._pictures else whole_picture(picture)
            trial = TextTrial(with_characters, picture, lines)
        except Unsupported as error:
            return TriedModel(files, spec, (reader,), (), (error.message,))
        trials = self._try_runtimes(files, folder, spec, trial.samples, scratch)
        outputs = next((item.outputs for item in trials if item.outputs), ())
        return TriedModel(files, spec, (reader,), trials, (), trial.read(outputs))

    def _read_picture(self, *, is_text: bool) -> bytes:
        if not self._pictures and is_text:
            with contextlib.suppress(Unsupported):  # The trial of a picture says that there is no OpenCV.
                return draw_page()
        return (self._pictures[0] if self._pictures else PICTURE).read_bytes()

    def _try_runtimes(
        self, files: NewModelFiles, folder: Path, spec: ModelSpec, samples: Sequence[Tensors], scratch: Path
    ) -> list[RuntimeTrial]:
        own_scratch = scratch / folder.name
        own_scratch.mkdir()
        found = try_runtimes(folder.parent, folder.name, spec.backend, samples, self._settings, own_scratch)
        return [item._replace(reason=_name_sources(item.reason, files, folder)) for item in found]

    def _configure(self, folder: Path, tried: TriedModel, chosen: Reading | None) -> None:
        """Write the configuration, and store the times of the runtimes. Raises LoadError if it does not load."""
        write_config(
            folder, tried.spec, tried.files.backend, chosen, tried.readings, _remarks(tried), tried.recognisers,
            recognised=tried.recognised, is_unbatched=tried.is_unbatched, batch_size=tried.tabular_batch_size,
        )  # fmt: skip
        _resolve(folder)
        if tried.trials and not tried.open_inputs:
            # Before a watching server loads it. A move keeps the file, so that it is not read again.
            times = {item.backend: min(item.times_ms, default=None) for item in tried.trials}
            disagreement = next((item.disagreement for item in tried.trials if item.disagreement), "")
            store_times(self._times, folder / "1" / tried.files.copies[0][1], times, disagreement)

    def _try_precisions(
        self, folder: Path, tried: TriedModel, chosen: Reading | None, scratch: Path
    ) -> PrecisionReport | None:
        """Try a configured model that takes pictures in other precisions, and store the result for its status."""
        is_text = chosen is not None and chosen.match.task in ("text", "read")
        if chosen is None or is_text or not any(item.outputs for item in tried.trials):
            return None
        pictures = self._pictures or (PICTURE,)
        found = try_precisions(folder.parent, folder.name, tried.trials, pictures, self._settings, scratch)
        if found is not None:
            self._times.put_precisions(folder / "1" / tried.files.copies[0][1], found.note)
        return found


def _sort_text_models(models: NewModels, staging: Path) -> tuple[NewModelFiles, NewModelFiles, Sequence[str]]:
    """Copy the models into folders with their numbers as names. Return the text detector, the recogniser, and notes
    about others. Raises InvalidRequest if there is not one of each."""
    detectors, recognisers, others = [], [], []
    for number, files in enumerate(models.files):
        folder = copy_files(files, staging / f"{number}")
        with _naming_sources(files, folder):
            spec, metadata = _resolve(folder)
            if is_text_detector(spec, metadata):
                detectors.append(files)
            elif read_as_recogniser(spec, metadata, models.text_files if is_recogniser(spec) else ()):
                recognisers.append(files)
            else:
                others.append(files)
    if len(detectors) == len(recognisers) == 1:
        notes = [f"'{files.path.name}' is left out, it neither finds nor reads lines of text" for files in others]
        return detectors[0], recognisers[0], notes
    if not detectors and not recognisers:
        commands = ", then ".join(f"`edge-server add {shlex.quote(str(files.path))}`" for files in others)
        raise InvalidRequest(
            f"add them one by one: {commands}. Only a text detector and its recogniser, with its list of characters, "
            "are added together"
        )
    shown = [f"'{files.path}', a text detector" for files in detectors]
    shown += [f"'{files.path}', a recogniser of text" for files in recognisers]
    shown += [f"'{files.path}', which is neither or has no list of characters" for files in others]
    raise InvalidRequest(
        f"expected one model, or a text detector and its recogniser, given {'; '.join(shown)}. Add other models one by "
        "one. A list of characters is a file that ends in .txt"
    )


@contextlib.contextmanager
def _naming_sources(files: NewModelFiles, folder: Path) -> Iterator[None]:
    """Name the given files in the message of a LoadError, in place of their copies."""
    try:
        yield
    except LoadError as error:
        message = _name_sources(error.message, files, folder)
        is_named = str(files.path) in message
        raise type(error)(message if is_named else f"'{files.path}': {message}") from error


def _name_sources(message: str, files: NewModelFiles, folder: Path) -> str:
    """Return the message with the files that were given in place of their copies in the staging folder."""
    for source, target in files.copies:
        message = message.replace(f"model '{folder.name}' version 1, file '{target}'", f"'{source}'")
        message = message.replace(str(folder / "1" / target), str(source))
    return message.replace(str(folder), str(files.path))


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
        f"Written by `edge-server add {tried.files.shown_name}` on {time.strftime('%Y-%m-%d')}. Change it as you like: "
        "a server that watches the repository loads it again."
    ]
    measured = sorted((item for item in tried.trials if item.times_ms), key=lambda item: item.median_ms)
    lines += [f"  {item.title}, {item.precision}: {item.median_ms:.3g} ms for one run here" for item in measured]
    if tried.faster_backend:
        lines.append(f'backend: "{tried.faster_backend}" would choose it; {tried.spec.backend} is the default.')
    return lines
