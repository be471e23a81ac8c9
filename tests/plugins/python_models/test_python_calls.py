"""Decoupled Python models, and Python models that call other models."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from edge_server.errors import Cancelled

DOUBLE = """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(given(request) * 2) for request in requests]
"""

CALLER = """
def ask(model, array, **more):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", array)], **more)

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            response = ask(TARGET, given(request)).exec()
            if response.has_error():
                answers.append(pb_utils.InferenceResponse(error=response.error()))
            else:
                answers.append(answer(pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy() + 1))
        return answers
"""

COUNTER = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(given(request)[0])):
                sender.send(answer([number]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

ISOLATION = 'parameters { key: "isolation" value { string_value: "process" } }'


def calling(target: str) -> str:
    return f"TARGET = '{target}'\n{CALLER}"


def test_a_model_calls_another_as_a_client_would(python_core: Any) -> None:
    python_core.add("double", DOUBLE)
    python_core.add("caller", calling("double"))
    assert python_core.value("caller", [5.0]) == [11.0]
    (counted,) = python_core.service.statistics("double", None)
    assert counted.success.count == 1


@pytest.mark.parametrize(
    ("target", "expected"), [("absent", "Request for unknown model: 'absent'"), ("counter", r"exec\(decoupled=True\)")]
)
def test_an_invalid_call_is_an_error_response(python_core: Any, decoupled: str, target: str, expected: str) -> None:
    python_core.add("counter", COUNTER, decoupled)
    python_core.add("caller", calling(target))
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(python_core.error("caller"))


@pytest.mark.parametrize("isolation", ["", ISOLATION], ids=["inside", "process"])
def test_a_thread_of_a_model_calls_another(python_core: Any, one_to_one: str, isolation: str) -> None:
    python_core.add("double", DOUBLE)
    python_core.add(
        "caller",
        """
        class TritonPythonModel:
            def execute(self, requests):
                (request,) = requests
                found = []
                def ask():
                    inner = pb_utils.InferenceRequest(model_name="double", requested_output_names=["OUT"],
                                                      inputs=[pb_utils.Tensor("IN", given(request))])
                    found.append(inner.exec().output_tensors()[0].as_numpy())
                threads = [threading.Thread(target=ask) for _ in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                return [answer(sum(found))]
        """,
        one_to_one + isolation,
    )
    assert python_core.value("caller", [5.0]) == [30.0]


def test_a_model_that_calls_itself_with_one_instance_gets_an_error_at_once(python_core: Any) -> None:
    python_core.add("caller", calling("caller"))
    assert "every instance of 'caller' is waiting" in python_core.error("caller")


def test_models_that_call_each_other_in_a_cycle_get_an_error(python_core: Any) -> None:
    python_core.add("a", calling("b"))
    python_core.add("b", calling("c"))
    python_core.add("c", calling("a"))
    assert "every instance of 'a' is waiting" in python_core.error("a")
    started = [python_core.start(name) for name in "abcabc"]
    assert all(final.wait(20) for _, final, _ in started)


def test_recursion_works_up_to_the_number_of_instances(python_core: Any) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            (request,) = requests
            depth = given(request)
            if depth[0] == 0:
                return [answer([0])]
            inner = pb_utils.InferenceRequest(
                model_name="m", requested_output_names=[], inputs=[pb_utils.Tensor("IN", depth - 1)])
            response = inner.exec()
            if response.has_error():
                return [pb_utils.InferenceResponse(error=response.error())]
            return [answer(response.output_tensors()[0].as_numpy() + 1)]
    """
    config = """
    input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
    instance_group { count: 3 }
    """
    python_core.add("m", code, config)
    assert python_core.value("m", [2.0]) == [2.0]
    assert "every instance of 'm'" in python_core.error("m", [3.0])
    assert python_core.value("m", [2.0]) == [2.0]


def test_concurrent_calls_run_in_parallel(python_core: Any) -> None:
    config = """
    input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
    instance_group { count: 2 }
    """
    python_core.add(
        "meet",
        """
        class TritonPythonModel:
            def execute(self, requests):
                # Both instances must be running at the same time to get past this.
                barrier = sys.modules["tests_barrier"].barrier
                barrier.wait(20)
                return [answer(given(request)) for request in requests]
        """,
        config,
    )
    python_core.add(
        "caller",
        """
        class TritonPythonModel:
            async def execute(self, requests):
                calls = [
                    pb_utils.InferenceRequest(
                        model_name="meet", requested_output_names=["OUT"],
                        inputs=[pb_utils.Tensor("IN", np.array([number], dtype=np.float32))]).async_exec()
                    for number in (1, 2)
                ]
                responses = await asyncio.gather(*calls)
                return [answer(np.concatenate([r.output_tensors()[0].as_numpy() for r in responses]))]
        """,
    )
    module = types.ModuleType("tests_barrier")
    module.barrier = threading.Barrier(2)  # type: ignore[attr-defined]
    sys.modules["tests_barrier"] = module
    try:
        assert python_core.value("caller") == [1.0, 2.0]
    finally:
        del sys.modules["tests_barrier"]


def test_a_coroutine_that_awaits_itself_gets_an_error(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            async def execute(self, requests):
                inner = pb_utils.InferenceRequest(
                    model_name="m", requested_output_names=[], inputs=requests[0].inputs())
                response = await inner.async_exec()
                return [pb_utils.InferenceResponse(error=response.error())]
        """,
    )
    assert "every instance of 'm' is waiting" in python_core.error("m")


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_decoupled_model_sends_any_number_of_responses(python_core: Any, decoupled: str, count: int) -> None:
    python_core.add("counter", COUNTER, decoupled)
    responses = python_core.ask("counter", [count])
    assert [item.outputs[0].array.tolist() for item in responses[:-1]] == [[float(n)] for n in range(count)]
    assert responses[-1].is_empty


def test_a_decoupled_model_responds_later_from_other_threads(python_core: Any, decoupled: str) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.waiting = []
            def execute(self, requests):
                for request in requests:
                    self.waiting.append((request.get_response_sender(), given(request)))
                if len(self.waiting) == 2:
                    threading.Thread(target=self.release).start()
            def release(self):
                for sender, array in reversed(self.waiting):
                    error = pb_utils.TritonError("first", pb_utils.TritonError.NOT_FOUND)
                    sender.send(pb_utils.InferenceResponse(error=error))
                    sender.send(answer(array), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        decoupled,
    )
    started = [python_core.start("m", [float(number)]) for number in (1, 2)]
    for number, (responses, final, _) in zip((1, 2), started, strict=True):
        assert final.wait(20)
        assert responses[0].error.message == "first"
        assert responses[1].outputs[0].array.tolist() == [float(number)]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", "let go of the request without a final response"),
        ("requests[0].get_response_sender().send(answer([1]))", "let go of the request without a final response"),
        ("return [answer([1])]", "is decoupled, so execute must return None"),
        ("requests[0].get_response_sender().send()", "must be provided when the response flags is set to zero"),
        (
            "sender = requests[0].get_response_sender(); sender.send(flags=1); sender.send(flags=1)",
            "",
        ),
    ],
)
def test_an_erroneous_decoupled_model_leaves_no_caller_waiting(
    python_core: Any, decoupled: str, code: str, expected: str
) -> None:
    python_core.add(
        "m",
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                {code}
        """,
        decoupled,
    )
    last = python_core.ask("m")[-1]
    assert (last.error.message if last.error else "").find(expected) >= 0


def test_coroutines_of_a_decoupled_model_run_concurrently(python_core: Any, decoupled: str) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.arrived = 0
            async def execute(self, requests):
                for request in requests:
                    sender = request.get_response_sender()
                    self.arrived += 1
                    while self.arrived < 3:
                        await asyncio.sleep(0.001)
                    if given(request)[0] == 0:
                        raise ValueError("one of three")
                    sender.send(answer(given(request)), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        decoupled,
    )
    started = [python_core.start("m", [float(number)]) for number in range(3)]
    assert all(final.wait(20) for _, final, _ in started)
    assert "one of three" in started[0][0][0].error.message
    assert [responses[0].outputs[0].array.tolist() for responses, _, _ in started[1:]] == [[1.0], [2.0]]


def test_responses_of_a_decoupled_model_are_iterated_as_they_arrive(python_core: Any, decoupled: str) -> None:
    python_core.add("counter", COUNTER, decoupled)
    python_core.add(
        "caller",
        """
        class TritonPythonModel:
            def execute(self, requests):
                request = pb_utils.InferenceRequest(
                    model_name="counter", requested_output_names=["OUT"], inputs=requests[0].inputs())
                responses = request.exec(decoupled=True)
                found = [r.output_tensors()[0].as_numpy() for r in responses if r.output_tensors()]
                return [answer(np.concatenate(found))]
        """,
    )
    assert python_core.value("caller", [4.0]) == [0.0, 1.0, 2.0, 3.0]


FLAG_BESIDE_THE_LAST = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(given(request)[0])
            for number in range(count):
                is_last = number == count - 1
                sender.send(answer([number]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0)
"""
FAILING_AT_LAST = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(answer([0]))
            error = pb_utils.InferenceResponse(error=pb_utils.TritonError("no more"))
            sender.send(error, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNTING_CALLER = """
def seen(responses):
    # -1: neither tensors nor an error; -2: an error.
    found = []
    for response in responses:
        assert not response.parameters() or response.parameters() == "{}"
        if response.has_error():
            found.append(-2)
        elif not response.output_tensors():
            assert response.error() is None
            assert pb_utils.get_output_tensor_by_name(response, "OUT") is None
            found.append(-1)
        else:
            found.append(pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()[0])
    assert next(responses, None) is None, "the iterator stays at its end"
    return answer(np.array(found, np.float32))

def asked(request):
    return pb_utils.InferenceRequest(
        model_name="called", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", given(request))])
"""
WAITING = (
    COUNTING_CALLER
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [seen(asked(request).exec(decoupled=True)) for request in requests]
"""
)
AWAITING = (
    COUNTING_CALLER
    + """
class TritonPythonModel:
    async def execute(self, requests):
        return [seen(await asked(request).async_exec(decoupled=True)) for request in requests]
"""
)


# In a process, one of the two ways to call is enough for the fast part: both end in the same messages to the server.
@pytest.mark.parametrize(
    ("caller", "isolation"),
    [
        pytest.param(WAITING, "", id="exec-inside"),
        pytest.param(AWAITING, "", id="async_exec-inside"),
        pytest.param(WAITING, ISOLATION, id="exec-process", marks=pytest.mark.full),
        pytest.param(AWAITING, ISOLATION, id="async_exec-process"),
    ],
)
def test_only_a_stream_that_ends_with_the_final_flag_has_an_empty_last_response(
    python_core: Any, one_to_one: str, decoupled: str, caller: str, isolation: str
) -> None:
    python_core.add("caller", caller, one_to_one + isolation)
    python_core.add("called", COUNTER, decoupled + isolation)
    assert python_core.value("caller", [3.0]) == [0.0, 1.0, 2.0, -1.0]
    assert python_core.value("caller", [0.0]) == [-1.0]
    python_core.add("called", FLAG_BESIDE_THE_LAST, decoupled)
    assert python_core.value("caller", [3.0]) == [0.0, 1.0, 2.0]
    python_core.add("called", FAILING_AT_LAST, decoupled)
    assert python_core.value("caller", [1.0]) == [0.0, -2.0]
    python_core.add("called", DOUBLE, one_to_one)
    assert python_core.value("caller", [3.0]) == [6.0]
    python_core.service.unload_model("called")
    assert python_core.value("caller", [3.0]) == [-2.0]


ENDLESS = """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        threading.Thread(target=self.run, args=(request.get_response_sender(),)).start()
    def run(self, sender):
        number = 0
        while not sender.is_cancelled():
            sender.send(answer([number]))
            number += 1
            time.sleep(0.001)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_cancelling_the_caller_cancels_its_calls(
    python_core: Any, decoupled: str, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    python_core.add("endless", ENDLESS, decoupled)
    python_core.add(
        "caller",
        """
        class TritonPythonModel:
            def execute(self, requests):
                request = pb_utils.InferenceRequest(
                    model_name="endless", requested_output_names=["OUT"], inputs=requests[0].inputs())
                last = None
                for last in request.exec(decoupled=True):
                    pass
                return [pb_utils.InferenceResponse(error=last.error())]
        """,
    )
    responses, final, ticket = python_core.start("caller")
    assert eventually(lambda: any("(run)" in thread.name for thread in threading.enumerate()))
    ticket.cancel()
    assert final.wait(20)
    assert isinstance(responses[-1].error, Cancelled)
    python_core.service.unload_model("endless")
    assert eventually(lambda: not any("(run)" in thread.name for thread in threading.enumerate()))


def test_a_deadline_applies_to_nested_calls(python_core: Any) -> None:
    python_core.add(
        "inner",
        """
        class TritonPythonModel:
            def execute(self, requests):
                time.sleep(0.3)
                return [answer(given(request)) for request in requests]
        """,
    )
    python_core.add("caller", calling("inner"))
    assert python_core.value("inner") == [1.0]
    assert "deadline" in python_core.error("caller", deadline_ns=time.monotonic_ns() + 100_000_000)


def test_a_model_loads_and_unloads_another(python_core: Any) -> None:
    python_core.write("double", DOUBLE)
    python_core.add(
        "keeper",
        """
        class TritonPythonModel:
            def execute(self, requests):
                said = [pb_utils.is_model_ready("double"), pb_utils.is_model_ready("absent")]
                pb_utils.load_model("double")
                said += [pb_utils.is_model_ready("double"), pb_utils.is_model_ready("double", "1")]
                pb_utils.unload_model("double")
                said.append(pb_utils.is_model_ready("double"))
                try:
                    pb_utils.load_model("absent")
                except pb_utils.TritonModelException:
                    said.append(True)
                return [answer(said)]
        """,
    )
    assert python_core.value("keeper") == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]


ENSEMBLE = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] } output { name: "OTHER" data_type: TYPE_FP32 dims: [-1] }
ensemble_scheduling {
  step { model_name: "loop" model_version: -1 input_map { key: "IN" value: "IN" }
         output_map { key: "OUT" value: "OUT" } }
  step { model_name: "plain" model_version: -1 input_map { key: "IN" value: "IN" }
         output_map { key: "OUT" value: "OTHER" } }
}
"""

IN_CIRCLES = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            if given(request)[0] <= 0:
                found.append(answer(given(request)))
                continue
            inner = pb_utils.InferenceRequest(
                model_name="circle", requested_output_names=[WANTED],
                inputs=[pb_utils.Tensor("IN", given(request) - 1)])
            response = inner.exec()
            if response.has_error():
                found.append(pb_utils.InferenceResponse(error=response.error()))
            else:
                found.append(answer(response.output_tensors()[0].as_numpy() + 1))
        return found
"""


CIRCLES = [("OUT", 1, 1.0, None), ("OUT", 2, 1.0, 1.0), ("OUT", 2, 2.0, None), ("OTHER", 1, 1.0, 10.0 + 1)]


# The rule is the core's, in which all cases run; of models in processes, one that is answered and one that is not.
@pytest.mark.parametrize(
    ("isolation", "wanted", "instances", "value", "expected"),
    [
        *(pytest.param("", *case, id=f"inside-{case[0]}-{case[1]}-{case[2]}") for case in CIRCLES),
        *(
            pytest.param(
                ISOLATION, *case, id=f"process-{case[0]}-{case[1]}-{case[2]}",
                marks=pytest.mark.full if case[1] == 2 else [],
            )
            for case in CIRCLES
        ),
    ],
)  # fmt: skip
def test_a_model_that_calls_itself_through_an_ensemble_never_waits_forever(
    python_core: Any, isolation: str, wanted: str, instances: int, value: float, expected: float | None
) -> None:
    tensors = """
    input { name: "IN" data_type: TYPE_FP32 dims: [-1] } output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
    """
    python_core.add("plain", """
        class TritonPythonModel:
            def execute(self, requests):
                return [answer(given(request) + 10) for request in requests]
        """)  # fmt: skip
    group = f"instance_group {{ count: {instances} kind: KIND_CPU }}"
    python_core.add("loop", f"WANTED = {wanted!r}" + IN_CIRCLES, tensors + group + isolation)
    (python_core.path / "circle" / "1").mkdir(parents=True)
    (python_core.path / "circle" / "config.pbtxt").write_text(ENSEMBLE)
    python_core.service.load_model("circle")
    if expected is None:
        words = python_core.error("loop", [value])
        assert "model 'loop' called ensemble 'circle'" in words
        assert "nobody is left to answer" in words
    else:
        assert python_core.value("loop", [value]) == [expected]
