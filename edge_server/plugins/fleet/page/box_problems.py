"""Problems of a box for the page: the worst one that its record and its releases show, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from edge_server.plugins.fleet.page.box_record import MAX_PROBLEMS, MAX_TEXT, BoxRecord
from edge_server.plugins.fleet.release import release_name
from edge_server.plugins.fleet.reports.box_report import FollowedModel

TROUBLES = ("silent", "failed", "not_ready", "behind", "hot", "unknown")
"""Kinds of trouble, the worst first. With "unknown" alone nothing is wrong yet."""


_HOT = ("HOT", "THROTTLED", "CRITICAL")
"""States of the governor in which it holds much back."""


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
