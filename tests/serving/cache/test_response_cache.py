"""The response cache in the serving core: hits, misses, counts, and responses that are never cached."""

from __future__ import annotations

import dataclasses
import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.device_tensor import DeviceArray, DeviceTensor
from edge_server.core.ensemble_and_sequence_spec import Ensemble, EnsembleStep, SequenceBatching
from edge_server.core.model_spec import DynamicBatching, InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response, SequenceStep
from edge_server.core.tensor import DType, Tensor
from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import BackendError, Cancelled, InvalidRequest, ServingFault, Throttled
from edge_server.serving.cache import worker_threads
from edge_server.serving.cache.local_store import LocalStore
from edge_server.serving.cache.response_cache import ResponseCache
from tests.kit.eventually import eventually

MIB = 1 << 20


@pytest.fixture
def cache() -> ResponseCache:
    return ResponseCache(LocalStore(MIB))


@pytest.fixture
def core(new_core: Any, cache: ResponseCache) -> Any:
    return new_core(cache=cache)


def ask(core: Any, value: float = 0.0, **more: Any) -> Any:
    _, mailbox = core.submit(value, **more)
    return mailbox.final()


def counts(version: Any) -> tuple[int, int, int, int]:
    """Return (answered, hits, misses, executions)."""
    found = version.statistics()
    return found.success.count, found.cache_hit.count, found.cache_miss.count, found.execution_count


@pytest.mark.parametrize("may_run", [False, True])
def test_the_second_equal_request_is_answered_without_an_execution(core: Any, may_run: bool) -> None:
    version = core.load(core.spec(is_cached=True))
    ran = len(core.script.ran)
    first = ask(core, 3.0, may_run=may_run)
    second = ask(core, 3.0, may_run=may_run, id="again")
    assert len(core.script.ran) - ran == 1
    np.testing.assert_array_equal(second.outputs[0].array, first.outputs[0].array)
    assert (second.request_id, second.version, second.is_final, second.spec.name) == ("again", 1, True, "m")
    assert counts(version) == (2, 1, 1, 1)
    found = version.statistics()
    assert (found.queue.count, found.compute_infer.count, found.inference_count) == (2, 1, 1)
    assert found.is_cached
    assert found.success.ns >= found.cache_hit.ns > 0
    assert found.cache_miss.ns > 0


def test_another_request_is_computed(core: Any) -> None:
    version = core.load(core.spec(is_cached=True))
    assert ask(core, 3.0).outputs[0].array[0, 0] == 3.0
    assert ask(core, 4.0).outputs[0].array[0, 0] == 4.0
    assert ask(core, 3.0, rows=2).outputs[0].array.shape == (2, 1)
    assert counts(version) == (3, 0, 3, 3)


def test_an_answer_that_its_receiver_writes_into_stays_as_it_was(core: Any) -> None:
    core.load(core.spec(is_cached=True))
    first = ask(core, 3.0).outputs[0].array
    first[:] = 9.0
    second = ask(core, 3.0).outputs[0].array
    with pytest.raises(ValueError, match="read-only"):
        second[:] = 9.0
    assert ask(core, 3.0).outputs[0].array[0, 0] == 3.0


def test_a_model_that_does_not_ask_for_the_cache_is_always_computed(core: Any, cache: ResponseCache) -> None:
    version = core.load(core.spec())
    ask(core, 3.0)
    ask(core, 3.0)
    assert counts(version) == (2, 0, 0, 2)
    assert cache.statistics().lookup.count == 0
    assert not version.statistics().is_cached


def test_without_a_cache_in_the_server_the_model_serves_and_says_so(new_core: Any) -> None:
    core = new_core()
    version = core.load(core.spec(is_cached=True))
    ask(core, 3.0)
    ask(core, 3.0)
    assert counts(version) == (2, 0, 0, 2)
    assert any("response_cache is enabled, but the server has no cache" in note for note in version.report().notes)


def test_a_reload_does_not_answer_from_the_old_file(core: Any) -> None:
    spec = core.spec(is_cached=True)
    core.load(spec, mark="a")
    assert ask(core, 3.0).outputs[0].array[0, 0] == 3.0
    core.script.on_run = lambda name, inputs: {"OUT": inputs["IN"] * 10}
    version = core.load(spec, mark="b")
    assert ask(core, 3.0).outputs[0].array[0, 0] == 30.0
    assert ask(core, 3.0).outputs[0].array[0, 0] == 30.0
    assert counts(version) == (2, 1, 1, 1)


def test_versions_and_models_do_not_share_answers(core: Any) -> None:
    core.script.on_run = lambda name, inputs: {"OUT": inputs["IN"] + len(name)}
    core.load(core.spec("m", is_cached=True), 1, 2)
    core.load(core.spec("mm", is_cached=True))
    executions = len(core.script.ran)
    for version in (1, 2):
        ask(core, 3.0, version=version)
    assert ask(core, 3.0, model="mm").outputs[0].array[0, 0] == 7.0
    assert len(core.script.ran) == executions + 3


def test_an_error_is_not_kept(core: Any) -> None:
    version = core.load(core.spec(is_cached=True))
    plain = core.script.on_run

    def fail(name: str, inputs: Any) -> Any:
        raise BackendError("not today")

    core.script.on_run = fail
    assert isinstance(ask(core, 3.0).error, BackendError)
    core.script.on_run = plain
    assert ask(core, 3.0).error is None
    assert counts(version) == (1, 0, 1, 1)


def test_a_request_that_does_not_fit_the_model_is_refused_before_the_lookup(core: Any, cache: ResponseCache) -> None:
    core.load(core.spec(is_cached=True))
    with pytest.raises(InvalidRequest):
        core.submit(3.0, rows=9)
    assert cache.statistics().lookup.count == 0


def test_an_answer_larger_than_the_cache_is_given_and_counted_but_not_kept(core: Any, cache: ResponseCache) -> None:
    version = core.load(core.spec(is_cached=True))
    ask(core, 3.0)
    for _ in range(2):
        assert ask(core, 1.0, width=MIB // 4).outputs[0].array.nbytes == MIB
    found = cache.statistics()
    assert found.losses["too_big"] == 2
    assert (found.entry_count, found.eviction_count) == (1, 0)
    assert counts(version) == (3, 0, 3, 3)


def test_a_request_of_a_sequence_is_not_looked_up(core: Any, cache: ResponseCache) -> None:
    core.load(core.spec(is_cached=True))
    for _ in range(2):
        assert ask(core, 3.0, sequence=SequenceStep(7, is_start=True)).error is None
    assert cache.statistics().lookup.count == 0


def test_a_decoupled_or_sequence_model_with_a_cache_does_not_load(core: Any) -> None:
    for what, more in (("decoupled", {"is_decoupled": True}), ("sequence", {"sequence": SequenceBatching()})):
        core.set_desired(core.spec(what, is_cached=True, **more))
        assert core.table.wait_settled([what], 20)
        assert f"response_cache.enable: expected false for a {what} model" in core.router.failure(what)


class Hot:
    """Admission control that refuses everything, and counts how often it was asked."""

    is_open = False
    allowed_fraction = 1.0
    refuses = False
    asked = 0

    def admit(self, spec: ModelSpec, request: Request, cost_s: float) -> float:
        self.asked += 1
        if self.refuses:
            raise Throttled("the box is HOT")
        return 0.0

    def correct_charge(self, charged_s: float, took_s: float) -> None: ...


def test_a_hit_is_neither_charged_nor_refused_by_a_hot_machine(new_core: Any, cache: ResponseCache) -> None:
    blocker = Hot()
    core = new_core(cache=cache, admission=blocker)
    core.load(core.spec(is_cached=True))
    ask(core, 3.0)
    blocker.refuses = True
    assert ask(core, 3.0).error is None
    assert blocker.asked == 1
    with pytest.raises(Throttled):
        core.submit(4.0)


def test_two_equal_requests_at_once_are_both_computed(core: Any, blocker: Any) -> None:
    version = core.load(core.spec(is_cached=True, instances=2))
    _, first = core.submit(3.0)
    _, second = core.submit(3.0)
    blocker.wait_blocked()
    blocker.wait_blocked()
    blocker.release(2)
    assert first.final().error is second.final().error is None
    assert counts(version) == (2, 0, 2, 2)
    assert ask(core, 3.0).error is None
    assert counts(version) == (3, 1, 2, 2)


def test_each_request_of_a_shared_batch_is_kept_for_itself(core: Any, blocker: Any) -> None:
    version = core.load(core.spec(is_cached=True, dynamic_batching=DynamicBatching((8,))))
    _, ahead = core.submit(0.0)
    blocker.wait_blocked()
    waiting = [core.submit(float(value))[1] for value in (1, 2, 3)]
    blocker.release(2)
    assert [item.final().outputs[0].array[0, 0] for item in (ahead, *waiting)] == [0, 1, 2, 3]
    executions = version.statistics().execution_count
    assert [ask(core, float(value)).outputs[0].array[0, 0] for value in (3, 2, 1, 0)] == [3, 2, 1, 0]
    assert executions == 2
    assert version.statistics().execution_count == 2


def test_a_hit_waits_for_its_turn_where_order_is_promised(core: Any, blocker: Any) -> None:
    batching = DynamicBatching((8,), preserve_ordering=True)
    core.load(core.spec(is_cached=True, dynamic_batching=batching))
    _, first = core.submit(1.0)
    blocker.wait_blocked()
    blocker.release()
    first.final()
    _, slow = core.submit(2.0)
    blocker.wait_blocked()
    _, hit = core.submit(1.0)
    assert not hit.responses
    blocker.release()
    assert slow.final().error is None
    assert hit.final().outputs[0].array[0, 0] == 1.0


def test_a_large_input_is_looked_up_on_another_thread_and_can_be_cancelled_before_it_is_computed(
    core: Any, cache: ResponseCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = core.load(core.spec(is_cached=True))
    reached, go_on = threading.Event(), threading.Event()
    plain = cache.get
    released = []

    def slow(key: bytes) -> Any:
        reached.set()
        assert go_on.wait(20)
        return plain(key)

    monkeypatch.setattr(cache, "get", slow)
    ran = len(core.script.ran)
    ticket, mailbox = core.submit(3.0, width=1 << 17, release=lambda: released.append(1))
    assert reached.wait(20)
    assert version.in_flight == 1
    ticket.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    assert released == []
    go_on.set()
    assert eventually(lambda: version.in_flight == 0)
    assert released == [1]
    assert len(core.script.ran) == ran
    assert len(mailbox.responses) == 1
    assert ask(core, 3.0, width=1 << 17).error is None
    assert ask(core, 3.0, width=1 << 17).error is None
    assert counts(version) == (2, 1, 1, 1)


def test_a_large_input_on_a_gpu_is_read_by_another_thread_than_the_one_that_brings_it(core: Any) -> None:
    readers: list[threading.Thread] = []

    class Piece:
        @property
        def view(self) -> memoryview:
            readers.append(threading.current_thread())
            return memoryview(np.full(1 << 17, 3, np.float32).tobytes())

    core.load(core.spec(is_cached=True))
    elements = DeviceArray(DType.FP32.numpy, (1, 1 << 17), (Piece(),))  # type: ignore[arg-type]
    request, answers = core.request(), queue.SimpleQueue()
    request.inputs = {"IN": DeviceTensor("IN", DType.FP32, elements)}
    core.service.submit(request, answers.put)
    assert answers.get(timeout=60).outputs[0].array[0, -1] == 3.0
    assert readers
    assert threading.current_thread() not in readers


def test_without_a_thread_to_look_a_large_input_up_it_is_computed_and_leaves_nothing_behind(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    version = core.load(core.spec(is_cached=True))
    monkeypatch.setattr(worker_threads, "threading", SimpleNamespace(Thread=Refused, Condition=threading.Condition))
    assert ask(core, 3.0, width=1 << 17).outputs[0].array[0, 0] == 3.0
    version.stop_accepting()
    version.drain()
    assert version.in_flight == 0


def test_a_version_is_not_closed_while_a_request_to_it_is_looked_up(
    core: Any, cache: ResponseCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.load(core.spec(is_cached=True))
    reached, go_on = threading.Event(), threading.Event()
    plain = cache.get

    def slow(key: bytes) -> Any:
        reached.set()
        assert go_on.wait(20)
        return plain(key)

    monkeypatch.setattr(cache, "get", slow)
    _, mailbox = core.submit(3.0, width=1 << 17)
    assert reached.wait(20)
    core.load(core.spec(is_cached=True), mark="b")
    assert not core.script.closed
    go_on.set()
    assert mailbox.final().outputs[0].array[0, 0] == 3.0


def test_a_failure_of_the_cache_costs_only_a_miss(
    core: Any, cache: ResponseCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core.load(core.spec(is_cached=True))

    def broken(*anything: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(cache, "store", broken)
    assert ask(core, 3.0).error is None
    monkeypatch.setattr(cache, "get", broken)
    assert ask(core, 3.0, width=1 << 17).outputs[0].array[0, 0] == 3.0
    assert "could not be stored" in caplog.text
    assert "could not be looked up" in caplog.text


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(0, 6000))
def test_a_server_with_a_cache_of_any_size_answers_as_one_without(asked: list, capacity: int) -> None:
    store = LocalStore(capacity)
    cache = ResponseCache(store)
    for number in asked:
        request = np.full((1, 1 + number * 20), number, np.float32)
        key = bytes([number]) * 32
        found = cache.get(key)
        if found is None:
            cache.store(key, Response("m", 1, "", (Tensor("OUT", DType.FP32, request * 2),)))
        else:
            np.testing.assert_array_equal(found.outputs[0].array, request * 2)
        assert store.contents()[1] <= capacity


def step(model: str, **maps: str) -> EnsembleStep:
    return EnsembleStep(model, None, {"IN": maps["takes"]}, {"OUT": maps["makes"]})


def pair(core: Any, **more: Any) -> ModelSpec:
    steps = (step("a", takes="IN", makes="MID"), step("b", takes="MID", makes="OUT"))
    spec = core.spec("both", ensemble=Ensemble(steps), is_cached=True, **more)
    return dataclasses.replace(spec, instance_groups=(), backend="", platform="ensemble")


def load_pair(core: Any, **more: Any) -> Any:
    core.load(core.spec("a"))
    core.load(core.spec("b", **more))
    spec = pair(core)
    members = (("a", None), ("b", None))
    core.table.set_desired(DesiredModel("both", {1: core.desired_version(spec)}, members=members))
    assert core.table.wait_settled(["both"], 20)
    assert core.router.failure("both") is None
    return core.router.route("both", None)


@pytest.mark.parametrize("width", [1, 1 << 17], ids=["at once", "on another thread"])
def test_an_ensemble_is_cached_as_a_whole_and_its_members_do_not_run_for_a_hit(core: Any, width: int) -> None:
    version = load_pair(core)
    ran = len(core.script.ran)
    released: list[int] = []
    for _ in range(3):
        answer = ask(core, 3.0, model="both", width=width, release=lambda: released.append(1))
        assert answer.outputs[0].array[0, 0] == 3.0
    assert len(core.script.ran) == ran + 2
    assert counts(version) == (3, 2, 1, 1)
    version.stop_accepting()
    version.drain()
    assert released == [1, 1, 1]


class LostPiece:
    """Memory of a GPU that went away."""

    device_id, address, byte_size = 0, 4096, 4

    @property
    def view(self) -> memoryview:
        raise ServingFault("failed to read CUDA shared memory region 'r': unspecified launch failure")


@pytest.mark.parametrize("model", ["both", "m"])
def test_a_request_whose_input_cannot_be_read_is_refused_and_keeps_no_version_from_its_end(
    core: Any, model: str
) -> None:
    version = load_pair(core) if model == "both" else core.load(core.spec(is_cached=True))
    elements = DeviceArray(DType.FP32.numpy, (1, 1), (LostPiece(),))  # type: ignore[arg-type]
    inputs = {"IN": DeviceTensor("IN", DType.FP32, elements)}
    released: list[int] = []
    request = dataclasses.replace(core.request(model=model), inputs=inputs, release=lambda: released.append(1))
    answers: list[Any] = []
    with pytest.raises(ServingFault, match="launch failure"):
        core.service.submit(request, answers.append)
    assert (released, answers, version.in_flight) == ([1], [], 0)
    assert ask(core, 3.0, model=model).outputs[0].array[0, 0] == 3.0


def test_an_ensemble_forgets_when_a_member_is_reloaded(core: Any) -> None:
    load_pair(core)
    ask(core, 3.0, model="both")
    core.script.on_run = lambda name, inputs: {"OUT": inputs["IN"] * 10}
    core.load(core.spec("b"), mark="new")
    assert core.table.wait_settled(["both"], 20)
    assert ask(core, 3.0, model="both").outputs[0].array[0, 0] == 300.0


def test_an_ensemble_of_members_that_cannot_be_cached_does_not_load(core: Any) -> None:
    core.load(core.spec("a"))
    core.script.on_execute = lambda executions: [item.finish() for item in executions]
    core.load(core.spec("b", is_decoupled=True))
    core.set_desired(pair(core))
    assert core.table.wait_settled(["both"], 20)
    assert "response_cache" in core.router.failure("both")


def test_parameters_of_a_request_matter_to_a_model_that_sees_requests(core: Any) -> None:
    def execute(executions: Any) -> None:
        for item in executions:
            factor = item.request.parameters.get("factor", 1)
            item.send({"OUT": item.request.inputs["IN"].array * factor}, is_final=True, parameters={"used": factor})

    core.script.on_execute = execute
    version = core.load(core.spec(is_cached=True))
    for _ in range(2):
        for factor in (1, 2):
            answer = ask(core, 3.0, parameters={"factor": factor})
            assert answer.outputs[0].array[0, 0] == 3.0 * factor
            assert answer.parameters["used"] == factor
    assert counts(version) == (4, 2, 2, 2)


def test_an_optional_input_of_text_is_part_of_the_key(core: Any, new_mailbox: Any) -> None:
    inputs = (InputSpec("IN", DType.BYTES, (1,)), InputSpec("MORE", DType.BYTES, (1,), is_optional=True))
    version = core.load(core.spec(is_cached=True, inputs=inputs, outputs=(OutputSpec("OUT", DType.BYTES, (1,)),)))

    for texts in ({"IN": b"a"}, {"IN": b"a", "MORE": b""}, {"IN": b"a"}, {"IN": b"b"}):
        tensors = {name: Tensor(name, DType.BYTES, np.array([[text]], object)) for name, text in texts.items()}
        mailbox = new_mailbox()
        core.service.submit(Request("m", tensors), mailbox)
        assert mailbox.final().error is None
    assert counts(version) == (4, 1, 3, 3)
