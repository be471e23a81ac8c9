"""Element types: each type of the protocol passes through each runtime unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import Backend
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BackendMissing, LoadError

onnx = pytest.importorskip("onnx")
T, node = onnx.TensorProto, onnx.helper.make_node

ONNX_TYPES = {
    DType.BOOL: T.BOOL,
    DType.UINT8: T.UINT8,
    DType.UINT16: T.UINT16,
    DType.UINT32: T.UINT32,
    DType.UINT64: T.UINT64,
    DType.INT8: T.INT8,
    DType.INT16: T.INT16,
    DType.INT32: T.INT32,
    DType.INT64: T.INT64,
    DType.FP16: T.FLOAT16,
    DType.FP32: T.FLOAT,
    DType.FP64: T.DOUBLE,
    DType.BYTES: T.STRING,
    DType.BF16: T.BFLOAT16,
}


@pytest.fixture(params=["onnxruntime", "openvino"])
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        return load_backend(request.param)
    except BackendMissing as error:
        pytest.skip(error.message)


def sample(dtype: DType) -> np.ndarray:
    if dtype is DType.BOOL:
        return np.array([[True, False, False, True]])
    patterns = np.array([[0, 1, 2, 0x3F80]], dtype="<u2")
    return patterns if dtype is DType.BF16 else np.array([[0, 1, 2, 100]], dtype=dtype.numpy)


def strings(values: list[bytes]) -> np.ndarray:
    array = np.empty((1, len(values)), dtype=object)
    array[0, :] = values
    return array


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BYTES])
def test_numbers_are_passed_through_bit_for_bit(
    dtype: DType, backend: Backend, write_onnx: Callable[..., Any], job: Callable[..., Any]
) -> None:
    shape = ["N", 4]
    file = write_onnx(
        [node("Identity", ["I"], ["O"])], [("I", ONNX_TYPES[dtype], shape)], [("O", ONNX_TYPES[dtype], shape)]
    )
    signature = backend.inspect(file, {})
    assert signature is not None
    assert (signature.inputs[0].dtype, signature.outputs[0].dtype) == (dtype, dtype)
    try:
        session = backend.open(job(file))
    except LoadError as error:
        if "is bfloat16, which onnxruntime" not in error.message:
            raise
        pytest.skip(error.message)
    for array in (sample(dtype), sample(dtype)):
        array.setflags(write=False)
        found = session.run({"I": array}, ["O"])["O"]
        assert found.dtype == dtype.numpy
        assert found.tobytes() == array.tobytes()
        assert found.flags.writeable
    session.close()


def test_onnxruntime_carries_strings_as_utf8_bytes(write_onnx: Callable[..., Any], job: Callable[..., Any]) -> None:
    backend = load_backend("onnxruntime")
    file = write_onnx([node("Identity", ["I"], ["O"])], [("I", T.STRING, ["N", 4])], [("O", T.STRING, ["N", 4])])
    session = backend.open(job(file))
    given = strings([b"a", "é".encode(), b"", b"x\x00y\x00"])
    found = session.run({"I": given}, ["O"])["O"]
    assert found.shape == (1, 4)
    assert found.dtype == object
    assert found.tolist() == given.tolist()
    assert session.info.needs_utf8
    with pytest.raises(BackendError, match=r"model 'made'.*input 'I'.*not UTF-8"):
        session.run({"I": strings([b"\xff", b"", b"", b""])}, ["O"])
    session.close()


def test_openvino_refuses_string_tensors(write_onnx: Callable[..., Any]) -> None:
    backend = load_backend("openvino")
    file = write_onnx([node("Identity", ["I"], ["O"])], [("I", T.STRING, ["N", 4])], [("O", T.STRING, ["N", 4])])
    with pytest.raises(LoadError, match="input 'I' is of type string"):
        backend.inspect(file, {})


def test_a_scalar_and_an_empty_batch_keep_their_shape(
    backend: Backend, write_onnx: Callable[..., Any], job: Callable[..., Any]
) -> None:
    file = write_onnx(
        [node("Neg", ["A"], ["B"]), node("Neg", ["C"], ["D"])],
        [("A", T.FLOAT, []), ("C", T.FLOAT, ["N", 2])],
        [("B", T.FLOAT, []), ("D", T.FLOAT, ["N", 2])],
    )
    signature = backend.inspect(file, {})
    assert signature is not None
    assert signature.inputs[0].dims == ()
    assert not signature.is_batchable
    session = backend.open(job(file))
    found = session.run({"A": np.array(3, dtype="f4"), "C": np.empty((0, 2), dtype="f4")}, ["B", "D"])
    assert all(isinstance(array, np.ndarray) for array in found.values())
    assert found["B"].shape == ()
    assert float(found["B"]) == -3
    assert found["D"].shape == (0, 2)
    session.close()
