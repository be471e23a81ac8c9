"""MQTT sink: topics for programs, and retained messages from which Home Assistant makes its entities.

| Topic | Retained | Message |
|---|---|---|
| TOPIC/status | yes | "online"; "offline" is the broker's last will |
| TOPIC/SOURCE/status | yes | "online" while the camera delivers pictures, else "offline" |
| TOPIC/SOURCE/result | no | the result as a JSON object, as in JSON lines |
| TOPIC/SOURCE/count/LABEL | yes | number of objects of that class, sent when it changes |
| TOPIC/SOURCE/class | yes | the best class of a classifier, sent when it changes |
| DISCOVERY/binary_sensor/.../config | yes | Home Assistant's description of each count, ON while it is above 0 |
| DISCOVERY/sensor/.../config | yes | its description of the class |

Names in topics keep letters, digits, "_" and "-"; other characters become "_". Discovery: the MQTT integration of Home
Assistant, home-assistant.io/integrations/mqtt.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
import time
from typing import Any
from urllib.parse import unquote, urlsplit

from edge_server.config.sources_config import shown_url
from edge_server.errors import Unsupported
from edge_server.sinks.result_json import best_class, label_counts
from edge_server.sinks.sink_interface import REMOVED, SinkError, SinkMessage

TIMEOUT_S = 5.0
"""Longest time to connect, and until the broker acknowledges a message."""

_KEEPALIVE_S = 30
"""A broker reports "offline" this long, and half as long again, after a server that vanished."""


class MqttBroker:
    """A broker of MQTT 3.1.1. Messages have quality of service 1."""

    def __init__(self, url: str, topic: str, discovery: str) -> None:
        self._url = url
        self._shown = shown_url(url)
        self._topic = topic.strip("/")
        self._discovery = discovery.strip("/")
        self._client: Any = None
        self._connected = threading.Event()
        self._refusal = ""
        self._is_lost = False
        self._retained: dict[str, dict[str, str]] = {}
        """Source -> topic -> the retained message that was last sent."""

    def open(self) -> None:
        try:
            mqtt = importlib.import_module("paho.mqtt.client")
        except ImportError as error:
            raise Unsupported(
                f"MQTT needs paho-mqtt, which does not import here ({error}); install it with: "
                "pip install 'edge-server[mqtt]'"
            ) from None
        parts = urlsplit(self._url)
        client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, reconnect_on_failure=False)
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.connect_timeout = TIMEOUT_S
        client.will_set(f"{self._topic}/status", "offline", qos=1, retain=True)
        if parts.username is not None:
            client.username_pw_set(unquote(parts.username), unquote(parts.password or ""))
        is_tls = parts.scheme == "mqtts"
        if is_tls:
            client.tls_set()
        self._connected.clear()
        self._refusal, self._is_lost = "", False
        self._retained.clear()
        try:
            client.connect(parts.hostname, parts.port or (8883 if is_tls else 1883), _KEEPALIVE_S)
        except OSError as error:
            is_late = isinstance(error, TimeoutError)
            reason = f"no answer within {TIMEOUT_S:g} s" if is_late else error.strerror or type(error).__name__
            raise SinkError(f"{self._shown}: {reason}") from None
        self._client = client
        client.loop_start()
        if not self._connected.wait(TIMEOUT_S) or self._refusal:
            reason = self._refusal or f"no answer within {TIMEOUT_S:g} s"
            self.close()
            raise SinkError(f"{self._shown}: the broker does not accept the connection: {reason}")
        self._publish(f"{self._topic}/status", "online", retain=True)

    def send(self, message: SinkMessage) -> None:
        base = f"{self._topic}/{_name(message.source)}"
        if message.state == REMOVED:
            # An empty retained message deletes the topic, and with it the entity.
            for topic in self._retained.pop(message.source, {}):
                self._publish(topic, "", retain=True)
            return
        result = message.result
        if result is None:
            self._retain(message.source, f"{base}/status", "online" if message.state == "RUNNING" else "offline")
            return
        # Implied by a result, and unknown to the broker after a reconnection.
        self._retain(message.source, f"{base}/status", "online")
        self._publish(f"{base}/result", json.dumps(message.as_json(), allow_nan=False), retain=False)
        if result.error_code:
            return
        counts = label_counts(result.detections)
        known = self._retained[message.source]
        for label in counts:
            self._describe(message.source, "binary_sensor", label, f"{base}/count/{_name(label)}")
        totals: dict[str, int] = {topic: 0 for topic in known if topic.startswith(f"{base}/count/")}
        for label, count in counts.items():
            topic = f"{base}/count/{_name(label)}"
            totals[topic] = totals.get(topic, 0) + count
        for topic, count in totals.items():
            self._retain(message.source, topic, str(count))
        label = best_class(result)
        if label:
            self._describe(message.source, "sensor", "class", f"{base}/class")
            self._retain(message.source, f"{base}/class", label)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        if client.is_connected():
            # A clean disconnection sends no last will.
            client.publish(f"{self._topic}/status", "offline", qos=1, retain=True)
        client.disconnect()
        client.loop_stop()

    def _describe(self, source: str, kind: str, label: str, topic: str) -> None:
        """Send Home Assistant the description of one entity, once per connection."""
        if not self._discovery or topic in self._retained[source]:
            return
        device = f"edge_server_{_name(source)}"
        entity = f"{device}_{_name(label)}"
        description = {
            "name": label,
            "unique_id": entity,
            "state_topic": topic,
            "availability": [
                {"topic": f"{self._topic}/status"},
                {"topic": f"{self._topic}/{_name(source)}/status"},
            ],
            "availability_mode": "all",
            "device": {"identifiers": [device], "name": source},
        }
        if kind == "binary_sensor":
            description["value_template"] = "{{ 'ON' if value | int > 0 else 'OFF' }}"
        self._retain(source, f"{self._discovery}/{kind}/{entity}/config", json.dumps(description))

    def _retain(self, source: str, topic: str, text: str) -> None:
        """Send a retained message unless the broker has it."""
        known = self._retained.setdefault(source, {})
        if known.get(topic) != text:
            self._publish(topic, text, retain=True)
            known[topic] = text

    def _publish(self, topic: str, text: str, *, retain: bool) -> None:
        if self._is_lost:
            raise SinkError(f"{self._shown}: the broker closed the connection")
        sent = self._client.publish(topic, text, qos=1, retain=retain)
        end_s = time.monotonic() + TIMEOUT_S
        # In short waits: paho does not wake the waiting thread when the connection is lost.
        while sent.rc == 0 and not sent.is_published() and not self._is_lost and time.monotonic() < end_s:
            sent.wait_for_publish(0.1)
        if sent.rc != 0 or not sent.is_published():
            raise SinkError(f"{self._shown}: the broker does not acknowledge messages")

    def _on_connect(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        self._refusal = str(reason) if reason.is_failure else ""
        self._connected.set()

    def _on_disconnect(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        self._is_lost = True
        self._connected.set()


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:64]
