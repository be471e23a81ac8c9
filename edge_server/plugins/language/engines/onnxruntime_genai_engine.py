"""Token engine on ONNX Runtime GenAI, on the CPU: adds and removes sequences, and computes their next tokens.

Loading a model holds the GIL, 0.75 s for 293 MB, so this runs in a child process; see `backend`. Checked against
onnxruntime-genai 0.18.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.runtime_errors import import_runtime, message_line
from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.settings import LlmSettings
from edge_server.plugins.language.engines.token_engine import (
    NO_VARIABLES,
    ChatMessage,
    EngineStats,
    FinishReason,
    Sampling,
    TokenEvent,
)
from edge_server.plugins.language.text.text_request import DEFAULT_SAMPLING

log = logging.getLogger(__name__)

_MAX_BATCH_ROWS = 4
"""Sequences that the library computes together on a CPU. Its option max_batch_size does not change this number."""

_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
"""Options of llguidance for JSON without white space: github.com/guidance-ai/llguidance, docs/json_schema.md."""

_PLAIN_TEXT = re.compile(r"[A-Za-z0-9_-]*")


class _Batch:
    """Sequences that are computed together, on an Engine of the library that has no others."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.events = engine.create_event_buffer(2 * _MAX_BATCH_ROWS)
        self.requests: dict[int, Any] = {}
        """The library's request of each sequence that has not ended."""
        self.prompt_tokens = 0
        """Of all prompts, which the first step reads together."""
        self.row_tokens = 0
        """Most tokens that a sequence may have in the end."""
        self.reserved_rows = 0
        """Rows of the KV cache; 0 before the batch begins. None is free before the last sequence has ended."""


class OnnxEngine:
    """A model with its tokenizer. See TokenEngine.

    On a CPU the library's Engine takes no sequence into a running batch. So each batch has an Engine of its own, on the
    one model, and a step runs them all: a sequence begins with the next step, not when the others have ended.

    The KV cache of a batch is one piece of memory, reserved when it begins: a row for each sequence, as long as the
    longest may become (prompt and max_tokens). It is free when the last sequence has ended. `total_blocks` is
    `max_num_seqs` times the blocks of `max_context`; `stats` counts reserved rows. A batch waits while its rows would
    exceed `max_num_seqs`.

    The prompts of a batch have `max_context` tokens at most, because the step that reads them takes memory for each.

    The constructor raises whatever the library raises for a folder that it cannot load, and BackendMissing.
    """

    has_logprobs = False
    constraints = frozenset(("json_schema", "choice"))
    max_top_logprobs = 0
    adapters: Sequence[str] = ()
    default_sampling = DEFAULT_SAMPLING
    begin_tokens: Sequence[int] = ()

    def __init__(self, folder: Path, settings: LlmSettings, block_tokens: int, bytes_per_token: int) -> None:
        library = import_runtime("onnxruntime_genai", "TurnOptions", "llm-onnx")
        library.disable_telemetry_events()
        self._library = library
        self.name = f"onnxruntime_genai {library.__version__}"
        config = library.Config(str(folder))
        if settings.threads:
            options = {"session_options": {"intra_op_num_threads": settings.threads}}
            config.overlay(json.dumps({"model": {"decoder": options}}))
        self._model = library.Model(config)
        self._tokenizer = library.Tokenizer(self._model)
        self.chat_template = _chat_template(folder)
        added = json.loads((folder / "tokenizer.json").read_bytes()).get("added_tokens", ())
        self._special_tokens = {int(item["id"]): str(item["content"]) for item in added if item["special"]}
        self.special_texts: Sequence[str] = list(self._special_tokens.values())
        self._hidden_tokens: Set[int] = frozenset()
        """Special tokens that `decode` leaves out itself, because the tokenizer gives all as text."""
        described = json.loads((folder / "genai_config.json").read_bytes())
        self.vocabulary_size = int(described["model"].get("vocab_size", 0))
        self._tokenizer.update_options(add_special_tokens="false", skip_special_tokens="true")
        self._max_rows = settings.max_num_seqs
        self._bytes_per_token = bytes_per_token
        self._batches: list[_Batch] = []
        """In the order of arrival. Those at the end may not have begun."""
        self.block_tokens = block_tokens
        self.total_blocks = settings.num_kv_blocks
        self.max_context = settings.max_context

    def encode(self, text: str) -> Sequence[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def show_special_texts(self, texts: Sequence[str]) -> None:
        self._hidden_tokens = {token for token, text in self._special_tokens.items() if text not in texts}
        self._tokenizer.update_options(skip_special_tokens="false")

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        shown = [[token for token in tokens if token not in self._hidden_tokens] for tokens in sequences]
        return [str(self._tokenizer.decode(np.array(tokens, np.int32))) for tokens in shown]

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        text = json.dumps([dict(message) for message in messages], ensure_ascii=False)
        options: dict[str, str] = {}
        if tools:
            options["tools"] = json.dumps([dict(tool) for tool in tools], ensure_ascii=False)
        if variables:
            # The library has no argument for them.
            options["template_str"] = "".join(map(_set_statement, variables.items())) + self.chat_template
        try:
            return str(self._tokenizer.apply_chat_template(text, add_generation_prompt=True, **options))
        except (RuntimeError, TypeError, ValueError) as error:
            said = message_line(error)
        raise InvalidRequest(f"the model's chat template cannot write these messages: {said}")

    def add(self, sequence_id: int, prompt: Sequence[int], sampling: Sampling) -> None:
        _check_sampling(sampling)
        last = self._batches[-1] if self._batches else None
        if (
            last is None
            or last.reserved_rows
            or len(last.requests) >= min(_MAX_BATCH_ROWS, self._max_rows)
            or last.prompt_tokens + len(prompt) > self.max_context
        ):
            last = _Batch(self._library.Engine(self._model))
        most_tokens = len(prompt) + sampling.max_tokens
        last.requests[sequence_id] = self._create_request(last.engine, prompt, sampling, most_tokens)
        last.row_tokens = max(last.row_tokens, most_tokens)
        last.prompt_tokens += len(prompt)
        if last not in self._batches:
            self._batches.append(last)

    def cancel(self, sequence_id: int) -> None:
        for batch in self._batches:
            if sequence_id in batch.requests:
                batch.requests.pop(sequence_id).close()
        self._remove_ended()

    def step(self) -> list[TokenEvent]:
        self._begin_batches()
        events = [event for batch in self._batches if batch.reserved_rows for event in self._run(batch)]
        self._remove_ended()
        return events

    def wake(self) -> None:
        """Do nothing: a step computes, and never waits."""

    def is_idle(self) -> bool:
        return not self._batches

    def stats(self) -> EngineStats:
        used = sum(batch.reserved_rows * -(-batch.row_tokens // self.block_tokens) for batch in self._batches)
        return EngineStats(used, self.total_blocks, used * self.block_tokens * self._bytes_per_token)

    def close(self) -> None:
        for batch in self._batches:
            for request in batch.requests.values():
                request.close()
        self._batches.clear()

    def _create_request(self, engine: Any, prompt: Sequence[int], sampling: Sampling, most_tokens: int) -> Any:
        """Return the library's request for a sequence. Raises InvalidRequest."""
        try:
            session = self._library.RequestOptions()
            session.set_max_session_tokens(most_tokens)
            request = engine.create_request(options=session)
            options = self._library.TurnOptions(request)
            options.set_max_generated_tokens(sampling.max_tokens)
            options.set_min_generated_tokens(sampling.max_tokens if sampling.ignore_eos else sampling.min_tokens)
            options.set_repetition_penalty(sampling.repetition_penalty)
            # Each is set, because genai_config.json may have other values for those that are not.
            options.set_do_sample(_is_random(sampling))
            if _is_random(sampling):
                options.set_temperature(sampling.temperature)
                options.set_top_p(sampling.top_p)
                options.set_top_k(max(sampling.top_k, 0))
            if sampling.json_schema:
                schema = {**json.loads(sampling.json_schema), "x-guidance": _COMPACT}
                options.set_guidance("json_schema", json.dumps(schema))
            elif sampling.choice:
                options.set_guidance("regex", "|".join(map(_escape_pattern, sampling.choice)))
            request.begin_turn(np.array(prompt, np.int32), options)
        except (RuntimeError, TypeError, ValueError) as error:
            said = message_line(error)
        else:
            return request
        raise InvalidRequest(f"ONNX Runtime GenAI cannot sample like this: {said}")

    def _begin_batches(self) -> None:
        """Reserve rows for waiting batches, in order."""
        free = self._max_rows - sum(batch.reserved_rows for batch in self._batches)
        for batch in self._batches:
            if not batch.reserved_rows:
                if len(batch.requests) > free:
                    break
                batch.reserved_rows = len(batch.requests)
                free -= batch.reserved_rows

    def _run(self, batch: _Batch) -> list[TokenEvent]:
        flags, reasons = self._library.EngineEventFlags, self._library.FinishReason
        sequence_ids = {id(request): sequence_id for sequence_id, request in batch.requests.items()}
        events: list[TokenEvent] = []
        try:
            for event in batch.engine.run(batch.events):
                sequence_id = sequence_ids.get(id(event.request))
                if sequence_id is None:
                    continue
                tokens = (int(event.token),) if event.flags & flags.TOKEN else ()
                if event.flags & flags.FAILED:
                    events.append(TokenEvent(sequence_id, error=event.error_code.name))
                elif event.flags & flags.TURN_FINISHED:
                    is_stop = event.finish_reason in (reasons.EOS, reasons.STOP_STRING)
                    cached = int(event.usage.cached_prompt_tokens)
                    finish: FinishReason = "stop" if is_stop else "length"
                    events.append(TokenEvent(sequence_id, tokens, finish=finish, cached_tokens=cached))
                elif tokens:
                    events.append(TokenEvent(sequence_id, tokens))
        except RuntimeError as error:
            log.warning("a step of ONNX Runtime GenAI failed for %d requests: %s", len(batch.requests), error)
            events = [TokenEvent(sequence_id, error=message_line(error)) for sequence_id in batch.requests]
        for item in events:
            if item.finish or item.error:
                batch.requests.pop(item.sequence_id).close()
        return events

    def _remove_ended(self) -> None:
        self._batches = [batch for batch in self._batches if batch.requests]


def _chat_template(folder: Path) -> str:
    """Return the template that an export keeps beside the tokenizer, "" if there is none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8", "replace")
    try:
        return str(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _set_statement(variable: tuple[str, Any]) -> str:
    """Return Jinja that sets a variable of the template. Raises InvalidRequest for a value that is no plain one."""
    name, value = variable
    if not isinstance(value, bool | int | float) and not (isinstance(value, str) and _PLAIN_TEXT.fullmatch(value)):
        raise InvalidRequest(
            f"chat_template_kwargs.{name}: the backend onnxruntime_genai takes true, false, numbers and texts of "
            "letters, digits, '-' and '_'"
        )
    return f"{{%- set {name} = {json.dumps(value)} -%}}"


def _escape_pattern(text: str) -> str:
    """Return a regular expression for one text, in the syntax of Rust's crate regex."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)


def _is_random(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and sampling.top_k != 1


def _check_sampling(sampling: Sampling) -> None:
    """Raise InvalidRequest for what the library's Engine does not have on a CPU."""
    if sampling.seed is not None and _is_random(sampling):
        missing = "seed", "leave it out, or set temperature to 0"
    elif sampling.min_p and _is_random(sampling):
        missing = "min_p", "use top_p"
    elif sampling.presence_penalty:
        missing = "presence_penalty", "use repetition_penalty"
    elif sampling.frequency_penalty:
        missing = "frequency_penalty", "use repetition_penalty"
    else:
        return
    raise InvalidRequest(f"sampling parameter {missing[0]}: the backend onnxruntime_genai has none; {missing[1]}")
