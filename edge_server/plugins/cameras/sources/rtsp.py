"""Source that reads a network camera over RTSP, decoded by PyAV, else by OpenCV, or on a Jetson by GStreamer."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import logging
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from edge_server.config.setting import shown_url
from edge_server.errors import Unsupported, install_hint
from edge_server.plugins.cameras.failure_reason import unknown_host_reason
from edge_server.plugins.cameras.sources.camera_tls import explain_tls_failure, find_pinned_certificate
from edge_server.plugins.cameras.sources.source_interface import Source, SourceError, SourcePicture, opencv

_LOG = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Longest time to open the stream, and without data."""

_GARBAGE_S = 10.0
"""Longest time in which data arrives that holds no picture."""

_MAX_PIXELS = 1 << 26
"""Largest picture: 8192x8192."""

_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
"""The authorities that the system trusts, as a file, on Debian, Ubuntu and a Jetson."""

_need_tcp: set[str] = set()
"""URLs of cameras of transport "auto" to open over TCP first, as nothing came over UDP: a wait for UDP would prolong
each loss of the connection."""


class TransportError(SourceError):
    """The camera does not send over this transport, or nothing of it arrives."""


def open_rtsp(url: str, decoder: str = "auto", transport: str = "tcp", ca: str = "") -> Source:
    """Open an RTSP stream.

    `decoder` is "pyav"; "opencv", which tells neither reasons nor stamps; "gstreamer", OpenCV with GStreamer, as the
    system's OpenCV on a Jetson has it; or "auto", PyAV if it is installed or needed, else OpenCV. `transport` of the
    pictures is "tcp"; "udp"; or "auto": UDP, and TCP if nothing arrives, from then on TCP first. The certificate of
    rtsps:// is checked against the PEM file `ca`, or "" against the system's, see `camera_tls`. Raises SourceError, and
    Unsupported if the decoder is not installed.
    """
    if decoder == "auto":
        needs_pyav = transport != "tcp" or url.startswith("rtsps://")
        decoder = "pyav" if needs_pyav or importlib.util.find_spec("av") is not None else "opencv"
    if decoder == "gstreamer":
        return OpencvCamera(url, gstreamer_pipeline(url, transport))
    if decoder == "opencv":
        return OpencvCamera(url)
    if transport != "auto":
        return PyavCamera(url, transport, ca)
    first, second = ("tcp", "udp") if url in _need_tcp else ("udp", "tcp")
    try:
        return PyavCamera(url, first)
    except TransportError as error:
        _LOG.warning("%s; trying %s", error.message, second.upper())
        camera = PyavCamera(url, second)
    if second == "tcp":
        _need_tcp.add(url)
    else:
        _need_tcp.discard(url)
    return camera


def _pyav() -> ModuleType:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise Unsupported(
            f"PyAV does not import here ({error}); {install_hint('sources')}; rtsp:// over TCP works without it: set "
            'decoder = "opencv"'
        ) from None


class PyavCamera:
    """A network camera, decoded by FFmpeg on the processor.

    Pictures have the camera's time from its RTCP sender reports, after the first one; cameras send one every few
    seconds. Software decoding of H.264 and H.265 only: the wheels of PyAV use no decoder of a Jetson.
    """

    is_live = True
    length = 0

    def __init__(self, url: str, transport: str = "tcp", ca: str = "") -> None:
        av = _pyav()
        self._error: type[Exception] = av.error.FFmpegError
        self._address = shown_url(url)
        # nobuffer: no picture waits in FFmpeg.
        options = {"rtsp_transport": transport, "fflags": "nobuffer", "flags": "low_delay"}
        try:
            with _tls_options(url, ca) as tls_options:
                self._began_s = time.monotonic()
                options |= tls_options
                self._container = av.open(url, mode="r", format="rtsp", options=options, timeout=TIMEOUT_S)
        except (self._error, OSError, ValueError) as error:
            if getattr(error, "errno", None) == errno.EPROTONOSUPPORT:
                reason = "the camera does not send over UDP"
                if transport == "tcp":
                    reason = 'the camera does not send over TCP; set transport = "udp"'
                raise TransportError(f"{self._address}: {reason}") from None
            raise self._opening_failure(error, url, ca) from None
        # Without data FFmpeg gives the stream back when the time is over, as the camera has described it.
        if transport == "udp" and time.monotonic() - self._began_s >= TIMEOUT_S:
            self._container.close()
            raise TransportError(f"{self._address}: nothing arrived over UDP within {TIMEOUT_S:g} s")
        if not self._container.streams.video:
            self._container.close()
            raise SourceError(f"{self._address}: expected a stream with video, given none")
        self._stream = self._container.streams.video[0]
        self._stream.thread_type = "SLICE"  # threads by frame would delay each picture
        codec = self._stream.codec_context
        if codec is None:
            self._container.close()
            raise SourceError(f"{self._address}: expected video that FFmpeg decodes, such as H.264 or H.265")
        self.fps = float(self._stream.guessed_rate or 0)
        over = "TLS" if url.startswith("rtsps://") else transport.upper()
        self.title = f"{self._address} {codec.name} {codec.width}x{codec.height} over {over}"
        self._pictures = self._decode()

    def read(self) -> SourcePicture | None:
        self._began_s = time.monotonic()
        try:
            picture: SourcePicture = next(self._pictures)
            return picture
        except StopIteration:
            raise SourceError(f"{self._address}: the camera closed the stream") from None
        except (self._error, OSError) as error:
            raise self._failure(error) from None

    def _opening_failure(self, error: Exception, url: str, ca: str) -> SourceError:
        # FFmpeg does not say what is wrong with a certificate.
        problem = explain_tls_failure(url, ca) if url.startswith("rtsps://") else ""
        if getattr(error, "errno", None) == errno.EIO and not problem:
            problem = _explain_unknown_host(urlsplit(url).hostname or "")
        if type(error).__name__ == "InvalidDataError" and not problem and not self._is_late():
            problem = f"{_reason(error)}; is this an RTSP port?"
        return SourceError(f"{self._address}: {problem}") if problem else self._failure(error)

    def _failure(self, error: Exception) -> SourceError:
        reason = f"no data within {TIMEOUT_S:g} s" if self._is_late() else _reason(error)
        return SourceError(f"{self._address}: {reason}")

    def _is_late(self) -> bool:
        """Return whether the time is over: FFmpeg reports that by several kinds of error."""
        return time.monotonic() - self._began_s >= TIMEOUT_S

    def _decode(self) -> Any:
        """Yield the pictures. Packets that do not decode are skipped: the first ones may precede a key frame."""
        offset_ns = None
        has_reference = False
        picture_s = time.monotonic()
        problem = ""
        for packet in self._container.demux(self._stream):
            frames = []
            try:
                frames = packet.decode()
            except self._error as error:
                problem = f" ({_reason(error)})"
            # FFmpeg's AVProducerReferenceTime: the packet's time in microseconds since 1970, from RTCP sender reports.
            if packet.pts is not None and packet.has_sidedata("prft"):
                reference = bytes(packet.get_sidedata("prft"))[:8]
                if has_reference:  # the first one is that of the next picture
                    time_ns = int.from_bytes(reference, "little", signed=True) * 1000
                    offset_ns = time_ns - _ns(packet.pts, packet.time_base)
                has_reference = True
            now_s = time.monotonic()
            for frame in frames:
                picture_s = now_s
                if frame.width * frame.height > _MAX_PIXELS:
                    raise SourceError(
                        f"{self._address}: expected at most {_MAX_PIXELS} pixels, given {frame.width}x{frame.height}"
                    )
                stamp_ns = 0 if offset_ns is None or frame.pts is None else offset_ns + _ns(frame.pts, frame.time_base)
                yield SourcePicture(stamp_ns=stamp_ns, convert=partial(frame.to_ndarray, format="bgr24"))
            if now_s - picture_s > _GARBAGE_S:
                raise SourceError(f"{self._address}: data for {_GARBAGE_S:g} s without a picture in it{problem}")

    def rewind(self) -> None:
        raise SourceError(f"{self._address}: a camera cannot be restarted from the beginning")

    def close(self) -> None:
        self._pictures.close()
        self._container.close()


def _ns(pts: int, time_base: Any) -> int:
    return int(pts * time_base * 1_000_000_000)


def _system_authorities() -> str:
    found = ssl.get_default_verify_paths().cafile
    return found if found is not None and os.path.exists(found) else _AUTHORITIES


@contextlib.contextmanager
def _tls_options(url: str, ca: str) -> Iterator[dict[str, str]]:
    """Return FFmpeg's options to check the certificate of its own connection, for rtsps:// only. Raises SourceError.

    A pinned certificate is the only one that FFmpeg is given to trust, with a name out of it in place of the URL's.
    FFmpeg checks none by default, and its TLS library does not know where the system keeps them.
    """
    if not url.startswith("rtsps://"):
        yield {}
        return
    pinned = find_pinned_certificate(url, ca) if ca else None
    if pinned is None:
        yield {"tls_verify": "1", "ca_file": ca or _system_authorities()}
        return
    if not pinned.name:
        raise SourceError(
            f"{shown_url(url)}: expected a certificate with a name in ASCII, which FFmpeg checks, given one without; "
            "make a new one in the camera's settings"
        )
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(pinned.pem)
        file.flush()
        yield {"tls_verify": "1", "ca_file": file.name, "verifyhost": pinned.name}


def _explain_unknown_host(host: str) -> str:
    """Return that a host name is not known, "" if it is. FFmpeg reports this as an input/output error."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return unknown_host_reason(host, error)
    return ""


def _reason(error: Exception) -> str:
    """Return why FFmpeg failed. Its own texts end with the URL, so only the kind of error is used."""
    name = type(error).__name__
    if name in ("HTTPUnauthorizedError", "HTTPForbiddenError"):
        return "the camera refuses user and password"
    if name == "HTTPNotFoundError":
        return "the camera has no such stream; is the path right?"
    if name == "InvalidDataError":
        return "the data is damaged, or not what it says"
    strerror = getattr(error, "strerror", None)
    return strerror if isinstance(strerror, str) and strerror else name


class OpencvCamera:
    """A network camera, decoded by OpenCV: by its FFmpeg, or by a pipeline of GStreamer. Pictures have no stamps.

    The pipeline is for the OpenCV of a Jetson's system, whose GStreamer decodes in hardware. It was never run on one.
    """

    is_live = True
    length = 0

    def __init__(self, url: str, pipeline: str = "") -> None:
        cv2 = opencv()
        self._address = shown_url(url)
        if pipeline:
            if "GStreamer:                   YES" not in cv2.getBuildInformation():
                raise Unsupported(
                    "this OpenCV is built without GStreamer; on a Jetson the system's is built with it: make the "
                    "virtual environment with --system-site-packages, and uninstall opencv-python-headless in it"
                )
            self._capture = cv2.VideoCapture(pipeline, cv2.CAP_GSTREAMER)
        else:
            milliseconds = int(TIMEOUT_S * 1000)
            limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, milliseconds, cv2.CAP_PROP_READ_TIMEOUT_MSEC, milliseconds]
            self._capture = cv2.VideoCapture(url, cv2.CAP_FFMPEG, limits)
        if not self._capture.isOpened():
            raise SourceError(
                f"{self._address}: OpenCV cannot open the stream and does not say why; PyAV does; "
                f"{install_hint('sources')}"
            )
        width, height = (int(self._capture.get(key)) for key in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        self.fps = max(float(self._capture.get(cv2.CAP_PROP_FPS)), 0.0)
        self.title = f"{self._address} {width}x{height}"

    def read(self) -> SourcePicture | None:
        is_read, pixels = self._capture.read()
        if not is_read:
            raise SourceError(f"{self._address}: the camera delivers no more pictures")
        return SourcePicture(pixels)

    def rewind(self) -> None:
        raise SourceError(f"{self._address}: a camera cannot be restarted from the beginning")

    def close(self) -> None:
        self._capture.release()


def gstreamer_pipeline(url: str, transport: str = "tcp") -> str:
    """Return a pipeline in the notation of gst-launch-1.0 that decodes with a Jetson's hardware to BGR.

    With two protocols GStreamer itself takes TCP if nothing comes over UDP.
    """
    protocols = "udp+tcp" if transport == "auto" else transport
    location = url.replace("\\", "\\\\").replace('"', '\\"')
    return (
        f'rtspsrc location="{location}" protocols={protocols} latency=100 ! decodebin ! nvvidconv ! '
        "video/x-raw,format=BGRx ! videoconvert ! video/x-raw,format=BGR ! "
        "appsink drop=true max-buffers=1 sync=false"
    )
