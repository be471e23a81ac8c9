"""Parts of a Motion JPEG camera. Pictures that are sent as cameras do are read as they are."""

from __future__ import annotations

import email.message
import io
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from input_reader import InputReader
from stubs import result_of

from edge_server.plugins.cameras.sources import mjpeg
from edge_server.plugins.cameras.sources.mjpeg import MjpegCamera
from edge_server.plugins.cameras.sources.source_interface import SourceError

_TYPE = b"multipart/x-mixed-replace; boundary=--frame"
_PICTURE = b"\xff\xd8picture\xff\xd9"


def seeds() -> Iterable[bytes]:
    part = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n" % (len(_PICTURE), _PICTURE)
    yield b"\0" + bytes((len(_TYPE),)) + _TYPE + part * 3
    plain = b"multipart/x-mixed-replace"
    yield (
        b"\0"
        + bytes((len(plain),))
        + plain
        + b"--x\r\n\r\n"
        + _PICTURE
        + b"\r\n--x\r\n\r\n"
        + _PICTURE
        + b"\r\n--x--\r\n"
    )
    yield b"\1\3\5abc\4hello\0"
    yield b"\1\0\2xyz\6a\nb"


class _Client:
    """Answers each address with the same response."""

    response: Any = None

    def open(self, address: str, timeout_s: float) -> Any:
        return self.response


_CLIENT = _Client()
mjpeg.HttpClient = lambda *_, **__: _CLIENT  # type: ignore[attr-defined, misc, assignment]


def _camera(content_type: str, body: bytes) -> MjpegCamera:
    headers = email.message.Message()
    headers["Content-Type"] = content_type
    stream = io.BufferedReader(io.BytesIO(body))  # type: ignore[arg-type]
    _CLIENT.response = SimpleNamespace(
        is_success=True, headers=headers, readline=stream.readline, read1=stream.read1, close=stream.close,
        set_deadline=lambda seconds: None,
    )  # fmt: skip
    return MjpegCamera("http://192.0.2.1/video")


def check(data: bytes) -> None:
    take = InputReader(data)
    if take.byte() & 1:
        _check_written(take)
        return
    content_type = take.take(take.byte()).decode("latin-1").translate({10: 32, 13: 32})
    body = take.rest()
    camera = result_of(lambda: _camera(content_type, body), SourceError)
    if camera is None:
        return
    total = 0
    while (picture := result_of(camera.read, SourceError)) is not None:
        assert picture.file is not None
        assert picture.file.startswith(b"\xff\xd8")
        total += len(picture.file)
        assert total <= len(body)


def _check_written(take: InputReader) -> None:
    has_length, ends = take.byte() & 1, (b"\r\n", b"\n")[take.byte() & 1]
    pictures = []
    body = b""
    while take.left and len(pictures) < 20:
        picture = b"\xff\xd8" + take.take(take.byte())
        if not has_length and b"--" in picture:
            continue
        pictures.append(picture)
        length = b"Content-Length: %d" % len(picture) + ends if has_length else b"X: y" + ends
        body += b"--frame" + ends + length + ends + picture + ends
    camera = _camera(_TYPE.decode(), body + b"--frame--" + ends)
    for expected in pictures:
        found = camera.read()
        assert found is not None
        # Without a length, a line feed before the boundary belongs to the boundary.
        assert found.file == expected or (
            not has_length and ends == b"\n" and found.file == expected.removesuffix(b"\r")
        )
    assert result_of(camera.read, SourceError) is None
