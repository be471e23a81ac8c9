"""The store in memory: never over its bytes, the least recently used leave first, what goes in comes out."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.request_response import Response
from edge_server.core.tensor import DType, Tensor
from edge_server.serving.cache.cached_response import CachedResponse, to_cached_response
from edge_server.serving.cache.local_store import LocalStore
from tests.kit.together import together

CAPACITY = 10_000


def answer(size_bytes: int) -> CachedResponse:
    return CachedResponse((), {}, size_bytes)


keys = st.integers(0, 12).map(lambda number: bytes([number]) * 32)
steps = st.lists(st.one_of(st.tuples(keys, st.integers(1, CAPACITY)), keys), max_size=60)


@given(steps)
def test_it_behaves_as_a_list_in_order_of_use_that_is_cut_at_its_bytes(given_steps: list) -> None:
    store = LocalStore(CAPACITY)
    model: OrderedDict[bytes, CachedResponse] = OrderedDict()
    evicted = 0
    for step in given_steps:
        if isinstance(step, bytes):
            assert store.get(step) is model.get(step)
            if step in model:
                model.move_to_end(step)
            continue
        key, size = step
        stored = answer(size)
        store.put(key, stored)
        model.pop(key, None)
        model[key] = stored
        while sum(item.size_bytes for item in model.values()) > CAPACITY:
            model.popitem(last=False)
            evicted += 1
        count, held_bytes, left = store.contents()
        assert (count, held_bytes, left) == (len(model), sum(item.size_bytes for item in model.values()), evicted)
        assert held_bytes <= CAPACITY
    for key in list(model):
        assert store.get(key) is model[key]


def test_a_response_larger_than_the_cache_is_refused_and_evicts_nothing() -> None:
    store = LocalStore(CAPACITY)
    store.put(b"a", answer(CAPACITY))
    with pytest.raises(ValueError, match="10001 bytes"):
        store.put(b"b", answer(CAPACITY + 1))
    assert store.get(b"a") is not None


def test_threads_that_put_and_get_at_once_leave_it_within_its_bytes_and_its_sum_right() -> None:
    store = LocalStore(CAPACITY)
    begin = threading.Barrier(4)

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        begin.wait()
        for number in generator.integers(0, 64, 3000).tolist():
            if number % 3:
                store.put(bytes([number]), answer(1 + 37 * number))
            else:
                store.get(bytes([number + 1]))

    together(work, range(4))
    count, held_bytes, _ = store.contents()
    found = [store.get(bytes([number])) for number in range(64)]
    there = [item for item in found if item is not None]
    assert (len(there), sum(item.size_bytes for item in there)) == (count, held_bytes)
    assert 0 < held_bytes <= CAPACITY


def test_a_kept_answer_shares_nothing_with_the_batch_that_it_was_a_view_of() -> None:
    batch = np.arange(1000, dtype=np.float32).reshape(100, 10)
    texts = np.array([[b"a"], [bytearray(b"bc")], [b"d"]], object)
    response = Response(
        "m", 1, "id", (Tensor("OUT", DType.FP32, batch[3:4]), Tensor("TEXT", DType.BYTES, texts[1:2])), {"p": 1}
    )
    found = to_cached_response(response)
    batch[:] = 0
    texts[1, 0][:] = b"xx"
    out, text = found.outputs
    np.testing.assert_array_equal(out.array, np.arange(30, 40, dtype=np.float32)[None])
    assert text.array.tolist() == [[b"bc"]]
    assert out.array.base is None
    assert not out.array.flags.writeable
    assert not text.array.flags.writeable
    assert out.array.nbytes < found.size_bytes < 4000
    assert dict(found.parameters) == {"p": 1}
