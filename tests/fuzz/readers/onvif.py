"""Answers of ONVIF cameras: to the probe, and to requests. What the command prints of them is TOML."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Iterable
from typing import Any

from input_reader import InputReader
from stubs import result_of

from edge_server.plugins.cameras.commands import find_onvif_cameras
from edge_server.plugins.cameras.onvif import device
from edge_server.plugins.cameras.onvif.device import CameraError, OnvifCamera
from edge_server.plugins.cameras.onvif.discovery import FoundCamera, read_answer
from edge_server.plugins.cameras.onvif.soap import envelope

_HOST = "192.0.2.1"
_ADDRESS = f"http://{_HOST}/onvif"
_OPTIONS = argparse.Namespace(model="m", write_password=False)
_toml_of = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads


class _Response(io.BytesIO):
    status = 200

    def set_deadline(self, seconds: float) -> None:
        """All bytes are there."""


class _Client:
    """Answers each request with the same body."""

    body = b""

    def open(self, *_: object, timeout_s: float) -> _Response:
        return _Response(self.body)


_CLIENT = _Client()
device.HttpClient = lambda *_, **__: _CLIENT  # type: ignore[attr-defined, misc, assignment]


def seeds() -> Iterable[bytes]:
    yield b"\0" + envelope(
        "<d:ProbeMatch><d:Scopes>onvif://www.onvif.org/name/Front%20door x</d:Scopes>"
        f"<d:XAddrs>{_ADDRESS}</d:XAddrs></d:ProbeMatch>",
        "<a:RelatesTo>id</a:RelatesTo>",
    )
    yield b"\1" + envelope(
        f"<tt:Media><tt:XAddr>{_ADDRESS}</tt:XAddr></tt:Media><tt:Uri>rtsp://{_HOST}/x?y=1&amp;z=2</tt:Uri>"
        '<trt:Profiles token="a"><tt:Name>Main</tt:Name><tt:VideoEncoderConfiguration><tt:Encoding>H264</tt:Encoding>'
        "<tt:Resolution><tt:Width>1920</tt:Width><tt:Height>1080</tt:Height></tt:Resolution>"
        "</tt:VideoEncoderConfiguration></trt:Profiles>"
    )
    yield b"\1" + envelope(
        "<tt:UTCDateTime><tt:Time><tt:Hour>1</tt:Hour><tt:Minute>2</tt:Minute><tt:Second>3</tt:Second></tt:Time>"
        "<tt:Date><tt:Year>2026</tt:Year><tt:Month>2</tt:Month><tt:Day>3</tt:Day></tt:Date></tt:UTCDateTime>"
    )
    yield b"\1" + envelope("<s:Fault><s:Value>ter:NotAuthorized</s:Value><s:Text>no</s:Text></s:Fault>")
    yield b"\1<!DOCTYPE x [<!ENTITY a 'b'>]><x>&a;</x>"


def check(data: bytes) -> None:
    take = InputReader(data)
    if take.byte() & 1:
        _CLIENT.body = take.rest()
        streams = result_of(OnvifCamera(_ADDRESS, None).streams, CameraError)
        _check_printed(FoundCamera(_HOST, (_ADDRESS,), ()))
        for stream in streams or ():
            assert device.urlsplit(stream.url).hostname == _HOST
            assert stream.url.startswith(("rtsp://", "rtsps://"))
        return
    camera = read_answer(take.rest(), _HOST, {"id"})
    if camera is not None:
        assert all(text.isprintable() and len(text) <= 8192 for text in (*camera.addresses, *camera.scopes))
        _CLIENT.body = b""
        _check_printed(camera)


def _check_printed(camera: FoundCamera) -> None:
    text = "\n".join(find_onvif_cameras.describe_camera(camera, None, _OPTIONS, set()))
    document: dict[str, Any] = _toml_of(text)
    assert set(document) <= {"sources"}
    for source in document.get("sources", ()):
        assert set(source) == {"name", "url", "model"}
