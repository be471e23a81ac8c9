"""Certificates of cameras: pinned ones, those of an authority, and what is refused, with real TLS connections."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from edge_server.plugins.cameras.sources.camera_tls import find_pinned_certificate
from edge_server.plugins.cameras.sources.mjpeg import MjpegCamera
from edge_server.plugins.cameras.sources.rtsp import open_rtsp
from edge_server.plugins.cameras.sources.source_interface import SourceError

OWN = ["-x509", "-days", "1"]
CERTIFICATES = {
    "own": [*OWN, "-subj", "/CN=IP CAMERA 42"],
    "leaf": [*OWN, "-subj", "/CN=cam", "-addext", "basicConstraints=critical,CA:FALSE"],
    "renewed": [*OWN, "-subj", "/CN=IP CAMERA 42"],
    "wildcard": [*OWN, "-subj", "/CN=cam", "-addext", "subjectAltName=DNS:*.camera.lan"],
    "named": [*OWN, "-subj", "/CN=cam", "-addext", "subjectAltName=IP:127.0.0.1"],
    "nameless": [*OWN, "-subj", "/O=Acme"],
    "authority": [*OWN, "-subj", "/CN=Acme CA"],
}
ISSUED = {
    "issued": ("authority", "1", "subjectAltName=IP:127.0.0.1"),
    "issued_elsewhere": ("authority", "1", "subjectAltName=DNS:camera.lan"),
    "expired": ("", "-1", "subjectAltName=IP:127.0.0.1"),
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """A folder with NAME.pem and NAME.key, `many.pem` with several certificates, and files that hold none."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    def request(name: str, *options: str, key: str = "ec") -> None:
        curve = ["-pkeyopt", "ec_paramgen_curve:prime256v1"] if key == "ec" else []
        openssl("req", "-newkey", key, *curve, "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem", *options)

    for name, options in CERTIFICATES.items():
        request(name, *options)
    request("short_key", *OWN, "-subj", "/CN=cam", key="rsa:1024")
    for name, (issuer, days, extension) in ISSUED.items():
        request(name, "-subj", f"/CN={name}")
        (folder / "extension").write_text(extension)
        signer = ["-CA", f"{issuer}.pem", "-CAkey", f"{issuer}.key", "-CAcreateserial"] if issuer else []
        signer = signer or ["-signkey", f"{name}.key"]
        openssl(
            "x509", "-req", "-in", f"{name}.pem", "-days", days, "-extfile", "extension", "-out", f"{name}.pem", *signer
        )
    (folder / "many.pem").write_text("".join((folder / f"{name}.pem").read_text() for name in ("authority", "own")))
    (folder / "text.pem").write_text("no certificate")
    return folder


class TlsCamera:
    """A server of one picture over https://, and of no stream over rtsps://; /moved is elsewhere. Its certificates are
    used in turn, the last one for all later connections."""

    def __init__(self, folder: Path, *names: str) -> None:
        self._contexts = []
        for name in names:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
            self._contexts.append(context)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                context = self._contexts.pop(0) if len(self._contexts) > 1 else self._contexts[0]
                with peer, suppress(OSError), context.wrap_socket(peer, server_side=True) as secured:
                    self._answer(secured, secured.recv(4096))

    @staticmethod
    def _answer(peer: ssl.SSLSocket, request: bytes) -> None:
        if b" RTSP/1.0\r\n" in request:
            number = re.search(rb"CSeq: ([0-9]+)", request)
            assert number is not None
            more = b"\r\nCSeq: " + number[1] + b"\r\nLocation: rtsp://127.0.0.2/cam\r\n\r\n"
            peer.sendall(b"RTSP/1.0 " + (b"302 Moved" if b"/moved " in request else b"404 Not Found") + more)
        elif request:
            peer.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=x\r\n\r\n"
                b"--x\r\nContent-Length: 4\r\n\r\n\xff\xd8\xff\xd9\r\n--x--\r\n"
            )

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def start(certificates: Path) -> Iterator:
    """Start a camera that shows these certificates; return its address."""
    cameras: list[TlsCamera] = []

    def start_one(*names: str) -> str:
        cameras.append(TlsCamera(certificates, *names))
        return cameras[-1].address

    yield start_one
    for camera in cameras:
        camera.close()


def open_https(address: str, ca: str) -> None:
    source = MjpegCamera(f"https://me:geheim@{address}/video", ca)
    assert source.read() is not None
    source.close()


def open_rtsps(address: str, ca: str) -> None:
    pytest.importorskip("av")
    try:
        open_rtsp(f"rtsps://me:geheim@{address}/cam", ca=ca)
    except SourceError as error:
        if "the camera has no such stream" not in error.message:  # it was asked for one: TLS works
            raise


OPENERS = [open_https, pytest.param(open_rtsps, marks=pytest.mark.full)]

ACCEPTED = [
    ("own", "own"), ("own", "many"), ("leaf", "leaf"), ("wildcard", "wildcard"), ("named", "named"),
    ("short_key", "short_key"), ("issued_elsewhere", "issued_elsewhere"), ("issued", "authority"), ("issued", "many"),
]  # fmt: skip


@pytest.mark.parametrize("open_camera", OPENERS)
@pytest.mark.parametrize(("shown", "trusted"), ACCEPTED)
def test_a_pinned_certificate_needs_no_name_and_one_of_an_authority_needs_the_right_one(
    start, certificates, open_camera, shown, trusted
):
    open_camera(start(shown), str(certificates / f"{trusted}.pem"))


REFUSED = [
    ("expired", "expired", "certificate has expired", False),
    ("renewed", "own", "self.signed certificate", True),
    ("own", "authority", "self.signed certificate", True),
    ("own", "", "self.signed certificate", True),
    ("issued_elsewhere", "authority", "IP address mismatch", True),
    ("issued_elsewhere", "many", "IP address mismatch", True),
    ("issued", "own", "unable to get local issuer certificate", True),
]


@pytest.mark.parametrize("open_camera", OPENERS)
@pytest.mark.parametrize(("shown", "trusted", "problem", "is_pinnable"), REFUSED)
def test_any_other_certificate_is_refused_with_the_command_that_fetches_it(
    start, certificates, open_camera, shown, trusted, problem, is_pinnable
):
    address = start(shown)
    with pytest.raises(SourceError, match=f"the certificate is not valid: {problem}") as caught:
        open_camera(address, str(certificates / f"{trusted}.pem") if trusted else "")
    command = f"openssl s_client -connect {address} </dev/null | openssl x509 -out camera.pem"
    assert (command in caught.value.message) is is_pinnable
    assert "geheim" not in caught.value.message


@pytest.mark.parametrize("open_camera", OPENERS)
def test_the_command_of_the_error_fetches_what_is_then_trusted(start, certificates, tmp_path, open_camera):
    address = start("own")
    with pytest.raises(SourceError) as caught:
        open_camera(address, "")
    command = caught.value.message.partition("name the file as ca: ")[2]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)
    open_camera(address, str(tmp_path / "camera.pem"))


@pytest.mark.parametrize("open_camera", OPENERS)
def test_the_connection_of_the_pictures_is_checked_itself(start, certificates, open_camera):
    """Another certificate comes after the first connection, on which the pinned one was seen."""
    with pytest.raises(SourceError, match="certificate"):
        open_camera(start("own", "renewed"), str(certificates / "own.pem"))


def test_a_certificate_that_the_pinned_one_signed_is_not_the_pinned_one(start, certificates):
    with pytest.raises(SourceError, match="the camera shows another certificate than just before"):
        open_https(start("authority", "issued"), str(certificates / "authority.pem"))


@pytest.mark.parametrize("open_camera", OPENERS)
@pytest.mark.parametrize(("file", "problem"), [("none", "No such file"), ("text", "expected certificates in PEM")])
def test_an_unusable_file_is_named(start, certificates, open_camera, file, problem):
    with pytest.raises(SourceError, match=rf"ca: .*/{file}\.pem: {problem}"):
        open_camera(start("own"), str(certificates / f"{file}.pem"))


@pytest.mark.full
@pytest.mark.parametrize("shown", ["own", "named"])
def test_a_redirect_from_tls_to_another_address_is_refused(start, certificates, shown):
    pytest.importorskip("av")
    with pytest.raises(SourceError, match=r"the camera redirects to 'rtsp://127\.0\.0\.2', and only"):
        open_rtsp(f"rtsps://me:geheim@{start(shown)}/moved", ca=str(certificates / f"{shown}.pem"))


@pytest.mark.full
def test_ffmpeg_needs_a_name_of_any_kind_in_a_pinned_certificate(start, certificates):
    with pytest.raises(SourceError, match="expected a certificate with a name in ASCII"):
        open_rtsps(start("nameless"), str(certificates / "nameless.pem"))
    open_https(start("nameless"), str(certificates / "nameless.pem"))


def test_a_camera_that_is_off_is_reported_as_without_certificates(certificates, free_ports):
    url = f"https://me:geheim@127.0.0.1:{free_ports(1)[0]}/video"
    with pytest.raises(SourceError, match=r"^https://127\.0\.0\.1:[0-9]+: Connection refused$"):
        find_pinned_certificate(url, str(certificates / "own.pem"))
    with pytest.raises(SourceError, match=r"^https://camera\.invalid: the host name 'camera\.invalid' is not known: "):
        find_pinned_certificate("https://me:geheim@camera.invalid/video", str(certificates / "own.pem"))
