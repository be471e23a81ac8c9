"""HTTP/2 header blocks: `HeaderReader` against the library's decoder, and `encode_headers` read back."""

from __future__ import annotations

from collections.abc import Iterable

from hpack import Decoder, Encoder, HPACKError
from input_reader import InputReader

from edge_server.http2.frames import ConnectionFault
from edge_server.http2.header_blocks import HeaderReader, encode_headers

_MAX_LIST_BYTES = 4096
_MAX_REMEMBERED_BYTES = 64 << 10


def seeds() -> Iterable[bytes]:
    encoder = Encoder()
    request = [(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("te", "trailers"), ("x-bin", "AAEC")]
    blocks = [encoder.encode(request), encoder.encode(request), encoder.encode([("content-length", "7")])]
    plain = encode_headers([(b":status", b"200"), (b"content-type", b"a/b"), (b"x" * 130, b"v" * 300)])
    for group in (blocks, [plain], [b"\x20" + blocks[0], blocks[1], blocks[1]], [b"\x3f\xe1\x1f", b"\xbe" * 9]):
        yield b"".join(len(block).to_bytes(2, "big") + block for block in group)


def check(data: bytes) -> None:
    """The input is blocks of one connection, each after its length. A block is read as a connection does."""
    take = InputReader(data)
    reader, oracle = HeaderReader(_MAX_LIST_BYTES), Decoder(_MAX_LIST_BYTES * 4)
    while take.left:
        block = take.take(take.number(2))
        try:
            expected = [(bytes(name), bytes(value)) for name, value in oracle.decode(block, raw=True)]
        except HPACKError:
            expected = None
        refusal = ""
        try:
            found = reader.remembered.get(block) or reader.read(block)
        except ConnectionFault as error:
            refusal = str(error) or "refused"
        if refusal:
            # The library bounds neither the octets of an integer nor the number of fields.
            is_own_bound = "too long" in refusal or "too many" in refusal
            assert expected is None or is_own_bound, f"a block that the library decodes is refused: {refusal}"
            return
        assert expected is not None, "a block that the library refuses is decoded"
        assert [pair for pair in expected if not pair[0].startswith(b":")] == list(found.pairs)
        pseudo = {name: value for name, value in reversed(expected) if name.startswith(b":")}
        if found.is_request:
            assert (found.method, found.path, found.scheme) == (
                pseudo[b":method"],
                pseudo[b":path"],
                pseudo[b":scheme"],
            )
            assert found.authority == pseudo.get(b":authority", b"")
            lengths = {value for name, value in expected if name == b"content-length"}
            assert {int(value) for value in lengths} == ({found.content_length} - {-1})
        size = sum(len(name) + len(value) + 32 for name, value in expected)
        assert found.is_too_large == (size > _MAX_LIST_BYTES)
        remembered = sum(len(name) + len(value) for kept in reader.remembered.values() for name, value in kept.pairs)
        assert remembered <= _MAX_REMEMBERED_BYTES, f"{remembered} bytes of headers are remembered"
        encoded = encode_headers(expected)
        assert [(bytes(name), bytes(value)) for name, value in Decoder(1 << 30).decode(encoded, raw=True)] == expected
