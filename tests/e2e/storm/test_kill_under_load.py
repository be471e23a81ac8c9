"""kill -9 at random times under load: each restart serves complete models, and no file is left over."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import itertools
import os
import random
import signal
import subprocess
import tarfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.e2e.storm.storm import Load, Storm, agree, counting_model, generation_of
from tests.kit.eventually import eventually
from tests.kit.model_folder import model_folder
from tests.kit.server import COMMAND, serve
from tests.kit.site import Handler, Site

SEED = int(os.environ.get("EDGE_STORM_SEED", "1"))
PULLED = "pulled"
BROKEN = (OSError, http.client.HTTPException, ValueError)
"""Errors of a client whose server is killed; ValueError for truncated JSON."""

COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.counts = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.counts[request.correlation_id()] = 0
            self.counts[request.correlation_id()] += 1
            count = np.array([[self.counts[request.correlation_id()]]], np.int32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", count)]))
        return answers
"""
COUNTER_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_INT32 dims: [1] }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [1] }
sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 4 } }
parameters { key: "isolation" value { string_value: "process" } }
"""


class Archives(Handler):
    """Answers with archives of the model `pulled`, slowly."""

    content: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        content = self.content[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(OSError):
            for start in range(0, len(content), len(content) // 8 + 1):
                self.wfile.write(content[start : start + len(content) // 8 + 1])
                time.sleep(0.03)


def start_pull(site: Site, repository: Path, generation: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start to pull that generation of the model in place of the present one."""
    made = io.BytesIO()
    config = b'backend: "onnxruntime"\nmax_batch_size: 4'
    files = {"config.pbtxt": config, "1/model.onnx": counting_model(1, generation)}
    # What the model does not need, so that there is more to write.
    files |= {f"1/more/{number}": random.Random(number).randbytes(20_000) for number in range(40)}
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path = f"/{generation}.tar.gz"
    Archives.content[path] = made.getvalue()
    return subprocess.Popen(
        [COMMAND, "pull", site.url + path, f"--sha256={hashlib.sha256(made.getvalue()).hexdigest()}",
         f"--name={PULLED}", "--replace", f"--model-repository={repository}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip


class Sequences:
    """A client of sequences, which run in a process of their own; it checks its answers."""

    def __init__(self, server: Any) -> None:
        self.errors: list[BaseException] = []
        self.count = 0
        self.is_ending = threading.Event()
        """Set before the server is killed. What the client gets after that may be anything but a wrong answer."""
        self._server = server
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sequences:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_ending.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the client hangs"

    def _run(self) -> None:
        try:
            while not self.is_ending.is_set():
                for number in range(1, 6):
                    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [0]}
                    flags = {"sequence_id": 7, "sequence_start": number == 1, "sequence_end": number == 5}
                    status, answer = self._server.infer("sequences", {"inputs": [tensor], "parameters": flags})
                    if status != 200 and self.is_ending.is_set():
                        return
                    assert (status, answer["outputs"][0]["data"]) == (200, [number]), answer
                self.count += 1
        except BROKEN as error:
            if not self.is_ending.is_set():
                self.errors.append(error)
        except BaseException as error:  # noqa: BLE001 - the test's own thread raises it
            self.errors.append(error)


def processes_with(mark: str) -> dict[int, str]:
    """Return the processes whose environment holds a text: pid -> command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and (folder / "cmdline").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def named_memory(pids: Any) -> set[str]:
    """Return the files in /dev/shm that processes have open or mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().split()
            found |= {word for word in maps if word.startswith("/dev/shm/")}
            found |= {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    return {name for name in found if name.startswith("/dev/shm/") and not name.endswith("(deleted)")}


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(3, marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
        pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(6000)]),
    ],
)
def test_after_a_kill_under_full_load_a_restart_serves_complete_models_and_leaves_no_files(
    kills: int, writer: Any, free_ports: Any, tmp_path: Path
) -> None:
    print(f"EDGE_STORM_SEED={SEED} kills={kills}")
    temp = tmp_path / "tmp"
    temp.mkdir()
    environment = {"TMPDIR": str(temp)}
    flags = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)]
    flags += ["--repository-poll-secs=0.2", "--governor=false"]
    model_folder(writer.path / "sequences", COUNTER_CONFIG, {"1/model.py": COUNTER})
    writer.others |= {"sequences", PULLED}
    chance = random.Random(SEED)
    generations = itertools.count(1)
    totals = {"sequences": 0, "early": 0, "pulls": 0}

    def pull_whole(site: Site) -> set[int]:
        generation = next(generations)
        pull = start_pull(site, writer.path, generation, environment)
        assert (pull.communicate(timeout=60)[1], pull.returncode) == ("", 0)
        assert [path.name for path in writer.path.glob(".pull-*")] == []
        return {generation}

    storm = Storm(writer, SEED)
    with Site(Archives) as site:

        def storm_for(seconds: float) -> None:
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                storm.step()
                time.sleep(chance.uniform(0, 0.2))

        installed = pull_whole(site)
        for _ in range(kills):
            if chance.random() < 0.2:
                command = [COMMAND, "serve", f"--model-repository={writer.path}", *flags]
                silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                with subprocess.Popen(command, **silent, env={**os.environ, **environment}) as starting:
                    time.sleep(chance.uniform(0, 2))
                    starting.kill()
                totals["early"] += 1
                continue
            with serve(writer.path, *flags, environment=environment) as server:
                agree(server, writer)
                assert eventually(lambda server=server, whole=installed: generation_of(server, PULLED) in whole)
                generation = next(generations)
                with Load(server, SEED + generation) as load, Sequences(server) as sequences:
                    storm_for(chance.uniform(0, 2))
                    pull = start_pull(site, writer.path, generation, environment)
                    storm_for(chance.uniform(0.1, 2))
                    is_pull_killed = chance.random() < 0.7
                    if is_pull_killed:
                        pull.kill()
                    memory = named_memory(processes_with(str(temp)))
                    sequences.is_ending.set()
                    server.process.kill()
                    assert server.process.wait(30) == -signal.SIGKILL
                assert load.answers
                assert sequences.errors == []
                _, complaint = pull.communicate(timeout=60)
                assert is_pull_killed or pull.returncode == 0, complaint
                totals["pulls"] += pull.returncode != 0
                installed = {generation} if pull.returncode == 0 else installed | {generation}
            totals["sequences"] += sequences.count
            # Helper processes notice by themselves that the server is gone.
            assert eventually(lambda: not processes_with(str(temp))), processes_with(str(temp))
            assert [name for name in memory if os.path.exists(name)] == []
            # The world does not wait for the server to come back.
            for _ in range(3):
                storm.step()
            storm.settle_configurations()
            # Killed between the two renames, the model comes back with the next pull, whatever that one is for.
            if not (writer.path / PULLED).exists() or (is_pull_killed and chance.random() < 0.5):
                installed = pull_whole(site)
        installed = pull_whole(site)
        with serve(writer.path, *flags, environment=environment) as server:
            agree(server, writer)
            assert eventually(lambda: generation_of(server, PULLED) in installed)
            server.stop_cleanly()
    print(totals)
    assert os.listdir(temp) == []
    assert eventually(lambda: not processes_with(str(temp))), processes_with(str(temp))
    assert str(temp) not in Path("/proc/net/unix").read_text()
    assert kills < 50 or min(totals.values()) > 0, totals
