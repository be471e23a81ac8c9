"""Token engine on OpenVINO GenAI's ContinuousBatchingPipeline: adds and removes sequences, and computes their next
tokens.

A step holds the GIL for as long as it computes, so this runs only in a child process; see `backend`. Checked against
openvino-genai 2026.4.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.openvino.lean_import import import_openvino
from edge_server.backends.runtime_errors import import_runtime, message_line
from edge_server.cgroup_limits import limited_cores, usable_cores
from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.generation_config import read_generation_config
from edge_server.plugins.language.engines.openvino_tokenizer import open_tokenizer
from edge_server.plugins.language.engines.settings import LlmSettings
from edge_server.plugins.language.engines.token_engine import (
    NO_VARIABLES,
    ChatMessage,
    EngineStats,
    Sampling,
    TokenEvent,
)
from edge_server.plugins.language.grammar.openvino_constraint import openvino_grammar

log = logging.getLogger(__name__)

_BLOCK_TOKENS = 32
"""Tokens of a KV block on a CPU."""

_LOOKED_UP_TOKENS = 3
"""Most last tokens of a text that are looked for in it."""

_MAX_FAILED_STEPS = 4
"""Failures in a row after which the pipeline is given up. A failure is usually one bad request's, and ends with it."""

_SOURCE_PATH = re.compile(r"(Exception from |Check '.*' failed at |\[[\d:]+\] )?/?\S+\.(cpp|cc|hpp|h):\d+:?\s*")
_MAX_MESSAGE = 2000
"""Characters of a message that are read: looking for paths in it takes the square of them, and users choose some."""


class OpenVinoEngine:
    """A pipeline with its tokenizer. See TokenEngine.

    `path` is a GGUF file, or the folder of an export; see `read_generation_config` for the sampling defaults. The
    constructor raises whatever the library raises for a file that it cannot load, BadModelFile, and BackendMissing.
    """

    begin_tokens: Sequence[int] = ()
    has_logit_bias = False
    max_top_logprobs = 0
    write_grammar = staticmethod(openvino_grammar)
    # OpenVINO GenAI 2026.4 applies adapters to all running sequences alike.
    adapters: Sequence[str] = ()

    def __init__(self, path: Path, settings: LlmSettings) -> None:
        openvino = import_openvino()
        library = import_runtime("openvino_genai", "ContinuousBatchingPipeline", "llm")
        self._library = library
        self._tensor = openvino.Tensor
        self.name = f"openvino_genai {library.get_version().split('-')[0]}"
        scheduler = library.SchedulerConfig()
        scheduler.num_kv_blocks = settings.num_kv_blocks
        scheduler.max_num_seqs = settings.max_num_seqs
        scheduler.max_num_batched_tokens = settings.max_num_batched_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = settings.enable_prefix_caching
        options: dict[str, Any] = {}
        if threads := settings.threads or limited_cores():
            options["INFERENCE_NUM_THREADS"] = threads
        if 1 in (threads, usable_cores()):
            # In bf16 (AMX) OpenVINO 2026.4 divides by half its threads, and the process ends by SIGFPE.
            options["INFERENCE_PRECISION_HINT"] = "f32"
        if settings.is_deterministic:
            # With the defaults of a CPU (bf16, dynamic quantization) a text depends on what shares its batch.
            options |= {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        if settings.draft_model:
            folder = path if path.is_dir() else path.parent
            options["draft_model"] = library.draft_model(str(folder / settings.draft_model), "CPU", **options)
        if settings.prompt_lookup:
            options["prompt_lookup"] = True
        self._guessed_tokens = settings.num_speculative_tokens
        self._looked_up_tokens = _LOOKED_UP_TOKENS if settings.prompt_lookup else 0
        self._tokenizer = open_tokenizer(library, path)
        self._pipeline = library.ContinuousBatchingPipeline(str(path), self._tokenizer, scheduler, "CPU", **options)
        generation = read_generation_config(path)
        self.default_sampling = generation.sampling
        # Also the tokenizer's own: a model may end a text with any.
        self._end_tokens = generation.end_tokens | {self._tokenizer.get_eos_token_id()} - {-1}
        tokens = sorted(self._tokenizer.get_vocab().values())
        self.vocabulary_size = len(tokens)
        self._special_tokens = self._find_special_texts(tokens)
        self.special_texts: Sequence[str] = list(self._special_tokens.values())
        self._hidden_tokens: Set[int] = frozenset()
        """Special tokens that `decode` leaves out itself, because the tokenizer gives all as text."""
        self.chat_template = str(self._tokenizer.chat_template)
        self._handles: dict[int, tuple[Any, Set[int]]] = {}
        """Handle of each sequence in the pipeline, and the tokens that end it. Dropping a handle would cancel it."""
        self._structured: set[int] = set()
        """Sequences with a grammar that have no token yet. A bad grammar makes every step fail."""
        self.block_tokens = _BLOCK_TOKENS
        self.total_blocks = settings.num_kv_blocks
        self.max_context = settings.max_context

    def encode(self, text: str) -> Sequence[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).input_ids
        return [int(token) for token in ids.data.ravel()]

    def show_special_texts(self, texts: Sequence[str]) -> None:
        self._hidden_tokens = {token for token, text in self._special_tokens.items() if text not in texts}

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        if self._hidden_tokens:
            # One call for each: the library fills up shorter sequences with a special token.
            shown = [[token for token in tokens if token not in self._hidden_tokens] for tokens in sequences]
            return [
                str(self._tokenizer.decode(tokens, skip_special_tokens=False)) if tokens else "" for tokens in shown
            ]
        some = [list(tokens) for tokens in sequences if tokens]
        texts = iter(self._tokenizer.decode(some, skip_special_tokens=True) if some else ())
        return [str(next(texts)) if tokens else "" for tokens in sequences]

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        chat = [dict(message) for message in messages]
        described = [dict(tool) for tool in tools] or None
        context = dict(variables)
        opens_answer = context.pop("add_generation_prompt", True)
        try:
            return str(
                self._tokenizer.apply_chat_template(chat, opens_answer, tools=described, extra_context=context or None)
            )
        except (RuntimeError, TypeError, ValueError) as error:
            said = _without_source_path(error)
        raise InvalidRequest(f"the model's chat template cannot write these messages: {said}")

    def add(self, sequence_id: int, prompt: Sequence[int], sampling: Sampling) -> None:
        ids = self._tensor(np.array([prompt], np.int64))
        self._start(sequence_id, sampling, self._config(sampling), ids)

    def _start(self, sequence_id: int, sampling: Sampling, config: Any, *prompt: Any) -> None:
        """Add a sequence. Raises InvalidRequest with the library's message."""
        try:
            config.validate()
            end_tokens = frozenset() if sampling.ignore_eos else self._end_tokens
            self._handles[sequence_id] = self._pipeline.add_request(sequence_id, *prompt, config), end_tokens
        except (RuntimeError, TypeError, ValueError) as error:
            said = _without_source_path(error)
        else:
            if sampling.constraint:
                self._structured.add(sequence_id)
            return
        raise InvalidRequest(f"OpenVINO GenAI cannot sample like this: {said}")

    def cancel(self, sequence_id: int) -> None:
        found = self._handles.pop(sequence_id, None)
        self._structured.discard(sequence_id)
        if found is not None:
            found[0].cancel()

    def step(self) -> list[TokenEvent]:
        events = self._step_without_offenders()
        for sequence_id, (handle, end_tokens) in list(self._handles.items()):
            event = self._read(sequence_id, handle, end_tokens)
            if event is not None:
                events.append(event)
        return events

    def wake(self) -> None:
        """Do nothing: a step computes, and never waits."""

    def is_idle(self) -> bool:
        return not self._pipeline.has_non_finished_requests()

    def stats(self) -> EngineStats:
        metrics = self._pipeline.get_metrics()
        used = round(metrics.cache_usage / 100 * self.total_blocks)
        return EngineStats(used, self.total_blocks, int(metrics.kv_cache_size_in_bytes))

    def close(self) -> None:
        for handle, _ in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def _find_special_texts(self, tokens: Sequence[int]) -> dict[int, str]:
        """Return the tokens that decoding can leave out, with their texts."""
        each = [[token] for token in tokens]
        shown = self._tokenizer.decode(each, skip_special_tokens=True)
        texts = self._tokenizer.decode(each, skip_special_tokens=False)
        found = zip(tokens, texts, shown, strict=True)
        return {token: str(text) for token, text, rest in found if text != rest}

    def _config(self, sampling: Sampling) -> Any:
        config = self._library.GenerationConfig()
        if sampling.max_tokens:
            config.max_new_tokens = sampling.max_tokens
        config.min_new_tokens = sampling.min_tokens
        config.ignore_eos = sampling.ignore_eos
        config.stop_token_ids = set(self._end_tokens)
        config.logprobs = 1
        if self._guessed_tokens:
            config.num_assistant_tokens = self._guessed_tokens
            config.max_ngram_size = self._looked_up_tokens
        config.do_sample = sampling.temperature > 0
        if config.do_sample:
            config.temperature = sampling.temperature
            config.top_p = sampling.top_p
            config.min_p = sampling.min_p
            if sampling.top_k > 0:
                config.top_k = sampling.top_k
            if sampling.seed is not None:
                config.rng_seed = sampling.seed
        config.repetition_penalty = sampling.repetition_penalty
        config.presence_penalty = sampling.presence_penalty
        config.frequency_penalty = sampling.frequency_penalty
        if sampling.constraint:
            config.structured_output_config = self._library.StructuredOutputConfig(grammar=sampling.engine_grammar)
        return config

    def _read(self, sequence_id: int, handle: Any, end_tokens: Set[int]) -> TokenEvent | None:
        tokens: list[int] = []
        logprobs: list[float] = []
        while handle.can_read():
            # A sequence that the pipeline gave up ends with an empty read.
            for output in handle.read().values():
                tokens += output.generated_ids
                logprobs += output.generated_log_probs
        statuses = self._library.GenerationStatus
        status = handle.get_status()
        if tokens:
            self._structured.discard(sequence_id)
        if status == statuses.RUNNING:
            return TokenEvent(sequence_id, tuple(tokens), tuple(logprobs)) if tokens else None
        del self._handles[sequence_id]
        self._structured.discard(sequence_id)
        if status == statuses.IGNORED:
            # The KV cache is too small for it, as it is alone now.
            return TokenEvent(sequence_id, tuple(tokens), tuple(logprobs), "length")
        is_stopped = bool(tokens) and tokens[-1] in end_tokens
        if is_stopped:
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        return TokenEvent(sequence_id, tuple(tokens), tuple(logprobs), "stop" if is_stopped else "length")

    def _step_without_offenders(self) -> list[TokenEvent]:
        """Take a step. If it fails, remove the sequences that may be the cause, and try again. Return their events.

        One bad grammar makes every step fail, for all sequences, until its own is cancelled. So those with a grammar
        and no token yet are suspected first, then the newest sequence.
        """
        removed: list[TokenEvent] = []
        for attempt in range(_MAX_FAILED_STEPS):
            try:
                self._pipeline.step()
            except (RuntimeError, ValueError, IndexError, OverflowError) as error:  # C++'s exceptions
                said = _without_source_path(error)
            else:
                return removed
            suspects = sorted(self._structured) or (sorted(self._handles)[-1:] if attempt else [])
            log.warning("a step of OpenVINO GenAI failed, and is tried without %d requests: %s", len(suspects), said)
            for sequence_id in suspects:
                self.cancel(sequence_id)
                removed.append(TokenEvent(sequence_id, error=said))
        raise RuntimeError(f"OpenVINO GenAI failed {_MAX_FAILED_STEPS} steps in a row: {said}")


def _without_source_path(error: Exception) -> str:
    """Return the library's message without the source files of the machine that built it."""
    return message_line(RuntimeError(_SOURCE_PATH.sub("", str(error)[:_MAX_MESSAGE])))
