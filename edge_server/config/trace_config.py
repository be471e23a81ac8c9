"""Parser of `--trace-config` in Triton's syntax: `setting=value`, or `mode,setting=value` for one mode."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from edge_server.config.setting import Kind, integer, nearest, setting
from edge_server.record import record

OTLP_URL = "http://localhost:4318/v1/traces"
"""Default address of an OpenTelemetry collector for OTLP over HTTP."""

_LEVELS = {
    "off": "OFF", "false": "OFF", "timestamps": "TIMESTAMPS", "min": "TIMESTAMPS", "max": "TIMESTAMPS",
    "on": "TIMESTAMPS", "true": "TIMESTAMPS", "tensors": "TENSORS",
}  # fmt: skip
_MODES = ("triton", "opentelemetry")
_UINT32_MAX = 2**32 - 1


def _integer(low: int, high: int) -> Callable[[str], str]:
    kind = integer(low, high)
    return lambda text: str(kind.parse(text))


def _level(text: str) -> str:
    if text.lower() not in _LEVELS:
        raise ValueError("expected OFF, TIMESTAMPS or TENSORS")
    return _LEVELS[text.lower()]


def _mode(text: str) -> str:
    if text.lower() not in _MODES:
        raise ValueError("expected triton or opentelemetry")
    return text.lower()


def _text(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("expected printable characters")
    return text


def _url(text: str) -> str:
    """Return the URL. `host:port/path`, the form in Triton's documentation, is completed with http://."""
    given = _text(text)
    if "://" not in given:
        given = f"http://{given}"
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", given):
        raise ValueError("expected http://host:port/path or https://host:port/path")
    return given


def _attribute(text: str) -> str:
    key, equals, value = text.partition("=")
    if not (key.strip() and equals and value):
        raise ValueError("expected resource=<key>=<value>")
    return f"{_text(key.strip())}={_text(value)}"


_SETTINGS: Mapping[str, Callable[[str], str]] = {
    "level": _level,
    "rate": _integer(0, _UINT32_MAX),
    "count": _integer(-1, 2**31 - 1),
    "mode": _mode,
    "triton,file": _text,
    "triton,log-frequency": _integer(0, _UINT32_MAX),
    "opentelemetry,url": _url,
    "opentelemetry,resource": _attribute,
    "opentelemetry,bsp_max_queue_size": _integer(1, 2**20),
    "opentelemetry,bsp_schedule_delay": _integer(1, 3_600_000),
    "opentelemetry,bsp_max_export_batch_size": _integer(1, 2**20),
}


def _parse_trace_setting(text: str) -> str:
    name, equals, value = text.partition("=")
    name = ",".join(word.strip().lower() for word in name.split(","))
    check = _SETTINGS.get(name)
    if check is None or not equals:
        hint = nearest(name, _SETTINGS).replace("'?", "=...'?") if check is None else ""
        raise ValueError(f"expected [<mode>,]<setting>=<value> with one of {', '.join(_SETTINGS)}{hint}")
    return f"{name}={check(value)}"


@record(frozen=True, slots=True)
class TraceConfig:
    """Trace settings at the start. `config` holds checked texts of `--trace-config`.

    The last text for a setting counts; levels and resource attributes add up.
    """

    config: tuple[str, ...] = setting(
        (),
        "--trace-config",
        Kind("[mode,]setting=value", _parse_trace_setting),
        "Trace setting: level=TIMESTAMPS or TENSORS, rate=1000, count=-1, mode=triton or opentelemetry; "
        "triton,file=PATH and triton,log-frequency=N; opentelemetry,url=URL, resource=KEY=VALUE, bsp_max_queue_size, "
        "bsp_schedule_delay, bsp_max_export_batch_size. Repeatable.",
        separator=" ",
    )

    @property
    def level(self) -> tuple[str, ...]:
        """Levels: TIMESTAMPS, TENSORS or both; empty: off."""
        return tuple(dict.fromkeys(word for word in self._all("level") if word != "OFF"))

    @property
    def rate(self) -> int:
        return int(self._last("rate", "1000"))

    @property
    def count(self) -> int:
        return int(self._last("count", "-1"))

    @property
    def mode(self) -> str:
        return self._last("mode", "triton")

    @property
    def file(self) -> str:
        return self._last("triton,file", "")

    @property
    def log_frequency(self) -> int:
        return int(self._last("triton,log-frequency", "0"))

    @property
    def url(self) -> str:
        return self._last("opentelemetry,url", OTLP_URL)

    @property
    def resource(self) -> tuple[tuple[str, str], ...]:
        """Attributes of the OpenTelemetry resource: (key, value)."""
        pairs = (text.partition("=") for text in self._all("opentelemetry,resource"))
        return tuple((key, value) for key, _, value in pairs)

    @property
    def bsp_max_queue_size(self) -> int:
        return int(self._last("opentelemetry,bsp_max_queue_size", "2048"))

    @property
    def bsp_schedule_delay_ms(self) -> int:
        return int(self._last("opentelemetry,bsp_schedule_delay", "5000"))

    @property
    def bsp_max_export_batch_size(self) -> int:
        return int(self._last("opentelemetry,bsp_max_export_batch_size", "512"))

    def _all(self, name: str) -> list[str]:
        return [value for key, _, value in (text.partition("=") for text in self.config) if key == name]

    def _last(self, name: str, default: str) -> str:
        return (self._all(name) or [default])[-1]
