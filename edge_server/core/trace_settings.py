"""Traces of single requests: what may be set about them, and how the parts of the server tell of a request's way.

The rules of the settings are Triton's (docs/protocol/extension_trace.md): global ones lie over those of the start, and
each model may have some of its own over these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from edge_server.core.tensor import Tensor
from edge_server.errors import InvalidRequest, Unsupported

OFF = "OFF"
TIMESTAMPS = "TIMESTAMPS"
TENSORS = "TENSORS"

TRITON = "triton"
OPENTELEMETRY = "opentelemetry"

_UINT32_MAX = 2**32 - 1
_INT32_MAX = 2**31 - 1
_NUMBER = re.compile(r"[+-]?[0-9]{1,20}")


class RequestTrace(Protocol):
    """What is written down of one model's work on one request. From any thread; `ns` are of time.monotonic_ns.

    `begin` comes first, at submission; `refuse` or `end` comes last. One that is refused may begin again, elsewhere.
    """

    @property
    def id(self) -> int:
        """The number by which the trace is known within the server, never 0."""

    def begin(self, model: str, version: int, request_id: str, ns: int, inputs: Iterable[Tensor]) -> None:
        """Take note that the version has the request in its queue."""

    def computed(self, start_ns: int, input_end_ns: int, infer_end_ns: int, end_ns: int) -> None:
        """Take note of when the request's batch ran."""

    def outputs(self, tensors: Iterable[Tensor]) -> None:
        """Take note of what the model answered."""

    def refuse(self, ns: int) -> None:
        """Take note that the version did not take the request after all."""

    def end(self, ns: int) -> None:
        """Take note that the version holds nothing of the request any more."""

    def child(self) -> RequestTrace:
        """Return a trace for a model that this one asks on behalf of the request."""

    def context(self) -> str | None:
        """Return the W3C trace context to hand on, as a JSON object of headers; None where traces are no spans."""


@dataclass(frozen=True, slots=True)
class CarriedTrace:
    """A trace as it is sent to another process of this server: its number and its context. It takes no notes there."""

    id: int
    text: str | None

    def begin(self, model: str, version: int, request_id: str, ns: int, inputs: Iterable[Tensor]) -> None: ...

    def computed(self, start_ns: int, input_end_ns: int, infer_end_ns: int, end_ns: int) -> None: ...

    def outputs(self, tensors: Iterable[Tensor]) -> None: ...

    def refuse(self, ns: int) -> None: ...

    def end(self, ns: int) -> None: ...

    def child(self) -> CarriedTrace:
        """Return itself: the server makes the child when the request comes back to it."""
        return self

    def context(self) -> str | None:
        return self.text


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What is traced of a model's requests, and where it goes.

    `level` is of TIMESTAMPS and TENSORS, empty for nothing. Every `rate`-th request is traced until `count` were; -1:
    without end. `log_frequency` traces go into each of the files `file`.0, `file`.1 ...; 0: all into `file`.
    """

    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0
    file: str = ""
    mode: str = TRITON

    @property
    def is_on(self) -> bool:
        return bool(self.level) and not self.flaw

    @property
    def flaw(self) -> str:
        """Why nothing could be traced by these settings although a level is set; "" when something can be."""
        if self.rate == 0 and self.mode == TRITON:
            return "sample rate must be non-zero"
        if self.mode == TRITON and not self.file:
            return "trace file name is not given"
        if self.count == 0:
            return "trace count must be non-zero"
        return ""

    def view(self, count: int | None = None) -> dict[str, str | list[str]]:
        """Return the settings as clients see them; `count` is what is left of the count, where that is known."""
        shown: dict[str, str | list[str]] = {
            "trace_level": list(self.level) or [OFF],
            "trace_rate": str(self.rate),
            "trace_count": str(self.count if count is None else count),
        }
        if self.mode == TRITON:
            shown["log_frequency"] = str(self.log_frequency)
            shown["trace_file"] = self.file
        shown["trace_mode"] = self.mode
        return shown


SettingValues = Mapping[str, Any]
"""Fields of TraceSettings that somebody has set."""


@dataclass(frozen=True, slots=True)
class TraceChange:
    """Fields of TraceSettings to be set, and fields that are to follow again what stands behind them."""

    set: SettingValues
    cleared: frozenset[str] = frozenset()


class ServerTraceSettings:
    """The settings of the whole server. Not to be changed: `with_change` makes another one."""

    def __init__(
        self,
        start: TraceSettings,
        whole: SettingValues | None = None,
        models: Mapping[str, SettingValues] | None = None,
    ) -> None:
        self._start = start
        self._whole = dict(whole or {})
        self._models = dict(models or {})
        self.whole = replace(start, **self._whole)
        self.models = {name: replace(self.whole, **stated) for name, stated in self._models.items()}

    def of(self, model: str) -> TraceSettings:
        """Return the settings in force for a model; "" for those without its own."""
        return self.models.get(model, self.whole)

    def with_change(self, model: str, change: TraceChange) -> ServerTraceSettings:
        """Return the settings after a change, of all models when `model` is "". Raises InvalidRequest when something
        is asked to be traced that cannot be."""
        before = self._models.get(model, {}) if model else self._whole
        stated = {key: value for key, value in {**before, **change.set}.items() if key not in change.cleared}
        if not model:
            book = ServerTraceSettings(self._start, stated, self._models)
        else:
            others = {name: kept for name, kept in self._models.items() if name != model}
            book = ServerTraceSettings(self._start, self._whole, {**others, **({model: stated} if stated else {})})
        for settings in (book.whole, *book.models.values()):
            if settings.level and settings.flaw:
                raise InvalidRequest(f"Attempting to set invalid trace setting :{settings.flaw}")
        return book


def parse_trace_change(raw: Mapping[str, object]) -> TraceChange:
    """Read what a client wants to change: names as in TraceSettings.view, None or an empty list to clear a setting.

    Settings that are not known, and the mode, are passed over, as in Triton. Raises InvalidRequest, and Unsupported
    for the file: a client must not choose where the server writes.
    """
    if "trace_file" in raw:
        raise Unsupported("trace file location can not be updated through network protocol")
    stated: dict[str, Any] = {}
    cleared: set[str] = set()
    for name, field in _FIELDS.items():
        if name not in raw:
            continue
        value = raw[name]
        if value is None or value == []:
            cleared.add(field)
        else:
            stated[field] = _level(name, value) if field == "level" else _number(name, value)
    return TraceChange(stated, frozenset(cleared))


_FIELDS = {"trace_level": "level", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}


def _level(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise InvalidRequest(f"Unable to parse '{name}': expected an array of strings")
    return trace_level(value)


def trace_level(words: Iterable[str]) -> tuple[str, ...]:
    """Return the level that words ask for together, empty for OFF. Raises InvalidRequest."""
    asked = list(words)
    if OFF in asked and len(asked) > 1:
        raise InvalidRequest("Expect only one trace level 'OFF' is specified")
    for word in asked:
        if word not in (OFF, TIMESTAMPS, TENSORS):
            # Triton passes over it; a level that is misspelt and does nothing is found too late.
            raise InvalidRequest(f"unknown trace level '{word:.80}', expected {OFF}, {TIMESTAMPS} or {TENSORS}")
    return tuple(level for level in (TIMESTAMPS, TENSORS) if level in asked)


def _number(name: str, value: object) -> int:
    if isinstance(value, list):
        if len(value) != 1:
            raise InvalidRequest(f"expect only 1 value for '{name}'")
        value = value[0]
    if not isinstance(value, str):
        raise InvalidRequest(f"Unable to parse '{name}': expected a string")
    if not _NUMBER.fullmatch(value):
        raise InvalidRequest(f"Unable to parse '{name}', got: {value:.80}")
    number = int(value)
    if name == "trace_count":
        if number < -1:
            raise InvalidRequest(f"Unable to parse 'trace_count'. Expecting value >= -1, got: {value}")
        return _in_range(name, number, -1, _INT32_MAX)
    return _in_range(name, number, 0, _UINT32_MAX)


def _in_range(name: str, number: int, low: int, high: int) -> int:
    if not low <= number <= high:
        raise InvalidRequest(f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {number}")
    return number
