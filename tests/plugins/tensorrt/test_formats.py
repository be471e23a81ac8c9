"""Plans whose inputs and outputs are not row-major: the double has their elements where NVIDIA's documentation of
TensorFormat says, and refuses memory that is too small for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_server.backends.base import ModelFile
from edge_server.core.device_tensor import DeviceArray
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import LoadError

onnx = pytest.importorskip("onnx")
helper, TensorProto = onnx.helper, onnx.TensorProto

Open = Callable[..., Any]
Plan = Callable[..., ModelFile]

FLAT = ["HWC8", "HWC16", "HWC", "CHW2", "CHW4", "CHW16", "CHW32", "DLA_LINEAR", "DLA_HWC4"]
DEEP = ["DHWC8", "DHWC", "CDHW32"]


@pytest.fixture
def write_formatted(write_onnx: Callable[..., ModelFile], write_plan: Plan) -> Callable[..., ModelFile]:
    """Return a function that writes a plan of Y = X + X, of 1 to 4 rows, and the formats of X and Y."""

    def write(formats: dict[str, str], dims: tuple[int, ...] = (3, 5, 7), element: int = TensorProto.FLOAT16) -> Any:
        adds = helper.make_node("Add", ["X", "X"], ["Y"])
        file = write_onnx([adds], [("X", element, ["n", *dims])], [("Y", element, ["n", *dims])])
        return write_plan(file, {"X": ([1, *dims], [2, *dims], [4, *dims])}, formats=formats)

    return write


def spec(dims: tuple[int, ...] = (3, 5, 7), dtype: DType = DType.FP16) -> dict[str, Any]:
    return {
        "inputs": (InputSpec("X", dtype, dims),), "outputs": (OutputSpec("Y", dtype, dims),), "max_batch_size": 4,
    }  # fmt: skip


def values(rows: int, dims: tuple[int, ...] = (3, 5, 7), dtype: str = "f2") -> np.ndarray:
    return (np.arange(rows * np.prod(dims)) % 1000).reshape(rows, *dims).astype(dtype)


@pytest.mark.parametrize("form", [*FLAT, *DEEP])
@pytest.mark.parametrize("mapped", ["0", "1"])
def test_a_client_sends_and_gets_row_major_tensors_whatever_format_a_plan_has(
    form: str, mapped: str, write_formatted: Any, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_INTEGRATED", mapped)
    dims = (5, 2, 3, 4) if form in DEEP else (3, 5, 7)
    session = open_session(write_formatted({"X": form, "Y": form}, dims), **spec(dims))
    assert session.info.options["formats"] == f"X: {form}, Y: {form}"
    for rows in (2, 4, 1):
        found = session.run({"X": values(rows, dims)}, ["Y"])["Y"]
        np.testing.assert_array_equal(found, values(rows, dims) * 2)
    session.close()


def test_only_the_tensors_with_another_format_are_converted(write_formatted: Any, open_session: Open) -> None:
    session = open_session(write_formatted({"Y": "HWC8"}), **spec())
    assert session.info.options["formats"] == "Y: HWC8"
    np.testing.assert_array_equal(session.run({"X": values(3)}, ["Y"])["Y"], values(3) * 2)
    session.close()
    linear = open_session(write_formatted({}), **spec())
    assert "formats" not in linear.info.options
    linear.close()


def test_a_recorded_run_converts_formats_and_pads_rows(gpu: Any, write_formatted: Any, open_session: Open) -> None:
    config = json.dumps({"optimization": {"cuda": {"graphs": True, "graph_spec": [{"batch_size": 4}]}}})
    session = open_session(write_formatted({"X": "CHW16", "Y": "HWC8"}), **spec(), config_json=config)
    before = gpu.launches()
    for rows in (4, 3, 1):
        np.testing.assert_array_equal(session.run({"X": values(rows)}, ["Y"])["Y"], values(rows) * 2)
    assert gpu.launches() - before == 3
    session.close()


def test_integers_in_vectors_of_32_are_served(write_formatted: Any, open_session: Open) -> None:
    # TensorRT for RTX adds no INT8, so that INT32 stands for it: the place of an element does not depend on its type.
    file = write_formatted({"X": "CHW32", "Y": "CHW32"}, (40, 2, 3), TensorProto.INT32)
    session = open_session(file, **spec((40, 2, 3), DType.INT32))
    np.testing.assert_array_equal(
        session.run({"X": values(2, (40, 2, 3), "i4")}, ["Y"])["Y"], values(2, (40, 2, 3), "i4") * 2
    )
    session.close()


def test_a_clients_memory_on_the_gpu_is_not_given_to_a_tensor_with_another_format(
    write_formatted: Any, open_session: Open
) -> None:
    class Piece:
        device_id, address = 0, 256
        view = memoryview(values(2).tobytes())
        byte_size = view.nbytes

        def copy_from(self, *_: int) -> None:
            raise AssertionError("row-major memory is not what the engine has written")

    session = open_session(write_formatted({"X": "HWC8", "Y": "HWC8"}), **spec())
    given = DeviceArray(np.dtype("f2"), (2, 3, 5, 7), (Piece(),))
    found = session.run_on_device({"X": given}, ["Y"], {"Y": Piece()})
    np.testing.assert_array_equal(found["Y"], values(2) * 2)
    session.close()


def test_a_format_whose_layout_tensorrt_does_not_tell_is_refused_with_the_tensor_and_what_to_build(
    gpu: Any, write_formatted: Any, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_formatted({"X": "DLA_HWC4"})
    before = gpu.live()
    monkeypatch.setattr(gpu.double.ContextDouble, "get_tensor_strides", lambda self, name: gpu.double.UnknownDims())
    with pytest.raises(LoadError, match=r"tensor 'X' has the format DLA_HWC4, .*--inputIOFormats=fp16:chw"):
        open_session(file, **spec())
    assert gpu.live() == before


def test_an_output_in_vectors_whose_size_depends_on_the_data_is_refused(
    write_onnx: Callable[..., ModelFile], write_plan: Plan, open_session: Open
) -> None:
    finds = write_onnx(
        [helper.make_node("NonZero", ["X"], ["Y"])], [("X", TensorProto.FLOAT, [64])],
        [("Y", TensorProto.INT64, [1, "found"])], model="finds",
    )  # fmt: skip
    relu = write_onnx(
        [helper.make_node("Relu", ["X"], ["Y"])], [("X", TensorProto.FLOAT, [64])], [("Y", TensorProto.FLOAT, [64])]
    )
    file = write_plan(relu, {}, runs=finds, formats={"Y": "HWC"})
    inputs, outputs = (InputSpec("X", DType.FP32, (64,)),), (OutputSpec("Y", DType.INT64, (1, -1)),)
    with pytest.raises(LoadError, match=r"tensor 'Y' has the format HWC, .* depends on the data"):
        open_session(file, inputs=inputs, outputs=outputs)


def test_a_tensor_with_other_formats_in_other_profiles_is_refused(
    gpu: Any, write_onnx: Callable[..., ModelFile], write_plan: Plan, open_session: Open, monkeypatch: Any
) -> None:
    relu = helper.make_node("Relu", ["X"], ["Y"])
    shape: list[Any] = ["n", 3, 5, 7]
    file = write_plan(
        write_onnx([relu], [("X", TensorProto.FLOAT16, shape)], [("Y", TensorProto.FLOAT16, shape)]),
        {"X": ([1, 3, 5, 7], [1, 3, 5, 7], [1, 3, 5, 7])},
        {"X": ([2, 3, 5, 7], [4, 3, 5, 7], [4, 3, 5, 7])},
    )

    def get_tensor_format(self: Any, name: str, profile_index: int = 0) -> Any:
        return self.trt.TensorFormat.HWC8 if name == "X" and profile_index else self.trt.TensorFormat.LINEAR

    monkeypatch.setattr(gpu.double.EngineDouble, "get_tensor_format", get_tensor_format)
    with pytest.raises(LoadError, match=r"tensor 'X' has the formats HWC8 and LINEAR in its profiles"):
        open_session(file, **spec())
