"""Messages of video recorders: DeepStack's forms over HTTP, and Frigate's messages over ZeroMQ."""

from __future__ import annotations

import json
from collections.abc import Iterable

from input_reader import InputReader
from stubs import result_of

from edge_server.plugins.cameras.endpoints.deepstack_endpoints import _least_score
from edge_server.plugins.cameras.endpoints.zmq_detector import _header, _image
from edge_server.plugins.vision.multipart_form import MAX_PARTS, form_parts, picture_file


def _form(boundary: bytes, *parts: tuple[bytes, bytes]) -> bytes:
    lines = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (boundary, name, content)
        for name, content in parts
    )
    return lines + b"--%b--\r\n" % boundary


def seeds() -> Iterable[bytes]:
    kind = b'multipart/form-data; boundary="x y"'
    form = _form(b"x y", (b"image", b"\xff\xd8\xff\xd9"), (b"min_confidence", b"0.4"))
    yield b"\0" + bytes((len(kind),)) + kind + form
    kind = b"multipart/form-data; boundary=abc"
    yield b"\0" + bytes((len(kind),)) + kind + _form(b"abc", (b"image", b"data"))
    yield b"\1\3abc\2\5hello\3xyz\1a"
    frame = json.dumps({"shape": [1, 2, 2, 3], "dtype": "uint8", "tensor_type": "input"}).encode()
    yield b"\2" + bytes((len(frame),)) + frame + bytes(12)
    model = json.dumps({"model_request": True, "model_name": "yolo.onnx"}).encode()
    yield b"\2" + bytes((len(model),)) + model


def check(data: bytes) -> None:
    take = InputReader(data)
    kind = take.byte() % 3
    if kind == 0:
        _check_form(take)
    elif kind == 1:
        _check_written_form(take)
    else:
        _check_frame(take)


def _check_form(take: InputReader) -> None:
    content_type = take.take(take.byte()).decode("utf-8", "surrogateescape")
    body = take.rest()
    parts = result_of(lambda: form_parts(body, content_type))
    if parts is not None:
        assert 0 < len(parts) <= MAX_PARTS
        assert sum(len(content) for _, content in parts) <= len(body)
        form = dict(parts)
        least = result_of(lambda: _least_score(form))
        assert least is None or 0 <= least <= 1
    result_of(lambda: picture_file(body, content_type))


def _check_written_form(take: InputReader) -> None:
    """A form that is made of what the input gives has these parts."""
    boundary = take.take(take.byte() & 0x3F).hex().encode() or b"0"
    parts = []
    while take.left and len(parts) < MAX_PARTS:
        name, content = take.take(take.byte() & 15).hex().encode(), take.take(take.byte())
        if b"--" + boundary not in content:
            parts.append((name, content))
    found = result_of(lambda: form_parts(_form(boundary, *parts), f"multipart/form-data; boundary={boundary.decode()}"))
    expected = [(name.decode(), content) for name, content in parts] or None
    assert (found and [(name, bytes(content)) for name, content in found]) == expected


def _check_frame(take: InputReader) -> None:
    message = [take.take(take.byte())]
    if take.left:
        message.append(take.rest())
    header = result_of(lambda: _header(message))
    if header is None:
        return
    image = result_of(lambda: _image(header, message))
    if image is not None:
        assert image.ndim == 3
        assert image.tobytes() == message[1]
