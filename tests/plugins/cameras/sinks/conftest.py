"""Results to send, a receiver that a test controls, and an MQTT broker in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_server.plugins.cameras.sinks.sink_interface import SinkError, SinkMessage
from edge_server.protocol.frame_messages import Detection, FrameHeader, FrameResult

PATIENCE_S = 20.0


def result_message(source: str = "door", *labels: str, seq: int = 1) -> SinkMessage:
    """Return a result with one detection per label."""
    found = tuple(Detection(1, 2, 3, 4, 0.9, 0, label) for label in labels)
    return SinkMessage(source, FrameResult(FrameHeader(5, 6, source, seq), model="m", detections=found), "camera")


@pytest.fixture(scope="session")
def message() -> Callable[..., SinkMessage]:
    return result_message


class StubSink:
    """Records the sent messages. `fails` makes every call fail; `blocks` makes `send` wait."""

    refresh_s: float | None = None

    def __init__(self) -> None:
        self.sent: list[SinkMessage] = []
        self.opened = self.closed = self.refreshed = 0
        self.fails = ""
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_sending = threading.Event()

    def open(self) -> None:
        self.opened += 1
        if self.fails:
            raise SinkError(self.fails)

    def send(self, message: SinkMessage) -> bool:
        self.is_sending.set()
        assert self.goes_on.wait(PATIENCE_S)
        if self.fails:
            raise SinkError(self.fails)
        self.sent.append(message)
        return True

    def refresh(self) -> None:
        self.refreshed += 1
        if self.fails:
            raise SinkError(self.fails)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def sink() -> StubSink:
    return StubSink()


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], bool]], bool]:
    """Wait until a condition holds; only a failing test waits to the end."""

    def wait(condition: Callable[[], bool]) -> bool:
        end_s = time.monotonic() + PATIENCE_S
        while not condition() and time.monotonic() < end_s:
            time.sleep(0.002)
        return condition()

    return wait


class Broker:
    """Mosquitto on a port of its own, which stays the same when it is killed and started again."""

    def __init__(self, binary: str, folder: Path, port: int) -> None:
        self.port = port
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *lines: str) -> None:
        """Start with these lines of configuration, by default for everybody."""
        config = self._folder / "mosquitto.conf"
        lines = lines or ("allow_anonymous true",)
        common = (f"listener {self.port} 127.0.0.1", "persistence false", "user root")
        config.write_text("\n".join([*common, *lines]) + "\n")
        libraries = os.environ.get("EDGE_TEST_CAMERA_SERVER_LIBRARIES", "")
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries} if libraries else None
        self._process = subprocess.Popen(
            [self._binary, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )

    def stop(self) -> None:
        """End it as its service would."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._process = None

    def freeze(self) -> None:
        """Stop it from running; its connections stay."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None


@pytest.fixture
def broker(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[Broker]:
    pytest.importorskip("paho.mqtt.client", reason="needs paho-mqtt: pip install '.[test-all]'")
    binary = Path(os.environ.get("EDGE_TEST_CAMERA_SERVERS", "/")) / "usr/sbin/mosquitto"
    if not binary.exists():
        pytest.skip("needs the broker Mosquitto: tests/e2e/fetch_camera_servers.sh, or apt install mosquitto")
    made = Broker(str(binary), tmp_path, free_ports(1)[0])
    made.start()
    yield made
    made.kill()


class Listener:
    """A client that keeps the last message of each topic, as Home Assistant sees them."""

    def __init__(self, port: int) -> None:
        from paho.mqtt import client

        self.topics: dict[str, str] = {}
        self.payloads: dict[str, bytes] = {}
        self.retained: set[str] = set()
        self.count = 0
        self._client = client.Client(client.CallbackAPIVersion.VERSION2)
        self._client.on_connect = lambda *_: self._client.subscribe("#", qos=1)
        self._client.on_message = self._on_message
        self._client.on_subscribe = lambda *_: ready.set()
        ready = threading.Event()
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert ready.wait(PATIENCE_S)

    def _on_message(self, client, data, message) -> None:
        self.topics[message.topic] = message.payload.decode(errors="replace")
        self.payloads[message.topic] = message.payload
        self.count += 1
        if message.retain:
            self.retained.add(message.topic)

    def clear(self, topic: str) -> None:
        """Have the broker forget a topic."""
        self._client.publish(topic, "", qos=1, retain=True)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture
def listen(broker, eventually) -> Iterator:
    made = []

    def make() -> Listener:
        def connect() -> bool:
            try:
                made.append(Listener(broker.port))
            except ConnectionError:
                return False
            return True

        assert eventually(connect)
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert [thread.name for thread in threading.enumerate() if "paho" in thread.name] == []
