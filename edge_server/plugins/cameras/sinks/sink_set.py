"""Set of all running sinks, by name: starts and ends them as the settings say, and passes results to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence

from edge_server.plugins.cameras.reports import SinkReport
from edge_server.plugins.cameras.sinks.sink_interface import SinkMessage
from edge_server.plugins.cameras.sinks.sink_runner import FAILED, RUNNING, SinkRunner
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry
from edge_server.telemetry.event_bus import PublishEvent
from edge_server.telemetry.metrics_page import Family

SINK_RUNNING = "sink.running"
SINK_FAILED = "sink.failed"

_LOG = logging.getLogger(__name__)


class SinkSet:
    """Sends messages to sinks. One thread at a time may call `apply` and `close`; the rest is thread-safe."""

    def __init__(self, publish: PublishEvent) -> None:
        self._publish = publish
        self._runners: dict[str, SinkRunner] = {}

    def apply(self, entries: Mapping[str, SinkEntry], timeout_s: float = 2.0) -> Collection[str]:
        """Close the sinks that are absent or changed, each within `timeout_s`, and make the new and changed ones.

        Return the names of those that were made.
        """
        before = self._runners
        kept = {name: runner for name, runner in before.items() if entries.get(name) == runner.entry}
        made = {name: SinkRunner(entry, self._on_change) for name, entry in entries.items() if name not in kept}
        self._runners = {**kept, **made}
        end_s = time.monotonic() + timeout_s
        for name, runner in before.items():
            if name not in kept:
                runner.close(max(0.0, end_s - time.monotonic()))
                _LOG.info("sink '%s' was removed", name)
        return made

    def put(self, names: Collection[str] | None, message: SinkMessage) -> None:
        """Send a message to the named sinks, or to all. Returns at once."""
        runners = self._runners
        for name in runners if names is None else names:
            runner = runners.get(name)
            if runner is not None:
                runner.put(message)

    def close(self, timeout_s: float) -> None:
        """Send what waits, within `timeout_s`, and close all sinks."""
        self.apply({}, timeout_s)

    def reports(self) -> Sequence[SinkReport]:
        """Return reports of the sinks, sorted by name."""
        return [runner.report() for _, runner in sorted(self._runners.items())]

    def families(self) -> list[Family]:
        """Return the metrics of the sinks."""
        failed = Family("edge_sink_failed", "gauge", "Whether the last message to the sink failed")
        messages = Family("edge_sink_messages_total", "counter", "Messages to the sink, by what became of them")
        for report in self.reports():
            failed.add({"sink": report.name}, int(report.state == FAILED))
            for result in ("delivered", "suppressed", "dropped"):
                messages.add({"sink": report.name, "result": result}, getattr(report, result))
        return [failed, messages]

    def _on_change(self, runner: SinkRunner) -> None:
        if runner.state == RUNNING:
            self._publish(SINK_RUNNING, sink=runner.entry.name)
        elif runner.state == FAILED:
            self._publish(SINK_FAILED, sink=runner.entry.name, reason=runner.reason)
