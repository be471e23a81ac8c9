"""Sessions that are bound to no thread: the pool that runs them, and what hung and long runs cost the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edge_server.backends.base import SessionInfo
from edge_server.serving.execution.thread_pool import RunPool
from edge_server.serving.timer import Timer
from tests.kit.eventually import eventually

TIMEOUT_S = 60.0
NEVER_S = 3600.0


@pytest.fixture
def timer() -> Iterator[Timer]:
    made = Timer()
    yield made
    made.close()


@pytest.fixture
def new_pool(timer: Timer) -> Iterator[Callable[..., RunPool]]:
    built: list[RunPool] = []

    def build(size: int, long_run_s: float = NEVER_S) -> RunPool:
        built.append(RunPool(timer, size, long_run_s))
        return built[-1]

    yield build
    for made in built:
        made.close()


@pytest.fixture
def new_unbound(new_core: Callable[..., Any]) -> Callable[..., Any]:
    """Build a house whose scripted sessions are bound to no thread, as `new_core` does."""

    def build(**limits: Any) -> Any:
        core = new_core(**limits)
        plain = core.script.open

        def open_unbound(job: Any) -> Any:
            session = plain(job)
            session.info = SessionInfo("scripted", "CPU", "f32", is_bound=False)
            return session

        core.script.open = open_unbound
        return core

    return build


@pytest.fixture
def unbound(new_unbound: Callable[..., Any]) -> Any:
    return new_unbound()


# -- the pool alone


def test_no_more_jobs_run_than_the_pool_has_threads_and_all_are_run(new_pool: Any, new_blocker: Any) -> None:
    pool, blocker = new_pool(2), new_blocker()
    lock, running, most, over = threading.Lock(), [0], [0], threading.Semaphore(0)

    def job() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        blocker.block()
        with lock:
            running[0] -= 1
        over.release()

    for _ in range(10):
        pool.post(job)
    blocker.wait_blocked()
    blocker.wait_blocked()
    assert pool.has_waiting
    blocker.release(10)
    for _ in range(10):
        assert over.acquire(timeout=TIMEOUT_S)
    assert (most[0], pool.thread_count) == (2, 2)
    assert not pool.has_waiting


def test_jobs_are_begun_in_the_order_in_which_they_come(new_pool: Any, new_blocker: Any) -> None:
    pool, blocker, done = new_pool(1), new_blocker(), threading.Event()
    begun: list[int] = []
    pool.post(blocker.block)
    blocker.wait_blocked()
    for number in range(20):
        pool.post(lambda number=number: begun.append(number))
    pool.post(done.set)
    blocker.release()
    assert done.wait(TIMEOUT_S)
    assert begun == list(range(20))


def test_a_thread_that_is_idle_is_used_before_another_is_started(new_pool: Any) -> None:
    pool = new_pool(8)
    for _ in range(5):
        done = threading.Event()
        pool.post(done.set)
        assert done.wait(TIMEOUT_S)
        assert eventually(lambda: len(pool._idle) == 1)
    assert pool.thread_count == 1


def test_jobs_that_hang_are_replaced_and_the_threads_too_many_end_with_them(new_pool: Any, new_blocker: Any) -> None:
    pool, blocker, done = new_pool(2, long_run_s=0.01), new_blocker(), threading.Event()
    for _ in range(5):
        pool.post(blocker.block)
    for _ in range(5):
        blocker.wait_blocked()
    pool.post(done.set)
    assert done.wait(TIMEOUT_S), "though five hang in a pool of two"
    blocker.release(5)
    assert eventually(lambda: pool.thread_count == len(pool._idle) == 2)


def test_a_job_waits_for_a_thread_when_the_system_grants_none(
    new_pool: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, done = new_pool(1, long_run_s=0.01), threading.Event()
    start, refused = threading.Thread.start, []

    def refuse(self: threading.Thread) -> None:
        if self.name == "edge-run" and len(refused) < 2:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.post(done.set)
    assert done.wait(TIMEOUT_S)
    assert len(refused) == 2
    assert "the system grants no thread to run models" in caplog.text


def test_a_pool_that_is_closed_runs_what_waits_and_has_no_threads_then(new_pool: Any, new_blocker: Any) -> None:
    pool, blocker, done = new_pool(1), new_blocker(), threading.Event()
    pool.post(blocker.block)
    blocker.wait_blocked()
    pool.post(done.set)
    pool.close()
    blocker.release()
    assert done.wait(TIMEOUT_S)
    assert eventually(lambda: pool.thread_count == 0)


# -- sessions that it runs


def test_unbound_sessions_of_many_instances_share_the_pool_and_run_side_by_side(unbound: Any, new_blocker: Any) -> None:
    blocker, plain = new_blocker(), unbound.script.on_run
    names = [f"m{number}" for number in range(10)]
    before = set(threading.enumerate())
    for name in names:
        unbound.load(unbound.spec(name, instances=3))
    made = {thread.name for thread in set(threading.enumerate()) - before}
    assert made <= {"edge-load"}, "none of the 30 instances has a thread"
    unbound.script.on_run = lambda name, inputs: blocker.block() or plain(name, inputs)
    answers = [unbound.submit(1.0, model=name)[1] for name in names]
    for _ in names:
        blocker.wait_blocked()
    blocker.release(10)
    assert all(answer.final().error is None for answer in answers)


def test_an_unbound_session_is_opened_closed_and_released_where_models_are_loaded_and_unloaded(unbound: Any) -> None:
    unbound.load(unbound.spec(instances=2))
    for value in range(10):
        unbound.submit(value, may_run=bool(value % 2))[1].final()
    unbound.service.unload_model("m")
    assert eventually(lambda: len(unbound.script.dropped) == 2)
    ((_, first), (_, second)) = unbound.script.closed
    for thread in (first, second, *unbound.script.dropped):
        assert thread.name == "edge-drain"
    ran = {thread for _, thread, _ in unbound.script.ran}
    assert {thread.name for thread in ran} == {"edge-run", threading.current_thread().name}
    assert eventually(lambda: not any(thread.is_alive() for _, thread in unbound.script.opened))


def test_a_hung_run_keeps_no_other_model_of_the_pool_from_running(
    unbound: Any, new_blocker: Any, new_pool: Any
) -> None:
    unbound.models.loader.pool = new_pool(1, long_run_s=0.01)
    blocker, plain = new_blocker(), unbound.script.on_run
    unbound.script.on_run = lambda name, inputs: (name.startswith("hung") and blocker.block()) or plain(name, inputs)
    unbound.load(unbound.spec("hung"))
    unbound.load(unbound.spec("m"))
    _, hung = unbound.submit(1.0, model="hung")
    blocker.wait_blocked()
    for value in range(20):
        assert unbound.submit(value)[1].final().error is None
    assert hung.responses == []
    blocker.release()
    assert hung.final().error is None


def test_a_busy_model_goes_on_with_others_after_each_batch(unbound: Any, new_blocker: Any, new_pool: Any) -> None:
    unbound.models.loader.pool = new_pool(1)
    blocker, plain = new_blocker(), unbound.script.on_run
    unbound.load(unbound.spec("busy", max_batch_size=1))
    unbound.load(unbound.spec("m", max_batch_size=1))
    unbound.script.on_run = lambda name, inputs: blocker.block() or plain(name, inputs)
    answers = [unbound.submit(value, model="busy")[1] for value in range(4)]
    blocker.wait_blocked()
    answers.append(unbound.submit(9.0)[1])
    blocker.release(5)
    values = [float(answer.final().outputs[0].array[0, 0]) for answer in answers]
    assert values == [0, 1, 2, 3, 9]
    assert [name for name, _, _ in unbound.script.ran] == ["busy_0", "m_0", "busy_0", "busy_0", "busy_0"]


def test_an_instance_of_the_pool_runs_one_batch_at_a_time_and_in_order(unbound: Any, new_pool: Any) -> None:
    unbound.models.loader.pool = new_pool(3)
    seen: dict[str, list[float]] = {"a_0": [], "b_0": []}
    inside: set[str] = set()
    plain = unbound.script.on_run

    def run(name: str, inputs: Any) -> Any:
        assert name not in inside, "two threads are in one session"
        inside.add(name)
        seen[name] += inputs["IN"][:, 0].tolist()
        answer = plain(name, inputs)
        inside.discard(name)
        return answer

    unbound.script.on_run = run
    for name in ("a", "b"):
        unbound.load(unbound.spec(name, max_batch_size=1))
    answers = [unbound.submit(value, model=name)[1] for value in range(100) for name in ("a", "b")]
    assert all(answer.final().error is None for answer in answers)
    assert seen == {"a_0": list(range(100)), "b_0": list(range(100))}


def test_a_session_of_the_pool_is_closed_after_the_run_that_is_under_way(unbound: Any, new_blocker: Any) -> None:
    blocker, plain = new_blocker(), unbound.script.on_run
    unbound.load(unbound.spec())
    unbound.script.on_run = lambda name, inputs: blocker.block() or plain(name, inputs)
    _, answer = unbound.submit(1.0)
    blocker.wait_blocked()
    unbound.service.unload_model("m")
    assert unbound.script.closed == []
    blocker.release()
    assert answer.final().error is None
    assert eventually(lambda: len(unbound.script.closed) == 1)


def test_a_hung_session_of_the_pool_fails_its_version_and_is_closed_when_it_comes_back(
    new_unbound: Any, new_blocker: Any
) -> None:
    core, blocker = new_unbound(hang_timeout_s=0.05), new_blocker()
    plain = core.script.on_run
    core.script.on_run = lambda name, inputs: (name == "m_0" and blocker.block()) or plain(name, inputs)
    version = core.load(core.spec())
    core.load(core.spec("other"))
    error = core.submit(1.0)[1].final().error
    assert "instance m_0 of model 'm' version 1 hangs" in error.message
    assert version.state.name == "FAILED"
    assert core.submit(1.0, model="other")[1].final().error is None
    assert core.script.closed == []
    blocker.release()
    assert eventually(lambda: [name for name, _ in core.script.closed] == ["m_0"])
