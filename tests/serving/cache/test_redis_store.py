"""A real Redis server as the cache: shared, restarted, killed, stopped in its tracks, filled with rubbish. Whatever
happens to it, every request is answered, and right."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.config import RedisCache
from edge_server.core.request_response import Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import Cancelled
from edge_server.serving.cache.response_cache import ResponseCache
from edge_server.serving.cache.serialization import pack
from tests.kit.eventually import eventually
from tests.kit.model_folder import model_folder

pytestmark = pytest.mark.full
pytest.importorskip("redis", reason="needs redis, of the extra test-all")

from edge_server.serving.cache.redis_store import RedisStore  # noqa: E402

PREFIX = b"edge_server:answer:"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for a lost Redis again soon, so that no test waits for it."""
    monkeypatch.setattr("edge_server.serving.cache.redis_store._FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("edge_server.serving.cache.redis_store._MAX_PAUSE_S", 0.1)


def patient(port: int, **more: Any) -> RedisCache:
    """Return settings under which a busy machine is not taken for a slow Redis."""
    return RedisCache("127.0.0.1", port, **{"socket_timeout_ms": 5000, "wait_timeout_ms": 5000, **more})


@pytest.fixture
def new_cache(redis_server: Any) -> Iterator[Callable[..., ResponseCache]]:
    made: list[ResponseCache] = []

    def make(**more: Any) -> ResponseCache:
        made.append(ResponseCache(RedisStore(patient(redis_server.port, **more))))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


@pytest.fixture
def model_root(tmp_path: Path) -> Path:
    write_model(tmp_path / "box")
    return tmp_path / "box"


OTHERS = {
    "other type": (Tensor("OUT", DType.INT32, np.ones((1, 1), np.int32)),),
    "other shape": (Tensor("OUT", DType.FP32, np.ones((1, 1, 1), np.float32)),),
    "other output": (Tensor("OOPS", DType.FP32, np.ones((1, 1), np.float32)),),
    "twice": (Tensor("OUT", DType.FP32, np.ones((1, 1), np.float32)),) * 2,
    "nothing": (),
}
"""Answers that the model asked could not have given, well packed."""


def write_model(root: Path, weights: bytes = b"weights") -> None:
    model_folder(root / "m", files={"1/model.onnx": weights})


def ask(core: Any, value: float = 0.0, **more: Any) -> float:
    _, mailbox = core.submit(value, **more)
    response = mailbox.final()
    assert response.error is None
    return float(response.outputs[0].array[0, 0])


def hits(version: Any) -> int:
    return int(version.statistics().cache_hit.count)


@pytest.mark.parametrize("may_run", [False, True])
def test_an_answer_is_found_again_also_by_another_server_with_the_same_model(
    new_core: Any, new_cache: Any, model_root: Path, tmp_path: Path, redis_server: Any, may_run: bool
) -> None:
    first = new_core(cache=new_cache())
    version = first.load(first.spec(is_cached=True), root=model_root)
    assert ask(first, 3.0, may_run=may_run) == 3.0
    assert eventually(lambda: redis_server.client().dbsize() == 1)
    assert ask(first, 3.0, may_run=may_run) == 3.0
    assert hits(version) == 1
    write_model(tmp_path / "other box")
    second = new_core(cache=new_cache())
    version = second.load(second.spec(is_cached=True), root=tmp_path / "other box", mark="another fingerprint")
    ran = len(second.script.ran)
    assert ask(second, 3.0, may_run=may_run) == 3.0
    assert (hits(version), len(second.script.ran) - ran) == (1, 0)


def test_a_server_with_another_file_of_the_same_name_computes_for_itself(
    new_core: Any, new_cache: Any, model_root: Path, tmp_path: Path, redis_server: Any
) -> None:
    first = new_core(cache=new_cache())
    first.load(first.spec(is_cached=True), root=model_root)
    ask(first, 3.0)
    assert eventually(lambda: redis_server.client().dbsize() == 1)
    write_model(tmp_path / "other box", b"other weights")
    second = new_core(cache=new_cache())
    version = second.load(second.spec(is_cached=True), root=tmp_path / "other box")
    second.script.on_run = lambda name, inputs: {"OUT": inputs["IN"] * 10}
    assert ask(second, 3.0) == 30.0
    assert hits(version) == 0


def test_every_type_of_tensor_comes_back_from_redis_as_it_was(new_cache: Any) -> None:
    cache = new_cache()
    tensors = tuple(
        Tensor(dtype.value, dtype, np.array([[b"", b"\0\xff"]], object))
        if dtype is DType.BYTES
        else Tensor(dtype.value, dtype, np.arange(6).astype(dtype.numpy).reshape(2, 3))
        for dtype in DType
    )
    cache._put(b"k" * 32, cache_entry(tensors))
    found = cache.get(b"k" * 32)
    assert found is not None
    for got, expected in zip(found.outputs, tensors, strict=True):
        assert (got.name, got.dtype) == (expected.name, expected.dtype)
        np.testing.assert_array_equal(got.array, expected.array)


def cache_entry(tensors: tuple[Tensor, ...]) -> Any:
    from edge_server.serving.cache.cached_response import to_cached_response

    return to_cached_response(Response("m", 1, "", tensors))


def test_entries_expire_by_themselves(new_cache: Any, redis_server: Any) -> None:
    new_cache(ttl_s=3600)._put(b"a" * 32, cache_entry(()))
    new_cache(ttl_s=0)._put(b"b" * 32, cache_entry(()))
    client = redis_server.client()
    assert 3500 < client.ttl(PREFIX + b"a" * 32) <= 3600
    assert client.ttl(PREFIX + b"b" * 32) == -1


@pytest.mark.parametrize(
    "damage",
    [
        "flip",
        "cut",
        "empty",
        "rubbish",
        "other type",
        "other shape",
        "other output",
        "twice",
        "nothing",
        "large",
        "list",
    ],
)
def test_an_entry_that_was_damaged_is_computed_anew_and_counted(
    new_core: Any,
    new_cache: Any,
    model_root: Path,
    redis_server: Any,
    damage: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = new_cache()
    core = new_core(cache=cache)
    version = core.load(core.spec(is_cached=True), root=model_root)
    ask(core, 3.0)
    client = redis_server.client()
    assert eventually(lambda: client.dbsize() == 1)
    (key,) = client.keys()
    data = bytearray(client.get(key))
    if damage == "flip":
        data[-1] ^= 1
    elif damage == "cut":
        del data[20:]
    elif damage == "empty":
        data.clear()
    elif damage == "rubbish":
        data = bytearray(os.urandom(4096))
    elif damage == "large":
        monkeypatch.setattr("edge_server.serving.cache.redis_store._ENTRY_LIMIT_BYTES", len(data) - 1)
    elif damage != "list":
        data = bytearray(pack(cache_entry(OTHERS[damage])))
    client.delete(key)
    if damage == "list":
        client.rpush(key, b"no string")
    else:
        client.set(key, bytes(data))
    assert ask(core, 3.0) == 3.0
    assert hits(version) == 0
    if damage == "empty":
        # As if there were none.
        return
    found = cache.statistics().losses
    assert found["unreachable" if damage == "list" else "corrupt"] >= 1
    assert "response cache" in caplog.text
    if damage not in ("list", "large"):
        # What was computed took the damaged entry's place.
        assert eventually(lambda: client.get(key) != bytes(data))
        assert ask(core, 3.0) == 3.0
        assert hits(version) == 1


def test_a_redis_that_is_not_there_costs_no_request_and_is_used_once_it_comes(
    new_core: Any, new_cache: Any, model_root: Path, redis_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    redis_server.kill()
    core = new_core(cache=new_cache())
    version = core.load(core.spec(is_cached=True), root=model_root)
    for value in range(20):
        assert ask(core, value) == value
    assert caplog.text.count("cannot be used, requests are computed") == 1
    redis_server.start()

    def has_hit() -> bool:
        assert ask(core, 3.0) == 3.0
        return hits(version) > 0

    assert eventually(has_hit)
    found = version.statistics()
    assert found.success.count == found.cache_hit.count + found.cache_miss.count
    assert "can be used again" in caplog.text


def test_killing_redis_again_and_again_under_load_loses_no_request(
    new_core: Any, new_cache: Any, model_root: Path, redis_server: Any
) -> None:
    core = new_core(cache=new_cache())
    version = core.load(core.spec(is_cached=True, instances=2), root=model_root)
    stop = threading.Event()
    wrong: list[object] = []
    asked = [0, 0, 0]

    def load(number: int) -> None:
        generator = np.random.default_rng(number)
        while not stop.is_set():
            value = int(generator.integers(0, 5))
            try:
                found = ask(core, value, may_run=number == 0)
            except BaseException as error:  # noqa: BLE001 - shown by the test
                wrong.append(error)
                return
            asked[number] += 1
            if found != value:
                wrong.append((value, found))

    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        before = hits(version)
        assert eventually(lambda before=before: hits(version) > before + 20 or bool(wrong))
        redis_server.kill()
        seen = sum(asked)
        assert eventually(lambda seen=seen: sum(asked) > seen + 50 or bool(wrong))
        redis_server.start()
    before = hits(version)
    assert eventually(lambda: hits(version) > before + 20 or bool(wrong))
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    found = version.statistics()
    assert found.success.count == sum(asked) == found.cache_hit.count + found.cache_miss.count
    assert found.fail.count == 0
    assert eventually(lambda: version.in_flight == 0)


def test_a_redis_that_hangs_holds_a_request_up_for_no_longer_than_its_time_limit(
    new_core: Any, redis_server: Any, model_root: Path
) -> None:
    cache = ResponseCache(RedisStore(patient(redis_server.port, socket_timeout_ms=50, wait_timeout_ms=50)))
    core = new_core(cache=cache)
    version = core.load(core.spec(is_cached=True), root=model_root)
    ask(core, 3.0)
    redis_server.signal(signal.SIGSTOP)
    try:
        # Each is answered though Redis says nothing at all, and after the first nobody waits for it but to try again.
        for value in range(30):
            assert ask(core, value) == value
    finally:
        redis_server.signal(signal.SIGCONT)
    assert cache.statistics().losses["unreachable"] > 0
    assert hits(version) == 0
    cache.close()


def test_a_redis_that_sends_its_answer_byte_by_byte_does_not_hold_the_request(new_core: Any, model_root: Path) -> None:
    """Each byte comes within the socket's time limit; the whole would take for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def trickle() -> None:
        listener.settimeout(0.1)
        while not stop.is_set():
            try:
                wire, _ = listener.accept()
            except TimeoutError:
                continue
            with wire:
                try:
                    while not stop.wait(0.02):
                        wire.sendall(b"+")
                except OSError:
                    continue

    server = threading.Thread(target=trickle)
    server.start()
    port = listener.getsockname()[1]
    settings = RedisCache("127.0.0.1", port, socket_timeout_ms=100, connect_timeout_ms=100, wait_timeout_ms=100)
    cache = ResponseCache(RedisStore(settings))
    core = new_core(cache=cache)
    version = core.load(core.spec(is_cached=True), root=model_root)
    try:
        for value in range(3):
            assert ask(core, value) == value
    finally:
        stop.set()
        server.join()
        listener.close()
        cache.close()
    assert version.statistics().cache_miss.count == 3


def test_more_lookups_than_can_wait_are_computed_at_once(
    new_core: Any, new_cache: Any, model_root: Path, redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_server.serving.cache.response_cache._MAX_WAITING_JOBS", 2)
    cache = new_cache()
    core = new_core(cache=cache)
    core.load(core.spec(is_cached=True), root=model_root)
    release = threading.Event()
    monkeypatch.setattr(cache._store, "get", lambda key: release.wait(20) and None)
    waiting = [core.submit(float(value))[1] for value in range(4 + 2)]
    monkeypatch.setattr(cache, "is_available", lambda: True)
    over = [core.submit(float(value))[1] for value in range(10)]
    assert [item.final().outputs[0].array[0, 0] for item in over] == list(range(10))
    assert cache.statistics().losses["busy"] >= 10
    release.set()
    assert [item.final().outputs[0].array[0, 0] for item in waiting] == list(range(6))


def test_a_request_that_is_cancelled_while_redis_is_asked_is_answered_at_once_and_released_after(
    new_core: Any, new_cache: Any, model_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    core = new_core(cache=cache)
    version = core.load(core.spec(is_cached=True), root=model_root)
    release, reached = threading.Event(), threading.Event()

    def slow(key: bytes) -> None:
        reached.set()
        release.wait(20)

    monkeypatch.setattr(cache._store, "get", slow)
    released: list[int] = []
    ticket, mailbox = core.submit(1.0, release=lambda: released.append(1))
    assert reached.wait(20)
    ticket.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    assert released == []
    release.set()
    assert eventually(lambda: version.in_flight == 0)
    assert released == [1]
