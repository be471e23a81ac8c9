"""State of all boxes for the fleet's page: the last report and health of each, the time of its last change, and
revisions for updates in parts."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from edge_server.plugins.fleet.page.box_problems import assess
from edge_server.plugins.fleet.page.box_record import BadReport, BoxRecord, read_record
from edge_server.plugins.fleet.release import release_name
from edge_server.plugins.fleet.reports.box_report import BoxReport
from edge_server.plugins.fleet.reports.version_differences import (
    PROGRAM,
    find_differences,
    find_unknown,
    served_versions,
)

PAGE_BYTES = 256 << 10
"""Most bytes of boxes in one answer, but for a single box that is larger."""

_MIN_TIME_S = 1_577_836_800.0
"""2020: a clock that says less was never set."""


@dataclass(slots=True)
class _Box:
    since_s: float
    record: BoxRecord | None = None
    """Of the last answer; None if there was none."""
    report: Mapping[str, object] | None = None
    """The last one that was read from a broker, which gives the same object until it has another."""
    refusal: str = ""
    """Why the last report is not understood."""
    silence: str = ""
    seen_s: float | None = None
    is_since_known: bool = False
    described: dict[str, object] = field(default_factory=dict)
    size: int = 0
    """Of `described` as JSON, in bytes."""
    own_since_s: float = 0.0
    revision: int = 0

    @property
    def follows(self) -> bool:
        return self.record is not None and self.record.releases is not None

    def as_json(self) -> dict[str, object]:
        since_s = self.own_since_s or self.since_s
        return {**self.described, "since_s": since_s, "is_since_known": bool(self.own_since_s) or self.is_since_known}


class FleetState:
    """Boxes by key: the URL of a server, or the name of a box that reports over MQTT.

    Not thread-safe: the event loop of the page uses it.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._boxes: dict[str, _Box] = {}
        self._revision = 0
        self._is_dirty = False
        self.run_id = secrets.token_hex(8)
        """A page that knows another run asks for all boxes. It ends when a box is removed."""
        self.started_s = clock()

    def set_boxes(self, keys: Iterable[str]) -> None:
        """Have these boxes and no others."""
        wanted = dict.fromkeys(keys)
        for key in set(self._boxes) - set(wanted):
            del self._boxes[key]
            self.run_id = secrets.token_hex(8)
        for key in wanted:
            if key not in self._boxes:
                self._boxes[key] = _Box(self._clock())
        self._is_dirty = True

    def set_report(self, given: BoxReport) -> None:
        """Note the newest report of a box. Does nothing for a box that is not there."""
        box = self._boxes.get(given.name)
        if box is None:
            return
        if given.report is not None and given.report is not box.report:
            # Only what was read from a broker is older than now, and is given again.
            box.report = None if _is_url(given.name) else given.report
            box.refusal = ""
            try:
                box.record = read_record(given.report, served_versions(given.report))
                reported_s = None if _is_url(given.name) else given.reported_s
                box.seen_s = reported_s or self._clock()
            except (BadReport, KeyError, TypeError, ValueError, AttributeError, RecursionError) as wrong:
                box.refusal = str(wrong) if isinstance(wrong, BadReport) else "its status report is not understood"
        box.silence = given.error or ("" if given.report is None else box.refusal)
        self._is_dirty = True

    def snapshot(self, after: int) -> dict[str, object]:
        """Return the boxes that changed after a revision (0: all), the longest unchanged ones first, in at most
        PAGE_BYTES; `revision`, after which the next ones follow; and whether there are no more."""
        self._refresh()
        changed = sorted(
            ((key, box) for key, box in self._boxes.items() if box.revision > after), key=lambda item: item[1].revision
        )
        boxes: list[dict[str, object]] = []
        revision, size = after, 0
        for key, box in changed:
            size += box.size
            if boxes and size > PAGE_BYTES:
                return {"revision": revision, "boxes": boxes, "is_complete": False}
            boxes.append({"key": key, **box.as_json()})
            revision = box.revision
        return {"revision": self._revision, "boxes": boxes, "is_complete": True}

    def answering(self) -> list[BoxRecord]:
        """Return the record of each box that answers."""
        return [box.record for box in self._boxes.values() if box.record is not None and not box.silence]

    def _refresh(self) -> None:
        """Judge each box again, as most others may have changed, and note which changed."""
        if not self._is_dirty:
            return
        self._is_dirty = False
        records = {key: box.record for key, box in self._boxes.items() if box.record is not None and not box.silence}
        records = {key: record for key, record in records.items() if record.is_ready is not None}
        differences = find_differences({key: {PROGRAM: record.models[PROGRAM]} for key, record in records.items()})
        # Which models a follower has is decided by its releases, not by what most have.
        models = {key: record.models for key, record in records.items() if record.releases is None}
        for key, texts in find_differences(models).items():
            differences[key] += [text for text in texts if not text.startswith(f"{PROGRAM}: ")]
        unknown = find_unknown({key: record.models for key, record in records.items()})
        now_s = self._clock()
        for key, box in self._boxes.items():
            shown = self._describe(key, box, differences.get(key, ()), unknown.get(key, ()))
            if shown == box.described:
                continue
            if shown["state"] != box.described.get("state"):
                # Of what the first answer says it is not known since when.
                box.since_s, box.is_since_known = now_s, bool(box.described.get("is_known"))
            box.described, box.size = shown, len(json.dumps(shown)) + len(key)
            self._revision += 1
            box.revision = self._revision

    def _describe(self, key: str, box: _Box, differences: Iterable[str], unknown: Iterable[str]) -> dict[str, object]:
        record, page = box.record, key if _is_url(key) else ""
        found = assess(page, record, box.silence, differences, unknown)
        is_known = bool(record or box.silence)
        # By the clock of the box, which may be wrong.
        box.own_since_s = found.since_s if _MIN_TIME_S < found.since_s <= self._clock() else 0.0
        return {
            "is_known": is_known,
            "name": (record.name if record else "") or _host(key),
            "address": _host(key),
            "page": page,
            "state": found.troubles[0] if found.troubles else "ok" if is_known else "asking",
            "troubles": found.troubles,
            "problems": found.problems,
            "advice": found.advice,
            "seen_s": box.seen_s if box.silence else None,
            "version": record.version if record else "",
            "groups": record.groups if record else (),
            "machines": record.machines if record else (),
            "models": _models(record) if record else (),
            "follows": box.follows,
            "temperature_c": record.temperature_c if record else None,
            "heat": record.heat if record else "",
            "load_limit_percent": record.load_limit_percent if record else None,
        }


def _models(record: BoxRecord) -> list[dict[str, str]]:
    releases = record.releases or {}
    names = sorted({*record.models, *releases} - {PROGRAM})
    models = []
    for name in names:
        release = releases.get(name)
        models.append(
            {
                "name": name,
                "serves": record.models.get(name, ""),
                "installed": release_name(release.installed) if release else "",
                "wanted": release_name(release.wanted) if release else "",
                "state": release.state if release else "",
            }
        )
    return models


def _is_url(key: str) -> bool:
    return key.startswith(("http://", "https://"))


def _host(key: str) -> str:
    return key.removeprefix("http://").removeprefix("https://")
