"""Model files given with a load call: they become a model directory of their own, which resolves like any other."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from edge_server.errors import BadModelConfig, ServingFault
from edge_server.repository.paths import check_relative
from edge_server.repository.scan import ModelOnDisk, Scanner, is_model_name, parse_version, with_config

MAX_FILES = 4096


class WrittenModel:
    """A model directory made from bytes, readable by this user only. Whoever makes it calls `close`."""

    def __init__(self, name: str, files: Mapping[str, bytes], config_json: str, folder: Path | None = None) -> None:
        """Write `files`, "1/model.onnx" -> content, below a new folder in `folder` (None: the system's for such).

        Raises BadModelConfig for a name or path that does not stay inside, a path outside a version directory, and
        for a bad configuration; ServingFault when the disk refuses.
        """
        paths = _checked(name, files)
        self._root = _new_folder(folder)
        try:
            self.model = self._write(name, paths, files, config_json)
        except BaseException:
            self.close()
            raise

    def _write(self, name: str, paths: Mapping[str, Path], files: Mapping[str, bytes], config_json: str) -> ModelOnDisk:
        path = self._root / name
        try:
            for key, relative in paths.items():
                target = path / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files[key])
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise BadModelConfig(f"model '{name}': files: one path is both a file and a folder") from error
        except OSError as error:
            raise ServingFault(f"model '{name}': its files cannot be written: {error.strerror}") from error
        found = Scanner([self._root]).find(name)
        if found is None:
            raise ServingFault(f"model '{name}': its files were removed while they were written")
        return with_config(found, config_json)

    def close(self) -> None:
        """Delete the files. What a runtime has opened of them stays usable to it. May be called again."""
        shutil.rmtree(self._root, ignore_errors=True)


def _new_folder(folder: Path | None) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="edge_server-model-", dir=folder))
    except OSError as error:
        raise ServingFault(f"no folder can be made for a model's files: {error.strerror}") from error


def _checked(name: str, files: Mapping[str, bytes]) -> dict[str, Path]:
    """Return where each file goes, relative to the model directory."""
    if not is_model_name(name):
        raise BadModelConfig(f"model name: expected one that fits a URL and a directory, given {name[:80]!r}")
    if not 1 <= len(files) <= MAX_FILES:
        raise BadModelConfig(f"model '{name}': files: expected 1 to {MAX_FILES}, given {len(files)}")
    paths: dict[str, Path] = {}
    for key in files:
        relative = check_relative(key, f"model '{name}': files")
        if len(relative.parts) < 2 or parse_version(relative.parts[0]) is None:
            raise BadModelConfig(f"model '{name}': files: expected '<version>/<file>', given {key[:80]!r}")
        paths[key] = Path(relative)
    if len(set(paths.values())) != len(paths):
        raise BadModelConfig(f"model '{name}': files: expected each path once, given one in two spellings")
    return paths
