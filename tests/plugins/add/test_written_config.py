"""The written config.pbtxt of a model whose layout is not decided, and its labels."""

from __future__ import annotations

from pathlib import Path

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.add.picture_trial import Reading, TrialFinding
from edge_server.plugins.add.written_config import write_config
from edge_server.plugins.policies.policy import recognise_policy
from edge_server.plugins.vision.layout_search import candidates


def test_class_names_of_the_file_are_labels_also_while_the_layout_is_not_decided(tmp_path: Path) -> None:
    spec = ModelSpec(
        name="net", backend="onnxruntime", platform="", max_batch_size=0, instance_groups=(),
        inputs=(InputSpec("images", DType.FP32, (1, 3, 640, 640)),),
        outputs=(OutputSpec("output0", DType.FP32, (1, 6, 8400)),),
    )  # fmt: skip
    readings = [Reading(match, True, TrialFinding()) for match in candidates(spec, {"character": "text\ntitle"})]
    write_config(tmp_path, spec, "", None, readings, [])
    lines = (tmp_path / "config.pbtxt").read_text("utf-8").splitlines()
    assert '# output { name: "output0" label_filename: "labels.txt" }' in lines
    stated = [line for line in lines if line and not line.startswith("#")]
    assert stated == ['parameters { key: "preprocessing" value { string_value: "undecided" } }']
    assert (tmp_path / "labels.txt").read_text("utf-8") == "text\ntitle\n"


def test_a_policys_time_between_actions_is_a_line_to_fill_in(tmp_path: Path) -> None:
    spec = ModelSpec(
        name="arm", backend="onnxruntime", platform="", max_batch_size=1, instance_groups=(),
        inputs=(InputSpec("observation.state", DType.FP32, (7,)),),
        outputs=(OutputSpec("action", DType.FP32, (50, 7)),),
    )  # fmt: skip
    write_config(tmp_path, spec, "", None, [], [], recognised=recognise_policy(spec))
    lines = (tmp_path / "config.pbtxt").read_text("utf-8").splitlines()
    assert lines[-1] == '# parameters { key: "policy_dt_ms" value { string_value: "" } }'
    assert "milliseconds" in lines[-2]
