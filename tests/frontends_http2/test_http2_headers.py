"""Header blocks against the decoder of hpack, RFC 7541."""

from __future__ import annotations

import contextlib

import pytest
from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from edge_server.frontends.http2.header_blocks import HeaderBlock, HeaderReader

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
            with pytest.raises(HPACKError):
                reader.read(blocks[-1])
            return
        assert reader.read(blocks[-1]).pairs == tuple((bytes(name), bytes(value)) for name, value in expected)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_bytes_are_decoded_or_refused(blocks: list[bytes]) -> None:
    reader = HeaderReader(1000)
    with contextlib.suppress(HPACKError):
        for block in blocks:
            reader.read(block)


def test_a_list_that_is_too_large_is_marked_then_refused() -> None:
    reader = HeaderReader(1000)
    assert not reader.read(Encoder().encode([("a", "x" * 900)])).is_too_large
    assert reader.read(Encoder().encode([("a", "x" * 1900)])).is_too_large
    with pytest.raises(HPACKError):
        reader.read(Encoder().encode([("a", "x" * 5000)]))


@given(st.binary(max_size=3))
def test_names_and_values_are_checked_octet_by_octet(octets: bytes) -> None:
    allowed = bool(octets) and all(0x20 < each < 0x7F and not 65 <= each <= 90 and each != 0x3A for each in octets)
    if not octets.startswith(b":"):
        assert (HeaderBlock([(octets, b"v")]).problem == "") == (allowed and octets != b"te")
    clean = not set(octets) & {0, 10, 13} and octets == octets.strip(b" \t")
    assert (HeaderBlock([(b"x", octets)]).problem == "") == clean
    assert (HeaderBlock([(b":path", octets)]).problem == "") == clean
