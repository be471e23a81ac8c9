"""Cameras that the installed server opens itself: seen in `status`, metrics and events, and changed by their file."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.models import picture_sum_config
from tests.kit.server import COMMAND, serve

EYES = picture_sum_config()
CAMERAS = """
[[sources]]
name = "door"
url = "demo"
model = "eyes"
fps = 20

[[sources]]
name = "gate"
url = "rtsp://me:geheim@127.0.0.1:1/geheim"
model = "eyes"

[[sinks]]
name = "log"
url = "{out}"
"""


def status(server: Any, *options: str) -> str:
    done = subprocess.run(
        [str(COMMAND), "status", f"--url=http://{server.http}", *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_cameras_are_opened_listed_changed_and_closed(repository: Any, tmp_path: Path) -> None:
    repository.add("eyes", EYES)
    file, out = tmp_path / "cameras.toml", tmp_path / "out.jsonl"
    file.write_text(CAMERAS.format(out=out))
    with serve(repository.path, f"--sources-file={file}") as server:
        assert eventually(lambda: out.exists() and out.read_text().count('"kind": "result"') > 20)
        report = json.loads(status(server, "--json"))
        cameras = report["cameras"]
        door, gate = cameras["sources"]
        assert (door["name"], door["state"], door["reason"]) == ("door", "RUNNING", "")
        assert (gate["name"], gate["state"], gate["url"]) == ("gate", "FAILED", "rtsp://127.0.0.1:1")
        assert gate["reason"]
        sink = cameras["sinks"][0]
        assert sink["received"] == sink["delivered"] + sink["suppressed"] + sink["dropped"] + sink["waiting"]
        stream = next(one for one in report["streams"] if one["stream_id"] == "door")
        assert stream["received"] == stream["answered"] + sum(stream["dropped"].values()) + stream["waiting"]
        text = status(server)
        assert "door" in text
        assert f"source gate: {gate['reason']}" in text
        metrics = server.read_metrics()
        assert 'edge_source_running{source="door",model="eyes"} 1' in metrics
        assert 'edge_source_running{source="gate",model="eyes"} 0' in metrics
        assert 'edge_sink_messages_total{sink="log",result="delivered"}' in metrics
        _, events = server.ask("/edge/v1/events?follow=false")
        kinds = [event["kind"] for event in events]
        assert {"source.running", "source.failed", "sink.running"} <= set(kinds)

        file.write_text(CAMERAS.format(out=out).replace("geheim", "geheim2").replace('"door"', '"yard"'))
        assert eventually(
            lambda: [one["name"] for one in server.ask("/edge/v1/cameras")[1]["sources"]] == ["gate", "yard"]
        )
        file.write_text("[[sources]]\nname = 'x'")
        assert eventually(lambda: "needs url and model" in server.ask("/edge/v1/cameras")[1]["problem"])
        seen = json.dumps(report) + text + metrics + json.dumps(events) + server.log() + out.read_text()
        assert server.stop() == 0
        assert "geheim" not in seen + server.log()
        assert [json.loads(line)["kind"] for line in out.read_text().splitlines()]


SLOW = EYES.replace('backend: "stub"', 'backend: "python"')
SLOW_CODE = """
import os
import shutil

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        # Ends when the test opens its end of the pipe.
        os.close(os.open(GATE, os.O_RDONLY))

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.ones((1, 1), np.float32))]) for _ in requests]
"""


@pytest.mark.full
def test_each_camera_waits_for_its_own_model_and_names_it(
    repository: Any, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    gate, out = tmp_path / "gate", tmp_path / "out.jsonl"
    os.mkfifo(gate)
    repository.add("eyes", EYES)
    (repository.add("late", SLOW) / "1/model.py").write_text(SLOW_CODE.replace("GATE", repr(str(gate))))
    (port,) = free_ports(1)
    command = [
        str(COMMAND), "serve", f"--model-repository={repository.path}", f"--http-port={port}", "--allow-grpc=false",
        "--allow-metrics=false", "--source=name=door,url=demo,model=eyes,fps=20",
        "--source=name=gate,url=demo,model=late,fps=20", f"--sink=name=log,url={out}",
    ]  # fmt: skip

    def results_of(name: str) -> int:
        lines = out.read_text().splitlines() if out.exists() else []
        return sum(f'"kind": "result", "stream": "{name}"' in line for line in lines)

    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            assert eventually(lambda: results_of("door") >= 5)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/edge/v1/cameras", timeout=30) as answer:
                door, slow = json.load(answer)["sources"]
            assert (door["state"], door["reason"]) == ("RUNNING", "")
            assert slow["state"] == "WAITING"
            assert slow["reason"].startswith("waiting for model 'late'")
            assert slow["failures"] == results_of("gate") == 0
            os.close(os.open(gate, os.O_WRONLY))
            assert eventually(lambda: results_of("gate") >= 5)
        finally:
            process.terminate()
            # A failed test leaves the gate closed: a second signal ends the server at once.
            with contextlib.suppress(OSError):
                os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        assert process.wait(30) == 0
