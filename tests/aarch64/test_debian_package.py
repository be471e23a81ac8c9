"""The Debian packages for arm64: installed by dpkg on an emulated machine, started as the service starts, removed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SOURCE = Path(__file__).parents[2]

MODEL = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1] }
"""


@pytest.fixture(scope="module")
def packages(machine: Any) -> Iterator[list[str]]:
    """The packages, installed. Debian's own packages are unpacked but not configured, hence --force-depends."""
    build = [
        str(SOURCE / "systemd/build_deb.sh"), "--python", "3.11", "--arch", "arm64", "--level", "1",
        "--wheels", str(machine.root / "wheels"), str(machine.project / "out"),
    ]  # fmt: skip
    done = subprocess.run(
        build,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PIP_PYTHON": sys.executable},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = [f"/project/out/{Path(line).name}" for line in done.stdout.splitlines()]
    print("\n" + machine.run("dpkg", "--install", "--force-depends", *names))
    yield names
    machine.run("dpkg", "--purge", "edge-server", "edge-server-runtimes", "edge-server-models")
    left = [
        path for path in ("opt/edge_server", "usr/bin/edge-server", "etc/edge_server") if (machine.root / path).exists()
    ]
    assert left == []


def test_it_serves_as_the_service_starts_it(machine: Any, packages: list[str]) -> None:
    unit = (machine.root / "lib/systemd/system/edge-server.service").read_text()
    command = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1])  # type: ignore[index]
    (settings,) = re.findall(r"^Environment=(EDGE_SERVER_CONFIG=.*)$", unit, re.MULTILINE)
    models = machine.root / "var/lib/edge_server/models"
    assert models.stat().st_mode & 0o7777 == 0o2775
    machine.run("install", "-d", "-o", "edge", "-g", "edge", "/var/lib/edge_server/state")
    (models / "same/1").mkdir(parents=True)
    (models / "same/config.pbtxt").write_text(MODEL)
    # As the unit's User= and Group=.
    user = ["chroot", "--userspec=edge:edge", "/", "/usr/bin/env", settings]
    with machine.serve(*user, *command) as server:
        body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1.5, -2]}]}
        url = f"http://{server.http}/v2/models/same/infer"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=120) as reply:
            answer = json.load(reply)
        assert answer["outputs"][0]["data"] == [1.5, -2]
        owner = Path(f"/proc/{server.process.pid}").stat().st_uid
        assert owner not in (0, os.getuid())
