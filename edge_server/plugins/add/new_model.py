"""Folder of a new model: copies a model's files into a hidden staging folder of a repository, and moves the complete
folder into place.

Servers ignore hidden folders. A rename never replaces a model that exists, and a server that watches the repository
sees the model when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edge_server.backends import onnx_file_info
from edge_server.errors import AlreadyExists, InvalidRequest, LoadError
from edge_server.repository.choice.model_formats import advice_for_pickle, files_beside, standard_name
from edge_server.repository.disk.file_fingerprint import is_ignored
from edge_server.repository.disk.replace_file import sync_folder
from edge_server.repository.disk.scan import is_model_name, parse_version
from edge_server.repository.model_config.metadata_files import FILE_NAMES

MAX_NAME_BYTES = 200
_STAGING_PREFIX = ".add-"
_MAX_ENTRIES = 10_000
"""Maximum number of entries of a folder that is searched for a model file."""
_TOKENIZER, _DETOKENIZER = "openvino_tokenizer.xml", "openvino_detokenizer.xml"
_SAVED_MODEL = "saved_model.pb"
_GENERIC_NAMES = ("inference", "model")
"""Names of files that say nothing, in a folder that does."""
LABELS = "labels.txt"
"""Name of the file with the names of a model's classes."""
_LABEL_WORDS = ("label", "class", "names")
"""Parts of names of files that list classes, as classes.txt and imagenet_labels.txt."""
MAX_TOGETHER = 4
"""Maximum number of models that are added together."""


class NewModelFiles(NamedTuple):
    """A model's files. `path` is what was given. `copies` maps each file or folder to its path in the version folder.
    `backend` is empty if the files decide it. `label_files` lie beside it and may list its classes, the likeliest
    first."""

    path: Path
    name: str
    copies: tuple[tuple[Path, str], ...]
    backend: str = ""
    label_files: tuple[Path, ...] = ()

    @property
    def shown_name(self) -> str:
        """The file's name, with its folder if the name says nothing."""
        is_generic = self.path.stem in _GENERIC_NAMES and self.name != self.path.stem
        return f"{self.name}/{self.path.name}" if is_generic else self.path.name

    @property
    def size_bytes(self) -> int:
        files = [file for path, _ in self.copies for file in ([path] if path.is_file() else path.rglob("*"))]
        return sum(file.stat().st_size for file in files if file.is_file())


class NewModels(NamedTuple):
    """Models that are added together, and files that list the characters of a recogniser of text or class names."""

    files: tuple[NewModelFiles, ...]
    text_files: tuple[Path, ...] = ()


def find_sources(paths: Sequence[Path]) -> NewModels:
    """Return the models that files and folders name. A text file behind others lists characters or class names.

    A folder with several ONNX files has several models. Raises InvalidRequest.
    """
    text_files = [path for path in paths if path.suffix.lower() == ".txt" and len(paths) > 1 and path.is_file()]
    given = [path for path in paths if path not in text_files]
    files: list[NewModelFiles] = []
    for path in given:
        names = _entries(path) if path.is_dir() else []
        several = [name for name in names if name.endswith(".onnx")]
        if len(several) > 1 and _TOKENIZER not in names:
            files += [find_source(path / name) for name in several[: MAX_TOGETHER + 1]]
            text_files += [path / name for name in names if name.endswith(".txt")][:MAX_TOGETHER]
        else:
            files.append(find_source(path))
    if not 1 <= len(files) <= MAX_TOGETHER:
        advice = f"; add each by itself: `edge-server add {shlex.quote(str(files[0].path))}`" if files else ""
        raise InvalidRequest(
            f"expected one model, or a text detector and its recogniser, given {len(files)} models{advice}"
        )
    return NewModels(tuple(files), tuple(text_files))


def find_source(path: Path) -> NewModelFiles:
    """Return the files of the model that `path`, a file or a folder, names. Raises InvalidRequest."""
    if not path.exists():
        raise InvalidRequest(f"'{path}' does not exist: expected a model file, or the folder of an export")
    found = _of_folder(path) if path.is_dir() else _of_file(path)
    for source, _ in found.copies:
        if not os.access(source, os.R_OK):
            raise InvalidRequest(f"'{source}' cannot be read: it is a link to nothing, or of another user")
    return found


def _entries(folder: Path) -> list[str]:
    """Return the sorted names in a folder, at most _MAX_ENTRIES. Raises InvalidRequest."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, _MAX_ENTRIES + 1))
    except OSError as error:
        raise InvalidRequest(f"'{folder}' cannot be read: {error.strerror}") from None
    if len(names) > _MAX_ENTRIES:
        raise InvalidRequest(f"'{folder}': expected at most {_MAX_ENTRIES} files, given more; name the model's file")
    return names


def _of_folder(folder: Path) -> NewModelFiles:
    names = _entries(folder)
    name = folder.resolve().name
    if "config.pbtxt" in names or any(parse_version(entry) is not None for entry in names):
        raise InvalidRequest(
            f"'{folder}' is already the folder of a model: copy it into the repository as it is, by `cp -r "
            f"{shlex.quote(str(folder))} model_repository/`"
        )
    if _TOKENIZER in names:
        copies = tuple((folder / entry, entry) for entry in names if not entry.startswith("."))
        # A model that only reads texts makes vectors of them.
        is_embedding = _TOKENIZER in names and _DETOKENIZER not in names
        return NewModelFiles(folder, name, copies, "openvino_embeddings" if is_embedding else "")
    if _SAVED_MODEL in names:
        return NewModelFiles(folder, name.removesuffix(".savedmodel"), ((folder, "model.savedmodel"),))
    # Suffixes such as .json and .py belong to many other files.
    models = [entry for entry in names if entry.endswith((".onnx", ".xml", ".tflite", ".pt2", ".gguf"))]
    projectors = [entry for entry in models if entry.startswith("mmproj") and entry.endswith(".gguf")]
    if len(projectors) == 1 and len(models) == 2:
        # By which a language model takes pictures.
        models.remove(projectors[0])
    else:
        projectors = []
    if len(models) != 1:
        if any((folder / entry / "config.pbtxt").is_file() or (folder / entry / "1").is_dir() for entry in names):
            raise InvalidRequest(
                f"'{folder}' is a model repository: serve it by `edge-server serve --model-repository="
                f"{shlex.quote(str(folder))}`, or copy the folder of a model into yours"
            )
        given = ", ".join(f"'{entry}'" for entry in (models or names)[:8]) or "an empty folder"
        advice = f"; name the file itself: `edge-server add {shlex.quote(str(folder / models[0]))}`" if models else ""
        raise InvalidRequest(f"'{folder}': expected a folder with one model, given {given}{advice}")
    found = _of_file(folder / models[0])
    found = found._replace(copies=(*found.copies, *((folder / entry, entry) for entry in projectors)))
    if found.name in _GENERIC_NAMES:  # PaddleOCR and Hugging Face name all files alike.
        path = folder.resolve()
        return found._replace(name=path.parent.name if path.name == "onnx" else path.name)
    return found


def _of_file(path: Path) -> NewModelFiles:
    target = standard_name(path.name)
    if not target:
        advice = advice_for_pickle(path.name) or "export others to ONNX"
        raise InvalidRequest(
            f"'{path}': no runtime reads files that end in '{path.suffix}'; expected one of .onnx, .xml "
            "(OpenVINO), .tflite, .pt (TorchScript), .pt2, .gguf, .plan, .engine, a forest (.json, .ubj and .model of "
            "XGBoost, .txt of LightGBM, .tl of treelite), or the folder of a SavedModel or a language model; "
            f"{advice}"
        )
    copies = [(path, target)]
    if path.suffix.lower() == ".xml":
        weights = path.with_suffix(".bin")
        if not weights.is_file():
            raise InvalidRequest(f"'{path}': expected its weights '{weights.name}' beside it")
        copies.append((weights, "model.bin"))
    if path.suffix.lower() == ".onnx":
        copies += [(path.parent / name, name) for name in _external_files(path)]
        beside = {name.replace(target, path.name): name for name in files_beside(target)}
        copies += [(path.parent / name, copy) for name, copy in beside.items() if (path.parent / name).is_file()]
    # Hugging Face lays them above the folder of the ONNX file.
    folders = (path.parent, path.parent.parent) if path.parent.name == "onnx" else (path.parent,)
    for name in FILE_NAMES:
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if found is not None:
            copies.append((found, name))
    return NewModelFiles(path, path.stem, tuple(copies), label_files=tuple(_label_files(path.stem, folders)))


def _label_files(stem: str, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the text files in some folders whose names say that they list classes, labels.txt first."""
    for folder in folders:
        try:
            names = _entries(folder)
        except InvalidRequest:  # A folder of very many files is no export.
            continue
        for name in sorted(names, key=lambda name: name != LABELS):
            own, suffix = os.path.splitext(name.lower())
            says_so = own == stem.lower() or any(word in own for word in _LABEL_WORDS)
            if says_so and suffix == ".txt" and (folder / name).is_file():
                yield folder / name


def _external_files(path: Path) -> list[str]:
    """Return the names of the files with weights that an ONNX file refers to. Raises InvalidRequest."""
    try:
        return onnx_file_info.external_files(path, f"'{path}'")
    except LoadError as error:
        raise InvalidRequest(error.message) from None
    except (OSError, ValueError):
        return []  # The load says what is wrong with the file.


def check_name(name: str) -> None:
    """Raise InvalidRequest for a name that no model can have."""
    if not is_model_name(name) or is_ignored(name) or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise InvalidRequest(
            f"name '{name[:80]}' cannot be used: expected 1 to {MAX_NAME_BYTES} bytes without spaces, slashes, "
            "? # % and a leading dot; choose another with --name"
        )


def check_is_free(repository: Path, name: str) -> None:
    """Raise AlreadyExists if the repository has a model, or anything else, of this name."""
    target = repository / name
    if not os.path.lexists(target):
        return
    entries: list[str] = []
    with contextlib.suppress(OSError):  # no folder
        entries = os.listdir(target)
    versions = sorted(number for entry in entries if (number := parse_version(entry)) is not None)
    what = f"has version {', '.join(map(str, versions[:8]))}" if versions else "exists"
    advice = f"; a new version goes to '{target / str(versions[-1] + 1)}'" if versions else ""
    raise AlreadyExists(f"'{target}' {what}: choose another name with --name{advice}")


@contextlib.contextmanager
def staging_folder(repository: Path) -> Iterator[Path]:
    """Make a hidden folder in the repository, and remove it at the end. Removes those of killed processes, too.

    Makes the repository if only its last folder is missing. Raises InvalidRequest if it cannot be written.
    """
    try:
        repository.mkdir(exist_ok=True)
        for old in repository.glob(f"{_STAGING_PREFIX}*"):
            with _locked(old) as is_dead:
                if is_dead:
                    shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=repository))
    except OSError as error:
        raise InvalidRequest(f"--model-repository={repository} cannot be written: {error.strerror}") from None
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder during a block. Yields False if another process has it, or the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        is_free = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        yield is_free
    finally:
        os.close(descriptor)


def copy_files(source: NewModelFiles, folder: Path) -> Path:
    """Copy the model's files as version 1 of the model `folder`, with a configuration if its files do not decide the
    backend. Return the folder. Raises OSError."""
    version = folder / "1"
    version.mkdir(parents=True)
    for path, name in source.copies:
        target = version / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copyfile(path, target)
    if source.backend:
        (folder / "config.pbtxt").write_text(f'backend: "{source.backend}"\n', "utf-8")
    return folder


def move_into_place(folder: Path, repository: Path) -> Path:
    """Move a complete model folder into the repository. Return its new path. Raises AlreadyExists and OSError."""
    target = repository / folder.name
    # A loss of power after the rename must not leave empty files in a complete model.
    os.sync()
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        check_is_free(repository, folder.name)
        raise
    sync_folder(repository)
    return target
