"""Python models in the server's process: inputs, responses, errors, and what remains after an unload."""

from __future__ import annotations

import gc
import json
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.core.request_response import SequenceStep
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ErrorCode, LoadError, NotFound
from edge_server.plugins.python_models import coroutine_loop
from edge_server.plugins.python_models.health_check import HealthCheck

BATCHED = """
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [1] }
dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: [2] }
"""

DOUBLE = """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(given(request) * 2) for request in requests]
"""


def test_a_model_gets_tritons_arguments_and_responds_in_order(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                assert all(type(key) is type(value) is str for key, value in args.items())
                config = json.loads(args["model_config"])
                assert config["name"] == args["model_name"] == "m"
                assert pb_utils.get_input_config_by_name(config, "IN")["data_type"] == "TYPE_FP32"
                assert not pb_utils.using_decoupled_model_transaction_policy(config)
                self.args = sorted(args)
                self.thread = threading.get_ident()

            def execute(self, requests):
                assert threading.get_ident() == self.thread
                (request,) = requests
                said = {
                    "args": self.args, "id": request.request_id(), "correlation": request.correlation_id(),
                    "flags": request.flags(), "timeout": request.timeout(), "name": request.model_name(),
                    "version": request.model_version(), "outputs": request.requested_output_names(),
                    "parameters": json.loads(request.parameters()), "cancelled": request.is_cancelled(),
                    "memory": type(request.preferred_memory()).__name__, "trace": request.trace().get_context(),
                }
                return [answer(given(request), parameters={"said": json.dumps(said)})]
        """,
    )
    step = SequenceStep("cam", is_start=True, is_end=True)
    (response,) = python_core.ask(
        "m", [3.0], id="seven", parameters={"a": 1, "b": "x", "c": 0.5, "d": True}, sequence=step, timeout_us=9_000_000
    )
    assert response.outputs[0].array.tolist() == [3.0]
    assert response.parameters["said"] is not None
    assert json.loads(str(response.parameters["said"])) == {
        "args": [
            "model_config", "model_instance_device_id", "model_instance_kind", "model_instance_name", "model_name",
            "model_repository", "model_version",
        ],
        "id": "seven", "correlation": "cam", "flags": 3, "timeout": 9_000_000, "name": "m", "version": 1,
        "outputs": ["OUT"], "parameters": {"a": 1, "b": "x", "c": 0.5, "d": True}, "cancelled": False,
        "memory": "PreferredMemory", "trace": None,
    }  # fmt: skip


WARMED = """
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [1] }
model_warmup {
  name: "three readings"
  batch_size: 1
  inputs { key: "IN" value { data_type: TYPE_FP32 dims: [3] random_data: true } }
}
"""

MEAN = """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(given(request).mean(axis=1, keepdims=True)) for request in requests]
"""


def test_model_warmup_keeps_the_old_file_in_service_if_execute_of_the_new_one_fails(python_core: Any) -> None:
    python_core.add("m", MEAN, WARMED)
    reason = r"NameError: name 'givn' is not defined \(model.py, line 14\)"
    with pytest.raises(LoadError, match=f"'three readings'.*{reason}"):
        python_core.add("m", MEAN.replace("given(", "givn("), WARMED)
    assert python_core.value("m", [[1.0, 2.0, 6.0]]) == [[3.0]]


def test_without_model_warmup_a_mistake_in_execute_fails_each_request_of_the_new_file(python_core: Any) -> None:
    config = WARMED.partition("model_warmup")[0]
    python_core.add("m", MEAN, config)
    python_core.add("m", MEAN.replace("given(", "givn("), config)
    assert "NameError: name 'givn' is not defined (model.py, line 14)" in python_core.error("m", [[1.0, 2.0, 6.0]])
    (statistics,) = python_core.service.statistics("m", None)
    assert statistics.fail.count == 1


def test_requests_of_one_batch_fail_or_succeed_independently(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                answers = []
                for request in requests:
                    if given(request)[0, 0] < 0:
                        error = pb_utils.TritonError("no negatives", pb_utils.TritonError.NOT_FOUND)
                        answers.append(pb_utils.InferenceResponse(error=error))
                    else:
                        answers.append(answer(given(request) + len(requests)))
                return answers
        """,
        BATCHED,
    )
    good, good_final, _ = python_core.start("m", [[5.0]])
    bad, bad_final, _ = python_core.start("m", [[-5.0]])
    assert good_final.wait(20)
    assert bad_final.wait(20)
    assert good[0].outputs[0].array.tolist() == [[7.0]]
    assert isinstance(bad[0].error, NotFound)
    assert bad[0].error.message == "no negatives"


@pytest.mark.parametrize("code", ["UNKNOWN", "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "CANCELLED"])
def test_the_code_of_an_error_reaches_the_caller(python_core: Any, code: str) -> None:
    python_core.add(
        "m",
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse(error=pb_utils.TritonError("so", pb_utils.TritonError.{code}))]
        """,
    )
    error = python_core.ask("m")[0].error
    assert error.code is ErrorCode[code]


WRONG = {
    "a number": ("return 7", "execute must return a list, got int"),
    "too few": ("return []", "execute returned 0 responses to 1 requests"),
    "a string": ("return ['x']", "request 'r1': execute must return an InferenceResponse for each request, got str"),
    "nothing": ("return None", "request 'r1': execute returned None instead of an InferenceResponse; expected a list"),
    "an exception": ("raise ValueError('bad')", r"model 'm': ValueError: bad \(model.py, line 14\)"),
    "the exception": ("raise pb_utils.TritonModelException('bad')", r"model 'm': bad \(model.py, line 14\)"),
    "the end": ("sys.exit(3)", "model 'm': SystemExit: 3"),
    "an interrupt": ("raise KeyboardInterrupt()", "model 'm': KeyboardInterrupt"),
    "no array": ("pb_utils.Tensor('OUT', [1.0])", "TypeError: tensor 'OUT': expected a numpy array, got list"),
    "twice": (
        "t = pb_utils.Tensor('OUT', np.zeros(1, 'f4')); return [pb_utils.InferenceResponse([t, t])]",
        "output 'OUT' is there twice",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_of_a_model_is_reported_and_fails_only_its_batch(python_core: Any, case: str) -> None:
    action, expected = WRONG[case]
    python_core.add(
        "m",
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                if given(requests[0])[0] == 0: {action}
                return [answer(given(request)) for request in requests]
        """,
    )
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(python_core.error("m", [0.0], id="r1"))
    assert python_core.value("m", [4.0]) == [4.0]


@pytest.mark.parametrize(
    ("value", "is_batched", "given"),
    [
        ("np.zeros((1, 2))", False, "FP64 [1, 2]"),
        ("np.zeros((1, 2), np.float32)", False, "FP32 [1, 2]"),
        ("np.zeros((1, 2), np.float32)", True, "FP32 [1, 2]"),
        ("np.zeros(3, np.float32)", True, "FP32 [3]"),
        ("np.array('text', object)", False, "BYTES []"),
    ],
    ids=["type", "rank", "size", "no batch", "scalar"],
)
def test_an_output_of_another_type_or_shape_than_declared_is_answered_with_one_warning(
    python_core: Any, caplog: pytest.LogCaptureFixture, value: str, is_batched: bool, given: str
) -> None:
    """As by Triton's Python backend, which compares neither."""
    declared = f"dims: [{3 if is_batched else -1}]"
    python_core.add(
        "m",
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", {value})]) for _ in requests]
        """,
        f'max_batch_size: {8 if is_batched else 0} input {{ name: "IN" data_type: TYPE_FP32 dims: [3] }}'
        f' output {{ name: "OUT" data_type: TYPE_FP32 {declared} }}',
    )
    row = [1.0, 2.0, 3.0]
    for _ in range(2):
        (response,) = python_core.ask("m", [row] if is_batched else row)
        assert response.error is None
        (tensor,) = response.outputs
        assert f"{tensor.dtype.value} {list(tensor.shape)}" == given
    expected = f"output 'OUT' was answered as {given}, but its configuration promises FP32 "
    assert sum(expected in line for line in caplog.messages) == 1
    (report,) = python_core.service.instance_reports()
    assert [line for line in report.warnings if line.startswith(expected)] == list(report.warnings)
    assert len(report.warnings) == 1


def test_undeclared_and_unrequested_outputs_are_omitted(python_core: Any, caplog: pytest.LogCaptureFixture) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                extra = pb_utils.Tensor("EXTRA", np.zeros(1))
                return [pb_utils.InferenceResponse([extra, pb_utils.Tensor("OUT", given(r))]) for r in requests]
        """,
    )
    with caplog.at_level(logging.WARNING):
        (response,) = python_core.ask("m")
        python_core.ask("m")
    assert [tensor.name for tensor in response.outputs] == ["OUT"]
    assert sum("'EXTRA', which its configuration does not declare" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    "dtype",
    [
        "str",
        pytest.param(
            "np.dtypes.StringDType()",
            marks=pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 2 has strings of any length"),
        ),
    ],
)
def test_strings_come_as_bytes_and_leave_as_utf8(dtype: str, python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                words = requests[0].inputs()[0].as_numpy()
                assert words.dtype == object and all(type(word) is bytes for word in words.flat)
                assert list(pb_utils.deserialize_bytes_tensor(pb_utils.serialize_byte_tensor(words))) == list(words)
                text = np.array([word.decode() + "ß" for word in words], TYPE)
                assert pb_utils.serialize_byte_tensor(text)[4:7] == "aß".encode()
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)])]
        """.replace("TYPE)", f"{dtype})"),
        """
        input { name: "IN" data_type: TYPE_STRING dims: [-1] }
        output { name: "OUT" data_type: TYPE_STRING dims: [-1] }
        """,
    )
    words = np.array([b"a", b"", "grüß".encode()], dtype=object)
    (response,) = python_core.ask("m", inputs={"IN": Tensor("IN", DType.BYTES, words)})
    assert response.outputs[0].array.tolist() == ["aß".encode(), "ß".encode(), "grüßß".encode()]


def test_bf16_is_passed_by_dlpack_and_not_by_numpy(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                given = requests[0].inputs()[0]
                try:
                    given.as_numpy()
                except pb_utils.TritonModelException:
                    pass
                else:
                    raise AssertionError("numpy has no bfloat16")
                assert given.triton_dtype() == 14 and given.is_cpu()
                return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", given.to_dlpack())])]
        """,
        """
        input { name: "IN" data_type: TYPE_BF16 dims: [-1] }
        output { name: "OUT" data_type: TYPE_BF16 dims: [-1] }
        """,
    )
    bits = np.array([0x3F80, 0xC000], dtype=np.uint16)
    (response,) = python_core.ask("m", inputs={"IN": Tensor("IN", DType.BF16, bits)})
    assert response.outputs[0].dtype is DType.BF16
    assert response.outputs[0].array.tolist() == bits.tolist()


def test_writes_of_a_model_to_its_inputs_are_private(python_core: Any) -> None:
    code = """
        class TritonPythonModel:
            def execute(self, requests):
                array = given(requests[0])
                array *= 2
                return [answer(array)]
        """
    python_core.add("m", code)
    array = np.array([3.0], dtype=np.float32)
    array.flags.writeable = False
    (response,) = python_core.ask("m", inputs={"IN": Tensor("IN", DType.FP32, array)})
    assert (response.outputs[0].array.tolist(), array.tolist()) == ([6.0], [3.0])
    views = 'parameters { key: "read_only_inputs" value { string_value: "true" } }'
    python_core.add(
        "views",
        code,
        f"""
        input {{ name: "IN" data_type: TYPE_FP32 dims: [-1] }}
        output {{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }}
        {views}
        """,
    )
    assert "read_only_inputs" in python_core.error("views")


def test_a_response_is_copied_before_the_model_can_change_it(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.buffer = np.zeros(1, dtype=np.float32)
            def execute(self, requests):
                self.buffer[:] = given(requests[0])
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.buffer[:])])]
        """,
    )
    first = python_core.ask("m", [1.0])[0].outputs[0].array
    second = python_core.ask("m", [2.0])[0].outputs[0].array
    assert (first.tolist(), second.tolist()) == ([1.0], [2.0])


def test_modules_beside_a_model_are_its_own(python_core: Any) -> None:
    for name, number in (("a", 1), ("b", 2)):
        folder = python_core.write(
            name,
            """
            import helper
            import inner.part
            from inner import part as again
            from .helper import NUMBER
            from above import ABOVE
            class TritonPythonModel:
                def execute(self, requests):
                    import late
                    assert helper.NUMBER == NUMBER and again is inner.part
                    return [answer([helper.NUMBER + inner.part.MORE + late.LATE + ABOVE])]
            """,
        )
        (folder / "inner").mkdir()
        (folder / "inner" / "__init__.py").write_text("")
        (folder / "inner" / "part.py").write_text("import helper\nMORE = helper.NUMBER * 10\n")
        (folder / "helper.py").write_text(f"NUMBER = {number}\n")
        (folder / "late.py").write_text("LATE = 100\n")
        (folder.parent / "above.py").write_text("ABOVE = 1000\n")
        (folder / "json.py").write_text("raise AssertionError('the standard library means itself')\n")
        before = list(sys.path)
        python_core.service.load_model(name)
        assert sys.path == before
    assert python_core.value("a") == [1111.0]
    assert python_core.value("b") == [1122.0]
    assert not any(name in sys.modules for name in ("helper", "inner", "late", "above"))
    assert not list(python_core.path.rglob("__pycache__"))


def test_each_instance_has_its_own_object_module_and_thread(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        opened = []
        class TritonPythonModel:
            def initialize(self, args):
                opened.append(args["model_instance_name"])
                self.thread = threading.get_ident()
            def execute(self, requests):
                assert len(opened) == 1 and threading.get_ident() == self.thread
                time.sleep(0.05)
                return [answer(np.array([self.thread % 1_000_003])) for request in requests]
        """,
        """
        input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
        output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
        instance_group { count: 3 }
        """,
    )
    started = [python_core.start("m") for _ in range(12)]
    assert all(final.wait(20) for _, final, _ in started)
    assert len({responses[0].outputs[0].array.tobytes() for responses, _, _ in started}) == 3


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("class Other: pass", "no class TritonPythonModel"),
        ("class TritonPythonModel: pass", "no method execute"),
        ("def (", r"SyntaxError: .* \(model.py, line 11\)"),
        ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        (
            "class TritonPythonModel:\n    def initialize(self, args): raise ValueError('no weights')\n"
            "    def execute(self, requests): pass",
            r"model 'm' version 1, file 'model.py': ValueError: no weights \(model.py, line 12\)",
        ),
        (
            "class TritonPythonModel:\n    def initialize(self, a): sys.exit()\n    def execute(self, requests): pass",
            "SystemExit",
        ),
    ],
)
def test_a_model_that_fails_to_load_has_its_reason_and_leaves_nothing(
    python_core: Any, code: str, expected: str
) -> None:
    python_core.write("m", code)
    with pytest.raises(LoadError, match=expected):
        python_core.service.load_model("m")
    assert [name for name in sys.modules if name.startswith("_edge_model_")] == []


def test_auto_complete_config_fills_missing_configuration(python_core: Any) -> None:
    code = """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                assert config.as_dict()["name"] == "m"
                config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [2], "optional": False})
                config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [2]})
                config.set_max_batch_size(8)
                config.set_dynamic_batching()
                return config
            def execute(self, requests):
                return [answer(given(request)) for request in requests]
        """
    folder = python_core.write("m", code)
    (folder.parent / "config.pbtxt").unlink()
    python_core.service.load_model("m")
    spec = python_core.service.find("m", None).spec
    assert (spec.max_batch_size, spec.inputs[0].dims, spec.backend) == (8, (2,), "python")
    assert spec.dynamic_batching is not None
    (folder.parent / "config.pbtxt").write_text(
        'input { name: "IN" data_type: TYPE_INT32 dims: [2] }\noutput { name: "OUT" data_type: TYPE_FP32 dims: [2] }'
    )
    with pytest.raises(LoadError, match=r"input 'IN' data_type: the configuration states TYPE_INT32"):
        python_core.service.load_model("m")


def test_is_ready_decides_the_readiness_of_the_model(python_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.mood = 1
            def is_ready(self):
                if self.mood == 2: raise RuntimeError("broken")
                if self.mood == 3: time.sleep(1)
                if self.mood == 4: return "no"
                return self.mood == 1
            def execute(self, requests):
                self.mood = int(given(requests[0])[0])
                return [answer([0])]
        """,
    )
    assert python_core.service.is_model_ready("m", None)
    monkeypatch.setattr("edge_server.plugins.python_models.health_check.HealthCheck.is_healthy.__defaults__", (0.2,))
    for mood in (0, 2, 3, 4):
        python_core.value("m", [mood])
        assert not python_core.service.is_model_ready("m", None)


def test_concurrent_health_checks_share_one_result() -> None:
    check, may_answer = HealthCheck(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(check.is_healthy, lambda: may_answer.wait(20), 20.0) for _ in range(2)]
        assert not wait(answers, 0.2).done, "one of them was told before the model was"
        may_answer.set()
        assert [answer.result() for answer in answers] == [True, True]


def test_during_a_hung_health_check_the_model_is_not_ready(eventually: Any) -> None:
    check, may_answer = HealthCheck(), threading.Event()
    assert not check.is_healthy(lambda: may_answer.wait(60), 0.05)
    assert not check.is_healthy(lambda: True, 60.0)
    may_answer.set()
    assert eventually(lambda: check.is_healthy(lambda: True, 20.0))


def test_metrics_of_a_model_are_on_the_metrics_page_until_it_is_unloaded(
    python_core: Any, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.calls = pb_utils.MetricFamily("calls", "Calls", pb_utils.MetricFamily.COUNTER).Metric({"a": "b"})
                self.depth = pb_utils.MetricFamily("depth", "Depth", pb_utils.MetricFamily.GAUGE).Metric()
                sizes = pb_utils.MetricFamily("sizes", "Sizes", pb_utils.MetricFamily.HISTOGRAM)
                self.sizes = sizes.Metric(buckets=[1.0, 2.0])
            def execute(self, requests):
                self.calls.increment(2)
                self.depth.set(-1.5)
                self.sizes.observe(1.5)
                return [answer([self.calls.value()])]
        """,
    )
    assert python_core.value("m") == [2.0]
    kinds = {"calls": "counter", "depth": "gauge", "sizes": "histogram"}

    def own() -> dict[str, Any]:
        # Objects of other tests of this process may not be collected yet, and have families of their own.
        return {view.name: view for view in python_core.service.model_families() if view.name in kinds}

    found = own()
    assert {name: view.kind for name, view in found.items()} == kinds
    assert (dict(found["calls"].samples[0].labels), found["calls"].samples[0].value) == ({"a": "b"}, 2.0)
    assert [(s.part, s.labels.get("le"), s.value) for s in found["sizes"].samples] == [
        ("_bucket", "1.0", 0), ("_bucket", "2.0", 1), ("_bucket", "+Inf", 1), ("_sum", None, 1.5), ("_count", None, 1),
    ]  # fmt: skip
    python_core.service.unload_model("m")
    del found
    assert eventually(lambda: own() == {})


@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=self.run, name='straggler', daemon=True).start()",
        "threading.Thread(target=lambda: stop.wait(5), name='straggler', daemon=True).start()",
        "threading.Thread(target=functools.partial(wait, 5), name='straggler', daemon=True).start()",
        "Straggler(name='straggler', daemon=True).start()",
    ],
    ids=["method", "function", "partial", "class"],
)
def test_threads_that_a_model_leaves_running_are_named(
    python_core: Any, caplog: pytest.LogCaptureFixture, start: str
) -> None:
    python_core.add(
        "m",
        f"""
        import functools
        stop = threading.Event()
        def wait(seconds):
            stop.wait(seconds)
        class Straggler(threading.Thread):
            def run(self):
                stop.wait(5)
        class TritonPythonModel:
            def initialize(self, args):
                {start}
            def run(self):
                stop.wait(5)
            def execute(self, requests):
                return [answer([1])]
            def finalize(self):
                raise ValueError("no end")
        """,
    )
    with caplog.at_level(logging.WARNING):
        python_core.core.close(5.0)
    assert any("left 1 thread(s) running" in line and "straggler" in line for line in caplog.messages)
    assert any("failed to finalize" in line and "no end" in line for line in caplog.messages)


@pytest.mark.soak
def test_reloads_leak_nothing(python_core: Any, eventually: Callable[[Callable[[], bool]], bool]) -> None:
    python_core.write(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.me = self
                self.weights = np.ones(250_000, dtype=np.float32)
            def execute(self, requests):
                return [answer(given(request)) for request in requests]
        """,
    )

    def objects() -> list[object]:
        # A tuple that another thread still fills breaks when it is seen here.
        for thread in threading.enumerate():
            if thread.name == "content_digests":
                thread.join(60)
        gc.collect()
        return gc.get_objects()

    def models() -> int:
        return sum(type(item).__name__ == "TritonPythonModel" for item in objects())

    def reload() -> None:
        python_core.service.load_model("m")
        path = python_core.path / "m" / "config.pbtxt"
        path.write_text(path.read_text() + "\n# again")

    reloads = 40
    for _ in range(3):
        reload()
    loaded, modules, threads = models(), len(sys.modules), threading.active_count()
    count = len(objects())
    for _ in range(reloads):
        reload()
    assert python_core.value("m") == [1.0]
    # Models close after the reload that replaced them.
    assert eventually(lambda: models() <= loaded)
    assert eventually(lambda: len(sys.modules) <= modules)
    assert eventually(lambda: threading.active_count() <= threads + 2)
    assert len(objects()) < count + 15 * reloads


def test_a_coroutine_may_be_awaited_in_execute(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            async def execute(self, requests):
                await asyncio.sleep(0.01)
                return [answer(given(request) + 1) for request in requests]
        """,
    )
    assert python_core.value("m", [1.0]) == [2.0]


@pytest.mark.parametrize("thread", ["own", "caller"])
@pytest.mark.parametrize("raised", ["asyncio.CancelledError('so')", "GeneratorExit('so')"])
def test_a_base_exception_fails_its_batch_and_not_the_instance(
    python_core: Any, one_to_one: str, thread: str, raised: str
) -> None:
    python_core.add(
        "m",
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                if given(requests[0])[0] == -1: raise {raised}
                return [answer(given(request) * 2) for request in requests]
        """,
        one_to_one + f'parameters {{ key: "execution_thread" value {{ string_value: "{thread}" }} }}\n',
    )
    assert raised.partition("(")[0].removeprefix("asyncio.") + ": so" in python_core.error("m", [-1.0])
    assert python_core.value("m", [2.0]) == [4.0]


def test_a_missing_import_is_logged_as_such_with_a_traceback_apart_from_the_message(
    python_core: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(LoadError, match=r"No module named 'no_such_package' \(model"):
        python_core.add("m", "import no_such_package")
    (record,) = [record for record in caplog.records if "cannot be imported" in record.message]
    assert record.message.endswith("cannot be imported: ModuleNotFoundError: No module named 'no_such_package'")
    assert record.exc_info is None
    assert record.exc_text is not None
    assert record.exc_text.startswith("Traceback (most recent call last):\n")


def test_a_load_whose_initialize_is_cancelled_fails_with_that_reason(python_core: Any) -> None:
    code = "class TritonPythonModel:\n    def METHOD: raise asyncio.CancelledError('so')\n"
    for method in ("initialize(self, args)", "auto_complete_config(config)"):
        with pytest.raises(LoadError, match="CancelledError: so"):
            python_core.add("m", code.replace("METHOD", method) + "    def execute(self, requests): pass\n")


def test_a_coroutine_without_an_available_thread_fails_only_its_batch(
    python_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            async def execute(self, requests):
                return [answer(given(request) * 2) for request in requests]
        """,
    )

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(coroutine_loop, "threading", SimpleNamespace(Thread=Refused))
        assert "can't start new thread" in python_core.error("m")
    assert python_core.value("m", [2.0]) == [4.0]


def test_a_health_check_without_an_available_thread_fails_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    check = HealthCheck()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not check.is_healthy(lambda: True)
    assert check.is_healthy(lambda: True, 60)


def test_ragged_inputs_keep_the_shape_of_their_request(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                told = [str(given(request).tolist()) for request in requests]
                shapes = [pb_utils.Tensor("SHAPE", np.array([given(request).shape])) for request in requests]
                return [pb_utils.InferenceResponse([shape], parameters={"given": text, "together": len(requests)})
                        for shape, text in zip(shapes, told)]
        """,
        """
        max_batch_size: 4
        input { name: "IN" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }
        batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNT" data_type: TYPE_INT32 source_input: "IN" }
        output { name: "SHAPE" data_type: TYPE_INT64 dims: [2] }
        dynamic_batching { preferred_batch_size: [2] max_queue_delay_microseconds: 5000000 }
        """,
    )
    asked = [python_core.start("m", values) for values in ([[1.0, 2.0]], [[3.0, 4.0, 5.0]])]
    told = []
    for responses, final, _ in asked:
        assert final.wait(20)
        assert responses[0].error is None, responses[0].error
        told.append((responses[0].outputs[0].array.tolist(), responses[0].parameters))
    assert told == [
        ([[1, 2]], {"given": "[[1.0, 2.0]]", "together": 2}),
        ([[1, 3]], {"given": "[[3.0, 4.0, 5.0]]", "together": 2}),
    ]


@pytest.mark.parametrize("place", ["", 'parameters { key: "isolation" value { string_value: "process" } }'])
def test_a_model_may_have_no_inputs_or_no_outputs(python_core: Any, place: str) -> None:
    source = """
        class TritonPythonModel:
            def execute(self, requests):
                return [answer([len(request.inputs())]) for request in requests]
    """
    sink = """
        class TritonPythonModel:
            def execute(self, requests):
                given(requests[0])
                return [pb_utils.InferenceResponse([]) for request in requests]
    """
    python_core.add("source", source, place + 'output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }')
    python_core.add("sink", sink, place + 'input { name: "IN" data_type: TYPE_FP32 dims: [-1] }')
    assert python_core.value("source", inputs={}) == [0.0]
    (response,) = python_core.ask("sink")
    assert (response.error, response.outputs, response.is_final, response.is_empty) == (None, (), True, False)
    metadata = python_core.service.model_metadata("source", None)
    assert (metadata.inputs, [tensor.name for tensor in metadata.outputs]) == ((), ["OUT"])
