"""Each client of ours that carries a secret, against a host that redirects it to another one, which may ask for a
log-in. Over real sockets: `named` at 127.0.0.1, `foreign` at the name localhost and another port."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edge_server.plugins.cameras.sinks.mqtt_connection
from edge_server.cli import http_client
from edge_server.errors import EdgeServerError
from edge_server.plugins.cameras.onvif.device import CameraError, OnvifCamera
from edge_server.plugins.cameras.onvif.soap import Login
from edge_server.plugins.cameras.sinks.mqtt_connection import BrokerAddress, MqttConnection, MqttError
from edge_server.plugins.cameras.sinks.sink_interface import SinkMessage
from edge_server.plugins.cameras.sinks.webhook import Webhook
from edge_server.plugins.cameras.sources.mjpeg import MjpegCamera
from edge_server.plugins.fleet.follow.site_files import SiteFiles
from edge_server.plugins.fleet.page.box_poller import BoxPoller
from edge_server.plugins.remote.pull.oci_registry import OciBlob, OciRegistry, parse_reference
from edge_server.plugins.remote.pull.resumable_download import DownloadClient
from edge_server.plugins.tuning.clients.http_client import HttpControl
from tests.kit.site import Handler, Site

SECRET = "s3cret-word"
BASIC = base64.b64encode(f"me:{SECRET}".encode()).decode()
KEYS = (("X-Key", SECRET), ("Authorization", f"Bearer {SECRET}"))
TIMEOUT_S = 20.0
CHALLENGES = {
    "": "",
    "Basic": 'Basic realm="x"',
    "Bearer": 'Bearer realm="{url}/token",service="x"',
    "Digest": 'Digest realm="x", nonce="abc", qop="auth"',
}


class Host:
    """An HTTP server. Requests without Authorization get the challenge. Those that have it, or all if there is none,
    are redirected, or with no `target` answered with an empty object. /token answers with a token."""

    def __init__(self, name: str) -> None:
        self.requests: list[str] = []
        """Request line, headers and body of each."""
        self.challenge = self.target = ""
        self.status = 307
        host = self

        class Answers(Handler):
            def do_GET(self) -> None:
                host.requests.append(f"{self.requestline}\n{self.headers}\n{self.body().decode('latin-1')}")
                if self.path.startswith("/token"):
                    self.answer(json.dumps({"token": SECRET}).encode())
                elif host.challenge and "Authorization" not in self.headers:
                    self.answer(status=401, WWW_Authenticate=host.challenge.format(url=host.url))
                elif host.target:
                    self.answer(status=host.status, Location=f"{host.target}/store")
                else:
                    self.answer(b"{}")

            do_POST = do_HEAD = do_GET

        self._site = Site(Answers)
        self.close = self._site.close
        self.address = f"{name}:{self._site.server_port}"
        self.url = f"http://{self.address}"

    @property
    def received_secret(self) -> bool:
        """Whether a request held the secret, or something that was made of it."""
        words = (SECRET.lower(), BASIC.lower(), "authorization:", "usernametoken")
        return any(word in request.lower() for word in words for request in self.requests)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Host]]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    made = Host("127.0.0.1"), Host("localhost")
    yield made
    for host in made:
        host.close()


def options(url: str) -> argparse.Namespace:
    files = dict.fromkeys(("tls_root", "tls_cert", "tls_key"))
    return argparse.Namespace(url=url, header=KEYS, timeout=TIMEOUT_S, **files)


def pull(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    DownloadClient(named.url, dict(KEYS), None, TIMEOUT_S).read(f"{named.url}/m.onnx", {}, 1000)


def pull_blob(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    (folder / "config.json").write_text(json.dumps({"auths": {named.address: {"auth": BASIC}}}))
    environment.setenv("DOCKER_CONFIG", str(folder))
    registry = OciRegistry(parse_reference(f"oci://{named.url}/a/b:1"), {}, None, TIMEOUT_S, is_command=False)
    registry.download_blob(OciBlob("x", "0" * 64, 1, {}), folder)


def use_proxy(named: Host, environment: pytest.MonkeyPatch) -> None:
    """Make `named` the proxy of all other hosts but `foreign`."""
    environment.setenv("http_proxy", f"http://me:{SECRET}@{named.address}")
    environment.setenv("no_proxy", "localhost")


def pull_through_proxy(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    use_proxy(named, environment)
    DownloadClient("http://site.test", {}, None, TIMEOUT_S).read("http://site.test/m.onnx", {}, 1000)


def follow_through_proxy(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    use_proxy(named, environment)
    list(SiteFiles("http://site.test", 0, TIMEOUT_S).read("metadata/timestamp.json"))


def read_object_store(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    from edge_server.plugins.remote.address import parse_address
    from edge_server.plugins.remote.object_store import ObjectStore

    for name, value in (("ACCESS_KEY_ID", "me"), ("SECRET_ACCESS_KEY", SECRET), ("DEFAULT_REGION", "eu-west-1")):
        environment.setenv(f"AWS_{name}", value)
    ObjectStore(parse_address(f"s3://{named.url}/bucket/models")).list()


def send_traces(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    tracing = pytest.importorskip("tests.plugins.tracing.test_trace_spans")
    environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-key={SECRET},authorization={SECRET}")
    traces = tracing.traces_to(f"opentelemetry,url={named.url}/v1/traces")
    tracing.run(traces)
    traces.close(TIMEOUT_S)


def read_motion_jpeg(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    MjpegCamera(f"http://me:{SECRET}@{named.address}/video").close()


def ask_onvif_camera(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    OnvifCamera(f"{named.url}/onvif/device_service", Login("me", SECRET)).streams()


def post_webhook(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    Webhook(f"http://me:{SECRET}@{named.address}/hook").send(SinkMessage("door", state="FAILED", reason="gone"))


def ask_server(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    http_client.request_json(options(named.url), "/v2")


def measure(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    HttpControl(named.url, KEYS, TIMEOUT_S).request_json("/v2")


def watch_fleet(named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    async def poll() -> None:
        reported = asyncio.Event()
        poller = BoxPoller(options(named.url), lambda report: reported.set())
        poller.set_urls([named.url])
        try:
            await asyncio.wait_for(reported.wait(), TIMEOUT_S)
        finally:
            await poller.close()

    asyncio.run(poll())


Client = Callable[[Host, Path, pytest.MonkeyPatch], None]

CLIENTS: dict[str, tuple[Client, str, bool]] = {
    "pull": (pull, "", True),
    "pull through a proxy": (pull_through_proxy, "", True),
    "registry of public blobs": (pull_blob, "", False),
    "registry with passwords": (pull_blob, "Basic", True),
    "registry with tokens": (pull_blob, "Bearer", True),
    "signed repository through a proxy": (follow_through_proxy, "", True),
    "object store": (read_object_store, "", True),
    "traces": (send_traces, "", True),
    "Motion JPEG, Basic": (read_motion_jpeg, "Basic", True),
    "Motion JPEG, Digest": (read_motion_jpeg, "Digest", True),
    "ONVIF": (ask_onvif_camera, "Digest", True),
    "webhook": (post_webhook, "", True),
    "commands": (ask_server, "", True),
    "perf": (measure, "", True),
    "page of a fleet": (watch_fleet, "", True),
}
"""Name -> the client, how the named host asks for the secret ("": the client sends it at once), and whether it is sent
there at all."""

each_client = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) if name in ("object store", "traces") else name for name in CLIENTS],
)


def use_client(name: str, named: Host, folder: Path, environment: pytest.MonkeyPatch) -> None:
    client, challenge, is_sent = CLIENTS[name]
    named.challenge = CHALLENGES[challenge]
    with contextlib.suppress(EdgeServerError, CameraError, http_client.Refused, *http_client.NO_ANSWER):
        client(named, folder, environment)
    assert named.received_secret == is_sent


@each_client
@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_takes_no_secret_to_another_host(
    name: str, status: int, hosts: tuple[Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, foreign = hosts
    named.target, named.status = foreign.url, status
    use_client(name, named, tmp_path, monkeypatch)
    assert not foreign.received_secret


@each_client
@pytest.mark.parametrize("scheme", ["Basic", "Bearer", "Digest"])
def test_another_host_that_asks_for_a_log_in_gets_no_secret(
    name: str, scheme: str, hosts: tuple[Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, foreign = hosts
    named.target, foreign.challenge = foreign.url, CHALLENGES[scheme]
    use_client(name, named, tmp_path, monkeypatch)
    assert not foreign.received_secret
    assert not any("/token" in request for request in foreign.requests)


def test_a_broker_that_names_another_one_gets_no_secret_sent_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paho.mqtt.client")
    monkeypatch.setattr(edge_server.plugins.cameras.sinks.mqtt_connection, "TIMEOUT_S", TIMEOUT_S)
    received: list[bytes] = []

    def refuse(listener: socket.socket, properties: bytes) -> None:
        peer, _ = listener.accept()
        with peer:
            received.append(peer.recv(65536))
            # CONNACK of MQTT 5: "Server moved", with the property "Server Reference".
            peer.sendall(bytes((0x20, 3 + len(properties), 0, 0x9D, len(properties))) + properties)
            peer.recv(65536)

    with socket.create_server(("127.0.0.1", 0)) as named, socket.create_server(("127.0.0.1", 0)) as foreign:
        other = f"localhost:{foreign.getsockname()[1]}".encode()
        broker = threading.Thread(target=refuse, args=(named, b"\x1c" + len(other).to_bytes(2, "big") + other))
        broker.start()
        url = f"mqtt://me:{SECRET}@127.0.0.1:{named.getsockname()[1]}"
        with pytest.raises(MqttError, match="Server moved"):
            MqttConnection(BrokerAddress(url), "box", max_packet_bytes=1000).open()
        broker.join()
        assert SECRET.encode() in received[0]
        foreign.setblocking(False)
        with pytest.raises(BlockingIOError):
            foreign.accept()
