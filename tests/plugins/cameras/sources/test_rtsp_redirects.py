"""Redirects of RTSP cameras, with real connections: no other host learns the password, and no camera leads in circles.

The cameras are at 127.0.0.1, the other host is 127.0.0.2.
"""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest

from edge_server.plugins.cameras.sources import rtsp
from edge_server.plugins.cameras.sources.rtsp import open_rtsp
from edge_server.plugins.cameras.sources.source_interface import SourceError

SDP = b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n"
CHALLENGES = {
    "Basic": b'WWW-Authenticate: Basic realm="cam"',
    "Digest": b'WWW-Authenticate: Basic realm="cam"\r\nWWW-Authenticate: Digest realm="cam", nonce="42"',
    "Digest with qop": b'WWW-Authenticate: Digest realm="cam", nonce="42", algorithm=MD5, opaque="7", qop="auth"',
}
OLD_OPENCV = "    avformat:                  YES (59.27.100)\n"
GSTREAMER_OPENCV = "    GStreamer:                   YES (1.20.3)\n"


class StubRtspCamera:
    """An RTSP camera that describes a stream and sends no picture, but what `play` sends. `redirect` is asked for the
    `Location` of each request, by method, address and user agent; "" is none. It asks for a `login`, if that is set,
    before."""

    def __init__(self, host: str) -> None:
        self.listener = socket.create_server((host, 0))
        self.address = f"{host}:{self.listener.getsockname()[1]}"
        self.login = ""
        self.redirect: Callable[[str, str, str], str] = lambda method, address, agent: ""
        self.requests: list[tuple[str, str]] = []
        self.play: Callable[[socket.socket], object] = lambda peer: None
        self._peers: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"rtsp://me:geheim@{self.address}/cam"

    @property
    def connection_count(self) -> int:
        return len(self._peers)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self.listener.accept()
                self._peers.append(peer)
                self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
                self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as lines, suppress(OSError):
            head = b""
            while line := lines.readline():
                head += line
                if line == b"\r\n":
                    if not self._answer(peer, head):
                        return
                    head = b""

    def _answer(self, peer: socket.socket, head: bytes) -> bool:
        method, address, _ = head.decode().split(" ", 2)
        self.requests.append((method, address))
        lines = [line.partition(":") for line in head.decode().splitlines()]
        fields = {name.lower(): value.strip() for name, _, value in lines}
        status, more, body = b"200 OK", [b"CSeq: " + fields["cseq"].encode()], b""
        if self.login and not self._is_authorized(method, fields.get("authorization", "")):
            status, body = b"401 Unauthorized", b"who?"
            more += [CHALLENGES[self.login]]
        elif location := self.redirect(method, address, fields.get("user-agent", "")):
            status = b"302 Moved"
            more += [b"Location: " + location.encode()]
        elif method == "DESCRIBE":
            body = SDP
            more += [b"Content-Type: application/sdp"]
        elif method == "SETUP":
            more += [b"Session: 1", b"Transport: RTP/AVP/TCP;unicast;interleaved=0-1"]
        more += [b"Content-Length: %d" % len(body)]
        peer.sendall(b"RTSP/1.0 " + status + b"\r\n" + b"\r\n".join(more) + b"\r\n\r\n" + body)
        if method == "PLAY":
            self.play(peer)
        return method != "PLAY"

    def _is_authorized(self, method: str, header: str) -> bool:
        if self.login == "Basic":
            return header == "Basic " + base64.b64encode(b"me:geheim").decode()
        values = dict(re.findall(r'(\w+)="?([^",]*)', header))

        def md5(text: str) -> str:
            return hashlib.md5(text.encode()).hexdigest()

        once = ["42"]
        if self.login == "Digest with qop":
            once += [values.get(name, "") for name in ("nc", "cnonce", "qop")]
        expected = [md5("me:cam:geheim"), *once, md5(f"{method}:{values.get('uri')}")]
        return values.get("response") == md5(":".join(expected))

    def close(self) -> None:
        for one in (self.listener, *self._peers):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def rtsp_stub() -> Iterator[StubRtspCamera]:
    made = StubRtspCamera("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def other_host() -> Iterator[StubRtspCamera]:
    """A host that asks for a password."""
    made = StubRtspCamera("127.0.0.2")
    made.login = "Basic"
    yield made
    made.close()


@pytest.fixture(params=["pyav", "opencv"])
def decoder(request) -> str:
    pytest.importorskip("av" if request.param == "pyav" else "cv2")
    return request.param


@pytest.mark.parametrize("login", ["", "Basic", "Digest"])
@pytest.mark.parametrize("scheme", ["rtsp", "rtsps", "satip", "tcp"])
def test_a_redirect_to_another_host_is_refused_and_that_host_is_not_asked(
    rtsp_stub, other_host, decoder, login, scheme
):
    rtsp_stub.login = login
    rtsp_stub.redirect = lambda method, address, agent: f"{scheme}://{other_host.address}/cam"
    with pytest.raises(SourceError) as caught:
        open_rtsp(rtsp_stub.url, decoder)
    assert caught.value.message == (
        f"rtsp://{rtsp_stub.address}: the camera redirects to '{scheme}://{other_host.address}', and only redirects to "
        "the same host and port are followed; is this the address that is wanted?"
    )
    assert other_host.connection_count == 0


@pytest.mark.parametrize("step", ["OPTIONS", "DESCRIBE", "SETUP", "PLAY"])
def test_a_camera_that_redirects_only_the_decoder_leads_it_to_no_other_host(rtsp_stub, other_host, decoder, step):
    rtsp_stub.login = "Digest"
    rtsp_stub.redirect = lambda method, address, agent: (
        f"rtsp://{other_host.address}/cam" if method == step and "edge_server" not in agent else ""
    )
    with pytest.raises(SourceError):
        open_rtsp(rtsp_stub.url, decoder)
    assert step in [method for method, _ in rtsp_stub.requests]
    assert other_host.connection_count == 0


@pytest.mark.parametrize("login", ["", "Basic", "Digest", "Digest with qop"])
def test_three_redirects_on_the_same_host_are_followed_and_the_password_goes_along(rtsp_stub, decoder, login):
    rtsp_stub.login = login
    stages = ["cam", "b", "c", "d"]

    def redirect(method: str, address: str, agent: str) -> str:
        stage = address.rpartition("/")[2]
        return f"rtsp://{rtsp_stub.address}/{stages[stages.index(stage) + 1]}" if stage in stages[:3] else ""

    rtsp_stub.redirect = redirect
    source = open_rtsp(rtsp_stub.url, decoder)
    source.close()
    assert ("PLAY", f"rtsp://{rtsp_stub.address}/d") in rtsp_stub.requests


@pytest.mark.parametrize("login", ["", "Basic"])
def test_a_camera_that_redirects_in_circles_is_given_up_after_a_few_requests(rtsp_stub, decoder, login):
    rtsp_stub.login = login
    rtsp_stub.redirect = lambda method, address, agent: f"rtsp://{rtsp_stub.address}/again"
    with pytest.raises(SourceError, match=r"the camera redirects more than 3 times$"):
        open_rtsp(rtsp_stub.url, decoder)
    assert len(rtsp_stub.requests) <= 10


@pytest.mark.parametrize(("decoder", "build"), [("opencv", OLD_OPENCV), ("gstreamer", GSTREAMER_OPENCV)])
def test_a_decoder_that_follows_every_redirect_gets_an_address_that_was_asked_before(
    monkeypatch, rtsp_stub, other_host, decoder, build
):
    opened = []
    cv2 = SimpleNamespace(
        getBuildInformation=lambda: build,
        VideoCapture=lambda address, *rest: opened.append(address) or pytest.fail("opened"),
        CAP_GSTREAMER=0,
    )
    monkeypatch.setattr(rtsp, "opencv", lambda: cv2)
    rtsp_stub.login = "Digest"
    rtsp_stub.redirect = lambda method, address, agent: f"rtsp://{other_host.address}/cam"
    with pytest.raises(SourceError, match="only redirects to the same host and port are followed"):
        open_rtsp(rtsp_stub.url, decoder)
    assert opened == []


@pytest.fixture
def drip() -> Iterator[Callable[[socket.socket, bytes], None]]:
    """Send data byte by byte, ten times faster than the limit of the tests."""
    ends = threading.Event()

    def send(peer: socket.socket, data: bytes) -> None:
        with suppress(OSError):
            for number in data:
                peer.sendall(bytes([number]))
                if ends.wait(0.05):
                    return

    yield send
    ends.set()


HEAD = b"RTSP/1.0 200 OK\r\nCSeq: 1\r\nX: " + 4096 * b"a"
LATE = r"^rtsp://127\.0\.0\.1:[0-9]+: no data within 0\.5 s$"


def test_a_camera_that_drips_its_answer_is_given_up_in_time(monkeypatch, camera, decoder, drip):
    monkeypatch.setattr(rtsp, "TIMEOUT_S", 0.5)
    camera.script = lambda peer, head: drip(peer, HEAD)
    with pytest.raises(SourceError, match=LATE):
        open_rtsp(f"rtsp://me:geheim@127.0.0.1:{camera.port}/x", decoder)


def test_a_camera_that_drips_its_pictures_is_given_up_in_time(monkeypatch, rtsp_stub, decoder, drip):
    monkeypatch.setattr(rtsp, "TIMEOUT_S", 0.5)
    rtsp_stub.play = lambda peer: drip(peer, b"$\0\x10\0" + 4096 * b"a")
    with pytest.raises(SourceError, match=LATE):
        open_rtsp(rtsp_stub.url, decoder).read()


def test_a_camera_that_drips_to_the_servers_own_question_is_given_up_in_time(monkeypatch, camera, drip):
    monkeypatch.setattr(rtsp, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(rtsp, "opencv", lambda: SimpleNamespace(getBuildInformation=lambda: OLD_OPENCV))
    camera.script = lambda peer, head: drip(peer, HEAD)
    with pytest.raises(SourceError, match=LATE):
        open_rtsp(f"rtsp://me:geheim@127.0.0.1:{camera.port}/x", "opencv")
