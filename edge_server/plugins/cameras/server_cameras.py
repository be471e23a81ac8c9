"""Cameras that the server opens itself: reads their settings again when the file changes, starts and ends them, and
sends results to the sinks."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from edge_server.config import ConfigError
from edge_server.errors import Draining, InvalidRequest, NotFound
from edge_server.file_stamp import file_stamp
from edge_server.plugins.cameras.questions.question import QUESTION_ANSWERED, QuestionAnswer
from edge_server.plugins.cameras.reports import CamerasReport
from edge_server.plugins.cameras.settings import SourcesConfig
from edge_server.plugins.cameras.sinks.result_json import zone_event_fields
from edge_server.plugins.cameras.sinks.sink_interface import REMOVED, SinkMessage
from edge_server.plugins.cameras.sinks.sink_set import SinkSet
from edge_server.plugins.cameras.source_and_sink_settings import (
    SinkEntry,
    SourceEntry,
    check_required_zones,
    read_entries,
    takes_pictures,
)
from edge_server.plugins.cameras.sources.source_runner import CONNECTING, SourceRunner
from edge_server.plugins.cameras.sources.source_set import MakePixels, SourceSet
from edge_server.plugins.cameras.streams.stream_registry import StreamRegistry
from edge_server.plugins.cameras.zones.zone_settings import LineEntry, ZoneEntry, entries_as_plain
from edge_server.plugins.cameras.zones.zone_store import SOURCES_FILE, STATE_FOLDER, Shapes, ZoneStore
from edge_server.protocol.frame_messages import FrameResult
from edge_server.telemetry.event_bus import EventBus
from edge_server.telemetry.metrics_page import Family

if TYPE_CHECKING:
    from edge_server.plugins.cameras.questions.question_set import QuestionSet
    from edge_server.service import InferenceService

SOURCES_FILE_REFUSED = "sources.file_refused"

_LOG = logging.getLogger(__name__)

POLL_S = 1.0
"""Time between two looks at the file. A change counts once two looks find the same size and time."""

_CLOSE_S = 2.0
"""Longest time for the sources to end, and again for the sinks to send what waits."""


class ServerCameras:
    """The sources and sinks of a server. A mistake in their file leaves those that run unchanged, and is reported.

    At the start it opens no camera, and the server's models serve nevertheless: a machine in the field must not lose
    them with its cameras.
    """

    def __init__(
        self,
        config: SourcesConfig,
        streams: StreamRegistry,
        events: EventBus,
        service: InferenceService,
        state_dir: str = "",
    ) -> None:
        self._config = config
        self._service = service
        self._zone_store = ZoneStore(config.file, state_dir)
        self._changing = threading.Lock()
        """Held while the sources change."""
        self._state_order = threading.Lock()
        """Held from the reading of a source's state until the sinks have it, so that the newest comes last."""
        self._events = events
        self._sinks = SinkSet(events.publish)
        self._sources = SourceSet(
            streams, events.publish, self._on_result, lambda runner: self._send_state(runner, runner.entry.sinks)
        )
        self._questions: QuestionSet | None = None
        """Made for the first source with questions."""
        self._entries: dict[str, SourceEntry] = {}
        self._problem = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the sources. From then on a thread follows the file, if there is one."""
        look = _file_identity(self._config.file)
        with self._changing:
            self._apply()
        if self._config.file:
            self._thread = threading.Thread(target=self._follow, args=(look,), name="sources-file", daemon=True)
            self._thread.start()

    def stop_sources(self) -> None:
        """Stop all sources and cancel questions; the last results still go to the sinks."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._changing:
            self._sources.close(_CLOSE_S)
            if self._questions is not None:
                self._questions.close(_CLOSE_S)

    def close(self) -> None:
        """Stop the sources, if not done, and close the sinks."""
        self.stop_sources()
        self._sinks.close(_CLOSE_S)

    def report(self) -> CamerasReport:
        questions = () if self._questions is None else tuple(self._questions.reports())
        return CamerasReport(tuple(self._sources.reports()), tuple(self._sinks.reports()), self._problem, questions)

    def families(self) -> list[Family]:
        """Return the metrics of sources, sinks and questions."""
        questions = [] if self._questions is None else self._questions.families()
        return [*self._sources.families(), *self._sinks.families(), *questions]

    def answers_as_json(self, source: str) -> dict[str, object]:
        """Return the last answer to each question of a source. Raises NotFound."""
        if source not in self._entries:
            raise _no_camera(source)
        answers = () if self._questions is None else self._questions.answers(source)
        return {
            "source": source,
            "answers": [{**answer.fields(), "time_s": round(answer.time_s, 3)} for answer in answers],
        }

    def zones_as_json(self, source: str) -> dict[str, object]:
        """Return the zones and lines of a source, with `classes`, those that its model knows. Raises NotFound."""
        entry = self._entries.get(source)
        if entry is None:
            raise _no_camera(source)
        stored_in = STATE_FOLDER if source in self._zone_store.changes else SOURCES_FILE
        return {
            "source": source,
            "zones": entries_as_plain(entry.zones),
            "lines": entries_as_plain(entry.lines),
            "classes": self._sources.labels_of(source),
            "stored_in": stored_in,
        }

    def set_zones(self, source: str, zones: tuple[ZoneEntry, ...], lines: tuple[LineEntry, ...]) -> dict[str, object]:
        """Change the zones and lines of a source, and keep them. *Blocking* for milliseconds. Return `zones_as_json`.

        Raises NotFound, Draining, and InvalidRequest if a sink requires a zone that would be gone, or if the change
        cannot be kept.
        """
        with self._changing:
            if self._stop.is_set():
                raise Draining("the server is stopping")
            shapes = Shapes(zones, lines)
            try:
                sources, _ = read_cameras(self._config, {**self._zone_store.changes, source: shapes})
            except ConfigError as error:
                raise InvalidRequest(str(error)) from None
            if source not in sources:
                raise _no_camera(source)
            is_in_file = source not in {own.name for own in self._config.sources}
            self._zone_store.save(source, shapes, is_in_file=is_in_file)
            self._apply()
        return self.zones_as_json(source)

    def _apply(self) -> None:
        try:
            sources, sinks = read_cameras(self._config, self._zone_store.changes)
        except ConfigError as error:
            problem = ("the cameras are unchanged: " if self._entries else "no camera is open: ") + str(error)
            if problem != self._problem:
                self._problem = problem
                _LOG.error("%s", problem)
                self._events.publish(SOURCES_FILE_REFUSED, reason=self._problem)
            return
        self._problem = ""
        # New sinks first and old ones last, so that no result finds its sink absent.
        if sources:
            new_sinks = self._sinks.apply(sinks)
            for runner in self._sources.runners():  # sources that stay: new sinks do not know their states
                if runner.entry.name in sources:
                    self._send_state(runner, _sink_names(runner.entry, new_sinks).intersection(new_sinks))
        pictured = {
            name
            for name, entry in sources.items()
            if entry.questions or any(takes_pictures(sinks[sink]) for sink in _sink_names(entry, sinks))
        }
        if self._questions is None and any(entry.questions for entry in sources.values()):
            from edge_server.plugins.cameras.questions.question_set import QuestionSet

            self._questions = QuestionSet(self._service, self._on_answer)
        if self._questions is not None:
            self._questions.apply(sources)
        self._sources.apply(sources, pictured)
        for name, entry in self._entries.items():
            kept = _sink_names(sources[name], sinks) if name in sources else set()
            gone = _sink_names(entry, sinks) - kept
            self._sinks.put(sorted(gone), SinkMessage(name, state=REMOVED))
        self._entries = sources
        self._sinks.apply(sinks)

    def _follow(self, seen: object) -> None:
        applied = seen
        while not self._stop.wait(POLL_S):
            before, seen = seen, _file_identity(self._config.file)
            if seen == before and seen != applied:
                applied = seen
                with self._changing:
                    self._apply()

    def _on_result(self, entry: SourceEntry, result: FrameResult, clock: str, picture: MakePixels | None) -> None:
        self._sinks.put(entry.sinks, SinkMessage(entry.name, result, clock, picture=picture))
        for event in () if result.zones is None else result.zones.events:
            self._events.publish_frequent(event.kind, source=entry.name, **zone_event_fields(event))
            self._sinks.put(entry.sinks, SinkMessage(entry.name, event=event, header=result.header, clock=clock))
        if entry.questions and self._questions is not None:
            is_tracked = self._sources.is_tracked(entry.name)
            self._questions.on_result(entry, result, clock, picture, is_tracked=is_tracked)

    def _on_answer(self, answer: QuestionAnswer) -> None:
        self._events.publish_frequent(QUESTION_ANSWERED, source=answer.source, **answer.fields())
        entry = self._entries.get(answer.source)
        if entry is not None:
            self._sinks.put(entry.sinks, SinkMessage(answer.source, answer=answer))

    def _send_state(self, runner: SourceRunner, sinks: Collection[str] | None) -> None:
        with self._state_order:
            if runner.state == CONNECTING:
                return
            message = SinkMessage(
                runner.entry.name,
                state=runner.state,
                reason=runner.reason,
                labels=runner.labels,
                has_classes=runner.has_classes,
                is_tracked=runner.is_tracked,
                zones=runner.entry.zones,
                lines=runner.entry.lines,
                questions=runner.entry.questions,
            )
            self._sinks.put(sinks, message)


def read_cameras(
    config: SourcesConfig, changes: Mapping[str, Shapes]
) -> tuple[dict[str, SourceEntry], dict[str, SinkEntry]]:
    """Return by name the sources, some with changed zones, and the sinks. Raises ConfigError."""
    sources, sinks = read_entries(config.file, config.sources, config.sinks)
    for name, kept in changes.items():
        if name in sources:
            sources[name] = dataclasses.replace(sources[name], zones=kept.zones, lines=kept.lines)
    check_required_zones(sources, sinks)
    return sources, sinks


def _no_camera(source: str) -> NotFound:
    return NotFound(f"the server opens no camera '{source[:80]}'")


def _sink_names(entry: SourceEntry, sinks: Collection[str]) -> set[str]:
    return set(sinks if entry.sinks is None else entry.sinks)


def _file_identity(path: str) -> object:
    """Return the stamp of a file, or None if there is none."""
    try:
        return file_stamp(os.stat(path))
    except OSError:
        return None
