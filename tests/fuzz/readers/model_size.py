"""Files that state the size of a language model: GGUF headers, and the configurations of exports."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

from stubs import InputFile, new_folder, result_of

from edge_server.plugins.language.engines.model_size import (
    BadModelFile,
    LlmSize,
    read_export,
    read_gguf,
    read_gguf_for_llama_cpp,
)

_FILE = InputFile()
_FOLDER = new_folder("model_size")
_EXPORT = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _gguf(architecture: str = "llama", *tensors: bytes, more: bytes = b"", count: int = 0) -> bytes:
    numbers = ("attention.head_count", "embedding_length", "block_count", "context_length")
    fields = _text("general.architecture") + struct.pack("<I", 8) + _text(architecture)
    for name in numbers:
        fields += _text(f"{architecture}.{name}") + struct.pack("<II", 4, 8)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 1 + len(numbers) + count)
    return head + fields + more + b"".join(tensors)


def seeds() -> Iterable[bytes]:
    tensor = _text("t") + struct.pack("<IQQIQ", 2, 32, 2, 8, 0)
    yield b"\0" + _gguf()
    yield b"\0" + _gguf("qwen2", tensor) + bytes(200)
    array = _text("a") + struct.pack("<IIQ", 9, 8, 2) + _text("x") + _text("y")
    numbers = _text("b") + struct.pack("<IIQ4B", 9, 0, 4, 1, 2, 3, 4)
    yield b"\0" + _gguf("llama", more=array + numbers, count=2)
    yield b"\0" + _gguf("llama", more=_text("general.alignment") + struct.pack("<II", 4, 64), count=1)
    yield b"\1" + json.dumps(_EXPORT).encode()
    yield b"\1" + json.dumps(_EXPORT).encode().replace(b"512", b"1e999")
    yield b"\1" + b"[" * 900


def check(data: bytes) -> None:
    kind, data = data[:1], data[1:]
    size: LlmSize | None
    if kind == b"\1":
        (_FOLDER / "config.json").write_bytes(data)
        size = read_export(_FOLDER)
    else:
        path = _FILE.write(data)
        any_size = result_of(lambda: read_gguf_for_llama_cpp(path), BadModelFile)
        assert any_size is None or min(any_size.weight_bytes, any_size.context, any_size.bytes_per_token) >= 0
        size = result_of(lambda: read_gguf(path), BadModelFile)
    if size is not None:
        assert min(size.weight_bytes, size.context, size.bytes_per_token, size.width) >= 0, f"a negative size: {size}"
