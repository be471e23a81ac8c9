"""The Debian package: what is in it, and that it serves where there is neither pip nor a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]

IDENTITY = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1] }
"""


@pytest.fixture(scope="module")
def unpacked(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    subprocess.run(["dpkg", "-x", str(package), str(root)], check=True, timeout=60)
    return root


def field(package: Path, name: str) -> str:
    command = ["dpkg-deb", "--field", str(package), name]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def environment(**more: str) -> dict[str, str]:
    """Return what a bare box has, and which Python stands for its /usr/bin/python3."""
    base = getattr(sys, "_base_executable", sys.executable)
    return {"PATH": "/usr/bin:/bin", "EDGE_PYTHON": base, "PYTHONDONTWRITEBYTECODE": "1", **more}


def test_it_asks_for_nothing_but_the_python_that_it_was_built_for(package: Path) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    assert field(package, "Package") == "edge-server"
    assert field(package, "Depends") == f"python{version}, libc6 (>= 2.28)"
    assert f"py{version}" in package.name


def test_it_holds_the_unit_the_drop_ins_and_no_caches(unpacked: Path) -> None:
    unit = (unpacked / "lib/systemd/system/edge-server.service").read_text()
    assert unit == (ROOT / "systemd/edge-server.service").read_text()
    assert {"jetson.conf", "nvidia.conf", "cpu-only.conf"} <= set(os.listdir(unpacked / "usr/share/edge-server"))
    assert not list(unpacked.rglob("__pycache__"))
    assert os.readlink(unpacked / "usr/bin/edge-server") == "/opt/edge_server/bin/edge-server"


def test_it_checks_a_repository_without_a_network_and_without_this_environment(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "models/same/1").mkdir(parents=True)
    (tmp_path / "models/same/config.pbtxt").write_text(IDENTITY)
    program = str(unpacked / "opt/edge_server/bin/edge-server")
    command = [program, "check", str(tmp_path / "models")]
    if os.geteuid() == 0 and shutil.which("unshare"):
        # A network namespace of its own has not even a loopback that is up.
        command = ["unshare", "--net", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), cwd="/")
    assert done.returncode == 0, done.stderr
    assert "same" in done.stdout


def test_all_of_it_comes_from_the_package(unpacked: Path) -> None:
    """Also a helper process of the server's own finds the package's files."""
    code = "import json, edge_server, grpc, numpy; print(json.dumps([m.__file__ for m in (edge_server, grpc, numpy)]))"
    script = (unpacked / "opt/edge_server/bin/edge-server").read_text()
    probe = unpacked / "opt/edge_server/bin/probe"
    probe.write_text(script.replace('-m edge_server "$@"', "-c '" + code + "'"))
    done = subprocess.run(
        ["sh", str(probe)], capture_output=True, text=True, timeout=60, env=environment(), cwd="/", check=False
    )
    probe.unlink()
    assert done.returncode == 0, done.stderr
    library = (unpacked / "opt/edge_server/lib").resolve()
    assert all(Path(path).resolve().is_relative_to(library) for path in json.loads(done.stdout)), done.stdout


def test_a_dependency_that_is_not_installed_ends_the_build_with_its_name(machine: object, tmp_path: Path) -> None:
    source = tmp_path / "clone"
    shutil.copytree(ROOT / "systemd", source / "systemd")
    (source / "edge_server").mkdir()
    (source / "edge_server/__init__.py").write_text('__version__ = "0.1.0"\n')
    (source / "LICENSE").write_text("")
    (source / "pyproject.toml").write_text(
        '[project]\nname = "edge-server"\ndependencies = ["numpy", "no-such-thing>=1"]\n'
        "[project.optional-dependencies]\n"
    )
    done = subprocess.run(
        [str(source / "systemd/build_deb.sh"), "--from", sys.executable, "--extras", "", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "has no no-such-thing>=1" in done.stderr
    assert not list((tmp_path / "out").glob("*.deb"))
