"""The pool of handler threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from edge_server.frontends.grpc import pool as pool_module
from edge_server.frontends.grpc.pool import HandlerPool


@pytest.fixture
def pool() -> Iterator[HandlerPool]:
    made = HandlerPool("pool-test")
    yield made
    made.shutdown()


def threads() -> int:
    return sum(thread.name == "pool-test" for thread in threading.enumerate())


def wait_until_threads(count: int) -> None:
    pause = threading.Event()
    while threads() != count:
        pause.wait(0.005)


def test_calls_at_once_each_have_a_thread(pool: HandlerPool) -> None:
    together = threading.Barrier(20, timeout=20)
    done = threading.Semaphore(0)
    for _ in range(20):
        pool.submit(together.wait).add_done_callback(lambda job: done.release())
    for _ in range(20):
        assert done.acquire(timeout=20)
    assert threads() == 20


def test_calls_one_after_another_share_a_thread(pool: HandlerPool) -> None:
    seen = set()
    done = threading.Semaphore(0)

    def call(_: int) -> None:
        seen.add(threading.get_ident())

    for i in range(50):
        pool.submit(call, i).add_done_callback(lambda job: done.release())
        assert done.acquire(timeout=20)
        while not pool._idle:
            threading.Event().wait(0.001)
    assert len(seen) == 1


def test_a_callback_runs_once_whether_added_before_or_after_the_end(pool: HandlerPool) -> None:
    for _ in range(300):
        calls: list[object] = []
        job = pool.submit(int)
        job.add_done_callback(calls.append)
        finished = threading.Event()
        job.add_done_callback(lambda _, finished=finished: finished.set())
        assert finished.wait(20)
        while not calls:
            threading.Event().wait(0.001)
        assert calls == [job]


def test_idle_threads_end_after_a_while(pool: HandlerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_IDLE_S", 0.01)
    pool.submit(int)
    wait_until_threads(0)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(20)


def test_shutdown_ends_idle_threads_at_once_and_busy_ones_after_their_call(pool: HandlerPool) -> None:
    gate, begun = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        gate.wait(20)

    pool.submit(busy)
    assert begun.wait(20)
    pool.submit(int)
    pool.shutdown()
    wait_until_threads(1)
    gate.set()
    wait_until_threads(0)


def test_a_call_waits_when_the_system_grants_no_thread(pool: HandlerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun, second = threading.Event(), threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        gate.wait(20)

    pool.submit(busy)
    assert begun.wait(20)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.submit(second.set)
    assert not second.is_set()
    gate.set()
    assert second.wait(20)
