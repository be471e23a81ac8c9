"""Scripts with spaces in a path, or with a strict umask."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def program(path: Path, text: str = "exit 0") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "variable", "found"),
    [
        ("fleet/fetch_haproxy.sh", "EDGE_TEST_HAPROXY", "bin/haproxy"),
        ("plugins/ros/fetch_colcon.sh", "EDGE_TEST_COLCON", "bin/colcon"),
        ("serving/fetch_redis.sh", "EDGE_TEST_REDIS_SERVER", "usr/bin/redis-server"),
        ("systemd/fetch_systemd.sh", "EDGE_TEST_SYSTEMD_ANALYZE", "bin/systemd-analyze"),
    ],
)
def test_downloads_in_a_folder_with_spaces_are_found(tmp_path: Path, script: str, variable: str, found: str) -> None:
    folder = tmp_path / "a folder with blanks"
    program(folder / found)
    (folder / "complete").touch()
    code = f'eval "$("$1" "$2")" && printf %s "${variable}"'
    done = subprocess.run(
        ["sh", "-euc", code, "sh", str(ROOT / "tests" / script), str(folder)],
        capture_output=True, text=True, timeout=60, check=False, env={"PATH": f"{folder}/bin:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout == str(folder / found), done.stderr


def test_the_umask_of_the_build_does_not_affect_the_package(tmp_path: Path) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb: apt-get install dpkg")
    source = tmp_path / "clone"
    shutil.copytree(ROOT / "systemd", source / "systemd")
    shutil.copytree(ROOT / "edge_server/cli/completions", source / "edge_server/cli/completions")
    (source / "edge_server/version.py").write_text('__version__ = "0.1.0"\n')
    (source / "edge_server/version.py").chmod(0o600)
    (source / "LICENSE").write_text("")
    (source / "pyproject.toml").write_text(
        '[project]\nname = "edge-server"\ndependencies = []\n[project.optional-dependencies]\n'
    )
    done = subprocess.run(
        [str(source / "systemd/build_deb.sh"), "--from", sys.executable, "--extras", "", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, check=False, umask=0o077,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(
        ["dpkg-deb", "--contents", done.stdout.splitlines()[0]], capture_output=True, text=True, timeout=60, check=True
    )
    modes = {line.split(None, 5)[5]: line[:10] for line in listed.stdout.splitlines()}
    assert {mode for path, mode in modes.items() if path.endswith("/")} == {"drwxr-xr-x"}
    program = "./opt/edge_server/packages/program"
    assert modes[f"{program}/bin/edge-server"] == "-rwxr-xr-x"
    assert modes[f"{program}/lib/edge_server/version.py"] == "-rw-r--r--"
    assert modes["./etc/edge_server/config.toml"] == "-rw-r-----"
