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
from tests.kit.eventually import eventually


class Failing:
    """Opens that fail as configured, and count."""

    def __init__(self, core: Any, *errors: Exception) -> None:
        self.errors = list(errors)
        self.count = 0
        core.script.on_open = self

    def __call__(self, job: Any) -> None:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)


def settle(core: Any, name: str = "m") -> str | None:
    assert core.table.wait_settled([name], 20)
    reason: str | None = core.router.failure(name)
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


@pytest.mark.sample(2)  # Each waits a second; what may pass is decided in serving/execution/transient_load_errors.
@pytest.mark.parametrize(("what", "error"), PASSING, ids=[row[0] for row in PASSING])
def test_a_cause_that_may_pass_is_tried_again_by_itself(core: Any, what: str, error: Any) -> None:
    opens = Failing(core, error)
    core.set_desired(core.spec())
    reason = settle(core)
    assert reason is not None
    assert "failed 1 time(s), tried again at 20" in reason
    (entry,) = core.router.index()
    assert (entry.state, "tried again at" in entry.reason) == ("UNAVAILABLE", True)
    (report,) = core.router.versions("m")
    assert (report.state, report.generation, report.share) == ("FAILED", 1, 0.0)
    for version in (None, 1):
        with pytest.raises(NotReady) as refused:
            core.submit(version=version)
        assert refused.value.retry_after_s == 1.0
    assert any(kind == "model.failed" and fields["retry_in_s"] == 1.0 for kind, fields in core.events)
    assert eventually(lambda: core.service.is_model_ready("m", None))
    assert opens.count == 2
    assert core.router.failure("m") is None


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
def test_a_cause_that_stays_is_not_tried_again(core: Any, error: Exception) -> None:
    opens = Failing(core, error)
    core.set_desired(core.spec())
    assert "tried again" not in str(settle(core))
    assert core.table._models["m"].failures[1].alarm is None
    assert opens.count == 1


def test_the_next_try_comes_later_each_time(core: Any) -> None:
    Failing(core, OutOfMemory("a"), OutOfMemory("b"))
    core.set_desired(core.spec())

    def waits() -> list[float]:
        return [fields["retry_in_s"] for kind, fields in list(core.events) if kind == "model.failed"]

    # A failure is announced after it was noted, so the announcement is what is waited for.
    assert eventually(lambda: len(waits()) == 2)
    assert waits() == [1.0, 2.0]
    assert "failed 2 time(s)" in core.router.failure("m")


def test_a_retry_that_is_due_leaves_the_old_generation_serving(core: Any) -> None:
    old = core.load(core.spec())
    Failing(core, OutOfMemory("a"))
    core.set_desired(core.spec(), mark="b")
    assert "a (failed 1 time(s)" in str(settle(core))
    assert core.router.route("m", None) is old
    assert eventually(lambda: core.router.route("m", None).generation == 3)


def test_changed_files_are_tried_at_once_and_the_old_retry_is_forgotten(core: Any) -> None:
    opens = Failing(core, OutOfMemory("a"))
    core.set_desired(core.spec())
    settle(core)
    alarm = core.table._models["m"].failures[1].alarm
    core.load(core.spec(), mark="b")
    assert alarm.call is None
    assert opens.count == 2


def test_a_load_call_retries_at_once(core: Any) -> None:
    Failing(core, OutOfMemory("a"))
    core.set_desired(core.spec())
    settle(core)
    core.service.load_model("m")
    assert core.service.is_model_ready("m", None)


def test_a_load_that_is_no_longer_desired_is_not_retried(core: Any) -> None:
    Failing(core, OutOfMemory("a"))
    core.set_desired(core.spec())
    settle(core)
    alarm = core.table._models["m"].failures[1].alarm
    core.table.set_desired(DesiredModel("m"))
    assert alarm.call is None


def test_memory_that_another_model_gives_back_is_used_at_once(core: Any) -> None:
    core.load(core.spec("big"))
    opens = Failing(core, *[OutOfMemory("a")] * 3)
    core.set_desired(core.spec("m"))
    assert eventually(lambda: opens.count == 3)
    waiting = core.table._models["m"]
    assert eventually(lambda: waiting.loading is None and 1 in waiting.failures)
    core.service.unload_model("big")
    before = time.monotonic()
    assert eventually(lambda: core.service.is_model_ready("m", None))
    # The next try by itself was 4 s away.
    assert waiting.generation == 4, f"after {time.monotonic() - before:.1f} s"


def test_a_load_that_fails_for_good_is_tried_as_often_as_asked_for(new_core: Any) -> None:
    core = new_core(load_retry_count=2)
    opens = Failing(core, LoadError("1"), LoadError("2"))
    core.load(core.spec())
    assert opens.count == 3
    opens = Failing(core, *[LoadError("no")] * 9)
    core.set_desired(core.spec(), mark="b")
    settle(core)
    assert opens.count == 3


def test_two_loads_that_hang_do_not_keep_others_from_loading(new_core: Any, new_blocker: Any) -> None:
    core = new_core(hang_timeout_s=0.2)
    blocker = new_blocker()
    core.script.on_open = lambda job: blocker.block() if job.spec.name.startswith("hung") else None
    core.set_desired(core.spec("hung_a"))
    core.set_desired(core.spec("hung_b"))
    blocker.wait_blocked()
    blocker.wait_blocked()
    core.set_desired(core.spec("m"))
    assert core.table.wait_settled(["m"], 20)
    assert core.service.is_model_ready("m", None)
    blocker.release(2)
    assert core.table.wait_settled(None, 20)
    assert core.models.reconciler._loads._free._value == 2, "late ones give back no slot twice"


def test_a_load_below_the_memory_floor_waits_and_says_so(new_core: Any) -> None:
    answers = ["memory is short", None]
    asked: list[int] = []

    def check_memory(file: Any, instance_count: int) -> str | None:
        asked.append(instance_count)
        return answers.pop(0)

    core = new_core(check_memory)
    core.set_desired(core.spec(instances=3))
    reason = settle(core)
    assert reason is not None
    assert "model 'm' version 1: memory is short (failed 1 time(s)" in reason
    assert core.script.opened == [], "nothing was begun"
    assert eventually(lambda: core.service.is_model_ready("m", None))
    assert asked == [3, 3]


def test_a_load_call_below_the_memory_floor_is_refused_with_the_reason(new_core: Any) -> None:
    core = new_core(lambda file, instance_count: "memory is short")
    core.desired["m"] = DesiredModel("m", {1: core.desired_version(core.spec())})
    with pytest.raises(LoadError, match="memory is short"):
        core.service.load_model("m")


def test_a_load_waits_for_unloading_models_before_it_fails_for_lack_of_memory(core: Any, new_blocker: Any) -> None:
    blocker = new_blocker()
    core.load(core.spec("old"))
    core.script.on_close = lambda name: blocker.block()
    placement = core.models.reconciler
    placement.check_memory = lambda file, count: "memory is short" if core.table.is_unloading() else None
    core.service.unload_model("old")
    blocker.wait_blocked()
    core.set_desired(core.spec("m"))
    assert eventually(lambda: core.table._models["m"].generation == 1)
    blocker.release(2)
    assert settle(core, "m") is None
    assert "model.failed" not in [kind for kind, _ in core.events]


def test_what_a_repository_raises_while_it_reads_is_sorted_the_same_way(core: Any) -> None:
    def resolve(passed_over: Any) -> Any:
        raise OSError(errno.ESTALE, "stale file handle")

    core.table.set_desired(DesiredModel("m", {1: DesiredVersion("a", resolve)}))
    assert "tried again at" in str(settle(core))


def test_a_failure_names_the_runtimes_that_were_skipped_and_no_other_notes(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backends._made, "first", core.script)
    Failing(core, LoadError("the first cannot open it"), LoadError("the last cannot open it"))
    notes = "max_batch_size was set to 4: the model file can batch", "parameter 'isolaton' is not known"

    def resolve(passed_over: Any) -> Any:
        skipped = tuple(f"backend 'first' was skipped for 'last': {reason}" for reason in passed_over.values())
        resolved = core.desired_version(core.spec(notes=(*notes, *skipped))).resolve({})
        backend = "scripted" if passed_over else "first"
        spec = replace(resolved.spec, backend=backend)
        return replace(resolved, spec=spec, skipped=skipped, has_alternatives=not passed_over)

    core.table.set_desired(DesiredModel("m", {1: DesiredVersion("a", resolve)}))
    assert settle(core) == (
        "version 1 is at UNAVAILABLE state: the last cannot open it; "
        "backend 'first' was skipped for 'last': the first cannot open it;"
    )


def test_files_that_changed_while_they_were_loaded_fail_nothing_when_the_new_ones_are_wished_for_by_then(
    core: Any,
) -> None:
    old = core.load(core.spec())

    def change(job: Any) -> None:
        core.script.on_open = lambda job: None
        core.set_desired(core.spec(), mark="c")
        raise ChangedWhileLoading("weights changed while it was loaded")

    core.script.on_open = change
    core.set_desired(core.spec(), mark="b")
    assert settle(core) is None
    assert core.router.route("m", None).fingerprint == "c"
    assert "model.failed" not in [kind for kind, _ in core.events]
    assert core.router.route("m", None) is not old


def test_files_that_changed_while_they_were_loaded_leave_every_version_serving(core: Any) -> None:
    """A desired state from a configuration that is being corrected names one version of three: the others stay."""
    core.load(core.spec(), 1, 2, 3)
    Failing(core, *[ChangedWhileLoading("config.pbtxt changed before it was loaded")] * 9)
    core.set_desired(core.spec(), 3, mark="b")
    settle(core)
    assert [core.router.route("m", number).fingerprint for number in (1, 2, 3)] == ["a"] * 3


@pytest.mark.parametrize("error", [SystemExit("told so"), asyncio.CancelledError("told so"), MemoryError("told so")])
def test_what_a_runtime_raises_while_it_looks_at_a_file_fails_the_load_and_ends_it(
    core: Any, error: BaseException
) -> None:
    def resolve(passed_over: Any) -> Any:
        raise error

    wish = DesiredModel("m", {1: DesiredVersion("a", resolve)})
    core.table.set_desired(wish)
    assert type(error).__name__ in str(settle(core))
    core.load(core.spec(), mark="b")
    assert core.submit(1.0)[1].final().error is None
