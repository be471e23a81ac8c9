"""Session of a language model: generates the texts of all its requests together (in-flight batching) on a token engine.

One thread makes every call of the engine: it adds sequences, removes those of clients that have left, takes a step, and
sends the new text. `execute` checks a request, and returns as soon as that thread has it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np

from edge_server.backends.base import Array, Execution, RequestSession, SessionInfo
from edge_server.backends.isolation.process_channel import one_message
from edge_server.errors import (
    BackendError,
    BadSchema,
    ConstraintFailed,
    ContextTooLong,
    EdgeServerError,
    InvalidRequest,
    QueueFull,
    SessionLost,
)
from edge_server.plugins.language.engines.settings import LlmSettings
from edge_server.plugins.language.engines.token_engine import (
    FinishReason,
    ImageEngine,
    ImagePrompt,
    Sampling,
    TokenEngine,
    TokenEvent,
    schema_place,
)
from edge_server.plugins.language.grammar.constraint import ConstraintCheck, ConstraintFailure
from edge_server.plugins.language.text.adapt_messages import place_reasoning, replace_developer, shorten_call_ids
from edge_server.plugins.language.text.answer_parser import (
    CONTENT_HEAD,
    HARMONY_MARKS,
    AnswerParser,
    HarmonyParser,
    TaggedAnswerParser,
)
from edge_server.plugins.language.text.incremental_detokenizer import IncrementalDetokenizer
from edge_server.plugins.language.text.reasoning import ReasoningParser, find_reasoning_tags
from edge_server.plugins.language.text.requested_template_variables import CONTINUE, template_variables
from edge_server.plugins.language.text.special_tokens import ChatEncoder
from edge_server.plugins.language.text.text_request import TextRequest, read_request
from edge_server.plugins.language.text.tool_calls import (
    ToolCallDelta,
    ToolCallParser,
    call_marks,
    guess_format,
    has_tools,
)
from edge_server.plugins.language.text.tool_prompt import describe_tools
from edge_server.plugins.language.text.vllm_metrics import LlmMetrics

log = logging.getLogger(__name__)

_MIN_SHARE = 0.05
"""Work share below which steps are not slowed further: a stream must not end in a time-out of its client."""
_GUESS_TOKENS = 256
"""Length of an answer that is expected before any has been seen."""
_GUESS_IMAGE_TOKENS = 576
"""Tokens of a picture that are expected before any has been seen: those of LLaVA 1.5."""
_MAX_KNOWN = 128
"""Answers whose lengths are remembered."""
_TAG_TOKENS = 16
"""At the end of a prompt, in which its last tag is looked for."""


class _Generation:
    """One request, from its arrival to its last text."""

    def __init__(
        self,
        execution: Execution,
        request: TextRequest,
        prompt: Sequence[int] | ImagePrompt,
        prompt_tokens: int,
        engine: TokenEngine,
        check: ConstraintCheck | None,
    ) -> None:
        self.execution = execution
        self.check = check
        self.request = request
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        """Until the end with pictures: what is expected."""
        self.sampling = request.sampling
        # JSON has an end of its own, before which a stop string would cut it.
        stop = () if request.sampling.json_schema else request.sampling.stop
        self.text = IncrementalDetokenizer(engine.decode, stop)
        self.sequence_id = 0
        self.arrived_s = time.monotonic()
        self.first_token_s = 0.0
        self.output_tokens = 0
        self.cached_tokens: int | None = None
        self.cumulative_logprob = 0.0
        self.unsent = "" if request.is_stream or not request.has_prompt_in_output else request.prompt or ""
        """Text that is not sent yet: all of it if the request is no stream."""
        self.unsent_tokens = 0
        self.unsent_logprobs: list[dict[str, object]] = []
        self.unsent_tool_calls: list[ToolCallDelta] = []
        self.unsent_reasoning = ""
        self.call_check: ConstraintCheck | None = None
        """Of the calls of functions that are strict."""
        self.calls: list[list[str]] = []
        """Name and arguments of each call so far, for that check."""
        self.answer: AnswerParser | None = None
        self.reasoning_tokens = 0
        """Tokens up to the end of the reasoning, its tags included."""

    def check_text(self, text: str, finish: FinishReason | None) -> None:
        """Raise ConstraintFailure if new text does not fit the constraint."""
        if self.check is None:
            return
        self.check.add(text.rstrip("\ufffd") if finish == "length" else text)  # a character that was cut
        # What the client's own stop string ended may be incomplete.
        if finish == "stop" and not self.text.is_stopped:
            self.check.finish()

    def check_calls(self, deltas: Sequence[ToolCallDelta], finish: FinishReason | None) -> None:
        """Take new parts of calls. At the end, raise ConstraintFailure for a call of a strict function that does not
        fit its schema."""
        if self.call_check is None or self.request.tools is None:
            return
        for delta in deltas:
            if name := delta["function"].get("name"):
                self.calls.append([name, ""])
            self.calls[-1][1] += delta["function"]["arguments"]
        for name, arguments in self.calls if finish == "stop" else ():
            if name in self.request.tools.strict_names:
                self.call_check.add(f'{{"name":{json.dumps(name)},"arguments":{arguments}}}')
                self.call_check.finish()


class LlmSession(RequestSession):
    """Text over a token engine. The session owns the engine and closes it."""

    hands_over = True

    def __init__(
        self,
        model: str,
        engine: TokenEngine,
        settings: LlmSettings,
        labels: dict[str, str],
        work_share: Callable[[], float] = lambda: 1.0,
        device: str = "CPU",
    ) -> None:
        """`work_share` returns the part of its time that the engine may compute; the rest is pauses between steps."""
        self._model = model
        self._engine = engine
        self._image_engine = engine if isinstance(engine, ImageEngine) else None
        self._chat_encoder = ChatEncoder(engine)
        self._settings = settings
        self._metrics = LlmMetrics(labels)
        self._work_share = work_share
        stated, shown = settings.tool_call_parser, guess_format(engine.chat_template)
        self._describes_tools = (
            not has_tools(engine.chat_template)
            and shown in (None, "deepseek_v3")
            and stated in (None, "hermes", "deepseek_v3")
        )
        """Whether the prompt describes tools, because the chat template does not."""
        self._tool_format = stated or shown or ("hermes" if self._describes_tools else None)
        self._reasoning_tags = find_reasoning_tags(engine.chat_template)
        self._has_channels = self._tool_format == "openai"
        marks = {*call_marks(self._tool_format), *(self._reasoning_tags or ())}
        if self._has_channels:
            marks.update(HARMONY_MARKS)
        # Gemma 4 thinks after a token and a word.
        shown_texts = [text for text in engine.special_texts if any(mark.startswith(text) for mark in marks)]
        if shown_texts:
            engine.show_special_texts(shown_texts)
        self._changed = threading.Condition()
        self._waiting: deque[_Generation] = deque()
        self._answer_tokens = _GUESS_TOKENS
        """Length that is expected of an answer."""
        self._image_tokens = _GUESS_IMAGE_TOKENS
        """The same of a picture."""
        self._is_closed = False
        self._running: dict[int, _Generation] = {}
        """By sequence id. Only the engine's thread changes it, and holds `_changed` for it. It alone uses
        everything below."""
        self._sequence_ids = itertools.count(1)
        self._run_number = 0
        self._compiles = False
        """Whether the last step compiled a schema, or came after pictures were read."""
        self._lengths: deque[int] = deque(maxlen=_MAX_KNOWN)
        options = {
            name: str(value) for name, value in dataclasses.asdict(settings).items() if not name.startswith("is_")
        }
        precision = "f32" if settings.is_deterministic else "as the model says"
        self.info = SessionInfo(engine.name, device, precision, options, is_bound=False)
        self._thread = threading.Thread(target=self._run, name=f"{model}-tokens"[:60], daemon=True)
        self._thread.start()

    def execute(self, executions: Sequence[Execution]) -> None:
        for execution in executions:
            try:
                self._accept(execution)
            except EdgeServerError as error:
                execution.fail(error.detached())

    @property
    def run_number(self) -> int:
        """A run is a step of the engine."""
        return self._run_number

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _accept(self, execution: Execution) -> None:
        engine = self._engine
        room = engine.total_blocks * engine.block_tokens
        most = min(room, engine.max_context or room)
        request = read_request(execution.request, engine.default_sampling)
        self._check_abilities(request)
        tools, sampling = request.tools, request.sampling
        check = None
        if sampling.constraint:
            place = partial(schema_place, "json_schema") if tools is None or tools.choice == "auto" else tools.place
            check = ConstraintCheck(sampling, place)
            sampling = dataclasses.replace(sampling, engine_grammar=engine.write_grammar(sampling, place))
        call_check = None
        if tools is not None and tools.strict_names:
            strict = tools.strict()
            call_check = ConstraintCheck(Sampling(0, json_schema=strict.json_schema()), strict.place)
        prompt = self._read_prompt(request)
        if isinstance(prompt, ImagePrompt):
            known_tokens = prompt.text_tokens
            tokens = known_tokens + self._image_tokens * len(prompt.images)
        else:
            known_tokens = tokens = len(prompt)
        if not tokens:
            raise InvalidRequest(f"inference request to model '{self._model}': expected a prompt, got an empty one")
        if request.is_tokenization:
            if request.images:
                raise InvalidRequest(
                    f"inference request to model '{self._model}': expected no pictures: how many tokens they become is "
                    "known when the model has read them"
                )
            ids = engine.encode(prompt.text) if isinstance(prompt, ImagePrompt) else prompt
            answer = {"token_ids": np.array(ids, np.int32), "max_context": np.array([most], np.uint32)}
            execution.send(answer, is_final=True)
            return
        if known_tokens >= most:
            # Clients of OpenAI's and Anthropic's APIs look for the words "prompt is too long".
            raise ContextTooLong(
                f"inference request to model '{self._model}': the prompt is too long: expected less than {most} "
                f"tokens, got {known_tokens}"
            )
        generation = _Generation(execution, request, prompt, tokens, engine, check)
        generation.call_check = call_check
        if request.prompt is None:
            generation.answer = self._start_parser(request, prompt)
        max_tokens = min(sampling.max_tokens or most, most - known_tokens)
        if isinstance(prompt, ImagePrompt):
            max_tokens = sampling.max_tokens and max_tokens
        generation.sampling = dataclasses.replace(
            sampling,
            max_tokens=max_tokens,
            has_logprobs=request.has_logprobs or request.has_cumulative_logprob,
            # One is the chosen token with an engine that tells no other, as the first in vLLM.
            top_logprobs=min(sampling.top_logprobs, engine.max_top_logprobs) if request.has_logprobs else 0,
        )
        self._enqueue(generation)

    def _check_abilities(self, request: TextRequest) -> None:
        """Raise InvalidRequest or BadSchema for what the engine or the chat template cannot do."""
        engine, tools, sampling = self._engine, request.tools, request.sampling
        if tools is not None and tools.choice == "auto" and self._tool_format is None:
            raise InvalidRequest(
                f"inference request to model '{self._model}': its chat template does not show how it calls tools; set "
                "the parameter tool_call_parser"
            )
        if sampling.logit_bias:
            self._check_bias(sampling.logit_bias)
        if sampling.adapter and sampling.adapter not in engine.adapters:
            known = f"it has {', '.join(engine.adapters)}" if engine.adapters else "it has none"
            raise InvalidRequest(
                f"inference request to model '{self._model}': sampling parameter lora_name: no adapter "
                f"'{sampling.adapter[:80]}'; {known}"
            )
        if sampling.top_logprobs > max(engine.max_top_logprobs, 1):
            most_told = max(engine.max_top_logprobs, 1)
            problem = f"expected at most {most_told}, got {sampling.top_logprobs}: {engine.name} does not tell more"
            raise BadSchema("top_logprobs", problem)

    def _enqueue(self, generation: _Generation) -> None:
        """Give a generation to the engine's thread. Raises SessionLost and QueueFull."""
        with self._changed:
            if self._is_closed:
                raise SessionLost(f"model '{self._model}': the session is closed")
            waiting = self._count_waiting_before(generation)
            if waiting is not None and waiting >= self._settings.max_queue_size:
                raise QueueFull(
                    f"inference request to model '{self._model}': {waiting} requests wait for room in the "
                    f"KV cache, and max_queue_size is {self._settings.max_queue_size}"
                )
            self._waiting.append(generation)
            self._changed.notify_all()
            # The engine is closed after the session.
            self._engine.wake()

    def _read_prompt(self, request: TextRequest) -> Sequence[int] | ImagePrompt:
        """Return the prompt in the form that the engine takes. Raises InvalidRequest."""
        engine, vision = self._engine, self._image_engine
        described = request.tools.items if request.tools is not None else ()
        is_constrained = bool(request.sampling.constraint)
        title = f"inference request to model '{self._model}'"
        variables = template_variables(request.variables, engine.chat_template, f"{title}: chat_template_kwargs")
        messages, text = replace_developer(request.messages, engine.chat_template), request.prompt
        if self._describes_tools:
            if described or any(item["role"] == "tool" or item.get("tool_calls") for item in messages):
                messages = describe_tools(messages, described, takes_system=self._takes_system)
            described = ()
        messages = place_reasoning(shorten_call_ids(messages, engine.chat_template), engine.chat_template)
        if vision is None or (vision.takes_tokens and not request.images):
            if request.images:
                raise InvalidRequest(f"{title}: the model takes no pictures")
            if text is None:
                tokens = self._chat_encoder.encode(messages, described, variables)
                # The grammar of a constraint begins with the answer itself.
                needs_head = self._has_channels and is_constrained and not request.variables.get(CONTINUE)
                return [*tokens, *engine.encode(CONTENT_HEAD)] if needs_head else tokens
            tokens, begin = engine.encode(text), list(engine.begin_tokens)
            return tokens if list(tokens[: len(begin)]) == begin else [*begin, *tokens]
        if request.images and text is not None and not vision.has_image_tag(text):
            # A question: without a tag in it the model would not know where the pictures are.
            parts = [{"type": "image"} for _ in request.images]
            messages, text = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], None
        if text is None:
            text = self._chat_encoder.text(messages, described, variables, vision.image_tag)
        return ImagePrompt(text, request.images, len(engine.encode(vision.without_image_tags(text))))

    def _start_parser(self, request: TextRequest, prompt: Sequence[int] | ImagePrompt) -> AnswerParser | None:
        """Return the parser of the answer to a chat, None if the whole answer is content."""
        tools, tags = request.tools, self._reasoning_tags
        calls, reasoning, continues = None, None, request.variables.get(CONTINUE)
        # A grammar leaves no room for reasoning and for channels.
        if not request.sampling.constraint:
            if self._has_channels:
                return None if continues else HarmonyParser(tools)
            if tags is not None:
                if isinstance(prompt, ImagePrompt):
                    end = prompt.text
                else:
                    end = self._engine.decode([prompt[-_TAG_TOKENS:]])[0]
                is_open = end.rstrip().endswith(tags.open)
                if continues:
                    begun = str(request.messages[-1]["content"]).rpartition(tags.open)
                    is_open = bool(begun[1]) and tags.close not in begun[2]
                reasoning = ReasoningParser(tags, is_open=is_open)
        if tools is not None:
            calls = ToolCallParser(tools, self._tool_format)
        return None if calls is None and reasoning is None else TaggedAnswerParser(reasoning, calls)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the chat template writes what the system says."""
        mark = "qxzv"
        try:
            chat = [{"role": "system", "content": mark}, {"role": "user", "content": ""}]
            return mark in self._engine.chat_prompt(chat, ())
        except InvalidRequest:
            return False

    def _check_bias(self, bias: Sequence[tuple[int, float]]) -> None:
        """Raise BadSchema if the engine has no biases, or no such token."""
        if not self._engine.has_logit_bias:
            raise BadSchema("logit_bias", f"{self._engine.name} does not have it")
        most = self._engine.vocabulary_size - 1
        unknown = next((token for token, _ in bias if token > most), None)
        if unknown is not None:
            raise BadSchema("logit_bias", f"expected tokens from 0 to {most}, got {unknown}")

    def _count_waiting_before(self, generation: _Generation) -> int | None:
        """Return how many requests wait for room before a new one, None if there is room for it.

        Call it with `_changed` held.
        """
        used = sum(map(self._expected_blocks, self._running.values()))
        for place, item in enumerate((*self._waiting, generation)):
            blocks = self._expected_blocks(item)
            if used and used + blocks > self._engine.total_blocks:
                return len(self._waiting) - place
            used += blocks
        return None

    def _expected_blocks(self, generation: _Generation) -> int:
        """Return the blocks of the KV cache that a request will probably need."""
        answer = min(generation.sampling.max_tokens or self._answer_tokens, self._answer_tokens)
        return -(-(generation.prompt_tokens + answer) // self._engine.block_tokens)

    # -- the engine's thread

    def _run(self) -> None:
        error: EdgeServerError = SessionLost(f"model '{self._model}': the session is closed")
        try:
            while self._wait_for_work():
                self._remove_cancelled()
                self._admit()
                if not self._engine.is_idle():
                    took_s = self._step()
                    self._pause(took_s)
                self._metrics.set_load(len(self._running), len(self._waiting), self._engine.stats())
        except Exception as failure:
            log.exception("model '%s': the token engine failed", self._model)
            error = SessionLost(f"model '{self._model}': the token engine failed: {failure}")
        with self._changed:
            self._is_closed = True
            left = [*self._running.values(), *self._waiting]
            self._waiting.clear()
            self._running.clear()
        for generation in left:
            generation.execution.fail(error)
        self._engine.close()
        self._metrics.close()
        # An error that a caller keeps holds this session by its traceback; the series must still disappear.
        del self._metrics

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do. Return False once the session is closed."""
        with self._changed:
            # A cancelled sequence keeps its blocks until the next step, so the engine may have work without requests.
            self._changed.wait_for(
                lambda: self._is_closed or self._waiting or self._running or not self._engine.is_idle()
            )
            return not self._is_closed

    def _remove_cancelled(self) -> None:
        """Remove the requests of clients that have left: a waiting one frees its place in the queue, too."""
        with self._changed:
            left = [item for item in self._waiting if item.execution.is_cancelled()]
            for generation in left:
                self._waiting.remove(generation)
        for generation in left:
            generation.execution.finish()
        for generation in [item for item in self._running.values() if item.execution.is_cancelled()]:
            self._engine.cancel(generation.sequence_id)
            self._end(generation)
            generation.execution.finish()

    def _admit(self) -> None:
        """Add waiting requests, in order, while the KV cache has room for what all are expected to need.

        Those with a constraint, which the next step compiles, or with pictures, which the engine reads now, are added
        one at a time and not before two steps in a row: so a request beside them waits for one at most.
        """
        may_compile, self._compiles = not self._compiles, False
        engine = self._engine
        with self._changed:
            waiting = list(self._waiting)
        used = sum(map(self._expected_blocks, self._running.values()))
        for generation in waiting:
            blocks = self._expected_blocks(generation)
            if self._running and used + blocks > engine.total_blocks:
                break
            if generation.sampling.constraint or generation.request.images:
                if not may_compile:
                    continue
                may_compile, self._compiles = False, True
            generation.sequence_id = next(self._sequence_ids)
            with self._changed:
                self._waiting.remove(generation)
                self._running[generation.sequence_id] = generation
            try:
                self._add(generation)
            except EdgeServerError as error:
                self._end(generation)
                generation.execution.fail(error.detached())
                continue
            used += blocks
            self._metrics.begin(time.monotonic() - generation.arrived_s)
            if not generation.request.images:
                self._metrics.count_prompt(generation.prompt_tokens)

    def _add(self, generation: _Generation) -> None:
        """Add a request to the engine. Raises InvalidRequest."""
        if isinstance(generation.prompt, ImagePrompt):
            assert self._image_engine is not None
            self._image_engine.add_image_prompt(generation.sequence_id, generation.prompt, generation.sampling)
        else:
            self._engine.add(generation.sequence_id, generation.prompt, generation.sampling)

    def _pause(self, took_s: float) -> None:
        """Wait after a step of `took_s` as long as the work share asks for."""
        share = self._work_share()
        if share < 1.0:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, took_s * (1 / max(share, _MIN_SHARE) - 1))

    def _step(self) -> float:
        """Take a step, and send the new text. Return the seconds of the step."""
        reads_prompt = any(not item.output_tokens for item in self._running.values())
        begin_s = time.monotonic()
        self._run_number |= 1  # a step that goes on is the same run
        events = self._engine.step()
        took_s = time.monotonic() - begin_s
        self._metrics.count_step(took_s, reads_prompt=reads_prompt)
        if events is None:
            return took_s
        self._run_number += 1
        found = [(self._running.get(event.sequence_id), event) for event in events]
        running = [(generation, event) for generation, event in found if generation is not None]
        to_decode = [item.text.add_tokens(event.tokens) for item, event in running if event.text is None]
        texts = self._engine.decode(to_decode) if to_decode else ()
        with one_message():
            self._send_results(running, texts)
        return took_s

    def _send_results(self, running: Sequence[tuple[_Generation, TokenEvent]], texts: Sequence[str]) -> None:
        decoded = iter(texts)
        for generation, event in running:
            text = next(decoded) if event.text is None else event.text
            if event.error:
                self._end(generation)
                # A grammar or a picture is the usual cause. See OpenVinoEngine.step.
                has_cause = generation.sampling.constraint or generation.request.images
                kind = InvalidRequest if has_cause else BackendError
                generation.execution.fail(
                    kind(f"inference request to model '{self._model}': the token engine failed on it: {event.error}")
                )
                continue
            self._continue(generation, event, text)

    def _continue(self, generation: _Generation, event: TokenEvent, decoded: str) -> None:
        """Take the new tokens of a sequence with their text, and send what is certain."""
        self._count(generation, event)
        finish = event.finish
        add_text = generation.text.add_text if event.text is None else generation.text.add_decoded
        text = add_text(decoded, is_last=finish is not None)
        if generation.text.is_stopped:
            if finish is None:
                self._engine.cancel(generation.sequence_id)
            finish = "stop"
        try:
            generation.check_text(text, finish)
            if generation.answer is not None:
                was_reasoning = generation.answer.is_reasoning
                reasoning, text, calls = generation.answer.add(text, is_last=finish is not None)
                generation.check_calls(calls, finish)
                generation.unsent_reasoning += reasoning
                generation.unsent_tool_calls += calls
                if was_reasoning or reasoning or generation.answer.is_reasoning:
                    generation.reasoning_tokens = generation.output_tokens
        except ConstraintFailure as failure:
            self._fail_constraint(generation, failure, finish)
            return
        generation.unsent += text
        if finish is None:
            has_news = generation.unsent or generation.unsent_tool_calls or generation.unsent_reasoning
            if generation.request.is_stream and has_news:
                self._send(generation, None)
            return
        self._finish(generation, event, finish)

    def _count(self, generation: _Generation, event: TokenEvent) -> None:
        """Count the new tokens of a sequence, and keep their probabilities until they are sent."""
        if event.tokens and not generation.output_tokens:
            generation.first_token_s = time.monotonic()
            self._metrics.first_token(generation.first_token_s - generation.arrived_s)
        generation.output_tokens += len(event.tokens)
        generation.unsent_tokens += len(event.tokens)
        generation.cumulative_logprob += sum(event.logprobs)
        if generation.request.has_logprobs:
            tops = event.top_logprobs or [()] * len(event.tokens)
            token_texts = event.token_texts or self._engine.decode([[token] for token in event.tokens])
            generation.unsent_logprobs += [
                {
                    "token": token_text,
                    "token_id": token,
                    "logprob": logprob,
                    **({"top_logprobs": top} if top else {}),
                }
                for token, token_text, logprob, top in zip(
                    event.tokens, token_texts, event.logprobs, tops, strict=False
                )
                if token >= 0
            ]
        self._metrics.count_tokens(len(event.tokens))
        generation.cached_tokens = event.cached_tokens

    def _finish(self, generation: _Generation, event: TokenEvent, finish: FinishReason) -> None:
        """End a sequence: learn from its lengths, and send the last response."""
        self._end(generation)
        if isinstance(generation.prompt, ImagePrompt) and generation.prompt.images:
            if event.prompt_tokens is not None:
                generation.prompt_tokens = event.prompt_tokens
                found = (event.prompt_tokens - generation.prompt.text_tokens) // len(generation.prompt.images)
                self._image_tokens = max(found, 1)
            self._metrics.count_prompt(generation.prompt_tokens)
        if generation.output_tokens == 0 and finish == "length":
            generation.execution.fail(
                QueueFull(f"inference request to model '{self._model}': the KV cache had no room for its prompt")
            )
            return
        self._lengths.append(generation.output_tokens)
        self._answer_tokens = sorted(self._lengths)[len(self._lengths) * 9 // 10]
        ended_s = time.monotonic()
        self._metrics.end(generation.arrived_s, generation.first_token_s, ended_s, generation.output_tokens, finish)
        self._send(generation, finish)

    def _fail_constraint(
        self, generation: _Generation, failure: ConstraintFailure, finish: FinishReason | None
    ) -> None:
        """End a request whose text does not obey it with an error."""
        if finish is None:
            self._engine.cancel(generation.sequence_id)
        self._end(generation)
        self._metrics.count_constraint_failure()
        problem = f"constraint_failed: {self._engine.name} wrote what does not obey the request: {failure}"
        generation.execution.fail(ConstraintFailed(f"inference request to model '{self._model}': {problem}"))

    def _send(self, generation: _Generation, finish: FinishReason | None) -> None:
        request = generation.request
        has_reasoning = generation.answer is not None and generation.answer.has_reasoning
        outputs: dict[str, Array] = {"text_output": _texts(generation.unsent)}
        if request.has_finish_reason:
            has_called = generation.answer is not None and generation.answer.call_count
            outputs["finish_reason"] = _texts("tool_calls" if finish == "stop" and has_called else finish or "")
        if request.has_input_count:
            outputs["num_input_tokens"] = np.array([generation.prompt_tokens], np.uint32)
            if generation.cached_tokens is not None:
                outputs["num_cached_tokens"] = np.array([generation.cached_tokens], np.uint32)
        if request.has_output_count:
            outputs["num_output_tokens"] = np.array([generation.unsent_tokens], np.uint32)
            if finish is not None and has_reasoning:
                outputs["num_reasoning_tokens"] = np.array([generation.reasoning_tokens], np.uint32)
        if request.has_logprobs:
            outputs["logprobs"] = _texts(json.dumps(generation.unsent_logprobs))
        if request.has_cumulative_logprob:
            outputs["cumulative_logprob"] = np.array([generation.cumulative_logprob], np.float32)
        if request.tools is not None:
            outputs["tool_calls"] = _texts(json.dumps(generation.unsent_tool_calls))
        if has_reasoning:
            outputs["reasoning_content"] = _texts(generation.unsent_reasoning)
        generation.unsent, generation.unsent_reasoning, generation.unsent_tokens = "", "", 0
        generation.unsent_logprobs, generation.unsent_tool_calls = [], []
        generation.execution.send(outputs, is_final=finish is not None)

    def _end(self, generation: _Generation) -> None:
        with self._changed:
            del self._running[generation.sequence_id]


def _texts(*texts: str) -> Array:
    return np.array([text.encode() for text in texts], object)
