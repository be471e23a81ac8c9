"""Record of a box for the page: what its status report says, its troubles, and what to do about the worst one.

Reports come from machines that may be broken or hostile: each value is checked, and each text and list has a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from edge_server.cli.expected_versions import find_failed_entries, is_loading
from edge_server.cli.model_text import reason_line
from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.release import release_name
from edge_server.plugins.fleet.reports.box_report import FollowedModel, check_follow

TROUBLES = ("silent", "failed", "not_ready", "behind", "hot", "unknown")
"""Kinds of trouble, the worst first. With "unknown" alone nothing is wrong yet."""

MAX_TEXT = 600
MAX_MODELS = 60
"""Most models of a box that the page lists."""
MAX_PROBLEMS = 20
_MAX_NAME = 150
_MAX_NAMES = 32
_HOT = ("HOT", "THROTTLED", "CRITICAL")
"""States of the governor in which it holds much back."""


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


class Assessment(NamedTuple):
    """What is wrong with a box: kinds of TROUBLES, sentences, and what to do about the worst. Empty: nothing."""

    troubles: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    advice: str = ""
    since_s: float = 0.0
    """Since when the worst is so by the box's own clock, in seconds since the epoch; 0: it does not say."""


def assess(
    address: str, record: BoxRecord | None, silence: str, differences: Iterable[str], unknown: Iterable[str] = ()
) -> Assessment:
    """Return the problems of a box. `silence` is why it does not answer, "" if it does; `differences` are those from
    most other boxes, `unknown` the models whose files cannot be compared with theirs."""
    if silence or record is None:
        advice = "Is it switched on and on the network? On the box: systemctl status edge-server"
        return Assessment(("silent",), (silence[:MAX_TEXT],), advice) if silence else Assessment()
    found: dict[str, list[str]] = {}
    advices: dict[str, str] = {}
    since_s: dict[str, float] = {}
    if record.failures:
        found["failed"] = list(record.failures)
        advices["failed"] = f"All of it: edge-server status --url={address}" if address else ""
    _assess_releases(record.releases or {}, found, advices, since_s)
    if record.follow_problem and record.follow_problem not in "\n".join(found.get("behind", ())):
        found.setdefault("behind", []).append(f"signed repository: {record.follow_problem}")
        advices.setdefault(
            "behind", "It serves what it has. Can it reach the signed repository, and is its clock right?"
        )
    differing = list(differences)
    if differing:
        found.setdefault("behind", []).extend(differing)
        advices.setdefault("behind", "It does not serve what most others serve.")
    if record.is_ready is False:
        found["not_ready"] = ["a model is being loaded" if record.is_loading else "the server is not ready"]
        advices["not_ready"] = f"What it waits for: edge-server status --url={address}" if address else ""
    if record.heat in _HOT:
        percent = record.load_limit_percent
        limit = "" if percent is None else f", models run at {percent} % of their speed"
        found["hot"] = [f"the governor is {record.heat}{limit}"]
        advices["hot"] = "Look at its fan, its dust and the sun on it."
    if uncompared := [f"not known to be equal: {text}" for text in unknown]:
        found["unknown"] = uncompared
        advices["unknown"] = (
            "It knows the SHA-256 some seconds after a load, but never that of a model whose load request had files or "
            "a configuration: load it from its folder."
        )
    troubles = tuple(kind for kind in TROUBLES if kind in found)
    problems = tuple(text[:MAX_TEXT] for kind in troubles for text in found[kind])[:MAX_PROBLEMS]
    if not troubles:
        return Assessment()
    return Assessment(troubles, problems, advices[troubles[0]], since_s.get(troubles[0], 0.0))


def _assess_releases(
    releases: Mapping[str, FollowedModel],
    found: dict[str, list[str]],
    advices: dict[str, str],
    since_s: dict[str, float],
) -> None:
    """Add the problems of releases by trouble, with the advice and the newest time of each trouble."""
    for model, release in releases.items():
        serves = f"; it serves {release_name(release.installed)}" if release.installed else "; it serves none"
        if release.state == "failed":
            found.setdefault("failed", []).append(release.reason + serves)
            since_s["failed"] = max(release.since_s, since_s.get("failed", 0.0))
            advices["failed"] = (
                "It does not try this release again. Stop or roll back its rollout, or publish a mended release."
            )
        elif release.state == "foreign":
            found.setdefault("failed", []).append(f"{model}: {release.reason}")
            advices["failed"] = "Remove the model on the box, or leave it out of the signed repository for this box."
        elif release.wanted != release.installed:
            reason = f": {release.reason}" if release.reason else ""
            text = f"{release_name(release.wanted)} is not installed yet{reason}{serves}"
            found.setdefault("behind", []).append(text)
            since_s["behind"] = max(release.since_s, since_s.get("behind", 0.0))
            advices["behind"] = "It tries again by itself, with pauses of up to an hour."
