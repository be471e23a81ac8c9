"""Set of all cameras that the server opens: starts and ends them as the settings say, and passes on their results."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from edge_server.core.back_off import BackOff
from edge_server.errors import EdgeServerError
from edge_server.plugins.cameras.reports import SourceReport
from edge_server.plugins.cameras.source_and_sink_settings import SourceEntry
from edge_server.plugins.cameras.sources.source_runner import BACK_OFF, FAILED, RUNNING, SourceRunner
from edge_server.plugins.cameras.streams.camera_stream import CameraStream
from edge_server.plugins.cameras.streams.stream_registry import StreamRegistry
from edge_server.protocol.frame_messages import FrameResult
from edge_server.telemetry.event_bus import PublishEvent
from edge_server.telemetry.metrics_page import Family

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SOURCE_RUNNING = "source.running"
SOURCE_FAILED = "source.failed"

_LOG = logging.getLogger(__name__)

MakePixels: TypeAlias = "Callable[[], npt.NDArray[np.uint8]]"
_Ready: TypeAlias = "tuple[CameraStream, SourceRunner]"


class SourceSet:
    """Runs the sources of the server. One thread at a time may call `apply` and `close`; the rest is thread-safe.

    `on_result` gets the entry of a source, each of its results, the clock of its stamp, and for sources in `pictured` a
    function that makes the pixels of its frame. `on_state` gets each change of a source's state. Both must return at
    once.
    """

    def __init__(
        self,
        streams: StreamRegistry,
        publish: PublishEvent,
        on_result: Callable[[SourceEntry, FrameResult, str, MakePixels | None], None],
        on_state: Callable[[SourceRunner], None],
        back_off: BackOff = BACK_OFF,
    ) -> None:
        self._streams = streams
        self._publish = publish
        self._on_result = on_result
        self._on_state = on_state
        self._back_off = back_off
        self._runners: dict[str, SourceRunner] = {}
        self._stopped: list[SourceRunner] = []
        """Removed sources whose threads may still wait for a camera."""
        self._ready: SimpleQueue[_Ready | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def apply(self, entries: Mapping[str, SourceEntry], pictured: Collection[str] = ()) -> None:
        """Stop the sources that are absent or changed, and start the new and the changed ones. The results of those
        whose names are in `pictured` come with their pictures."""
        for name, runner in list(self._runners.items()):
            entry = entries.get(name)
            if entry is not None and runner.may_keep_open(entry):
                if entry != runner.entry:
                    runner.replace_entry(entry)
                    self._on_state(runner)
            else:
                runner.stop()
                self._stopped = [*(other for other in self._stopped if not other.join(0.0)), runner]
                self._runners = {kept: one for kept, one in self._runners.items() if kept != name}
                _LOG.info("source '%s' was removed", name)
        self._streams.reserve(frozenset(entries))
        if entries and self._thread is None:
            self._thread = threading.Thread(target=self._take_results, name="source-results", daemon=True)
            self._thread.start()
        for name, entry in entries.items():
            is_new = name not in self._runners
            if is_new:
                runner = SourceRunner(entry, self._streams, self._watch, self._on_change, self._back_off)
                self._runners = {**self._runners, name: runner}
            self._runners[name].keeps_pictures = name in pictured
            if is_new:
                self._runners[name].start()

    def close(self, timeout_s: float) -> None:
        """Stop all sources. Wait at most `timeout_s` for their threads."""
        self.apply({})
        stopped, self._stopped = self._stopped, []
        thread, self._thread = self._thread, None
        end_s = time.monotonic() + timeout_s
        if thread is not None:
            self._ready.put(None)
            thread.join(timeout_s)
        for runner in stopped:
            runner.join(max(0.0, end_s - time.monotonic()))

    def reports(self) -> Sequence[SourceReport]:
        """Return reports of the sources, sorted by name."""
        return [runner.report() for _, runner in sorted(self._runners.items())]

    def runners(self) -> Collection[SourceRunner]:
        """Return the sources."""
        return self._runners.values()

    def labels_of(self, name: str) -> Sequence[str]:
        """Return the classes that the model of a source counts, as far as known."""
        runner = self._runners.get(name)
        return () if runner is None else runner.labels

    def is_tracked(self, name: str) -> bool:
        """Return whether the objects of a source are known to get numbers."""
        runner = self._runners.get(name)
        return runner is not None and runner.is_tracked

    def families(self) -> list[Family]:
        """Return the metrics of the sources; their frames are counted with those of all streams."""
        running = Family("edge_source_running", "gauge", "Whether the camera delivers pictures")
        failures = Family("edge_source_failures_total", "counter", "Ends of the connection to the camera")
        offline = Family("edge_source_offline_seconds_total", "counter", "Time without the camera")
        for report in self.reports():
            labels = {"source": report.name, "model": report.model}
            running.add(labels, int(report.state == RUNNING))
            failures.add(labels, report.failures)
            offline.add(labels, report.offline_s)
        return [running, failures, offline, *self._zone_families()]

    def _zone_families(self) -> list[Family]:
        objects = Family("edge_zone_objects", "gauge", "Objects in the zone, by class")
        loitering = Family("edge_zone_loitering_objects", "gauge", "Objects that loiter in the zone")
        entered = Family("edge_zone_entered_total", "counter", "Objects that entered the zone")
        crossings = Family("edge_line_crossings_total", "counter", "Crossings of the line")
        for source, runner in sorted(self._runners.items()):
            report = runner.zone_report
            for zone in report.zones:
                labels = {"source": source, "zone": zone.zone}
                entered.add(labels, zone.entered)
                for label, count in zone.counts.items():
                    objects.add({**labels, "class": label}, count)
                if zone.loitering is not None:
                    loitering.add(labels, sum(zone.loitering.values()))
            for line in report.lines:
                for direction, count in (("in", line.in_count), ("out", line.out_count)):
                    crossings.add({"source": source, "line": line.line, "direction": direction}, count)
        return [objects, loitering, entered, crossings]

    def _watch(self, stream: CameraStream, runner: SourceRunner) -> None:
        # Called with the lock of all streams held; putting into a SimpleQueue takes no other lock.
        stream.watch(lambda: self._ready.put((stream, runner)))

    def _take_results(self) -> None:
        while (ready := self._ready.get()) is not None:
            stream, runner = ready
            try:
                self._pass_results(stream, runner)
                if stream.is_finished:
                    stream.end()
            except EdgeServerError:
                stream.end()  # the server is stopping
            # No reference to frames while waiting.
            del ready, stream, runner

    def _pass_results(self, stream: CameraStream, runner: SourceRunner) -> None:
        # A function of its own: its end drops the last frame, which the caller must not keep while it waits.
        while (message := stream.next_message()) is not None:
            if isinstance(result := message[0], FrameResult):
                self._on_result(runner.entry, result, runner.record_result(result), runner.take_picture(result))

    def _on_change(self, runner: SourceRunner) -> None:
        if self._runners.get(runner.entry.name) is not runner:
            return
        if runner.state == RUNNING:
            self._publish(SOURCE_RUNNING, source=runner.entry.name, model=runner.entry.model)
        elif runner.state == FAILED:
            self._publish(SOURCE_FAILED, source=runner.entry.name, model=runner.entry.model, reason=runner.reason)
        self._on_state(runner)
