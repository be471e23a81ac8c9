"""Load requests of other machines: what carries code, or names paths, is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import Forbidden
from edge_server.repository.desired_state import RepositorySource
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions


@pytest.fixture
def source(root: Path, tmp_path: Path) -> Any:
    (tmp_path / "scratch").mkdir()
    made = RepositorySource(Scanner([root]), ResolveOptions(), tmp_path / "scratch")
    yield made
    made.close()
    assert list((tmp_path / "scratch").iterdir()) == []


def config(**members: Any) -> str:
    return json.dumps(members)


def parameter(key: str, value: str = "x") -> str:
    return config(backend="openvino", parameters={key: {"string_value": value}})


@pytest.mark.parametrize(
    ("given", "files"),
    [
        (config(backend="identity"), ["1/model.py"]),
        (config(backend="onnxruntime"), ["1/model.onnx", "1/extra/help.py"]),
        (config(backend="onnxruntime"), ["1/model.onnx", "1/libmodel.so"]),
        (config(), ["1/model.pt"]),
        (config(), ["1/model.pt2"]),
        (config(), ["1/model.jaxexport"]),
        (config(), ["1/model.savedmodel/saved_model.pb"]),
        (config(), ["1/model.plan"]),
        (config(backend="onnxruntime"), ["1/model.onnx", "1/notes.pkl"]),
        (config(backend="onnxruntime"), ["1/model.onnx", "1/unknown"]),
        (config(backend="pytorch", default_model_filename="model.bin"), ["1/model.bin"]),
        (config(backend="tensorflow", default_model_filename="model.txt"), ["1/model.txt"]),
        (config(platform="tensorflow_savedmodel"), ["1/model.xml", "1/model.bin"]),
        (config(backend="jax", default_model_filename="model.npy"), ["1/model.npy"]),
        (config(backend="tensorrt", default_model_filename="model.bin"), ["1/model.bin"]),
        (config(backend="tensorrt", cc_model_filenames={"8.7": "a.bin"}), ["1/model.onnx", "1/a.bin"]),
        (config(backend="of_another_package"), ["1/model.bin"]),
        (config(backend="pytorch"), []),
        (config(backend="python"), ["1/weights.bin"]),
        (config(backend="c_abi"), ["1/a"]),
        (config(default_model_filename="a.txt"), ["1/a.txt"]),  # the model is called m.python
        (config(backend="python", default_model_filename="data.txt"), []),
        (config(backend="c_abi"), []),
        (config(default_model_filename="again.py"), []),
        (config(backend="onnxruntime", model_operations={"op_library_filename": ["libops.so"]}), []),
        (parameter("CACHE_DIR"), []),
        (parameter("CPU_EXTENSION_PATH"), []),
        (parameter("trt_extra_plugin_lib_paths"), []),
        (parameter("session.optimized_model_filepath"), []),
        (parameter("EXECUTION_ENV_PATH"), []),
        (parameter("harmless", "/etc/passwd"), []),
        (parameter("harmless", "a/../../b"), []),
        (
            config(
                backend="onnxruntime",
                optimization={
                    "execution_accelerators": {
                        "gpu_execution_accelerator": [
                            {"name": "tensorrt", "parameters": {"trt_engine_cache_path": "x"}}
                        ]
                    }
                },
            ),
            [],
        ),
    ],
)
def test_code_and_paths_are_refused_from_other_machines(
    source: Any, add_model: Any, given: str, files: list[str]
) -> None:
    add_model("m.python", 'backend: "identity"')
    contents = dict.fromkeys(files, b"x")
    with pytest.raises(Forbidden, match="--allow-code-upload"):
        source.desired_model("m.python", given, contents, may_carry_code=False)
    assert source.desired_model("m.python", given, contents) is not None


def test_a_configuration_that_leaves_the_backend_open_is_judged_by_the_files_on_disk(
    source: Any, add_model: Any
) -> None:
    folder = add_model("m")
    (folder / "1" / "model.py").write_text("")
    with pytest.raises(Forbidden, match="'python'"):
        source.desired_model("m", config(max_batch_size=4), {}, may_carry_code=False)


@pytest.mark.parametrize(
    ("given", "files"),
    [
        (None, []),
        (config(backend="onnxruntime"), ["1/model.onnx"]),
        (config(), ["1/model.onnx", "1/model.onnx.data", "1/weights/model.onnx_data", "1/labels.txt"]),
        (config(backend="tensorrt"), ["1/model.onnx"]),
        (config(), ["1/model.xml", "1/model.bin"]),
        (config(backend="litert"), ["1/model.tflite"]),
        (config(), ["1/model.gguf"]),
        (config(), ["1/xgboost.json"]),
        (config(), ["1/xgboost.ubj"]),
        (config(backend="fil"), ["1/model.txt", "1/sample.npy"]),
        (config(platform="ensemble"), []),
        (config(backend="onnxruntime", max_batch_size=8), []),
        (
            config(
                backend="openvino",
                parameters={
                    key: {"string_value": value}
                    for key, value in {
                        "NUM_STREAMS": "2",
                        "image_mean": "1, 2",
                        "profile": "fast",
                        "direction": "both",
                        "precision": "fp16",
                    }.items()
                },
            ),
            [],
        ),
    ],
)
def test_other_overrides_are_taken_from_other_machines(
    source: Any, add_model: Any, given: str | None, files: list[str]
) -> None:
    add_model("m", 'backend: "onnxruntime"')
    assert source.desired_model("m", given, dict.fromkeys(files, b"x"), may_carry_code=False) is not None


def test_a_refused_load_keeps_the_files_of_an_earlier_one(source: Any, add_model: Any, tmp_path: Path) -> None:
    add_model("m", 'backend: "identity"')
    source.desired_model("m", config(backend="identity"), {"1/model.onnx": b"x"})
    with pytest.raises(Forbidden):
        source.desired_model("m", config(backend="python"), {"1/model.py": b"x"}, may_carry_code=False)
    (kept,) = (tmp_path / "scratch").iterdir()
    assert (kept / "m" / "1" / "model.onnx").read_bytes() == b"x"
