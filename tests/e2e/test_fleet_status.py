"""`edge-server fleet status` with real servers that differ, and hosts that do not answer as they should."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.server import COMMAND, serve

FleetStatus = Callable[..., tuple[int, str]]


@pytest.fixture
def fleet_status(run_command: Any) -> FleetStatus:
    """Runs the command in this process, and returns its exit code and its output."""

    def run(*arguments: str) -> tuple[int, str]:
        done = run_command("fleet", "status", *arguments)
        assert done.stderr == ""
        return done.returncode, done.stdout

    return run


def test_differing_files_failed_models_and_hosts_without_an_answer_are_reported(
    tmp_path: Path, fleet_status: FleetStatus
) -> None:
    for name in ("a", "b", "c"):
        write_model(tmp_path / name, DOUBLES if name != "c" else DOUBLES.replace("2 *", "3 *"))
    (tmp_path / "c/broken/1").mkdir(parents=True)
    (tmp_path / "c/broken/1/model.py").write_text("raise RuntimeError('no weights')")
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    with serve(tmp_path / "a") as a, serve(tmp_path / "b", *explicit) as b, serve(tmp_path / "c") as c:
        (tmp_path / "hosts").write_text(f"{a.http}\n{b.http}\n")
        code, text = fleet_status("--wait=30", "--expect=m=1", str(tmp_path / "hosts"))
        assert code == 0, text
        lines = text.splitlines()
        assert lines[0].split()[:3] == ["HOST", "STATE", "SERVER"]
        assert [line.split()[:2] for line in lines[2:]] == [[server.http, "READY"] for server in (a, b)]

        assert eventually(lambda: sha256sum(tmp_path / "c/m") in fleet_status("--json", c.http)[1])
        code, text = fleet_status(a.http, b.http, c.http)
        assert code == 1, text
        assert f"{c.http} differs: m: version 1 (" in text
        assert f"{a.http} differs" not in text
        assert "no weights" in text
        code, text = fleet_status("--json", a.http, b.http, c.http)
        hosts = json.loads(text)["hosts"]
        assert (code, [host["url"] for host in hosts]) == (1, [f"http://{server.http}" for server in (a, b, c)])
        assert [bool(host["differs"]) for host in hosts] == [False, False, True]
        assert hosts[2]["report"]["models"][0]["name"] == "broken"
        digest = sha256sum(tmp_path / "a/m")
        code, text = fleet_status(f"--expect=m=1@{digest[:12]}", "--wait=0.1", a.http, b.http, c.http)
        assert code == 1, text
        assert f"{c.http}: m version 1: files with the SHA-256 {digest[:12]} are expected" in text
        assert f"{a.http}: m" not in text

        # A version that was loaded with the configuration of a request has no SHA-256 to compare.
        config = json.dumps(b.ask("/v2/models/m/config")[1])
        assert b.ask("/v2/repository/models/m/load", {"parameters": {"config": config}})[0] == 200
        code, text = fleet_status("--wait=1", a.http, b.http)
        assert code == 75, text
        unknown = f"{b.http} is not known to be equal: m: version 1, without the SHA-256 of its files"
        assert text.splitlines()[-1] == unknown

        with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
            closed.bind(("127.0.0.1", 0))
            nobody, mute = (f"127.0.0.1:{item.getsockname()[1]}" for item in (closed, silent))
            code, text = fleet_status("--timeout=2", a.http, nobody, mute, "no-such-host.invalid")
        assert code == 1
        lines = {line.split(": ")[0]: line for line in text.splitlines() if ": " in line}
        assert "nothing listens there" in lines[nobody]
        assert "within 2 s" in lines[mute] or "timed out" in lines[mute]
        assert "no-such-host.invalid:8000" in lines
        assert text.count("NO ANSWER") == 3


def test_status_of_one_server_has_its_digest_and_waits_for_an_expectation(tmp_path: Path, run_command: Any) -> None:
    write_model(tmp_path / "models", DOUBLES)
    digest = sha256sum(tmp_path / "models/m")
    with serve(tmp_path / "models") as server:
        command = ["status", "--json", "--url", f"http://{server.http}"]
        done = run_command(*command, f"--expect=m=1@{digest}", "--wait=30")
        assert done.returncode == 0, done.stdout
        (model,) = json.loads(done.stdout)["models"]
        assert model["digest"] == f"sha256:{digest}"
        _, index = server.ask("/v2/repository/index", {})
        assert index == [{"name": "m", "version": "1", "state": "READY", "digest": f"sha256:{digest}"}]

        done = run_command(*command, "--expect=m=2", "--wait=0.1")
        assert done.returncode == 1, done.stdout
        assert json.loads(done.stdout)["unmet"] == ["m: version 2 is expected, version 1 serves"]
        with subprocess.Popen([COMMAND, *command, "--expect=m=2", "--wait=30"], stdout=subprocess.PIPE) as waiting:
            write_model(tmp_path / "models", DOUBLES, version=2)
            waiting.communicate(timeout=60)
        assert waiting.returncode == 0


DOUBLES = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("O", 2 * request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""


def write_model(repository: Path, code: str, version: int = 1) -> None:
    folder = repository / "m" / str(version)
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(code)
    (repository / "m/config.pbtxt").write_text(
        'backend: "python" input { name: "I" data_type: TYPE_FP32 dims: [1] } '
        'output { name: "O" data_type: TYPE_FP32 dims: [1] }'
    )


def sha256sum(model: Path) -> str:
    """Return the SHA-256 by the commands of docs/operations.md."""
    text = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    command = re.search(r"```sh\n(cd models/my_model .*?)\n```", text)
    assert command is not None
    done = subprocess.run(
        ["sh", "-c", command[1].replace("models/my_model", str(model)).replace("./3", "./1")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.split()[0]
