"""Inputs and outputs in clients' GPU memory: the driver's counters show that nothing is copied to the host."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends.base import ModelFile
from edge_server.backends.cuda import cuda_devices
from edge_server.core.device_tensor import DeviceArray, DeviceTensor, to_host_array
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, ServingFault
from edge_server.memory.cuda_shared_memory import CudaMemoryRegistry, CudaPin
from tests.kit.server import Addresses

onnx = pytest.importorskip("onnx")
helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT

Open = Callable[..., Any]
ROW = 16
"""Bytes of a row of the model's."""

BATCHING = {
    "inputs": (InputSpec("X", DType.FP32, (4,)),),
    "outputs": (OutputSpec("Y", DType.FP32, (4,)),),
    "max_batch_size": 8,
}


def rows(count: int) -> np.ndarray:
    return np.arange(1, count * 4 + 1, dtype="f4").reshape(count, 4)


@pytest.fixture
def regions(gpu: Any) -> Iterator[CudaMemoryRegistry]:
    made = CudaMemoryRegistry(True, "", cuda_devices.CudaDevices)
    yield made
    made.unregister()
    assert gpu.driver.fake_cuda_open_count() == 0, "an allocation of a client stayed mapped"


class Region:
    """A client's memory, registered, and the pins on it, which the test gives back."""

    def __init__(self, registry: CudaMemoryRegistry, name: str, memory: Any, device_id: int = 0) -> None:
        self._registry, self._name, self.memory = registry, name, memory
        registry.register(name, memory.handle, device_id, memory.byte_size)
        self.pins: list[CudaPin] = []

    def pin(self, offset: int, byte_size: int, *, writable: bool = False) -> CudaPin:
        pin = self._registry.pin(self._name, offset, byte_size, writable=writable)
        assert pin is not None
        self.pins.append(pin)
        return pin

    def holding(self, array: np.ndarray, offset: int = 0) -> DeviceArray:
        """Write an array there, as the client would, and return it as the server sees it."""
        self.memory.buffer[offset : offset + array.nbytes] = array.tobytes()
        return DeviceArray(array.dtype, array.shape, (self.pin(offset, array.nbytes),))

    def read(self, shape: Sequence[int], offset: int = 0) -> np.ndarray:
        return np.frombuffer(bytes(self.memory.buffer), "f4", int(np.prod(shape)), offset).reshape(shape)


@pytest.fixture
def region(regions: CudaMemoryRegistry, client_memory: Callable[[int], Any]) -> Iterator[Callable[..., Region]]:
    made: list[Region] = []

    def make(byte_size: int = 4096, device_id: int = 0) -> Region:
        made.append(Region(regions, f"r{len(made)}", client_memory(byte_size), device_id))
        return made[-1]

    yield make
    for one in made:
        for pin in one.pins:
            pin.release()


def graphs(*sizes: int) -> str:
    return json.dumps({"optimization": {"cuda": {"graphs": True, "graph_spec": [{"batch_size": n} for n in sizes]}}})


def copies_of(gpu: Any, run: Callable[[], Any]) -> tuple[Any, int, int]:
    """Return what a run answers, and how many copies it made from or to the host, and on the device."""
    host, device = gpu.copies()
    answer = run()
    host_after, device_after = gpu.copies()
    return answer, host_after - host, device_after - device


def test_an_input_is_read_in_place_and_an_output_copied_on_the_device(
    gpu: Any, double_plan: ModelFile, open_session: Open, region: Callable[..., Region]
) -> None:
    session, memory = open_session(double_plan, **BATCHING), region()
    given, target = memory.holding(rows(3)), memory.pin(1024, 3 * ROW, writable=True)
    answer, host, device = copies_of(gpu, lambda: session.run_on_device({"X": given}, ["Y"], {"Y": target}))
    assert (host, device) == (0, 1)
    assert answer["Y"].piece is target
    assert answer["Y"].shape == (3, 4)
    np.testing.assert_array_equal(memory.read((3, 4), 1024), rows(3) * 2)
    # What it was lent it does not use again.
    np.testing.assert_array_equal(session.run({"X": rows(2)}, ["Y"])["Y"], rows(2) * 2)
    np.testing.assert_array_equal(memory.read((3, 4)), rows(3))
    session.close()


def test_output_memory_may_overlap_input_memory(
    double_plan: ModelFile, open_session: Open, region: Callable[..., Region]
) -> None:
    session, memory = open_session(double_plan, **BATCHING), region()
    for count in (3, 1):
        given, target = memory.holding(rows(count)), memory.pin(ROW // 2, 200, writable=True)
        session.run_on_device({"X": given}, ["Y"], {"Y": target})
        np.testing.assert_array_equal(memory.read((count, 4), ROW // 2), rows(count) * 2)
        np.testing.assert_array_equal(session.run({"X": rows(8)}, ["Y"])["Y"], rows(8) * 2)
    session.close()


def test_an_unaligned_address_is_copied_on_the_device(
    gpu: Any, double_plan: ModelFile, open_session: Open, region: Callable[..., Region]
) -> None:
    session, memory = open_session(double_plan, **BATCHING), region()
    given, target = memory.holding(rows(2), 100), memory.pin(1028, 64, writable=True)
    _, host, device = copies_of(gpu, lambda: session.run_on_device({"X": given}, ["Y"], {"Y": target}))
    assert (host, device) == (0, 2)
    np.testing.assert_array_equal(memory.read((2, 4), 1028), rows(2) * 2)
    session.close()


def test_a_batch_of_several_clients_memory_is_joined_and_padded_on_the_device(
    gpu: Any, double_plan: ModelFile, open_session: Open, region: Callable[..., Region]
) -> None:
    session, one, other = open_session(double_plan, **BATCHING, config_json=graphs(4)), region(), region()
    launches = gpu.launches()
    for count in (1, 4):  # of 3 rows, which are filled up to 4, and of 6, which no recording takes
        first, second = one.holding(rows(2)), other.holding(rows(count) * 10)
        joined = DeviceArray(first.dtype, (2 + count, 4), (*first.parts, *second.parts))
        answer, host, device = copies_of(gpu, lambda joined=joined: session.run_on_device({"X": joined}, ["Y"], {}))
        # The answer alone came to the host.
        assert (host, device) == (1, 2)
        expected = np.concatenate([rows(2), rows(count) * 10]) * 2
        np.testing.assert_array_equal(answer["Y"], expected)
    assert gpu.launches() - launches == 1
    target = one.pin(2048, 3 * ROW, writable=True)
    given = other.holding(rows(3))
    _, host, _ = copies_of(gpu, lambda: session.run_on_device({"X": given}, ["Y"], {"Y": target}))
    assert host == 0
    assert gpu.launches() - launches == 2
    np.testing.assert_array_equal(one.read((3, 4), 2048), rows(3) * 2)
    assert bytes(one.memory.buffer[2048 + 3 * ROW : 4096]) == bytes(2048 - 3 * ROW), "a filled-up row was written"
    session.close()


def test_host_and_device_memory_can_be_joined_to_one_batch(
    double_plan: ModelFile, open_session: Open, region: Callable[..., Region]
) -> None:
    session, memory = open_session(double_plan, **BATCHING), region()
    there = memory.holding(rows(2))
    for parts in ((rows(1) * 5, *there.parts), (*there.parts, rows(1) * 5)):
        joined = DeviceArray(there.dtype, (3, 4), parts)
        expected = (
            np.concatenate([to_host_array(part) if isinstance(part, np.ndarray) else rows(2) for part in parts]) * 2
        )
        np.testing.assert_array_equal(session.run_on_device({"X": joined}, ["Y"], {})["Y"], expected)
    session.close()


def test_memory_of_another_gpu_is_copied_through_the_host(
    gpu: Any, double_plan: ModelFile, open_session: Open, region: Callable[..., Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_COUNT", "2")
    session, memory = open_session(double_plan, **BATCHING), region(device_id=1)
    given, target = memory.holding(rows(2)), memory.pin(1024, 64, writable=True)
    answer, host, device = copies_of(gpu, lambda: session.run_on_device({"X": given}, ["Y"], {"Y": target}))
    # Out of the region, in, out: and nothing is written there by the session.
    assert (host, device) == (3, 0)
    np.testing.assert_array_equal(answer["Y"], rows(2) * 2)
    assert not memory.read((2, 4), 1024).any()
    session.close()


def test_a_target_that_is_too_small_is_not_written(
    double_plan: ModelFile, open_session: Open, region: Callable[..., Region]
) -> None:
    session, memory = open_session(double_plan, **BATCHING), region()
    answer = session.run_on_device({"X": rows(2)}, ["Y"], {"Y": memory.pin(0, 2 * ROW - 1, writable=True)})["Y"]
    np.testing.assert_array_equal(answer, rows(2) * 2)
    assert not memory.read((2, 4)).any()
    session.close()


def test_a_failing_run_writes_no_target_and_leaks_no_reference(
    double_plan: ModelFile, open_session: Open, region: Callable[..., Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, memory = open_session(double_plan, **BATCHING), region()
    given, target = memory.holding(rows(2)), memory.pin(1024, 64, writable=True)
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_ENGINE_FAULT", "refuse")
        with pytest.raises(BackendError, match="told to refuse"):
            session.run_on_device({"X": given}, ["Y"], {"Y": target})
    assert not memory.read((2, 4), 1024).any()
    memory.memory.buffer[:64] = b"\xff" * 64
    np.testing.assert_array_equal(session.run({"X": rows(2)}, ["Y"])["Y"], rows(2) * 2)
    session.close()


def test_a_tensor_is_copied_to_the_host_once_on_first_use(
    gpu: Any, region: Callable[..., Region], regions: CudaMemoryRegistry
) -> None:
    memory = region()
    tensor = DeviceTensor("X", DType.FP32, memory.holding(rows(3)))
    _, host, _ = copies_of(gpu, lambda: (tensor.shape, tensor.nbytes))
    assert host == 0
    found: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: found.append(tensor.array)) for _ in range(4)]
    _, host, _ = copies_of(gpu, lambda: [*map(threading.Thread.start, threads), *map(threading.Thread.join, threads)])
    assert host == 1
    for array in found:
        np.testing.assert_array_equal(array, rows(3))
        assert not array.flags.writeable
    late = DeviceTensor("X", DType.FP32, memory.holding(rows(3)))
    regions.unregister()
    np.testing.assert_array_equal(late.array, rows(3))
    assert gpu.driver.fake_cuda_open_count() == 1
    for pin in memory.pins:
        pin.release()
    assert gpu.driver.fake_cuda_open_count() == 0
    np.testing.assert_array_equal(tensor.array, rows(3))  # what was copied before stays


def test_memory_unregistered_during_a_request_stays_until_its_end(
    gpu: Any, double_plan: ModelFile, open_session: Open, region: Callable[..., Region], regions: CudaMemoryRegistry
) -> None:
    session, memory = open_session(double_plan, **BATCHING), region()
    given, target = memory.holding(rows(2)), memory.pin(1024, 64, writable=True)
    regions.unregister()
    assert regions.status() == []
    session.run_on_device({"X": given}, ["Y"], {"Y": target})
    np.testing.assert_array_equal(memory.read((2, 4), 1024), rows(2) * 2)
    assert gpu.driver.fake_cuda_open_count() == 1
    for pin in memory.pins:
        pin.release()
    assert gpu.driver.fake_cuda_open_count() == 0
    session.close()


def test_a_session_on_an_integrated_gpu_accepts_no_device_memory(
    double_plan: ModelFile, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    discrete = open_session(double_plan, **BATCHING)
    assert discrete.takes_device_memory
    discrete.close()
    monkeypatch.setenv("FAKE_CUDA_INTEGRATED", "1")
    integrated = open_session(double_plan, **BATCHING)
    assert not integrated.takes_device_memory
    integrated.close()


def test_released_device_memory_is_not_read(region: Callable[..., Region]) -> None:
    memory = region()
    array = memory.holding(rows(1))
    memory.pins[0].release()
    with pytest.raises(ServingFault, match="its request is over"):
        array.host()


# -- through the installed server --------------------------------------------------------------------------------------

CONFIG = """
backend: "tensorrt_rtx"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [4] }
output { name: "Y" data_type: TYPE_FP32 dims: [4] }
"""


@pytest.fixture
def served(
    gpu: Any, double_plan: ModelFile, tmp_path: Path, serve_with_client_memory: Any
) -> Iterator[tuple[str, str, str]]:
    """The installed server with the GPU, as a process of its own; the addresses of HTTP, gRPC and metrics."""
    (tmp_path / "models/double/1").mkdir(parents=True)
    (tmp_path / "models/double/1/model.plan").write_bytes(double_plan.path.read_bytes())
    (tmp_path / "models/double/config.pbtxt").write_text(CONFIG)
    with serve_with_client_memory(tmp_path / "models", gpu.environment()) as addresses:
        yield addresses


def _copied(address: str) -> list[str]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
        page = reply.read().decode()
    return re.findall(r"^edge_cuda_shared_memory_copied_bytes_total\{.*\} (\S+)$", page, re.MULTILINE)


def test_requests_over_http_and_grpc_make_no_host_copies(
    gpu: Any, served: tuple[str, str, str], client_memory: Callable[[int], Any]
) -> None:
    grpcclient = pytest.importorskip("tritonclient.grpc")
    http, grpc, metrics = served
    memory = client_memory(4096)
    memory.buffer[:32] = rows(2).tobytes()
    body = {"raw_handle": {"b64": base64.b64encode(memory.handle).decode()}, "device_id": 0, "byte_size": 4096}
    assert Addresses(http).ask("/v2/cudasharedmemory/region/r/register", body)[0] == 200

    def place(offset: int, size: int = 32) -> dict[str, object]:
        return {"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": offset}

    def request(given: dict[str, object], wanted: dict[str, object], shape: Sequence[int] = (2, 4)) -> object:
        return {
            "inputs": [{"name": "X", "datatype": "FP32", "shape": list(shape), "parameters": given}],
            "outputs": [{"name": "Y", "parameters": wanted}],
        }

    path = "/v2/models/double/infer"
    (status, answer), host, device = copies_of(gpu, lambda: Addresses(http).ask(path, request(place(0), place(1024))))
    assert status == 200, answer
    assert answer["outputs"] == [{"name": "Y", "datatype": "FP32", "shape": [2, 4]}]
    assert (host, device) == (0, 1)
    np.testing.assert_array_equal(np.frombuffer(memory.buffer[1024:1056], "f4"), rows(2).ravel() * 2)
    with grpcclient.InferenceServerClient(grpc) as client:
        given = grpcclient.InferInput("X", [2, 4], "FP32")
        given.set_shared_memory("r", 32, 1024)
        wanted = grpcclient.InferRequestedOutput("Y")
        wanted.set_shared_memory("r", 64, 2048)
        for _ in range(3):
            result, host, device = copies_of(gpu, lambda: client.infer("double", [given], outputs=[wanted]))
            assert (host, device) == (0, 1)
            assert result.get_output("Y").parameters["shared_memory_byte_size"].int64_param == 32
        np.testing.assert_array_equal(np.frombuffer(memory.buffer[2048:2080], "f4"), rows(2).ravel() * 4)
        # Answers that a client wants in the message come to the host, once.
        result, host, _ = copies_of(gpu, lambda: client.infer("double", [given]))
        assert host == 1
        np.testing.assert_array_equal(result.as_numpy("Y"), rows(2) * 4)
    assert _copied(metrics) == ["0", "0"]
    for given_place, wanted_place, shape, problem in (
        (place(0), place(1024, 31), (2, 4), "should be at least 32 bytes"),
        (place(0), place(4080), (2, 4), "Invalid offset"),
        (place(4080), place(0), (2, 4), "Invalid offset"),
        (place(0), place(1024), (3, 4), "byte size mismatch"),
        (place(0), place(1024), (1, 8), "unexpected shape"),
    ):
        status, answer = Addresses(http).ask(path, request(given_place, wanted_place, shape))
        assert (status, problem in answer["error"]) == (400, True), answer
    assert Addresses(http).ask("/v2/cudasharedmemory/unregister", {})[0] == 200
    assert Addresses(http).ask(path, request(place(0), place(1024)))[0] == 404
