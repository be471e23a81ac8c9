"""Reader of the reports that boxes keep in retained topics of an MQTT broker.

A client that may write there can write anything. So sizes and counts are bounded, and a report counts only if it is
about the box of its topic, the box is online, and the time of the report is near.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from typing import Any
from urllib.parse import quote, unquote

from edge_server.errors import InvalidRequest
from edge_server.plugins.cameras.sinks.mqtt_connection import OFFLINE, ONLINE, BrokerAddress, MqttConnection
from edge_server.plugins.fleet.reports.box_report import MAX_REPORT_BYTES, REFRESH_S, BoxReport, parse_report
from edge_server.plugins.fleet.settings import DEFAULT_TOPIC

MAX_AGE_S = 4 * REFRESH_S
"""Largest difference between the time of a report and this machine's clock."""
MAX_BOXES = 1000

_MAX_KEY_CHARS = 3 * 4 * 200
"""Of a name of 200 characters of four bytes each, percent-encoded."""
_MAX_TOTAL_BYTES = 64 << 20
"""Most bytes of the kept reports."""
_QUIET_S = 0.5
"""The broker has sent all that it retained, if nothing of it came for so long."""


class MqttBoxes:
    """Keeps the newest report of each box while it is open. `read` and `close` are called by one thread."""

    def __init__(
        self, broker: BrokerAddress, topic: str = DEFAULT_TOPIC, boxes: Collection[str] = (), timeout_s: float = 5.0
    ) -> None:
        """`boxes`: names of the boxes of the fleet; others are ignored, and those that do not report are named. ():
        all that report."""
        self._topic = topic.strip("/") or DEFAULT_TOPIC
        self._boxes = frozenset(boxes)
        self._timeout_s = timeout_s
        self._connection = MqttConnection(
            broker, f"edge-fleet-{os.urandom(6).hex()}", on_message=self._note,
            # With the topic and the properties of MQTT 5.
            max_packet_bytes=MAX_REPORT_BYTES + len(self._topic.encode()) + _MAX_KEY_CHARS + 100,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._reports: dict[str, dict[str, Any] | str] = {}
        """Box as in the topic -> its report, or why it is refused."""
        self._sizes: dict[str, int] = {}
        self._total_bytes = 0
        self._statuses: dict[str, str] = {}
        self._problems: set[str] = set()
        """What was ignored."""
        self._retained_s = 0.0
        """When the last message came that was retained before, on the clock of `time.monotonic`."""

    def read(self) -> list[BoxReport]:
        """Return the newest report of each box, by name. Raises EdgeServerError if the broker cannot be read."""
        if not self._connection.is_open:
            self.close()
            self._open()
        with self._lock:
            found = [self._box(key, time.time()) for key in sorted({*self._reports, *self._statuses})]
            found += [BoxReport(f"{self._topic}/...", problem, None) for problem in sorted(self._problems)]
            if not found and not self._boxes:
                found.append(
                    BoxReport(f"{self._topic}/...", "no box reports: may this client read these topics?", None)
                )
        missing = self._boxes - {box.name for box in found}
        return found + [BoxReport(name, f"no report in {self._topic}", None) for name in sorted(missing)]

    def close(self) -> None:
        self._connection.close()
        with self._lock:
            for kept in (self._reports, self._sizes, self._statuses, self._problems):
                kept.clear()
            self._total_bytes = 0

    def _open(self) -> None:
        """Connect, and wait for what the broker has retained. Raises EdgeServerError."""
        self._connection.open()
        # Quality of service 0: brokers bound the queue of messages that wait for an acknowledgement.
        self._connection.subscribe([f"{self._topic}/+/{kind}" for kind in ("report", "status")], qos=0)
        self._connection.wait_subscribed()
        began_s = time.monotonic()
        while time.monotonic() < began_s + self._timeout_s:
            with self._lock:
                quiet_s = time.monotonic() - max(began_s, self._retained_s)
                known = {unquote(key) for key in self._reports.keys() & self._statuses.keys()}
            if quiet_s >= _QUIET_S or (self._boxes and known >= self._boxes):
                break
            time.sleep(0.02)
        self._connection.check()

    def _box(self, key: str, now_s: float) -> BoxReport:
        name, report = unquote(key), self._reports.get(key)
        if isinstance(report, str):
            return BoxReport(name, report, None)
        if self._statuses.get(key, OFFLINE) != ONLINE:
            when = "" if report is None else f"; its last report is of {_date(report['reported_s'])}"
            return BoxReport(name, f"offline{when}", report)
        if report is None:
            return BoxReport(name, f"online without a report of at most {MAX_REPORT_BYTES} bytes", None)
        age_s = now_s - report["reported_s"]
        if abs(age_s) > MAX_AGE_S:
            side = "ago" if age_s > 0 else "ahead: is its clock right?"
            when = f"{_date(report['reported_s'])}, {abs(age_s):.0f} s {side}"
            return BoxReport(name, f"its last report is of {when}", report)
        return BoxReport(name, "", report)

    # -- the connection's thread

    def _note(self, topic: str, payload: bytes, is_retained: bool) -> None:
        key, _, kind = topic.removeprefix(f"{self._topic}/").rpartition("/")
        name = unquote(key)
        if self._boxes and name not in self._boxes:
            return
        with self._lock:
            if is_retained:
                self._retained_s = time.monotonic()
            if not name.isprintable() or quote(name, safe="") != key or len(key) > _MAX_KEY_CHARS:
                self._problems.add("topics that are of no box are ignored")
                return
            size = self._sizes.get(key, 0)
            if not payload:  # deleted from the broker
                if kind == "status":
                    self._statuses.pop(key, None)
                elif self._reports.pop(key, None) is not None:
                    self._total_bytes -= self._sizes.pop(key)
                return
            is_new = key not in self._reports and key not in self._statuses
            total = self._total_bytes - size + (len(payload) if kind == "report" else size)
            is_one_more = is_new and len({*self._reports, *self._statuses}) >= MAX_BOXES
            if is_one_more or total > _MAX_TOTAL_BYTES:
                limit = f"{MAX_BOXES} boxes and {_MAX_TOTAL_BYTES >> 20} MB of reports"
                self._problems.add(f"more than {limit}: the rest is ignored")
            elif kind == "status":
                self._statuses[key] = ONLINE if payload == ONLINE.encode() else OFFLINE
            else:
                self._total_bytes, self._sizes[key] = total, len(payload)
                self._reports[key] = _report_of(name, payload)


def _report_of(name: str, payload: bytes) -> dict[str, Any] | str:
    """Return the report of a box, or why it is refused."""
    try:
        report = parse_report(payload)
    except InvalidRequest as error:
        return error.message
    if report["follow"]["box"] != name:
        return f"its report is of another box, '{report['follow']['box']}'"
    return report


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
