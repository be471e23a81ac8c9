"""Parser of sampling parameters by vLLM's names: refuses those of vLLM, OpenAI, llama.cpp and other servers that are
not supported.

All wires refuse what constrains a text and is not supported, so that no answer looks as if it obeyed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from edge_server.core.json_tensor import JsonTensor
from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.token_engine import Sampling

DEFAULT_MAX_TOKENS = 16
"""Of vLLM."""

DEFAULT_TEMPERATURE = 0.8
"""For models whose files do not say how to sample, as in llama.cpp. With 1, the default of OpenAI and vLLM, the small
models of edge machines wander from the subject."""

DEFAULT_SAMPLING = Sampling(DEFAULT_MAX_TOKENS, temperature=DEFAULT_TEMPERATURE)

_ELSEWHERE = {"max_completion_tokens", "response_format", "tool_choice", "tools"}
"""What constrains a text in OpenAI's API only. As a request parameter it is an error, as all that is unsupported is;
other unknown request parameters are not for the model."""

MAX_TOP_LOGPROBS = 20
"""Of OpenAI."""

_MAX_BIASES = 1024
_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 1024

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # llama.cpp's and ollama's
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "format": (),
    "mirostat": (0,),
    "n_predict": (),
    "num_predict": (),
    "repeat_penalty": (1,),
    "return_progress": (False,),
    "timings_per_token": (False,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    # TensorRT-LLM's and TGI's
    "max_new_tokens": (),
    "stop_words": (),
}
"""Name -> values beside null that ask for nothing."""

SAME_AS: Mapping[str, str] = {
    **dict.fromkeys(
        ("guided_json", "guided_decoding", "structured_outputs", "format", "response_format"), "json_schema"
    ),
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "guided_regex": "regex",
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_completion_tokens"), "max_tokens"),
    "repeat_penalty": "repetition_penalty",
    "stop_words": "stop",
}  # fmt: skip
"""Name -> the sampling parameter that does the same, or comes near it."""


_KNOWN = {
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "stop", "ignore_eos", "json_schema", "choice", "regex", "grammar",
    "stream", "logprobs", "logit_bias", "n", "lora_name",
}  # fmt: skip


def read_sampling(
    values: Mapping[str, Any], title: str, *, is_strict: bool, defaults: Sampling = DEFAULT_SAMPLING
) -> Sampling:
    """Return the sampling parameters; `defaults` where they are missing or null.

    Unknown names are errors if `is_strict`, otherwise those that are known to constrain a text. Raises InvalidRequest.
    """
    unknown = sorted(set(values) - _KNOWN if is_strict else filter(partial(_constrains, values), values))
    if unknown:
        instead = f"; use '{SAME_AS[unknown[0]]}'" if unknown[0] in SAME_AS else ""
        raise InvalidRequest(
            f"{title}: unknown sampling parameter '{unknown[0][:80]}'{instead}; known are {', '.join(sorted(_KNOWN))}"
        )
    given = _ValueReader(values, title)
    if given.whole("n", 1, 1) != 1:
        raise given.error("n", "1; send the request once for each text")
    seed = given.whole("seed", -1, -1, (1 << 63) - 1)  # as in vLLM -1 is none
    if not isinstance(values.get("ignore_eos", False), bool):
        raise given.error("ignore_eos", "true or false")
    return Sampling(
        max_tokens=given.whole("max_tokens", defaults.max_tokens, 0),
        min_tokens=given.whole("min_tokens", 0, 0),
        temperature=given.number("temperature", defaults.temperature, 0.0, 100.0),
        top_p=given.number("top_p", defaults.top_p, 1e-6, 1.0),
        top_k=given.whole("top_k", defaults.top_k, -1),
        min_p=given.number("min_p", defaults.min_p, 0.0, 1.0),
        seed=None if seed == -1 else seed,
        repetition_penalty=given.number("repetition_penalty", defaults.repetition_penalty, 0.01, 100.0),
        presence_penalty=given.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=given.number("frequency_penalty", 0.0, -2.0, 2.0),
        stop=given.stop(),
        ignore_eos=bool(values.get("ignore_eos", False)),
        top_logprobs=given.whole("logprobs", 0, 0, MAX_TOP_LOGPROBS),
        logit_bias=_read_bias(values, title),
        adapter=given.text("lora_name", "the name of an adapter"),
        **given.constraint(),
    )


class _ValueReader:
    """Reads single sampling parameters, each as it must be. The methods raise InvalidRequest."""

    def __init__(self, values: Mapping[str, Any], title: str) -> None:
        self._values = values
        self._title = title

    def error(self, key: str, expected: str) -> InvalidRequest:
        given = str(self._values[key])[:80]
        return InvalidRequest(f"{self._title}: sampling parameter {key}: expected {expected}, got {given!r}")

    def number(self, key: str, default: float, least: float, most: float) -> float:
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, str):  # values of request parameters may be text
            try:
                value = float(value)
            except ValueError:
                raise self.error(key, f"{least:g} to {most:g}") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.error(key, f"{least:g} to {most:g}")
        return value

    def whole(self, key: str, default: int, least: int, most: int = 1 << 31) -> int:
        value = self.number(key, default, least, most)
        if value != math.floor(value):
            raise self.error(key, "a whole number")
        return int(value)

    def text(self, key: str, expected: str) -> str:
        value = self._values.get(key) or ""
        if not isinstance(value, str):
            raise self.error(key, expected)
        return value

    def stop(self) -> tuple[str, ...]:
        """Return the texts that end the answer."""
        stop = self._values.get("stop") or ()
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list | tuple) or not all(isinstance(item, str) for item in stops):
            raise self.error("stop", "a text or a list of texts")
        if len(stops) > _MAX_STOPS or any(len(item) > _MAX_STOP_CHARACTERS for item in stops):
            raise self.error("stop", f"at most {_MAX_STOPS} texts of at most {_MAX_STOP_CHARACTERS} characters")
        return tuple(stops)

    def constraint(self) -> dict[str, Any]:
        """Return the fields of Sampling that constrain the text, of which at most one has a value."""
        schema = self._values.get("json_schema")
        if isinstance(schema, dict):  # an empty one is for any JSON
            schema = json.dumps(schema)
        elif schema and (not isinstance(schema, str) or not isinstance(parse_json_object(schema, self._title), dict)):
            raise self.error("json_schema", "a JSON schema, as an object or its text")
        choice = self._values.get("choice") or ()
        if not isinstance(choice, list | tuple) or not all(isinstance(item, str) and item for item in choice):
            raise self.error("choice", "a list of texts that are not empty")
        found = {
            "json_schema": schema or "",
            "choice": tuple(choice),
            "regex": self.text("regex", "a regular expression"),
            "grammar": self.text("grammar", "rules in GBNF"),
        }
        if sum(map(bool, found.values())) > 1:
            names = "json_schema, choice, regex and grammar"
            raise InvalidRequest(f"{self._title}: expected one of the sampling parameters {names}")
        return found


def _read_bias(values: Mapping[str, Any], title: str) -> tuple[tuple[int, float], ...]:
    """Return `logit_bias`: an object whose names are tokens. Raises InvalidRequest."""
    bias = values.get("logit_bias") or {}
    if not isinstance(bias, dict) or len(bias) > _MAX_BIASES:
        raise InvalidRequest(f"{title}: sampling parameter logit_bias: expected an object of at most {_MAX_BIASES}")
    for token, value in bias.items():
        is_token = isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 10
        if not is_token or isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise InvalidRequest(
                f"{title}: sampling parameter logit_bias: expected tokens with numbers from -100 to 100, got "
                f"{str(token)[:20]!r}: {str(value)[:20]!r}"
            )
    return tuple((int(token), float(value)) for token, value in bias.items())


def _constrains(values: Mapping[str, Any], name: str) -> bool:
    """Return whether a request parameter asks for what no model supports. An empty text asks for nothing."""
    value = values[name]
    return value not in (None, "") and (name in _ELSEWHERE or (name in UNSUPPORTED and value not in UNSUPPORTED[name]))


def parse_json_object(given: str | JsonTensor, title: str) -> dict[str, Any]:
    """Return a JSON object. Raises InvalidRequest for anything else."""
    try:
        value = given.value if isinstance(given, JsonTensor) else json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{title}: expected a JSON object, got an error: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{title}: expected a JSON object, got {type(value).__name__}")
    return value
