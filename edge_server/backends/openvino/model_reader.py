"""Reader of model files (ONNX, IR, TensorFlow Lite, SavedModel) into OpenVINO graphs and their tensors."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edge_server.backends import onnx_file_info
from edge_server.backends.base import ModelFile
from edge_server.backends.runtime_errors import existing_file, file_title, load_error
from edge_server.core.tensor import DType
from edge_server.errors import LoadError

_TYPES = {
    "bf16": DType.BF16,
    "boolean": DType.BOOL,
    "f16": DType.FP16,
    "f32": DType.FP32,
    "f64": DType.FP64,
    "i16": DType.INT16,
    "i32": DType.INT32,
    "i64": DType.INT64,
    "i8": DType.INT8,
    "u16": DType.UINT16,
    "u32": DType.UINT32,
    "u64": DType.UINT64,
    "u8": DType.UINT8,
}
"""OpenVINO's element types, without strings: the Python binding frees the memory of string tensors twice."""

_WIDE = frozenset((DType.FP64, DType.INT64, DType.UINT32, DType.UINT64))
"""Types that OpenVINO's CPU plugin computes as f32 and i32 (ConvertPrecision in its pipeline, 2026.4)."""

_INDEX_PORTS = {"Gather": 1, "GatherND": 1, "GatherElements": 1, "ShapeOf": 0}
"""Inputs of operators in which values beyond 32 bits are no valid indices, or do not matter."""

_INDEX_MAKERS = frozenset(("TopK", "NonZero", "ShapeOf", "NonMaxSuppression", "Gather"))
"""Operators whose integers are indices, or labels that the file holds."""

_FORWARDING = frozenset(("Convert", "Reshape", "Squeeze", "Unsqueeze", "Transpose"))
"""Operators that hand the values of their first input on."""

_FRONTENDS = {".onnx": "onnx", ".tflite": "tflite", ".xml": "ir"}
"""OpenVINO's reader by file suffix. No other: OpenVINO would try all on the file's content, and so open an ONNX file
under any name."""

_SAVED_MODEL = "saved_model.pb"
"""The file in the folder of a TensorFlow SavedModel. OpenVINO reads the folder."""

_MAX_OPERATORS = 8
"""Maximum number of operators that a message names."""

_TFLITE_SINCE = (2026, 1)
"""First release that verifies a TensorFlow Lite file before it follows the file's offsets."""


class GraphReader:
    """Reads files with one Core, one file at a time. Thread-safe."""

    def __init__(self, version: str, core: Any, frontend: Any) -> None:
        """`frontend` is the module `openvino.frontend`."""
        self._version = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        self._core = core
        self._frontends = frontend.FrontEndManager()
        self._failures = exception_classes(frontend)
        self._lock = threading.Lock()
        self._extensions: set[str] = set()

    def read_graph(self, file: ModelFile, extension: str, is_mapped: bool) -> Any:
        """Return the graph of a file. `extension` is a library of operators, or "". Raises LoadError."""
        path = file_to_read(file)
        try:
            with self._lock:
                if extension and extension not in self._extensions:
                    self._core.add_extension(extension)
                    self._extensions.add(extension)
                model = self._convert(file, path, extension, is_mapped)
        except self._failures as error:
            operators = _unconverted_operators(str(error))
            failure = (
                LoadError(f"{file_title(file)}: openvino cannot convert {operators}")
                if operators
                else load_error(file, "openvino", error)
            )
        else:
            if not model.outputs:
                raise LoadError(f"{file_title(file)}: openvino finds no graph in it")
            return model
        raise failure

    def _convert(self, file: ModelFile, path: Path, extension: str, is_mapped: bool) -> Any:
        framework, source = _FRONTENDS.get(path.suffix.lower()), path
        if path.name == _SAVED_MODEL:
            framework, source = "tf", path.parent
        if framework == "tflite" and self._version < _TFLITE_SINCE:
            since = ".".join(map(str, _TFLITE_SINCE))
            raise ValueError(f"TensorFlow Lite needs openvino {since}; this one crashes on a damaged file")
        if framework is None:
            raise ValueError(f"expected a file that ends in {', '.join(_FRONTENDS)}, or a SavedModel")
        if framework == "onnx":
            onnx_file_info.external_files(path, file_title(file))
        frontend = self._frontends.load_by_framework(framework)
        if extension:
            frontend.add_extension(extension)
        return frontend.convert(frontend.load(str(source), is_mapped))


def _unconverted_operators(message: str) -> str:
    """Return the names of the operators that a conversion failed for, from the summary at the end of OpenVINO's message
    (src/frontends/common_translators/src/unconverted_ops_report.cpp); "" for another failure."""
    lists = re.findall(
        r"^-- (?:No conversion rule found for operations|Conversion is failed for): (.+)$", message, re.MULTILINE
    )
    names = [name.strip() for found in lists for name in found.split(",")]
    more = f" and {len(names) - _MAX_OPERATORS} more" if len(names) > _MAX_OPERATORS else ""
    return ", ".join(name[:80] for name in names[:_MAX_OPERATORS]) + more


def file_to_read(file: ModelFile) -> Path:
    """Return the file of a model, which may be a directory. Raises LoadError if there is none."""
    if (file.path / _SAVED_MODEL).is_file():
        return existing_file(file, _SAVED_MODEL)
    return existing_file(file, "model.onnx" if file.path.suffix == ".onnx" else "model.xml")


def exception_classes(frontend: Any) -> tuple[type[Exception], ...]:
    """Return the library's exception classes. Those of its readers have no common base class."""
    own = [item for item in vars(frontend).values() if isinstance(item, type) and issubclass(item, Exception)]
    return (*own, RuntimeError, ValueError, TypeError, OSError, MemoryError)


def declared_tensor(file: ModelFile, role: str, port: Any) -> tuple[str, DType, tuple[int, ...]]:
    """Return name, type and dims (-1: any size) of an input or output as declared in the file. Raises LoadError."""
    name, kind = _names(port)[0], _type_name(port)
    if kind not in _TYPES:
        raise LoadError(f"{file_title(file)}: {role} '{name}' is of type {kind}, which this backend cannot carry")
    if port.get_partial_shape().rank.is_dynamic:
        raise LoadError(f"{file_title(file)}: {role} '{name}' has no fixed number of dimensions")
    return name, _TYPES[kind], dims(port)


def wide_tensors(model: Any) -> list[str]:
    """Return the inputs and outputs that OpenVINO computes in fewer bits than they have, as "input 'x' (INT64)".

    Without those that only hold indices, as the tokens of a text or the best class.
    """
    found = [
        f"input '{_names(port)[0]}' ({_TYPES[_type_name(port)].value})"
        for port in model.inputs
        if _TYPES.get(_type_name(port)) in _WIDE
        and not all(
            _INDEX_PORTS.get(user.get_node().get_type_name()) == user.get_index() for user in port.get_target_inputs()
        )
    ]
    for port in model.outputs:
        if _TYPES.get(_type_name(port)) in _WIDE:
            maker = port.get_node()
            while maker.get_type_name() in (*_FORWARDING, "Result"):
                maker = maker.input_value(0).get_node()
            if maker.get_type_name() not in _INDEX_MAKERS:
                found.append(f"output '{_names(port)[0]}' ({_TYPES[_type_name(port)].value})")
    return found


def metadata_texts(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts that the exporter wrote into a file: those of ONNX by their keys, those of others as
    "group/key"."""
    for group, values in model.get_rt_info().items():
        prefix = "" if group == "framework" else f"{group}/"
        for key, value in values.items() if isinstance(values, dict) else ():
            if not isinstance(value, dict):
                with contextlib.suppress(UnicodeDecodeError, RuntimeError):  # any bytes, or no text
                    yield prefix + key, value.astype(str)


def positions(ports: Sequence[Any]) -> dict[str, int]:
    """Return the positions of inputs or outputs, under all of their names."""
    return {name: index for index, port in enumerate(ports) for name in _names(port)}


def bf16_names(ports: Sequence[Any]) -> frozenset[str]:
    """Return all names of bfloat16 tensors, which are passed as bit patterns because numpy has no such type."""
    return frozenset(name for port in ports if _type_name(port) == "bf16" for name in _names(port))


_CONVOLUTIONS = ("Convolution", "GroupConvolution")


def convolution_inputs(model: Any) -> frozenset[str]:
    """Return all names of the inputs that only convolutions read. None of them reaches an output unchanged, and no
    layer writes its result into their memory."""
    return frozenset(
        name
        for port in model.inputs
        if all(reader.get_node().get_type_name() in _CONVOLUTIONS for reader in port.get_target_inputs())
        for name in _names(port)
    )


def dims(port: Any) -> tuple[int, ...]:
    """Return the dims of an input or output with a fixed number of dimensions, -1 for any size."""
    return tuple(dim.get_length() if dim.is_static else -1 for dim in port.get_partial_shape())


def _type_name(port: Any) -> str:
    return str(port.get_element_type().get_type_name())


def _names(port: Any) -> list[str]:
    """Return all names of an input or output, the one for clients first. Without a name it has its layer's name."""
    names = sorted(port.get_names())
    if names:
        return names
    node = port.get_node()
    if node.get_type_name() == "Result":
        node = node.input_value(0).get_node()
    return [str(node.get_friendly_name())]
