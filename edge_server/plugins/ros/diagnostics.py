"""Diagnostics of a bridge for /diagnostics: its frames, its connection, and the governor of its server.

The names are "NODE: frames", "NODE: server" and "NODE: governor", for diagnostic_aggregator's analyzers. With several
cameras the first two come once a camera, as "NODE: frames of /image". `hardware_id` is the server's address. The
governor's state is that of `edge-server status`, read over HTTP by a thread.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Mapping
from typing import Any

from edge_server.cli import http_client
from edge_server.client import StreamOpened
from edge_server.plugins.ros.bridge_counts import BridgeCounts
from edge_server.plugins.ros.bridge_log import describe_server
from edge_server.plugins.ros.messages.message_conversion import (
    DiagnosticLevel,
    DiagnosticsMessage,
    DiagnosticStatus,
    stamp_now,
)

_READ_INTERVAL_S = 1.0
_READ_TIMEOUT_S = 2.0
_STALE_S = 5.0
_HTTP_PORT = 8000

_NORMAL_DROPS = {"newer", "max fps", "overtaken before sending"}
"""Reasons of drops by which a bridge keeps to the newest frame, or to `max_fps`."""

_LEVELS = {
    "NORMAL": DiagnosticLevel.OK,
    "WARM": DiagnosticLevel.OK,
    "HOT": DiagnosticLevel.WARN,
    "THROTTLED": DiagnosticLevel.WARN,
    "CRITICAL": DiagnosticLevel.ERROR,
}


class Diagnostics:
    """Makes the diagnostics of one bridge, for `topic`. `http_url` is the server's HTTP address; "" means port 8000 of
    the host in `address`. With `names_cameras` the names of statuses have the image topic: for several cameras. `start`
    begins to read the governor's state, `close` ends it."""

    def __init__(
        self, topic: str, node_name: str, address: str, http_url: str = "", *, names_cameras: bool = False
    ) -> None:
        self.topic = topic
        self._names_cameras = names_cameras
        self._node_name = node_name.strip("/")
        self._address = address
        url = http_url.rstrip("/") or f"http://{address.rpartition(':')[0]}:{_HTTP_PORT}"
        self._request = argparse.Namespace(
            url=url, header=(), timeout=_READ_TIMEOUT_S, tls_root=None, tls_cert=None, tls_key=None
        )
        # The governor's status and when it was read, and why it could not be read.
        self._governor: tuple[float, DiagnosticStatus] | None = None
        self._governor_problem = "not read yet"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_repeatedly, name="ros-diagnostics", daemon=True)

    def start(self) -> None:
        """Start to read the governor's state once a second."""
        self._thread.start()

    def close(self) -> None:
        """Have the thread end after the request that it may be in."""
        self._ended.set()

    def make_message(self, *statuses: DiagnosticStatus) -> DiagnosticsMessage:
        """Return the message with these statuses and that of the governor: STALE when its state could not be read for
        some seconds."""
        if self._governor is not None and time.monotonic() - self._governor[0] <= _STALE_S:
            governor = self._governor[1]
        else:
            governor = self._status("governor", DiagnosticLevel.STALE, self._governor_problem, {})
        return DiagnosticsMessage(stamp_now(), (*statuses, governor))

    def frames_status(self, topic: str, counts: BridgeCounts, silence: str) -> DiagnosticStatus:
        """Return the status of the frames in the last seconds: rates, drops, latency.

        ERROR without images, as diagnostic_updater has it, or without results. WARN for errors and for drops other than
        by newer frames. `silence` says why no images come, if known.
        """
        failed = counts.failed + counts.refused
        drops = {reason: count for reason, count in counts.drops.items() if reason not in _NORMAL_DROPS}
        rates = f"in {counts.received / counts.seconds:.1f}/s, out {counts.answered / counts.seconds:.1f}/s"
        level, message = DiagnosticLevel.OK, rates
        if not counts.received and not counts.answered:
            level = DiagnosticLevel.ERROR
            message = f"no images in the last {counts.seconds:.0f} s" + (f": {silence}" if silence else "")
        elif not counts.answered:
            level, message = DiagnosticLevel.ERROR, f"{rates}: {counts.last_error or 'no results'}"
        elif failed or counts.late or drops:
            level = DiagnosticLevel.WARN
            parts = [f"{count} {reason}" for reason, count in drops.items()]
            parts += [f"{counts.late} too late"] if counts.late else []
            parts += [f"{failed} failed: {counts.last_error}"] if failed else []
            message = f"{rates}: {', '.join(parts)}"
        values = {
            "image topic": topic,
            "images per second": f"{counts.received / counts.seconds:.2f}",
            "results per second": f"{counts.answered / counts.seconds:.2f}",
            "too late": str(counts.late),
            "failed": str(failed),
            "last error": counts.last_error,
            **{f"dropped: {reason}": str(count) for reason, count in counts.drops.items()},
        }
        if counts.latencies_s:
            values["latency p50 (ms)"] = f"{counts.latency_ms(0.5):.1f}"
            values["latency p99 (ms)"] = f"{counts.latency_ms(0.99):.1f}"
        return self._status(self._name("frames", topic), level, message, values)

    def server_status(self, topic: str, opened: StreamOpened | None, error: str) -> DiagnosticStatus:
        """Return the status of the connection: ERROR with `error`, or while there never was a connection."""
        name, values = self._name("server", topic), {"address": self._address}
        if opened is not None:
            values |= {"model": opened.model, "version": str(opened.version), "runtime": opened.runtime}
            values |= {"stream id": opened.stream_id, "server": opened.server}
        if error or opened is None:
            return self._status(name, DiagnosticLevel.ERROR, error or "not connected yet", values)
        return self._status(name, DiagnosticLevel.OK, describe_server(opened), values)

    def _name(self, subject: str, topic: str) -> str:
        return f"{subject} of {topic}" if self._names_cameras else subject

    def _describe_governor(self, report: Mapping[str, Any]) -> DiagnosticStatus:
        """Return the status for a response of GET /edge/v1/governor."""
        if not report["enabled"]:
            return self._status("governor", DiagnosticLevel.OK, f"off: {report['detail']}", {})
        state, detail = str(report["state"]), report["detail"]
        message = f"{state} - {detail}" if detail else state
        return self._status("governor", _LEVELS.get(state, DiagnosticLevel.WARN), message, _governor_values(report))

    def _status(self, name: str, level: DiagnosticLevel, message: str, values: Mapping[str, str]) -> DiagnosticStatus:
        return DiagnosticStatus(level, f"{self._node_name}: {name}", message, self._address, values)

    def _read_repeatedly(self) -> None:
        while not self._ended.is_set():
            try:
                report = http_client.request_json(self._request, "/edge/v1/governor")
                self._governor = time.monotonic(), self._describe_governor(report)
            except (http_client.Refused, *http_client.NO_ANSWER) as error:
                self._governor_problem = f"{self._request.url}/edge/v1/governor: {error}"
            except (AttributeError, KeyError, TypeError) as error:
                self._governor_problem = f"{self._request.url}/edge/v1/governor is not of an edge-server: {error!r}"
            self._ended.wait(_READ_INTERVAL_S)


def _governor_values(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the known values of a response of GET /edge/v1/governor as texts."""
    keys = {
        "temperature_c": "temperature (C)",
        "set_point_c": "set point (C)",
        "power_w": "power (W)",
        "power_budget_w": "power budget (W)",
        "share": "share of full work",
        "limited_by": "limited by",
        "capacity": "capacity",
        "busy": "busy",
    }
    values = {name: str(report[key]) for key, name in keys.items() if report.get(key) is not None}
    values["causes"] = ", ".join(map(str, report.get("causes") or ()))
    values["sensors lost"] = ", ".join(map(str, report.get("sensors_lost") or ()))
    box = report.get("box") or {}
    if mode := box.get("power_mode"):
        values["power mode"] = str(mode.get("name"))
    if box.get("board"):
        values["board"] = str(box["board"])
    for item in report.get("shed") or ():
        values[f"refused: {item.get('class')} ({item.get('reason')})"] = str(item.get("count"))
    return values
