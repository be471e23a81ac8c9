"""Backend openvino: file formats, properties, precision and shapes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import Backend, ModelFile
from edge_server.backends.openvino import options
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, InvalidRequest, LoadError

ov = pytest.importorskip("openvino")
onnx = pytest.importorskip("onnx")
T, node, numpy_helper = onnx.TensorProto, onnx.helper.make_node, onnx.numpy_helper

Write = Callable[..., Any]
X = (InputSpec("X", DType.FP32, (64,)),)
Y = (OutputSpec("Y", DType.FP32, (64,)),)


@pytest.fixture
def backend() -> Backend:
    return load_backend("openvino")


@pytest.fixture
def linear(write_onnx: Write) -> Callable[..., Any]:
    """Return a function that writes Y = 2 X, [rows, 64]."""

    def write(rows: int | str = "N", **options: Any) -> Any:
        weights = [numpy_helper.from_array(np.eye(64, dtype="f4") * 2, "W")]
        tensors = [("X", T.FLOAT, [rows, 64])], [("Y", T.FLOAT, [rows, 64])]
        return write_onnx([node("MatMul", ["X", "W"], ["Y"])], *tensors, weights, **options)

    return write


def as_ir(file: ModelFile) -> ModelFile:
    path = file.path.with_name("model.xml")
    ov.save_model(ov.Core().read_model(str(file.path)), str(path), compress_to_fp16=False)
    return ModelFile(path, file.model_dir, file.version)


def result(session: Any, rows: int = 1) -> np.ndarray:
    found: np.ndarray = session.run({"X": np.ones((rows, 64), dtype="f4")}, ["Y"])["Y"]
    return found


def test_ir_with_its_weights_file_is_read(backend: Backend, linear: Write, job: Callable[..., Any]) -> None:
    file = as_ir(linear())
    signature = backend.inspect(file, {})
    assert signature is not None
    assert signature.inputs == (InputSpec("X", DType.FP32, (-1, 64)),)
    assert signature.is_batchable
    session = backend.open(job(file))
    assert result(session, 3).tolist() == [[2.0] * 64] * 3
    session.close()


def test_operators_that_openvino_lacks_are_named_without_its_report(backend: Backend, write_onnx: Write) -> None:
    nodes = [
        node("Turn", ["X"], ["turned"], domain="com.example"),
        node("Fold", ["turned"], ["Y"], domain="com.example"),
    ]
    file = write_onnx(nodes, [("X", T.FLOAT, ["N", 4])], [("Y", T.FLOAT, ["N", 4])], [])
    with pytest.raises(LoadError) as caught:
        backend.inspect(file, {})
    title, _, reason = caught.value.message.partition(": openvino cannot convert ")
    assert title == "model 'made' version 1, file 'model.onnx'"
    assert sorted(reason.split(", ")) == ["com.example.Fold", "com.example.Turn"]


@pytest.mark.parametrize("damage", ["weights missing", "weights cut", "xml cut", "not xml"])
def test_damaged_ir_is_a_load_error_and_nothing_is_printed(
    damage: str, backend: Backend, linear: Write, job: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    file = as_ir(linear())
    weights = file.path.with_suffix(".bin")
    if damage == "weights missing":
        weights.unlink()
    elif damage == "weights cut":
        os.truncate(weights, 100)
    elif damage == "xml cut":
        os.truncate(file.path, 700)
    else:
        file.path.write_bytes(b"\x00\xff" * 5000)
    with pytest.raises(LoadError, match=r"model 'made' version 1, file 'model\.xml'") as caught:
        backend.open(job(file))
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")


def test_a_broken_tensorflow_lite_file_is_a_load_error_and_nothing_is_printed(
    backend: Backend, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lite" / "1" / "model.tflite"
    path.parent.mkdir(parents=True)
    for content in (b"abc" * 3000, b"\x1c\x00\x00\x00TFL3" + bytes(2000)):
        path.write_bytes(content)
        with pytest.raises(LoadError, match=r"model 'lite' version 1, file 'model\.tflite'"):
            backend.inspect(ModelFile(path, tmp_path / "lite", 1), {})
    assert capfd.readouterr() == ("", "")


def test_unnamed_ir_tensors_are_named_after_their_layer(
    backend: Backend, tmp_path: Path, job: Callable[..., Any]
) -> None:
    opset = pytest.importorskip("openvino.opset8")
    given = opset.parameter([-1, 4], np.float32, name="given")
    doubled = opset.add(given, given, name="doubled")
    path = tmp_path / "unnamed" / "1" / "model.xml"
    path.parent.mkdir(parents=True)
    ov.save_model(ov.Model([doubled], [given], "unnamed"), str(path))
    path.write_text(re.sub(r' (output_)?names="[^"]*"', "", path.read_text()))
    file = ModelFile(path, tmp_path / "unnamed", 1)
    signature = backend.inspect(file, {})
    assert signature is not None
    names = [one.name for one in (*signature.inputs, *signature.outputs)]
    assert names == ["given", "doubled"]
    session = backend.open(job(file))
    assert session.run({"given": np.ones((1, 4), dtype="f4")}, ["doubled"])["doubled"].tolist() == [[2.0] * 4]
    session.close()


def test_a_model_with_f32_precision_runs_in_f32(backend: Backend, linear: Write, job: Callable[..., Any]) -> None:
    session = backend.open(job(linear()))
    assert session.info.precision == "f32"
    assert session.info.options["INFERENCE_PRECISION_HINT"] == "f32"
    session.close()


def test_a_precision_that_the_cpu_lacks_is_refused_but_the_hint_is_not(
    backend: Backend, linear: Write, job: Callable[..., Any]
) -> None:
    has_bf16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    hinted = backend.open(job(linear(), parameters={"HINT_BF16": "YES"}))
    assert hinted.info.precision == ("bf16" if has_bf16 else "f32")
    hinted.close()
    if has_bf16:
        session = backend.open(job(linear(), parameters={"precision": "bf16"}))
        assert session.info.precision == "bf16"
        session.close()
    else:
        with pytest.raises(LoadError, match="precision 'bf16' on this CPU; it offers f32"):
            backend.open(job(linear(), parameters={"precision": "bf16"}))


def test_a_quantised_file_runs_in_int8_and_reports_it(
    backend: Backend, write_onnx: Write, job: Callable[..., Any]
) -> None:
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(np.float32(0.02), "scale"),
        numpy_helper.from_array(np.int8(0), "zero"),
        numpy_helper.from_array(random.integers(-99, 99, (64, 64), dtype="i1"), "Wq"),
    ]
    nodes = [
        node("QuantizeLinear", ["X", "scale", "zero"], ["q"]),
        node("DequantizeLinear", ["q", "scale", "zero"], ["x"]),
        node("DequantizeLinear", ["Wq", "scale", "zero"], ["W"]),
        node("MatMul", ["x", "W"], ["Y"]),
    ]
    file = write_onnx(nodes, [("X", T.FLOAT, ["N", 64])], [("Y", T.FLOAT, ["N", 64])], weights)
    session = backend.open(job(file, parameters={"precision": "int8"}))
    assert session.info.precision == "int8"
    session.close()


def test_int8_requires_a_quantised_file(backend: Backend, linear: Write, job: Callable[..., Any]) -> None:
    with pytest.raises(LoadError, match="not quantised"):
        backend.open(job(linear(), parameters={"precision": "int8"}))


def test_each_instance_gets_one_stream_by_default(backend: Backend, linear: Write, job: Callable[..., Any]) -> None:
    for instances, parameters, streams in ((1, {}, "1"), (2, {}, "2"), (2, {"NUM_STREAMS": "1"}, "1")):
        session = backend.open(job(linear(), instances=instances, parameters=parameters))
        assert session.info.options["NUM_STREAMS"] == streams
        session.close()


def test_the_number_of_threads_follows_the_cpu_quota_by_default(
    backend: Backend, linear: Write, job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "limited_cores", lambda: 1)
    for parameters, threads in (({}, "1"), ({"INFERENCE_NUM_THREADS": "2"}, "2")):
        session = backend.open(job(linear(), parameters=parameters))
        assert session.info.options["INFERENCE_NUM_THREADS"] == threads
        session.close()


def test_properties_are_passed_to_openvino_and_default_to_the_settings(
    backend: Backend, linear: Write, job: Callable[..., Any], tmp_path: Path
) -> None:
    settings = {"INFERENCE_NUM_THREADS": "2", "PERFORMANCE_HINT": "throughput", "default-max-batch-size": "4"}
    parameters = {"INFERENCE_NUM_THREADS": "1", "CACHE_DIR": str(tmp_path / "cache"), "COMPILATION_NUM_THREADS": "1"}
    session = backend.open(job(linear(), settings=settings, parameters=parameters))
    assert session.info.options["INFERENCE_NUM_THREADS"] == "1"
    assert session.info.options["PERFORMANCE_HINT"] == "THROUGHPUT"
    assert list((tmp_path / "cache").iterdir())
    assert result(session)[0, 0] == 2
    session.close()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"NO_SUCH_PROPERTY": "1"}, "NO_SUCH_PROPERTY"),
        ({"NUM_STREAMS": "many"}, "MANY"),
        ({"TARGET_DEVICE": "TPU"}, "no device 'TPU' here; it finds: CPU"),
        ({"CPU_EXTENSION_PATH": "/nonexistent/libcustom.so"}, "libcustom"),
        ({"SKIP_OV_DYNAMIC_BATCHSIZE": "perhaps"}, "SKIP_OV_DYNAMIC_BATCHSIZE"),
    ],
)
def test_an_invalid_option_is_a_load_error_in_one_line(
    parameters: dict[str, str], message: str, backend: Backend, linear: Write, job: Callable[..., Any]
) -> None:
    with pytest.raises(LoadError, match=f"model 'made'.*{message}") as caught:
        backend.open(job(linear(), parameters=parameters))
    assert "\n" not in caught.value.message


def test_a_fixed_first_dimension_becomes_dynamic_if_the_model_batches(
    backend: Backend, linear: Write, job: Callable[..., Any]
) -> None:
    session = backend.open(job(linear(rows=1), inputs=X, outputs=Y, max_batch_size=8))
    assert result(session, 5).shape == (5, 64)
    session.close()


def test_batches_are_padded_if_the_model_is_compiled_for_max_batch_size_only(
    backend: Backend, linear: Write, job: Callable[..., Any]
) -> None:
    fixed = {"SKIP_OV_DYNAMIC_BATCHSIZE": "YES"}
    padding = backend.open(
        job(linear(), inputs=X, outputs=Y, max_batch_size=4, parameters={**fixed, "ENABLE_BATCH_PADDING": "YES"})
    )
    for rows in (1, 3, 4):
        assert result(padding, rows).tolist() == [[2.0] * 64] * rows
    exact = backend.open(job(linear(), inputs=X, outputs=Y, max_batch_size=4, parameters=fixed))
    assert result(exact, 4).shape == (4, 64)
    with pytest.raises(InvalidRequest, match="model 'made'"):
        result(exact, 3)
    padding.close()
    exact.close()


def test_a_model_of_one_row_is_compiled_for_a_fixed_shape(
    backend: Backend, linear: Write, job: Callable[..., Any]
) -> None:
    session = backend.open(job(linear(), inputs=X, outputs=Y, max_batch_size=1))
    assert result(session, 1).tolist() == [[2.0] * 64]
    with pytest.raises(InvalidRequest, match=r"has the shape \[2, 64\], but openvino accepts only \[1, 64\]"):
        result(session, 2)
    session.close()
    ragged = (X[0]._replace(allow_ragged_batch=True),)
    session = backend.open(job(linear(), inputs=ragged, outputs=Y, max_batch_size=1))
    assert result(session, 2).shape == (2, 64)
    session.close()


def test_an_invalid_boolean_is_refused_before_any_file_is_read(
    backend: Backend, linear: Write, job: Callable[..., Any]
) -> None:
    file = linear()
    os.truncate(file.path, 100)
    parameters = {"SKIP_OV_DYNAMIC_BATCHSIZE": "YES", "ENABLE_BATCH_PADDING": "perhaps"}
    with pytest.raises(LoadError, match="ENABLE_BATCH_PADDING must be yes or no, got 'perhaps'"):
        backend.open(job(file, inputs=X, outputs=Y, max_batch_size=4, parameters=parameters))


def test_inputs_get_the_configured_dims_on_request(
    backend: Backend, write_onnx: Write, job: Callable[..., Any]
) -> None:
    file = write_onnx([node("Neg", ["X"], ["Y"])], [("X", T.FLOAT, ["N", "M"])], [("Y", T.FLOAT, ["N", "M"])])
    session = backend.open(job(file, inputs=X, outputs=Y, max_batch_size=4, parameters={"RESHAPE_IO_LAYERS": "YES"}))
    assert result(session, 2).shape == (2, 64)
    with pytest.raises(InvalidRequest, match=r"has the shape \[2, 63\], but openvino accepts only \[-1, 64\]"):
        session.run({"X": np.ones((2, 63), dtype="f4")}, ["Y"])
    session.close()


OVERWRITE = """
import os, sys, pathlib
import numpy as np
from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.core.model_spec import ModelSpec
model_dir = pathlib.Path(sys.argv[1])
file = ModelFile(model_dir / "1" / "model.xml", model_dir, 1)
spec = ModelSpec("made", "openvino", "", 0, (), (), ())
session = load_backend("openvino").open(OpenJob(spec, file, "made_0"))
maps = pathlib.Path("/proc/self/maps")
assert not maps.exists() or "model.bin" not in maps.read_text()
os.truncate(file.path.with_suffix(".bin"), 0)
print(session.run({"X": np.ones((1, 64), dtype="f4")}, ["Y"])["Y"].sum())
"""


def test_overwriting_the_weights_file_does_not_change_the_loaded_model(backend: Backend, linear: Write) -> None:
    file = as_ir(linear())
    done = subprocess.run(
        [sys.executable, "-c", OVERWRITE, str(file.model_dir)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "128.0"), done.stderr


ALIASED = """
import sys, pathlib
import numpy as np
from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.core.model_spec import ModelSpec
model_dir = pathlib.Path(sys.argv[1])
spec = ModelSpec("made", "openvino", "", 0, (), (), ())
file = ModelFile(model_dir / "1" / "model.onnx", model_dir, 1)
session = load_backend("openvino").open(OpenJob(spec, file, "made_0"))
given, wrong, changed = [], 0, 0
for turn in range(3000):
    x = np.full(((1, 3, 2, 1, 4)[turn % 5], 64), turn % 50 + 1, "f4")
    found = session.run({"X": x}, ["Y", "Z"])
    wrong += not ((found["Y"] == turn % 50 + 1).all() and (found["Z"] == 1).all())
    given = [*given[-8:], (x, turn % 50 + 1)]
    changed += any((array != value).any() for array, value in given)
print(wrong, changed)
"""


@pytest.mark.parametrize("through", [(T.FLOAT,), (T.FLOAT16, T.FLOAT), ()])
def test_an_input_that_is_also_an_output_is_not_written_by_later_runs(
    through: tuple[int, ...], write_onnx: Write
) -> None:
    """OpenVINO's CPU graph gives such an output the memory of the input, and later runs write there."""
    names = ["X", *(f"cast_{index}" for index in range(len(through)))]
    nodes = [node("Cast", [names[index]], [names[index + 1]], to=kind) for index, kind in enumerate(through)]
    nodes += [node("Identity", [names[-1]], ["Y"]), node("Sign", ["X"], ["Z"])]
    tensors = [("X", T.FLOAT, ["N", 64])], [(name, T.FLOAT, ["N", 64]) for name in "YZ"]
    file = write_onnx(nodes, *tensors, [])
    # In a process of its own: where it fails, it damages the heap.
    done = subprocess.run(
        [sys.executable, "-c", ALIASED, str(file.model_dir)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0 0"), done.stderr


IN_PLACE = """
import sys, pathlib
import numpy as np
from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.core.model_spec import ModelSpec
from edge_server.memory.malloc_settings import read_resident_bytes
model_dir = pathlib.Path(sys.argv[1])
spec = ModelSpec("made", "openvino", "", 0, (), (), ())
file = ModelFile(model_dir / "1" / "model.onnx", model_dir, 1)
session = load_backend("openvino").open(OpenJob(spec, file, "made_0"))
wrong = 0
for turn in range(300):
    x = np.full(((1, 3, 2, 1, 4)[turn % 5], 3, 32, 32 + 16 * (turn % 2)), turn % 50 + 1, "f4")
    x.flags.writeable = turn % 3 > 0
    found, total = session.run({"X": x}, ["Y", "Z"]), 768 * (turn % 50 + 1)
    wrong += not ((found["Y"] == total).all() and (found["Z"] == 1 - total).all() and (x == turn % 50 + 1).all())
picture = np.ones((1, 3, 4096, 4096), "f4")
before = read_resident_bytes()
session.run({"X": picture}, ["Y", "Z"])
# The CPU's graph allocates the input's memory for new shapes, whether it uses it or not. A copy needs as much again.
print(wrong, read_resident_bytes() - before < 1.5 * picture.nbytes)
"""


def test_an_input_that_only_convolutions_read_is_neither_copied_nor_changed(write_onnx: Write) -> None:
    nodes = [node("Conv", ["X", "W"], [name], strides=[16, 16]) for name in "YC"] + [node("Sub", ["one", "C"], ["Z"])]
    tensors = [("X", T.FLOAT, ["N", 3, "H", "W"])], [(name, T.FLOAT, ["N", 1, "h", "w"]) for name in "YZ"]
    weights = {"W": np.ones((1, 3, 16, 16), "f4"), "one": np.ones(1, "f4")}
    file = write_onnx(nodes, *tensors, [numpy_helper.from_array(array, name) for name, array in weights.items()])
    done = subprocess.run(
        [sys.executable, "-c", IN_PLACE, str(file.model_dir)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0 True"), done.stderr


GROWTH = """
import sys, pathlib
import numpy as np
from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.core.model_spec import ModelSpec
from edge_server.memory.malloc_settings import read_resident_bytes
model_dir, parameters = pathlib.Path(sys.argv[1]), dict(item.split("=") for item in sys.argv[2:])
spec = ModelSpec("made", "openvino", "", 0, (), (), (), parameters=parameters)
file = ModelFile(model_dir / "1" / "model.onnx", model_dir, 1)
session = load_backend("openvino").open(OpenJob(spec, file, "made_0"))
sizes = [(1, 3, 8 + turn % 20, 8 + turn // 20) for turn in range(300)]
session.run({"X": np.ones((1, 3, 40, 40), "f4")}, ["Y"])
before = read_resident_bytes()
for size in sizes:
    session.run({"X": np.ones(size, "f4")}, ["Y"])
print(read_resident_bytes() - before)
"""


@pytest.mark.full
def test_memory_for_input_sizes_is_bounded_unless_the_model_says_otherwise(write_onnx: Write) -> None:
    weights, nodes, width = [], [], 3
    for index in range(20):
        layer = np.ones((16 + 2 * index, width, 1, 1), "f4")
        weights.append(numpy_helper.from_array(layer, f"w{index}"))
        nodes.append(node("Conv", [f"c{index - 1}" if index else "X", f"w{index}"], [f"c{index}"]))
        width = len(layer)
    nodes.append(node("GlobalAveragePool", ["c19"], ["Y"]))
    tensors = [("X", T.FLOAT, ["N", 3, "H", "W"])], [("Y", T.FLOAT, ["N", width, 1, 1])]
    file = write_onnx(nodes, *tensors, weights)
    grown = [
        int(subprocess.check_output([sys.executable, "-c", GROWTH, str(file.model_dir), *more], text=True, timeout=120))
        for more in ([], ["CPU_RUNTIME_CACHE_CAPACITY=5000"])
    ]
    assert 3 * grown[0] < grown[1], grown


WIDE = [
    ("time stamps", T.INT64, [node("Sub", ["X", "X"], ["Y"])], ["input 'X' (INT64)", "output 'Y' (INT64)"]),
    ("unsigned", T.UINT32, [node("Add", ["X", "X"], ["Y"])], ["input 'X' (UINT32)", "output 'Y' (UINT32)"]),
    ("doubles", T.DOUBLE, [node("Add", ["X", "X"], ["Y"])], ["input 'X' (FP64)", "output 'Y' (FP64)"]),
    ("a mask", T.INT64, [node("Cast", ["X"], ["Y"], to=T.FLOAT)], ["input 'X' (INT64)"]),
    ("tokens", T.INT64, [node("Gather", ["table", "X"], ["Y"])], []),
    ("classes", T.FLOAT, [node("ArgMax", ["X"], ["Y"], axis=1)], []),
    ("i32", T.INT32, [node("Add", ["X", "X"], ["Y"])], []),
]


@pytest.mark.parametrize(("what", "kind", "nodes", "named"), WIDE, ids=[row[0] for row in WIDE])
def test_tensors_that_openvino_computes_in_fewer_bits_are_a_warning(
    backend: Backend, write_onnx: Write, what: str, kind: int, nodes: list[Any], named: list[str]
) -> None:
    given = {"a mask": T.FLOAT, "tokens": T.FLOAT, "classes": T.INT64}.get(what, kind)
    table = [numpy_helper.from_array(np.zeros(4, "f4"), "table")]
    file = write_onnx(nodes, [("X", kind, ["N", 4])], [("Y", given, ["N", None])], table)
    signature = backend.inspect(file, {})
    assert signature is not None
    assert [", ".join(named) in text for text in signature.warnings] == [True] * bool(named)


def test_a_request_whose_shape_fails_does_not_fail_the_next_one(
    backend: Backend, write_onnx: Write, job: Callable[..., Any]
) -> None:
    """After such a run OpenVINO's CPU graph believes itself at the shapes of the one before, and refused those."""
    weights = [numpy_helper.from_array(np.ones((1, 1, 2, 2), "f4"), "W")]
    tensors = [("X", T.FLOAT, list("NCHW"))], [("Y", T.FLOAT, list("ncHW"))]
    file = write_onnx([node("Conv", ["X", "W"], ["Y"])], *tensors, weights)
    session = backend.open(job(file))
    for shape in ((1, 1, 4, 4), (1, 1, 6, 6), (3, 1, 4, 4)):
        for bad in ((2, 2, 4, 4), (1, 3, 5, 5)):
            for _ in range(2):
                assert session.run({"X": np.ones(shape, "f4")}, ["Y"])["Y"].max() == 4
            for _ in range(3):
                with pytest.raises(BackendError, match="channels"):
                    session.run({"X": np.ones(bad, "f4")}, ["Y"])
            found = session.run({"X": np.ones(shape, "f4")}, ["Y"])["Y"]
            assert found.shape == (shape[0], 1, shape[2] - 1, shape[3] - 1)
            assert (found == 4).all()
    session.close()


def test_the_runs_of_a_model_with_a_state_may_not_be_repeated(
    backend: Backend, tmp_path: Path, job: Callable[..., Any]
) -> None:
    ops = ov.opset13
    given = ops.parameter([1, 64], np.float32)
    given.output(0).set_names({"X"})
    total = ops.add(given, ops.read_value(ops.constant(np.zeros((1, 64), np.float32)), "v", np.float32, [1, 64]))
    total.output(0).set_names({"Y"})
    path = tmp_path / "made/1/model.xml"
    path.parent.mkdir(parents=True)
    ov.save_model(ov.Model([ops.result(total, "Y")], [ops.assign(total, "v")], [given], "made"), str(path))
    session = backend.open(job(ModelFile(path, tmp_path / "made", 1), inputs=X, outputs=Y))
    assert [result(session).max() for _ in range(2)] == [1, 2]
    assert not session.is_repeatable
    session.close()


def test_a_request_whose_shape_fails_does_not_change_the_next_response(
    backend: Backend, write_onnx: Write, job: Callable[..., Any]
) -> None:
    """The next one was answered in the shape of the one that failed, filled up with what lay in memory."""
    tensors = [("X", T.FLOAT, ["a", "b"]), ("V", T.FLOAT, ["c", "d"])], [("R", T.FLOAT, ["a", "b"])]
    file = write_onnx([node("Relu", ["X"], ["R"]), node("Add", ["X", "V"], ["S"])], *tensors[:1], [
        *tensors[1], ("S", T.FLOAT, ["a", "b"])])  # fmt: skip
    session = backend.open(job(file))
    x, v = np.arange(8, dtype="f4").reshape(2, 4), np.ones((2, 4), "f4")
    for _ in range(3):
        found = session.run({"X": x, "V": v}, ["R", "S"])
        np.testing.assert_array_equal(found["R"], x)
        np.testing.assert_array_equal(found["S"], x + 1)
        with pytest.raises(BackendError, match="mismatch"):
            session.run({"X": np.full((2, 8), 9, "f4"), "V": v}, ["R", "S"])
    np.testing.assert_array_equal(session.run({"X": x, "V": v}, ["R"])["R"], x)
    session.close()
