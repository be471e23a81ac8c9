"""Whether OpenVINO answers as ONNX Runtime does: the samples, the comparison, and files of which it is known."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.tensor import DType
from edge_server.plugins.trials.candidate import RuntimeCandidate
from edge_server.plugins.trials.candidate_process import ChildLimits
from edge_server.plugins.trials.comparison import CandidateTrial
from edge_server.plugins.trials.edge_answers import EdgeAnswers
from edge_server.plugins.trials.sample_inputs import edge_samples, random_samples, usual_sizes
from edge_server.plugins.trials.stored_times import find_disagreement, measure_in_background
from edge_server.plugins.trials.trial_plan import TrialEnvironment, TrialRequest

onnx = pytest.importorskip("onnx")
T, node = onnx.TensorProto, onnx.helper.make_node

BUNDLED = Path(__file__).parents[3] / "model_repository"


def spec(*inputs: tuple[DType, tuple[int, ...]], rows: int = 0) -> ModelSpec:
    named = tuple(InputSpec(f"x{number}", dtype, dims) for number, (dtype, dims) in enumerate(inputs))
    return ModelSpec("m", "onnxruntime", "", rows, named, (), ())


def test_samples_have_both_signs_equal_and_large_floats_and_integers_beyond_24_and_32_bits() -> None:
    samples = edge_samples(
        spec((DType.FP32, (50,)), (DType.INT64, (50,)), (DType.INT32, (50,)), (DType.UINT8, (50,))), {}
    )
    floats = np.concatenate([sample["x0"] for sample in samples])
    assert (floats.min() < -20_000, floats.max() > 20_000) == (True, True)
    assert any(len(np.unique(sample["x0"])) < 10 for sample in samples)
    wide = np.concatenate([sample["x1"] for sample in samples])
    assert (1 << 24) + 1 in wide
    assert (1 << 40) + 1 in wide
    assert wide.min() < 0
    assert max(sample["x2"].max() for sample in samples) == (1 << 31) - 1
    assert samples[0]["x3"].dtype == np.uint8
    again = edge_samples(
        spec((DType.FP32, (50,)), (DType.INT64, (50,)), (DType.INT32, (50,)), (DType.UINT8, (50,))), {}
    )
    np.testing.assert_equal(samples, again)


def test_samples_have_two_batch_sizes_and_several_sizes_of_a_free_dimension() -> None:
    shapes = {sample["x0"].shape for sample in edge_samples(spec((DType.FP32, (3, -1)), rows=8), {})}
    assert {(1, 3, 1), (1, 3, 7), (1, 3, 64), (2, 3, 7), (2, 3, 64)} <= shapes
    assert {sample["x0"].shape for sample in edge_samples(spec((DType.FP32, (3,)), rows=1), {})} == {(1, 3)}
    assert {sample["x0"].shape for sample in edge_samples(spec((DType.FP32, (3,))), {})} == {(3,)}
    # Not more memory than a picture needs.
    large = edge_samples(spec((DType.FP32, (-1, -1, -1, -1))), {})
    assert max(sample["x0"].size for sample in large) == 7**4


def test_a_picture_has_the_size_that_the_configuration_declares() -> None:
    parameters = {
        "image_input": "x0", "image_color": "rgb", "network_image_width": "64", "network_image_height": "32",
    }  # fmt: skip
    model = dataclasses.replace(spec((DType.FP32, (3, -1, -1)), (DType.INT64, (-1,)), rows=4), parameters=parameters)
    sizes = usual_sizes(model, {})
    assert sizes == {"x0": (3, 32, 64)}
    assert {sample["x0"].shape for sample in edge_samples(model, sizes)} == {(1, 3, 32, 64), (2, 3, 32, 64)}
    (sample,) = random_samples(model, 1, sizes)
    assert (sample["x0"].shape, sample["x1"].shape) == ((1, 3, 32, 64), (1, 1))


def answers(*arrays: Sequence[float], **more: Any) -> EdgeAnswers:
    return EdgeAnswers({number: {"y": np.array(array, "f4")} for number, array in enumerate(arrays)}, {}, **more)


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        (answers([1.0, 2.0], [3.0]), ""),
        (answers([1.0, 2.001], [3.0]), ""),
        (
            answers([1.0, 2.01], [3.0]),
            "output 'y' differs from those of the other runtime by 0.005 of its largest value",
        ),
        (answers([1.0], [3.0]), r"output 'y' has the shape \[1\], expected \[2\]"),
        (EdgeAnswers({0: {"y": np.array([1.0, 2.0], "f4")}}, {1: "no kernel"}), "it fails .*: no kernel"),
        (EdgeAnswers({}, {}, "its process was ended by SIGSEGV"), "with unusual values its process was ended by SIG"),
    ],
)
def test_a_difference_is_named(found: EdgeAnswers, difference: str) -> None:
    assert re.match(difference + ("" if difference else "$"), found.difference_to(answers([1.0, 2.0], [3.0])))


def test_samples_that_the_reference_refuses_are_left_out_and_none_at_all_is_no_agreement() -> None:
    assert answers([1.0], [9.0]).difference_to(EdgeAnswers({0: {"y": np.array([1.0], "f4")}}, {1: "no index"})) == ""
    assert answers([1.0]).difference_to(EdgeAnswers({}, {0: "no index"})) == "no answers could be compared"


def test_scores_that_are_all_near_zero_agree() -> None:
    assert answers([2e-6, 1e-7]).difference_to(answers([2.1e-6, 2e-7])) == ""


@pytest.fixture
def disagreement(tmp_path: Path) -> Callable[[Path], str]:
    """Run a model's file with both runtimes and compare."""

    def run(file: Path) -> str:
        folder = file.parents[1]
        environment = TrialEnvironment({}, tmp_path, lambda runtime: {})
        request = TrialRequest(folder.parent, folder.name, 1, "", ("onnxruntime", "openvino"))
        trials = measure_in_background(request, environment, ChildLimits(100, 100, 4 << 30), lambda: None)
        assert not any(trial.reason for trial in trials.values()), trials
        return find_disagreement(file, trials)

    return run


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """`save(nodes, inputs, outputs, **constants)`: write a model's file; inputs and outputs are (name, type, dims)."""

    def run(nodes: Any, inputs: Any, outputs: Any, **constants: Any) -> Path:
        values = [[onnx.helper.make_tensor_value_info(*item) for item in items] for items in (inputs, outputs)]
        held = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
        graph = onnx.helper.make_graph(nodes, "g", *values, held)
        file = tmp_path / "models" / "m" / "1" / "model.onnx"
        file.parent.mkdir(parents=True)
        onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), file)
        return file

    return run


@pytest.mark.full
@pytest.mark.parametrize("name", ["face_detection_yunet", "efficientnet_lite0"])
def test_both_runtimes_agree_on_the_bundled_models(name: str, disagreement: Callable[[Path], str]) -> None:
    assert disagreement(BUNDLED / name / "1" / "model.onnx") == ""


@pytest.mark.full
def test_integers_that_openvino_computes_as_floats_are_found(
    save: Callable[..., Path], disagreement: Callable[[Path], str]
) -> None:
    file = save([node("Mul", ["x", "k"], ["y"])], [("x", T.INT64, [1, 4])], [("y", T.INT64, [1, 4])], k=np.int64(3))
    assert disagreement(file).startswith("output 'y' differs from those of the other runtime by ")


@pytest.mark.full
def test_a_convolution_whose_shape_is_wrong_for_several_rows_is_found(
    save: Callable[..., Path], disagreement: Callable[[Path], str]
) -> None:
    weights = np.random.default_rng(1).normal(size=(3, 2, 3, 3)).astype("f4")
    file = save(
        [node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], auto_pad="SAME_UPPER")],
        [("x", T.FLOAT, ["n", 3, 7, 8])], [("y", T.FLOAT, ["n", 2, 14, 16])], w=weights,
    )  # fmt: skip
    assert disagreement(file)


@pytest.mark.parametrize(
    ("operator", "dtype", "reason"),
    [
        ("TopK", T.FLOAT, "operator TopK: it orders equal values differently"),
        ("Identity", T.FLOAT, "no answers could be compared"),
    ],
)
def test_what_is_known_of_a_file_needs_no_run(
    operator: str, dtype: int, reason: str, save: Callable[..., Path]
) -> None:
    is_top = operator == "TopK"
    nodes = [node(operator, ["x", "k"] if is_top else ["x"], ["y", "i"] if is_top else ["y"])]
    file = save(nodes, [("x", dtype, [4])], [("y", dtype, [4])], k=np.array([2]))
    trials = {name: CandidateTrial(RuntimeCandidate(name, "f32"), {}) for name in ("onnxruntime", "openvino")}
    assert find_disagreement(file, trials) == reason
    assert find_disagreement(file, {"openvino": trials["openvino"]}) == ""
