"""Reader of model files into OpenVINO graphs: ONNX, IR, TensorFlow Lite, SavedModel, custom operators."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

from edge_server.backends.base import ModelFile
from edge_server.backends.runtime_library import existing_file, file_title, load_error
from edge_server.errors import LoadError

_FRONTENDS = {".onnx": "onnx", ".tflite": "tflite", ".xml": "ir"}
"""Reader by file suffix. Naming it keeps OpenVINO from trying all others on a broken file, which print to stderr."""

_SAVED_MODEL = "saved_model.pb"
"""The file that makes a folder a TensorFlow SavedModel; the folder is what is read."""

_TFLITE_SINCE = (2026, 1)
"""First release known to verify a TensorFlow Lite file before it follows the file's pointers."""


class GraphReader:
    """Reads with one Core, which takes one file at a time. Thread-safe."""

    def __init__(self, version: str, core: Any, frontend: Any) -> None:
        """`frontend` is the module `openvino.frontend`."""
        self._version = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        self._core = core
        self._frontends = frontend.FrontEndManager()
        self._failures = exceptions(frontend)
        self._reading = threading.Lock()
        self._extensions: set[str] = set()

    def read(self, file: ModelFile, extension: str, is_mapped: bool) -> Any:
        """Return the graph of a file. `extension`: a library of operators, or "". Raises LoadError."""
        path = file_to_read(file)
        try:
            with self._reading:
                if extension and extension not in self._extensions:
                    self._core.add_extension(extension)
                    self._extensions.add(extension)
                model = self._convert(path, bool(extension), is_mapped)
        except self._failures as error:
            failure = load_error(file, "openvino", error)
        else:
            if not model.outputs:
                raise LoadError(f"{file_title(file)}: openvino finds no graph in it")
            return model
        raise failure

    def _convert(self, path: Path, has_extensions: bool, is_mapped: bool) -> Any:
        framework, source = _FRONTENDS.get(path.suffix), path
        if path.name == _SAVED_MODEL:
            framework, source = "tf", path.parent
        if framework == "tflite" and self._version < _TFLITE_SINCE:
            since = ".".join(map(str, _TFLITE_SINCE))
            raise ValueError(f"TensorFlow Lite needs openvino {since}; this one crashes on a damaged file")
        if framework is None or has_extensions:
            self._core.set_property({"ENABLE_MMAP": is_mapped})
            return self._core.read_model(str(source))
        frontend = self._frontends.load_by_framework(framework)
        return frontend.convert(frontend.load(str(source), is_mapped))


def file_to_read(file: ModelFile) -> Path:
    """Return the file that a model, which may be a directory, is read from. Raises LoadError where there is none."""
    if (file.path / _SAVED_MODEL).is_file():
        return existing_file(file, _SAVED_MODEL)
    return existing_file(file, "model.onnx" if file.path.suffix == ".onnx" else "model.xml")


def exceptions(frontend: Any) -> tuple[type[Exception], ...]:
    """Return all classes that the library raises; those of its readers have no base in common."""
    own = [item for item in vars(frontend).values() if isinstance(item, type) and issubclass(item, Exception)]
    return (*own, RuntimeError, ValueError, TypeError, OSError, MemoryError)
