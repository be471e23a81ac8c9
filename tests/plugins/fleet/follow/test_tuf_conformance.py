"""TUF's own conformance suite against the client of a box, `signed_repository.py`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tuf")
pytestmark = pytest.mark.long

FAKETIME = """#!/bin/sh
moment=$(date -d "$1" '+@%Y-%m-%d %H:%M:%S') && shift
LD_PRELOAD=$EDGE_TEST_FAKETIME FAKETIME=$moment exec "$@"
"""
"""Debian's program of this name, over a library that is not installed."""


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.timeout(900)
def test_the_client_passes_the_conformance_suite_of_tuf(tmp_path: Path) -> None:
    for name, script in (
        ("EDGE_TEST_TUF_CONFORMANCE", "tests/plugins/fleet/follow/fetch_tuf_conformance.sh"),
        ("EDGE_TEST_FAKETIME", "tests/e2e/fetch_faketime.sh"),
    ):
        if name not in os.environ:
            pytest.skip(f"{script} brings it")
    client = Path(__file__).with_name("tuf_conformance_client.py")
    _write_program(tmp_path / "client", f'#!/bin/sh\nexec "{sys.executable}" "{client}" "$@"\n')
    shutil.copy(client.with_suffix(".xfails"), tmp_path / "client.xfails")
    (tmp_path / "bin").mkdir()
    _write_program(tmp_path / "bin" / "faketime", FAKETIME)
    python = os.environ["EDGE_TEST_TUF_CONFORMANCE"]
    (suite,) = Path(python).parents[1].glob("lib/python3.*/site-packages/tuf_conformance")
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-rfxX",
        "-p",
        "no:cacheprovider",
        suite,
        f"--entrypoint={tmp_path}/client",
    ]
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment.pop("PYTEST_ADDOPTS", None)
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    (passed,) = re.findall(r"([0-9]+) passed", found.stdout)
    assert int(passed) > 100
    print(found.stdout.splitlines()[-1])
