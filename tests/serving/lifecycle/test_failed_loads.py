"""What becomes of a load that failed: tried again where that can help, left alone where it cannot."""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import replace
from typing import Any

import pytest

from edge_server import backends
from edge_server.core.version_lifecycle import DesiredModel, DesiredVersion
from edge_server.errors import BackendMissing, BadModelConfig, ChangedWhileLoading, LoadError, NotReady, OutOfMemory


class Failing:
    """Opens that fail as told, and count."""

    def __init__(self, house: Any, *errors: Exception) -> None:
        self.errors = list(errors)
        self.count = 0
        house.script.on_open = self

    def __call__(self, job: Any) -> None:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)


def settle(house: Any, name: str = "m") -> str | None:
    assert house.manager.wait_settled([name], 20)
    reason: str | None = house.manager.failure(name)
    return reason


def wrapped(number: int) -> LoadError:
    """Return a LoadError with an OSError at its bottom, as files that cannot be read leave the repository."""
    error = LoadError("cannot read it")
    error.__cause__ = OSError(number, "told so")
    return error


PASSING = [
    ("out of memory", OutOfMemory("does not fit")),
    ("a disk that stutters", OSError(errno.EIO, "told so")),
    ("a network file system that lost the file", wrapped(errno.ESTALE)),
    ("a read that would block", wrapped(errno.EAGAIN)),
    ("files that changed, and are again what they were", ChangedWhileLoading("config.pbtxt changed")),
]


@pytest.mark.parametrize(("what", "error"), PASSING, ids=[row[0] for row in PASSING])
def test_a_cause_that_may_pass_is_tried_again_by_itself(house: Any, eventually: Any, what: str, error: Any) -> None:
    opens = Failing(house, error)
    house.set_desired(house.spec())
    reason = settle(house)
    assert reason is not None
    assert "failed 1 time(s), tried again at 20" in reason
    (entry,) = house.manager.index()
    assert (entry.state, "tried again at" in entry.reason) == ("UNAVAILABLE", True)
    (report,) = house.manager.versions("m")
    assert (report.state, report.generation, report.share) == ("FAILED", 1, 0.0)
    for version in (None, 1):
        with pytest.raises(NotReady) as refused:
            house.submit(version=version)
        assert refused.value.retry_after_s == 1.0
    assert any(kind == "model.failed" and fields["retry_in_s"] == 1.0 for kind, fields in house.events)
    eventually(lambda: house.service.is_model_ready("m", None))
    assert opens.count == 2
    assert house.manager.failure("m") is None


@pytest.mark.parametrize(
    "error",
    [
        BadModelConfig("no"),
        LoadError("no"),
        BackendMissing("tensorflow is not installed"),
        wrapped(errno.ENOENT),
        OSError(2, "gone"),
    ],
)
def test_a_cause_that_stays_is_not_tried_again(house: Any, error: Exception) -> None:
    opens = Failing(house, error)
    house.set_desired(house.spec())
    assert "tried again" not in str(settle(house))
    assert house.manager.table._models["m"].failures[1].alarm is None
    assert opens.count == 1


def test_the_next_try_comes_later_each_time(house: Any, eventually: Any) -> None:
    Failing(house, OutOfMemory("a"), OutOfMemory("b"))
    house.set_desired(house.spec())

    def waits() -> list[float]:
        return [fields["retry_in_s"] for kind, fields in list(house.events) if kind == "model.failed"]

    # A failure is announced after it was noted, so the announcement is what is waited for.
    eventually(lambda: len(waits()) == 2)
    assert waits() == [1.0, 2.0]
    assert "failed 2 time(s)" in house.manager.failure("m")


def test_a_retry_that_is_due_leaves_the_old_generation_serving(house: Any, eventually: Any) -> None:
    old = house.load(house.spec())
    Failing(house, OutOfMemory("a"))
    house.set_desired(house.spec(), mark="b")
    assert "a (failed 1 time(s)" in str(settle(house))
    assert house.manager.route("m", None) is old
    eventually(lambda: house.manager.route("m", None).generation == 3)


def test_changed_files_are_tried_at_once_and_the_old_retry_is_forgotten(house: Any) -> None:
    opens = Failing(house, OutOfMemory("a"))
    house.set_desired(house.spec())
    settle(house)
    alarm = house.manager.table._models["m"].failures[1].alarm
    house.load(house.spec(), mark="b")
    assert alarm.call is None
    assert opens.count == 2


def test_an_order_to_load_tries_at_once(house: Any) -> None:
    Failing(house, OutOfMemory("a"))
    house.set_desired(house.spec())
    settle(house)
    house.service.load_model("m")
    assert house.service.is_model_ready("m", None)


def test_a_load_that_is_no_longer_desired_is_not_retried(house: Any) -> None:
    Failing(house, OutOfMemory("a"))
    house.set_desired(house.spec())
    settle(house)
    alarm = house.manager.table._models["m"].failures[1].alarm
    house.manager.set_desired(DesiredModel("m"))
    assert alarm.call is None


def test_memory_that_another_model_gives_back_is_used_at_once(house: Any, eventually: Any) -> None:
    house.load(house.spec("big"))
    opens = Failing(house, *[OutOfMemory("a")] * 3)
    house.set_desired(house.spec("m"))
    eventually(lambda: opens.count == 3)
    waiting = house.manager.table._models["m"]
    eventually(lambda: waiting.loading is None and 1 in waiting.failures)
    house.service.unload_model("big")
    before = time.monotonic()
    eventually(lambda: house.service.is_model_ready("m", None))
    # The next try by itself was 4 s away.
    assert waiting.generation == 4, f"after {time.monotonic() - before:.1f} s"


def test_a_load_that_fails_for_good_is_tried_as_often_as_asked_for(new_house: Any) -> None:
    house = new_house(load_retry_count=2)
    opens = Failing(house, LoadError("1"), LoadError("2"))
    house.load(house.spec())
    assert opens.count == 3
    opens = Failing(house, *[LoadError("no")] * 9)
    house.set_desired(house.spec(), mark="b")
    settle(house)
    assert opens.count == 3


def test_two_loads_that_hang_do_not_keep_others_from_loading(new_house: Any, new_gate: Any, eventually: Any) -> None:
    house = new_house(hang_timeout_s=0.2)
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop() if job.spec.name.startswith("hung") else None
    house.set_desired(house.spec("hung_a"))
    house.set_desired(house.spec("hung_b"))
    gate.wait_entered()
    gate.wait_entered()
    house.set_desired(house.spec("m"))
    assert house.manager.wait_settled(["m"], 20)
    assert house.service.is_model_ready("m", None)
    gate.let_go(2)
    assert house.manager.wait_settled(None, 20)
    assert house.manager._reconciler._slots._free._value == 2, "late ones give back no slot twice"


def test_a_load_below_the_memory_floor_waits_and_says_so(new_house: Any, eventually: Any) -> None:
    answers = ["memory is short", None]
    asked: list[int] = []

    def ask_room(file: Any, instance_count: int) -> str | None:
        asked.append(instance_count)
        return answers.pop(0)

    house = new_house(ask_room)
    house.set_desired(house.spec(instances=3))
    reason = settle(house)
    assert reason is not None
    assert "model 'm' version 1: memory is short (failed 1 time(s)" in reason
    assert house.script.opened == [], "nothing was begun"
    eventually(lambda: house.service.is_model_ready("m", None))
    assert asked == [3, 3]


def test_an_order_to_load_below_the_memory_floor_is_refused_with_the_reason(new_house: Any) -> None:
    house = new_house(lambda file, instance_count: "memory is short")
    house.wishes["m"] = DesiredModel("m", {1: house.desired_version(house.spec())})
    with pytest.raises(LoadError, match="memory is short"):
        house.service.load_model("m")


def test_a_load_waits_for_unloading_models_before_it_fails_for_lack_of_memory(
    house: Any, new_gate: Any, eventually: Any
) -> None:
    gate = new_gate()
    house.load(house.spec("old"))
    house.script.on_close = lambda name: gate.stop()
    placement = house.manager._reconciler
    placement.ask_room = lambda file, count: "memory is short" if house.manager.table.is_unloading() else None
    house.service.unload_model("old")
    gate.wait_entered()
    house.set_desired(house.spec("m"))
    eventually(lambda: house.manager.table._models["m"].generation == 1)
    gate.let_go(2)
    assert settle(house, "m") is None
    assert "model.failed" not in [kind for kind, _ in house.events]


def test_what_a_repository_raises_while_it_reads_is_sorted_the_same_way(house: Any) -> None:
    def resolve(passed_over: Any) -> Any:
        raise OSError(errno.ESTALE, "stale file handle")

    house.manager.set_desired(DesiredModel("m", {1: DesiredVersion("a", resolve)}))
    assert "tried again at" in str(settle(house))


def test_a_failure_names_the_runtimes_that_were_skipped_and_no_other_notes(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backends._made, "first", house.script)
    Failing(house, LoadError("the first cannot open it"), LoadError("the last cannot open it"))
    notes = "max_batch_size was set to 4: the model file can batch", "parameter 'isolaton' is not known"

    def resolve(passed_over: Any) -> Any:
        skipped = tuple(f"backend 'first' was skipped for 'last': {reason}" for reason in passed_over.values())
        resolved = house.desired_version(house.spec(notes=(*notes, *skipped))).resolve({})
        backend = "scripted" if passed_over else "first"
        spec = replace(resolved.spec, backend=backend)
        return replace(resolved, spec=spec, skipped=skipped, has_alternatives=not passed_over)

    house.manager.set_desired(DesiredModel("m", {1: DesiredVersion("a", resolve)}))
    assert settle(house) == (
        "version 1 is at UNAVAILABLE state: the last cannot open it; "
        "backend 'first' was skipped for 'last': the first cannot open it;"
    )


def test_files_that_changed_while_they_were_loaded_fail_nothing_when_the_new_ones_are_wished_for_by_then(
    house: Any,
) -> None:
    old = house.load(house.spec())

    def change(job: Any) -> None:
        house.script.on_open = lambda job: None
        house.set_desired(house.spec(), mark="c")
        raise ChangedWhileLoading("weights changed while it was loaded")

    house.script.on_open = change
    house.set_desired(house.spec(), mark="b")
    assert settle(house) is None
    assert house.manager.route("m", None).fingerprint == "c"
    assert "model.failed" not in [kind for kind, _ in house.events]
    assert house.manager.route("m", None) is not old


def test_files_that_changed_while_they_were_loaded_leave_every_version_serving(house: Any) -> None:
    """A wish made from a configuration that is being corrected asks for one version of three: the others stay."""
    house.load(house.spec(), 1, 2, 3)
    Failing(house, *[ChangedWhileLoading("config.pbtxt changed before it was loaded")] * 9)
    house.set_desired(house.spec(), 3, mark="b")
    settle(house)
    assert [house.manager.route("m", number).fingerprint for number in (1, 2, 3)] == ["a"] * 3


@pytest.mark.parametrize("error", [SystemExit("told so"), asyncio.CancelledError("told so"), MemoryError("told so")])
def test_what_a_runtime_raises_while_it_looks_at_a_file_fails_the_load_and_ends_it(
    house: Any, error: BaseException
) -> None:
    def resolve(passed_over: Any) -> Any:
        raise error

    wish = DesiredModel("m", {1: DesiredVersion("a", resolve)})
    house.manager.set_desired(wish)
    assert type(error).__name__ in str(settle(house))
    house.load(house.spec(), mark="b")
    assert house.submit(1.0)[1].final().error is None
