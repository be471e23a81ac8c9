"""Trace settings of the server and of each model, their changes by clients, and the interface that records a request's
trace.

The rules are Triton's (docs/protocol/extension_trace.md): global settings override those from the command line, and a
model's own settings override the global ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from edge_server.core.tensor import Tensor
from edge_server.errors import InvalidRequest, Unsupported
from edge_server.record import record

OFF = "OFF"
TIMESTAMPS = "TIMESTAMPS"
TENSORS = "TENSORS"

TRITON = "triton"
OPENTELEMETRY = "opentelemetry"

_UINT32_MAX = 2**32 - 1
_INT32_MAX = 2**31 - 1
_NUMBER = re.compile(r"[+-]?[0-9]{1,20}")


class RequestTrace(Protocol):
    """Record of one model's work on one request. Any thread may call it; `ns` are of time.monotonic_ns.

    `begin` is the first call, at submission. `refuse` or `end` is the last. After `refuse` the trace may begin again
    with another version.
    """

    @property
    def id(self) -> int:
        """The trace's number within the server, never 0."""

    def begin(self, model: str, version: int, request_id: str, ns: int, inputs: Iterable[Tensor]) -> None:
        """Record that the version queued the request."""

    def record_computation(self, start_ns: int, input_end_ns: int, infer_end_ns: int, end_ns: int) -> None:
        """Record the times of the request's batch."""

    def record_outputs(self, tensors: Iterable[Tensor]) -> None:
        """Record the model's outputs."""

    def refuse(self, ns: int) -> None:
        """Record that the version did not accept the request."""

    def end(self, ns: int) -> None:
        """Record that the version has finished with the request."""

    def new_child(self) -> RequestTrace:
        """Return a trace for another model that this model calls for the request."""

    def context(self) -> str | None:
        """Return the W3C trace context to propagate, as a JSON object of headers; None if traces are not spans."""


class CarriedTrace(NamedTuple):
    """A trace in another process of this server: only its number and its context. It records nothing there."""

    id: int
    text: str | None

    def begin(self, model: str, version: int, request_id: str, ns: int, inputs: Iterable[Tensor]) -> None: ...

    def record_computation(self, start_ns: int, input_end_ns: int, infer_end_ns: int, end_ns: int) -> None: ...

    def record_outputs(self, tensors: Iterable[Tensor]) -> None: ...

    def refuse(self, ns: int) -> None: ...

    def end(self, ns: int) -> None: ...

    def new_child(self) -> CarriedTrace:
        """Return itself: the main process makes the child when the call arrives there."""
        return self

    def context(self) -> str | None:
        return self.text


@record(frozen=True, slots=True)
class TraceSettings:
    """Trace settings of a model: level, sampling and output file.

    `level` contains TIMESTAMPS and TENSORS; empty: off. Every `rate`-th request is traced, `count` requests in total
    (-1: no limit). Each of the files `file`.0, `file`.1 ... gets `log_frequency` traces; 0: all go into `file`.
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
        """The reason why these settings cannot trace anything, or "" if they can."""
        if self.rate == 0 and self.mode == TRITON:
            return "sample rate must be non-zero"
        if self.mode == TRITON and not self.file:
            return "trace file name is not given"
        if self.count == 0:
            return "trace count must be non-zero"
        return ""

    def to_json(self, count: int | None = None) -> dict[str, str | list[str]]:
        """Return the settings for clients. `count` is the remaining count, if known."""
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
"""Fields of TraceSettings that were set, by name."""


class TraceChange(NamedTuple):
    """Fields of TraceSettings to set, and fields to reset to the setting of the level above."""

    set: SettingValues
    cleared: frozenset[str] = frozenset()


class ServerTraceSettings:
    """The trace settings of the whole server, global and per model. Immutable: `with_change` returns a new one."""

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
        self.models = {name: replace(self.whole, **values) for name, values in self._models.items()}

    def of(self, model: str) -> TraceSettings:
        """Return the effective settings of a model, or the global ones for ""."""
        return self.models.get(model, self.whole)

    def with_change(self, model: str, change: TraceChange) -> ServerTraceSettings:
        """Return the settings after a change of one model, or of the global settings if `model` is "".

        Raises InvalidRequest if the new settings cannot trace.
        """
        before = self._models.get(model, {}) if model else self._whole
        values = {key: value for key, value in {**before, **change.set}.items() if key not in change.cleared}
        if not model:
            changed = ServerTraceSettings(self._start, values, self._models)
        else:
            others = {name: kept for name, kept in self._models.items() if name != model}
            changed = ServerTraceSettings(self._start, self._whole, {**others, **({model: values} if values else {})})
        for settings in (changed.whole, *changed.models.values()):
            if settings.level and settings.flaw:
                raise InvalidRequest(f"Attempting to set invalid trace setting :{settings.flaw}")
        return changed


def parse_trace_change(raw: Mapping[str, object]) -> TraceChange:
    """Parse a client's change. Names are as in TraceSettings.to_json; None or an empty list clears a setting.

    As in Triton, unknown settings and the mode are ignored. Raises InvalidRequest, and Unsupported for the file: a
    client must not choose where the server writes.
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
            stated[field] = _parse_level(name, value) if field == "level" else _parse_number(name, value)
    return TraceChange(stated, frozenset(cleared))


_FIELDS = {"trace_level": "level", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}


def _parse_level(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(level_name, str) for level_name in value):
        raise InvalidRequest(f"Unable to parse '{name}': expected an array of strings")
    return parse_trace_level(value)


def parse_trace_level(level_names: Iterable[str]) -> tuple[str, ...]:
    """Return the trace level of a list of words; empty for OFF. Raises InvalidRequest."""
    names = list(level_names)
    if OFF in names and len(names) > 1:
        raise InvalidRequest("Expect only one trace level 'OFF' is specified")
    for level_name in names:
        if level_name not in (OFF, TIMESTAMPS, TENSORS):
            # Triton ignores an unknown level. Here it is an error, so that a typing error is found at once.
            raise InvalidRequest(f"unknown trace level '{level_name:.80}', expected {OFF}, {TIMESTAMPS} or {TENSORS}")
    return tuple(level for level in (TIMESTAMPS, TENSORS) if level in names)


def _parse_number(name: str, value: object) -> int:
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
        return _check_range(name, number, -1, _INT32_MAX)
    return _check_range(name, number, 0, _UINT32_MAX)


def _check_range(name: str, number: int, low: int, high: int) -> int:
    if not low <= number <= high:
        raise InvalidRequest(f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {number}")
    return number
