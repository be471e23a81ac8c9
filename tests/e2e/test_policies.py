"""Robot policies through the installed server: actions over openpi's WebSocket, a key, ports, and the end."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.kit.infer_input import infer_input
from tests.kit.model_folder import model_folder, parameters
from tests.kit.server import serve

websockets = pytest.importorskip("websockets", reason="needs websockets, of policies")
from websockets.sync.client import connect  # noqa: E402

messages = pytest.importorskip("edge_server.plugins.policies.array_messages", reason="needs msgpack, of policies")

ARM = """
backend: "python"
input { name: "state" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "action" data_type: TYPE_FP32 dims: [ 4, 2 ] }
parameters { key: "policy_metadata" value { string_value: "{\\"reset_pose\\": [0, 1]}" } }
"""
WORK = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        states = [pb_utils.get_input_tensor_by_name(request, "state").as_numpy() for request in requests]
        steps = np.arange(4, dtype=np.float32)[:, None]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("action", steps + state)]) for state in states]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    policy = parameters(policy_action_key="actions", policy_inputs="state=observation/state", policy_dt_ms="20")
    model_folder(folder / "arm", ARM + policy, {"1/model.py": WORK})
    return folder


TOKEN = secrets.token_hex(32)


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(f"robot {hashlib.sha256(TOKEN.encode()).hexdigest()} inference\n")
    with serve(models, "--policy-openpi=127.0.0.1:0", f"--auth-tokens-file={tokens}") as server:
        yield server
        assert "Traceback" not in server.log(), server.log()


def port_of(server: Any) -> str:
    found = re.search(r"openpi ws://127\.0\.0\.1:(\d+)", "\n".join(server.banner))
    assert found, server.banner
    return found[1]


def robot(server: Any, key: str) -> Any:
    headers = {"Authorization": f"Api-Key {key}"}
    return connect(f"ws://127.0.0.1:{port_of(server)}/arm", additional_headers=headers, proxy=None)


def test_the_actions_are_those_that_tritons_client_gets(server: Any) -> None:
    state = np.float32([1.5, -2.25])
    with robot(server, TOKEN) as socket:
        assert messages.read_message(socket.recv(30)) == {
            "model": "arm", "action_key": "actions", "action_horizon": 4, "action_dt_ms": 20.0, "reset_pose": [0, 1],
        }  # fmt: skip
        socket.send(messages.write_message({"observation": {"state": state}}))
        answer = messages.read_message(socket.recv(30))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        bearer = {"authorization": f"Bearer {TOKEN}"}
        expected = client.infer("arm", [infer_input(grpcclient, "state", state)], headers=bearer).as_numpy("action")
    assert answer["actions"].dtype == np.float32
    assert answer["actions"].tolist() == expected.tolist()
    assert 0 < answer["server_timing"]["infer_ms"] < 30_000


def test_a_key_is_taken_as_openpis_client_sends_it(server: Any) -> None:
    with pytest.raises(websockets.InvalidStatus, match="401"):
        robot(server, "wrong")


@pytest.mark.parametrize("flag", ["--policy-openpi", "--policy-groot"])
def test_an_address_in_use_ends_the_start_with_a_sentence(server: Any, models: Path, flag: str) -> None:
    port = port_of(server)
    with (
        pytest.raises(AssertionError, match=rf"{flag}=127\.0\.0\.1:{port}: cannot listen: Address already in use"),
        serve(models, f"{flag}=127.0.0.1:{port}"),
    ):
        pass


def test_a_server_that_stops_says_so_to_its_robots(models: Path) -> None:
    with serve(models, "--policy-openpi=127.0.0.1:0", "--policy-groot=127.0.0.1:0/arm") as server:
        assert "GR00T tcp://127.0.0.1:" in "\n".join(server.banner)
        with robot(server, "") as socket:
            socket.recv(30)
            server.process.terminate()
            with pytest.raises(websockets.ConnectionClosed) as closed:
                socket.recv(30)
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "the server stops")
        assert server.process.wait(30) == 0
