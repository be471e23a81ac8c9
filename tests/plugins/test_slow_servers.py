"""Each client of ours against a server that sends too slowly, or too much, over real sockets. The server is given up,
but not for a slow line."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import edge_server.plugins.cameras.sinks.mqtt_connection
from edge_server.bounded_http import TooSlow
from edge_server.cli.http_client import request_json
from edge_server.plugins.cameras.onvif import device
from edge_server.plugins.cameras.onvif.device import CameraError, OnvifCamera
from edge_server.plugins.cameras.sinks import webhook
from edge_server.plugins.cameras.sinks.mqtt_connection import BrokerAddress, MqttConnection, MqttError
from edge_server.plugins.cameras.sinks.sink_interface import SinkError, SinkMessage
from edge_server.plugins.cameras.sinks.webhook import Webhook
from edge_server.plugins.cameras.sources import mjpeg
from edge_server.plugins.cameras.sources.mjpeg import MjpegCamera
from edge_server.plugins.cameras.sources.source_interface import SourceError
from edge_server.plugins.fleet.follow.site_files import SiteFiles, SiteUnavailable
from edge_server.plugins.remote.pull.oci_registry import OciBlob, OciRegistry, parse_reference
from edge_server.plugins.remote.pull.resumable_download import DownloadClient, Interrupted
from tests.kit.together import together

TIMEOUT_S = 0.5
"""Far above the pauses of a busy machine: a server must be given up for what it sends, not for a pause."""
CONTENT = bytes(range(250)) * 8
SHA256 = hashlib.sha256(CONTENT).hexdigest()
DOCUMENT = json.dumps([0] * 1000).encode()
PICTURE = b"\xff\xd8" + b"x" * 1000
SOAP = b'<s:Envelope xmlns:s="http://www.w3.org/2003/05/soap-envelope"><s:Body></s:Body>%b</s:Envelope>' % (b" " * 1000)


def head(kind: bytes = b"text/plain") -> bytes:
    """Return the head of a response, without the empty line."""
    return b"HTTP/1.1 200 OK\r\nX-Padding: %b\r\nContent-Type: %b\r\n" % (b"x" * 1000, kind)


HEAD = head() + b"Content-Length: %d\r\n\r\n" % len(CONTENT)


@contextlib.contextmanager
def serving(answer: Callable[[bytes], Iterator[bytes]], pause_s: float = 0.01) -> Iterator[str]:
    """Answer each request with the parts that `answer` gives for it, with pauses between them."""
    ended = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            request = self.rfile.readline()
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                request += line
            if length := re.search(rb"(?i)\nContent-Length: ([0-9]+)", request):
                self.rfile.read(int(length[1]))
            with contextlib.suppress(OSError):  # the client has hung up
                for part in answer(request):
                    self.request.sendall(part)
                    if ended.wait(pause_s):
                        return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            ended.set()
            server.shutdown()
            thread.join()


def in_parts(whole: bytes, size: int = 1) -> Iterator[bytes]:
    for start in range(0, len(whole), size):
        yield whole[start : start + size]


def pull(url: str, folder: Path) -> None:
    found = DownloadClient(url, {}, None, TIMEOUT_S).download(f"{url}/model.onnx", SHA256, folder, len(CONTENT))
    assert found.read_bytes() == CONTENT


def pull_blob(url: str, folder: Path) -> None:
    registry = OciRegistry(parse_reference(f"oci://{url}/detector"), {}, None, TIMEOUT_S, is_command=False)
    found = registry.download_blob(OciBlob("text/plain", SHA256, len(CONTENT), {}), folder)
    assert found.read_bytes() == CONTENT


def read_site(url: str, folder: Path) -> None:
    assert b"".join(list(SiteFiles(url, 0, TIMEOUT_S).read("metadata/timestamp.json"))[1:]) == CONTENT


def read_video(url: str, folder: Path) -> None:
    camera = MjpegCamera(f"{url}/video")
    try:
        picture = camera.read()
    finally:
        camera.close()
    assert picture is not None
    assert picture.file == PICTURE


def ask_camera(url: str, folder: Path) -> None:
    try:
        OnvifCamera(f"{url}/onvif/device_service", None).streams()
    except CameraError as error:
        # The whole answer says no more than that.
        if str(error) != "the camera has no media service":
            raise


def post(url: str, folder: Path) -> None:
    assert Webhook(f"{url}/hook").send(SinkMessage("door", state="FAILED", reason="gone"))


def ask_server(url: str, folder: Path) -> None:
    options = argparse.Namespace(url=url, header=[], timeout=TIMEOUT_S, tls_root=None, tls_cert=None, tls_key=None)
    assert request_json(options, "/v2/models/detector") == json.loads(DOCUMENT)


@dataclass(frozen=True)
class Reader:
    """A client, its error, and an answer to it: the head, the beginning of the body, which comes at once where the rest
    trickles, and the rest. `late_head` and `late_body` are messages; without `late_body` the body is not read."""

    read: Callable[[str, Path], None]
    error: type[Exception]
    head: bytes
    prompt: bytes
    rest: bytes
    late_head: str = f"no complete head of a response within {TIMEOUT_S:g} s"
    late_body: str = "it sends less than 500 bytes/s"

    @property
    def answer(self) -> bytes:
        return self.head + b"\r\n" + self.prompt + self.rest


def video(prompt: bytes, rest: bytes) -> Reader:
    kind = b"multipart/x-mixed-replace; boundary=x"
    late = f"a picture took longer than {2 * TIMEOUT_S:g} s"
    return Reader(read_video, SourceError, head(kind), prompt, rest, late_body=late)


NO_ANSWER = f"no answer within {TIMEOUT_S:g} s"
READERS = {
    "pull": Reader(pull, Interrupted, head(), CONTENT[:100], CONTENT[100:]),
    "registry": Reader(pull_blob, Interrupted, head(), CONTENT[:100], CONTENT[100:]),
    "signed repository": Reader(read_site, SiteUnavailable, head(), CONTENT[:100], CONTENT[100:]),
    "Motion JPEG": video(b"--x\r\nContent-Length: %d\r\n\r\n" % len(PICTURE), PICTURE + b"\r\n"),
    "Motion JPEG without lengths": video(b"--x\r\n\r\n", PICTURE + b"\r\n--x--\r\n"),
    "Motion JPEG, head of a part": video(b"--x\r\n", b"X: %b\r\n\r\n%b\r\n--x--\r\n" % (b"x" * 1000, PICTURE)),
    "ONVIF": Reader(ask_camera, CameraError, head(), SOAP[:100], SOAP[100:], NO_ANSWER, NO_ANSWER),
    "commands": Reader(ask_server, TooSlow, head(), DOCUMENT[:100], DOCUMENT[100:]),
    "webhook": Reader(post, SinkError, head(), CONTENT[:100], CONTENT[100:], NO_ANSWER, ""),
}
WITH_BODY = [name for name, reader in READERS.items() if reader.late_body]


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the clients that are not given theirs."""
    for module in (mjpeg, device, webhook):
        monkeypatch.setattr(module, "TIMEOUT_S", TIMEOUT_S)


def assert_given_up(reader: Reader, message: str, parts: Sequence[bytes], folder: Path) -> None:
    """Check that the client gives up while the server still sends, one part every hundredth of a second. Makes
    the folder."""
    left = iter(parts)
    folder.mkdir()
    with serving(lambda request: left) as url:
        with pytest.raises(reader.error, match=message):
            reader.read(url, folder)
        assert next(left, None) is not None


def test_a_head_that_trickles_is_given_up(short_timeouts: None, tmp_path: Path) -> None:
    def check(name: str) -> None:
        reader = READERS[name]
        assert_given_up(reader, reader.late_head, [reader.head, *in_parts(b"x" * 1000)], tmp_path / name)

    together(check, READERS)


def test_a_server_that_announces_its_answer_again_and_again_is_given_up(short_timeouts: None, tmp_path: Path) -> None:
    def check(name: str) -> None:
        reader = READERS[name]
        assert_given_up(reader, reader.late_head, [b"HTTP/1.1 100 Continue\r\n\r\n"] * 1000, tmp_path / name)

    together(check, READERS)


def test_a_body_that_trickles_is_given_up(short_timeouts: None, tmp_path: Path) -> None:
    def check(name: str) -> None:
        reader = READERS[name]
        parts = [reader.head + b"\r\n" + reader.prompt, *in_parts(reader.rest[:1000])]
        assert_given_up(reader, reader.late_body, parts, tmp_path / name)

    together(check, WITH_BODY)


def test_the_size_of_a_chunk_that_trickles_is_given_up(short_timeouts: None, tmp_path: Path) -> None:
    def check(name: str) -> None:
        reader = READERS[name]
        parts = [reader.head + b"Transfer-Encoding: chunked\r\n\r\n", *in_parts(b"0" * 1000)]
        assert_given_up(reader, reader.late_body, parts, tmp_path / name)

    together(check, WITH_BODY)


def test_a_slow_line_is_fast_enough(tmp_path: Path) -> None:
    def check(name: str) -> None:
        reader = READERS[name]
        (tmp_path / name).mkdir()
        # In parts that come at more than 500 bytes/s, and together take longer than TIMEOUT_S.
        parts = [reader.head + b"\r\n", *in_parts(reader.prompt + reader.rest, max(len(reader.rest) // 20, 1))]
        with serving(lambda request: iter(parts), pause_s=0.04) as url:
            reader.read(url, tmp_path / name)

    together(check, READERS)


def test_of_a_file_that_trickles_what_came_is_kept(tmp_path: Path) -> None:
    reader = READERS["pull"]
    parts = [reader.head + b"\r\n" + reader.prompt, *in_parts(reader.rest)]
    with serving(lambda request: iter(parts)) as url, pytest.raises(Interrupted):
        reader.read(url, tmp_path)
    kept = (tmp_path / SHA256).read_bytes()
    assert kept == CONTENT[: len(kept)]
    assert len(kept) >= len(reader.prompt)


def test_the_answer_to_a_webhook_counts_without_its_body(short_timeouts: None, tmp_path: Path) -> None:
    reader = READERS["webhook"]
    is_asked_for_body = threading.Event()

    def answer(request: bytes) -> Iterator[bytes]:
        yield reader.head + b"Content-Length: 2000\r\n\r\n"
        is_asked_for_body.wait(60)

    with serving(answer) as url:
        reader.read(url, tmp_path)
        is_asked_for_body.set()


def test_a_broker_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paho.mqtt.client")
    monkeypatch.setattr(edge_server.plugins.cameras.sinks.mqtt_connection, "TIMEOUT_S", TIMEOUT_S)
    # CONNACK of MQTT 5 with 127 bytes, of which 100 are a text.
    answer = bytes((0x20, 127, 0, 0, 124, 0x1F, 0, 121)) + b"x" * 121

    def trickle(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            peer.settimeout(0.01)
            for part in in_parts(answer):
                peer.sendall(part)
                with contextlib.suppress(TimeoutError):
                    while peer.recv(65536):
                        pass
                    return  # the client has hung up

    with socket.create_server(("127.0.0.1", 0)) as listener:
        broker = threading.Thread(target=trickle, args=(listener,))
        broker.start()
        address = BrokerAddress(f"mqtt://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(MqttError, match=f"does not accept the connection: no answer within {TIMEOUT_S:g} s"):
            MqttConnection(address, "box", max_packet_bytes=1000).open()
        broker.join()


@pytest.mark.full
def test_a_collector_that_trickles_does_not_delay_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing = pytest.importorskip("tests.plugins.tracing.test_trace_spans")
    is_asked, is_closed = threading.Event(), threading.Event()

    def answer(request: bytes) -> Iterator[bytes]:
        is_asked.set()
        yield from in_parts(READERS["pull"].answer)
        is_closed.wait(60)

    with serving(answer) as url:
        traces = tracing.traces_to(f"opentelemetry,url={url}/v1/traces")
        tracing.run(traces)
        assert is_asked.wait(60)
        traces.close(TIMEOUT_S)
        is_closed.set()


@pytest.mark.full
def test_an_object_store_that_trickles_does_not_delay_the_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    from edge_server.plugins.remote import sync
    from edge_server.plugins.remote.address import parse_address
    from edge_server.plugins.remote.local_copy import LocalCopy
    from edge_server.plugins.remote.object_store import ObjectStore

    monkeypatch.setattr(sync, "_CLOSE_S", TIMEOUT_S)
    for name, value in (("ACCESS_KEY_ID", "me"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "eu-west-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    is_asked, is_closed = threading.Event(), threading.Event()

    def answer(request: bytes) -> Iterator[bytes]:
        is_asked.set()
        yield from in_parts(READERS["pull"].answer)
        is_closed.wait(60)

    with serving(answer) as url:
        address = f"s3://{url}/bucket/models"
        mirror = sync.RemoteSync(ObjectStore(parse_address(address)), LocalCopy(tmp_path), address, interval_s=0.05)
        mirror.start()
        assert is_asked.wait(60)
        mirror.close()
        is_closed.set()


def test_a_redirect_with_an_endless_body_is_followed_at_once(tmp_path: Path) -> None:
    def answer(request: bytes) -> Iterator[bytes]:
        if b"/there" in request:
            yield HEAD + CONTENT
            return
        yield b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /there\r\n\r\n"
        while True:
            yield bytes(1 << 20)

    with serving(answer, pause_s=0.0) as url:
        found = DownloadClient(url, {}, None, 60.0, is_command=False).download(f"{url}/model.onnx", SHA256, tmp_path)
        assert found.read_bytes() == CONTENT
        assert b"".join(list(SiteFiles(url, 0, 60.0).read("targets/m/1.json"))[1:]) == CONTENT
