"""A server that follows a signed repository: exchanges under load, and releases that it cannot serve."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.server import COMMAND, serve

pytest.importorskip("tuf")
pytestmark = pytest.mark.full

PATIENCE_S = 60.0
"""For several processes of a busy machine."""
BODY = {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1.0]}]}
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [1] }
"""
MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {begin}

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([{value}], np.float32))]) for _ in requests]
"""
ENDS_A_SERVER = 'os.kill(os.getpid(), 9) if b"serve" in open("/proc/self/cmdline", "rb").read().split(b"\\0") else None'

LACKS_MEMORY = """if b"serve" in open("/proc/self/cmdline", "rb").read().split(b"\\0") and not os.path.exists("{free}"):
            raise MemoryError("no memory is left")"""


class Publication:
    """A publisher's folder. `edge(*arguments)` runs a command in it, in this process."""

    def __init__(self, folder: Path, edge: Callable[..., subprocess.CompletedProcess[str]]) -> None:
        self.folder = folder
        self.edge = edge
        self.box = folder / "box"
        self.box.mkdir()

    def publish(self, value: float, begin: str = "pass") -> None:
        version = self.folder / "models" / "m" / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "model.py").write_text(MODEL.format(value=value, begin=begin))
        (version.parent / "config.pbtxt").write_text(CONFIG)
        published = self.edge("publish", "models", "site", "--keys=keys")
        assert published.returncode == 0, published.stderr

    @property
    def flags(self) -> list[str]:
        root = self.folder / "site" / "metadata" / "1.root.json"
        return [
            f"--follow={(self.folder / 'site').as_uri()}", f"--follow-root={root}", "--follow-interval-secs=1",
            "--box-id=box-7",
        ]  # fmt: skip


@pytest.fixture
def publication(
    tmp_path: Path, run_command: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> Publication:
    monkeypatch.chdir(tmp_path)
    return Publication(tmp_path, run_command)


def value(server: Any) -> float | None:
    status, answer = server.infer("m", BODY)
    return answer["outputs"][0]["data"][0] if status == 200 else None


def follow_report(server: Any) -> Any:
    plugins = server.ask("/edge/v1/plugins")[1]["plugins"]
    return next(plugin["reports"]["follow"] for plugin in plugins if "follow" in plugin.get("reports", {}))


def test_a_release_is_exchanged_under_load_without_a_failed_request(publication: Publication) -> None:
    publication.publish(1.0)
    with serve(publication.box, *publication.flags) as server:
        assert eventually(lambda: value(server) == 1.0)
        answers: list[float | None] = []
        is_done = threading.Event()

        def ask() -> None:
            while not is_done.is_set():
                answers.append(value(server))

        asker = threading.Thread(target=ask)
        asker.start()
        for number in (2.0, 3.0):
            publication.publish(number)
            assert eventually(lambda number=number: value(server) == number)  # type: ignore[misc]
        is_done.set()
        asker.join()
        assert set(answers) == {1.0, 2.0, 3.0}
        # The follower writes it when it has seen that the server serves.
        assert eventually(lambda: follow_report(server)["models"].get("m", {}).get("installed") == "m/3.json")
        assert follow_report(server)["box"] == "box-7"
        assert 'edge_follow_releases{state="installed"} 1' in server.read_metrics()


def test_a_release_that_the_server_refuses_is_taken_back_and_named(publication: Publication) -> None:
    publication.publish(1.0)
    model = publication.folder / "models" / "m"
    assert publication.edge("sign", str(model)).returncode == 0
    publication.publish(1.0)
    with serve(publication.box, *publication.flags, "--require-checksums") as server:
        assert eventually(lambda: value(server) == 1.0)
        # Its trial asks for no checksums, this server does.
        for path in model.rglob("SHA256SUMS"):
            path.unlink()
        publication.publish(2.0)
        assert eventually(lambda: follow_report(server)["models"].get("m", {}).get("state") == "failed")
        state = follow_report(server)["models"]["m"]
        assert "SHA256SUMS" in state["reason"]
        assert (state["wanted"], state["installed"]) == ("m/3.json", "m/2.json")
        assert eventually(lambda: value(server) == 1.0)
        status = publication.edge("status", f"--url={server.url('')}")
        assert "FAILED follow: " in status.stdout
        assert status.returncode == 1


def test_a_release_for_which_the_server_lacks_memory_is_put_back_until_there_is_some(publication: Publication) -> None:
    publication.publish(1.0)
    with serve(publication.box, *publication.flags) as server:
        assert eventually(lambda: value(server) == 1.0)
        publication.publish(2.0, LACKS_MEMORY.format(free=str(publication.folder / "free")))
        assert eventually(lambda: follow_report(server)["models"].get("m", {}).get("state") == "waiting")
        state = follow_report(server)["models"]["m"]
        assert "no memory is left" in state["reason"]
        assert (state["wanted"], state["installed"]) == ("m/2.json", "m/1.json")
        assert eventually(lambda: value(server) == 1.0)
        (publication.folder / "free").touch()
        assert eventually(lambda: value(server) == 2.0)
        assert eventually(lambda: follow_report(server)["models"].get("m", {}).get("state") == "installed")


def test_a_release_with_which_the_server_ends_is_taken_back_at_the_second_start(publication: Publication) -> None:
    publication.publish(1.0)
    with serve(publication.box, *publication.flags) as server:
        assert eventually(lambda: value(server) == 1.0)
        publication.publish(2.0, ENDS_A_SERVER)
        assert server.process.wait(60) == -9
    with pytest.raises(AssertionError, match="ended with -9"), serve(publication.box, *publication.flags):
        pass
    with serve(publication.box, *publication.flags) as server:
        assert eventually(lambda: value(server) == 1.0)
        assert eventually(lambda: follow_report(server)["models"].get("m", {}).get("state") == "failed")
        assert "the server ended each time" in follow_report(server)["models"]["m"]["reason"]


def test_a_server_that_does_not_follow_is_named(publication: Publication) -> None:
    publication.publish(1.0)
    with serve(publication.box) as server:
        found = publication.edge("fleet", "rollout", "status", "site", server.http)
    assert "does not follow a signed repository" in found.stdout
    assert found.returncode == 1


def test_a_release_of_an_idle_model_is_kept(publication: Publication) -> None:
    publication.publish(1.0)
    with serve(publication.box, *publication.flags, "--idle-unload-secs=0.3") as server:
        assert eventually(lambda: follow_report(server)["models"].get("m", {}).get("state") == "installed")
        assert eventually(lambda: "idle" in server.ask("/v2/repository/index", {})[1][0].get("reason", ""))
        publication.publish(2.0)
        assert eventually(lambda: follow_report(server)["models"].get("m", {}).get("installed") == "m/2.json")
        assert eventually(lambda: value(server) == 2.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--follow=https://x/y"], "--follow needs --follow-root"),
        (["--follow=nowhere", "--follow-root=/etc/hostname"], "expected the address of a signed repository"),
        (["--follow=https://x/y", "--follow-root=/nowhere"], "--follow-root=/nowhere cannot be read"),
        (["--follow=https://x/y", "--model-control-mode=explicit"], "--follow needs --model-control-mode=poll"),
        (["--follow=https://x/y", "--follow-root=/etc/hostname", "--follow-hours=1-2"], "expected HH:MM-HH:MM"),
        (["--follow=https://x/y", "--follow-mqtt=http://me:secret@x"], "expected mqtt://[user:password@]host[:port]"),
        (["--follow=https://x/y", "--follow-mqtt=mqtt://x", "--follow-mqtt-ca=/x"], "needs a broker of mqtts://"),
    ],
)
def test_wrong_settings_end_the_start_with_the_reason(
    run_command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, flags: list[str], message: str
) -> None:
    found = run_command("serve", f"--model-repository={tmp_path}", "--http-port=0", "--grpc-port=0", *flags)
    assert found.returncode != 0
    assert message in found.stderr
    assert "secret" not in found.stderr


def test_a_box_whose_server_is_another_process_reports_what_it_installed(publication: Publication, broker: Any) -> None:
    publication.publish(1.0)
    address = f"--mqtt=mqtt://127.0.0.1:{broker.port}"
    follow = [
        str(COMMAND), "follow", (publication.folder / "site").as_uri(), address, "--model-repository=box",
        "--root=site/metadata/1.root.json", "--box-id=box-9", "--interval-secs=1",
    ]  # fmt: skip

    def fleet(*words: str) -> subprocess.CompletedProcess[str]:
        return publication.edge("fleet", *words, address, "all")

    with subprocess.Popen(follow, cwd=publication.folder, stderr=subprocess.DEVNULL) as follower:
        try:
            assert eventually(lambda: fleet("rollout", "status", "site").returncode == 0, PATIENCE_S)
            found = fleet("status")
            assert (found.returncode, "NO SERVER" in found.stdout) == (0, True), found.stdout
        finally:
            follower.terminate()
    assert "box-9: offline; its last report is of " in fleet("status").stdout
    once = subprocess.run([*follow, "--once"], cwd=publication.folder, capture_output=True, text=True, timeout=60)
    assert "expected without --once" in once.stderr


def test_a_rollout_is_led_by_the_reports_in_a_broker(publication: Publication, broker: Any) -> None:
    other = publication.folder / "other"
    other.mkdir()
    rollout = publication.folder / "models" / "rollout.toml"
    address = publication.folder / "broker"
    address.write_text(f"mqtt://127.0.0.1:{broker.port}\n")
    flags = [*publication.flags, f"--follow-mqtt=mqtt://127.0.0.1:{broker.port}"]
    publication.publish(1.0)

    def fleet(command: str, *more: str) -> subprocess.CompletedProcess[str]:
        return publication.edge("fleet", *command.split(), *more, "--mqtt=broker", "box-7", "box-8")

    def lead(action: str, *more: str) -> str:
        return fleet(f"rollout {action} site --keys=keys", *more).stdout

    broker.kill()
    with serve(publication.box, *flags) as first, serve(other, *flags, "--box-id=box-8") as second:
        servers = (first, second)
        assert eventually(lambda: [value(server) for server in servers] == [1.0, 1.0], PATIENCE_S)
        assert fleet("status").returncode == 2
        assert "Connection refused" in fleet("status").stderr
        broker.start()
        assert eventually(lambda: fleet("status").returncode == 0, PATIENCE_S)

        rollout.write_text('waves = ["box-7", "all"]')
        publication.publish(2.0)
        assert eventually(lambda: "m/2: wave 2 of 2, all" in lead("continue"), PATIENCE_S)
        assert value(first) == 2.0
        assert eventually(lambda: value(second) == 2.0, PATIENCE_S)
        # The report is that of the poll, which ends after the load.
        assert eventually(lambda: follow_report(second)["models"]["m"]["wave"] == "2 of 2", PATIENCE_S)

        publication.publish(3.0, 'raise RuntimeError("broken")')
        assert eventually(lambda: "m/3 failed on box-7: " in lead("status"), PATIENCE_S)
        assert "broken" in lead("status")
        assert "box-7: follow: m: release 'm/3.json': " in fleet("status").stdout
        assert "wave 2" not in lead("continue")
        assert "m/3: withdrawn" in lead("rollback", "--model=m")

        publication.publish(4.0)
        assert eventually(lambda: value(first) == 4.0, PATIENCE_S)
        # Whether its report has come yet decides nothing: a box that has the release keeps it.
        assert "m/4: stopped; boxes that have it keep it" in lead("stop", "--model=m")
        stopped_s = time.time()
        assert eventually(lambda: follow_report(first)["checked_s"] > stopped_s, PATIENCE_S)
        assert value(first) == 4.0

        first.process.kill()
        assert eventually(lambda: "box-7: offline; its last report is of " in fleet("status").stdout, PATIENCE_S)
        assert value(second) == 2.0  # Its polls since then did not bring what was stopped.
        assert "box-7: offline" in lead("continue")
        second.stop()
        assert "box-8: offline" in fleet("status").stdout
