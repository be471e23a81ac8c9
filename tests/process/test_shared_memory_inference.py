"""System shared memory: permission, registration, and tensors in it over HTTP and gRPC."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.models import identity_config
from tests.kit.server import serve_here

WIRES = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    module_repository.add("same", identity_config("FP32"))
    module_repository.add("text", identity_config("BYTES"))
    module_repository.add("slow", identity_config("FP32", more=parameters(execute_delay_ms="200")))
    module_repository.add_sub("add_sub", 'backend: "onnxruntime"')
    module_repository.add_sub("add_sub_openvino", 'backend: "openvino"')
    with serve_here(module_repository.path, allow_client_shm=True) as server:
        yield server


@pytest.fixture(params=sorted(WIRES))
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(server: Any, wire: str) -> Iterator[Any]:
    with WIRES[wire].InferenceServerClient(getattr(server, wire)) as client:
        client.unregister_system_shared_memory()
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def segment() -> Iterator[Callable[[int], tuple[str, Any]]]:
    """`segment(byte_size)` makes a shared-memory object; returns its key and the client library's handle."""
    made = []

    def make(byte_size: int) -> tuple[str, Any]:
        key = f"/edge-e2e-{uuid.uuid4().hex}"
        made.append(shm.create_shared_memory_region(key, key, byte_size))
        return key, made[-1]

    yield make
    for handle in made:
        shm.destroy_shared_memory_region(handle)


def given(wire: str, name: str, shape: tuple[int, ...], region: str, offset: int = 0, datatype: str = "FP32") -> Any:
    tensor = WIRES[wire].InferInput(name, list(shape), datatype)
    tensor.set_shared_memory(region, int(np.prod(shape)) * 4, offset)
    return tensor


def wanted(wire: str, name: str, region: str, byte_size: int, offset: int = 0) -> Any:
    tensor = WIRES[wire].InferRequestedOutput(name)
    tensor.set_shared_memory(region, byte_size, offset)
    return tensor


@pytest.mark.sample
@pytest.mark.parametrize("model", ["add_sub", "add_sub_openvino"])
@pytest.mark.parametrize("rows", [1, 4])
def test_inputs_and_outputs_use_one_segment(client: Any, wire: str, segment: Any, model: str, rows: int) -> None:
    size = rows * 16 * 4
    key, handle = segment(4 * size)
    first = np.arange(rows * 16, dtype=np.float32).reshape(rows, 16)
    shm.set_shared_memory_region(handle, [first, first * 2])
    client.register_system_shared_memory("both", key, 4 * size)
    answer = client.infer(
        model,
        [given(wire, "INPUT0", (rows, 16), "both"), given(wire, "INPUT1", (rows, 16), "both", size)],
        outputs=[wanted(wire, "OUTPUT0", "both", size, 2 * size), wanted(wire, "OUTPUT1", "both", size, 3 * size)],
    )
    np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [rows, 16], 2 * size), first * 3)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [rows, 16], 3 * size), -first)
    if wire == "http":
        # The C++ client takes `parameters` of an output to hold a binary_data_size, so there are none.
        assert set(answer.get_output("OUTPUT0")) == {"name", "datatype", "shape"}


def test_an_equal_request_reads_what_its_region_holds_now(client: Any, wire: str, segment: Any) -> None:
    value = 0.0
    for _ in range(2):
        key, handle = segment(64)
        client.register_system_shared_memory("mine", key, 64)
        for _ in range(4):
            value += 1
            shm.set_shared_memory_region(handle, [np.full((1, 4), value, np.float32)])
            client.infer(
                "same", [given(wire, "INPUT0", (1, 4), "mine")], outputs=[wanted(wire, "OUTPUT0", "mine", 16, 32)]
            )
            assert shm.get_contents_as_numpy(handle, np.float32, [4], 32).tolist() == [value] * 4
        client.unregister_system_shared_memory("mine")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'mine'"):
            client.infer(
                "same", [given(wire, "INPUT0", (1, 4), "mine")], outputs=[wanted(wire, "OUTPUT0", "mine", 16, 32)]
            )


def test_strings_use_shared_memory(client: Any, wire: str, segment: Any) -> None:
    from tritonclient.utils import serialize_byte_tensor

    packed = serialize_byte_tensor(np.array([[b"one", b"", b"three"]], dtype=object))
    size = len(packed.item())
    key, handle = segment(2 * size)
    shm.set_shared_memory_region(handle, [packed])
    client.register_system_shared_memory("text", key, 2 * size)
    tensor = WIRES[wire].InferInput("INPUT0", [1, 3], "BYTES")
    tensor.set_shared_memory("text", size)
    client.infer("text", [tensor], outputs=[wanted(wire, "OUTPUT0", "text", size, size)])
    found = shm.get_contents_as_numpy(handle, np.object_, [1, 3], size)
    assert found.tolist() == [[b"one", b"", b"three"]]


def test_an_unaligned_region_is_read_and_written_correctly(client: Any, wire: str, segment: Any) -> None:
    key, handle = segment(64)
    array = np.array([[1.5, -2.5]], np.float32)
    shm.set_shared_memory_region(handle, [array], offset=1)
    client.register_system_shared_memory("odd", key, 64)
    client.infer("same", [given(wire, "INPUT0", (1, 2), "odd", 1)], outputs=[wanted(wire, "OUTPUT0", "odd", 8, 17)])
    np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [1, 2], 17), array)


def test_a_region_unregistered_while_a_request_uses_it_is_released_afterwards(server: Any, segment: Any) -> None:
    key, handle = segment(64)
    array = np.arange(4, dtype=np.float32).reshape(1, 4)
    shm.set_shared_memory_region(handle, [array])
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.register_system_shared_memory("busy", key, 64)
        answers = []
        call = client.async_infer(
            "slow",
            [given("grpc", "INPUT0", (1, 4), "busy")],
            lambda result, error: answers.append((result, error)),
            outputs=[wanted("grpc", "OUTPUT0", "busy", 16, 32)],
        )
        client.unregister_system_shared_memory("busy")
        del call
        # The request holds the only instance of the model, so this one is answered after it.
        plain = infer_input(tritonclient.grpc, "INPUT0", array)
        client.infer("slow", [plain])
    ((_, error),) = answers
    if error is None:
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [1, 4], 32), array)
    else:
        # The unregistering overtook the request on its way.
        assert "Unable to find shared memory region: 'busy'" in str(error)
    assert server.ask("/v2/systemsharedmemory/status")[1] == []
