"""CUDA shared memory from registering to copying, through the true bindings on a driver without a GPU."""

from __future__ import annotations

import base64
import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends.cuda import cuda_devices, cuda_driver
from edge_server.errors import AlreadyExists, InvalidRequest, NotFound, ServingFault, Unsupported
from edge_server.memory.cuda_shared_memory import CudaMemoryRegistry
from edge_server.memory.shared_memory import SharedMemoryRegistry
from tests.kit.server import Addresses
from tests.kit.together import together


def _fake_cuda() -> Any:
    path = Path(__file__).parent / "fake_cuda/__init__.py"
    spec = importlib.util.spec_from_file_location("fake_cuda_of_memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _fake_cuda().FakeCuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def gpu(built: Any) -> Iterator[Any]:
    built.tell()
    yield built
    built.free_all()
    built._allocations.clear()


@pytest.fixture
def library(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return gpu.install(monkeypatch)


@pytest.fixture
def regions(library: Any) -> Iterator[SharedMemoryRegistry]:
    made = SharedMemoryRegistry(True, CudaMemoryRegistry(True, cuda_devices.missing(), cuda_devices.CudaDevices))
    yield made
    made.cuda.unregister()
    assert library.fake_cuda_open_count() == 0, "an allocation of a client stayed mapped"


def test_an_input_is_read_from_the_device_and_an_output_is_written_to_it(gpu: Any, regions: Any) -> None:
    memory = gpu.allocate(64)
    memory.buffer[:] = bytes(range(64))
    regions.cuda.register("r", memory.handle, 0, 64)
    pin = regions.pin("r", 8, 4)
    assert bytes(pin.view) == bytes([8, 9, 10, 11])
    assert pin.view.readonly
    pin.release()
    out = regions.pin("r", 16, 8, writable=True)
    out.write(memoryview(b"answered"))
    out.release()
    assert bytes(memory.buffer[14:26]) == bytes([14, 15]) + b"answered" + bytes([24, 25])
    assert (regions.cuda.copies.read_bytes, regions.cuda.copies.written_bytes) == (4, 8)


def test_a_pin_for_writing_that_writes_nothing_leaves_the_clients_memory_alone(gpu: Any, regions: Any) -> None:
    memory = gpu.allocate(8)
    memory.buffer[:] = b"untouched"[:8]
    regions.cuda.register("r", memory.handle, 0, 8)
    regions.pin("r", 0, 8, writable=True).release()
    assert bytes(memory.buffer) == b"untouche"
    assert regions.cuda.copies.read_bytes == 0


def test_a_region_stays_open_until_its_last_pin_is_released(gpu: Any, regions: Any, library: Any) -> None:
    memory = gpu.allocate(16)
    regions.cuda.register("r", memory.handle, 0, 16)
    pin = regions.pin("r", 0, 16, writable=True)
    regions.cuda.unregister("r")
    assert library.fake_cuda_open_count() == 1
    with pytest.raises(NotFound):
        regions.pin("r", 0, 16)
    pin.write(b"late")
    pin.release()
    pin.release()
    assert library.fake_cuda_open_count() == 0
    assert bytes(memory.buffer[:4]) == b"late"


def test_names_are_shared_with_system_regions(gpu: Any, regions: Any) -> None:
    memory = gpu.allocate(16)
    regions.cuda.register("r", memory.handle, 0, 16)
    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        regions.register("r", memory._segment.name, 0, 16)
    regions.register("s", memory._segment.name, 0, 16)
    for name in ("r", "s"):
        with pytest.raises(AlreadyExists):
            regions.cuda.register(name, memory.handle, 0, 16)
    assert [item.name for item in regions.cuda.status()] == ["r"]
    assert [item.name for item in regions.status()] == ["s"]
    regions.close()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"handle": b"\0" * 63}, "has 64 bytes, 63 were given"),
        ({"byte_size": 0}, "byte_size must be 1 or more"),
        ({"byte_size": 17}, "byte_size 17 is more than the allocation has: 16"),
        ({"byte_size": 2**63}, "more than the allocation has"),
        ({"device_id": 1}, "there is no GPU 1, the box has 1"),
        ({"device_id": -1}, "there is no GPU -1"),
        ({"name": ""}, "name has 1 to 1024"),
        ({"name": "x" * 1025}, "name has 1 to 1024"),
    ],
)
def test_what_cannot_be_registered_is_refused(gpu: Any, regions: Any, change: Any, problem: str) -> None:
    memory = gpu.allocate(16)
    given = {"name": "r", "handle": memory.handle, "device_id": 0, "byte_size": 16} | change
    with pytest.raises(InvalidRequest, match=problem):
        regions.cuda.register(**given)
    assert regions.cuda.status() == []
    regions.cuda.register("r", memory.handle, 0, 16)


def test_a_handle_that_the_driver_does_not_know_is_its_own_words(regions: Any) -> None:
    with pytest.raises(ServingFault, match=r"region 'r': failed to open CUDA IPC handle: .*CUDA_ERROR_INVALID_HANDLE"):
        regions.cuda.register("r", bytes(64), 0, 16)
    assert not regions.cuda.has("r")


@pytest.mark.parametrize(("offset", "byte_size"), [(-1, 1), (16, 0), (0, 17), (8, 9), (2**70, 1), (0, -1)])
def test_a_piece_outside_of_the_region_is_refused(gpu: Any, regions: Any, offset: int, byte_size: int) -> None:
    regions.cuda.register("r", gpu.allocate(16).handle, 0, 16)
    with pytest.raises(InvalidRequest, match="Invalid offset"):
        regions.pin("r", offset, byte_size)


def test_a_gpu_that_fails_meanwhile_costs_the_request_and_leaves_no_pin(gpu: Any, regions: Any, library: Any) -> None:
    regions.cuda.register("r", gpu.allocate(16).handle, 0, 16)
    gpu.tell(fail=700)
    pin = regions.pin("r", 0, 16)
    with pytest.raises(ServingFault, match=r"failed to read CUDA shared memory region 'r': .*ILLEGAL_ADDRESS"):
        _ = pin.view
    pin.release()
    pin = regions.pin("r", 0, 16, writable=True)
    with pytest.raises(ServingFault, match="failed to write"):
        pin.write(b"lost")
    pin.release()
    gpu.tell()
    regions.cuda.unregister()
    assert library.fake_cuda_open_count() == 0


def test_an_integrated_gpu_is_refused_with_the_way_that_works(
    gpu: Any, regions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_INTEGRATED", "1")
    with pytest.raises(Unsupported, match=r"integrated.*register system shared memory instead"):
        regions.cuda.register("r", gpu.allocate(16).handle, 0, 16)


def test_without_a_driver_or_without_leave_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda_that_is_not_there.so.1")
    absent = CudaMemoryRegistry(True, cuda_devices.missing(), lambda: pytest.fail("the driver was asked"))
    assert not absent.is_usable
    with pytest.raises(Unsupported, match="there is no NVIDIA driver"):
        absent.register("r", bytes(64), 0, 16)
    assert absent.status() == []
    absent.unregister()
    shut = CudaMemoryRegistry(False, "", lambda: pytest.fail("the driver was asked"))
    assert not shut.is_usable
    with pytest.raises(Unsupported, match="--allow-client-shm"):
        shut.register("r", bytes(64), 0, 16)


def test_many_threads_register_pin_and_unregister_without_a_leak(gpu: Any, regions: Any, library: Any) -> None:
    memory = gpu.allocate(32)
    memory.buffer[:] = b"x" * 32
    wrong: list[object] = []

    def work(name: str) -> None:
        for _ in range(50):
            try:
                regions.cuda.register(name, memory.handle, 0, 32)
            except AlreadyExists:
                continue
            try:
                pin = regions.pin(name, 0, 32)
            except NotFound:
                continue
            if bytes(pin.view) != b"x" * 32:
                wrong.append(bytes(pin.view))
            regions.cuda.unregister(name)
            pin.release()

    together(work, ("a", "a", "b", "c"))
    assert wrong == []
    regions.cuda.unregister()
    assert library.fake_cuda_open_count() == 0


def test_the_identity_and_free_memory_of_a_gpu(gpu: Any, library: Any) -> None:
    gpu.tell(used=3 << 20, total=10 << 20)
    devices = cuda_devices.CudaDevices()
    assert devices.memory(0) == (7 << 20, 10 << 20)
    assert devices.uuid(0) == "GPU-10101010-1010-1010-1010-101010101010"
    with pytest.raises(OSError, match="no GPU 4"):
        devices.memory(4)
    before = library.fake_cuda_retained()
    devices.end()
    assert library.fake_cuda_retained() == before - 1


CONFIG = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }
"""


@pytest.fixture
def served(gpu: Any, tmp_path: Path, serve_with_client_memory: Any) -> Iterator[Any]:
    """The installed server with the driver, as a process of its own; the addresses of HTTP, gRPC and metrics."""
    (tmp_path / "models/same/1").mkdir(parents=True)
    (tmp_path / "models/same/config.pbtxt").write_text(CONFIG)
    with serve_with_client_memory(tmp_path / "models", gpu.environment()) as addresses:
        yield addresses


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
        return str(reply.read().decode())


def _get(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as reply:
        return json.loads(reply.read())


def test_clients_infer_in_device_memory_over_http_and_grpc(gpu: Any, served: Any) -> None:
    grpcclient = pytest.importorskip("tritonclient.grpc")
    http, grpc, metrics = served
    assert "cuda_shared_memory" in _get(http, "/v2")["extensions"]
    memory = gpu.allocate(64)
    given = np.array([1, 2, 3, 4], np.float32)
    memory.buffer[:16] = given.tobytes()
    handle = base64.b64encode(memory.handle).decode()
    body = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": 64}
    path = "/v2/cudasharedmemory/region/r/register"
    assert Addresses(http).ask(path, body | {"raw_handle": {"b64": "no base64"}})[0] == 400
    assert Addresses(http).ask(path, {})[0] == 400
    assert Addresses(http).ask(path, body)[0] == 200
    status, answer = Addresses(http).ask(path, body)
    assert status == 400
    assert "already in manager" in answer["error"]
    assert _get(http, "/v2/cudasharedmemory/status") == [{"name": "r", "device_id": 0, "byte_size": 64}]
    pin_view = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    request = {
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [4], "parameters": pin_view}],
        "outputs": [{"name": "OUTPUT0", "parameters": {**pin_view, "shared_memory_offset": 16}}],
    }
    status, answer = Addresses(http).ask("/v2/models/same/infer", request)
    assert status == 200, answer
    assert "data" not in answer["outputs"][0]
    assert bytes(memory.buffer[16:32]) == given.tobytes()
    page = _page(metrics)
    assert 'edge_cuda_shared_memory_copied_bytes_total{direction="input"} 16' in page
    assert 'edge_cuda_shared_memory_copied_bytes_total{direction="output"} 16' in page
    with grpcclient.InferenceServerClient(grpc) as client:
        client.register_cuda_shared_memory("g", base64.b64encode(memory.handle), 0, 64)
        assert client.get_cuda_shared_memory_status().regions["g"].byte_size == 64
        wanted = grpcclient.InferInput("INPUT0", [4], "FP32")
        wanted.set_shared_memory("g", 16, 16)
        placed = grpcclient.InferRequestedOutput("OUTPUT0")
        placed.set_shared_memory("g", 16, 48)
        client.infer("same", [wanted], outputs=[placed])
        assert bytes(memory.buffer[48:]) == given.tobytes()
        client.unregister_cuda_shared_memory()
        assert not client.get_cuda_shared_memory_status().regions
    assert Addresses(http).ask("/v2/models/same/infer", request)[0] == 404
