"""The module triton_python_backend_utils: log, DLPack, loading of models, parameters, health."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor

ISOLATED = 'parameters { key: "isolation" value { string_value: "process" } }'
ONE_TO_ONE = """
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""
BOTH = pytest.mark.parametrize("config", [ONE_TO_ONE, ONE_TO_ONE + ISOLATED], ids=["inside", "process"])


@BOTH
def test_each_level_of_the_logger_is_a_level_of_the_log(
    python_core: Any, caplog: pytest.LogCaptureFixture, config: str, eventually: Any
) -> None:
    caplog.set_level(logging.DEBUG, "edge_server.model")
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                log = pb_utils.Logger
                log.log_verbose("one"); log.log_info("two"); log.log_warn("three"); log.log_error("four")
                log.log("five"); log.log("six", log.LogLevel.WARNING); log.log("se\\nven", log.ERROR)
                return [answer([0])]
        """,
        config,
    )
    assert python_core.value("m") == [0.0]
    said = [
        (logging.DEBUG, "one"), (logging.INFO, "two"), (logging.WARNING, "three"), (logging.ERROR, "four"),
        (logging.INFO, "five"), (logging.WARNING, "six"), (logging.ERROR, "se\nven"),
    ]  # fmt: skip

    def lines() -> list[tuple[int, str]]:
        return [(one.levelno, one.getMessage()) for one in caplog.records if one.name == "edge_server.model"]

    assert eventually(lambda: len(lines()) >= len(said))
    assert lines() == [(level, f"model 'm': {words}") for level, words in said]


@BOTH
def test_messages_of_a_model_follow_the_current_log_level(
    python_core: Any, caplog: pytest.LogCaptureFixture, config: str, eventually: Any
) -> None:
    caplog.set_level(logging.WARNING, "edge_server.model")
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                pb_utils.Logger.log_verbose("a detail"); pb_utils.Logger.log_warn("heard")
                return [answer([0])]
        """,
        config,
    )

    def said(words: str) -> bool:
        python_core.value("m")
        return any(words in one.getMessage() for one in caplog.records)

    assert eventually(lambda: said("heard"))
    assert not said("a detail")
    caplog.set_level(logging.DEBUG, "edge_server.model")
    assert eventually(lambda: said("a detail"))


@pytest.mark.full
def test_tensors_share_memory_between_numpy_and_torch(python_core: Any) -> None:
    pytest.importorskip("torch")
    python_core.add(
        "m",
        """
        import torch
        class TritonPythonModel:
            def execute(self, requests):
                (tensor,) = requests[0].inputs()
                seen = torch.utils.dlpack.from_dlpack(tensor.to_dlpack())
                assert seen.data_ptr() == torch.from_dlpack(tensor).data_ptr() == tensor.as_numpy().ctypes.data
                seen += 1
                mine = torch.arange(6.0).reshape(2, 3).T
                lent = pb_utils.Tensor.from_dlpack("LENT", mine)
                assert lent.as_numpy().ctypes.data == mine.data_ptr() and lent.shape() == [3, 2]
                values = torch.cat([torch.from_dlpack(lent).reshape(-1), seen])
                return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", values)])]
        """,
    )
    given = np.array([1.0, 2.0], np.float32)
    (response,) = python_core.ask("m", inputs={"IN": Tensor("IN", DType.FP32, given)})
    assert response.error is None, response.error
    assert response.outputs[0].array.tolist() == [0, 3, 1, 4, 2, 5, 2, 3]
    assert given.tolist() == [1, 2]


@BOTH
def test_a_model_is_loaded_with_the_callers_configuration_and_files(python_core: Any, config: str) -> None:
    python_core.write("other", "class TritonPythonModel: pass")
    code = """
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            self.factor = float(__import__("json").loads(args["model_config"])["parameters"]["factor"]["string_value"])
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() * self.factor)])
                    for r in requests]
    """
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    config_json = json.dumps(
        {
            "backend": "python", "input": [{"name": "IN", **tensor}], "output": [{"name": "OUT", **tensor}],
            "parameters": {"factor": {"string_value": "2.5"}},
        }
    )  # fmt: skip
    python_core.add(
        "keeper",
        f"""
        import textwrap
        CODE, CONFIG = textwrap.dedent({code!r}), {config_json!r}
        class TritonPythonModel:
            def execute(self, requests):
                pb_utils.load_model("other", CONFIG, {{"file:1/model.py": CODE.encode()}})
                inputs = [pb_utils.Tensor("IN", given(requests[0]))]
                response = pb_utils.InferenceRequest(
                    model_name="other", requested_output_names=["OUT"], inputs=inputs).exec()
                values = list(response.output_tensors()[0].as_numpy())
                pb_utils.unload_model("other")
                try:
                    pb_utils.load_model("other", "{{", {{}})
                except pb_utils.TritonModelException as error:
                    values.append(bool(str(error)))
                return [answer(values)]
        """,
        config,
    )
    assert python_core.value("keeper", [2.0, 4.0]) == [5.0, 10.0, 1.0]


@BOTH
def test_health_checks_work_in_process_and_isolated(python_core: Any, config: str) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            is_well = True
            def is_ready(self):
                return self.is_well
            def execute(self, requests):
                self.is_well = bool(given(requests[0])[0])
                return [answer([0])]
        """,
        config,
    )
    for is_well in (True, False, True):
        python_core.value("m", [is_well])
        assert python_core.service.is_model_ready("m", None) is is_well


@BOTH
@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64])
def test_a_parameter_that_no_protocol_carries_fails_only_its_batch(python_core: Any, config: str, number: int) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                return [answer([0], parameters={"n": int(r.inputs()[0].as_numpy()[0]) and NUMBER}) for r in requests]
        """.replace("NUMBER", str(number)),
        config,
    )
    assert "expected integers of 64 bits, got 'n' with" in python_core.error("m", [1.0])
    assert python_core.value("m", [0.0]) == [0.0]


@BOTH
def test_a_model_finds_its_own_version_folder_at_each_stage(python_core: Any, config: str) -> None:
    code = """
        AT_IMPORT = pb_utils.get_model_dir()
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                with open(pb_utils.get_model_dir() + "/size.txt") as file:
                    config.set_max_batch_size(int(file.read()))
                return config
            def initialize(self, args):
                assert AT_IMPORT == pb_utils.get_model_dir() == f"{args['model_repository']}/{args['model_version']}"
            def execute(self, requests):
                found = []
                thread = threading.Thread(target=lambda: found.append(pb_utils.get_model_dir()))
                thread.start(), thread.join()
                assert found == [AT_IMPORT] == [pb_utils.get_model_dir()]
                return [answer([[7]]) for _ in requests]
        """
    folder = python_core.write("m", code, config)
    (folder.parent / "1" / "size.txt").write_text("3")
    python_core.service.load_model("m")
    assert python_core.service.find("m", None).spec.max_batch_size == 3
    assert python_core.value("m", [[1.0]]) == [[7.0]]


def test_outside_of_models_there_is_no_model_folder() -> None:
    import edge_server.plugins.python_models.triton_python_backend_utils as pb_utils

    with pytest.raises(pb_utils.TritonModelException, match="get_model_dir: called by no model"):
        pb_utils.get_model_dir()


def test_shapes_are_lists_that_models_may_add_to(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                (tensor,) = requests[0].inputs()
                shape = [1] + tensor.shape()
                shape.append(9)
                assert tensor.shape() == [2] and pb_utils.Tensor("X", np.zeros((0, 3))).shape() == [0, 3]
                return [answer(shape)]
        """,
    )
    assert python_core.value("m", [1.0, 2.0]) == [1, 2, 9]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("pb_utils.InferenceRequest('', 1.5, [], ['OUT'], 'm')", "Correlation ID must be integer or string"),
        ("pb_utils.InferenceRequest('', 1, [], ['OUT'], 'm', parameters={'a': [1]})", "got 'a' with list"),
        ("pb_utils.InferenceResponse([], parameters={1: 1})", "got 1 with int"),
    ],
)
def test_values_that_no_protocol_carries_raise_tritons_exception(python_core: Any, made: str, message: str) -> None:
    python_core.add(
        "m",
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                try:
                    {made}
                except pb_utils.TritonModelException as error:
                    return [pb_utils.InferenceResponse(error=pb_utils.TritonError("refused: " + str(error)))]
        """,
    )
    said = python_core.error("m")
    assert said.startswith("refused: ")
    assert message in said
