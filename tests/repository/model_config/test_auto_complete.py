"""Choosing the runtime, completing a configuration from the model file, and checking it against the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_server.backends.base import ModelSignature
from edge_server.backends.onnxruntime.backend import OnnxRuntimeBackend
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.core.version_lifecycle import Resolved
from edge_server.errors import BackendMissing, BadModelConfig, LoadError, install_hint
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve

IMAGE = {"images": (DType.FP32, (-1, 3, 224, 224))}
SCORES = {"scores": (DType.FP32, (-1, 1000))}


@pytest.fixture
def resolved(root: Path) -> Callable[..., Resolved]:
    def call(name: str = "m", **options: Any) -> Resolved:
        model = Scanner([root]).find(name)
        assert model is not None
        return resolve(model, 1, ResolveOptions(**options))

    return call


@pytest.fixture
def onnx_backends(described: Any, signature: Any) -> tuple[Any, Any]:
    """openvino and onnxruntime, both reading a batchable image classifier from any file."""
    seen = signature(IMAGE, SCORES)
    return described("openvino", "model.xml", seen), described("onnxruntime", "model.onnx", seen)


def test_a_model_without_configuration_is_completed_from_its_file(
    add_model: Any, onnx_backends: Any, resolved: Any
) -> None:
    path = add_model("m", None, {"1/model.onnx": b"x"})
    found = resolved()
    spec = found.spec
    assert (spec.backend, spec.platform) == ("onnxruntime", "onnxruntime_onnx")
    assert found.file.path == path / "1" / "model.onnx"
    assert spec.default_model_filename == "model.onnx"
    assert spec.inputs == (InputSpec("images", DType.FP32, (3, 224, 224)),)
    assert spec.outputs == (OutputSpec("scores", DType.FP32, (1000,)),)
    assert spec.max_batch_size == 4
    assert spec.dynamic_batching.preferred_batch_sizes == (4,)
    assert spec.has_default_batch_size
    assert any("max_batch_size was set to 4" in note for note in spec.notes)


def test_backend_and_platform_are_both_filled_when_one_is_known(
    add_model: Any, onnx_backends: Any, resolved: Any
) -> None:
    add_model("a", 'backend: "onnxruntime"', {"1/model.onnx": b"x"})
    add_model("b", 'platform: "onnxruntime_onnx"', {"1/model.onnx": b"x"})
    for name in ("a", "b"):
        spec = resolved(name).spec
        assert (spec.backend, spec.platform) == ("onnxruntime", "onnxruntime_onnx")


def test_completion_can_be_turned_off(add_model: Any, onnx_backends: Any, resolved: Any) -> None:
    add_model("m", 'backend: "onnxruntime"', {"1/model.onnx": b"x"})
    with pytest.raises(BadModelConfig, match=r"expected 1 inputs but the configuration states 0.*images"):
        resolved(auto_complete=False)


def test_stated_dims_of_full_rank_leave_the_model_without_batch_dimension(
    add_model: Any, onnx_backends: Any, resolved: Any
) -> None:
    config = 'input { name: "images" data_type: TYPE_FP32 dims: [ 1, 3, 224, 224 ] }'
    add_model("m", config, {"1/model.onnx": b"x"})
    spec = resolved().spec
    assert spec.max_batch_size == 0
    assert spec.inputs[0].dims == (1, 3, 224, 224)
    assert spec.outputs[0].dims == (-1, 1000)
    assert spec.dynamic_batching is None


def test_missing_types_and_dims_of_stated_tensors_are_filled(add_model: Any, onnx_backends: Any, resolved: Any) -> None:
    config = 'max_batch_size: 8 input { name: "images" format: FORMAT_NCHW } output { name: "scores" }'
    add_model("m", config, {"1/model.onnx": b"x"})
    spec = resolved().spec
    assert not spec.has_default_batch_size
    assert (spec.inputs[0].dims, spec.inputs[0].format) == ((3, 224, 224), "FORMAT_NCHW")
    assert spec.outputs[0].dtype is DType.FP32
    assert spec.dynamic_batching.preferred_batch_sizes == (8,)


COMPLETE = """max_batch_size: 8
input { name: "images" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 1000 ] }
"""


def test_a_complete_configuration_without_a_scheduler_gets_none(
    add_model: Any, onnx_backends: Any, resolved: Any
) -> None:
    add_model("m", COMPLETE, {"1/model.onnx": b"x"})
    assert resolved().spec.dynamic_batching is None


def test_a_complete_configuration_can_be_read_changed_to_a_smaller_batch_and_loaded(
    add_model: Any, onnx_backends: Any, root: Path, resolved: Any
) -> None:
    add_model("m", COMPLETE, {"1/model.onnx": b"x"})
    read = json.loads(resolved().spec.config_json)
    read["max_batch_size"] = 4
    model = Scanner([root]).find("m")
    assert model is not None
    assert resolve(model, 1, ResolveOptions(), json.dumps(read)).spec.max_batch_size == 4


def test_a_batch_of_one_turns_no_batching_on(add_model: Any, onnx_backends: Any, resolved: Any) -> None:
    add_model("m", "max_batch_size: 1", {"1/model.onnx": b"x"})
    assert resolved().spec.dynamic_batching is None


def test_a_stated_output_list_is_a_selection_and_missing_inputs_are_added(
    add_model: Any, described: Any, signature: Any, resolved: Any
) -> None:
    pair = {"a": (DType.FP32, (-1, 2)), "b": (DType.INT64, (-1, 3))}
    described("onnxruntime", "model.onnx", signature(pair, pair))
    config = 'backend: "onnxruntime" max_batch_size: 2 input { name: "b" } output { name: "b" }'
    add_model("m", config, {"1/model.onnx": b"x"})
    spec = resolved().spec
    assert [item.name for item in spec.inputs] == ["b", "a"]
    assert [item.name for item in spec.outputs] == ["b"]


def test_an_optional_input_may_be_left_out_or_is_marked(add_model: Any, described: Any, resolved: Any) -> None:
    inputs = (InputSpec("a", DType.FP32, (2,)), InputSpec("b", DType.FP32, (2,), is_optional=True))
    described("onnxruntime", "model.onnx", ModelSignature(inputs, (OutputSpec("y", DType.FP32, (2,)),), False))
    add_model("m", 'backend: "onnxruntime"', {"1/model.onnx": b"x"})
    assert [item.is_optional for item in resolved().spec.inputs] == [False, True]


@pytest.mark.parametrize(
    ("shape", "is_batchable", "dims", "reshape"),
    [
        ((-1,), True, (1,), ()),
        ((), False, (1,), ()),
        ((-1, 0), True, (-1,), None),
        ((5,), False, (5,), None),
    ],
)
def test_a_tensor_without_dims_of_its_own_becomes_one_reshaped_to_a_scalar(
    add_model: Any,
    described: Any,
    signature: Any,
    resolved: Any,
    shape: Any,
    is_batchable: bool,
    dims: Any,
    reshape: Any,
) -> None:
    io = {"t": (DType.FP32, shape)}
    described("onnxruntime", "model.onnx", signature(io, io, is_batchable=is_batchable))
    add_model("m", 'backend: "onnxruntime"', {"1/model.onnx": b"x"})
    spec = resolved().spec
    assert (spec.inputs[0].dims, spec.inputs[0].reshape) == (dims, reshape)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('input { name: "image" }', ["unexpected input 'image'", "['images']"]),
        ('output { name: "probs" }', ["unexpected output 'probs'", "['scores']"]),
        ('input { name: "images" data_type: TYPE_UINT8 }', ["'images'", "TYPE_FP32", "TYPE_UINT8"]),
        (
            'max_batch_size: 4 input { name: "images" dims: [ 3, 640, 640 ] }',
            ["[3, 224, 224]", "after the batch dimension", "[3, 640, 640]"],
        ),
        ('input { name: "images" dims: [ 3, 224, 224 ] }', ["[-1, 3, 224, 224]", "lack max_batch_size"]),
        ('max_batch_size: 4 output { name: "scores" dims: [ -1, 1000 ] }', ["[1000]", "[-1, 1000]"]),
    ],
)
def test_what_contradicts_the_file_is_refused_with_both_sides(
    add_model: Any, onnx_backends: Any, resolved: Any, config: str, words: list[str]
) -> None:
    add_model("m", 'backend: "onnxruntime" ' + config, {"1/model.onnx": b"x"})
    with pytest.raises(BadModelConfig) as caught:
        resolved()
    for word in ["model 'm'", *words]:
        assert word in caught.value.message


def test_a_reshape_is_what_the_file_is_compared_with(add_model: Any, onnx_backends: Any, resolved: Any) -> None:
    config = 'max_batch_size: 4 input { name: "images" dims: [ 150528 ] reshape { shape: [ 3, 224, 224 ] } }'
    add_model("m", config, {"1/model.onnx": b"x"})
    assert resolved().spec.inputs[0].reshape == (3, 224, 224)


@pytest.mark.parametrize(("batch", "first", "fits"), [(4, 1, False), (1, 1, True), (1, 2, False), (4, -1, True)])
def test_max_batch_size_needs_a_free_first_dimension_or_one_row(
    add_model: Any, described: Any, signature: Any, resolved: Any, batch: int, first: int, fits: bool
) -> None:
    io = {"t": (DType.FP32, (first, 3))}
    described("onnxruntime", "model.onnx", signature(io, io, is_batchable=first == -1))
    add_model("m", f'backend: "onnxruntime" max_batch_size: {batch}', {"1/model.onnx": b"x"})
    if fits:
        assert resolved().spec.inputs[0].dims == (3,)
    else:
        with pytest.raises(BadModelConfig, match=rf"max_batch_size: expected 0.*given {batch}"):
            resolved()


@pytest.mark.parametrize(
    ("config", "files", "backend", "file"),
    [
        ("", {"1/model.xml": b"x"}, "openvino", "model.xml"),
        ("", {"1/model.tflite": b"x"}, "openvino", "model.tflite"),
        ("", {"1/model.onnx": b"x", "1/model.plan": b"x"}, "tensorrt", "model.plan"),
        ("", {"1/model.py": b"x"}, "python", "model.py"),
        ('platform: "tensorrt_plan"', {"1/model.plan": b"x"}, "tensorrt", "model.plan"),
        ('default_model_filename: "net.xml"', {"1/net.xml": b"x"}, "openvino", "net.xml"),
        ('default_model_filename: "sub/net.TFLITE"', {"1/sub/net.TFLITE": b"x"}, "openvino", "sub/net.TFLITE"),
        ('backend: "openvino"', {"1/model.onnx": b"x"}, "openvino", "model.onnx"),
        ('backend: "openvino"', {"1/model.onnx": b"x", "1/model.xml": b"x"}, "openvino", "model.xml"),
        ('backend: "onnxruntime"', {"1/model.onnx/weights": b"x"}, "onnxruntime", "model.onnx"),
    ],
)
def test_the_runtime_is_chosen_by_statement_then_file_name(
    add_model: Any, described: Any, signature: Any, resolved: Any, config: str, files: Any, backend: str, file: str
) -> None:
    seen = signature(IMAGE, SCORES)
    for name, default in (
        ("openvino", "model.xml"),
        ("onnxruntime", "model.onnx"),
        ("tensorrt", "model.plan"),
        ("python", "model.py"),
    ):
        described(name, default, seen)
    path = add_model("m", config, files)
    found = resolved()
    assert (found.spec.backend, found.file.path, found.spec.default_model_filename) == (
        backend,
        path / "1" / file,
        file,
    )


def test_the_suffix_of_the_models_name_chooses_a_backend_when_nothing_else_does(
    add_model: Any, described: Any, signature: Any, resolved: Any
) -> None:
    described("identity", "", signature(IMAGE, SCORES))
    add_model("copy.identity")
    assert resolved("copy.identity").spec.backend == "identity"


@pytest.mark.parametrize(
    ("names", "content"),
    [
        (
            ("best.onnx", "rf.pkl"),
            "call 'best.onnx' 'model.onnx', or name it in default_model_filename: ",
        ),
        (("model.json", "rf.pkl"), "call 'model.json' 'xgboost.json' if XGBoost wrote it, or "),
        (("trees.txt",), "call 'trees.txt' 'model.txt' if LightGBM wrote it, or "),
        (("model.pkl",), "convert a pickle to ONNX, of scikit-learn with the package skl2onnx, or "),
        (("a.h5", "b"), "the folder holds 'a.h5', 'b', and "),
        ([f"{number}.h5" for number in range(10)], "'6.h5', '7.h5' and 2 more, and "),
        ((), "as model.onnx (`edge-server check -v` lists the names of other formats): the folder is empty, "),
    ],
)
def test_a_folder_without_a_known_file_is_refused_with_what_it_holds(
    add_model: Any, resolved: Any, names: Sequence[str], content: str
) -> None:
    folder = add_model("m", "", {f"1/{name}": b"x" for name in names})
    (folder / "1").mkdir(exist_ok=True)
    with pytest.raises(BadModelConfig) as caught:
        resolved()
    assert content in caught.value.message
    assert caught.value.message.startswith(("model 'm': call ", "model 'm': copy ", "model 'm': convert "))


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("m", "", ["the configuration names no backend", "model.onnx"]),
        ("yolo.v8", "", ["no backend"]),
        ("m", 'platform: "caffe2_netdef"', ["platform", "onnxruntime_onnx", "'caffe2_netdef'"]),
        ("m", 'platform: "tensorrt_plan" backend: "onnxruntime"', ["'tensorrt_plan'", "'onnxruntime'"]),
    ],
)
def test_a_model_that_nothing_can_open_names_the_expected_files(
    add_model: Any, resolved: Any, name: str, config: str, words: list[str]
) -> None:
    add_model(name, config)
    with pytest.raises(BadModelConfig) as caught:
        resolved(name)
    for word in [f"'{name}'", *words]:
        assert word in caught.value.message


def test_a_missing_file_is_named_beside_the_present_ones(add_model: Any, onnx_backends: Any, resolved: Any) -> None:
    add_model("m", 'backend: "onnxruntime"', {"1/net.onnx": b"x"})
    with pytest.raises(LoadError, match=r"model 'm' version 1: copy .*/1/model.onnx': .*'net.onnx'"):
        resolved()


def test_the_first_runtime_that_reads_an_onnx_file_wins_and_the_others_are_noted(
    add_model: Any, described: Any, signature: Any, resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(type(described("x", ""))):  # type: ignore[misc]
        def inspect(self, file: Any, parameters: Any) -> Any:
            raise LoadError("model 'm' version 1, file 'model.onnx': operator NonZero is not known")

    import edge_server.backends as backends

    monkeypatch.setitem(backends._made, "onnxruntime", Refusing("onnxruntime", "model.onnx", None))
    described("openvino", "model.xml", signature(IMAGE, SCORES))
    add_model("m", None, {"1/model.onnx": b"\x08"})
    spec = resolved().spec
    assert (spec.backend, spec.platform) == ("openvino", "")
    skipped = "backend 'onnxruntime' was skipped for 'openvino': operator NonZero is not known"
    assert skipped in spec.notes
    assert set(spec.routine_notes) == {*spec.notes, *spec.unlogged_notes} - {skipped}


def test_an_onnx_file_that_no_runtime_reads_gives_every_reason(
    add_model: Any, onnx_backends: Any, resolved: Any
) -> None:
    add_model("m", None, {"1/model.onnx": b"\x08corrupt"})
    with pytest.raises(LoadError) as caught:
        resolved()
    assert "model 'm'" in caught.value.message
    assert "openvino cannot parse" in caught.value.message
    assert "onnxruntime cannot parse" in caught.value.message


def test_an_onnx_file_without_any_runtime_is_a_missing_backend(
    add_model: Any, resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise BackendMissing(install_hint(name))

    monkeypatch.setattr("edge_server.repository.model_config.auto_complete.load_backend", missing)
    add_model("m", None, {"1/model.onnx": b"x"})
    with pytest.raises(BackendMissing, match=r"\[onnxruntime\].*\[openvino\]"):
        resolved()


WARNED = "openvino computes in at most 32 bits: input 'x' (INT64)"


def test_a_runtime_that_warns_of_wrong_results_is_taken_only_if_it_is_stated(
    add_model: Any, described: Any, signature: Any, resolved: Any
) -> None:
    described("openvino", "model.xml", signature(IMAGE, SCORES)._replace(warnings=(WARNED,)))
    described("onnxruntime", "model.onnx", signature(IMAGE, SCORES))
    add_model("m", None, {"1/model.onnx": b"x"})
    add_model("stated", 'backend: "openvino"', {"1/model.onnx": b"x"})
    spec = resolved().spec
    assert (spec.backend, spec.warnings) == ("onnxruntime", ())
    spec = resolved("stated").spec
    assert (spec.backend, spec.warnings) == ("openvino", (WARNED,))


def test_an_onnx_file_whose_only_runtime_warns_is_refused_with_what_to_install(
    add_model: Any, described: Any, signature: Any, resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = described("openvino", "model.xml", signature(IMAGE, SCORES)._replace(warnings=(WARNED,)))

    def load(name: str) -> Any:
        if name == "openvino":
            return known
        raise BackendMissing(install_hint(name))

    monkeypatch.setattr("edge_server.repository.model_config.auto_complete.load_backend", load)
    add_model("m", None, {"1/model.onnx": b"x"})
    with pytest.raises(LoadError) as caught:
        resolved()
    for part in ("model 'm'", WARNED, 'backend: "openvino" in config.pbtxt accepts that', "[onnxruntime]"):
        assert part in caught.value.message


def test_parameters_reach_the_inspection(add_model: Any, onnx_backends: Any, resolved: Any) -> None:
    config = 'backend: "onnxruntime" parameters { key: "k" value { string_value: "v" } }'
    add_model("m", config, {"1/model.onnx": b"x"})
    resolved()
    file, parameters = onnx_backends[1].inspected[0]
    assert (file.version, parameters) == (1, {"k": "v"})


def _onnx(shape: list[int | str]) -> bytes:
    """A real file: y = x + 1."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], np.ones(1, np.float32))
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["y"])],
        "add",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [one],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(("shape", "batch", "dims"), [(["n", 3], 4, (3,)), ([2, 3], 0, (2, 3))])
def test_a_real_onnx_file_is_completed_by_each_runtime(
    add_model: Any, resolved: Any, backend: str, shape: list[int | str], batch: int, dims: tuple[int, ...]
) -> None:
    pytest.importorskip(backend)
    pytest.importorskip(f"edge_server.backends.{backend}")
    add_model("m", f'backend: "{backend}"', {"1/model.onnx": _onnx(shape)})
    spec = resolved().spec
    assert (spec.max_batch_size, spec.inputs[0].dims, spec.inputs[0].dtype) == (batch, dims, DType.FP32)
    assert [item.name for item in spec.outputs] == ["y"]
    assert json.loads(spec.config_json)["default_model_filename"] == "model.onnx"


@pytest.mark.parametrize("content", [b"", b"not onnx at all", _onnx(["n", 3])[:40]])
def test_a_real_runtime_refuses_a_corrupt_file_as_a_load_error(add_model: Any, resolved: Any, content: bytes) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("edge_server.backends.onnxruntime.backend")
    add_model("m", 'backend: "onnxruntime"', {"1/model.onnx": content})
    with pytest.raises(LoadError, match="'m'"):
        resolved()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4),
        ({"": {"default-max-batch-size": "9"}}, 9),
        ({"onnxruntime": {"default-max-batch-size": "9"}}, 9),
        ({"openvino": {"default-max-batch-size": "9"}}, 4),
        ({"": {"default-max-batch-size": "9"}, "onnxruntime": {"default-max-batch-size": "2"}}, 2),
        ({"": {"default-max-batch-size": "0"}}, 0),
    ],
)
def test_the_default_batch_size_of_the_settings_holds_for_a_model_that_states_none(
    root: Path, write_onnx: Any, settings: dict[str, dict[str, str]], expected: int
) -> None:
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    shape = ("x", onnx.TensorProto.FLOAT, ["n", 3]), ("y", onnx.TensorProto.FLOAT, ["n", 3])
    write_onnx([node], [shape[0]], [shape[1]], model="models/relu")
    config = root / "relu/config.pbtxt"
    config.write_text('backend: "onnxruntime"')
    model = Scanner([root]).find("relu")
    assert model is not None
    options = ResolveOptions(backend_settings=settings)
    assert resolve(model, 1, options).spec.max_batch_size == expected
    config.write_text('backend: "onnxruntime" max_batch_size: 5')
    model = Scanner([root]).find("relu")
    assert model is not None
    assert resolve(model, 1, options).spec.max_batch_size == 5


def test_a_backend_with_a_default_batch_size_of_its_own_keeps_it_and_refuses_another(
    add_model: Any, described: Any, signature: Any, resolved: Any
) -> None:
    described("onnxruntime", "model.onnx", signature(IMAGE, SCORES)).default_max_batch_size = 8192
    add_model("m", 'backend: "onnxruntime"', {"1/model.onnx": b"x"})
    found = resolved(backend_settings={"": {"default-max-batch-size": "9"}})
    assert found.spec.max_batch_size == 8192
    with pytest.raises(BadModelConfig, match=r"default of its own, 8192; state max_batch_size in config\.pbtxt"):
        resolved(backend_settings={"onnxruntime": {"default-max-batch-size": "9"}})
    add_model("stated", 'backend: "onnxruntime" max_batch_size: 5', {"1/model.onnx": b"x"})
    stated = resolved("stated", backend_settings={"onnxruntime": {"default-max-batch-size": "9"}})
    assert stated.spec.max_batch_size == 5


@pytest.fixture
def add_graph(root: Path) -> Callable[..., None]:
    """Return a function that adds the model "m" of ONNX Runtime with one graph."""

    def add(nodes: Any, inputs: Any, outputs: Any, config: str = "") -> None:
        model = helper.make_model(
            helper.make_graph(nodes, "g", inputs, outputs),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=8,
        )
        folder = root / "m/1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        (root / "m/config.pbtxt").write_text(f'backend: "onnxruntime" {config}')

    return add


def tensor_info(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


X4 = tensor_info("x", ["b", 4])
RESHAPE = [helper.make_node("Reshape", ["x", "s"], ["y"])], [X4, tensor_info("s", [None], TensorProto.INT64)]


def test_an_output_without_a_declared_rank_is_no_scalar(add_graph: Any, resolved: Any) -> None:
    add_graph(*RESHAPE, [tensor_info("y", None)])
    (output,) = resolved().spec.outputs
    assert (output.dims, output.reshape, output.may_differ) == ((-1,), None, True)
    add_graph([helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], [X4], [tensor_info("y", [])])
    (output,) = resolved().spec.outputs
    assert (output.dims, output.reshape) == ((1,), ())


@pytest.mark.parametrize("dims", ["-1, -1", "2, 2, -1", "7"])
def test_a_configuration_may_state_any_dims_where_the_file_declares_no_rank(
    dims: str, add_graph: Any, resolved: Any
) -> None:
    add_graph(*RESHAPE, [tensor_info("y", None)], f'output {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] }}')
    (output,) = resolved().spec.outputs
    assert (list(output.dims), output.may_differ) == ([int(dim) for dim in dims.split(",")], False)


def test_an_input_without_a_declared_rank_is_taken_as_one_dimension_with_a_note(add_graph: Any, resolved: Any) -> None:
    nodes, outputs = [helper.make_node("Neg", ["x"], ["y"])], [tensor_info("y", None)]
    add_graph(nodes, [tensor_info("x", None)], outputs)
    spec = resolved().spec
    assert spec.inputs[0].dims == (-1,)
    assert any("does not declare the number of dimensions of input 'x'" in note for note in spec.notes)
    add_graph(nodes, [tensor_info("x", None)], outputs, 'input { name: "x" data_type: TYPE_FP32 dims: [ 2, -1 ] }')
    spec = resolved().spec
    assert spec.inputs[0].dims == (2, -1)
    assert not any("does not declare" in note for note in spec.notes)


@pytest.mark.parametrize(("dims", "may_differ"), [("4", True), ("-1", False), ("", True)])
def test_dims_that_a_configuration_states_differently_than_the_file_are_a_promise(
    dims: str, may_differ: bool, add_graph: Any, resolved: Any
) -> None:
    stated = f'output {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] }}' if dims else ""
    add_graph(
        [helper.make_node("Neg", ["x"], ["y"])], [X4], [tensor_info("y", ["b", 4])], f"max_batch_size: 8 {stated}"
    )
    assert resolved().spec.outputs[0].may_differ == may_differ


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_an_optional_input_that_the_file_demands_is_refused(
    backend: str, add_graph: Any, resolved: Any, root: Path
) -> None:
    add_graph(
        [helper.make_node("Add", ["x", "z"], ["y"])], [X4, tensor_info("z", ["b", 4])], [tensor_info("y", ["b", 4])]
    )
    stated = 'max_batch_size: 4 input { name: "z" data_type: TYPE_FP32 dims: [ 4 ] optional: true }'
    (root / "m/config.pbtxt").write_text(f'backend: "{backend}" {stated}')
    with pytest.raises(BadModelConfig, match="input 'z' optional: expected false, because the model file demands it"):
        resolved()


SEQUENCE = helper.make_value_info(
    "parts", helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
)
OPTIONAL = helper.make_value_info(
    "maybe", helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["b", 4]))
)
WITH_SEQUENCE = (
    [
        helper.make_node("Neg", ["x"], ["y"]),
        helper.make_node("SequenceConstruct", ["x"], ["parts"]),
        helper.make_node("Optional", ["x"], ["maybe"]),
    ],
    [X4],
    [tensor_info("y", ["b", 4]), SEQUENCE, OPTIONAL],
)


def test_an_output_that_requests_cannot_carry_may_be_left_out(add_graph: Any, resolved: Any) -> None:
    add_graph(*WITH_SEQUENCE, 'max_batch_size: 4 output { name: "y" }')
    assert [item.name for item in resolved().spec.outputs] == ["y"]


@pytest.mark.parametrize("config", ["", 'output { name: "y" } output { name: "parts" }'])
def test_an_output_that_requests_cannot_carry_is_named_with_what_to_do(
    config: str, add_graph: Any, resolved: Any
) -> None:
    add_graph(*WITH_SEQUENCE, config)
    reason = r"model 'm': output 'parts' of the model file is a seq\(.*list the other outputs in its config.pbtxt"
    with pytest.raises(BadModelConfig, match=reason):
        resolved()


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("shape", [[], ["a", "b"]])
def test_the_returned_configuration_of_a_scalar_is_accepted(
    backend: str, shape: Any, add_graph: Any, resolved: Any, root: Path
) -> None:
    nodes = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)]
    add_graph(nodes, [tensor_info("x", shape)], [tensor_info("y", [])])
    (root / "m/config.pbtxt").write_text(f'backend: "{backend}"')
    returned = resolved().spec
    model = Scanner([root]).find("m")
    assert model is not None
    again = resolve(model, 1, ResolveOptions(), returned.config_json).spec
    assert (again.inputs, again.outputs) == (returned.inputs, returned.outputs)
    assert again.outputs[0].reshape == ()


def test_a_library_of_operators_is_inside_the_models_folder(
    add_model: Any, onnx_backends: Any, root: Path, resolved: Any
) -> None:
    add_model(
        "m",
        'backend: "onnxruntime" model_operations { op_library_filename: "libops.so" }',
        {"1/model.onnx": b"x", "libops.so": b"x"},
    )
    onnx_backends[1].used_fields = OnnxRuntimeBackend.used_fields
    found = resolved()
    assert found.file.operator_libraries == ((root / "m/libops.so").resolve(),)
    assert not any("model_operations" in note for note in found.spec.notes)
    (root / "libops.so").write_bytes(b"x")
    for outside in ("../libops.so", str(root / "m/libops.so"), "1/none.so"):
        (root / "m/config.pbtxt").write_text(
            f'backend: "onnxruntime" model_operations {{ op_library_filename: "{outside}" }}'
        )
        with pytest.raises(BadModelConfig, match=r"model 'm': model_operations\.op_library_filename: "):
            resolved()


def test_an_output_of_any_size_in_the_file_cannot_be_stated_with_a_size(add_graph: Any, resolved: Any) -> None:
    graph = [helper.make_node("Neg", ["x"], ["y"])], [tensor_info("x", ["b", "n"])], [tensor_info("y", ["b", "n"])]
    add_graph(*graph, 'max_batch_size: 4 output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }')
    with pytest.raises(BadModelConfig, match=r"output 'y' dims: expected -1 for each dimension .*\[-1\], given \[4\]"):
        resolved()
    add_graph(*graph, 'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }')
    assert [item.dims for item in (*resolved().spec.inputs, *resolved().spec.outputs)] == [(4,), (-1,)]


@pytest.mark.parametrize(
    "name", ["config.pbtxt.txt", "Config.pbtxt", "config.pbtx", "config.pb.txt", "config.txt", "config"]
)
def test_a_configuration_under_another_name_is_named(
    add_model: Any, resolved: Any, onnx_backends: Any, name: str
) -> None:
    path = add_model("m", files={name: b"max_batch_size: 1", "labels.txt": b"a"})
    expected = f"'{name}' is not read, did you mean config.pbtxt?"
    with pytest.raises(LoadError) as failed:
        resolved()
    assert failed.value.message.endswith(f"; {expected}")
    (path / "1" / "model.onnx").write_bytes(b"x")
    assert resolved().spec.warnings == (expected,)
