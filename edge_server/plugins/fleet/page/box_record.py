"""Record of a box for the fleet's page: what its status report says, checked and bounded.

Reports come from machines that may be broken or hostile: each value is checked, and each text and list has a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from edge_server.cli.expected_versions import find_failed_entries, is_loading
from edge_server.cli.model_text import reason_line
from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.reports.box_report import FollowedModel, check_follow

MAX_TEXT = 600
MAX_MODELS = 60
"""Most models of a box that the page lists."""
MAX_PROBLEMS = 20
_MAX_NAME = 150
_MAX_NAMES = 32


class BadReport(ValueError):
    """A report is not one of an edge-server."""


class BoxRecord(NamedTuple):
    """A box at one time. Texts are bounded; "" and None: unknown."""

    name: str
    version: str
    is_ready: bool | None
    """None: the box has no server that could say, and says nothing of what it serves."""
    groups: tuple[str, ...]
    machines: tuple[str, ...]
    models: Mapping[str, str]
    """Model -> its serving versions, as "version 2 (0a1b2c3d)"."""
    failures: tuple[str, ...]
    releases: Mapping[str, FollowedModel] | None
    """By model; None for a server that follows no signed repository."""
    follow_problem: str
    is_loading: bool
    temperature_c: int | None
    heat: str
    """State of the governor."""
    load_limit_percent: int | None
    """At how much of their speed the governor lets models run; None without a governor."""


def read_record(report: Mapping[str, Any], served: Mapping[str, str]) -> BoxRecord:
    """Return the record of a status report. `served` are its models as `served_versions` gives them.

    Raises BadReport.
    """
    try:
        follow = None if report.get("follow") is None else check_follow(report["follow"])
        followed = list(follow["models"].items())[:MAX_MODELS] if follow else []
        governor = report.get("governor")
        governor = governor if isinstance(governor, dict) and governor.get("enabled") is True else {}
        return BoxRecord(
            name=follow["box"] if follow else "",
            version=_text(report["version"]),
            is_ready=None if report["ready"] is None else report["ready"] is True,
            groups=tuple(map(_name, follow["groups"][:_MAX_NAMES])) if follow else (),
            machines=tuple(map(_name, follow["machines"][:_MAX_NAMES])) if follow else (),
            # A cut text could lose a digest, and its files would count as unknown.
            models={_name(name): _text(text) for name, text in list(served.items())[:MAX_MODELS]},
            failures=tuple(_find_failures(report))[:MAX_PROBLEMS],
            releases={_name(name): FollowedModel(**model) for name, model in followed} if follow else None,
            follow_problem=follow["problem"] if follow else "",
            is_loading=is_loading(report),
            temperature_c=_whole(governor.get("temperature_c")),
            heat=_text(governor.get("state", "")),
            load_limit_percent=_whole(governor.get("share"), 100),
        )
    except InvalidRequest as error:
        raise BadReport(error.message) from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadReport(f"its report is not understood: {type(error).__name__}: {error}"[:MAX_TEXT]) from None


def _find_failures(report: Mapping[str, Any]) -> Iterable[str]:
    """Yield what failed, but for releases: those have records of their own."""
    for entry in find_failed_entries(report):
        yield _text(reason_line(entry.name, entry.version, entry.reason or "is not served"))
    for plugin in report.get("plugins", ()):
        if plugin["error"]:
            yield _text(f"plugin {plugin['name']}: {plugin['error']}")
        if plugin["name"] == "fleet" and report.get("follow") is not None:
            continue
        for row in plugin["rows"]:
            if row.get("state") == "failed":
                yield _text(f"{row['title'] or plugin['name']}: {row['text']}")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadReport(f"expected a text, given {repr(value)[:80]}")
    # Lone surrogates, which JSON can hold, are no UTF-8.
    return value[:MAX_TEXT].encode("utf-8", "replace").decode()


def _name(value: object) -> str:
    return _text(value)[:_MAX_NAME]


def _whole(value: object, scale: int = 1) -> int | None:
    """Return the whole number nearest to `value` times `scale`, None for what is no number."""
    # Not math.isfinite: it fails with integers of hundreds of digits. The comparison is false for NaN.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and -1e6 < value < 1e6
    return round(value * scale) if is_number else None  # type: ignore[operator]
