"""Motion JPEG over HTTP: valid and invalid responses of a camera on a local socket."""

from __future__ import annotations

import base64
import re
import socket
import ssl

import pytest

from edge_server.plugins.cameras.sources.mjpeg import MjpegCamera, follows_redirect
from edge_server.plugins.cameras.sources.source_choice import open_source
from edge_server.plugins.cameras.sources.source_interface import SourceError
from tests.kit.certificates import self_signed
from tests.kit.site import Handler, Site

MULTIPART = b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=x\r\n\r\n"


def read_all(url):
    """Return the pictures of a camera, and why it ended."""
    source = open_source(url)
    pictures = []
    try:
        while True:
            pictures.append(source.read())
    except SourceError as error:
        return pictures, error.message
    finally:
        source.close()


def refusal(url):
    """Return why a camera cannot be opened or read."""
    try:
        return read_all(url)[1]
    except SourceError as error:
        return error.message


@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        "multipart/x-mixed-replace; boundary=x",
        "multipart/x-mixed-replace;boundary=--x",
        'multipart/x-mixed-replace; boundary="x"',
        "multipart/x-mixed-replace",
    ],
)
def test_frames_come_in_order_and_unchanged(camera, jpeg, kind, with_length):
    files = [jpeg(value) for value in (10, 120, 230)]
    camera.plays(*files, with_length=with_length, kind=kind)
    pictures, why = read_all(camera.url)
    assert [picture.file for picture in pictures] == files
    assert {picture.format for picture in pictures} == {"jpeg"}
    assert why.endswith("the camera closed the connection")


def redirects(camera, target: str, length: int = 0) -> None:
    """Make the camera send its first client to another address, and the next one pictures."""
    play = camera.script

    def answer(peer, head):
        if len(camera.heads) > 1:
            play(peer, head)
        else:
            peer.sendall(f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: {length}\r\n\r\n".encode())

    camera.script = answer


@pytest.mark.parametrize("length", [0, 1 << 50])
def test_a_redirect_on_the_camera_itself_is_followed_without_its_body(camera, jpeg, length):
    camera.plays(jpeg(1))
    redirects(camera, "/new/video", length)
    pictures, _ = read_all(camera.url)
    assert len(pictures) == 1
    assert camera.heads[1].startswith(b"GET /new/video ")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2", "127.0.0.1"])
def test_a_camera_cannot_send_the_server_to_another_host_or_port(camera, host):
    listener = socket.create_server(("", 0))
    target = f"{host}:{listener.getsockname()[1]}"
    with listener:
        redirects(camera, f"http://{target}/secret")
        why = refusal(camera.url)
        assert f"redirects to 'http://{target}', and only redirects to the same host are followed" in why
        assert "secret" not in why
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize(
    ("old", "new", "is_followed"),
    [
        ("http://cam/a", "http://CAM:80/b", True),
        ("http://cam/a", "https://cam/b", True),
        ("http://cam/a", "https://cam:444/b", False),
        ("http://cam:8080/a", "https://cam/b", False),
        ("https://cam/a", "https://cam:443/b", True),
        ("https://cam/a", "http://cam/b", False),
        ("http://cam/a", "http://cam.example/b", False),
        ("http://cam/a", "http://cam@other/b", False),
        ("http://cam/a", "ftp://cam:80/b", False),
    ],
)
def test_redirects_that_a_camera_may_send(old, new, is_followed):
    if is_followed:
        assert follows_redirect("cam", old, new)
    else:
        with pytest.raises(SourceError, match="only redirects to the same host"):
            follows_redirect("cam", old, new)


@pytest.mark.parametrize("scheme", ["Basic", "Digest"])
def test_credentials_are_sent_in_the_scheme_of_the_camera(camera, jpeg, scheme):
    camera.plays(jpeg(1))
    play = camera.script
    challenge = 'Basic realm="cam"' if scheme == "Basic" else 'Digest realm="cam", nonce="abc", qop="auth"'

    def ask(peer, head):
        if b"\r\nAuthorization: " in head:
            play(peer, head)
        else:
            peer.sendall(f"HTTP/1.1 401 No\r\nWWW-Authenticate: {challenge}\r\nContent-Length: 0\r\n\r\n".encode())

    camera.script = ask
    pictures, _ = read_all(camera.url.replace("http://", "http://me:p%40ss@"))
    assert len(pictures) == 1
    sent = re.search(rb"\r\nAuthorization: (\w+) ([^\r]*)", camera.heads[-1])
    assert sent[1].decode() == scheme
    if scheme == "Basic":
        assert base64.b64decode(sent[2]) == b"me:p@ss"
    assert b"me:p" not in camera.heads[0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "refuses user and password"),
        (b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n", "refuses user and password"),
        (b"HTTP/1.1 401 No\r\nWWW-Authenticate: NTLM\r\nContent-Length: 0\r\n\r\n", "other than Basic and Digest"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "status 404; is the path right"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "status 500"),
        (b"HTTP/1.1 302 No\r\nLocation: file:///etc/passwd\r\n\r\n", "status 302"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>", "expected Motion JPEG.*'text/html'"),
        (b"\x00\xff garbage \r\n\r\n", "the connection broke"),
        (b"", "the connection broke|reset"),
        (MULTIPART + b"x" * 100_000, "without an end"),
        (MULTIPART + b"garbage\r\n" * 9, "expected the boundary"),
        (MULTIPART + b"--x\r\n" + b"a: b\r\n" * 99, "more than 64 lines"),
        (MULTIPART + b"--x\r\nContent-Length: 999999999\r\n\r\n", "at most 33554432 bytes, given 999999999"),
        (MULTIPART + b"--x\r\nContent-Length: 4\r\n\r\nGIF8\r\n--x", "expected JPEG pictures.*47494638"),
        (MULTIPART + b"--x\r\nContent-Length: 40\r\n\r\n\xff\xd8", "closed the connection"),
        (MULTIPART + b"--x\r\n\r\n" + b"\xff\xd8" * 99, "closed the connection"),
    ],
)
def test_an_invalid_camera_response_is_refused_without_the_password(camera, answer, message):
    camera.answers(answer)
    reason = refusal(camera.url.replace("http://", "http://me:geheim@") + "?token=geheim")
    assert re.search(message, reason), reason
    assert reason.startswith(f"http://127.0.0.1:{camera.port}: ")
    assert "geheim" not in reason


def test_a_frame_without_an_end_is_refused_at_the_size_limit(camera):
    def flood(peer, head):
        peer.sendall(MULTIPART + b"--x\r\n\r\n")
        while True:
            peer.sendall(bytes(1 << 20))

    camera.script = flood
    assert "given more without an end" in refusal(camera.url)


def test_a_camera_that_signed_its_own_certificate_is_opened_with_that_certificate(tmp_path, jpeg):
    cert, key = self_signed(tmp_path, alternative="IP:127.0.0.1")
    body = b"--x\r\nContent-Type: image/jpeg\r\n\r\n" + jpeg(7) + b"\r\n--x--\r\n"

    class Camera(Handler):
        def do_GET(self) -> None:
            self.answer(body, Content_Type="multipart/x-mixed-replace; boundary=x")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with Site(Camera, context) as site:
        url = f"{site.url}/video"
        source = MjpegCamera(url, str(cert))
        assert source.read().file == jpeg(7)
        source.close()
        with pytest.raises(SourceError, match=r"the certificate is not valid: self.signed certificate"):
            MjpegCamera(url)
        with pytest.raises(SourceError, match=r"ca: .*none\.pem: No such file"):
            MjpegCamera(url, str(tmp_path / "none.pem"))
