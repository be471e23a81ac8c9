"""Thread of one sink: makes the sink of its URL, sends the messages that wait, not more often than allowed, and
connects again after a failure."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Literal

from edge_server.config.setting import shown_url
from edge_server.core.back_off import BackOff
from edge_server.plugins.cameras.failure_reason import failure_reason, unknown_class_hint
from edge_server.plugins.cameras.reports import SinkReport
from edge_server.plugins.cameras.sinks.json_lines_file import JsonLinesFile
from edge_server.plugins.cameras.sinks.mqtt import MqttBroker
from edge_server.plugins.cameras.sinks.result_json import best_class, label_counts
from edge_server.plugins.cameras.sinks.sink_interface import REMOVED, Sink, SinkMessage
from edge_server.plugins.cameras.sinks.webhook import Webhook
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry, is_file, is_folder, takes_pictures
from edge_server.plugins.cameras.zones.zone_monitor import counted_detections
from edge_server.protocol.frame_messages import FrameResult

_LOG = logging.getLogger(__name__)

MAX_WAITING, MAX_PICTURES_WAITING = 64, 4
"""Messages that wait for a slow receiver, and those of them with pictures. A further one replaces the oldest, or the
oldest loses its picture."""

DEFAULT_INTERVAL_S = 1.0
BACK_OFF = BackOff(first_s=1.0, most_s=30.0)

IDLE, RUNNING, FAILED = "IDLE", "RUNNING", "FAILED"


def make_sink(entry: SinkEntry, wake: Callable[[], None]) -> Sink:
    """Return the sink of an entry, not open yet. It calls `wake`, on any thread, to have `refresh` called soon."""
    if entry.url.startswith(("mqtt://", "mqtts://")):
        return MqttBroker(entry, wake)
    if entry.url.startswith(("http://", "https://")):
        return Webhook(entry.url)
    if is_folder(entry):
        # Imported for the first one, as it needs what draws.
        from edge_server.plugins.cameras.sinks.snapshot_folder import SnapshotFolder

        return SnapshotFolder(entry.url, entry.max_mb * 1_000_000, is_cropped=entry.crop)
    return JsonLinesFile(entry.url, entry.max_mb * 1_000_000)


@dataclass(slots=True)
class _Pace:
    """What was last sent of one source, when, and the newest message that waits until `due_s`."""

    due_s: float = 0.0
    sent_s: float = 0.0
    key: Hashable = None
    held: SinkMessage | None = None


class SinkRunner:
    """One sink. `put` may be called by any thread and returns at once; `on_change` runs on the sink's thread."""

    def __init__(self, entry: SinkEntry, on_change: Callable[[SinkRunner], None], sink: Sink | None = None) -> None:
        self.entry = entry
        self.state, self.reason = IDLE, ""
        self._sink = make_sink(entry, self._ask_refresh) if sink is None else sink
        self._on_change = on_change
        takes_all = is_file(entry)
        self._takes_pictures, self._is_folder = takes_pictures(entry), is_folder(entry)
        self._interval_s = (
            entry.interval_s if entry.interval_s is not None else 0.0 if takes_all else DEFAULT_INTERVAL_S
        )
        self._on_change_only = entry.on_change if entry.on_change is not None else not takes_all
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._waiting: deque[SinkMessage] = deque()
        self._paces: dict[str, _Pace] = {}
        self._labels: dict[str, tuple[str, ...]] = {}
        """The classes of each source's model, as far as known."""
        self._unknown_classes: set[str] = set()
        """The class of each warning, which comes once, however many sources lack it."""
        self._is_closing = self._must_refresh = False
        self._refresh_due_s = 0.0
        self._received = self._delivered = self._suppressed = self._dropped = self._sending = 0
        self._thread: threading.Thread | None = None

    def put(self, message: SinkMessage) -> None:
        """Send the message now or later, or drop it: if it changes nothing, if the receiver is too slow, or if it is an
        event or an answer that the sink does not take."""
        with self._lock:
            if self._is_closing:
                return
            zones = self.entry.required_zones
            event_zones = message.event_zones
            if event_zones is not None and (self._is_folder or (zones and not set(zones).intersection(event_zones))):
                return
            self._received += 1
            if message.picture is not None and not self._takes_pictures:
                message = replace(message, picture=None)  # it must not keep pixels while it waits
            classes = self.entry.classes
            if message.result is None:
                if message.is_state:
                    self._paces.pop(message.source, None)
                    if classes:
                        self._note_labels(message)
                        labels = tuple(label for label in message.labels if label in classes)
                        message = replace(message, labels=labels)
                self._queue(message)
                return
            result = message.result
            if classes and not result.error_code:
                counted = tuple(one for one in result.detections if one.class_name in classes)
                result = replace(result, detections=counted)
                message = replace(message, result=result, encoded=[])
            if zones and not result.error_code:
                result = replace(result, detections=counted_detections(result, zones))
                message = replace(message, result=result, encoded=[])
            pace = self._paces.setdefault(message.source, _Pace())
            now_s = time.monotonic()
            if pace.held is not None:
                self._suppressed += 1
                pace.held = None
            key = self._change_key(result)
            # A receiver with a connection may forget, or let values expire: it is told of what stays the same too.
            refresh_s = self._sink.refresh_s
            is_old = refresh_s is not None and now_s - pace.sent_s >= refresh_s
            if key is not None and key == pace.key and not is_old:
                self._suppressed += 1
            elif now_s < pace.due_s:
                pace.held = message
                self._start()
            else:
                self._pass(pace, message, now_s)

    def close(self, timeout_s: float) -> None:
        """Send what waits, within `timeout_s`, and end. Messages that remain count as dropped."""
        with self._lock:
            self._is_closing = True
            self._wake.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        with self._lock:
            self._dropped += len(self._waiting)
            self._waiting.clear()

    def report(self) -> SinkReport:
        with self._lock:
            held = sum(pace.held is not None for pace in self._paces.values())
            return SinkReport(
                name=self.entry.name,
                url=shown_url(self.entry.url),
                state=self.state,
                reason=self.reason or self._missing_class(),
                received=self._received,
                delivered=self._delivered,
                suppressed=self._suppressed,
                dropped=self._dropped,
                waiting=len(self._waiting) + held + self._sending,
            )

    def _change_key(self, result: FrameResult) -> Hashable:
        """Return the key of a result: the next one with an equal key is not sent. None: it is always sent."""
        if self.entry.required_zones and not result.error_code and not result.detections:
            return "no object in the zones"
        return _result_key(result) if self._on_change_only else None

    # -- with the lock held

    def _note_labels(self, message: SinkMessage) -> None:
        """Keep the classes of a source's model, and warn once of those of the sink that are not among them."""
        if message.state == REMOVED:
            self._labels.pop(message.source, None)
        elif message.labels:
            self._labels[message.source] = message.labels
        for label in self.entry.classes if message.labels else ():
            if label not in message.labels and label not in self._unknown_classes:
                self._unknown_classes.add(label)
                _LOG.warning(
                    "sink '%s': the model of source '%s' has no class '%s'%s", self.entry.name, message.source, label,
                    unknown_class_hint(label, message.labels),
                )  # fmt: skip

    def _missing_class(self) -> str:
        """Return which class no source's model has, so that nothing of it is ever sent; "" if there is none."""
        known = dict.fromkeys(label for labels in self._labels.values() for label in labels)
        for label in self.entry.classes if known else ():
            if label not in known:
                return f"no source's model has class '{label}'{unknown_class_hint(label, tuple(known))}"
        return ""

    def _pass(self, pace: _Pace, message: SinkMessage, now_s: float) -> None:
        assert message.result is not None
        pace.due_s, pace.sent_s = now_s + self._interval_s, now_s
        pace.key = self._change_key(message.result)
        self._queue(message)

    def _queue(self, message: SinkMessage) -> None:
        self._waiting.append(message)
        pictured = [index for index, each in enumerate(self._waiting) if each.picture is not None]
        if len(pictured) > MAX_PICTURES_WAITING and not self._is_folder:
            self._waiting[pictured[0]] = replace(self._waiting[pictured[0]], picture=None)
        if len(self._waiting) > (MAX_PICTURES_WAITING if self._is_folder else MAX_WAITING):
            # The newest state of each source is kept, or the receiver would never know it.
            newest = {each.source: each for each in self._waiting if each.is_state}
            oldest = next((each for each in self._waiting if newest.get(each.source) is not each), None)
            if oldest is not None:
                self._waiting.remove(oldest)
                self._dropped += 1
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"sink-{self.entry.name}"[:60], daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the next message tries again
                self.state, self.reason = FAILED, "the system grants no thread"
                return
            self._thread = thread
        self._wake.notify_all()

    def _ask_refresh(self) -> None:
        with self._lock:
            self._must_refresh = True
            self._wake.notify_all()

    def _next(self, is_open: bool) -> SinkMessage | Literal["refresh", "end"]:
        """Wait for a message, and return it, or what is to be done instead."""
        refresh_s = self._sink.refresh_s
        while True:
            now_s = time.monotonic()
            due_s = self._refresh_due_s if refresh_s is not None else None
            if is_open and not self._is_closing and (self._must_refresh or (due_s is not None and now_s >= due_s)):
                return "refresh"
            for pace in self._paces.values():
                if pace.held is None:
                    continue
                if self._is_closing or pace.due_s <= now_s:
                    message, pace.held = pace.held, None
                    self._pass(pace, message, now_s)
                else:
                    due_s = pace.due_s if due_s is None else min(due_s, pace.due_s)
            if self._waiting:
                self._sending = 1
                return self._waiting.popleft()
            if self._is_closing:
                return "end"
            if refresh_s is not None and not is_open:
                return "refresh"
            self._wake.wait(None if due_s is None else due_s - now_s)

    # -- the thread

    def _run(self) -> None:
        failures, is_open, is_sent = 0, False, False
        while True:
            with self._lock:
                step = self._next(is_open)
            if step == "end":
                break
            message = step if isinstance(step, SinkMessage) else None
            try:
                if not is_open:
                    self._sink.open()
                    is_open = True
                if message is None:
                    with self._lock:
                        self._must_refresh = False
                        self._refresh_due_s = time.monotonic() + (self._sink.refresh_s or 0.0)
                    self._sink.refresh()
                else:
                    is_sent = self._sink.send(message)
            except Exception as error:  # noqa: BLE001 - boundary of the thread: a sink must not stay silent for ever
                reason = failure_reason(f"sink '{self.entry.name}'", error)
            else:
                failures = 0
                with self._lock:
                    self._delivered += message is not None and is_sent
                    self._suppressed += message is not None and not is_sent
                    self._sending = 0
                self._set_state(RUNNING, "")
                continue
            failures += 1
            with self._lock:
                self._sending = 0
                if message is None:
                    pass
                elif is_open:
                    # It is not sent again: a message that a receiver refuses would hold up all others.
                    self._dropped += 1
                else:
                    self._waiting.appendleft(message)
                if failures == 1:
                    # The next result of each source is sent whatever it is: the receiver may have missed a change.
                    for pace in self._paces.values():
                        pace.key = None
            self._sink.close()
            is_open = False
            self._set_state(FAILED, reason)
            with self._lock:
                end_s = time.monotonic() + BACK_OFF.delay_s(failures, random.random())
                while not self._is_closing and (left_s := end_s - time.monotonic()) > 0:
                    self._wake.wait(left_s)
                if self._is_closing:
                    break
        self._sink.close()

    def _set_state(self, state: str, reason: str) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        self.state, self.reason = state, reason
        if state == FAILED:
            _LOG.warning("sink '%s': %s; trying again, at most every %g s", self.entry.name, reason, BACK_OFF.most_s)
        else:
            _LOG.info("sink '%s' is running: %s", self.entry.name, shown_url(self.entry.url))
        self._on_change(self)


def _result_key(result: FrameResult) -> Hashable:
    """Return the part of a result whose change makes it worth sending, or None to send each: masks, maps, tensors."""
    if result.error_code:
        return result.error_code
    if result.mask is not None or result.dense_map is not None or result.tensors:
        return None
    zones = () if result.zones is None else (result.zones.zones, result.zones.lines)
    texts = tuple(found.text for found in result.detections if found.text)
    return (best_class(result), frozenset(label_counts(result.detections).items()), texts, repr(zones))
