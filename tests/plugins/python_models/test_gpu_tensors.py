"""Tensors that a Python model hands over from a GPU's memory: copied to the host, from a stand-in for the driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends.cuda.cuda_devices import CudaDevices
from edge_server.core.tensor import DType
from edge_server.plugins.python_models import dlpack
from edge_server.plugins.python_models.error_translation import TritonModelException
from edge_server.plugins.python_models.tensor import PbTensor
from tests.memory.fake_cuda import FakeCuda


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake = FakeCuda(tmp_path)
    fake.install(monkeypatch)
    dlpack._gpus.cache_clear()
    yield fake
    dlpack._gpus.cache_clear()
    fake.free_all()


class OnGpu:
    """A framework's tensor on GPU 0, which records on which stream it was asked for."""

    def __init__(self, fake: Any, array: np.ndarray, strides: tuple[int, ...] | None = None) -> None:
        allocation = fake.allocate(array.nbytes)
        allocation.buffer[:] = array.tobytes()
        self._address = CudaDevices().open(0, allocation.handle)[0]
        self._array, self._strides, self.streams = array, strides, list[Any]()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, stream: Any = None) -> object:
        self.streams.append(stream)
        capsule = dlpack.export_tensor(self._array, DType.from_numpy(self._array.dtype))
        tensor = dlpack._DLManagedTensor.from_address(dlpack._pointer_of(capsule, b"dltensor")).tensor
        tensor.data, tensor.device = self._address, dlpack._DLDevice(2, 0)
        for number, step in enumerate(self._strides or ()):
            tensor.strides[number] = step
        return capsule


def test_a_tensor_on_a_gpu_is_copied_and_can_be_written_to(gpu: Any) -> None:
    array = np.arange(6, dtype="f4").reshape(2, 3)
    given = OnGpu(gpu, array)
    tensor = PbTensor.from_dlpack("OUT", given)
    assert given.streams == [1], "the default stream, in which the copy runs"
    np.testing.assert_array_equal(tensor.as_numpy(), array)
    tensor.as_numpy()[0, 0] = 7
    assert tensor.as_numpy()[0, 0] == 7
    assert dlpack._exported == {}


def test_a_capsule_and_an_empty_tensor_are_taken_too(gpu: Any) -> None:
    capsule = OnGpu(gpu, np.arange(4, dtype="i8")).__dlpack__()
    assert PbTensor.from_dlpack("OUT", capsule).as_numpy().tolist() == [0, 1, 2, 3]
    given = OnGpu(gpu, np.ones(1, "f4"))
    given._array = np.ones((0, 3), "f4")
    assert PbTensor.from_dlpack("OUT", given).as_numpy().shape == (0, 3)


def test_a_transposed_tensor_is_refused_with_the_way_out(gpu: Any) -> None:
    given = OnGpu(gpu, np.ones((2, 3), "f4"), strides=(1, 2))
    with pytest.raises(TritonModelException, match=r"call its contiguous\(\) first"):
        PbTensor.from_dlpack("OUT", given)
    assert dlpack._exported == {}


def test_an_error_of_the_driver_names_the_gpu(gpu: Any) -> None:
    given = OnGpu(gpu, np.ones(4, "f4"))
    gpu.tell(fail=700)
    with pytest.raises(TritonModelException, match="cannot copy the tensor from GPU 0: cuMemcpyDtoH_v2"):
        PbTensor.from_dlpack("OUT", given)


def test_another_kind_of_device_is_refused(gpu: Any) -> None:
    class OnVulkan(OnGpu):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 7, 0

    with pytest.raises(TritonModelException, match="got one of DLPack device 7"):
        PbTensor.from_dlpack("OUT", OnVulkan(gpu, np.ones(1, "f4")))
