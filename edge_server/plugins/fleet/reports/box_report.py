"""Status report of a box, read over HTTP or from MQTT, and the check of its form.

A report is a JSON object with the keys of `edge-server status --json` that matter for a fleet: `version`, `ready`,
`models` (MODEL_KEYS), `governor` and `follow` (the releases for this box). Over MQTT it has
`reported_s`, the time of the report, too. A broker keeps these retained messages:

| Topic | Message |
|---|---|
| TOPIC/BOX/report | the report |
| TOPIC/BOX/status | "online"; "offline" after the end of its server or follower, and as the broker's last will |

BOX is the name of the box, percent-encoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from edge_server.cli.console import clean
from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.settings import DEFAULT_TOPIC

MODEL_KEYS = ("name", "version", "state", "reason", "digest", "runtime")
RELEASE_STATES = ("installed", "waiting", "failed", "foreign")

MAX_REPORT_BYTES = 128 << 10
"""Longest report over MQTT."""
REFRESH_S = 30.0
"""Longest time between two reports of a box that is online."""

_MAX_ITEMS = 2000
_MAX_TEXT_CHARS = 500
_MAX_NUMBER = 1e11


class FollowedModel(NamedTuple):
    """What the follower of a box says of a model."""

    wanted: str
    """The newest release for this box."""
    state: str
    """Of `wanted`, one of RELEASE_STATES: `waiting` to be downloaded and tried, `foreign` if the model is somebody
    else's."""
    reason: str
    installed: str
    """The release that is installed; "" if there is none."""
    digest: str
    """SHA-256 of the file of `wanted`, which lists the model's files by theirs."""
    wave: str
    """Which wave of how many `wanted` has reached, as "2 of 3"; "" without waves."""
    since_s: float
    """Since when the state is this one, in seconds since the epoch: for `failed` since the failure, else as far as this
    process knows."""


class BoxReport(NamedTuple):
    """The newest report of a box. Read `error` before a decision by `report`."""

    name: str
    """URL of the server, or over MQTT the name of the box."""
    error: str
    """Why the report does not count: no answer, offline, too old, malformed. "" if it counts."""
    report: Mapping[str, Any] | None
    """As the module says. None: there is none. With an error: the last one of a box that is offline or late."""

    @property
    def follow(self) -> Mapping[str, Any] | None:
        """`box`, `groups`, `machines`, `repository`, `problem`, `checked_s`, and `models`: name -> the fields of
        FollowedModel. None: the box does not follow a signed repository."""
        return None if self.report is None else self.report.get("follow")

    @property
    def reported_s(self) -> float | None:
        """When a report over MQTT was made, in seconds since the epoch by the clock of the box."""
        return None if self.report is None else self.report.get("reported_s")


class BoxReports(Protocol):
    """Source of reports: servers that are asked over HTTP, or a broker of MQTT."""

    def read(self) -> list[BoxReport]:
        """Return the newest report of each box. Blocking for a few seconds at most. Raises EdgeServerError if none can
        be had."""

    def close(self) -> None:
        """End connections. `read` opens them again."""


def box_topic(topic: str, box: str) -> str:
    """Return the prefix of the topics of a box. An empty `topic` is the default."""
    return f"{topic.strip('/') or DEFAULT_TOPIC}/{quote(box, safe='')}"


def parse_report(payload: bytes) -> dict[str, Any]:
    """Return the report of a message of MQTT. Raises InvalidRequest."""
    if len(payload) > MAX_REPORT_BYTES:
        raise InvalidRequest(f"its report has {len(payload)} bytes, expected at most {MAX_REPORT_BYTES}")
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        raise InvalidRequest("its report is no JSON") from None
    given = _object(document, "report")
    report = {
        "reported_s": _number(given.get("reported_s"), "reported_s"),
        "version": _text(given.get("version"), "version"),
        "ready": _boolean(given.get("ready"), "ready", may_be_none=True),
        "models": [
            {key: _text(row.get(key, ""), f"models.{key}") for key in MODEL_KEYS}
            for row in (_object(item, "models") for item in _list(given.get("models"), "models"))
        ],
        "follow": check_follow(given.get("follow")),
    }
    if given.get("governor") is not None:
        governor = _object(given["governor"], "governor")
        temperature_c = governor.get("temperature_c")
        report["governor"] = {
            "enabled": _boolean(governor.get("enabled"), "governor.enabled"),
            "state": _text(governor.get("state"), "governor.state"),
            "share": _number(governor.get("share"), "governor.share"),
            "temperature_c": None if temperature_c is None else _number(temperature_c, "governor.temperature_c", -274),
        }
    return report


def check_follow(document: object) -> dict[str, Any]:
    """Return the part `follow` of a report with the known keys alone. Raises InvalidRequest."""
    given = _object(document, "follow")
    models = _object(given.get("models"), "follow.models")
    return {
        **{key: _text(given.get(key), f"follow.{key}") for key in ("box", "repository", "problem")},
        **{
            key: [_text(item, f"follow.{key}") for item in _list(given.get(key), f"follow.{key}")]
            for key in ("groups", "machines")
        },
        "checked_s": _number(given.get("checked_s"), "follow.checked_s"),
        "models": {_text(name, "follow.models"): _followed(name, models[name]) for name in models},
    }


def find_release_failures(follow: Mapping[str, Any]) -> list[str]:
    """Return a line for each release that failed on a box, from the part `follow` of its report."""
    return [
        f"{name}: {model['reason']}; installed: {model['installed'] or 'none'}"
        for name, model in follow["models"].items()
        if model["state"] in ("failed", "foreign")
    ]


def _followed(name: str, document: object) -> dict[str, Any]:
    key = f"follow.models.{clean(name)[:80]}"
    given = _object(document, key)
    state = _text(given.get("state"), f"{key}.state")
    if state not in RELEASE_STATES:
        raise InvalidRequest(f"its report: {key}.state: expected {', '.join(RELEASE_STATES)}, given '{state[:80]}'")
    texts = {part: _text(given.get(part), f"{key}.{part}") for part in FollowedModel._fields if part != "since_s"}
    return {**texts, "since_s": _number(given.get("since_s"), f"{key}.since_s")}


def _object(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
        raise _refusal(key, f"a JSON object of at most {_MAX_ITEMS} keys", value)
    return value


def _list(value: object, key: str) -> Sequence[object]:
    if not isinstance(value, list) or len(value) > _MAX_ITEMS:
        raise _refusal(key, f"a list of at most {_MAX_ITEMS}", value)
    return value


def _text(value: object, key: str) -> str:
    """Return a text without control characters: a terminal shows it. A long one is cut."""
    if not isinstance(value, str):
        raise _refusal(key, "text", value)
    return clean(value[:_MAX_TEXT_CHARS])


def _number(value: object, key: str, low: float = 0.0) -> float:
    # Not math.isfinite: it fails with integers of hundreds of digits. The comparison is false for NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= _MAX_NUMBER:
        raise _refusal(key, f"a number of {low:g} to {_MAX_NUMBER:g}", value)
    return value


def _boolean(value: object, key: str, *, may_be_none: bool = False) -> bool | None:
    if not isinstance(value, bool) and not (may_be_none and value is None):
        raise _refusal(key, "true or false", value)
    return value


def _refusal(key: str, expected: str, given: object) -> InvalidRequest:
    return InvalidRequest(f"its report: {key}: expected {expected}, given {clean(repr(given)[:80])}")
