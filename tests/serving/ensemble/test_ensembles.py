"""Ensembles over real threads: steps side by side, errors, cancels and deadlines at every step, members that change."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from edge_server.core.ensemble_and_sequence_spec import Ensemble, EnsembleStep
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.request_response import SequenceStep
from edge_server.core.tensor import DType, Tensor
from edge_server.core.version_lifecycle import DesiredModel, DesiredVersion
from edge_server.errors import (
    BackendError,
    Cancelled,
    ChangedWhileLoading,
    DeadlineExceeded,
    Draining,
    EdgeServerError,
    InvalidRequest,
    LoadError,
    QueueFull,
    UnknownModel,
)
from edge_server.serving.ensemble.ensemble_request import StepLimiter
from tests.kit.eventually import eventually

LIMIT_S = 60.0


def ensemble(core: Any, name: str, steps: Sequence[Any], outputs: Sequence[str] = ("OUT",), **more: Any) -> Any:
    """Steps are (model, {input: tensor}, {output: tensor}), or with a version behind."""
    bound = more.pop("max_inflight", 0)
    made = tuple(EnsembleStep(item[0], item[3] if len(item) > 3 else None, item[1], item[2]) for item in steps)
    settings: dict[str, Any] = {
        "outputs": tuple(OutputSpec(item, DType.FP32, (-1,)) for item in outputs),
        "instance_groups": (),
        "ensemble": Ensemble(made, bound),
    } | more
    return core.spec(name, backend="", **settings)


def set_desired(core: Any, spec: Any, mark: str = "a") -> None:
    members = tuple(dict.fromkeys((step.model, step.version) for step in spec.ensemble.steps))
    wish = DesiredModel(spec.name, {1: core.desired_version(spec, 1, mark)}, members=members)
    core.desired[spec.name] = wish
    core.table.set_desired(wish, retry=True)


def load(core: Any, spec: Any, mark: str = "a") -> Any:
    set_desired(core, spec, mark)
    assert core.table.wait_settled([spec.name], LIMIT_S)
    assert core.router.failure(spec.name) is None
    return core.router.route(spec.name, None)


def chain(*models: str) -> list[Any]:
    """Each model takes IN and gives OUT, one after the other."""
    names = ["IN", *(f"t{index}" for index in range(1, len(models))), "OUT"]
    return [(model, {"IN": names[i]}, {"OUT": names[i + 1]}) for i, model in enumerate(models)]


def state(core: Any, name: str) -> tuple[str, str]:
    return next(((item.state, item.reason) for item in core.router.index() if item.name == name), ("", ""))


def value(response: Any) -> float:
    assert response.error is None, response.error
    return float(response.outputs[0].array[0, 0])


@pytest.fixture
def adding(core: Any) -> Any:
    """Models a, b, c and d; each adds its own power of ten."""
    amounts = {"a": 1.0, "b": 10.0, "c": 100.0, "d": 1000.0}
    core.script.on_run = lambda name, inputs: {"OUT": sum(inputs.values()) + np.float32(amounts[name[0]])}
    for name in amounts:
        core.load(core.spec(name))
    return core


def test_steps_run_one_after_the_other_and_members_and_whole_are_counted(adding: Any) -> None:
    version = load(adding, ensemble(adding, "e", chain("a", "b", "c")))
    released: list[int] = []
    _, mailbox = adding.submit(5.0, model="e", rows=3, release=lambda: released.append(1))
    answer = mailbox.final()
    assert value(answer) == 116.0
    assert (answer.model, answer.version, [item.name for item in answer.outputs]) == ("e", 1, ["OUT"])
    assert eventually(lambda: released == [1] and version.in_flight == 0)
    told = version.statistics()
    assert (told.success.count, told.inference_count, told.execution_count) == (1, 3, 1)
    assert told.compute_infer.ns > 0
    assert [adding.router.route(name, None).statistics().success.count for name in "abcd"] == [1, 1, 1, 0]


@pytest.mark.parametrize("may_run", [False, True])
def test_steps_that_do_not_wait_for_each_other_run_at_the_same_time(adding: Any, may_run: bool) -> None:
    meeting = threading.Barrier(2)
    plain = adding.script.on_run

    def run(name: str, inputs: Any) -> Any:
        if name[0] in "bc":
            meeting.wait(LIMIT_S)
        return plain(name, inputs)

    adding.load(adding.spec("two", inputs=tuple(InputSpec(item, DType.FP32, (-1,)) for item in ("X", "Y"))))
    adding.script.on_run = lambda name, inputs: (
        {"OUT": inputs["X"] + inputs["Y"]} if name.startswith("two") else run(name, inputs)
    )
    steps = [
        ("a", {"IN": "IN"}, {"OUT": "s"}),
        ("b", {"IN": "s"}, {"OUT": "l"}),
        ("c", {"IN": "s"}, {"OUT": "r"}),
        ("two", {"X": "l", "Y": "r"}, {"OUT": "OUT"}),
    ]
    load(adding, ensemble(adding, "e", steps))
    _, mailbox = adding.submit(0.0, model="e", may_run=may_run)
    assert value(mailbox.final()) == 112.0


def test_tensors_are_handed_on_without_a_copy(core: Any) -> None:
    seen: list[Any] = []

    def run(name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        seen.append(inputs["IN"])
        return {"OUT": inputs["IN"]}

    core.script.on_run = run
    for name in "ab":
        core.load(core.spec(name))
    load(core, ensemble(core, "e", chain("a", "b")))
    request = core.request(1.0, model="e")
    answers: list[Any] = []
    done = threading.Event()
    core.service.submit(request, lambda response: (answers.append(response), done.set()))
    assert done.wait(LIMIT_S)
    given = request.inputs["IN"].array
    assert all(np.shares_memory(given, item) for item in [*seen, answers[0].outputs[0].array])


def test_only_requested_outputs_are_returned_and_computed(adding: Any) -> None:
    steps = [("a", {"IN": "IN"}, {"OUT": "X"}), ("b", {"IN": "IN"}, {"OUT": "Y"})]
    load(adding, ensemble(adding, "e", steps, ["X", "Y"]))
    _, mailbox = adding.submit(0.0, model="e", outputs=("Y",))
    answer = mailbox.final()
    assert [item.name for item in answer.outputs] == ["Y"]
    assert adding.router.route("a", None).statistics().success.count == 0
    _, mailbox = adding.submit(0.0, model="e")
    assert [item.name for item in mailbox.final().outputs] == ["X", "Y"]


def test_ensembles_of_ensembles(adding: Any) -> None:
    load(adding, ensemble(adding, "inner", chain("a", "b")))
    load(adding, ensemble(adding, "middle", chain("inner", "c")))
    load(adding, ensemble(adding, "outer", chain("middle", "inner", "d")))
    _, mailbox = adding.submit(0.0, model="outer")
    assert value(mailbox.final()) == 1122.0
    assert adding.router.route("inner", None).statistics().success.count == 2


@pytest.mark.parametrize("may_run", [False, True])
def test_a_very_deep_ensemble_does_not_nest_its_calls(core: Any, may_run: bool) -> None:
    core.script.on_run = lambda name, inputs: {"OUT": inputs["IN"] + np.float32(1)}
    core.load(core.spec("a"))
    load(core, ensemble(core, "e", chain(*["a"] * 3000)))
    _, mailbox = core.submit(0.0, model="e", may_run=may_run)
    assert value(mailbox.final()) == 3000.0


def test_what_came_with_the_request_goes_to_every_step(adding: Any) -> None:
    seen: list[Any] = []

    def execute(executions: Any) -> None:
        for execution in executions:
            seen.append(execution.request)
            execution.send({"OUT": execution.request.inputs["IN"].array}, is_final=True)

    adding.script.on_execute = execute
    for name in "xy":
        adding.load(adding.spec(name))
    load(adding, ensemble(adding, "e", chain("x", "y")))
    far_ns = time.monotonic_ns() + 10**12
    more = {
        "id": "seven", "parameters": {"key": "word"}, "priority": 2, "timeout_us": 10**9,
        "sequence": SequenceStep(42, is_start=True), "deadline_ns": far_ns,
    }  # fmt: skip
    _, mailbox = adding.submit(1.0, model="e", **more)
    assert mailbox.final().request_id == "seven"
    for request, model in zip(seen, "xy", strict=True):
        assert request.model == model
        assert {name: getattr(request, name) for name in more} == more


@pytest.mark.sample
@pytest.mark.parametrize("failing", ["a", "b", "c"])
@pytest.mark.parametrize("error", [BackendError("broken"), ValueError("broken"), InvalidRequest("broken")])
def test_an_error_at_any_step_is_the_answer_and_names_the_step(adding: Any, failing: str, error: Exception) -> None:
    plain = adding.script.on_run

    def run(name: str, inputs: Any) -> Any:
        if name[0] == failing:
            raise error
        return plain(name, inputs)

    adding.script.on_run = run
    version = load(adding, ensemble(adding, "e", chain("a", "b", "c")))
    released: list[int] = []
    _, mailbox = adding.submit(0.0, model="e", release=lambda: released.append(1))
    answer = mailbox.final()
    assert len(mailbox.responses) == 1
    step = "abc".index(failing) + 1
    assert f"in ensemble 'e', step {step} (model '{failing}'): " in str(answer.error)
    assert "broken" in str(answer.error)
    assert isinstance(answer.error, InvalidRequest if isinstance(error, InvalidRequest) else BackendError)
    assert eventually(lambda: released == [1] and version.in_flight == 0)
    assert version.statistics().fail.count == 1


def test_the_first_error_takes_back_the_steps_beside_it(adding: Any, new_blocker: Any) -> None:
    inside, blocker = new_blocker(), new_blocker()

    def run(name: str, inputs: Any) -> Any:
        if name[0] == "a":
            inside.block()
            raise BackendError("first")
        blocker.block()
        return {"OUT": inputs["IN"]}

    adding.script.on_run = run
    steps = [("a", {"IN": "IN"}, {"OUT": "X"}), ("b", {"IN": "IN"}, {"OUT": "Y"}), ("c", {"IN": "Y"}, {"OUT": "Z"})]
    version = load(adding, ensemble(adding, "e", steps, ["X", "Z"]))
    released: list[int] = []
    _, mailbox = adding.submit(0.0, model="e", release=lambda: released.append(1))
    blocker.wait_blocked()
    inside.wait_blocked()
    inside.release()
    assert "first" in str(mailbox.final().error)
    assert eventually(lambda: adding.router.route("b", None).statistics().failures["CANCELED"] == 1)
    assert released == [], "the other step still reads the inputs"
    blocker.release()
    assert eventually(lambda: released == [1] and version.in_flight == 0)
    assert adding.router.route("c", None).statistics().success.count == 0
    assert len(mailbox.responses) == 1


@pytest.mark.parametrize("at", ["a", "b", "c"])
def test_a_cancel_at_any_step_is_answered_at_once_and_nothing_more_runs(adding: Any, new_blocker: Any, at: str) -> None:
    blocker = new_blocker()
    plain = adding.script.on_run

    def run(name: str, inputs: Any) -> Any:
        if name[0] == at:
            blocker.block()
        return plain(name, inputs)

    adding.script.on_run = run
    version = load(adding, ensemble(adding, "e", chain("a", "b", "c", "d")))
    released: list[int] = []
    ticket, mailbox = adding.submit(0.0, model="e", release=lambda: released.append(1))
    blocker.wait_blocked()
    ticket.cancel()
    assert [type(item.error) for item in mailbox.responses] == [Cancelled]
    ticket.cancel()
    blocker.release()
    assert eventually(lambda: released == [1] and version.in_flight == 0)
    assert len(mailbox.responses) == 1
    assert adding.router.route("d", None).statistics().success.count == 0
    assert version.statistics().failures["CANCELED"] == 1


def test_a_cancel_while_a_step_waits_in_its_queue(adding: Any) -> None:
    blocker = adding.block_runs("b")
    version = load(adding, ensemble(adding, "e", chain("a", "b")))
    adding.submit(0.0, model="b")
    blocker.wait_blocked()
    ticket, mailbox = adding.submit(0.0, model="e")
    assert eventually(lambda: adding.router.route("b", None).statistics().pending_count == 1)
    ticket.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    assert eventually(lambda: version.in_flight == 0)
    blocker.release()


def test_cancels_at_random_moments_answer_once_and_release_once(adding: Any) -> None:
    version = load(adding, ensemble(adding, "e", chain("a", "b", "c", "d", "a", "b")))
    released: list[int] = []
    mailboxes = []
    for number in range(300):
        ticket, mailbox = adding.submit(0.0, model="e", release=lambda number=number: released.append(number))
        mailboxes.append(mailbox)
        for _ in range(number % 20 * 50):
            pass
        ticket.cancel()
    for mailbox in mailboxes:
        mailbox.final()
    assert eventually(lambda: version.in_flight == 0)
    assert sorted(released) == list(range(300))
    assert {len(mailbox.responses) for mailbox in mailboxes} == {1}
    told = version.statistics()
    assert told.success.count + told.failures["CANCELED"] == 300


def test_a_deadline_that_passed_is_refused_and_one_that_cannot_be_kept_fails_at_its_step(adding: Any) -> None:
    plain = adding.script.on_run
    adding.script.on_run = lambda name, inputs: (time.sleep(0.05) if name[0] == "b" else None, plain(name, inputs))[1]
    version = load(adding, ensemble(adding, "e", chain("a", "b", "c")))
    adding.submit(0.0, model="e")[1].final()
    with pytest.raises(DeadlineExceeded):
        adding.submit(0.0, model="e", deadline_ns=time.monotonic_ns() - 1)
    _, mailbox = adding.submit(0.0, model="e", deadline_ns=time.monotonic_ns() + 20_000_000)
    error = mailbox.final().error
    assert isinstance(error, DeadlineExceeded)
    assert eventually(lambda: version.in_flight == 0)
    assert adding.router.route("c", None).statistics().success.count == 1


def test_the_sum_of_the_steps_is_no_reason_to_refuse_early_and_no_step_runs_in_vain(adding: Any) -> None:
    """Nobody adds up the steps: side by side or not, each is refused by its own model when it could not end in time."""
    plain = adding.script.on_run
    adding.script.on_run = lambda name, inputs: (time.sleep(0.1), plain(name, inputs))[1]
    load(adding, ensemble(adding, "e", chain("a", "b", "c")))
    adding.submit(0.0, model="e")[1].final()
    _, mailbox = adding.submit(0.0, model="e", deadline_ns=time.monotonic_ns() + 150_000_000)
    error = mailbox.final().error
    assert isinstance(error, DeadlineExceeded)
    assert "step 2 (model 'b')" in str(error) or "step 1 (model 'a')" in str(error)
    assert eventually(lambda: adding.router.route("e", None).in_flight == 0)
    assert [adding.router.route(name, None).statistics().success.count for name in "bc"] == [1, 1]


def test_an_input_that_is_left_out_leaves_out_its_step_and_the_output_behind_it(adding: Any) -> None:
    steps = [("a", {"IN": "IN"}, {"OUT": "first"}), ("b", {"IN": "EXTRA"}, {"OUT": "second"})]
    spec = ensemble(
        adding, "e", steps, ["first", "second"],
        inputs=(InputSpec("IN", DType.FP32, (-1,)), InputSpec("EXTRA", DType.FP32, (-1,), is_optional=True)),
    )  # fmt: skip
    load(adding, spec)
    extra = Tensor("EXTRA", DType.FP32, np.ones((1, 1), np.float32))
    found = []
    for more in ({}, {"EXTRA": extra}):
        request = adding.request(0.0, model="e")
        request.inputs = {**request.inputs, **more}
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        adding.service.submit(request, answers.put)
        answer = answers.get(timeout=LIMIT_S)
        assert answer.error is None, answer.error
        found.append([item.name for item in answer.outputs])
    assert found == [["first"], ["first", "second"]]
    assert adding.router.route("b", None).statistics().success.count == 1


def test_a_request_that_is_failed_while_it_is_taken_up_keeps_its_inputs_until_they_are_not_read_any_more(
    adding: Any,
) -> None:
    version = load(adding, ensemble(adding, "e", chain("a", "b")))
    told: list[str] = []

    class Notes:
        """A trace of which the reading of the inputs is when the server's time to stop is over."""

        id = 1

        def begin(self, *what: Any) -> None:
            told.append("begin")
            assert version.abandon_waiting() == 1
            told.append("inputs read")

        def end(self, ns: int) -> None:
            told.append("end")

        def new_child(self) -> Notes:
            raise AssertionError("a step was begun")

    request = adding.request(model="e", release=lambda: told.append("released"))
    request.trace = Notes()
    answers: list[Any] = []
    adding.service.submit(request, answers.append)
    assert isinstance(answers[0].error, Draining)
    assert told == ["begin", "inputs read", "end", "released"]
    assert version.in_flight == 0


def test_a_full_queue_of_a_member_is_the_answer(adding: Any, new_blocker: Any) -> None:
    from edge_server.core.model_spec import DynamicBatching, QueuePolicy

    blocker = new_blocker()
    batching = DynamicBatching((1,), default_queue_policy=QueuePolicy(max_queue_size=1))
    adding.load(adding.spec("b", dynamic_batching=batching, max_batch_size=1), mark="x")
    adding.script.on_run = lambda name, inputs: (blocker.block() if name[0] == "b" else None, {"OUT": inputs["IN"]})[1]
    load(adding, ensemble(adding, "e", chain("a", "b"), max_batch_size=1))
    adding.submit(model="b")
    blocker.wait_blocked()
    adding.submit(model="b")
    _, mailbox = adding.submit(model="e")
    error = mailbox.final().error
    assert isinstance(error, QueueFull)
    assert "step 2 (model 'b')" in str(error)
    blocker.release(3)


def test_a_request_that_does_not_fit_the_ensemble_is_refused_at_once(adding: Any) -> None:
    load(adding, ensemble(adding, "e", chain("a", "b")))
    released: list[int] = []
    request = adding.request(model="e", release=lambda: released.append(1))
    request.inputs = {"IN": Tensor("IN", DType.FP64, np.zeros((1, 1)))}
    with pytest.raises(InvalidRequest, match="data-type is 'FP64', but model 'e' expects 'FP32'"):
        adding.service.submit(request, lambda response: None)
    assert released == [1]


# -- decoupled members ----------------------------------------------------------------------------------------------


class Many:
    """A decoupled member that sends 1, 2, 3 ... up to its input; `gone` counts the sent responses."""

    def __init__(self) -> None:
        self.sent = 0
        self.cancelled = threading.Event()

    def __call__(self, executions: Any) -> None:
        for execution in executions:
            for number in range(int(execution.request.inputs["IN"].array[0, 0])):
                if execution.is_cancelled():
                    self.cancelled.set()
                    break
                execution.send({"OUT": np.full((1, 1), number + 1, np.float32)})
                self.sent += 1
            execution.finish()


@pytest.fixture
def many(adding: Any) -> Many:
    """Model `many`, decoupled."""
    made = Many()
    adding.script.on_execute = made
    adding.load(adding.spec("many", is_decoupled=True))
    return made


def numbers(mailbox: Any) -> list[float]:
    mailbox.final()
    assert [item.error for item in mailbox.responses] == [None] * len(mailbox.responses)
    return [float(item.outputs[0].array[0, 0]) for item in mailbox.responses if item.outputs]


@pytest.mark.parametrize("count", [0, 1, 20])
def test_every_response_of_a_decoupled_member_goes_through_the_steps_behind_it_in_order(
    many: Many, adding: Any, count: int
) -> None:
    adding.script.on_execute = None
    adding.load(adding.spec("b", instances=3), mark="more")
    adding.script.on_execute = many
    version = load(adding, ensemble(adding, "e", chain("many", "b", "c")))
    assert version.spec.is_decoupled
    _, mailbox = adding.submit(float(count), model="e")
    assert numbers(mailbox) == [number + 111.0 for number in range(count)]
    assert [item.is_final for item in mailbox.responses] == [False] * count + [True]
    assert eventually(lambda: version.in_flight == 0)
    assert version.statistics().success.count == 1


def test_a_decoupled_member_of_a_member(many: Many, adding: Any) -> None:
    load(adding, ensemble(adding, "inner", chain("many", "b")))
    version = load(adding, ensemble(adding, "outer", chain("a", "inner", "many")))
    assert version.spec.is_decoupled
    _, mailbox = adding.submit(1.0, model="outer")
    assert numbers(mailbox) == [*(float(n + 1) for n in range(11)), *(float(n + 1) for n in range(12))]


def test_a_decoupled_step_does_not_run_ahead_of_its_bound(many: Many, adding: Any) -> None:
    adding.script.on_run = lambda name, inputs: {"OUT": inputs["IN"]}
    blocker = adding.block_runs()
    load(adding, ensemble(adding, "e", chain("many", "b"), max_inflight=3))
    _, mailbox = adding.submit(50.0, model="e")
    blocker.wait_blocked()
    b = adding.router.route("b", None)
    assert eventually(lambda: many.sent == 3 and b.in_flight == 3)
    for expected in range(4, 9):
        blocker.release()
        assert eventually(lambda: many.sent == expected and b.in_flight == 3)  # noqa: B023
    blocker.release(100)
    assert numbers(mailbox) == [number + 1.0 for number in range(50)]


def test_the_bound_of_an_ensemble_holds_over_all_its_requests(many: Many, adding: Any) -> None:
    """As in Triton, where each step of the ensemble has one limiter."""
    adding.script.on_execute = None
    adding.load(adding.spec("b", instances=3), mark="more")
    adding.script.on_execute = many
    adding.script.on_run = lambda name, inputs: {"OUT": inputs["IN"]}
    blocker, most = adding.block_runs(), []
    version = load(adding, ensemble(adding, "e", chain("many", "b"), max_inflight=2))
    b = adding.router.route("b", None)
    requests = [adding.submit(5.0, model="e") for _ in range(4)]
    cancelled, _ = requests.pop()
    blocker.wait_blocked()
    assert eventually(lambda: b.in_flight == 2)
    cancelled.cancel()
    for _ in range(15):
        most.append(b.in_flight)
        blocker.release()
    blocker.release(100)
    for _, mailbox in requests:
        assert numbers(mailbox) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert max(most) == 2
    assert eventually(lambda: version.in_flight == 0)


def test_steps_that_answer_at_once_do_not_nest_where_many_wait_for_a_slot() -> None:
    limiter, started = StepLimiter(1), []

    def start(number: int) -> None:
        started.append(number)
        limiter.give_back()

    assert limiter.take_slot(lambda: None)
    for number in range(5000):
        assert not limiter.take_slot(partial(start, number))
    limiter.give_back()
    assert started == list(range(5000))
    assert limiter.take_slot(lambda: None)


def test_a_cancel_reaches_a_decoupled_member_that_is_held_up(many: Many, adding: Any) -> None:
    blocker = adding.block_runs()
    version = load(adding, ensemble(adding, "e", chain("many", "b"), max_inflight=1))
    ticket, mailbox = adding.submit(1e7, model="e")
    blocker.wait_blocked()
    ticket.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    assert many.cancelled.wait(LIMIT_S)
    blocker.release(10)
    assert eventually(lambda: version.in_flight == 0)


# -- members that come, change and go -------------------------------------------------------------------------------


def test_an_ensemble_waits_for_members_that_are_being_loaded(core: Any) -> None:
    blocker = core.block_loads()
    inner, outer = ensemble(core, "inner", chain("m")), ensemble(core, "outer", chain("inner", "m"))
    desired = [
        DesiredModel(
            spec.name, {1: core.desired_version(spec)}, members=tuple((s.model, None) for s in spec.ensemble.steps)
        )
        for spec in (outer, inner)
    ]
    core.table.set_desired_state([*desired, DesiredModel("m", {1: core.desired_version(core.spec("m"))})])
    blocker.wait_blocked()
    assert {item.name: item.state for item in core.router.index()} == dict.fromkeys(("inner", "m", "outer"), "LOADING")
    assert not core.table.wait_settled(["outer"], 0)
    blocker.release()
    assert core.table.wait_settled(None, LIMIT_S)
    assert {item.name: item.state for item in core.router.index()} == dict.fromkeys(("inner", "m", "outer"), "READY")
    assert not [fields for kind, fields in core.events if kind == "model.failed"]
    order = [fields["model"] for kind, fields in core.events if kind == "model.ready"]
    assert order == ["m", "inner", "outer"]


def test_an_ensemble_without_a_member_says_which_and_serves_once_it_is_there(adding: Any) -> None:
    set_desired(adding, ensemble(adding, "e", chain("a", "late")))
    assert adding.table.wait_settled(["e"], LIMIT_S)
    assert state(adding, "e") == ("UNAVAILABLE", "ensemble 'e': step 2: model 'late' is not loaded")
    adding.script.on_open = lambda job: (_ for _ in ()).throw(LoadError("no luck"))
    adding.set_desired(adding.spec("late"))
    assert eventually(lambda: "model 'late' does not serve: no luck" in state(adding, "e")[1])
    adding.script.on_open = lambda job: None
    plain = adding.script.on_run
    adding.script.on_run = lambda name, inputs: plain("b" if name == "late_0" else name, inputs)
    adding.load(adding.spec("late"), mark="better")
    assert eventually(lambda: state(adding, "e") == ("READY", ""))
    _, mailbox = adding.submit(0.0, model="e")
    assert value(mailbox.final()) == 11.0


def test_the_reload_of_a_member_reloads_the_ensembles_of_it_and_of_them(adding: Any) -> None:
    load(adding, ensemble(adding, "inner", chain("a", "b")))
    load(adding, ensemble(adding, "outer", chain("inner", "c")))
    load(adding, ensemble(adding, "other", chain("c", "d")))
    before = {name: adding.router.route(name, None).generation for name in ("inner", "outer", "other")}
    adding.load(adding.spec("b"), mark="new")
    assert eventually(lambda: adding.router.route("outer", None).generation > before["outer"])
    assert adding.table.wait_settled(None, LIMIT_S)
    assert adding.router.route("inner", None).generation > before["inner"]
    assert adding.router.route("other", None).generation == before["other"]
    _, mailbox = adding.submit(0.0, model="outer")
    assert value(mailbox.final()) == 111.0


def test_a_member_that_does_not_fit_any_more_takes_the_ensemble_out_with_the_reason(adding: Any) -> None:
    load(adding, ensemble(adding, "e", chain("a", "b")))
    adding.load(adding.spec("b", inputs=(InputSpec("IN", DType.INT32, (-1,)),)), mark="int")
    assert eventually(lambda: state(adding, "e")[0] == "UNAVAILABLE" and "e" not in adding.router.serving_names())
    assert "step 2 (model 'b'): input 'IN' takes tensor 't1', a TYPE_FP32" in state(adding, "e")[1]
    with pytest.raises(EdgeServerError):
        adding.submit(0.0, model="e")
    adding.load(adding.spec("b"), mark="float")
    assert eventually(lambda: state(adding, "e") == ("READY", ""))


def test_a_broken_configuration_of_the_ensemble_itself_leaves_the_old_one_serving(adding: Any) -> None:
    load(adding, ensemble(adding, "e", chain("a", "b")))
    set_desired(adding, ensemble(adding, "e", chain("a", "absent")), mark="new")
    assert adding.table.wait_settled(["e"], LIMIT_S)
    told, reason = state(adding, "e")
    assert told == "READY"
    assert "an earlier generation serves" in reason
    _, mailbox = adding.submit(0.0, model="e")
    assert value(mailbox.final()) == 11.0


def test_an_ensemble_whose_files_change_while_its_members_reload_it_goes_on_serving(adding: Any) -> None:
    spec = ensemble(adding, "e", chain("a", "b"))
    plain, changes = adding.desired_version(spec), [ChangedWhileLoading("config.pbtxt changed before it was loaded")]

    def resolve(passed_over: Mapping[str, str]) -> Any:
        if adding.table.routes.get("e") is not None and changes:
            raise changes.pop()
        return plain.resolve(passed_over)

    adding.table.set_desired(DesiredModel("e", {1: DesiredVersion("a", resolve)}, members=(("a", None), ("b", None))))
    assert adding.table.wait_settled(["e"], LIMIT_S)
    old = adding.router.route("e", None)
    adding.load(adding.spec("b"), mark="new")
    assert eventually(lambda: not changes)
    for _ in range(200):  # as long as it takes until it is made anew, somebody answers
        _, mailbox = adding.submit(0.0, model="e")
        assert value(mailbox.final()) == 11.0
    assert eventually(lambda: adding.router.route("e", None) is not old)


def test_the_unload_of_a_member_first_drains_the_ensembles_of_it(adding: Any) -> None:
    blocker = adding.block_runs("a")
    load(adding, ensemble(adding, "e", chain("a", "b")))
    load(adding, ensemble(adding, "outer", chain("e", "c")))
    _, mailbox = adding.submit(0.0, model="outer")
    blocker.wait_blocked()
    adding.service.unload_model("b")
    assert eventually(lambda: "outer" not in adding.router.serving_names())
    assert adding.router.route("b", None).state.name == "READY", "a request on its way needs it"
    blocker.release()
    assert value(mailbox.final()) == 111.0
    assert eventually(lambda: state(adding, "b") == ("UNAVAILABLE", "unloaded"))
    assert eventually(lambda: state(adding, "e") == ("UNAVAILABLE", "ensemble 'e': step 2: model 'b' is not loaded"))
    assert eventually(lambda: "step 1: model 'e' does not serve: ensemble 'e': step 2" in state(adding, "outer")[1])
    assert state(adding, "a")[0] == "READY"
    with pytest.raises(UnknownModel):
        adding.submit(0.0, model="e")


def test_models_that_contain_each_other_are_refused_with_the_circle(adding: Any) -> None:
    first, second = ensemble(adding, "x", chain("y")), ensemble(adding, "y", chain("a", "x"))
    desired = [
        DesiredModel(
            spec.name, {1: adding.desired_version(spec)}, members=tuple((s.model, None) for s in spec.ensemble.steps)
        )
        for spec in (first, second)
    ]
    for wish in desired:
        adding.table.set_desired(wish)
    assert adding.table.wait_settled(["x", "y"], LIMIT_S)
    assert "'y' -> 'x' -> 'y'" in state(adding, "y")[1]
    adding.table.set_desired_state([*adding.desired.values(), *desired])
    assert adding.table.wait_settled(["x", "y"], LIMIT_S)


def test_loading_an_ensemble_loads_its_members_and_unloading_it_with_them_unloads_those(core: Any) -> None:
    specs = [ensemble(core, "outer", chain("inner", "c")), ensemble(core, "inner", chain("a", "b"))]
    for spec in specs:
        members = tuple((step.model, None) for step in spec.ensemble.steps)
        core.desired[spec.name] = DesiredModel(spec.name, {1: core.desired_version(spec)}, members=members)
    for name in "abc":
        core.desired[name] = DesiredModel(name, {1: core.desired_version(core.spec(name))})
    core.service.load_model("c")
    core.service.load_model("outer")
    assert core.router.serving_names() == ["a", "b", "c", "inner", "outer"]
    core.service.unload_model("outer")
    assert eventually(lambda: core.router.serving_names() == ["a", "b", "c", "inner"])
    core.service.load_model("outer")
    core.service.unload_model("outer", unload_dependents=True)
    assert eventually(lambda: core.router.serving_names() == ["c"])


def test_the_load_of_an_ensemble_with_a_broken_member_fails_with_the_members_reason(core: Any) -> None:
    spec = ensemble(core, "e", chain("a"))
    core.desired["e"] = DesiredModel("e", {1: core.desired_version(spec)}, members=(("a", None),))
    core.desired["a"] = DesiredModel("a", {1: core.desired_version(core.spec("a"))})
    core.script.on_open = lambda job: (_ for _ in ()).throw(LoadError("no luck"))
    with pytest.raises(LoadError, match=r"load failed for model 'e': .*step 1: model 'a' does not serve: no luck"):
        core.service.load_model("e")
    core.script.on_open = lambda job: None
    core.service.load_model("e")


def test_reloading_members_under_load_loses_no_request(adding: Any) -> None:
    load(adding, ensemble(adding, "e", chain("a", "b", "c")))
    stop = threading.Event()
    wrong: list[Any] = []
    counts = [0] * 4

    def work(index: int) -> None:
        while not stop.is_set():
            _, mailbox = adding.submit(0.0, model="e", may_run=index % 2 == 0)
            answer = mailbox.final()
            if answer.error is not None:
                wrong.append(answer.error)
            counts[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for number in range(30):
        adding.load(adding.spec("abc"[number % 3]), mark=f"mark {number}")
    assert adding.table.wait_settled(None, LIMIT_S)
    stop.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert wrong == []
    assert min(counts) > 0


def test_the_end_of_the_server_lets_requests_on_their_way_finish(adding: Any) -> None:
    blocker = adding.block_runs("a")
    load(adding, ensemble(adding, "inner", chain("a", "b")))
    load(adding, ensemble(adding, "e", chain("inner", "c", "d")))
    _, mailbox = adding.submit(0.0, model="e")
    blocker.wait_blocked()
    adding.service.stop_accepting()
    closing: list[bool] = []
    closer = threading.Thread(target=lambda: closing.append(adding.service.close(LIMIT_S)))
    closer.start()
    blocker.release()
    assert value(mailbox.final()) == 1111.0
    closer.join(LIMIT_S)
    assert closing == [True]
    assert {item.state for item in adding.router.index()} == {"UNAVAILABLE"}


def test_requests_that_do_not_end_in_time_are_failed_at_the_end_of_the_server(adding: Any) -> None:
    blocker = adding.block_runs()
    load(adding, ensemble(adding, "e", chain("a", "b")))
    _, mailbox = adding.submit(0.0, model="e")
    blocker.wait_blocked()
    assert not adding.service.close(0.0)
    assert isinstance(mailbox.final().error, Draining)
    blocker.release(10)


def test_admission_control_is_asked_for_each_member_and_not_for_the_ensemble(new_core: Any) -> None:
    class Counting:
        is_open = False
        allowed_fraction = 1.0

        def __init__(self) -> None:
            self.asked: list[str] = []

        def admit(self, spec: Any, request: Any, cost_s: float) -> float:
            self.asked.append(spec.name)
            return 0.0

        def correct_charge(self, charged_s: float, took_s: float) -> None: ...

    asked = Counting()
    core = new_core(admission=asked)
    for name in "ab":
        core.load(core.spec(name))
    load(core, ensemble(core, "e", chain("a", "b", "a")))
    core.submit(0.0, model="e")[1].final()
    assert asked.asked == ["a", "b", "a"]


def test_evicted_members_are_loaded_again_step_by_step(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    core.script.on_run = lambda name, inputs: {"OUT": inputs["IN"] + np.float32(1)}
    for name in "ab":
        core.set_desired(core.spec(name))
        assert core.table.wait_settled([name], LIMIT_S)
    load(core, ensemble(core, "e", chain("a", "b", "a")))
    _, mailbox = core.submit(0.0, model="e")
    assert value(mailbox.final()) == 3.0
