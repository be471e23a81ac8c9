"""ONNX Runtime on GPUs, as far as it can be tested without one: requested options and reported devices.

The double is the real library with two changes, as in a wheel for GPUs: it lists CUDA and TensorRT, and its sessions
report these providers. Everything is computed on the CPU by the real sessions and bindings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_server.backends.cuda import cuda_driver
from edge_server.backends.onnxruntime import providers
from edge_server.backends.onnxruntime.backend import OnnxRuntimeBackend
from edge_server.backends.onnxruntime.session import BoundRun
from edge_server.core.device_tensor import DeviceArray
from edge_server.core.model_spec import Accelerator, InputSpec, Optimization, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, LoadError

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
T, node, numpy_helper = onnx.TensorProto, onnx.helper.make_node, onnx.numpy_helper

BUILT_WITH = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]


class Value:
    """A real output on the CPU that reports CUDA as its device, and records when it is copied to the host."""

    def __init__(self, true: Any, log: list[Any]) -> None:
        self._true = true
        self._log = log

    def device_name(self) -> str:
        return "cuda"

    def numpy(self) -> Any:
        self._log.append(("copy one",))
        return self._true.numpy()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._true, name)


class Piece:
    """GPU memory of a client's: the host's, at an address of its own choice."""

    def __init__(self, byte_size: int, device_id: int = 0, skew: int = 0) -> None:
        self._memory = np.zeros(byte_size + 1024, np.uint8)
        start = -self._memory.ctypes.data % 256 + skew
        self.bytes = self._memory[start : start + byte_size]
        self.device_id, self.address, self.byte_size = device_id, self.bytes.ctypes.data, byte_size
        self.copies = 0

    @property
    def view(self) -> memoryview:
        self.copies += 1
        return self.bytes.data.toreadonly()

    def is_at(self, other: object) -> bool:
        return other is self

    def copy_from(self, device_id: int, address: int, byte_count: int) -> None:
        assert device_id == self.device_id
        ctypes.memmove(self.address, address, byte_count)

    @classmethod
    def holding(cls, array: Any, **more: int) -> Piece:
        made = cls(array.nbytes, **more)
        made.bytes[:] = array.reshape(-1).view(np.uint8)
        return made

    def array(self, *shape: int) -> DeviceArray:
        return DeviceArray(np.dtype("f4"), shape, (self,))

    def numbers(self, *shape: int) -> Any:
        return self.bytes[: 4 * int(np.prod(shape))].view("f4").reshape(shape)


class Binding:
    """A true binding on the CPU; a bind to CUDA is noted, and made to the CPU."""

    def __init__(self, true: Any, log: list[Any]) -> None:
        self.true = true
        self._log = log
        self.shapes: list[tuple[int, ...]] = []

    def bind_output(self, name: str, device: str, device_id: int) -> None:
        self._log.append(("bind", name, device, device_id))
        self.true.bind_output(name, "cpu")

    def bind_input(
        self, name: str, device: str, device_id: int, element_type: Any, shape: list[int], address: int
    ) -> None:
        self._log.append(("there", name, device, device_id, address))
        self.true.bind_input(name, "cpu", 0, element_type, shape, address)

    def bind_cpu_input(self, name: str, array: Any) -> None:
        self._log.append(("from host", name))
        self.shapes.append(array.shape)
        self.true.bind_cpu_input(name, array)

    def get_outputs(self) -> Any:
        return [Value(value, self._log) for value in self.true.get_outputs()]

    def copy_outputs_to_cpu(self) -> Any:
        self._log.append(("copy",))
        return [np.array(array) for array in self.true.copy_outputs_to_cpu()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.true, name)


class DoubledSession:
    def __init__(self, double: Double, model: Any, options: Any, wanted: list[Any]) -> None:
        self._double = double
        self._true = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        names = [item if isinstance(item, str) else item[0] for item in wanted]
        self._in_force = [name for name in names if name in double.starts]

    def get_providers(self) -> list[str]:
        return self._in_force

    def io_binding(self) -> Binding:
        self._double.bindings.append(Binding(self._true.io_binding(), self._double.log))
        return self._double.bindings[-1]

    def run_with_iobinding(self, binding: Binding, run_options: Any) -> None:
        if self._double.fails:
            raise RuntimeError(self._double.fails)
        if binding.shapes and binding.shapes[-1][0] > self._double.most_rows:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 9")
        self._true.run_with_iobinding(binding.true, run_options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._true, name)


class Double:
    """The module onnxruntime of a wheel for GPUs; `starts` are the providers that really work."""

    def __init__(self) -> None:
        self.starts = list(BUILT_WITH)
        self.opened: list[Any] = []
        self.log: list[Any] = []
        self.bindings: list[Binding] = []
        self.fails = ""
        self.most_rows = 1 << 30

    def get_available_providers(self) -> list[str]:
        return list(BUILT_WITH)

    def InferenceSession(self, model: Any, options: Any, providers: list[Any]) -> DoubledSession:
        self.opened.append(providers)
        return DoubledSession(self, model, options, providers)

    def __getattr__(self, name: str) -> Any:
        return getattr(ort, name)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    monkeypatch.setattr(cuda_driver, "unavailable_reason", lambda library=None: "")
    return Double()


@pytest.fixture
def backend(double: Double) -> OnnxRuntimeBackend:
    made = OnnxRuntimeBackend("onnxruntime")
    made._ort = double
    return made


@pytest.fixture
def linear(write_onnx: Callable[..., Any]) -> Any:
    weights = [numpy_helper.from_array(np.eye(8, dtype="f4") * 3, "W")]
    return write_onnx(
        [node("MatMul", ["X", "W"], ["Y"]), node("Neg", ["Y"], ["Z"])],
        [("X", T.FLOAT, ["N", 8])],
        [("Y", T.FLOAT, ["N", 8]), ("Z", T.FLOAT, ["N", 8])],
        weights,
    )


def gpu(*accelerators: Accelerator) -> Optimization:
    return Optimization(gpu_accelerators=accelerators)


def test_a_gpu_instance_uses_cuda_with_the_cpu_as_fallback(
    backend: OnnxRuntimeBackend, double: Double, linear: Any, job: Callable[..., Any]
) -> None:
    session = backend.open(job(linear, device_id=1))
    assert double.opened == [
        [("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "0"}), ("CPUExecutionProvider", {})]
    ]
    assert session.info.device == "GPU:1"
    assert session.info.options["providers"] == "CUDAExecutionProvider,CPUExecutionProvider"
    session.close()


def test_tritons_parameters_are_passed_to_tensorrt_and_cuda_under_their_names(
    backend: OnnxRuntimeBackend, double: Double, linear: Any, job: Callable[..., Any]
) -> None:
    tensorrt = Accelerator(
        "tensorrt",
        {
            "precision_mode": "FP16",
            "max_workspace_size_bytes": "1073741824",
            "trt_engine_cache_enable": "true",
            "trt_engine_cache_path": "/var/cache/trt",
            "trt_builder_optimization_level": "4",
        },
    )
    parameters = {"cudnn_conv_algo_search": "1", "gpu_mem_limit": "4294967296", "arena_extend_strategy": "1"}
    session = backend.open(job(linear, device_id=0, optimization=gpu(tensorrt), parameters=parameters))
    ((first, trt_options), (second, cuda_options), (last, _)) = double.opened[0]
    assert (first, second, last) == tuple(BUILT_WITH)
    assert trt_options == {
        "device_id": "0",
        "trt_builder_optimization_level": "4",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": "/var/cache/trt",
        "trt_fp16_enable": "1",
        "trt_max_workspace_size": "1073741824",
    }
    assert cuda_options == {
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "device_id": "0",
        "gpu_mem_limit": "4294967296",
        "use_tf32": "0",
    }
    assert session.info.precision == "f16"
    session.close()


@pytest.mark.parametrize(
    ("parameters", "version", "expected"),
    [
        ({}, "1.20.1", "0"),
        ({"precision": "f32"}, "1.18.0", "0"),
        ({"use_tf32": "true"}, "1.20.1", "1"),
        ({"precision": "auto"}, "1.20.1", None),
        ({}, "1.17.3", None),
    ],
)
def test_f32_is_not_rounded_to_tf32_unless_configured(
    backend: Any,
    double: Double,
    linear: Any,
    job: Callable[..., Any],
    parameters: dict[str, str],
    version: str,
    expected: str | None,
) -> None:
    double.__version__ = version  # type: ignore[attr-defined]
    backend.open(job(linear, device_id=0, parameters=parameters)).close()
    assert double.opened[0][0][1].get("use_tf32") == expected


def test_int8_with_a_calibration_table(backend: Any, double: Double, linear: Any, job: Callable[..., Any]) -> None:
    tensorrt = Accelerator(
        "tensorrt",
        {"precision_mode": "int8", "int8_calibration_table_name": "t.flatbuffers",
         "int8_use_native_calibration_table": "False"},
    )  # fmt: skip
    session = backend.open(job(linear, device_id=0, optimization=gpu(tensorrt)))
    options = double.opened[0][0][1]
    assert options["trt_int8_enable"] == "1"
    assert options["trt_int8_calibration_table_name"] == "t.flatbuffers"
    assert options["trt_int8_use_native_calibration_table"] == "0"
    assert session.info.precision == "int8"
    session.close()


@pytest.mark.parametrize(
    ("name", "parameters", "problem"),
    [
        ("tensorrt", {"precision_mode": "FP8"}, "precision_mode must be one of FP32, FP16, INT8, got 'FP8'"),
        ("tensorrt", {"trt_engine_cache_enable": "maybe"}, "trt_engine_cache_enable must be true or false"),
        ("tensorrt", {"max_workspace_size_bytes": "1G"}, "trt_max_workspace_size must be a whole number of bytes"),
        ("cuda", {"cudnn_conv_algo_search": "3"}, r"must be one of 0 \(EXHAUSTIVE\), 1 \(HEURISTIC\), 2 \(DEFAULT\)"),
        ("migraphx", {}, "does not offer the execution accelerator 'migraphx'; it offers: cuda, tensorrt"),
    ],
)
def test_an_invalid_option_is_a_load_error(
    backend: Any, linear: Any, job: Callable[..., Any], name: str, parameters: Any, problem: str
) -> None:
    with pytest.raises(LoadError, match=problem):
        backend.open(job(linear, device_id=0, optimization=gpu(Accelerator(name, parameters))))


def test_a_listed_provider_that_did_not_start_is_a_load_error(
    backend: Any, double: Double, linear: Any, job: Callable[..., Any]
) -> None:
    double.starts = ["CPUExecutionProvider"]
    with pytest.raises(LoadError, match="lists CUDAExecutionProvider but could not start it here"):
        backend.open(job(linear, device_id=0))


def test_a_gpu_instance_without_a_driver_fails_before_any_file_is_opened(
    backend: Any, double: Double, linear: Any, job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "unavailable_reason", lambda library=None: "there is no NVIDIA driver")
    with pytest.raises(LoadError, match="is to run on GPU 0, but there is no NVIDIA driver"):
        backend.open(job(linear, device_id=0))
    assert double.opened == []


def test_a_model_without_instance_kind_uses_the_gpu_if_cuda_starts(backend: Any, double: Double) -> None:
    assert backend.runs_on_gpu
    assert len(double.opened) == 1, "found out once"
    assert backend.runs_on_gpu
    assert len(double.opened) == 1


def test_a_model_without_instance_kind_uses_the_cpu_if_cuda_does_not_start(
    backend: Any, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    double.starts = ["CPUExecutionProvider"]
    assert not backend.runs_on_gpu
    assert "lists CUDA but could not start it here" in caplog.text


def test_the_cpu_wheel_has_no_gpu_and_opens_no_session() -> None:
    made = OnnxRuntimeBackend("onnxruntime")
    if providers.CUDA in ort.get_available_providers():
        pytest.skip("this onnxruntime was built for CUDA")
    assert not made.runs_on_gpu


def test_the_model_that_tests_cuda_is_valid_onnx() -> None:
    onnx.checker.check_model(onnx.load_from_string(providers.identity_model()))
    session = ort.InferenceSession(providers.identity_model(), providers=["CPUExecutionProvider"])
    assert session.run(None, {"X": np.array([4.0], "f4")})[0].tolist() == [4.0]


def test_gpu_outputs_are_copied_after_all_are_ready(
    backend: Any, double: Double, linear: Any, job: Callable[..., Any]
) -> None:
    session = backend.open(job(linear, device_id=1))
    for rows in (1, 3, 2):
        double.log.clear()
        found = session.run({"X": np.full((rows, 8), rows, "f4")}, ["Z", "Y"])
        assert found["Y"].tolist() == [[3.0 * rows] * 8] * rows
        assert found["Z"].tolist() == [[-3.0 * rows] * 8] * rows
        assert double.log == [("from host", "X"), ("bind", "Z", "cuda", 1), ("bind", "Y", "cuda", 1), ("copy",)]
    session.close()


def test_client_memory_on_the_gpu_is_bound_and_written_without_host_copies(
    backend: Any, double: Double, linear: Any, job: Callable[..., Any]
) -> None:
    session = backend.open(job(linear, device_id=1))
    assert session.takes_device_memory
    given, target = Piece.holding(np.full((2, 8), 5, "f4"), device_id=1), Piece(100, device_id=1)
    double.log.clear()
    found = session.run_on_device({"X": given.array(2, 8)}, ["Z"], {"Z": target})
    assert double.log == [("there", "X", "cuda", 1, given.address), ("bind", "Z", "cuda", 1)]
    assert (found["Z"].piece, found["Z"].shape, found["Z"].dtype) == (target, (2, 8), np.dtype("f4"))
    assert target.numbers(2, 8).tolist() == [[-15.0] * 8] * 2
    assert given.copies == target.copies == 0
    # Of two outputs one is wanted there, and one in the answer.
    double.log.clear()
    found = session.run_on_device({"X": np.ones((1, 8), "f4")}, ["Y", "Z"], {"Z": target})
    assert double.log.count(("copy one",)) == 1
    assert found["Y"].tolist() == [[3.0] * 8]
    assert target.numbers(1, 8).tolist() == [[-3.0] * 8]
    session.close()


@pytest.mark.parametrize("more", [{"device_id": 0}, {"device_id": 1, "skew": 4}], ids=["another GPU", "unaligned"])
def test_memory_that_cannot_be_bound_is_copied_through_the_host(
    backend: Any, double: Double, linear: Any, job: Callable[..., Any], more: dict[str, int]
) -> None:
    session = backend.open(job(linear, device_id=1))
    given = Piece.holding(np.full((2, 8), 5, "f4"), **more)
    found = session.run_on_device({"X": given.array(2, 8)}, ["Y"], {})
    assert ("from host", "X") in double.log
    assert given.copies == 1
    assert found["Y"].tolist() == [[15.0] * 8] * 2
    session.close()


def test_a_joined_batch_is_copied_through_the_host(
    backend: Any, double: Double, linear: Any, job: Callable[..., Any]
) -> None:
    session = backend.open(job(linear, device_id=0))
    one, other = Piece.holding(np.full((2, 8), 5, "f4")), Piece.holding(np.full((1, 8), 7, "f4"))
    found = session.run_on_device({"X": DeviceArray(np.dtype("f4"), (3, 8), (one, other))}, ["Y"], {})
    assert found["Y"].tolist() == [[15.0] * 8, [15.0] * 8, [21.0] * 8]
    session.close()


@pytest.mark.parametrize("target", [Piece(63), Piece(64, device_id=1)], ids=["too small", "on another GPU"])
def test_an_output_that_does_not_fit_its_target_is_not_written(
    backend: Any, linear: Any, job: Callable[..., Any], target: Piece
) -> None:
    session = backend.open(job(linear, device_id=0))
    found = session.run_on_device({"X": np.ones((2, 8), "f4")}, ["Y"], {"Y": target})
    assert found["Y"].tolist() == [[3.0] * 8] * 2
    assert not target.bytes.any()
    session.close()


def test_a_cpu_session_gets_host_copies_of_device_memory(linear: Any, job: Callable[..., Any]) -> None:
    session = OnnxRuntimeBackend("onnxruntime").open(job(linear))
    assert not session.takes_device_memory
    given, target = Piece.holding(np.ones((2, 8), "f4")), Piece(64)
    found = session.run_on_device({"X": given.array(2, 8)}, ["Y"], {"Y": target})
    assert found["Y"].tolist() == [[3.0] * 8] * 2
    assert given.copies == 1
    session.close()


def test_a_failed_gpu_run_is_reported_and_the_next_run_works(
    backend: Any, double: Double, linear: Any, job: Callable[..., Any]
) -> None:
    session = backend.open(job(linear, device_id=0))
    double.fails = "CUDA failure 2: out of memory ; GPU=0"
    with pytest.raises(BackendError, match="onnxruntime failed: CUDA failure 2: out of memory ; GPU=0"):
        session.run({"X": np.ones((4, 8), "f4")}, ["Y"])
    double.fails = ""
    assert session.run({"X": np.ones((2, 8), "f4")}, ["Y"])["Y"].shape == (2, 8)
    session.close()


def test_bound_outputs_belong_to_the_caller(linear: Any) -> None:
    true = ort.InferenceSession(str(linear.path), providers=["CPUExecutionProvider"])
    bound = BoundRun(true, ort.RunOptions(), "cpu", 0)
    (first,) = bound.run(["Y"], {"X": np.ones((2, 8), "f4")})
    kept = first.copy()
    bound.run(["Y"], {"X": np.full((2, 8), 9, "f4")})
    assert np.array_equal(first, kept)


def test_strings_are_never_bound(write_onnx: Callable[..., Any]) -> None:
    file = write_onnx([node("Identity", ["S"], ["R"])], [("S", T.STRING, ["N"])], [("R", T.STRING, ["N"])])
    true = ort.InferenceSession(str(file.path), providers=["CPUExecutionProvider"])
    assert BoundRun.create(true, ort.RunOptions(), "cpu", 0) is None


def convolution(write_onnx: Callable[..., Any]) -> Any:
    weights = [numpy_helper.from_array(np.arange(9, dtype="f4").reshape(1, 1, 3, 3), "W")]
    return write_onnx(
        [node("Conv", ["X", "W"], ["Y"])], [("X", T.FLOAT, ["N", 1, 4, 4])], [("Y", T.FLOAT, ["N", 1, 2, 2])], weights
    )


def rows_of(count: int) -> Any:
    return np.random.default_rng(count).standard_normal((count, 1, 4, 4)).astype("f4")


def test_a_session_of_a_convolution_sees_one_batch_size(
    backend: Any, double: Double, write_onnx: Callable[..., Any], job: Callable[..., Any]
) -> None:
    file = convolution(write_onnx)
    truth = ort.InferenceSession(str(file.path), providers=["CPUExecutionProvider"])
    inputs, outputs = (InputSpec("X", DType.FP32, (1, 4, 4)),), (OutputSpec("Y", DType.FP32, (1, 2, 2)),)
    session = backend.open(job(file, device_id=0, max_batch_size=6, inputs=inputs, outputs=outputs))
    assert session.info.options["batch_sizes"] == "1,2,4,6"
    assert [binding.shapes for binding in double.bindings] == [[(size, 1, 4, 4)] for size in (1, 2, 4, 6)], "warm"
    for count in (1, 5, 2, 3, 6, 4, 1):
        (expected,) = truth.run(None, {"X": rows_of(count)})
        np.testing.assert_array_equal(session.run({"X": rows_of(count)}, ["Y"])["Y"], expected)
    assert [set(binding.shapes) for binding in double.bindings] == [{(size, 1, 4, 4)} for size in (1, 2, 4, 6)]
    session.close()


def test_a_padded_batch_leaves_a_clients_gpu_memory_to_the_caller(
    backend: Any, double: Double, write_onnx: Callable[..., Any], job: Callable[..., Any]
) -> None:
    inputs, outputs = (InputSpec("X", DType.FP32, (1, 4, 4)),), (OutputSpec("Y", DType.FP32, (1, 2, 2)),)
    session = backend.open(job(convolution(write_onnx), device_id=0, max_batch_size=4, inputs=inputs, outputs=outputs))
    target = Piece(3 * 4 * 4)
    given = Piece.holding(rows_of(3))
    found = session.run_on_device({"X": given.array(3, 1, 4, 4)}, ["Y"], {"Y": target})["Y"]
    np.testing.assert_array_equal(found, session.run({"X": rows_of(3)}, ["Y"])["Y"])
    assert found.shape == (3, 1, 2, 2)
    assert not target.bytes.any()
    session.close()


def test_a_model_without_convolutions_has_one_session(
    backend: Any, double: Double, linear: Any, job: Callable[..., Any]
) -> None:
    session = backend.open(job(linear, device_id=0, max_batch_size=8))
    assert len(double.opened) == 1
    assert "batch_sizes" not in session.info.options
    session.close()


def test_a_model_that_does_not_batch_has_one_session(
    backend: Any, double: Double, write_onnx: Callable[..., Any], job: Callable[..., Any]
) -> None:
    inputs, outputs = (InputSpec("X", DType.FP32, (-1, 1, 4, 4)),), (OutputSpec("Y", DType.FP32, (-1, 1, 2, 2)),)
    session = backend.open(job(convolution(write_onnx), device_id=0, max_batch_size=0, inputs=inputs, outputs=outputs))
    assert len(double.opened) == 1
    assert session.run({"X": rows_of(3)}, ["Y"])["Y"].shape == (3, 1, 2, 2)
    session.close()


@pytest.mark.parametrize(
    ("accelerator", "option"), [("cuda", "enable_cuda_graph"), ("tensorrt", "trt_cuda_graph_enable")]
)
def test_cuda_graphs_are_refused_because_they_keep_the_tensors_of_a_request(
    backend: Any, double: Double, linear: Any, job: Callable[..., Any], accelerator: str, option: str
) -> None:
    off = backend.open(job(linear, device_id=0, optimization=gpu(Accelerator(accelerator, {option: "0"}))))
    off.close()
    with pytest.raises(LoadError, match=f"{option} is not supported"):
        backend.open(job(linear, device_id=0, optimization=gpu(Accelerator(accelerator, {option: "true"}))))


def test_instances_on_one_gpu_share_the_session(
    backend: Any, double: Double, linear: Any, job: Callable[..., Any]
) -> None:
    first, second = (backend.open(job(linear, device_id=0)) for _ in range(2))
    assert len(double.opened) == 1
    first.close()
    assert second.run({"X": np.ones((1, 8), "f4")}, ["Y"])["Y"].tolist() == [[3.0] * 8]
    second.close()
    backend.open(job(linear, device_id=1)).close()
    assert len(double.opened) == 2


def test_libraries_of_cuda_are_loaded_once_and_what_fails_is_logged(
    backend: Any, double: Any, linear: Any, job: Callable[..., Any], caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    double.preload_dlls = lambda: print("Failed to load libcudnn.so.9:\n no such file")
    for _ in range(2):
        backend.open(job(linear, device_id=0)).close()
    said = [record.getMessage() for record in caplog.records if "libcudnn" in record.getMessage()]
    assert said == ["onnxruntime: Failed to load libcudnn.so.9: no such file"]
    assert capsys.readouterr().out == ""


def test_one_session_runs_all_sizes_if_there_is_too_little_memory(
    backend: Any, double: Double, write_onnx: Callable[..., Any], job: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    inputs, outputs = (InputSpec("X", DType.FP32, (1, 4, 4)),), (OutputSpec("Y", DType.FP32, (1, 2, 2)),)
    double.most_rows = 7
    session = backend.open(job(convolution(write_onnx), device_id=0, max_batch_size=8, inputs=inputs, outputs=outputs))
    assert "batch_sizes" not in session.info.options
    assert "lower max_batch_size, which is 8" in caplog.text
    for count in (3, 1):
        assert session.run({"X": rows_of(count)}, ["Y"])["Y"].shape == (count, 1, 2, 2)
    assert len(backend._shared._entries) == 1, "the sessions of the sizes are closed"
    session.close()
    assert not backend._shared._entries
