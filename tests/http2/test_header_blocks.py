"""Header blocks against the decoder of hpack, RFC 7541."""

from __future__ import annotations

import contextlib

import pytest
from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from edge_server.http2.frames import ConnectionFault
from edge_server.http2.header_blocks import HeaderBlock, HeaderReader

NAMES = st.sampled_from(["a", "x-trace", "user-agent", "content-type", "te", "long-" + "n" * 60])
VALUES = st.sampled_from(["", "1", "trailers", "v" * 130, "x" * 1500, "ü".encode().decode("latin-1")])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=5), st.booleans()),
        st.sampled_from([0, 100, 4096]),
        st.integers(0, 5),
    ),
    max_size=30,
)


@given(STEPS)
def test_remembered_blocks_say_what_a_fresh_decoder_says(steps: list[object]) -> None:
    encoder, decoder, reader = Encoder(), Decoder(1 << 20), HeaderReader(64 << 10)
    blocks: list[bytes] = []
    for step in steps:
        if isinstance(step, tuple):
            fields = [
                NeverIndexedHeaderTuple(name, value) if never else (name, value) for name, value, never in step[0]
            ]
            blocks.append(encoder.encode(fields, huffman=step[1]))
        elif step >= 100 or not step:
            encoder.header_table_size = step
            continue
        elif not blocks:
            continue
        else:
            blocks.append(blocks[-min(step, len(blocks))])  # the same bytes may mean something else by now
        try:
            expected = decoder.decode(blocks[-1], raw=True)
        except HPACKError:
            with pytest.raises(ConnectionFault):
                reader.read(blocks[-1])
            return
        assert reader.read(blocks[-1]).pairs == tuple((bytes(name), bytes(value)) for name, value in expected)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_bytes_are_decoded_or_refused(blocks: list[bytes]) -> None:
    reader = HeaderReader(1000)
    with contextlib.suppress(ConnectionFault):
        for block in blocks:
            reader.read(block)


PLAIN = ["8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d", "8286 84be 5808 6e6f 2d63 6163 6865",
         "8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65"]  # fmt: skip
HUFFMAN = ["8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff", "8286 84be 5886 a8eb 1064 9cbf",
           "8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf"]  # fmt: skip


@pytest.mark.parametrize("blocks", [PLAIN, HUFFMAN])
def test_the_requests_of_rfc_7541_c_3_and_c_4(blocks: list[str]) -> None:
    reader = HeaderReader(1000)
    first, second, third = (reader.read(bytes.fromhex(block)) for block in blocks)
    for found in (first, second, third):
        assert (found.method, found.authority) == (b"GET", b"www.example.com")
    assert (first.scheme, first.path, first.pairs) == (b"http", b"/", ())
    assert second.pairs == ((b"cache-control", b"no-cache"),)
    assert (third.scheme, third.path, third.pairs) == (b"https", b"/index.html", ((b"custom-key", b"custom-value"),))


def test_entries_leave_the_table_4_3_and_4_4() -> None:
    """The oldest when a newer one needs the room, all when the newer one is larger than the table."""
    reader = HeaderReader(64 << 10)
    reader.read(b"\x40\x01a\x011")
    assert reader.read(b"\xbe").pairs == ((b"a", b"1"),)
    with pytest.raises(ConnectionFault):
        reader.read(b"\x40\x01b" + b"\x7f\x81\x1f" + b"v" * 4096 + b"\xbe")
    reader = HeaderReader(64 << 10)
    reader.read(b"\x40\x01a\x011")
    reader.read(b"\x20\x3f\xe1\x1f")  # a table of nothing, then of 4096 again
    with pytest.raises(ConnectionFault):
        reader.read(b"\xbe")


UNDECODABLE = {
    "2.3.3 index beyond the tables": b"\xbe",
    "4.2 table larger than announced": b"\x3f\xe2\x1f",
    "4.2 size update after a field": b"\x82\x20",
    "5.1 integer without end": b"\xff\x80\x80",
    "5.1 integer of many octets": b"\xff" + b"\x80" * 20 + b"\x01",
    "5.2 string that is cut": b"\x00\x05abc",
    "5.2 value that is missing": b"\x00\x01a",
    "5.2 padding of more than 7 bits": b"\x00\x01a\x82\x1f\xff",
    "5.2 padding that is not of ones": b"\x00\x01a\x81\x18",
    "5.2 EOS within a string": b"\x00\x01a\x84\xff\xff\xff\xff",
    "6.1 index 0": b"\x80",
    "6.2.1 name beyond the tables": b"\x7e\x01v",
    "6.2.2 name beyond the tables": b"\x0f\x30\x01v",
    "6.2.3 name beyond the tables": b"\x1f\x30\x01v",
}


@pytest.mark.parametrize("name", UNDECODABLE)
def test_blocks_that_break_a_rule_of_rfc_7541(name: str) -> None:
    with pytest.raises(ConnectionFault):
        HeaderReader(1000).read(UNDECODABLE[name])


def test_a_list_that_is_too_large_is_marked_then_refused() -> None:
    reader = HeaderReader(1000)
    assert not reader.read(Encoder().encode([("a", "x" * 900)])).is_too_large
    assert reader.read(Encoder().encode([("a", "x" * 1900)])).is_too_large
    with pytest.raises(ConnectionFault):
        reader.read(Encoder().encode([("a", "x" * 5000)]))


@given(st.binary(max_size=3))
def test_names_and_values_are_checked_octet_by_octet(octets: bytes) -> None:
    allowed = bool(octets) and all(0x20 < each < 0x7F and not 65 <= each <= 90 and each != 0x3A for each in octets)
    if not octets.startswith(b":"):
        assert (HeaderBlock([(octets, b"v")]).problem == "") == (allowed and octets != b"te")
    clean = not set(octets) & {0, 10, 13} and octets == octets.strip(b" \t")
    assert (HeaderBlock([(b"x", octets)]).problem == "") == clean
    assert (HeaderBlock([(b":path", octets)]).problem == "") == clean
