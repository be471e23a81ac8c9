"""Parser of a language model's settings: reads the parameters of config.pbtxt, and values that are not set there from
the model's own files (such as generation_config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from edge_server.backends.option_parsers import whole_number, yes_or_no
from edge_server.errors import LoadError
from edge_server.plugins.language.engines.model_size import LlmSize

ToolFormat: TypeAlias = Literal["hermes", "llama3_json", "mistral", "pythonic", "deepseek_v3", "gemma4", "openai"]
"""How a model writes its calls; the names are those of vLLM's `--tool-call-parser`.

- `hermes` (Hermes, Qwen, GLM): `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, with text around it. Newer
  models of Qwen write `<function=f><parameter=x>...</parameter></function>` between the tags, GLM 4.5 and newer
  `f<arg_key>x</arg_key><arg_value>...</arg_value>`.
- `llama3_json` (Llama 3): an answer that begins with `{"name": "f", "parameters": {...}}`; `;` between two calls.
- `mistral` (Mistral, also Granite 3 and Phi-4-mini): an answer that is a list, `[{"name": "f", "arguments": {...}}]`,
  after a tag that is a special token in most vocabularies, so that it is not in the text. Newer models of Mistral
  write `[TOOL_CALLS]f[ARGS]{...}` for each call, the oldest of these with an id of nine characters after the name.
- `pythonic` (LFM2, Llama 4): an answer that is a list in Python's syntax, `[f(x="a"), g()]`.
- `deepseek_v3` (DeepSeek R1, V3, V3.1): calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, or as
  `hermes`.
- `gemma4` (Gemma 4, FunctionGemma): `<|tool_call>call:f{x:<|"|>a<|"|>,n:1}<tool_call|>`, or the same notation between
  `<start_function_call>` and `<end_function_call>`.
- `openai` (gpt-oss): messages to `functions.f`; see `text.answer_parser`.
"""

_TOKENS_PER_SEQUENCE = 1024
"""Tokens for which each sequence gets room in the KV cache, if the configuration says nothing."""


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """Parameters under the names of vLLM and OpenVINO GenAI.

    - `max_num_seqs` (8): most sequences that one step continues.
    - `max_num_batched_tokens` (256): most tokens of one step. A longer prompt is read in several steps.
    - `num_kv_blocks`, or `kv_cache_mb`: size of the KV cache. By default 1,024 tokens for each sequence, at most the
      model's context.
    - `max_context`: most tokens of a prompt and its answer. By default the model's, 0 if its files do not say it.
    - `enable_prefix_caching` (true): equal beginnings of prompts are computed once.
    - `threads` (0: the engine's choice).
    - `deterministic` (false): compute in f32, so that a text never depends on what shares its batch.
    - `max_queue_size` (64): most requests that wait for room. Further ones are refused.
    - `tool_call_parser`: how the model writes calls, see ToolFormat. By default what the chat template shows.
    - `prompt_lookup` (false): guess the next tokens where the text repeats a part of itself or of the prompt.
    - `draft_model`: a smaller model beside the model, that guesses the next tokens: a GGUF file for llama.cpp, the
      folder of an export for OpenVINO GenAI, which then caches no prefixes.
    - `num_speculative_tokens` (4): most tokens that are guessed at a time; 0 without any of the two.
    - `gpu_layers` (0: all on a GPU, none on the CPU): layers that llama.cpp computes on the instance's GPU.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    max_context: int
    enable_prefix_caching: bool
    threads: int
    is_deterministic: bool
    max_queue_size: int
    tool_call_parser: ToolFormat | None = None
    prompt_lookup: bool = False
    draft_model: str = ""
    num_speculative_tokens: int = 0
    gpu_layers: int = 0


MAX_SPECULATIVE_TOKENS = 16

DEFAULT_MAX_NUM_SEQS = 8
_MAX_DIGITS = 6


def timed_choice(version_dir: Path, parameters: Mapping[str, str]) -> tuple[str, int]:
    """Return the kind of files beside a GGUF file that only llama.cpp can use, and the configured `max_num_seqs`.

    "" for no such files: then measured times choose the engine.
    """
    stated = parameters.get("max_num_seqs", "")
    # The load refuses another text.
    at_once = int(stated) or 1 if stated.isdecimal() and len(stated) <= _MAX_DIGITS else DEFAULT_MAX_NUM_SEQS
    if (version_dir / "adapters").is_dir():
        return "LoRA adapters", at_once
    return "a projector for pictures" if any(version_dir.glob("mmproj*.gguf")) else "", at_once


PROCESS_BYTES = 128 << 20
"""Of the child process with its libraries and a model without weights: 124.6 MiB at the most, on a processor without
AVX-512."""
_ACTIVATION_BYTES_PER_NUMBER = 40
"""Of one token in a step, for each number between two layers: the widest layer has several times as many, in f32."""
_CONTEXT_BYTES_PER_NUMBER = 7
"""Of one token of the longest sequence, for each number between two layers, apart from the KV cache. Measured with
SmolLM2-135M and a model of five times its layers: 4 kB a token with both."""


def memory_parts(settings: LlmSettings, size: LlmSize, block_tokens: int) -> dict[str, int]:
    """Return the memory of a model at work in bytes, by what takes it."""
    cached_tokens = settings.num_kv_blocks * block_tokens
    longest = min(settings.max_context or cached_tokens, cached_tokens)
    return {
        "process": PROCESS_BYTES,
        "weights": size.weight_bytes,
        "KV cache": cached_tokens * size.bytes_per_token,
        "activations": size.width
        * (settings.max_num_batched_tokens * _ACTIVATION_BYTES_PER_NUMBER + longest * _CONTEXT_BYTES_PER_NUMBER),
    }


def read_settings(model: str, parameters: Mapping[str, str], size: LlmSize, block_tokens: int) -> LlmSettings:
    """Return the settings. Raises LoadError for a value out of range."""

    def number(key: str, default: int, least: int = 1) -> int:
        return whole_number(model, parameters, key, default, least)

    max_num_seqs = number("max_num_seqs", DEFAULT_MAX_NUM_SEQS)
    max_context = number("max_context", size.context)
    if size.context and max_context > size.context:
        raise LoadError(
            f"model '{model}': parameter max_context: expected 1 to {size.context}, the model's context, "
            f"got {max_context}"
        )
    default_tokens = max_num_seqs * min(max_context or _TOKENS_PER_SEQUENCE, _TOKENS_PER_SEQUENCE)
    blocks = _kv_blocks(model, parameters, size, block_tokens, default_tokens)
    parser = parameters.get("tool_call_parser")
    if parser is not None and parser not in get_args(ToolFormat):
        raise LoadError(
            f"model '{model}': parameter tool_call_parser: expected {' or '.join(get_args(ToolFormat))}, got "
            f"'{parser[:80]}'"
        )
    prompt_lookup, draft_model, guessed_count = _speculation(model, parameters)
    return LlmSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=number("max_num_batched_tokens", 256),
        num_kv_blocks=blocks,
        max_context=max_context,
        enable_prefix_caching=yes_or_no(model, parameters, "enable_prefix_caching", True),
        threads=number("threads", 0, 0),
        is_deterministic=yes_or_no(model, parameters, "deterministic", False),
        max_queue_size=number("max_queue_size", 64, 0),
        tool_call_parser=cast("ToolFormat | None", parser),
        prompt_lookup=prompt_lookup,
        draft_model=draft_model,
        num_speculative_tokens=guessed_count,
        gpu_layers=number("gpu_layers", 0),
    )


def _kv_blocks(model: str, parameters: Mapping[str, str], size: LlmSize, block_tokens: int, default_tokens: int) -> int:
    """Return the number of blocks of the KV cache. Raises LoadError."""
    if "num_kv_blocks" in parameters and "kv_cache_mb" in parameters:
        raise LoadError(f"model '{model}': parameters num_kv_blocks and kv_cache_mb: expected one of them, got both")
    if "kv_cache_mb" not in parameters:
        return whole_number(model, parameters, "num_kv_blocks", -(-default_tokens // block_tokens), 1)
    if not size.bytes_per_token:
        raise LoadError(
            f"model '{model}': parameter kv_cache_mb: the model's files do not say how large a block of the KV "
            "cache is; set num_kv_blocks"
        )
    block_bytes = size.bytes_per_token * block_tokens
    blocks = whole_number(model, parameters, "kv_cache_mb", 0, 1) * 1_000_000 // block_bytes
    if blocks < 1:
        raise LoadError(
            f"model '{model}': parameter kv_cache_mb: expected at least {block_bytes / 1e6:.1f}, one block, "
            f"got {parameters['kv_cache_mb']}"
        )
    return blocks


def _speculation(model: str, parameters: Mapping[str, str]) -> tuple[bool, str, int]:
    """Return whether the prompt gives guesses of the next tokens, the folder of the model that does ("": none), and how
    many are guessed at once. Raises LoadError."""
    prompt_lookup = yes_or_no(model, parameters, "prompt_lookup", False)
    draft_model = parameters.get("draft_model", "")
    if prompt_lookup and draft_model:
        raise LoadError(f"model '{model}': parameters prompt_lookup and draft_model: expected one of them, got both")
    if draft_model in (".", "..") or "/" in draft_model:
        raise LoadError(f"model '{model}': parameter draft_model: expected a name in the model's folder, got "
                        f"'{draft_model[:80]}'")  # fmt: skip
    key, guesses = "num_speculative_tokens", prompt_lookup or bool(draft_model)
    count = whole_number(model, parameters, key, 4, 1) if guesses else 0
    if count > MAX_SPECULATIVE_TOKENS or (key in parameters and not count):
        raise LoadError(
            f"model '{model}': parameter {key}: expected 1 to {MAX_SPECULATIVE_TOKENS}, with prompt_lookup or "
            f"draft_model, got {parameters[key][:20]}"
        )
    return prompt_lookup, draft_model, count
