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

BUNDLED = Path(edge_server.__file__).parents[1] / "model_repository"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the copy."""
    folder = tmp_path_factory.mktemp("core")
    package = Path(edge_server.__file__).parent
    shutil.copytree(package, folder / "edge_server", ignore=shutil.ignore_patterns("plugins", "__pycache__"))
    # An editable installation would find what is missing in the copy.
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if '__editable__' not in getattr(each, '__module__', '')]\n"
    )
    return folder


PROGRAM = """
import sys
# An editable installation would find the plugins in the folder that was copied.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
from edge_server.cli.main import main
sys.exit(main())
"""


def program(core: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=core, env={**os.environ, "PYTHONPATH": str(core)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@contextlib.contextmanager
def served(core: Path, models: Path) -> Iterator[tuple[str, str]]:
    ports = ("--http-port=0", "--grpc-port=0", "--allow-metrics=false")
    with program(core, "serve", f"--model-repository={models}", *ports) as process:
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


def test_it_serves_the_bundled_models_and_reloads(core: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(BUNDLED / "efficientnet_lite0", models / "efficientnet_lite0")
    with served(core, models) as (http, address):
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
    core: Path, arguments: tuple[str, ...], named: str, plugin: str
) -> None:
    (core / "frames.toml").write_text("[frames]\nmax_streams = 3\n")
    with program(core, *arguments) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 78
    assert f"{named} needs the plugin '{plugin}', which is not in this installation: pip install" in output


@pytest.mark.parametrize(
    ("arguments", "named", "plugin"),
    [
        (("--model-repository=s3://bucket/models",), "a model repository at s3://", "remote"),
        (("--model-repository=.", "--trace-config=mode=opentelemetry"), "trace mode opentelemetry", "tracing"),
    ],
)
def test_a_value_that_a_missing_plugin_serves_names_what_to_install(
    core: Path, arguments: tuple[str, ...], named: str, plugin: str
) -> None:
    with program(core, "serve", *arguments) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"{named} needs the plugin '{plugin}', which is not in this installation: pip install" in output


@pytest.mark.parametrize(
    ("file", "backend", "plugin"),
    [
        ("model.pt", "pytorch", "runtimes"),
        ("model.plan", "tensorrt", "tensorrt"),
        ("model.gguf", "openvino_genai", "language"),
    ],
)
def test_a_model_for_a_missing_backend_names_what_to_install(
    core: Path, tmp_path: Path, file: str, backend: str, plugin: str
) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    (tmp_path / "model" / "1" / file).touch()
    with program(core, "check", str(tmp_path)) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    expected = f"backend '{backend}' needs the plugin '{plugin}', which is not in this installation: pip install"
    assert expected in output


def test_it_serves_beside_a_python_model_and_says_in_the_index_what_to_install(core: Path, tmp_path: Path) -> None:
    shutil.copytree(BUNDLED / "efficientnet_lite0", tmp_path / "efficientnet_lite0")
    (tmp_path / "written" / "1").mkdir(parents=True)
    (tmp_path / "written" / "1" / "model.py").touch()
    with served(core, tmp_path) as (http, _):
        request = urllib.request.Request(f"http://{http}/v2/repository/index", b"")
        with urllib.request.urlopen(request, timeout=60) as reply:
            index = {model["name"]: model for model in json.load(reply)}
    assert index["efficientnet_lite0"]["state"] == "READY"
    expected = "backend 'python' needs the plugin 'python_models', which is not in this installation: pip install"
    assert expected in index["written"]["reason"]


def test_a_path_of_a_missing_plugin_names_what_to_install(core: Path, tmp_path: Path) -> None:
    with served(core, tmp_path) as (http, _):
        for path, plugin in PLUGIN_OF_PATH.items():
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://{http}{path}", timeout=60)
            line = f"{path} needs the plugin '{plugin}', which is not in this installation: pip install"
            assert (refused.value.code, line in json.load(refused.value)["error"]) == (404, True)


def test_frame_streams_are_unimplemented(core: Path, tmp_path: Path) -> None:
    with served(core, tmp_path) as (_, address), grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            next(channel.stream_stream("/edge.frames.v1.FrameService/Stream")(iter([b""])))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_its_commands_are_those_of_the_core(core: Path) -> None:
    with program(core, "--help") as process:
        output, _ = process.communicate(timeout=60)
    commands = re.findall(r"^  (\w+) ", output, re.MULTILINE)
    assert "serve" in commands
    assert {"governor", "stream"} & set(commands) == set()
