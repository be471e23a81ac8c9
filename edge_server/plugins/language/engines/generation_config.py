"""Reader of a language model's defaults for generation, end tokens and sampling, from generation_config.json or GGUF
metadata.

They are stated by `generation_config.json`, whose format is Hugging Face's
(https://huggingface.co/docs/transformers/main_classes/text_generation), and by the metadata `general.sampling.*` of a
GGUF file, into which llama.cpp's converter copies that file's values (https://github.com/ggml-org/llama.cpp/pull/17120).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.model_size import BadModelFile, read_gguf_metadata
from edge_server.plugins.language.engines.sampling_parser import DEFAULT_SAMPLING, read_sampling
from edge_server.plugins.language.engines.token_engine import Sampling

FILE = "generation_config.json"

_GGUF_KEYS = {
    "temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip
"""Member of `generation_config.json` -> key below `general.sampling`."""
_RANDOM = ("temperature", "top_p", "top_k", "min_p")
"""Members that only a sampled text needs. A file with one of them and no temperature means Hugging Face's, 1: such
files leave out what is Hugging Face's default."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """`end_tokens` are empty if the file has none. `sampling` applies where a request says nothing."""

    end_tokens: frozenset[int]
    sampling: Sampling


def read_generation_config(path: Path) -> GenerationConfig:
    """Return the end tokens and sampling defaults of an export's folder, or of a GGUF file and the files beside it.

    What `generation_config.json` states wins over the GGUF file. Where neither states how to sample, the defaults of
    requests apply. With `do_sample` false the temperature is 0, whatever the file's. Other members are ignored. Raises
    BadModelFile for a value out of range.
    """
    is_gguf = path.is_file()
    values = _read_json((path.parent if is_gguf else path) / FILE)
    stated = values.get("eos_token_id")
    tokens = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise BadModelFile(f"{FILE}: eos_token_id: expected a token or a list of tokens, got {str(stated)[:80]}")
    does_sample = values.get("do_sample")
    if does_sample not in (None, True, False):
        raise BadModelFile(f"{FILE}: do_sample: expected true or false, got {str(does_sample)[:80]}")
    sources = {FILE: {name: values.get(name) for name in _GGUF_KEYS}}
    if is_gguf:
        metadata = read_gguf_metadata(path)
        in_header = {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF_KEYS.items()}
        sources = {f"{path.name}: general.sampling": in_header, **sources}
    sampling = DEFAULT_SAMPLING
    if does_sample or any(source[name] is not None for source in sources.values() for name in _RANDOM):
        sampling = replace(sampling, temperature=1.0)
    try:
        for title, source in sources.items():
            sampling = read_sampling(source, title, is_strict=True, defaults=sampling)
    except InvalidRequest as error:
        raise BadModelFile(error.message) from None
    if does_sample is False:
        sampling = replace(sampling, temperature=0.0)
    return GenerationConfig(frozenset(tokens), sampling)


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the members of a file, none if it is missing. Raises BadModelFile."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelFile(f"{FILE}: expected a JSON object, got an error: {error}") from None
    if not isinstance(values, dict):
        raise BadModelFile(f"{FILE}: expected a JSON object, got {type(values).__name__}")
    return values
