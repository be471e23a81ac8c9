"""Backend `scripted_llm` of another package: a token engine without a library, which answers with texts from a file.
For tests of everything around an engine.

The file is JSON: `{"answers": {"question": "answer", ...}, "block_tokens": 32, "chat_template": "", "step_s": 0.0,
"hangs_on": "question", "special_texts": ["<|end|>", ...]}`. `step_s` is how long a step takes, and a step with the
question `hangs_on` never ends. A token is one byte of UTF-8; the token 256 ends a text, and those from 257 on are the
special texts. It answers the last line of the prompt that is a question in the file, and repeats the prompt if there is
none. Blocks are counted as a real engine counts them. With the parameter `isolated` it runs in a child process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_server.backends.base import ModelFile, ModelSignature, OpenJob, RequestSession
from edge_server.backends.custom_metrics import REGISTRY
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.backends.runtime_errors import existing_file, open_with_library
from edge_server.errors import InvalidRequest
from edge_server.plugins.language.backend import LlmBackend
from edge_server.plugins.language.engines.model_size import LlmSize
from edge_server.plugins.language.engines.sampling_parser import DEFAULT_SAMPLING
from edge_server.plugins.language.engines.settings import LlmSettings, read_settings
from edge_server.plugins.language.engines.token_engine import (
    NO_VARIABLES,
    ChatMessage,
    EngineStats,
    Place,
    Sampling,
    TokenEvent,
)
from edge_server.plugins.language.text.session import LlmSession

_END, _FIRST_SPECIAL = 256, 257
"""Token that ends a text, and that of the first of `special_texts`."""


class ScriptedLlmBackend(LlmBackend):
    default_filename = "script.json"

    def __init__(self, name: str) -> None:
        self.name = name

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        existing_file(file, self.default_filename)
        return None

    def open(self, job: OpenJob) -> RequestSession:
        if job.spec.parameters.get("isolated"):
            return IsolatedSession(job, open_scripted)
        if job.server is not None:
            job.server.add_metrics(REGISTRY.views)
        return open_scripted(job)


def open_scripted(job: OpenJob) -> RequestSession:
    """Open a script in this process. Raises LoadError."""
    model, path = job.spec.name, job.file.path
    settings = read_settings(model, job.spec.parameters, LlmSize(path.stat().st_size, 0, 0), 32)
    engine = open_with_library(job.file, job.spec.backend, lambda: ScriptedEngine(path, settings))
    labels = {"model": model, "version": str(job.file.version), "model_name": model}
    return LlmSession(model, engine, settings, labels, (lambda: 1.0) if job.server is None else job.server.work_share)


class ScriptedEngine:
    """See TokenEngine. `steps` counts the steps, `added` the sequences that it was given."""

    has_logit_bias = False
    max_top_logprobs = 0
    adapters: Sequence[str] = ()
    default_sampling = DEFAULT_SAMPLING
    begin_tokens: Sequence[int] = ()
    vocabulary_size = 257

    def __init__(self, path: Path, settings: LlmSettings) -> None:
        script = json.loads(path.read_text("utf-8"))
        self.name = "scripted"
        self.block_tokens = int(script.get("block_tokens", 32))
        self.total_blocks = settings.num_kv_blocks
        self.max_context = settings.max_context
        self.chat_template = str(script.get("chat_template", ""))
        self.special_texts: Sequence[str] = script.get("special_texts", [])
        self._shown: Sequence[str] = ()
        self._step_s = float(script.get("step_s", 0.0))
        self._hangs_on = script.get("hangs_on")
        self._hangs = False
        self.steps = 0
        self.added: list[int] = []
        self._answers: dict[str, str] = dict(script["answers"])
        self._most = settings.max_num_seqs
        self._left: dict[int, list[int]] = {}
        """Tokens that each sequence has not given yet, in the order of arrival."""
        self._sampling: dict[int, Sampling] = {}
        self._given: dict[int, int] = {}
        self._prompt_sizes: dict[int, int] = {}

    def encode(self, text: str) -> Sequence[int]:
        tokens: list[int] = []
        while text:
            special = next((item for item in self.special_texts if text.startswith(item)), "")
            tokens += [_FIRST_SPECIAL + self.special_texts.index(special)] if special else text[0].encode()
            text = text[len(special) or 1 :]
        return tokens

    def show_special_texts(self, texts: Sequence[str]) -> None:
        self._shown = texts

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [b"".join(map(self._token_bytes, tokens)).decode("utf-8", "replace") for tokens in sequences]

    def _token_bytes(self, token: int) -> bytes:
        if token < _END:
            return bytes((token,))
        text = self.special_texts[token - _FIRST_SPECIAL] if token >= _FIRST_SPECIAL else ""
        return text.encode() if text in self._shown else b""

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        for message in messages:
            if message["role"] not in ("system", "user", "assistant", "tool"):
                raise InvalidRequest(f"the model's chat template knows no role '{message['role']}'")
        lines = [str(message["content"]) for message in messages]
        return "\n".join([*lines, *(f"{name}={json.dumps(value)}" for name, value in variables.items())])

    def write_grammar(self, sampling: Sampling, place: Place) -> str:
        return ""

    def add(self, sequence_id: int, prompt: Sequence[int], sampling: Sampling) -> None:
        assert sequence_id not in self.added
        self.added.append(sequence_id)
        lines = self.decode([prompt])[0].split("\n")
        text = next((self._answers[line] for line in reversed(lines) if line in self._answers), lines[-1])
        self._hangs |= self._hangs_on in lines
        self._left[sequence_id] = list(self.encode(text))
        self._sampling[sequence_id] = sampling
        self._given[sequence_id] = 0
        self._prompt_sizes[sequence_id] = len(prompt)

    def cancel(self, sequence_id: int) -> None:
        for entries in (self._left, self._sampling, self._given, self._prompt_sizes):
            entries.pop(sequence_id, None)

    def step(self) -> list[TokenEvent]:
        self.steps += 1
        if self._hangs:
            threading.Event().wait()
        if self._step_s:
            time.sleep(self._step_s)
        events = []
        for sequence_id in list(self._left)[: self._most]:
            left = self._left[sequence_id]
            tokens = (left.pop(0),) if left else ()
            self._given[sequence_id] += len(tokens)
            finish = None if left else "stop"
            if finish is None and self._given[sequence_id] >= self._sampling[sequence_id].max_tokens:
                finish = "length"
            events.append(TokenEvent(sequence_id, tokens, (0.0,) * len(tokens), finish))  # type: ignore[arg-type]
            if finish is not None:
                self.cancel(sequence_id)
        return events

    def wake(self) -> None:
        """Do nothing: a step computes, and never waits."""

    def is_idle(self) -> bool:
        return not self._left

    def stats(self) -> EngineStats:
        used = sum(
            -(-(size + self._given[sequence_id]) // self.block_tokens)
            for sequence_id, size in self._prompt_sizes.items()
        )
        return EngineStats(used, self.total_blocks, 0)

    def close(self) -> None:
        self._left.clear()
