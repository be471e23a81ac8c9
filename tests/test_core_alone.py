"""The core serves without its plugins: a copy of the package without the folder `plugins`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc

import edge_server
from edge_server.own_plugins import PLUGIN_OF_PATH
from tests.forked_commands import ForkedCommands

BUNDLED = Path(edge_server.__file__).parents[1] / "model_repository"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the copy."""
    folder = tmp_path_factory.mktemp("core")
    package = Path(edge_server.__file__).parent
    # With compiled files, as their making takes long, but not with those that another process is writing.
    shutil.copytree(package, folder / "edge_server", ignore=shutil.ignore_patterns("plugins", "*.pyc.*"))
    # An editable installation would find what is missing in the copy.
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if '__editable__' not in getattr(each, '__module__', '')]\n"
    )
    return folder


PROLOGUE = """
import sys
# An editable installation would find the plugins in the folder that was copied.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
"""
PROGRAM = f"""{PROLOGUE}
from edge_server.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def run(core: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    with ForkedCommands(core, tmp_path_factory.mktemp("outputs"), PROLOGUE) as commands:
        yield commands


@contextlib.contextmanager
def serving(core: Path, models: Path) -> Iterator[tuple[str, str]]:
    ports = ("--http-port=0", "--grpc-port=0", "--allow-metrics=false")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", f"--model-repository={models}", *ports], cwd=core,
        env={**os.environ, "PYTHONPATH": str(core)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if found := re.search(r"is ready: HTTP http://(\S+?);? gRPC (\S+)", line):
                    yield found[1], found[2]
                    return
            raise AssertionError("".join(lines))
        finally:
            process.terminate()
            process.communicate(timeout=30)


@pytest.fixture(scope="module")
def served(core: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """HTTP and gRPC address of a server of a bundled model and a Python model, and their folder."""
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(BUNDLED / "efficientnet_lite0", models / "efficientnet_lite0")
    (models / "written" / "1").mkdir(parents=True)
    (models / "written" / "1" / "model.py").touch()
    with serving(core, models) as addresses:
        yield *addresses, models


def test_it_serves_the_bundled_models_and_reloads(served: tuple[str, str, Path]) -> None:
    http, address, models = served
    with urllib.request.urlopen(f"http://{http}/v2/models/efficientnet_lite0", timeout=60) as reply:
        assert json.load(reply)["outputs"][0]["name"] == "probabilities"
    request = urllib.request.Request(
        f"http://{http}/v2/models/efficientnet_lite0/infer", b"", {"Content-Type": "image/jpeg"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    line = "needs the plugin 'vision', which is not in this installation: pip install"
    with refused.value as answer:
        assert (answer.code, line in json.load(answer)["error"]) == (501, True)
    client = tritonclient.grpc.InferenceServerClient(address)
    metadata = client.get_model_metadata("efficientnet_lite0").inputs[0]
    tensor = tritonclient.grpc.InferInput(metadata.name, [1, *metadata.shape[1:]], metadata.datatype)
    tensor.set_data_from_numpy(np.zeros([1, *metadata.shape[1:]], np.float32))
    assert client.infer("efficientnet_lite0", [tensor]).as_numpy("probabilities").shape[0] == 1
    shutil.copytree(models / "efficientnet_lite0" / "1", models / "efficientnet_lite0" / "2")
    end_s = time.monotonic() + 60
    while not client.is_model_ready("efficientnet_lite0", "2"):
        assert time.monotonic() < end_s, "the new version does not serve"
        time.sleep(0.05)
    client.close()


@pytest.mark.parametrize(
    ("arguments", "named", "plugin"),
    [
        (("serve", "--power-budget-watts=10"), "--power-budget-watts", "governor"),
        (("check", "m", "--governor=false"), "--governor", "governor"),
        (("serve", "--engine-builder=false"), "--engine-builder", "tensorrt"),
        (("serve", "--sources-file=cameras.toml"), "--sources-file", "cameras"),
        (("serve", "--config=frames.toml"), "table [frames]", "cameras"),
    ],
)
def test_a_setting_of_a_missing_plugin_names_what_to_install(
    core: Path, run: ForkedCommands, arguments: tuple[str, ...], named: str, plugin: str
) -> None:
    (core / "frames.toml").write_text("[frames]\nmax_streams = 3\n")
    done = run(*arguments)
    assert done.returncode == 78
    assert f"{named} needs the plugin '{plugin}', which is not in this installation: pip install" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named", "plugin"),
    [
        (("--model-repository=s3://bucket/models",), "a model repository at s3://", "remote"),
        (("--model-repository=.", "--trace-config=mode=opentelemetry"), "trace mode opentelemetry", "tracing"),
    ],
)
def test_a_value_that_a_missing_plugin_serves_names_what_to_install(
    run: ForkedCommands, arguments: tuple[str, ...], named: str, plugin: str
) -> None:
    done = run("serve", *arguments)
    assert done.returncode == 2
    assert f"{named} needs the plugin '{plugin}', which is not in this installation: pip install" in done.stderr


@pytest.mark.parametrize(
    ("file", "backend", "plugin"),
    [
        ("model.pt", "pytorch", "runtimes"),
        ("model.plan", "tensorrt", "tensorrt"),
        ("model.gguf", "llama_cpp", "language"),
    ],
)
def test_a_model_for_a_missing_backend_names_what_to_install(
    run: ForkedCommands, tmp_path: Path, file: str, backend: str, plugin: str
) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    (tmp_path / "model" / "1" / file).touch()
    done = run("check", str(tmp_path))
    assert done.returncode == 1
    expected = f"backend '{backend}' needs the plugin '{plugin}', which is not in this installation: pip install"
    assert expected in done.stderr


def test_it_serves_beside_a_python_model_and_says_in_the_index_what_to_install(served: tuple[str, str, Path]) -> None:
    request = urllib.request.Request(f"http://{served[0]}/v2/repository/index", b"")
    with urllib.request.urlopen(request, timeout=60) as reply:
        index = json.load(reply)
    assert ("efficientnet_lite0", "READY") in {(model["name"], model["state"]) for model in index}
    (reason,) = (model["reason"] for model in index if model["name"] == "written")
    assert "backend 'python' needs the plugin 'python_models', which is not in this installation: pip install" in reason


def test_a_path_of_a_missing_plugin_names_what_to_install(served: tuple[str, str, Path]) -> None:
    for path, plugin in PLUGIN_OF_PATH.items():
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{served[0]}{path}", timeout=60)
        line = f"{path} needs the plugin '{plugin}', which is not in this installation: pip install"
        with refused.value as answer:
            assert (answer.code, line in json.load(answer)["error"]) == (404, True)


def test_frame_streams_are_unimplemented(served: tuple[str, str, Path]) -> None:
    with grpc.insecure_channel(served[1]) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            next(channel.stream_stream("/edge.frames.v1.FrameService/Stream")(iter([b""])))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_its_commands_are_those_of_the_core(run: ForkedCommands) -> None:
    commands = re.findall(r"^  (\w+) ", run("--help").stdout, re.MULTILINE)
    assert "serve" in commands
    assert {"governor", "stream"} & set(commands) == set()
