"""Models that behave as those of NVIDIA's own tests of the Python backend (qa/python_models in
triton-inference-server/server), by their names there; the code is ours. Each runs in the server's process and in one of
its own.

Left out: `cuda_memory_consumer` and `variable_gpu_output` (a GPU), `pytorch_fp32_fp32` and `torchvision` (torch),
`python_version` and `model_env` (other interpreters), `python_based_backends`, and those that only take long.
Sequences, rescheduled requests, metrics and most calls of other models have tests in tests/plugins/python_models.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import EdgeServerError
from tests.plugins.python_models.conftest import ONE_TO_ONE, PythonCore, python_core  # noqa: F401 - a fixture

pytestmark = pytest.mark.full

PROCESS = 'parameters { key: "isolation" value { string_value: "process" } }\n'
DECOUPLED = ONE_TO_ONE + "model_transaction_policy { decoupled: true }\n"
TWO = """
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
input { name: "MORE" data_type: TYPE_FP32 dims: [-1] optional: true }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT1" data_type: TYPE_FP32 dims: [-1] }
"""
TEXT = """
input { name: "IN" data_type: TYPE_STRING dims: [-1] }
output { name: "OUT" data_type: TYPE_STRING dims: [-1] }
"""


def model(execute: str, more: str = "") -> str:
    """Return a model's code from the body of its `execute`, and other methods."""
    lines = "\n        ".join(execute.strip().splitlines())
    rest = "\n    ".join(more.strip().splitlines())
    return f"class TritonPythonModel:\n    {rest}\n    def execute(self, requests):\n        {lines}\n"


EACH = "return [{} for request in requests]"
IDENTITY = model(EACH.format("answer(given(request))"))

ANSWERED: dict[str, tuple[str, list[float], list[float]]] = {
    "identity_fp32": (IDENTITY, [1.5, -2.0], [1.5, -2.0]),
    "identity_fp32, nothing in it": (IDENTITY, [], []),
    "non_contiguous": (
        model(EACH.format("answer(np.stack([given(request), given(request)], axis=1).T[0, ::2])")), [1, 2, 3], [1, 3]
    ),
    "dlpack_identity": (
        model(EACH.format(
            "pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("
            "'OUT', pb_utils.get_input_tensor_by_name(request, 'IN').to_dlpack())])"
        )), [3, 4], [3, 4],
    ),
    "dlpack_io_identity": (
        model(EACH.format(
            "pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("
            "'OUT', np.from_dlpack(pb_utils.get_input_tensor_by_name(request, 'IN')) + 0)])"
        )), [3, 4], [3, 4],
    ),
    "dlpack_empty_output": (
        model(EACH.format("pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack('OUT', np.empty(0, np.float32))])")),
        [3, 4], [],
    ),
    "init_args": (
        model(
            EACH.format("answer([self.right])"),
            'def initialize(self, args):\n'
            '    config = json.loads(args["model_config"])\n'
            '    self.right = (args["model_name"], args["model_version"], config["name"]) == ("m", "1", "m")\n'
            '    self.right &= {"model_instance_kind", "model_instance_name", "model_instance_device_id",\n'
            '                   "model_repository"} <= set(args)\n',
        ), [0], [1],
    ),
    "add_sub_logging": (
        model("pb_utils.Logger.log_info('one'); pb_utils.Logger.log('two', pb_utils.Logger.WARNING)\n"
              "pb_utils.Logger.log_error('three'); pb_utils.Logger.log_verbose('four')\n" + EACH.format("answer([7])")),
        [0], [7],
    ),
    "response_sender": (
        model("for request in requests:\n"
              "    request.get_response_sender().send(answer(given(request) + 1),\n"
              "        flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"), [1], [2],
    ),
    "execute_cancel, not cancelled": (model(EACH.format("answer([request.is_cancelled()])")), [0], [0]),
    "bls_undefined, caught": (
        model("inner = pb_utils.InferenceRequest(model_name='none', requested_output_names=['OUT'], inputs=[])\n"
              + EACH.format("answer([inner.exec().has_error()])")), [0], [1],
    ),
    "model_init_del": (
        model(EACH.format("answer([len(self.calls)])"),
              "def initialize(self, args):\n    self.calls = ['initialize']\n"
              "def finalize(self):\n    del self.calls"), [0], [1],
    ),
    "fini_error": (
        model(EACH.format("answer([2])"), "def finalize(self):\n    raise RuntimeError('at the end')"), [0], [2]
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[str, str]] = {
    "execute_error": (model("raise pb_utils.TritonModelException('not today')"), "not today"),
    "execute_error, of one request": (
        model(EACH.format("pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError('this one'))")),
        "this one",
    ),
    "execute_return_error, None": (model("return None"), "returned None"),
    "execute_return_error, too few": (model("return []"), "0 responses to 1 requests"),
    "execute_return_error, None in the list": (model("return [None] * len(requests)"), "returned None"),
    "wrong_return_type": (model(EACH.format("'a text'")), "got str"),
    "wrong_model": (model("return undefined_name"), "undefined_name"),
    "decoupled_send_after_close_error": (
        model("for request in requests:\n"
              "    sender = request.get_response_sender()\n"
              "    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
              "    sender.send(answer([1]))"),
        "",
    ),
}  # fmt: skip
"""Name -> code, and a pattern of the error."""

NOT_LOADED: dict[str, tuple[str, str]] = {
    "init_error": (model("return []", "def initialize(self, args):\n    raise ValueError('no weights')"), "no weights"),
    "init_exit": (model("return []", "def initialize(self, args):\n    sys.exit(3)"), "SystemExit: 3"),
    "auto_complete_error": (
        model("return []", "@staticmethod\ndef auto_complete_config(config):\n    raise ValueError('unknown shape')"),
        "unknown shape",
    ),
    "no execute": ("class TritonPythonModel:\n    pass\n", "no method execute"),
    "no class": ("value = 1\n", "no class TritonPythonModel"),
    "a mistake of grammar": ("def execute(:\n", "SyntaxError"),
}


@pytest.fixture(params=["", PROCESS], ids=["inside", "process"])
def place(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", ANSWERED)
def test_a_model_answers_and_is_unloaded(python_core: PythonCore, place: str, name: str) -> None:  # noqa: F811
    code, values, expected = ANSWERED[name]
    python_core.add("m", code, ONE_TO_ONE + place)
    assert python_core.value("m", values) == expected
    assert python_core.value("m", values) == expected
    python_core.service.unload_model("m")


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_of_a_model_is_the_answer_and_the_next_request_is_run(
    python_core: PythonCore, place: str, name: str  # noqa: F811
) -> None:  # fmt: skip
    code, pattern = REFUSED[name]
    python_core.add("m", code, (DECOUPLED if name.startswith("decoupled") else ONE_TO_ONE) + place)
    for _ in range(2):
        last = python_core.ask("m")[-1]
        assert re.search(pattern, last.error.message if last.error else "")
    python_core.add("other", IDENTITY, ONE_TO_ONE + place)
    assert python_core.value("other", [1.0]) == [1.0]


@pytest.mark.parametrize("name", NOT_LOADED)
def test_a_model_that_does_not_begin_says_why(python_core: PythonCore, place: str, name: str) -> None:  # noqa: F811
    code, pattern = NOT_LOADED[name]
    with pytest.raises(EdgeServerError, match=pattern):
        python_core.add("m", code, ONE_TO_ONE + place)
    python_core.add("m", IDENTITY, ONE_TO_ONE + place)
    assert python_core.value("m", [1.0]) == [1.0]


def test_two_inputs_of_which_one_may_be_left_out_and_two_outputs(python_core: PythonCore, place: str) -> None:  # noqa: F811
    """`add_sub` and `optional`."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            answers = []
            for request in requests:
                more = pb_utils.get_input_tensor_by_name(request, "MORE")
                one, other = given(request), 10 if more is None else more.as_numpy()
                answers.append(pb_utils.InferenceResponse([
                    pb_utils.Tensor("OUT", one + other), pb_utils.Tensor("OUT1", one - other)]))
            return answers
    """
    python_core.add("m", code, TWO + place)
    one, two = (Tensor(name, DType.FP32, np.array([1.0, 5.0], np.float32)) for name in ("IN", "MORE"))
    for inputs, expected in (({"IN": one, "MORE": two}, ([2, 10], [0, 0])), ({"IN": one}, ([11, 15], [-9, -5]))):
        (response,) = python_core.ask("m", inputs=inputs)
        assert tuple(output.array.tolist() for output in response.outputs) == expected


@pytest.mark.parametrize("kind", ["object", "S", "U"])
def test_texts_of_every_kind_of_array(python_core: PythonCore, place: str, kind: str) -> None:  # noqa: F811
    """`string`, `string_fixed` and `string_identity`."""
    code = f"""
    class TritonPythonModel:
        def execute(self, requests):
            found = [given(request) for request in requests]
            if {kind!r} == "U":
                found = [np.array([text.decode() for text in texts], dtype="U") for texts in found]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", texts.astype({kind!r}))]) for texts in found]
    """
    python_core.add("m", code, TEXT + place)
    texts: list[Any] = [b"", "straße 日本".encode()] if kind != "S" else [b"", b"plain"]
    (response,) = python_core.ask("m", inputs={"IN": Tensor("IN", DType.BYTES, np.array(texts, object))})
    assert response.error is None
    assert [text.encode() if isinstance(text, str) else text for text in response.outputs[0].array.tolist()] == texts


def test_modules_beside_the_model(python_core: PythonCore, place: str) -> None:  # noqa: F811
    """`multi_file`: one module beside model.py uses another."""
    code = "from file_one import twice\n" + model(EACH.format("answer(twice(given(request)))"))
    folder = python_core.write("m", code, ONE_TO_ONE + place)
    (folder / "file_one.py").write_text("from file_two import FACTOR\ndef twice(value):\n    return value * FACTOR\n")
    (folder / "file_two.py").write_text("FACTOR = 2\n")
    python_core.service.load_model("m")
    assert python_core.value("m", [4.0]) == [8.0]


@pytest.mark.parametrize("keyword", ["", "async "])
def test_a_decoupled_model_repeats_from_a_thread(python_core: PythonCore, place: str, keyword: str) -> None:  # noqa: F811
    """`repeat_thread`, `async_execute_decouple`, and `response_sender_complete_final`."""
    code = f"""
    class TritonPythonModel:
        {keyword}def execute(self, requests):
            for request in requests:
                threading.Thread(target=self.run, args=(request.get_response_sender(), given(request)[0])).start()
        def run(self, sender, count):
            for number in range(int(count)):
                sender.send(answer([number]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    python_core.add("m", code, DECOUPLED + place)
    responses = python_core.ask("m", [3.0])
    assert [response.outputs[0].array.tolist() for response in responses if response.outputs] == [[0], [1], [2]]
    assert [response.outputs for response in python_core.ask("m", [0.0]) if response.outputs] == []


def test_parameters_of_requests_and_responses(python_core: PythonCore, place: str) -> None:  # noqa: F811
    """`bls_parameters`, `response_parameters` and `response_parameters_bls`."""
    echo = model(EACH.format("answer([1], parameters=json.loads(request.parameters()))"))
    caller = """
    class TritonPythonModel:
        def execute(self, requests):
            answers = []
            for request in requests:
                inner = pb_utils.InferenceRequest(
                    model_name="echo", requested_output_names=["OUT"],
                    inputs=[pb_utils.Tensor("IN", given(request))], parameters=json.loads(request.parameters()))
                answers.append(answer([2], parameters=json.loads(inner.exec().parameters())))
            return answers
    """
    python_core.add("echo", echo, ONE_TO_ONE + place)
    python_core.add("caller", caller, ONE_TO_ONE + place)
    parameters = {"word": "a b", "number": 7, "is": True}
    for name in ("echo", "caller"):
        (response,) = python_core.ask(name, parameters=parameters)
        assert response.error is None
        assert dict(response.parameters) == parameters


@pytest.mark.parametrize(
    "code",
    ["UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"],
)
def test_each_code_of_an_error_arrives(python_core: PythonCore, place: str, code: str) -> None:  # noqa: F811
    """`error_code`."""
    error = f"pb_utils.InferenceResponse(error=pb_utils.TritonError('said', pb_utils.TritonError.{code}))"
    python_core.add("m", model(EACH.format(error)), ONE_TO_ONE + place)
    (response,) = python_core.ask("m")
    assert response.error is not None
    assert (response.error.code.name, response.error.message) == (code, "said")
