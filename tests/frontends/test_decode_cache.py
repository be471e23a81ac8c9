"""What is recognised by its bytes stays within its bounds, whatever clients send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.frontends.decode_cache import MAX_BYTES, MAX_ENTRIES, DecodeCache

ADDITIONS = st.lists(st.tuples(st.binary(max_size=2), st.integers(0, 3000), st.integers(0, 20)), max_size=60)


@given(ADDITIONS, st.integers(0, 6), st.integers(0, 20_000))
def test_entries_and_bytes_stay_within_their_bounds(
    additions: list[tuple[bytes, int, int]], max_entries: int, max_bytes: int
) -> None:
    cache: DecodeCache[bytes, int] = DecodeCache(max(1, max_entries), max_bytes)
    for number, (key, octets, items) in enumerate(additions):
        cache.add(key, number, octets=octets, items=items)
        assert len(cache) <= max(1, max_entries)
        assert cache.used_bytes <= max_bytes
        assert key not in cache or cache[key] == number or octets + 256 * items + 1824 > max_bytes
    assert bool(cache.used_bytes) is bool(cache)
    cache.clear()
    assert (len(cache), cache.used_bytes) == (0, 0)


def test_the_oldest_entry_makes_room_and_an_entry_that_is_too_large_does_not_come_in() -> None:
    cache: DecodeCache[bytes, int] = DecodeCache()
    for number in range(MAX_ENTRIES + 1):
        cache.add(b"%d" % number, number, octets=0, items=0)
    cache.add(b"large", 0, octets=MAX_BYTES, items=0)
    assert list(cache) == [b"%d" % number for number in range(1, MAX_ENTRIES + 1)]


def test_requests_to_a_thousand_models_in_turn_are_all_kept() -> None:
    cache: DecodeCache[bytes, int] = DecodeCache()
    for number in range(1000):
        cache.add(b"%d" % number, number, octets=400, items=6)
    assert len(cache) == 1000


@pytest.mark.parametrize("more", [{"octets": 1000, "items": 0}, {"octets": 0, "items": 4}])
def test_decoded_bytes_count_however_short_the_key_is(more: dict[str, int]) -> None:
    cache: DecodeCache[bytes, int] = DecodeCache(max_bytes=20_000)
    for number in range(30):
        cache.add(b"%d" % number, number, **more)
    assert len(cache) == 20_000 // (1824 + more["octets"] + 256 * more["items"])
