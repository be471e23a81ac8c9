"""Engines of the tiny model that a test steps by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from edge_server.plugins.language.engines.model_size import read_gguf, read_gguf_for_llama_cpp
from edge_server.plugins.language.engines.settings import read_settings
from edge_server.plugins.language.engines.token_engine import FinishReason, Sampling

TINY = Path(__file__).parents[2] / "data/tiny_llm/tiny.gguf"
CHATS = {
    "count from three": 60,
    "days from Friday": 30,
    "what is the capital of Japan?": 20,
    "say hello": 12,
    "count from nine": 40,
    "what is the capital of France?": 10,
    "give me json": 16,
    "days from Monday": 25,
}
"""Question -> most tokens of the answer."""


def llama_cpp(path: Path = TINY, **parameters: str) -> Any:
    """Return an engine over llama.cpp, on one thread."""
    pytest.importorskip("xllamacpp", reason="needs xllamacpp, of the extra test-all")
    from edge_server.plugins.language.engines.llama_cpp_engine import LlamaCppEngine

    size = read_gguf_for_llama_cpp(path)
    settings = read_settings("tiny", {"threads": "1", **parameters}, size, 32)
    return LlamaCppEngine(path, settings, 32, size.bytes_per_token)


def openvino(path: Path = TINY, **parameters: str) -> Any:
    """Return an engine over OpenVINO GenAI. Equal prompts have equal answers in any batch."""
    pytest.importorskip("openvino_genai", reason="needs openvino-genai, of the extra test-all")
    from edge_server.plugins.language.engines.openvino_engine import OpenVinoEngine

    settings = read_settings("tiny", {"deterministic": "true", **parameters}, read_gguf(TINY), 32)
    return OpenVinoEngine(path, settings)


class Driven:
    """An engine, and the tokens, texts and ends of its sequences by their ids. `errors` are allowed if `may_fail`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.may_fail = False
        self.steps = 0
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}
        self.cached: dict[int, int | None] = {}

    def add(self, question: str, max_tokens: int, **sampling: Any) -> int:
        prompt = self.engine.chat_prompt([{"role": "user", "content": question}], ())
        return self.add_prompt(prompt, max_tokens, **sampling)

    def add_prompt(self, prompt: str, max_tokens: int, **sampling: Any) -> int:
        number = len(self.tokens) + 1
        stated = Sampling(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})
        if stated.constraint:
            stated = dataclasses.replace(stated, engine_grammar=self.engine.write_grammar(stated, str))
        self.engine.add(number, self.engine.encode(prompt), stated)
        self.tokens[number], self.texts[number], self.logprobs[number] = [], "", []
        return number

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.steps += 1
            for event in self.engine.step() or ():
                assert event.sequence_id not in self.finished
                assert self.may_fail or not event.error, event.error
                if event.error:
                    self.errors[event.sequence_id] = event.error
                    continue
                self.tokens[event.sequence_id] += event.tokens
                self.logprobs[event.sequence_id] += event.logprobs
                self.texts[event.sequence_id] += event.text or ""
                if event.finish is not None:
                    self.finished[event.sequence_id] = event.finish
                    self.cached[event.sequence_id] = event.cached_tokens

    def run(self) -> int:
        """Step until the engine is idle. Return the number of steps."""
        before = self.steps
        while not self.engine.is_idle():
            self.step()
        return self.steps - before

    def step_until_tokens(self, number: int) -> None:
        while not self.tokens[number]:
            self.step()

    def text(self, number: int) -> str:
        """Return the text of a sequence so far."""
        return self.texts[number] or str(self.engine.decode([self.tokens[number]])[0])

    def answer(self, question: str, max_tokens: int = 60, **sampling: Any) -> str:
        number = self.add(question, max_tokens, **sampling)
        self.run()
        return self.text(number)
