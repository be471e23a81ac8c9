"""Messages of video recorders: DeepStack's forms over HTTP."""

from __future__ import annotations

from collections.abc import Iterable

from input_reader import InputReader
from stubs import result_of

from edge_server.frontends.http.multipart_form import MAX_PARTS, form_parts
from edge_server.plugins.cameras.endpoints.deepstack_endpoints import _least_score
from edge_server.plugins.vision.image_bodies import picture_file


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


def check(data: bytes) -> None:
    take = InputReader(data)
    if take.byte() % 2:
        _check_written_form(take)
    else:
        _check_form(take)


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
