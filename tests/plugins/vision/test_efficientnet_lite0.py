"""The bundled classifier, from the picture's bytes to the label, in the runtimes themselves."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import pickle
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.tensor import DType
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.plugins.vision.raw_encodings import ENCODINGS, is_depth
from edge_server.repository.model_config import pbtxt

pytestmark = pytest.mark.full

data = pytest.importorskip("skimage.data")


@pytest.fixture(scope="module")
def folder(repository_root: Path) -> Path:
    return repository_root / "model_repository/efficientnet_lite0"


@pytest.fixture(scope="module")
def plan(folder: Path) -> ImagePlan:
    config = pbtxt.parse_text((folder / "config.pbtxt").read_bytes(), "efficientnet_lite0")
    assert len(config.input) == 1
    declared = config.input[0]
    assert declared.data_type == DType.FP32.number
    spec = ModelSpec(
        name=config.name,
        backend="",
        platform="",
        max_batch_size=config.max_batch_size,
        inputs=(InputSpec(declared.name, DType.FP32, tuple(declared.dims), format="FORMAT_NCHW"),),
        outputs=(),
        instance_groups=(),
        parameters={key: value.string_value for key, value in config.parameters.items()},
    )
    made = make_image_plan(spec)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def labels(folder: Path) -> list[str]:
    return (folder / "labels.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def session(folder: Path):
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(folder / "1/model.onnx", options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def build_model(folder: Path) -> ModuleType:
    pytest.importorskip("onnx")
    spec = importlib.util.spec_from_file_location("efficientnet_build_model", folder / "build_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def probabilities(session, tensor) -> np.ndarray:
    return session.run(["probabilities"], {"input": tensor.array})[0]


def test_the_coffee_image_of_the_readme_is_an_espresso(plan, session, labels, repository_root) -> None:
    picture = (repository_root / "tests/data/coffee.jpg").read_bytes()
    assert len(picture) < 100_000
    row = probabilities(session, plan.tensor(picture, model="efficientnet_lite0"))[0]
    assert labels[int(row.argmax())] == "espresso"
    assert row.max() > 0.9
    assert row.sum() == pytest.approx(1, abs=1e-5)
    assert plan.top_k == 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [("chelsea", {"tiger cat", "Egyptian cat", "tabby"}), ("camera", {"tripod"}), ("rocket", {"missile"})],
)
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP"])
def test_other_images_get_their_true_class(plan, session, labels, encode, name, expected, form) -> None:
    picture = encode(getattr(data, name)(), form)
    row = probabilities(session, plan.tensor(picture, model="efficientnet_lite0"))[0]
    assert labels[int(row.argmax())] in expected


def test_a_frame_in_any_colour_encoding_is_classified_alike(plan, session, labels, expose) -> None:
    encodings = [name for name in ENCODINGS if not is_depth(name) and name not in ("mono8", "8UC1", "mono16")]
    batch = np.empty((len(encodings), *plan.item_shape), np.float32)
    for encoding, row in zip(encodings, batch, strict=True):
        frame = expose(data.coffee(), encoding, padding=8)
        plan.write(plan.read_frame(frame, memoryview(frame.data), model="m"), row, model="m")
    rows = session.run(["probabilities"], {"input": batch})[0]
    assert {labels[index] for index in rows.argmax(axis=1)} == {"espresso"}
    assert np.abs(rows - rows[encodings.index("rgb8")]).max() < 0.03


def test_items_of_a_batch_are_independent(plan, session, encode) -> None:
    tensors = [plan.tensor(encode(getattr(data, name)(), "PNG"), model="m") for name in ("coffee", "chelsea")]
    alone = np.concatenate([probabilities(session, tensor) for tensor in tensors])
    together = session.run(None, {"input": np.concatenate([tensor.array for tensor in tensors])})[0]
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_openvino_agrees_with_onnxruntime(plan, session, folder, repository_root) -> None:
    openvino = pytest.importorskip("openvino")
    tensor = plan.tensor((repository_root / "tests/data/coffee.jpg").read_bytes(), model="efficientnet_lite0")
    # In f32: on some processors OpenVINO would choose bf16 by itself, which is not comparable this closely.
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(folder / "1/model.onnx"), "CPU", options)
    np.testing.assert_allclose(compiled(tensor.array)[0], probabilities(session, tensor), atol=1e-4)


def test_there_is_one_label_for_each_class(labels) -> None:
    assert len(labels) == len(set(labels)) == 1000
    assert (labels[967], labels[282], labels[0]) == ("espresso", "tiger cat", "tench")
    assert all(label == label.strip() != "" for label in labels)


def test_the_files_match_their_provenance(folder) -> None:
    text = (folder / "PROVENANCE.md").read_text()
    for name in ("1/model.onnx", "labels.txt"):
        stated = re.search(rf"`([0-9a-f]{{64}})` \| `{name}`", text)
        assert stated is not None
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == stated[1]
    assert (folder / "1/model.onnx").stat().st_size < 20_000_000


def test_building_from_the_same_weights_gives_the_same_bytes(build_model) -> None:
    """With random weights of the right shapes, since the published ones are not part of the repository."""
    first, second = (build_model.Network(random_weights(build_model)).build() for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    assert [tensor.name for tensor in first.graph.input] == ["input"]


def random_weights(build_model: ModuleType) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    weights: dict[str, np.ndarray] = {}

    def add(convolution: str, norm: str, shape: tuple[int, ...]) -> None:
        weights[f"{convolution}.weight"] = random.normal(size=shape).astype(np.float32)
        for part in ("weight", "bias", "running_mean", "running_var"):
            weights[f"{norm}.{part}"] = random.uniform(0.5, 1, shape[0]).astype(np.float32)

    add("_conv_stem", "_bn0", (32, 3, 3, 3))
    channels, number = 32, 0
    for repeats, kernel, _, expansion, width in build_model.STAGES:
        for _ in range(repeats):
            wide = channels * expansion
            if expansion != 1:
                add(f"_blocks.{number}._expand_conv", f"_blocks.{number}._bn0", (wide, channels, 1, 1))
            add(f"_blocks.{number}._depthwise_conv", f"_blocks.{number}._bn1", (wide, 1, kernel, kernel))
            add(f"_blocks.{number}._project_conv", f"_blocks.{number}._bn2", (width, wide, 1, 1))
            channels, number = width, number + 1
    add("_conv_head", "_bn1", (1280, channels, 1, 1))
    weights["_fc.weight"] = random.normal(size=(1000, 1280)).astype(np.float32)
    weights["_fc.bias"] = np.zeros(1000, np.float32)
    return weights


def test_the_weights_reader_creates_tensors_only(build_model, tmp_path) -> None:
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    with pytest.raises(pickle.UnpicklingError, match="mkdir has no place in a file of weights"):
        build_model.TensorUnpickler(io.BytesIO(pickle.dumps(Malicious()))).load()
    assert not (tmp_path / "sprung").exists()
