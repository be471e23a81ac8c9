"""Scheduler of the questions to vision-language models about pictures of cameras: keeps the newest of each rule, asks
each model one at a time, passes the answers on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from edge_server.core.request_response import Response, SubmittedRequest
from edge_server.errors import BackendError, EdgeServerError, InvalidRequest, NotReady, Throttled
from edge_server.plugins.cameras.failure_reason import failure_reason
from edge_server.plugins.cameras.questions.model_request import (
    make_request,
    model_problem,
    question_jpeg,
    response_text,
)
from edge_server.plugins.cameras.questions.new_objects import NewObject, NewObjects
from edge_server.plugins.cameras.questions.question import QuestionAnswer, QuestionEntry
from edge_server.plugins.cameras.reports import QuestionReport
from edge_server.plugins.cameras.source_and_sink_settings import SourceEntry
from edge_server.protocol.frame_messages import FrameHeader, FrameResult
from edge_server.service import InferenceService
from edge_server.telemetry.metrics_page import Family

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_LOG = logging.getLogger(__name__)

MAX_ANSWER_S = 300.0
"""Longest time for an answer: a model on a processor may take minutes for a picture. Then the request is cancelled."""

MAX_WAIT_S = 60.0
"""Longest time that a question waits for its turn: an answer about an older picture is of no use."""

MAX_TEXT_CHARACTERS = 16_384
"""The rest of a longer answer is cut off."""


class _Question(NamedTuple):
    """A question that waits, or that a model answers. `picture` makes the pixels of the frame."""

    subject: NewObject
    picture: Callable[[], npt.NDArray[np.uint8]]
    header: FrameHeader
    clock: str
    came_s: float


class _Rule:
    """One question of the settings, its counts, and what waits and runs. All is guarded by the lock of the set."""

    def __init__(self, source: str, entry: QuestionEntry) -> None:
        self.source = source
        self.entry = entry
        self.new_objects = NewObjects(entry)
        self.waiting: _Question | None = None
        self.call: _Call | None = None
        self.begun_s = -float("inf")
        """When the last question was asked."""
        self.asked = self.answered = self.replaced = self.expired = self.shed = self.failed = 0
        self.seconds = 0.0
        self.reason = ""
        self.answer: QuestionAnswer | None = None

    @property
    def title(self) -> str:
        return f"source '{self.source}', question '{self.entry.name}'"


class _Call:
    """A question to a model. `take` gets the responses, on a thread of the model; the last one calls `on_end`."""

    def __init__(self, rule: _Rule, question: _Question, on_end: Callable[[_Call], None]) -> None:
        self.rule = rule
        self.question = question
        self.text = ""
        self.error: Exception | None = None
        self.is_late = False
        self.begun_s = time.monotonic()
        self.request: SubmittedRequest | None = None
        self._on_end = on_end

    def take(self, response: Response) -> None:
        if response.error is not None:
            self.error = response.error
        elif len(self.text) < MAX_TEXT_CHARACTERS:
            self.text += response_text(response)
        if response.is_final:
            self._on_end(self)

    def cancel(self) -> None:
        """Have the model stop. The last response comes nevertheless."""
        if self.request is not None:
            self.request.cancel()


class QuestionSet:
    """Asks the questions. A thread of its own does so, which the first question starts; other methods return at once.

    `on_answer` is called on that thread. At most one question runs for each rule, and for each model. A question that
    waits is replaced by a newer one of its rule.
    """

    def __init__(self, service: InferenceService, on_answer: Callable[[QuestionAnswer], None]) -> None:
        self._service = service
        self._on_answer = on_answer
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._rules: dict[tuple[str, str], _Rule] = {}
        """(Source, question) -> rule. Replaced, never changed: reports read it without the lock."""
        self._running: list[_Call] = []
        self._ended: deque[_Call] = deque()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def apply(self, sources: Mapping[str, SourceEntry]) -> None:
        """Use the questions of these sources. Those that stay the same keep their counts and their objects."""
        with self._lock:
            rules = dict[tuple[str, str], _Rule]()
            for source, entry in sources.items():
                for question in entry.questions:
                    rule = self._rules.get((source, question.name))
                    is_same = rule is not None and rule.entry == question
                    rules[source, question.name] = rule if rule is not None and is_same else _Rule(source, question)
            self._rules = rules
            gone = [call for call in self._running if not self._is_current(call.rule)]
        for call in gone:
            call.cancel()

    def on_result(
        self,
        entry: SourceEntry,
        result: FrameResult,
        clock: str,
        picture: Callable[[], npt.NDArray[np.uint8]] | None,
        *,
        is_tracked: bool,
    ) -> None:
        """Let the rules of a source see a result. `picture`: see SinkMessage; without it nothing can be asked.

        While a model is being loaded its questions see nothing: objects that are still there then are new ones.
        """
        if picture is None or result.error_code:
            return
        now_s = time.monotonic()
        loading = {model for model in {one.model for one in entry.questions} if self._loading_reason(model)}
        with self._lock:
            for question in entry.questions:
                rule = self._rules.get((entry.name, question.name))
                if rule is None or self._is_closing or question.model in loading:
                    continue
                subject = rule.new_objects.find(result, now_s, is_tracked=is_tracked)
                if subject is None:
                    continue
                rule.asked += 1
                rule.replaced += rule.waiting is not None
                rule.waiting = _Question(subject, picture, result.header, clock, now_s)
                self._start()
                self._wake.notify_all()

    def close(self, timeout_s: float) -> None:
        """Cancel what runs, forget what waits, and wait at most `timeout_s` for the thread."""
        with self._lock:
            self._is_closing = True
            running, thread = list(self._running), self._thread
            self._wake.notify_all()
        for call in running:
            call.cancel()
        if thread is not None:
            thread.join(timeout_s)

    def reports(self) -> Sequence[QuestionReport]:
        """Return reports of the questions, sorted by source and name."""
        problems = {model: self._problem(model) for model in {rule.entry.model for rule in self._rules.values()}}
        with self._lock:
            rules = [rule for _, rule in sorted(self._rules.items())]
            return [
                QuestionReport(
                    source=rule.source,
                    name=rule.entry.name,
                    model=rule.entry.model,
                    reason=rule.reason or problems.get(rule.entry.model, ""),
                    asked=rule.asked,
                    answered=rule.answered,
                    replaced=rule.replaced,
                    expired=rule.expired,
                    shed=rule.shed,
                    failed=rule.failed,
                    waiting=(rule.waiting is not None) + (rule.call is not None),
                    seconds=rule.seconds,
                )
                for rule in rules
            ]

    def answers(self, source: str) -> Sequence[QuestionAnswer]:
        """Return the last answer to each question of a source that was answered."""
        with self._lock:
            answers = [rule.answer for key, rule in sorted(self._rules.items()) if key[0] == source]
        return [answer for answer in answers if answer is not None]

    def families(self) -> list[Family]:
        """Return the metrics of the questions."""
        questions = Family("edge_questions_total", "counter", "Questions about pictures, by what became of them")
        seconds = Family("edge_question_seconds_total", "counter", "Time that models took for the answers to questions")
        for report in self.reports():
            labels = {"source": report.source, "question": report.name, "model": report.model}
            for result in ("answered", "replaced", "expired", "shed", "failed"):
                questions.add({**labels, "result": result}, getattr(report, result))
            seconds.add(labels, report.seconds)
        return [questions, seconds]

    def _problem(self, model: str) -> str:
        """Return why a model would not answer the next question; "" if it would."""
        if reason := self._loading_reason(model):
            return f"waiting for model '{model}': {reason}"
        try:
            return model_problem(self._service.find(model, None).spec)
        except EdgeServerError as error:
            return error.message

    def _loading_reason(self, model: str) -> str:
        """Return why a model is not ready yet; "" if it is, or if waiting will not help."""
        try:
            self._service.find(model, None)
        except NotReady as error:
            return "" if error.retry_after_s is None else error.message
        except EdgeServerError:
            pass
        return ""

    # -- with the lock held

    def _is_current(self, rule: _Rule) -> bool:
        return self._rules.get((rule.source, rule.entry.name)) is rule

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="camera-questions", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the next question tries again
                _LOG.warning("questions about pictures wait: the system grants no thread")
                return
            self._thread = thread

    def _next_call(self) -> _Call | None:
        """Return the question to ask now, or None. The rule whose last question is the oldest goes first."""
        now_s = time.monotonic()
        for rule in self._rules.values():
            if rule.waiting is not None and now_s >= rule.waiting.came_s + MAX_WAIT_S:
                rule.waiting = None
                rule.expired += 1
        busy = {call.rule.entry.model for call in self._running}
        ready = [
            rule
            for rule in self._rules.values()
            if rule.waiting is not None
            and rule.entry.model not in busy
            and now_s >= rule.begun_s + rule.entry.interval_s
        ]
        if not ready:
            return None
        rule = min(ready, key=lambda rule: rule.begun_s)
        assert rule.waiting is not None
        call = rule.call = _Call(rule, rule.waiting, self._end)
        rule.waiting, rule.begun_s = None, call.begun_s
        self._running.append(call)
        return call

    def _wait_s(self) -> float | None:
        """Return the time until a question may be due, is too old, or an answer is late; None if nothing is."""
        times = [call.begun_s + MAX_ANSWER_S for call in self._running if not call.is_late]
        for rule in self._rules.values():
            if rule.waiting is not None:
                times.append(rule.waiting.came_s + MAX_WAIT_S)
                if (due_s := rule.begun_s + rule.entry.interval_s) > time.monotonic():
                    times.append(due_s)
        return max(0.0, min(times) - time.monotonic()) if times else None

    # -- the thread

    def _run(self) -> None:
        while (step := self._next_step()) is not None:
            step()
            del step  # no pixels are kept while the thread waits

    def _next_step(self) -> Callable[[], None] | None:
        """Wait until there is something to do, and return it; None at the end."""
        with self._lock:
            while not self._is_closing:
                if self._ended:
                    return partial(self._finish, self._ended.popleft())
                for call in self._running:
                    if not call.is_late and time.monotonic() >= call.begun_s + MAX_ANSWER_S:
                        call.is_late = True
                        return call.cancel
                if (due := self._next_call()) is not None:
                    return partial(self._ask, due)
                self._wake.wait(self._wait_s())
            return None

    def _ask(self, call: _Call) -> None:
        entry, subject = call.rule.entry, call.question.subject
        try:
            handle = self._service.find(entry.model, None)
            if problem := model_problem(handle.spec):
                raise InvalidRequest(problem)
            jpeg = question_jpeg(call.question.picture(), entry, subject.detection)
            zone = subject.zones[0] if subject.zones else ""
            prompt = entry.filled_prompt(call.rule.source, subject.label, zone)
            request = make_request(handle.spec, prompt, jpeg, entry.max_tokens)
            call.begun_s = time.monotonic()
            call.request = handle.submit(request, call.take)
        except Exception as error:  # noqa: BLE001 - boundary of the thread: it must ask the other questions
            call.error = error
            self._finish(call)
            return
        with self._lock:
            is_unwanted = self._is_closing or not self._is_current(call.rule)
        if is_unwanted:  # it was removed while it was submitted
            call.cancel()

    def _end(self, call: _Call) -> None:
        """Take note of the last response. On a thread of the model."""
        with self._lock:
            self._ended.append(call)
            self._wake.notify_all()

    def _finish(self, call: _Call) -> None:
        """Count an answer or a failure, and pass on the answer."""
        rule, error = call.rule, call.error
        seconds = time.monotonic() - call.begun_s
        text = call.text[:MAX_TEXT_CHARACTERS].strip()
        if error is None and not text:
            error = BackendError(f"model '{rule.entry.model}' answered without a text")
        is_shed = isinstance(error, Throttled) and bool(error.state)
        reason = ""
        if call.is_late:
            reason = f"no answer within {MAX_ANSWER_S:g} s"
        elif error is not None and not is_shed:
            reason = failure_reason(rule.title, error)
        with self._lock:
            self._running.remove(call)
            rule.call = None
            if not self._is_current(rule):
                return
            if is_shed:
                rule.shed += 1
                return
            was_failing, rule.reason = bool(rule.reason), reason
            if reason:
                rule.failed += 1
            else:
                rule.answered += 1
                rule.seconds += seconds
                question, subject = call.question, call.question.subject
                rule.answer = answer = QuestionAnswer(
                    rule.source, rule.entry.name, rule.entry.model, subject.label, subject.track_id, subject.zones,
                    text, time.time(), seconds, question.header, question.clock,
                )  # fmt: skip
        if not reason:
            if was_failing:
                _LOG.info("%s is answered again", rule.title)
            self._on_answer(answer)
        elif not was_failing:
            _LOG.warning("%s: %s", rule.title, reason)
