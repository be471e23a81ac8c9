"""Fixtures for language models: the front end of tests/frontends, small files and engines."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.frontends import conftest as front_end
from tests.plugins.language.talker import TALKER, two_words

open_site, site = front_end.open_site, front_end.site


@pytest.fixture
def talker(site: front_end.Site) -> front_end.Site:
    """A front end with the model `talker`."""
    site.service.models["talker"] = (TALKER, two_words)
    return site


@pytest.fixture
def add_gguf_metadata() -> Callable[[Path, dict[str, float]], None]:
    """Return a function that adds entries `general.sampling.NAME` to a GGUF file: int32 and float32."""

    def add(path: Path, values: dict[str, float]) -> None:
        int32, float32, text = 5, 6, 8
        entries = b""
        for name, value in values.items():
            typed = struct.pack("<Ii", int32, value) if type(value) is int else struct.pack("<If", float32, value)
            entries += _gguf_text(f"general.sampling.{name}") + typed
        # The tensors' data stays aligned to 32 bytes.
        entries += _gguf_text("test.padding")
        padding = -(len(entries) + 12) % 32
        entries += struct.pack("<IQ", text, padding) + bytes(padding)
        data = path.read_bytes()
        (count,) = struct.unpack_from("<Q", data, 16)
        path.write_bytes(data[:16] + struct.pack("<Q", count + len(values) + 1) + entries + data[24:])

    return add


def _gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.fixture(scope="session")
def open_engine() -> Callable[[str], Any]:
    """Return a function that opens the tiny model with the engine of this name. The caller closes it."""
    return _open_engine


def _open_engine(name: str) -> Any:
    from edge_server.plugins.language.engines.model_size import read_gguf
    from edge_server.plugins.language.engines.settings import read_settings

    tiny = Path(__file__).parents[2] / "data/tiny_llm/tiny.gguf"
    settings = read_settings("tiny", {"num_kv_blocks": "256", "threads": "1"}, read_gguf(tiny), 32)
    if name == "llama_cpp":
        pytest.importorskip("xllamacpp", reason="needs xllamacpp, of the extra test-all")
        from edge_server.plugins.language.engines.llama_cpp_engine import LlamaCppEngine

        return LlamaCppEngine(tiny, settings, 32, 1_000)
    pytest.importorskip("openvino_genai", reason="needs openvino-genai, of the extra test-all")
    from edge_server.plugins.language.engines.openvino_engine import OpenVinoEngine

    return OpenVinoEngine(tiny, settings)
