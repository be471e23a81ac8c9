"""Devices of OpenVINO: each named device must exist, and models for other devices than the CPU are cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.openvino.devices import checked_device, involves_accelerator
from edge_server.errors import LoadError

pytest.importorskip("openvino")
onnx = pytest.importorskip("onnx")
T, node, numpy_helper = onnx.TensorProto, onnx.helper.make_node, onnx.numpy_helper


def test_available_devices_are_accepted_in_openvinos_spelling() -> None:
    table = [
        ("cpu", ["CPU"], "CPU"),
        (" GPU ", ["CPU", "GPU"], "GPU"),
        ("GPU", ["CPU", "GPU.0", "GPU.1"], "GPU"),
        ("GPU.1", ["CPU", "GPU.0", "GPU.1"], "GPU.1"),
        ("GPU.0", ["CPU", "GPU"], "GPU.0"),
        ("NPU", ["CPU", "NPU"], "NPU"),
        ("AUTO", ["CPU"], "AUTO"),
        ("auto: gpu, cpu", ["CPU", "GPU"], "AUTO:GPU,CPU"),
        ("AUTO:-GPU,CPU", ["CPU"], "AUTO:-GPU,CPU"),
        ("MULTI:GPU(2),CPU(4)", ["CPU", "GPU"], "MULTI:GPU(2),CPU(4)"),
        ("HETERO:GPU,CPU", ["CPU", "GPU"], "HETERO:GPU,CPU"),
        ("BATCH:GPU(8)", ["CPU", "GPU"], "BATCH:GPU(8)"),
    ]
    assert [(text, available, checked_device("m", text, available)) for text, available, _ in table] == table


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("GPU", "model 'm': openvino finds no device 'GPU' here; it finds: CPU"),
        ("AUTO:NPU,CPU", "no device 'NPU' here; it finds: CPU"),
        ("MULTI:CPU,GPU.1", "no device 'GPU.1' here"),
        ("MULTI", "'MULTI' names no device; write MULTI:<device>,<device>"),
        ("AUTO:", "is not a list of devices"),
        ("AUTO:CPU,,", "is not a list of devices"),
        ("", "is not a list of devices"),
        ("CPU;rm", "is not a list of devices"),
    ],
)
def test_an_unavailable_device_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(LoadError, match="model 'm'") as caught:
        checked_device("m", text, ["CPU"])
    assert problem in caught.value.message


def test_only_accelerator_devices_use_the_compile_cache() -> None:
    assert [involves_accelerator(device) for device in ("CPU", "GPU", "AUTO:GPU,CPU", "NPU")] == [
        False,
        True,
        True,
        True,
    ]


@pytest.fixture
def doubling(write_onnx: Callable[..., Any]) -> Any:
    weights = [numpy_helper.from_array(np.eye(8, dtype="f4") * 2, "W")]
    return write_onnx(
        [node("MatMul", ["X", "W"], ["Y"])], [("X", T.FLOAT, ["N", 8])], [("Y", T.FLOAT, ["N", 8])], weights
    )


@pytest.mark.parametrize("device", ["AUTO:CPU", "MULTI:CPU", "AUTO"])
def test_a_combined_device_runs_and_its_compiled_model_is_cached(
    device: str, doubling: Any, job: Callable[..., Any], tmp_path: Path
) -> None:
    backend = load_backend("openvino")
    kept = tmp_path / "kept"
    session = backend.open(job(doubling, parameters={"TARGET_DEVICE": device}, settings={"MODEL_CACHE_DIR": str(kept)}))
    try:
        assert session.info.device == device
        assert session.run({"X": np.ones((2, 8), "f4")}, ["Y"])["Y"].tolist() == [[2.0] * 8] * 2
    finally:
        session.close()
    assert any(kept.rglob("*.blob")), "what was compiled was not kept"


def test_cpu_models_and_models_with_their_own_cache_folder_do_not_use_the_servers(
    doubling: Any, job: Callable[..., Any], tmp_path: Path
) -> None:
    backend = load_backend("openvino")
    settings = {"MODEL_CACHE_DIR": str(tmp_path / "servers")}
    backend.open(job(doubling, settings=settings)).close()
    own = {"TARGET_DEVICE": "AUTO:CPU", "CACHE_DIR": str(tmp_path / "own")}
    backend.open(job(doubling, parameters=own, settings=settings)).close()
    assert not (tmp_path / "servers").exists()
    assert any((tmp_path / "own").rglob("*.blob"))
