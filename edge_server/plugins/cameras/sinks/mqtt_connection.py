"""Connection to an MQTT broker: TLS, user and password, a last will, acknowledged messages, and the reason of each
failure. It uses paho-mqtt, the extra `mqtt`."""

from __future__ import annotations

import contextlib
import importlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from edge_server.config.setting import shown_url
from edge_server.default_tls import make_default_tls_context
from edge_server.errors import EdgeServerError, Unsupported, install_hint

TIMEOUT_S = 5.0
"""Longest time to connect, and until the broker acknowledges a message."""

KEEPALIVE_S = 10
"""A silent connection is checked this often. The broker reports a client that vanished after one and a half times this
long, and a frozen broker is noticed after at most twice this long."""

ONLINE, OFFLINE = "online", "offline"
"""Messages of the topics that say whether a client is connected. The last will is OFFLINE."""


class MqttError(EdgeServerError):
    """A broker does not answer or refuses. The message holds no part of a URL besides host and port."""


class BrokerAddress(NamedTuple):
    """`url` is mqtt://[user:password@]host[:port] or mqtts://. `ca`, `cert` and `key` are PEM files for mqtts://: whom
    to trust, "" for the system's, and the certificate and key of this client."""

    url: str
    ca: str = ""
    cert: str = ""
    key: str = ""


def parse_broker_url(text: str) -> str:
    """Return the URL of a broker. Raises ValueError, with no part of the URL in it."""
    try:
        parts = urlsplit(text)
        is_complete = parts.scheme in ("mqtt", "mqtts") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_complete = False
    if not is_complete or not text.isprintable() or " " in text or parts.path.strip("/"):
        raise ValueError(
            "expected mqtt://[user:password@]host[:port] or mqtts://, with special characters of the password as %XX"
        )
    return text


def parse_topic(text: str) -> str:
    """Return the beginning of topics. Raises ValueError for one that cannot be published to."""
    if not text.isprintable() or set(text) & {"+", "#"}:
        raise ValueError("expected printable characters without '+' and '#'")
    return text


class MqttConnection:
    """Connection as one client, which can be opened again after it was lost or closed.

    One thread uses it. `on_loss` and `on_message`, which gets topic, payload and whether the message was retained, are
    called on paho's thread. `will` is the topic that the broker sets to OFFLINE when the client vanishes.
    `max_packet_bytes`: the broker sends no longer message; needs a broker of MQTT 5, else 3.1.1 is spoken.
    """

    def __init__(
        self,
        address: BrokerAddress,
        client_id: str,
        *,
        will: str = "",
        on_loss: Callable[[], None] = lambda: None,
        on_message: Callable[[str, bytes, bool], None] = lambda topic, payload, is_retained: None,
        max_packet_bytes: int | None = None,
    ) -> None:
        self.shown = shown_url(address.url)
        self._address = address
        self._client_id = client_id
        self._will = will
        self._on_loss = on_loss
        self._on_message = on_message
        self._max_packet_bytes = max_packet_bytes
        self._client: Any = None
        self._answered = threading.Event()
        self._refusal = ""
        self._denied: str | None = None
        """Why the broker denies a topic, "" if it denies none; None: it has not answered."""
        self._is_lost = False
        self._loss_reason = ""

    def open(self) -> None:
        """Connect. Raises MqttError, and Unsupported without paho-mqtt."""
        client = self._make_client()
        parts = urlsplit(self._address.url)
        port = parts.port or (8883 if parts.scheme == "mqtts" else 1883)
        self._answered.clear()
        self._refusal, self._is_lost, self._loss_reason = "", False, "the broker closed the connection"
        try:
            client.connect(parts.hostname, port, KEEPALIVE_S, properties=self._connect_properties())
        except socket.gaierror as error:
            raise MqttError(f"{self.shown}: the host name '{parts.hostname}' is not known: {error.strerror}") from None
        except OSError as error:
            is_late = isinstance(error, TimeoutError)
            reason = f"no answer within {TIMEOUT_S:g} s" if is_late else error.strerror or type(error).__name__
            raise MqttError(f"{self.shown}: {reason}") from None
        self._client = client
        client.loop_start()
        if not self._answered.wait(TIMEOUT_S) or self._refusal:
            reason = self._refusal or f"no answer within {TIMEOUT_S:g} s"
            self.close()
            raise MqttError(f"{self.shown}: the broker does not accept the connection: {reason}")

    @property
    def is_open(self) -> bool:
        return self._client is not None and self._client.is_connected() and not self._is_lost

    def subscribe(self, topics: Sequence[str], qos: int = 1) -> None:
        """Ask for messages. Does not wait for the broker's answer: it may deny them."""
        self._denied = None
        self._client.subscribe([(topic, qos) for topic in topics])

    def wait_subscribed(self) -> None:
        """Wait until the broker has answered `subscribe`. Raises MqttError if it denies a topic, or does not answer."""
        self._answered.clear()
        if self._denied is None and not self._answered.wait(TIMEOUT_S):
            raise MqttError(f"{self.shown}: no answer within {TIMEOUT_S:g} s")
        self.check()
        if self._denied:
            raise MqttError(f"{self.shown}: the broker does not let this client read: {self._denied}")

    def publish(self, messages: Iterable[tuple[str, str | bytes]], *, is_retained: bool = True) -> None:
        """Send messages, and wait until the broker has acknowledged each. Raises MqttError."""
        self.check()
        for sent in [self._client.publish(topic, text, qos=1, retain=is_retained) for topic, text in messages]:
            end_s = time.monotonic() + TIMEOUT_S
            # In short waits: paho does not wake the waiting thread when the connection is lost.
            while sent.rc == 0 and not sent.is_published() and not self._is_lost and time.monotonic() < end_s:
                sent.wait_for_publish(0.1)
            self.check()
            if sent.rc != 0 or not sent.is_published():
                self._is_lost = True
                raise MqttError(f"{self.shown}: the broker does not acknowledge messages")

    def check(self) -> None:
        """Raise MqttError if the connection is lost."""
        if self._is_lost:
            raise MqttError(f"{self.shown}: {self._loss_reason}")

    def close(self) -> None:
        """Disconnect, without the last will."""
        client, self._client = self._client, None
        if client is not None:
            client.disconnect()
            # paho 2.1 asks for its thread twice, and the thread forgets itself when it ends.
            with contextlib.suppress(AttributeError):
                client.loop_stop()

    def _make_client(self) -> Any:
        try:
            mqtt = importlib.import_module("paho.mqtt.client")
        except ImportError as error:
            raise Unsupported(
                f"MQTT needs paho-mqtt, which does not import here ({error}); {install_hint('mqtt')}"
            ) from None
        version = mqtt.MQTTv311 if self._max_packet_bytes is None else mqtt.MQTTv5
        client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2, self._client_id, protocol=version, reconnect_on_failure=False
        )
        client.on_connect, client.on_disconnect = self._note_answer, self._note_disconnection
        client.on_message, client.on_subscribe = self._pass_message, self._note_subscription
        client.connect_timeout = TIMEOUT_S
        if self._will:
            client.will_set(self._will, OFFLINE, qos=1, retain=True)
        parts = urlsplit(self._address.url)
        if parts.username is not None:
            client.username_pw_set(unquote(parts.username), unquote(parts.password or ""))
        if parts.scheme == "mqtts":
            client.tls_set_context(self._tls_context())
        return client

    def _connect_properties(self) -> Any:
        if self._max_packet_bytes is None:
            return None
        properties = importlib.import_module("paho.mqtt.properties").Properties(
            importlib.import_module("paho.mqtt.packettypes").PacketTypes.CONNECT
        )
        properties.MaximumPacketSize = self._max_packet_bytes
        return properties

    def _tls_context(self) -> ssl.SSLContext:
        address = self._address
        try:
            context = make_default_tls_context(cafile=address.ca or None)
        except OSError as error:
            raise MqttError(f"ca: {address.ca}: {error.strerror or 'it holds no certificate'}") from None
        if address.cert:
            try:
                # An empty password: without one, an encrypted key would be asked for on the terminal.
                context.load_cert_chain(address.cert, address.key or None, password="")
            except OSError as error:
                files = " and ".join(path for path in (address.cert, address.key) if path)
                keys = "cert and key" if address.key else "cert"
                raise MqttError(f"{keys}: {files}: {error.strerror or 'they cannot be used'}") from None
        return context

    # -- paho's thread

    def _note_answer(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        self._refusal = str(reason) if reason.is_failure else ""
        self._answered.set()

    def _note_subscription(self, client: Any, data: Any, number: int, reasons: Any, properties: Any) -> None:
        self._denied = next((str(reason) for reason in reasons if reason.is_failure), "")
        self._answered.set()

    def _note_disconnection(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        if client is not self._client:
            return
        if reason == "Keep alive timeout":
            self._loss_reason = f"the broker does not answer: no sign of life for {KEEPALIVE_S} to {2 * KEEPALIVE_S} s"
        self._is_lost = True
        self._answered.set()
        self._on_loss()

    def _pass_message(self, client: Any, data: Any, message: Any) -> None:
        self._on_message(message.topic, message.payload, message.retain)
