"""Source that reads a network camera over RTSP, decoded by PyAV, else by OpenCV, or on a Jetson by GStreamer."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import logging
import os
import re
import ssl
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

from edge_server.config.setting import shown_url
from edge_server.errors import Unsupported, install_hint
from edge_server.plugins.cameras.sources.camera_tls import find_pinned_certificate
from edge_server.plugins.cameras.sources.rtsp_redirects import follow_redirects
from edge_server.plugins.cameras.sources.source_interface import Camera, Source, SourceError, SourcePicture, opencv

_LOG = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Longest time to open the stream, and without data."""

_GARBAGE_S = 10.0
"""Longest time in which data arrives that holds no picture."""

_MAX_PIXELS = 1 << 26
"""Largest picture: 8192x8192."""

_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
"""The authorities that the system trusts, as a file, on Debian, Ubuntu and a Jetson."""

_NO_REDIRECTS = "rtsp,rtsps,satip"
"""FFmpeg's option protocol_blacklist. From 8.1 on it follows a redirect only to these, and to none of them that is in
this list; it does not check the first URL."""

_CHECKS_REDIRECTS = (62, 12)
"""Version of libavformat in FFmpeg 8.1."""

_need_tcp: set[str] = set()
"""URLs of cameras of transport "auto" to open over TCP first, as nothing came over UDP: a wait for UDP would prolong
each loss of the connection."""


class TransportError(SourceError):
    """The camera does not send over this transport, or nothing of it arrives."""


class UnclearError(SourceError):
    """The decoder does not say well why it cannot open the stream: a redirect, a certificate, an unknown host."""


def open_rtsp(url: str, decoder: str = "auto", transport: str = "tcp", ca: str = "") -> Source:
    """Open an RTSP stream.

    `decoder` is "pyav"; "opencv", which tells neither reasons nor stamps; "gstreamer", OpenCV with GStreamer, as the
    system's OpenCV on a Jetson has it; or "auto", PyAV if it is installed or needed, else OpenCV. `transport` of the
    pictures is "tcp"; "udp"; or "auto": UDP, and TCP if nothing arrives, from then on TCP first. The certificate of
    rtsps:// is checked against the PEM file `ca`, or "" against the system's, see `camera_tls`. No decoder follows a
    redirect, but see `follow_redirects`. Raises SourceError, and Unsupported if the decoder is not installed.
    """
    if decoder == "auto":
        needs_pyav = transport != "tcp" or url.startswith("rtsps://")
        decoder = "pyav" if needs_pyav or importlib.util.find_spec("av") is not None else "opencv"
    open_camera = partial(_open_camera, decoder=decoder, transport=transport, ca=ca)
    if decoder != "pyav" and not _opencv_refuses_redirects(decoder):
        return open_camera(follow_redirects(url, ca, TIMEOUT_S))
    try:
        return open_camera(url)
    except UnclearError:
        # Only now, as a connection more at each start is too much for some cameras.
        address = follow_redirects(url, ca, TIMEOUT_S)
        if address == url:
            raise
    return open_camera(address)


def _opencv_refuses_redirects(decoder: str) -> bool:
    """Return whether OpenCV can be told to follow none. Raises Unsupported if it lacks the decoder."""
    build = opencv().getBuildInformation()
    if decoder == "gstreamer":
        if "GStreamer:                   YES" not in build:
            raise Unsupported(
                "this OpenCV is built without GStreamer; on a Jetson the system's is built with it: make the virtual "
                "environment with --system-site-packages, and uninstall opencv-python-headless in it"
            )
        return False
    found = re.search(r"avformat: +YES \(([0-9]+)\.([0-9]+)", build)
    return found is not None and (int(found[1]), int(found[2])) >= _CHECKS_REDIRECTS


def _open_camera(url: str, decoder: str, transport: str, ca: str) -> Source:
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


class PyavCamera(Camera):
    """A network camera, decoded by FFmpeg on the processor.

    Pictures have the camera's time from its RTCP sender reports, after the first one; cameras send one every few
    seconds. Software decoding of H.264 and H.265 only: the wheels of PyAV use no decoder of a Jetson.
    """

    def __init__(self, url: str, transport: str = "tcp", ca: str = "") -> None:
        av = _pyav()
        self._error: type[Exception] = av.error.FFmpegError
        self._address = shown_url(url)
        # nobuffer: no picture waits in FFmpeg.
        options = {"rtsp_transport": transport, "fflags": "nobuffer", "flags": "low_delay"}
        options |= {"protocol_blacklist": _NO_REDIRECTS}
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
            raise self._opening_failure(error) from None
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

    def _opening_failure(self, error: Exception) -> SourceError:
        number = getattr(error, "errno", None)
        if number == errno.EINVAL:
            return UnclearError(f"{self._address}: the camera answers what FFmpeg refuses, such as a redirect")
        failure = self._failure(error)
        is_unclear = number == errno.EIO or type(error).__name__ == "InvalidDataError"
        return UnclearError(failure.message) if is_unclear and not self._is_late() else failure

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

    def close(self) -> None:
        self._pictures.close()
        if self._container is not None:
            self._container.close()
        # The decoder's threads end with the stream's last owner.
        self._container = self._stream = None


def _ns(pts: int, time_base: Any) -> int:
    return int(pts * time_base * 1_000_000_000)


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
        system = ssl.get_default_verify_paths().cafile
        authorities = system if system is not None and os.path.exists(system) else _AUTHORITIES
        yield {"tls_verify": "1", "ca_file": ca or authorities}
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


class OpencvCamera(Camera):
    """A network camera, decoded by OpenCV: by its FFmpeg, or by a pipeline of GStreamer. Pictures have no stamps.

    The pipeline is for the OpenCV of a Jetson's system, whose GStreamer decodes in hardware. It was never run on one.
    """

    def __init__(self, url: str, pipeline: str = "") -> None:
        cv2 = opencv()
        self._address = shown_url(url)
        began_s = time.monotonic()
        if pipeline:
            self._capture = cv2.VideoCapture(pipeline, cv2.CAP_GSTREAMER)
        else:
            # The only way to set FFmpeg's options. The first one is OpenCV's own if there is no such variable.
            options = f"rtsp_flags;prefer_tcp|protocol_blacklist;{_NO_REDIRECTS}"
            os.putenv("OPENCV_FFMPEG_CAPTURE_OPTIONS", options)
            milliseconds = int(TIMEOUT_S * 1000)
            limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, milliseconds, cv2.CAP_PROP_READ_TIMEOUT_MSEC, milliseconds]
            self._capture = cv2.VideoCapture(url, cv2.CAP_FFMPEG, limits)
        if not self._capture.isOpened():
            if time.monotonic() - began_s >= TIMEOUT_S:
                raise SourceError(f"{self._address}: no data within {TIMEOUT_S:g} s")
            raise UnclearError(
                f"{self._address}: OpenCV cannot open the stream and does not say why; PyAV does; "
                f"{install_hint('sources')}"
            )
        width, height = (int(self._capture.get(key)) for key in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        self.fps = max(float(self._capture.get(cv2.CAP_PROP_FPS)), 0.0)
        self.title = f"{self._address} {width}x{height}"

    def read(self) -> SourcePicture | None:
        began_s = time.monotonic()
        is_read, pixels = self._capture.read()
        if not is_read:
            is_late = time.monotonic() - began_s >= TIMEOUT_S
            reason = f"no data within {TIMEOUT_S:g} s" if is_late else "the camera delivers no more pictures"
            raise SourceError(f"{self._address}: {reason}")
        return SourcePicture(pixels)

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
