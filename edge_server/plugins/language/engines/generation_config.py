"""Reader of a model's `generation_config.json`: the tokens that end a text, and the defaults of sampling.

The format is Hugging Face's (https://huggingface.co/docs/transformers/main_classes/text_generation).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.model_size import BadModelFile
from edge_server.plugins.language.engines.token_engine import Sampling
from edge_server.plugins.language.text.text_request import read_sampling

FILE = "generation_config.json"

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """`end_tokens` are empty if the file has none. `sampling` applies where a request says nothing."""

    end_tokens: frozenset[int]
    sampling: Sampling


def read_generation_config(folder: Path) -> GenerationConfig:
    """Return the end tokens and defaults of an export. A folder without the file gives the defaults of requests.

    With `do_sample` false the temperature is 0 by default, whatever the file's. Other members are ignored. Raises
    BadModelFile for a value out of range.
    """
    values: Mapping[str, Any] = {}
    if (folder / FILE).is_file():
        try:
            values = json.loads((folder / FILE).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise BadModelFile(f"{FILE}: expected a JSON object, got an error: {error}") from None
    if not isinstance(values, dict):
        raise BadModelFile(f"{FILE}: expected a JSON object, got {type(values).__name__}")
    stated = values.get("eos_token_id")
    tokens = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise BadModelFile(f"{FILE}: eos_token_id: expected a token or a list of tokens, got {str(stated)[:80]}")
    does_sample = values.get("do_sample")
    if does_sample not in (None, True, False):
        raise BadModelFile(f"{FILE}: do_sample: expected true or false, got {str(does_sample)[:80]}")
    try:
        sampling = read_sampling({name: values.get(name) for name in _DEFAULTS}, FILE, is_strict=True)
    except InvalidRequest as error:
        raise BadModelFile(error.message) from None
    if does_sample is False:
        sampling = replace(sampling, temperature=0.0)
    return GenerationConfig(frozenset(tokens), sampling)
