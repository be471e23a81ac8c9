"""Reader of a language model's size from its files, before it is opened: weights, context, and KV cache per token.

Formats: GGUF version 2 and 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), and `config.json` of Hugging
Face beside an OpenVINO export.
"""

from __future__ import annotations

import json
import math
import platform
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MODEL_FILE = "language_model_file"
"""Parameter of the completed configuration: what the file says of its model, as JSON, for ollama's API."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's type number of a value -> code of `struct`."""
_TEXT, _ARRAY = 8, 9

_MAX_ENTRIES = 1_000
_MAX_TEXT_BYTES = 16 << 20
_MAX_ELEMENTS = 4 << 20
_MAX_TENSORS = 100_000

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures that OpenVINO GenAI reads from a GGUF file."""

_TENSOR_TYPES = {
    0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210),
}  # fmt: skip
"""GGUF's type number of a tensor -> elements and bytes of a block, for the types that OpenVINO GenAI reads."""
_NO_MATRIX_TYPES = (0, 30)
"""F32 and BF16: OpenVINO GenAI 2026.4 reads vectors and the embedding in them, no other matrix."""
_EMBEDDING = "token_embd.weight"
_PLACES = {
    "adapter": "a LoRA adapter: put it beside its model as adapters/NAME.gguf, for the backend llama_cpp",
    "mmproj": "a projector of pictures: put it beside its model as mmproj.gguf, for the backend llama_cpp",
}
"""Of a GGUF file's `general.type`: what it is, if it is no model."""
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""GGUF's `general.file_type` -> name of the quantization; llama.h, `llama_ftype`."""
_EXPORT_ADVICE = "serve an OpenVINO export instead (optimum-cli export openvino)"
_MAX_SHORT_ARRAY = 4096
"""Numbers of an array that is read: a number for each layer, not for each token."""
_ALIGNMENT = 32
"""Of the tensors' data, if the file says nothing."""

KV_BYTES_PER_VALUE = 1.25 if platform.machine() in ("x86_64", "AMD64") else 2
"""Of OpenVINO's KV cache: u8 with its scales on x86, f16 elsewhere."""

LLAMA_CPP_LOAD_FACTOR = 2.0
"""The same with llama.cpp, which maps the file, and while it loads keeps weights of some types (Q4_0) in a layout of
its own beside it."""
_LLAMA_CPP_KV_BYTES_PER_VALUE = 2

GGUF_LOAD_FACTOR = 3.0
"""Memory for the weights of a GGUF file, in sizes of the file, after the first step, for which the runtime arranges
them anew. Measured with Q4_1: 2.94 with SmolLM2-135M, 2.72 with a model of five times its layers."""
EXPORT_LOAD_FACTOR = 2.0
"""The same for an OpenVINO export: its file is mapped, and the runtime keeps the weights in a layout of its own."""


class BadModelFile(Exception):
    """The file is not what it should be. The message says what and where."""


@dataclass(frozen=True, slots=True)
class LlmSize:
    """`weight_bytes`: memory while the weights are opened. `context`: most tokens, 0 if the files do not say.
    `bytes_per_token`: the KV cache of one token, 0 if unknown. `width`: numbers between two layers for one token."""

    weight_bytes: int
    context: int
    bytes_per_token: int
    width: int = 0


def read_gguf(path: Path) -> LlmSize:
    """Return the size from the header of a GGUF file.

    Raises BadModelFile for a file that is cut short, of an unknown architecture, or with tensors of an unknown type.
    OpenVINO GenAI reads beyond the end of a file that is cut short, and answers nonsense.
    """
    file_bytes = path.stat().st_size
    with open(path, "rb") as file:
        fields, tensor_count = _gguf_fields(file)
        _check_is_model(fields)
        architecture = str(fields.get("general.architecture", ""))
        if architecture not in ARCHITECTURES:
            raise BadModelFile(
                f"architecture: expected one of {', '.join(ARCHITECTURES)}, which are all that OpenVINO GenAI reads "
                f"from a GGUF file, got '{architecture[:80]}': {_EXPORT_ADVICE}"
            )
        data_end = _tensors_end(file, tensor_count)
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise BadModelFile(f"general.alignment: expected 1 to 1048576, got {alignment!r}")
        data_begin = -(-file.tell() // alignment) * alignment
    if data_begin + data_end > file_bytes:
        raise BadModelFile(
            f"the file is cut short: its tensors end at byte {data_begin + data_end}, and it has {file_bytes}"
        )

    def number(key: str, default: int | None = None) -> int:
        value = fields.get(f"{architecture}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise BadModelFile(f"{architecture}.{key}: expected a positive number, got {value!r}")
        return value

    heads = number("attention.head_count")
    head_size = number("attention.key_length", number("embedding_length") // heads)
    values = 2 * number("block_count") * number("attention.head_count_kv", heads) * head_size
    return LlmSize(
        int(file_bytes * GGUF_LOAD_FACTOR),
        number("context_length"),
        int(values * KV_BYTES_PER_VALUE),
        number("embedding_length"),
    )


def read_gguf_for_llama_cpp(path: Path) -> LlmSize:
    """Return the size from the header of a GGUF file of any architecture. llama.cpp itself checks the tensors.

    The KV cache is that of an ordinary transformer: more than what layers with a sliding window or without attention
    take. Raises BadModelFile for a header that is cut short or has impossible numbers.
    """
    fields = read_gguf_metadata(path)
    _check_is_model(fields)
    architecture = str(fields.get("general.architecture", ""))

    def numbers(key: str, default: list[int]) -> list[int]:
        value = fields.get(f"{architecture}.{key}", default)
        given = value if isinstance(value, list) else [value]
        values = [item for item in given if isinstance(item, int) and 0 <= item < 1 << 32]
        if not values or len(values) < len(given):
            raise BadModelFile(f"{architecture}.{key}: expected numbers that are not negative, got {str(value)[:80]}")
        return values

    width, layers = max(numbers("embedding_length", [0])), max(numbers("block_count", [0]))
    heads = numbers("attention.head_count", [0])
    head_size = width // max(1, *heads)
    sizes = [max(numbers(f"attention.{name}_length", [head_size])) for name in ("key", "value")]
    kv_heads = numbers("attention.head_count_kv", heads)
    values = sum(sizes) * (sum(kv_heads) if len(kv_heads) > 1 else kv_heads[0] * layers)
    # A large model may be several files, of which this is the first.
    begin, has_parts, end = path.name.rpartition("-00001-of-")
    files = [
        file
        for file in path.parent.iterdir()
        if file == path or (has_parts and file.name.startswith(begin) and file.name.endswith(f"-of-{end}"))
    ]
    return LlmSize(
        int(sum(file.stat().st_size for file in files) * LLAMA_CPP_LOAD_FACTOR),
        max(numbers("context_length", [0])),
        values * _LLAMA_CPP_KV_BYTES_PER_VALUE,
        width,
    )


def _check_is_model(fields: Mapping[str, object]) -> None:
    kind = str(fields.get("general.type"))
    if kind in _PLACES:
        raise BadModelFile(f"general.type: expected 'model', got '{kind}': this is {_PLACES[kind]}")


def read_gguf_metadata(path: Path, arrays: Collection[str] = ()) -> Mapping[str, object]:
    """Return the metadata of a GGUF file; of an array with more than 4,096 numbers, or of texts, only its length,
    unless `arrays` names it. Raises BadModelFile."""
    with open(path, "rb") as file:
        return _gguf_fields(file, arrays)[0]


def describe_gguf(path: Path) -> dict[str, object]:
    """Return the architecture, type of quantization and context length that a GGUF file states, and the number of its
    parameters unless it is one of several files. The keys are those of the file format. Raises BadModelFile."""
    with open(path, "rb") as file:
        fields, tensor_count = _gguf_fields(file)
        parameters = sum(math.prod(shape) for _, shape, _, _ in _tensors(file, tensor_count))
    architecture = str(fields.get("general.architecture", ""))[:80]
    numbers = {name: fields.get(name) for name in ("general.file_type", f"{architecture}.context_length")}
    if fields.get("split.count", 1) == 1:
        numbers["general.parameter_count"] = parameters
    known = {name: value for name, value in numbers.items() if isinstance(value, int)}
    return {"general.architecture": architecture, **known}


def describe_export(folder: Path) -> dict[str, object]:
    """Return the same of an OpenVINO export, as far as its `config.json` says it."""
    try:
        architecture = str(json.loads((folder / "config.json").read_bytes())["model_type"])[:80]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    return {"general.architecture": architecture, f"{architecture}.context_length": read_export(folder).context}


def quantization_name(file_type: object) -> str:
    """Return the name of GGUF's `general.file_type`, "" for an unknown one."""
    return _FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else ""


def read_export(folder: Path) -> LlmSize:
    """Return the size from `config.json` in the folder of an export; with zeros for what it does not say."""
    weight_bytes = int(sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) * EXPORT_LOAD_FACTOR)
    try:
        config = json.loads((folder / "config.json").read_bytes())
        values: Mapping[str, Any] = config if isinstance(config, dict) else {}
        if isinstance(values.get("text_config"), dict):
            values = values["text_config"]  # of a vision-language model
        heads = int(values["num_attention_heads"])
        head_size = int(values.get("head_dim") or int(values["hidden_size"]) // heads)
        numbers = 2 * int(values["num_hidden_layers"]) * int(values.get("num_key_value_heads", heads)) * head_size
        context, width = int(values.get("max_position_embeddings", 0)), int(values["hidden_size"])
        return LlmSize(weight_bytes, context, int(numbers * KV_BYTES_PER_VALUE), width)
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        # ArithmeticError: no heads, or a number like 1e999.
        return LlmSize(weight_bytes, 0, 0)


def _gguf_fields(file: BinaryIO, arrays: Collection[str] = ()) -> tuple[dict[str, object], int]:
    """Return the metadata and the number of tensors."""
    magic, version, tensor_count, count = struct.unpack("<4sIQQ", _exactly(file, 24))
    if magic != b"GGUF" or version not in (2, 3):
        raise BadModelFile(f"expected a GGUF file of version 2 or 3, got {magic!r} version {version}")
    if count > _MAX_ENTRIES:
        raise BadModelFile(f"metadata: expected at most {_MAX_ENTRIES} entries, got {count}")
    fields: dict[str, object] = {}
    for _ in range(count):
        key = _text(file)
        fields[key] = _value(file, *struct.unpack("<I", _exactly(file, 4)), is_wanted=key in arrays)
    return fields, tensor_count


def _tensors(file: BinaryIO, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Yield name, shape, type number and offset in the data of each tensor."""
    if count > _MAX_TENSORS:
        raise BadModelFile(f"expected at most {_MAX_TENSORS} tensors, got {count}")
    for _ in range(count):
        name = _text(file)
        (dimensions,) = struct.unpack("<I", _exactly(file, 4))
        if dimensions > 4:
            raise BadModelFile(f"tensor '{name[:80]}': expected at most 4 dimensions, got {dimensions}")
        shape = struct.unpack(f"<{dimensions}Q", _exactly(file, 8 * dimensions))
        yield name, shape, *struct.unpack("<IQ", _exactly(file, 12))


def _tensors_end(file: BinaryIO, count: int) -> int:
    """Return the end of the last tensor, in bytes from the beginning of the data."""
    end = 0
    for name, shape, kind, offset in _tensors(file, count):
        excluded = _NO_MATRIX_TYPES if len(shape) > 1 and name != _EMBEDDING else ()
        if kind not in _TENSOR_TYPES or kind in excluded:
            # Files named Q4_K_M and the like have Q5_0 and Q8_0 in tensors whose rows are no multiple of 256.
            known = ", ".join(_TYPE_NAMES[number] for number in _TENSOR_TYPES if number not in excluded)
            raise BadModelFile(
                f"tensor '{name[:80]}': expected one of the types {known}, which are all that OpenVINO GenAI reads "
                f"there, got {_TYPE_NAMES.get(kind, f'type number {kind}')}: take the model's Q8_0, Q4_0 or Q4_1 file, "
                f"or {_EXPORT_ADVICE}"
            )
        block, block_bytes = _TENSOR_TYPES[kind]
        end = max(end, offset + -(-math.prod(shape) // block) * block_bytes)
    return end


def _value(file: BinaryIO, kind: int, *, is_wanted: bool) -> object:
    """Return a value; of a long array or one of texts only its length, unless it is wanted."""
    if kind == _TEXT:
        return _text(file)
    if kind == _ARRAY:
        element, length = struct.unpack("<IQ", _exactly(file, 12))
        if length > _MAX_ELEMENTS:
            raise BadModelFile(f"metadata: expected arrays of at most {_MAX_ELEMENTS} elements, got {length}")
        if element in _SCALARS:
            code = f"<{length}{_SCALARS[element]}"
            data = _exactly(file, struct.calcsize(code))
            return list(struct.unpack(code, data)) if is_wanted or length <= _MAX_SHORT_ARRAY else length
        if element != _TEXT:
            raise BadModelFile(f"metadata: an array with elements of the unknown type {element}")
        if is_wanted:
            return [_text(file) for _ in range(length)]
        for _ in range(length):
            _text(file)
        return length
    if kind not in _SCALARS:
        raise BadModelFile(f"metadata: a value of the unknown type {kind}")
    code = "<" + _SCALARS[kind]
    return struct.unpack(code, _exactly(file, struct.calcsize(code)))[0]


def _text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", _exactly(file, 8))
    if length > _MAX_TEXT_BYTES:
        raise BadModelFile(f"metadata: expected texts of at most {_MAX_TEXT_BYTES} bytes, got {length}")
    return _exactly(file, length).decode("utf-8", "replace")


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise BadModelFile(f"the file is cut short: it ends at byte {file.tell()}, within its metadata")
    return data
