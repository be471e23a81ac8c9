"""Execution of engines on a strict fake GPU: profiles, graphs, data-dependent outputs, and leaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile
from edge_server.backends.cuda import cuda_driver
from edge_server.config.merge_settings import parse_serve
from edge_server.core.model_spec import DynamicBatching, InputSpec, InstanceGroup, InstanceKind, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, InvalidRequest, LoadError, OutOfMemory, SessionLost
from edge_server.plugin import own_plugins
from edge_server.plugins.tensorrt.backend import make
from edge_server.plugins.tensorrt.library_adapter import EngineFault
from edge_server.plugins.tensorrt.plugin import PLUGIN

onnx = pytest.importorskip("onnx")
helper, TensorProto = onnx.helper, onnx.TensorProto
FLOAT = TensorProto.FLOAT

Open = Callable[..., Any]


IN, OUT = (InputSpec("X", DType.FP32, (4,)),), (OutputSpec("Y", DType.FP32, (4,)),)
BATCHING = {"inputs": IN, "outputs": OUT, "max_batch_size": 8}


def rows(count: int) -> np.ndarray:
    return np.arange(count * 4, dtype="f4").reshape(count, 4)


def graphs(*sizes: int) -> str:
    return json.dumps({"optimization": {"cuda": {"graphs": True, "graph_spec": [{"batch_size": n} for n in sizes]}}})


def test_a_batch_between_two_graph_sizes_is_padded_and_cut_again(
    gpu: Any, double_plan: ModelFile, open_session: Open
) -> None:
    session = open_session(double_plan, **BATCHING, config_json=graphs(2, 4))
    before = gpu.launches()
    for count in (1, 2, 3, 4):
        answer = session.run({"X": rows(count)}, ["Y"])["Y"]
        np.testing.assert_array_equal(answer, rows(count) * 2)
    assert gpu.launches() - before == 4
    # More rows than any recording has: launched kernel by kernel.
    np.testing.assert_array_equal(session.run({"X": rows(7)}, ["Y"])["Y"], rows(7) * 2)
    assert gpu.launches() - before == 4
    session.close()


def test_default_graphs_are_captured_for_one_preferred_and_maximum_batch_sizes(
    double_plan: ModelFile, open_session: Open
) -> None:
    config = json.dumps({"optimization": {"cuda": {"graphs": True}}})
    session = open_session(double_plan, **BATCHING, config_json=config, dynamic_batching=DynamicBatching((4,)))
    assert session.info.options["cuda_graphs"] == "1,4,8"
    session.close()


@pytest.mark.parametrize(("fault", "recorded"), [("no graph of 2", "1,4"), ("no graph", "")])
def test_a_size_that_cannot_be_recorded_is_left_out_with_one_warning_and_the_reason(
    fault: str, recorded: str, gpu: Any, double_plan: ModelFile, open_session: Open, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_ENGINE_FAULT", fault)
    before = gpu.live()
    session = open_session(double_plan, **BATCHING, config_json=graphs(1, 2, 4))
    assert session.info.options["cuda_graphs"] == recorded
    (warning,) = (record.message for record in caplog.records)
    assert ("no CUDA graph for the batch sizes 2," if recorded else "sizes 1, 2, 4,") in warning
    assert "operation not permitted in a capture; " in warning
    assert "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" in warning
    assert warning.count("not permitted") == 1
    for count in (1, 2, 4, 8):
        np.testing.assert_array_equal(session.run({"X": rows(count)}, ["Y"])["Y"], rows(count) * 2)
    session.close()
    assert gpu.live() == before


def test_a_model_whose_shapes_vary_says_that_it_has_no_graphs(
    write_onnx: Callable[..., ModelFile], write_plan: Callable[..., ModelFile], open_session: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    node = helper.make_node("Relu", ["X"], ["Y"])
    file = write_plan(
        write_onnx([node], [("X", FLOAT, ["n", "w"])], [("Y", FLOAT, ["n", "w"])]), {"X": ([1, 1], [1, 4], [2, 8])}
    )
    spec = {"inputs": (InputSpec("X", DType.FP32, (-1,)),), "outputs": (OutputSpec("Y", DType.FP32, (-1,)),)}
    session = open_session(file, **spec, max_batch_size=2, config_json=graphs(1))
    assert "cuda_graphs" not in session.info.options
    assert "no CUDA graph for the batch sizes 1, which run without one: it has" in caplog.text
    session.close()


def test_a_graph_above_max_batch_size_is_refused(double_plan: ModelFile, open_session: Open) -> None:
    with pytest.raises(LoadError, match="graph_spec batch_size: expected 1 to max_batch_size 8, given 9"):
        open_session(double_plan, **BATCHING, config_json=graphs(9))


def test_closed_and_failed_sessions_leak_no_gpu_memory(gpu: Any, double_plan: ModelFile, open_session: Open) -> None:
    before = gpu.live()
    first = open_session(double_plan, **BATCHING, config_json=graphs(2, 4))
    second = open_session(double_plan, **BATCHING, number=1)
    first.run({"X": rows(3)}, ["Y"])
    with pytest.raises(BackendError):
        second.run({"X": rows(9)}, ["Y"])
    assert gpu.live() > before
    first.close()
    second.close()
    assert gpu.live() == before
    group = (InstanceGroup("plans", InstanceKind.GPU, 1, (0,), profiles=("3",)),)
    with pytest.raises(LoadError, match=r"it has 1 profile\(s\), the instance group asks for number 3"):
        _open_with_groups(double_plan, group)
    assert gpu.live() == before


def test_a_session_that_fails_to_open_releases_its_engine(
    gpu: Any, double_plan: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gpu.live()
    backend: Any = load_backend("tensorrt_rtx")
    wrong = InstanceGroup("plans", InstanceKind.GPU, 1, (0,), profiles=("first",))
    with pytest.raises(LoadError, match="profile: expected a number, given 'first'"):
        _open_with_groups(double_plan, (wrong,))
    assert not backend._shared._entries
    assert gpu.live() == before

    def tensors(engine: Any) -> Any:
        raise EngineFault("tensor 'X' has elements of type FP8, which requests cannot carry")

    monkeypatch.setattr(backend._library, "tensors", tensors)
    with pytest.raises(LoadError, match="FP8"):
        _open_with_groups(double_plan, (PLAIN,))
    assert not backend._shared._entries
    assert gpu.live() == before


def test_a_library_that_does_not_start_fails_the_load_and_releases_the_gpu(
    gpu: Any, double_plan: ModelFile, job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gpu.live()
    backend = make("tensorrt_rtx")
    trt = backend._library.trt

    def refuse(logger: Any) -> None:
        logger.log(
            trt.ILogger.WARNING, "CUDA initialization failure with error: 35. Please check your CUDA installation"
        )
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(trt, "Runtime", refuse)
    with pytest.raises(
        LoadError, match=r"tensorrt_rtx cannot load it: .* does not start: the driver is older .* error: 35"
    ):
        backend.open(job(double_plan, backend="tensorrt_rtx", device_id=0, **BATCHING))
    assert gpu.live() == before


@pytest.mark.parametrize(
    ("logged", "is_of_another_machine"),
    [
        ("Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match.", True),
        ("Failed due to an old deserialization call on a newer plan file.", True),
        ("The engine plan file is generated on an incompatible device, expecting compute 8.7 got compute 8.6", True),
        ("IRuntime::deserializeCudaEngine: Error Code 2: OutOfMemory (no further information)", False),
    ],
)
def test_a_plan_of_another_machine_is_refused_with_what_to_do(
    gpu: Any, logged: str, is_of_another_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT's lines from public reports, also of TensorRT 8.2 and 10.16."""
    library = make("tensorrt_rtx")._library

    class Runtime(library.trt.Runtime):  # type: ignore[misc, name-defined]
        def deserialize_cuda_engine(self, serialized_engine: bytes) -> None:
            library.logger.log(library.trt.ILogger.ERROR, logged)

    monkeypatch.setattr(library.trt, "Runtime", Runtime)
    with pytest.raises(EngineFault) as caught:
        library.deserialise(b"plan")
    told = f"; a plan is for one version of TensorRT (here tensorrt_rtx {library.version}) and one kind of GPU: "
    assert str(caught.value).startswith(logged)
    assert (told in str(caught.value)) == is_of_another_machine


def test_code_in_plans_is_allowed_by_the_operators_settings_not_by_a_model(
    gpu: Any, double_plan: ModelFile, job: Callable[..., Any]
) -> None:
    backend = make("tensorrt_rtx")
    common = {**BATCHING, "backend": "tensorrt_rtx", "device_id": 0}
    backend.open(job(double_plan, **common, parameters={"version-compatible": "true"})).close()
    assert backend._library.allows_host_code is False
    with pytest.raises(LoadError, match="version-compatible must be yes or no, got 'perhaps'"):
        backend.open(job(double_plan, **common, settings={"version-compatible": "perhaps"}))
    backend.open(job(double_plan, **common, settings={"version-compatible": "true"})).close()
    assert backend._library.allows_host_code is True


@pytest.mark.parametrize(("value", "is_allowed"), [("true", True), ("false", False), ("perhaps", False)])
def test_a_plan_with_code_is_inspected_under_the_operators_settings(
    gpu: Any, value: str, is_allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_backend("tensorrt_rtx")._library
    monkeypatch.setattr(library, "allows_host_code", False)
    flags = [
        "--model-repository=.",
        "--engine-builder=false",
        f"--backend-config=tensorrt_rtx,version-compatible={value}",
    ]
    PLUGIN.prepare(parse_serve(flags, {}, own_plugins()).config)
    assert library.allows_host_code is is_allowed


def test_an_onnx_file_is_refused_where_the_library_has_no_builder(
    gpu: Any, write_onnx: Callable[..., ModelFile], job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make("tensorrt_rtx")
    monkeypatch.delattr(backend._library.trt, "Builder")
    file = write_onnx([helper.make_node("Add", ["X", "X"], ["Y"])], [("X", FLOAT, ["n", 4])], [("Y", FLOAT, ["n", 4])])
    with pytest.raises(LoadError, match=r"builds no engine of an ONNX file: install the full library"):
        backend.open(job(file, backend="tensorrt_rtx", device_id=0, **BATCHING))


def test_a_gpu_hidden_from_cuda_is_reported(gpu: Any, double_plan: ModelFile) -> None:
    with pytest.raises(LoadError, match="it needs GPU 3, but CUDA shows 1 to this process"):
        _open_with_groups(double_plan, (PLAIN,), device_id=3)


def test_instance_groups_with_a_common_name_prefix_have_their_own_profiles(double_plan: ModelFile) -> None:
    other = InstanceGroup("plans_0", InstanceKind.GPU, 1, (0,), profiles=("3",))
    begin = InstanceGroup("plan", InstanceKind.GPU, 1, (0,), profiles=("4",))
    for groups in ((other, PLAIN), (begin, PLAIN)):
        _open_with_groups(double_plan, groups).close()
    with pytest.raises(LoadError, match="asks for number 3"):
        _open_with_groups(double_plan, (PLAIN, other), "plans_0_0_0")
    short = InstanceGroup("plans", InstanceKind.GPU, 1, (0,), profiles=("4",))
    with pytest.raises(LoadError, match="asks for number 3"):
        _open_with_groups(double_plan, (short, other), "plans_0_0_0")


PLAIN = InstanceGroup("plans", InstanceKind.GPU, 1, (0,))


def _open_with_groups(
    file: ModelFile, groups: tuple[InstanceGroup, ...], name: str = "plans_0_0", device_id: int = 0
) -> Any:
    from edge_server.backends.base import OpenJob
    from edge_server.core.model_spec import ModelSpec

    spec = ModelSpec("plans", "tensorrt_rtx", "", 8, IN, OUT, groups)
    return load_backend("tensorrt_rtx").open(OpenJob(spec, file, name, device_id))


def test_running_out_of_gpu_memory_is_reported_as_such(
    gpu: Any, double_plan: ModelFile, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gpu.live()
    monkeypatch.setenv("FAKE_CUDA_BYTES", "100")
    with pytest.raises(OutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        open_session(double_plan, **BATCHING)
    assert gpu.live() == before


def test_a_lost_context_is_reported_as_such(gpu: Any, double_plan: ModelFile, open_session: Open) -> None:
    session = open_session(double_plan, **BATCHING)
    gpu.driver.fake_cuda_break(700)
    try:
        with pytest.raises(SessionLost, match="must be started anew"):
            session.run({"X": rows(1)}, ["Y"])
    finally:
        gpu.driver.fake_cuda_break(0)
    session.close()


def test_the_fitting_profile_is_used_and_an_unsupported_shape_refused_with_the_bounds(
    write_onnx: Callable[..., ModelFile], write_plan: Callable[..., ModelFile], open_session: Open
) -> None:
    node = helper.make_node("Relu", ["X"], ["Y"])
    file = write_plan(
        write_onnx([node], [("X", FLOAT, ["n", "w"])], [("Y", FLOAT, ["n", "w"])]),
        {"X": ([1, 1], [1, 4], [2, 8])},
        {"X": ([4, 100], [4, 100], [8, 200])},
    )
    spec = {"inputs": (InputSpec("X", DType.FP32, (-1,)),), "outputs": (OutputSpec("Y", DType.FP32, (-1,)),)}
    session = open_session(file, **spec, max_batch_size=8)
    for shape in ((2, 8), (5, 150), (1, 1)):
        np.testing.assert_array_equal(session.run({"X": np.ones(shape, "f4")}, ["Y"])["Y"], np.ones(shape, "f4"))
    with pytest.raises(BackendError, match=r"no profile .* \[3, 8\]"):
        session.run({"X": np.ones((3, 8), "f4")}, ["Y"])  # as many rows as a batch may have by the configuration
    with pytest.raises(InvalidRequest, match=r"no profile .* \[3, 50\] .*\[1, 1\] to \[2, 8\]; or \[4, 100\] to"):
        session.run({"X": np.ones((3, 50), "f4")}, ["Y"])
    session.close()


def test_an_output_whose_size_depends_on_the_data_grows_with_it(
    gpu: Any, write_onnx: Callable[..., ModelFile], write_plan: Callable[..., ModelFile], open_session: Open
) -> None:
    node = helper.make_node("NonZero", ["X"], ["Y"])
    finds = write_onnx([node], [("X", FLOAT, [64])], [("Y", TensorProto.INT64, [1, "found"])], model="finds")
    relu = write_onnx([helper.make_node("Relu", ["X"], ["Y"])], [("X", FLOAT, [64])], [("Y", FLOAT, [64])])
    # TensorRT for RTX has no NonZero; which of TensorRT's engines answers is all the same to the session.
    file = write_plan(relu, {}, runs=finds)
    inputs, outputs = (InputSpec("X", DType.FP32, (64,)),), (OutputSpec("Y", DType.INT64, (1, -1)),)
    before = gpu.live()
    session = open_session(file, inputs=inputs, outputs=outputs)
    for positions in ([3], list(range(0, 64, 2)), [], [0, 63]):
        given = np.zeros(64, "f4")
        given[positions] = 1
        np.testing.assert_array_equal(session.run({"X": given}, ["Y"])["Y"], [positions])
    session.close()
    assert gpu.live() == before


def test_a_board_with_shared_memory_copies_nothing_to_the_gpu(
    gpu: Any, double_plan: ModelFile, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_INTEGRATED", "1")
    copies: list[int] = []
    from edge_server.backends.cuda.cuda_ctypes import CudaContext

    monkeypatch.setattr(CudaContext, "copy_to_device", lambda *given: copies.append(given[3]))
    monkeypatch.setattr(CudaContext, "copy_to_host", lambda *given: copies.append(given[3]))
    session = open_session(double_plan, **BATCHING)
    assert session.info.options["memory"] == "mapped"
    np.testing.assert_array_equal(session.run({"X": rows(3)}, ["Y"])["Y"], rows(3) * 2)
    assert copies == []
    session.close()


def test_a_plan_describes_its_shapes_and_maximum_batch_size(double_plan: ModelFile) -> None:
    signature = load_backend("tensorrt_rtx").inspect(double_plan, {})
    assert signature is not None
    assert (signature.is_batchable, signature.most_rows) == (True, 8)
    assert [(item.name, item.dims) for item in (*signature.inputs, *signature.outputs)] == [
        ("X", (-1, 4)),
        ("Y", (-1, 4)),
    ]


def test_an_engine_of_ultralytics_is_served_without_the_metadata_before_it(
    double_plan: ModelFile, open_session: Open
) -> None:
    text = json.dumps({"task": "detect", "names": {0: "h\u00e9"}})
    head = len(text).to_bytes(4, "little", signed=True) + text.encode()
    double_plan.path.write_bytes(head + double_plan.path.read_bytes())
    signature = load_backend("tensorrt_rtx").inspect(double_plan, {})
    assert signature is not None
    assert signature.metadata == {"metadata.json": text}
    session = open_session(double_plan, **BATCHING)
    np.testing.assert_array_equal(session.run({"X": rows(3)}, ["Y"])["Y"], rows(3) * 2)
    session.close()


def test_the_plan_for_the_gpus_compute_capability_is_chosen(gpu: Any) -> None:
    backend = load_backend("tensorrt_rtx")
    assert backend.file_for({"8.6": "model_sm86.plan", "8.7": "orin.plan"}) == "model_sm86.plan"
    assert backend.file_for({"7.5": "turing.plan"}) == ""


@pytest.mark.full
def test_without_a_driver_a_plan_is_refused_before_a_runtime_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_session: Open
) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libthereisnone.so.1")
    monkeypatch.setattr(trt, "Runtime", None)
    path = tmp_path / "1" / "model.plan"
    path.parent.mkdir()
    path.write_bytes(b"whatever")
    file = ModelFile(path, tmp_path, 1)
    for attempt in (
        lambda: load_backend("tensorrt_rtx").inspect(file, {}),
        lambda: open_session(file, **BATCHING),
    ):
        with pytest.raises(LoadError, match=r"it needs a GPU: there is no NVIDIA driver \(libthereisnone"):
            attempt()
