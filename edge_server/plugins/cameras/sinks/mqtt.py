"""Sink that publishes results to an MQTT broker, and announces them so that Home Assistant finds them.

| Topic | Retained | Message |
|---|---|---|
| TOPIC/status | yes | "online"; "offline" is the broker's last will |
| TOPIC/SOURCE/status | yes | "online" while the camera delivers pictures, else "offline" |
| TOPIC/SOURCE/result | yes | the last result as a JSON object, as in JSON lines |
| TOPIC/SOURCE/count/LABEL | yes | number of objects of that class, sent when it changes, and once a minute |
| TOPIC/SOURCE/class | yes | the best class of a classifier, sent as the counts are |
| TOPIC/SOURCE/picture | yes | with `pictures`, the frame of the last result with objects as a JPEG, with their boxes |
| TOPIC/SOURCE/event | no | an event of a zone or line, or an answer to a question, as a JSON object |
| TOPIC/SOURCE/question/NAME | yes | the last answer to a question as a JSON object |
| TOPIC/SOURCE/zone/ZONE/count | yes | number of objects in the zone |
| TOPIC/SOURCE/zone/ZONE/count/LABEL | yes | those of one class: each of the zone's `classes`, and others once seen |
| TOPIC/SOURCE/zone/ZONE/loitering | yes | those that loiter, if the zone has `loitering_s` |
| TOPIC/SOURCE/line/LINE/in, .../out | yes | crossings of the line since the start of the server |
| DISCOVERY/binary_sensor/ID/config | yes | Home Assistant's description of each count, ON while it is above 0 |
| DISCOVERY/sensor/ID/config | yes | its description of the class, of each crossing and of each answer |
| DISCOVERY/image/ID/config | yes | its description of the picture |

TOPIC is edge_server/HOST by default. ID consists of TOPIC, the host, SOURCE, and LABEL or the zone, line or question.
Names keep letters, digits, "_" and "-"; spaces and dots become "_". A name with other characters gets a hash at its
end, so that no two are the same.

With `classes`, the counts of other classes that an earlier run left in the broker are deleted with their descriptions,
and so are pictures without `pictures`.

Retained messages stay true after any failure. All of them are sent after each connection, and once a minute: results,
counts and classes with the next result, the others without one. A picture or an answer is not repeated: Home Assistant
shows when it came. What an earlier run left in the broker is reset, but for answers: each is still the last one.

Discovery: the MQTT integration of Home Assistant, home-assistant.io/integrations/mqtt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from edge_server.errors import InvalidRequest
from edge_server.plugins.cameras.sinks.mqtt_connection import OFFLINE, ONLINE, BrokerAddress, MqttConnection, MqttError
from edge_server.plugins.cameras.sinks.result_json import best_class, label_counts
from edge_server.plugins.cameras.sinks.sink_interface import REMOVED, Sink, SinkError, SinkMessage
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry
from edge_server.protocol.frame_messages import Detection, FrameResult, LineCounts, ZoneCounts, ZoneReport
from edge_server.version import __version__

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

REFRESH_S = 60.0
"""Time between two repetitions of retained messages."""

EXPIRES_AFTER_S = 180
"""Time without results of a camera after which Home Assistant shows its counts and its class as unavailable."""

MAX_PICTURE_SIDE = 1280
"""Longest side of a picture in pixels; larger ones are reduced. A JPEG has at most 1.3 MB then (noise)."""

STATE_TEMPLATE = "{{ (value_json.text if value else '') | truncate(255, true, '…', 0) }}"
ATTRIBUTES_TEMPLATE = "{{ value or '{}' }}"
"""Home Assistant's templates for the sensor of an answer. It refuses longer states; the attribute `text` is the whole
answer. A topic that is deleted sends an empty message."""

_VALUE_TOPICS = (
    "status",
    "result",
    "class",
    "picture",
    "count/+",
    "zone/+/count",
    "zone/+/count/+",
    "zone/+/loitering",
    "line/+/+",
    "question/+",
)
"""Below TOPIC/SOURCE, what an earlier run may have left in the broker."""


@dataclass(slots=True)
class _RetainedMessages:
    """Retained messages of one source by topic. `values` are the last result, counts, the class, the picture
    and answers."""

    descriptions: dict[str, str] = field(default_factory=dict)
    values: dict[str, str | bytes] = field(default_factory=dict)
    status: dict[str, str] = field(default_factory=dict)
    values_sent_s: float = 0.0
    shapes: frozenset[str] | None = None
    """Names of the zones and lines, once a change of the source's state has told them."""
    questions: frozenset[str] | None = None
    """Topics of the answers to its questions, once a change of the source's state has told them."""

    def known_part(self, report: ZoneReport | None) -> ZoneReport:
        """Return the part of a report that belongs to the zones and lines of the source as they are now. A frame may
        have been under way when they changed."""
        if report is None or self.shapes is None:
            return report or ZoneReport()
        return ZoneReport(
            tuple(zone for zone in report.zones if f"zone/{zone.zone}" in self.shapes),
            tuple(line for line in report.lines if f"line/{line.line}" in self.shapes),
        )

    def all(self) -> dict[str, str | bytes]:
        """Return all messages, in the order in which they should arrive."""
        return {**self.descriptions, **self.values, **self.status}


class MqttBroker(Sink):
    """A broker of MQTT 3.1.1. Messages have quality of service 1. `wake` is called when the connection is lost."""

    refresh_s = REFRESH_S

    def __init__(self, entry: SinkEntry, wake: Callable[[], None]) -> None:
        host = _name(socket.gethostname())
        self._entry = entry
        self._topic = entry.topic.strip("/") or f"edge_server/{host}"
        self._discovery = entry.discovery.strip("/")
        self._classes = {_name(label) for label in entry.classes}
        parts = [_name(part) for part in self._topic.split("/")]
        self._id = "_".join(parts if host in parts else [*parts, host])
        self._wake = wake
        # Always the same, so that a broker ends the connection from before an interruption at once, and sends its last
        # will before the new messages instead of after them. 23 characters are what every broker takes.
        client_id = hashlib.sha256(f"{self._id}/{entry.name}".encode()).hexdigest()[:23]
        self._connection = MqttConnection(
            BrokerAddress(entry.url, entry.ca, entry.cert, entry.key), client_id,
            will=f"{self._topic}/status", on_loss=wake, on_message=self._note_left_over,
        )  # fmt: skip
        self._sources: dict[str, _RetainedMessages] = {}
        self._removed: dict[str, str] = {}
        """Topics to delete from the broker, descriptions first: an empty message deletes a retained one."""
        self._sent: dict[str, str | bytes] = {}
        """Retained messages that were sent since the connection."""
        self._repeated_s = 0.0
        self._left_over: SimpleQueue[str] = SimpleQueue()
        """Topics that the broker retained when the connection began."""

    def open(self) -> None:
        self._connection.open()
        self._sent.clear()
        self._repeated_s = time.monotonic()
        # A broker may deny reading; then what an earlier run left there expires.
        self._connection.subscribe([f"{self._topic}/+/{each}" for each in _VALUE_TOPICS])
        # Without the server's own status: it is sent last, so that nobody takes what an earlier run left for true.
        self._synchronize(self._sources.values())

    def send(self, message: SinkMessage) -> bool:
        result, base = message.result, f"{self._topic}/{_name(message.source)}"
        if message.event is not None or message.answer is not None:
            text = message.json_text()
            self._connection.publish([(f"{base}/event", text)], is_retained=False)
            if message.answer is not None:
                self._keep_answer(message.source, message.answer.question, text)
            return True
        if message.state == REMOVED:
            self._removed.update(dict.fromkeys(self._sources.pop(message.source, _RetainedMessages()).all(), ""))
            self._synchronize([])
            return True
        retained = self._sources.setdefault(message.source, _RetainedMessages())
        # A result implies that the camera runs.
        is_online = result is not None or message.state == "RUNNING"
        retained.status[f"{base}/status"] = ONLINE if is_online else OFFLINE
        self._describe_labels(retained, message.source, message.labels, has_class=message.has_classes)
        if result is None:
            self._describe_zones(retained, message)
            self._describe_questions(retained, message)
        if result is not None:
            retained.values[f"{base}/result"] = message.json_text()
        if result is not None and not result.error_code:
            self._set_counts(retained, message.source, result)
        self._synchronize([retained])
        self._retain({f"{self._topic}/status": ONLINE})
        # Last, so that a frame that gives no picture holds up no result.
        if self._entry.pictures and result is not None and result.detections and message.picture is not None:
            retained.values[f"{base}/picture"] = self._picture(message.source, message.picture, result.detections)
            self._describe(retained, message.source, "image", "picture", f"{base}/picture")
            self._synchronize([retained])
        return True

    def _set_counts(self, retained: _RetainedMessages, source: str, result: FrameResult) -> None:
        """Set the values of labels, zones and the best class, and have all be sent again when they are due."""
        base = f"{self._topic}/{_name(source)}"
        counts, label = label_counts(result.detections), best_class(result)
        self._describe_labels(retained, source, counts, has_class=bool(label))
        report = retained.known_part(result.zones)
        self._describe_counts(retained, source, report)
        for topic in retained.values:
            if topic.startswith((f"{base}/count/", f"{base}/zone/")):
                retained.values[topic] = "0"
        for counted, count in counts.items():
            retained.values[f"{base}/count/{_name(counted)}"] = str(count)
        retained.values |= _zone_values(base, report)
        if label:
            retained.values[f"{base}/class"] = label
        now_s = time.monotonic()
        if now_s - retained.values_sent_s >= self.refresh_s:
            # All of them: Home Assistant lets each expire by itself.
            retained.values_sent_s = now_s
            for topic in retained.values.keys() - {f"{base}/picture", *(retained.questions or ())}:
                self._sent.pop(topic, None)

    def refresh(self) -> None:
        """Reset what an earlier run left in the broker, and repeat statuses and descriptions when it is time.

        Results, counts and classes are not repeated: they are true only while results come.
        """
        self._connection.check()
        values = {topic for retained in self._sources.values() for topic in retained.values}
        if not self._left_over.empty():
            known = {topic for retained in self._sources.values() for topic in retained.all()}
            left_over = {self._left_over.get() for _ in range(self._left_over.qsize())}
            unknown = left_over - known
            unknown -= self._sort_answers(unknown)
            excluded = {topic for topic in unknown if self._is_excluded(topic)}
            for topic in excluded:
                source, *parts = topic.removeprefix(f"{self._topic}/").split("/")
                kind = "image" if parts == ["picture"] else "binary_sensor"
                self._removed |= {self._description_topic(source, kind, parts[-1]): "", topic: ""}
            base = f"{self._topic}/"
            self._connection.publish([(topic, _neutral_text(topic.removeprefix(base))) for topic in unknown - excluded])
        now_s = time.monotonic()
        if now_s - self._repeated_s >= self.refresh_s:
            self._repeated_s = now_s
            self._sent = {topic: text for topic, text in self._sent.items() if topic in values}
        self._synchronize(self._sources.values())
        self._retain({f"{self._topic}/status": ONLINE})

    def close(self) -> None:
        """Disconnect. Unless the connection is lost, tell first that the server and all cameras are offline."""
        if self._connection.is_open:
            # A clean disconnection sends no last will.
            statuses = [topic for retained in self._sources.values() for topic in retained.status]
            with contextlib.suppress(MqttError):
                self._connection.publish([(topic, OFFLINE) for topic in (f"{self._topic}/status", *statuses)])
        self._connection.close()

    def _is_excluded(self, topic: str) -> bool:
        """Return whether a topic of the broker is the count of a class that is not in `classes`, or a picture without
        `pictures`."""
        parts = topic.removeprefix(f"{self._topic}/").split("/")
        if parts[1:] == ["picture"]:
            return not self._entry.pictures
        return bool(self._classes) and len(parts) == 3 and parts[1] == "count" and parts[2] not in self._classes

    def _picture(
        self, source: str, picture: Callable[[], npt.NDArray[np.uint8]], detections: tuple[Detection, ...]
    ) -> bytes:
        """Return the JPEG of a frame with boxes. Raises SinkError."""
        from edge_server.plugins.vision.draw import annotated_jpeg  # needs what draws, which others do without
        from edge_server.plugins.vision.perception_decoder import Perception

        try:
            return annotated_jpeg(picture(), Perception((), detections), max_side=MAX_PICTURE_SIDE)
        except InvalidRequest as error:
            raise SinkError(f"{self._connection.shown}: picture of source '{source}': {error.message}") from None

    def _describe_labels(
        self, retained: _RetainedMessages, source: str, labels: Iterable[str], *, has_class: bool
    ) -> None:
        """Describe the count of each label, and the class. Labels that are new count 0."""
        base = f"{self._topic}/{_name(source)}"
        for label in labels:
            topic = f"{base}/count/{_name(label)}"
            if topic not in retained.values:
                retained.values[topic] = "0"
                self._describe(retained, source, "binary_sensor", label, topic)
        if has_class:
            self._describe(retained, source, "sensor", "class", f"{base}/class")

    def _describe_zones(self, retained: _RetainedMessages, message: SinkMessage) -> None:
        """Describe the zones and lines of a source, and delete the topics of those that are gone."""
        base = f"{self._topic}/{_name(message.source)}"
        names = [("zone", zone.name) for zone in message.zones] + [("line", line.name) for line in message.lines]
        retained.shapes = frozenset(f"{kind}/{name}" for kind, name in names)
        folders = [f"{base}/{kind}/{_name(name)}/" for kind, name in names]
        for topic in list(retained.values):
            if topic.startswith((f"{base}/zone/", f"{base}/line/")) and not topic.startswith(tuple(folders)):
                del retained.values[topic]
                kind = "sensor" if topic.startswith(f"{base}/line/") else "binary_sensor"
                description = self._description_topic(message.source, kind, topic.removeprefix(f"{base}/"))
                retained.descriptions.pop(description, None)
                self._removed |= {description: "", topic: ""}
        # The counts are 0 until the first result says otherwise.
        counts = tuple(
            ZoneCounts(zone.name, dict.fromkeys(zone.classes, 0), 0, {} if zone.loitering_s else None)
            for zone in message.zones
        )
        lines = tuple(LineCounts(line.name, 0, 0) for line in message.lines)
        self._describe_counts(retained, message.source, ZoneReport(counts, lines))

    def _describe_questions(self, retained: _RetainedMessages, message: SinkMessage) -> None:
        """Describe the answers to the questions of a source, and delete the topics of questions that are gone."""
        base = f"{self._topic}/{_name(message.source)}"
        before = retained.questions or frozenset()
        retained.questions = frozenset(f"{base}/question/{_name(one.name)}" for one in message.questions)
        for topic in before - retained.questions:
            retained.values.pop(topic, None)
            self._remove_answer(message.source, retained, topic)
        for one in message.questions:
            key = f"question/{_name(one.name)}"
            self._describe(retained, message.source, "sensor", one.name, f"{base}/{key}", key)
        if not self._left_over.empty():
            self._wake()  # those to questions that are gone can be deleted now

    def _remove_answer(self, source: str, retained: _RetainedMessages, topic: str) -> None:
        key = topic.removeprefix(f"{self._topic}/{_name(source)}/")
        description = self._description_topic(source, "sensor", key)
        retained.descriptions.pop(description, None)
        self._removed |= {description: "", topic: ""}

    def _keep_answer(self, source: str, question: str, text: str) -> None:
        """Publish the last answer to a question, unless the question is gone since."""
        retained = self._sources.get(source)
        topic = f"{self._topic}/{_name(source)}/question/{_name(question)}"
        if retained is not None and topic in (retained.questions or ()):
            retained.values[topic] = text
            self._synchronize([retained])

    def _sort_answers(self, topics: Iterable[str]) -> set[str]:
        """Return those of the topics that an earlier run left which are answers, and delete those to questions that are
        gone. An answer of a source that is not known yet is looked at again later."""
        parts = {topic: topic.removeprefix(f"{self._topic}/").split("/") for topic in topics}
        found = {topic for topic, (_, kind, *_) in parts.items() if kind == "question"}
        by_name = {_name(source): (source, retained) for source, retained in self._sources.items()}
        for topic in found:
            source, retained = by_name.get(parts[topic][0], ("", None))
            if retained is None or retained.questions is None:
                self._left_over.put(topic)
            elif topic not in retained.questions:
                self._remove_answer(source, retained, topic)
        return found

    def _describe_counts(self, retained: _RetainedMessages, source: str, report: ZoneReport) -> None:
        """Describe the counts of zones and lines that are new. They count 0."""
        base = f"{self._topic}/{_name(source)}"
        for zone in report.zones:
            folder = f"{base}/zone/{_name(zone.zone)}"
            entities = [(f"{folder}/count", zone.zone)]
            entities += [(f"{folder}/count/{_name(label)}", f"{zone.zone} {label}") for label in zone.counts]
            if zone.loitering is not None:
                entities.append((f"{folder}/loitering", f"{zone.zone} loitering"))
            for topic, name in entities:
                self._describe_value(retained, source, "binary_sensor", name, topic)
        for line in report.lines:
            for direction in ("in", "out"):
                topic = f"{base}/line/{_name(line.line)}/{direction}"
                self._describe_value(retained, source, "sensor", f"{line.line} {direction}", topic)

    def _describe_value(self, retained: _RetainedMessages, source: str, kind: str, name: str, topic: str) -> None:
        if topic not in retained.values:
            retained.values[topic] = "0"
            key = topic.removeprefix(f"{self._topic}/{_name(source)}/")
            self._describe(retained, source, kind, name, topic, key)

    def _description_topic(self, source: str, kind: str, key: str) -> str:
        return f"{self._discovery}/{kind}/{self._id}_{_name(source)}_{_name(key)}/config"

    def _describe(
        self, retained: _RetainedMessages, source: str, kind: str, label: str, topic: str, key: str = ""
    ) -> None:
        """Add Home Assistant's description of one entity. Its id ends with `key`, by default its label."""
        if not self._discovery:
            return
        device = f"{self._id}_{_name(source)}"
        entity = f"{device}_{_name(key or label)}"
        description: dict[str, Any] = {
            "name": label,
            "unique_id": entity,
            "availability": [
                {"topic": f"{self._topic}/status"},
                {"topic": f"{self._topic}/{_name(source)}/status"},
            ],
            "availability_mode": "all",
            "device": {"identifiers": [device], "name": source, "manufacturer": "edge-server", "model": "camera"},
            "origin": {"name": "edge-server", "sw_version": __version__},
        }
        if kind == "image":
            description |= {"image_topic": topic, "content_type": "image/jpeg"}
        elif topic.startswith(f"{self._topic}/{_name(source)}/question/"):
            # It does not expire: the last answer stays until the next one.
            description |= {"state_topic": topic, "value_template": STATE_TEMPLATE}
            description |= {"json_attributes_topic": topic, "json_attributes_template": ATTRIBUTES_TEMPLATE}
        else:
            description |= {"state_topic": topic, "expire_after": EXPIRES_AFTER_S}
        if kind == "binary_sensor":
            description["device_class"] = "occupancy"
            description["value_template"] = "{{ 'ON' if value | int(0) > 0 else 'OFF' }}"
        elif topic.startswith(f"{self._topic}/{_name(source)}/line/"):
            description["state_class"] = "total_increasing"
        retained.descriptions[self._description_topic(source, kind, key or label)] = json.dumps(description)

    def _synchronize(self, sources: Iterable[_RetainedMessages]) -> None:
        """Send the retained messages of sources that the broker does not have, and delete topics."""
        self._connection.publish(self._removed.items())
        for topic in self._removed:
            self._sent.pop(topic, None)
        self._removed.clear()
        for retained in sources:
            self._retain(retained.all())

    def _retain(self, messages: Mapping[str, str | bytes]) -> None:
        missing = [(topic, text) for topic, text in messages.items() if self._sent.get(topic) != text]
        self._connection.publish(missing)
        self._sent.update(missing)

    def _note_left_over(self, topic: str, payload: bytes, is_retained: bool) -> None:
        """Called on the connection's thread."""
        # Only messages that were retained before the subscription have the flag.
        is_neutral = payload in (b"0", OFFLINE.encode()) and not self._is_excluded(topic)
        if is_retained and not is_neutral:
            self._left_over.put(topic)
            self._wake()


def _zone_values(base: str, report: ZoneReport) -> dict[str, str]:
    """Return the counts of zones and lines by topic, without those of classes that are not there."""
    values = {}
    for zone in report.zones:
        folder = f"{base}/zone/{_name(zone.zone)}"
        values[f"{folder}/count"] = str(sum(zone.counts.values()))
        values |= {f"{folder}/count/{_name(label)}": str(count) for label, count in zone.counts.items()}
        if zone.loitering is not None:
            values[f"{folder}/loitering"] = str(sum(zone.loitering.values()))
    for line in report.lines:
        folder = f"{base}/line/{_name(line.line)}"
        values |= {f"{folder}/in": str(line.in_count), f"{folder}/out": str(line.out_count)}
    return values


def _neutral_text(topic: str) -> str:
    """Return the text that a topic, without its prefix, has while nothing is known."""
    key = topic.partition("/")[2]
    return OFFLINE if key == "status" else "" if key in ("result", "class", "picture") else "0"


def _name(text: str) -> str:
    """Return a text as a part of a topic or id."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", text)
    if len(name) <= 64 and name == re.sub(r"[ .]", "_", text):
        return name
    return f"{name[:48]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
