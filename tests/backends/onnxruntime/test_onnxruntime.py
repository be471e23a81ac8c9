"""Backend onnxruntime: options, providers, and the reported precision."""

from __future__ import annotations

import ctypes
import gc
import platform
import shutil
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import Backend
from edge_server.backends.onnxruntime.options import configured_options
from edge_server.core.model_spec import Accelerator, Optimization
from edge_server.errors import LoadError

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
T, node, numpy_helper = onnx.TensorProto, onnx.helper.make_node, onnx.numpy_helper

Write = Callable[..., Any]


@pytest.fixture
def backend() -> Backend:
    return load_backend("onnxruntime")


@pytest.fixture
def linear(write_onnx: Write) -> Callable[..., Any]:
    """Return a function that writes Y = X times `scale`, with weights of a numpy type."""

    def write(scale: float = 2.0, dtype: str = "f4", **options: Any) -> Any:
        weights = [numpy_helper.from_array(np.eye(64, dtype=dtype) * scale, "W")]
        kind = {"f4": T.FLOAT, "f2": T.FLOAT16}[dtype]
        return write_onnx(
            [node("MatMul", ["X", "W"], ["Y"])], [("X", kind, ["N", 64])], [("Y", kind, ["N", 64])], weights, **options
        )

    return write


def result(session: Any, dtype: str = "f4") -> float:
    return float(session.run({"X": np.ones((1, 64), dtype=dtype)}, ["Y"])["Y"][0, 0])


def test_two_instances_are_the_default(backend: Backend) -> None:
    assert (backend.default_instance_count, backend.default_filename) == (2, "model.onnx")


def test_the_options_in_force_are_reported(backend: Backend, linear: Write, job: Callable[..., Any]) -> None:
    parameters = {
        "intra_op_thread_count": "3",
        "inter_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "enable_mem_pattern": "0",
        "memory.enable_memory_arena_shrinkage": "cpu:0",
        "session.use_device_allocator_for_initializers": "1",
    }
    optimization = Optimization(graph_level=1)
    session = backend.open(job(linear(), parameters=parameters, optimization=optimization))
    options = session.info.options
    assert options["intra_op_thread_count"] == "3"
    assert options["inter_op_thread_count"] == "2"
    assert options["execution_mode"] == "1"
    assert options["graph_optimization"] == "ORT_ENABLE_EXTENDED"
    assert options["enable_mem_arena"] == "0"
    assert options["enable_mem_pattern"] == "0"
    assert options["session.use_device_allocator_for_initializers"] == "1"
    assert options["providers"] == "CPUExecutionProvider"
    session.close()


DURATION = "session.intra_op.spin_duration_us"
ALLOWED = "session.intra_op.allow_spinning"


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [
        ("1.26.0", {}, {DURATION: "30"}),
        ("1.26.0", {DURATION: "5"}, {DURATION: "5"}),
        ("1.26.0", {ALLOWED: "0"}, {ALLOWED: "0"}),
        ("1.26.0", {ALLOWED: "1"}, {ALLOWED: "1"}),
        ("1.25.1", {}, {ALLOWED: "0"}),
        ("1.25.1", {ALLOWED: "1"}, {ALLOWED: "1"}),
    ],
)
def test_threads_spin_for_microseconds_or_not_at_all_unless_configured(
    version: str, given: dict[str, str], expected: dict[str, str], linear: Write, job: Callable[..., Any]
) -> None:
    ort = types.SimpleNamespace(__version__=version, get_available_providers=lambda: ["CPUExecutionProvider"])
    options = configured_options(job(linear()), given, ort).as_text()
    assert {key: value for key, value in options.items() if key in (DURATION, ALLOWED)} == expected


def test_the_arena_is_shrunk_after_a_run_on_request(backend: Backend, linear: Write, job: Callable[..., Any]) -> None:
    session = backend.open(job(linear(), parameters={"memory.enable_memory_arena_shrinkage": "cpu:0"}))
    assert result(session) == 2
    session.close()


def test_model_parameters_override_server_settings(backend: Backend, linear: Write, job: Callable[..., Any]) -> None:
    settings = {"intra_op_thread_count": "1", "inter_op_thread_count": "4"}
    session = backend.open(job(linear(), settings=settings, parameters={"intra_op_thread_count": "2"}))
    assert session.info.options["intra_op_thread_count"] == "2"
    assert session.info.options["inter_op_thread_count"] == "4"
    session.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intra_op_thread_count", "many"),
        ("inter_op_thread_count", "-1"),
        ("enable_mem_arena", "perhaps"),
        ("optimization.graph.level", "7"),
        ("precision", "f64"),
    ],
)
def test_an_invalid_option_is_a_load_error_that_names_it(
    key: str, value: str, backend: Backend, linear: Write, job: Callable[..., Any]
) -> None:
    with pytest.raises(LoadError, match=f"model 'made'.*{key}.*{value}"):
        backend.open(job(linear(), parameters={key: value}))


@pytest.mark.parametrize("key", ["session.some_entry", "memory.enable_memory_arena_shrinkage"])
def test_an_entry_that_is_too_long_is_a_load_error_and_leaves_no_session(
    key: str, backend: Backend, linear: Write, job: Callable[..., Any]
) -> None:
    def sessions() -> int:
        gc.collect()
        return sum(type(item).__name__ == "InferenceSession" for item in gc.get_objects())

    before = sessions()
    with pytest.raises(LoadError, match=r"model 'made' version 1.*value is longer than"):
        backend.open(job(linear(), parameters={key: "x" * 9000}))
    assert sessions() == before


def test_an_accelerator_that_this_build_lacks_is_a_load_error(
    backend: Backend, linear: Write, job: Callable[..., Any]
) -> None:
    wanted = Optimization(cpu_accelerators=(Accelerator("nonsense", {}),))
    with pytest.raises(LoadError, match="does not offer the execution accelerator 'nonsense'; it offers:"):
        backend.open(job(linear(), optimization=wanted))


def test_the_precision_is_that_of_the_weights(backend: Backend, linear: Write, job: Callable[..., Any]) -> None:
    for dtype, precision in (("f4", "f32"), ("f2", "f16")):
        session = backend.open(job(linear(dtype=dtype, model=f"of_{precision}")))
        assert session.info.precision == precision
        assert result(session, dtype) == 2
        session.close()


def test_a_quantised_file_runs_in_int8_and_reports_it(
    backend: Backend, write_onnx: Write, job: Callable[..., Any]
) -> None:
    weights = [
        numpy_helper.from_array(np.float32(0.5), "scale"),
        numpy_helper.from_array(np.int8(0), "zero"),
    ]
    nodes = [
        node("QuantizeLinear", ["X", "scale", "zero"], ["q"]),
        node("DequantizeLinear", ["q", "scale", "zero"], ["Y"]),
    ]
    file = write_onnx(nodes, [("X", T.FLOAT, ["N", 64])], [("Y", T.FLOAT, ["N", 64])], weights)
    session = backend.open(job(file, parameters={"precision": "int8"}))
    assert session.info.precision == "int8"
    assert result(session) == 1
    session.close()


def test_a_precision_missing_from_the_file_is_refused_with_the_available_ones(
    backend: Backend, linear: Write, job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(LoadError, match="precision 'bf16' on x86_64; it offers f32 or auto"):
        backend.open(job(linear(), parameters={"precision": "bf16"}))


def test_bf16_uses_the_fast_matrix_product_of_arm(
    backend: Backend, linear: Write, job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    session = backend.open(job(linear(), parameters={"precision": "bf16"}))
    assert session.info.precision == "bf16"
    assert session.info.options["mlas.enable_gemm_fastmath_arm64_bfloat16"] == "1"
    session.close()


def test_a_directory_with_external_weights_is_a_model(backend: Backend, linear: Write, job: Callable[..., Any]) -> None:
    file = linear(name="model.onnx/model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    directory = type(file)(file.path.parent, file.model_dir, 1)
    assert directory.path.is_dir()
    assert (directory.path / "weights.bin").stat().st_size == 64 * 64 * 4
    assert backend.inspect(directory, {}) is not None
    session = backend.open(job(directory))
    assert session.info.precision == "f32"
    assert result(session) == 2
    session.close()


def test_a_changed_file_is_read_while_the_old_one_still_serves(
    backend: Backend, linear: Write, job: Callable[..., Any]
) -> None:
    old = backend.open(job(linear(2.0)))
    file = linear(3.0)
    (file.path.parent / "touched").write_text("sizes and times may agree on a fast machine")
    new = backend.open(job(file))
    assert (result(old), result(new)) == (2, 3)
    old.close()
    assert result(new) == 3
    new.close()


def test_outputs_that_requests_cannot_carry_are_named_and_inputs_are_a_load_error(
    backend: Backend, write_onnx: Write
) -> None:
    def made(nodes: Any, inputs: Any, outputs: Any) -> Any:
        graph = onnx.helper.make_graph(nodes, "graph", inputs, outputs)
        return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)

    tensor = onnx.helper.make_tensor_value_info
    sequence = onnx.helper.make_tensor_sequence_value_info("S", T.FLOAT, None)
    file = write_onnx([node("Neg", ["X"], ["Y"])], [("X", T.FLOAT, [1])], [("Y", T.FLOAT, [1])])
    onnx.save(made([node("SequenceConstruct", ["X"], ["S"])], [tensor("X", T.FLOAT, [1])], [sequence]), file.path)
    signature = backend.inspect(file, {})
    assert signature is not None
    assert dict(signature.unusable) == {"S": "seq(tensor(float)), which requests cannot carry"}
    onnx.save(made([node("SequenceLength", ["S"], ["N"])], [sequence], [tensor("N", T.INT64, [])]), file.path)
    with pytest.raises(
        LoadError, match=r"file 'model.onnx': input 'S' is a seq\(tensor\(float\)\), which requests cannot"
    ):
        backend.inspect(file, {})


def test_reading_a_file_with_an_unknown_operator_prints_nothing(
    backend: Backend, write_onnx: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_onnx([node("Nonsense", ["X"], ["Y"], domain="")], [("X", T.FLOAT, [1])], [("Y", T.FLOAT, [1])])
    with pytest.raises(LoadError, match=r"model 'made' version 1, file 'model\.onnx'.*Nonsense"):
        backend.inspect(file, {})
    assert capfd.readouterr() == ("", "")


OPERATORS = """
#include <stdio.h>
#include <stdlib.h>
void *RegisterCustomOps(void *options, const void *api) {
  setenv("EDGE_TEST_OPERATORS", "registered", 1);
  return 0; /* no OrtStatus: success */
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed: apt-get install gcc")
def test_a_library_of_operators_is_loaded_with_the_file(
    backend: Backend, linear: Write, job: Callable[..., Any], tmp_path: Path
) -> None:
    file = linear()
    library = file.model_dir / "libops.so"
    (tmp_path / "ops.c").write_text(OPERATORS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "ops.c"], check=True)
    state = ctypes.CDLL(None)
    state.getenv.restype = ctypes.c_char_p
    state.unsetenv(b"EDGE_TEST_OPERATORS")
    session = backend.open(job(file))
    assert state.getenv(b"EDGE_TEST_OPERATORS") is None
    session.close()
    session = backend.open(job(file._replace(operator_libraries=(library,))))
    assert state.getenv(b"EDGE_TEST_OPERATORS") == b"registered"
    assert result(session) == 2
    session.close()
    state.unsetenv(b"EDGE_TEST_OPERATORS")
    library.write_bytes(b"no library")
    broken = file._replace(operator_libraries=(library,))
    with pytest.raises(LoadError, match=r"model 'made' version 1, file 'model\.onnx': onnxruntime cannot load it"):
        backend.inspect(broken, {})
