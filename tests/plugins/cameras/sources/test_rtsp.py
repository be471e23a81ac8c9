"""RTSP against GStreamer's server: pictures, clocks, UDP, TLS, refusals, a server that is killed and back."""

from __future__ import annotations

import gc
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from edge_server.errors import Unsupported
from edge_server.memory.malloc_settings import trim
from edge_server.plugins.cameras.source_and_sink_settings import SourceEntry
from edge_server.plugins.cameras.sources import rtsp
from edge_server.plugins.cameras.sources.rtsp import gstreamer_pipeline, open_rtsp
from edge_server.plugins.cameras.sources.source_interface import SourceError


@pytest.mark.full
def test_frames_of_a_camera_are_bgr(rtsp_camera):
    rtsp_camera.start()
    source = open_rtsp(rtsp_camera.url)
    picture = source.read()
    source.close()
    pixels = picture.convert()
    assert pixels.shape == (240, 320, 3)
    # GStreamer's colour bars begin with white and end with blue.
    assert pixels[20, 10].min() > 150
    blue, green, red = pixels[20, 310].astype(int)
    assert blue > green + 80
    assert blue > red + 80


@pytest.mark.full
def test_opencv_reads_the_same_camera_without_pyav(rtsp_camera):
    rtsp_camera.start()
    source = open_rtsp(rtsp_camera.url, "opencv")
    assert source.read().pixels.shape == (240, 320, 3)
    source.close()


@pytest.mark.full
def test_timestamps_are_the_cameras_after_its_first_sender_report(rtsp_camera):
    rtsp_camera.start()
    source = open_rtsp(rtsp_camera.url)
    picture = source.read()
    # 0 until the report, which comes before the first picture is read on a busy machine.
    while not picture.stamp_ns:
        picture = source.read()
    # The camera runs on this machine: both clocks are the same one. Its reports begin before an hour has passed.
    assert abs(time.time_ns() - picture.stamp_ns) < 3600 * 10**9
    later = source.read()
    assert 0 < later.stamp_ns - picture.stamp_ns < 10**9
    source.close()


@pytest.mark.full
def test_a_camera_opens_with_its_password_only_and_the_password_is_not_shown(rtsp_camera, caplog):
    rtsp_camera.start("me", "geheim")
    source = open_rtsp(rtsp_camera.url.replace("rtsp://", "rtsp://me:geheim@"))
    assert source.read() is not None
    source.close()
    for login in ("", "me:falsch@"):
        with pytest.raises(SourceError, match="refuses user and password") as caught:
            open_rtsp(rtsp_camera.url.replace("rtsp://", f"rtsp://{login}"))
        assert "falsch" not in caught.value.message
    assert "geheim" not in source.title + caplog.text
    assert "falsch" not in caplog.text


@pytest.mark.full
def test_a_wrong_path_is_reported(rtsp_camera):
    rtsp_camera.start()
    with pytest.raises(SourceError, match="no such stream; is the path right"):
        open_rtsp(rtsp_camera.url.replace("/cam", "/other"))


def test_an_answer_of_a_web_server_is_asked_about(camera):
    pytest.importorskip("av")
    camera.answers(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(SourceError, match=r": the data is not that of RTSP; is this an RTSP port\?$"):
        open_rtsp(f"rtsp://127.0.0.1:{camera.port}/x")


@pytest.mark.full
def test_a_silent_or_invalid_server_times_out(monkeypatch, camera):
    pytest.importorskip("av")
    monkeypatch.setattr(rtsp, "TIMEOUT_S", 0.5)
    address = f"rtsp://me:geheim@127.0.0.1:{camera.port}/x"
    camera.answers(b"garbage\r\n" * 100_000)
    with pytest.raises(SourceError) as garbage:
        open_rtsp(address)
    goes_on = threading.Event()
    camera.script = lambda peer, head: goes_on.wait(20)
    try:
        with pytest.raises(SourceError, match=r"no data within 0\.5 s") as silent:
            open_rtsp(address)
    finally:
        goes_on.set()
    for caught in (garbage, silent):
        assert caught.value.message.startswith(f"rtsp://127.0.0.1:{camera.port}: ")
        assert "geheim" not in caught.value.message


@pytest.mark.full
@pytest.mark.parametrize("transport", ["udp", "auto"])
def test_pictures_come_over_udp(rtsp_camera, transport):
    rtsp_camera.start()
    source = open_rtsp(rtsp_camera.url, transport=transport)
    assert source.read().convert().shape == (240, 320, 3)
    source.close()
    assert source.title.endswith(" over UDP")


@pytest.mark.full
def test_udp_that_does_not_arrive_is_named_and_with_auto_tcp_is_taken(monkeypatch, rtsp_camera, relay, caplog):
    monkeypatch.setattr(rtsp, "TIMEOUT_S", 1.5)
    rtsp_camera.start()
    # The camera sends to a port where nobody is, as it does through a router that translates addresses.
    elsewhere = partial(re.sub, rb"client_port=[0-9]+-[0-9]+", b"client_port=2-3")
    url = f"rtsp://127.0.0.1:{relay(rtsp_camera.port, elsewhere)}/cam"
    with pytest.raises(SourceError, match=r"nothing arrived over UDP within 1\.5 s"):
        open_rtsp(url, transport="udp")
    source = open_rtsp(url, transport="auto")
    assert source.read() is not None
    source.close()
    assert source.title.endswith(" over TCP")
    assert "nothing arrived over UDP within 1.5 s; trying TCP" in caplog.text


@pytest.mark.full
def test_auto_begins_with_the_transport_that_worked_last(monkeypatch, rtsp_camera, relay):
    monkeypatch.setattr(rtsp, "TIMEOUT_S", 1.5)
    asked: list[bytes] = []
    changes = [(rb"client_port=[0-9]+-[0-9]+", b"client_port=2-3")]

    def change(text: bytes) -> bytes:
        asked.extend(re.findall(rb"Transport: ([A-Z/]+)", text))
        return re.sub(*changes[-1], text)

    def transports() -> list[bytes]:
        asked.clear()
        open_rtsp(url, transport="auto").close()
        return [*asked]

    rtsp_camera.start()
    url = f"rtsp://127.0.0.1:{relay(rtsp_camera.port, change)}/cam"
    udp, tcp = b"RTP/AVP/UDP", b"RTP/AVP/TCP"
    assert transports() == [udp, tcp]
    rtsp_camera.kill()
    with pytest.raises(SourceError):
        open_rtsp(url, transport="auto")
    rtsp_camera.start()
    assert transports() == [tcp]
    # A camera that sends no more over TCP.
    changes.append((tcp, b"RTP/XXX"))
    assert transports() == [tcp, udp]
    assert transports() == [udp]


@pytest.mark.full
def test_a_camera_without_udp_or_without_tcp_is_named(rtsp_camera, relay):
    rtsp_camera.start()

    def refusing(transport: bytes) -> str:
        return f"rtsp://127.0.0.1:{relay(rtsp_camera.port, lambda text: text.replace(transport, b'RTP/XXX'))}/cam"

    with pytest.raises(SourceError, match="the camera does not send over UDP"):
        open_rtsp(refusing(b"RTP/AVP/UDP"), transport="udp")
    with pytest.raises(SourceError, match='does not send over TCP; set transport = "udp"'):
        open_rtsp(refusing(b"RTP/AVP/TCP"))
    source = open_rtsp(refusing(b"RTP/AVP/UDP"), transport="auto")
    source.close()
    assert source.title.endswith(" over TCP")


@pytest.mark.full
def test_pictures_come_over_rtsps_from_a_camera_whose_certificate_is_trusted(rtsp_camera, relay, tmp_path):
    rtsp_camera.start()

    def url(name: str) -> str:
        """Return the URL of a camera with a certificate that it signed itself, NAME.pem."""
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
             "1", "-subj", "/CN=cam", "-addext", f"subjectAltName={name}", "-keyout", f"{name}.key", "-out",
             f"{name}.pem"],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        return f"rtsps://me:geheim@127.0.0.1:{relay(rtsp_camera.port, context=context)}/cam"

    for name in ("IP:127.0.0.1", "DNS:camera.lan"):
        address = url(name)
        with pytest.raises(SourceError, match=r"the certificate is not valid: self.signed certificate"):
            open_rtsp(address)
        source = open_rtsp(address, ca=str(tmp_path / f"{name}.pem"))
        assert source.read() is not None
        source.close()
        assert source.title.endswith(" over TLS")


@pytest.fixture
def relay():
    """Start a relay to a port of this machine: it may speak TLS to the client, and change what the client sends."""
    listeners, threads = [], []

    def start(target: int, change=bytes, context: ssl.SSLContext | None = None) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        run(accept, listener, target, change, context)
        return listener.getsockname()[1]

    def run(function, *arguments) -> None:
        thread = threading.Thread(target=function, args=arguments)
        threads.append(thread)
        thread.start()

    def accept(listener, target, change, context) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                run(serve, client, target, change, context)

    def serve(client, target, change, context) -> None:
        with client, suppress(OSError):
            secured = client if context is None else context.wrap_socket(client, server_side=True)
            with secured, socket.create_connection(("127.0.0.1", target)) as server:
                back = threading.Thread(target=copy, args=(server, secured, bytes))
                back.start()
                copy(secured, server, change)
                back.join()

    def copy(source, target, change) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(change(data))
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "failures",
    [pytest.param((10, 30), marks=pytest.mark.soak), pytest.param((20, 80), marks=pytest.mark.long)],
    ids=["400", "1000"],
)
def test_hundreds_of_broken_connections_leak_no_memory(failures, rtsp_cameras, cameras, eventually):
    """Each connection goes through a relay, which cuts it as soon as a picture came through. To ten cameras, as a
    connection takes a quarter of a second, in which it waits for pictures."""
    relays, entries = [], []
    for camera in rtsp_cameras:
        camera.start()
        relays.append(CuttingRelay(camera.port))
        url = f"rtsp://127.0.0.1:{relays[-1].port}/cam"
        entries.append(SourceEntry(name=f"cam{camera.port}", url=url, model="sum"))
    resident = []
    end_s = time.monotonic() + 500
    for count in failures:
        cameras.apply(*entries)
        while min(report.failures for report in cameras.set.reports()) < count:
            assert time.monotonic() < end_s, cameras.set.reports()
            time.sleep(0.05)
        assert not any("refused" in report.reason for report in cameras.set.reports()), "a camera has ended"
        cameras.apply()
        assert eventually(lambda: not any(thread.name.startswith("source-cam") for thread in threading.enumerate()))
        resident.append(resident_bytes())
    for relay in relays:
        relay.close()
    print(f"resident after {10 * failures[0]} and {10 * sum(failures)} connections: {resident}")
    assert resident[1] - resident[0] < 8 << 20


def resident_bytes() -> int:
    """After what other tests of this process left to the collector and the allocator is gone."""
    gc.collect()
    trim()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class CuttingRelay:
    """A TCP relay that closes each connection after 40 kB of the server's bytes."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                up = threading.Thread(target=self._copy, args=(client, server, 1 << 30), daemon=True)
                up.start()
                self._copy(server, client, 40_000)
                for one in (client, server):
                    with suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
                up.join()
                client.close()
                server.close()

    @staticmethod
    def _copy(source, target, limit: int) -> None:
        with suppress(OSError):
            while limit > 0 and (data := source.recv(min(limit, 65536))):
                target.sendall(data)
                limit -= len(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_without_pyav_and_opencv_the_error_names_what_to_install(monkeypatch):
    def absent(name):
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(rtsp.importlib, "import_module", absent)
    with pytest.raises(Unsupported, match=r"pip install '\.\[sources\]'"):
        open_rtsp("rtsp://host/x", "pyav")
    # OpenCV's FFmpeg would not check the certificate.
    with pytest.raises(Unsupported, match=r"pip install '\.\[sources\]'"):
        open_rtsp("rtsps://host/x")


def test_opencv_without_gstreamer_is_named(monkeypatch):
    build = "  Video I/O:\n    GStreamer:                   NO\n"
    monkeypatch.setattr(rtsp, "opencv", lambda: type("cv2", (), {"getBuildInformation": staticmethod(lambda: build)}))
    with pytest.raises(Unsupported, match="built without GStreamer"):
        open_rtsp("rtsp://host/x", "gstreamer")


def test_a_url_cannot_inject_into_the_gstreamer_pipeline():
    pipeline = gstreamer_pipeline('rtsp://host/x" ! filesink location="/etc/passwd')
    assert '"rtsp://host/x\\" ! filesink location=\\"/etc/passwd"' in pipeline
    assert "protocols=tcp " in pipeline
    assert "protocols=udp+tcp " in gstreamer_pipeline("rtsp://host/x", "auto")


def test_without_pyav_opencv_is_tried_and_the_error_names_what_says_more(monkeypatch, camera):
    monkeypatch.setattr(rtsp.importlib.util, "find_spec", lambda name: None)
    camera.answers(b"RTSP/1.0 404 Not Found\r\nCSeq: 1\r\n\r\n")
    with pytest.raises(SourceError, match=r"OpenCV cannot open the stream.*pip install '\.\[sources\]'") as caught:
        open_rtsp(f"rtsp://me:geheim@127.0.0.1:{camera.port}/x")
    assert caught.value.message.startswith(f"rtsp://127.0.0.1:{camera.port}: ")
