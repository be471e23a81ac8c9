"""`edge-server pull oci://...` from Debian's docker-registry, with what oras, buildah and skopeo push."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.remote.pull.archives import CONFIG, Edge
from tests.plugins.remote.pull.registry import MANIFEST, basic

pytestmark = pytest.mark.full

REGISTRY, ORAS = os.environ.get("EDGE_TEST_REGISTRY"), os.environ.get("EDGE_TEST_ORAS")
if not REGISTRY or not ORAS:
    pytest.skip("tests/plugins/remote/pull/fetch_registry.sh brings a registry and oras", allow_module_level=True)

PUSH = """
import json, sys
import oras.client
target, files, config, user, password = json.loads(sys.argv[1])
client = oras.client.OrasClient(insecure=True, auth_backend="basic")
client.auth.set_basic_auth(user, password)
answer = client.push(target=target, files=files, manifest_config=config, disable_path_validation=True)
print(answer.headers["Docker-Content-Digest"])
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a registry that wants the password of the user `me`."""
    folder = tmp_path_factory.mktemp("registry")
    # bcrypt of "secret", as `htpasswd -B` writes it.
    (folder / "passwords").write_text("me:$2a$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW\n")
    settings = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}},
        "http": {"addr": "127.0.0.1:0"},
        "auth": {"htpasswd": {"realm": "models", "path": str(folder / "passwords")}},
    }
    (folder / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = [f"{REGISTRY}/docker-registry", "serve", str(folder / "config.yml")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = ""
        while not (found := re.search(r"listening on (127\.0\.0\.1:[1-9][0-9]*)", log)):
            line = process.stderr.readline()
            assert line, log
            log += line
        yield found[1]
        process.terminate()
        process.communicate()


@pytest.fixture
def pull(
    run_command: Edge, tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, bytes]]:
    """A function that pulls REPOSITORY@DIGEST after a log-in, and returns the files of the model."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {host: {"auth": basic("me", "secret")}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "models").mkdir()

    def run(reference: str) -> dict[str, bytes]:
        done = run_command("pull", f"oci://http://{host}/{reference}", f"--model-repository={tmp_path / 'models'}")
        assert (done.returncode, done.stderr) == (0, "")
        model = tmp_path / "models" / reference.partition("@")[0].rpartition("/")[2]
        return {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}

    return run


def push(host: str, repository: str, files: list[str], folder: Path, config: str | None = None) -> str:
    """Push by oras from a folder, and return the digest."""
    given = json.dumps([f"{host}/{repository}", files, config, "me", "secret"])
    done = subprocess.run([str(ORAS), "-c", PUSH, given], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_files_and_folders_pushed_by_oras(host: str, pull: Any, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    weights = os.urandom(3 << 20)
    (tmp_path / "1/weights").write_bytes(weights)
    (tmp_path / "config.pbtxt").write_bytes(CONFIG)
    digest = push(host, "team/echo:v1", ["config.pbtxt", "1"], tmp_path)
    assert pull(f"team/echo@{digest}") == {"config.pbtxt": CONFIG, "1/weights": weights}


def test_a_model_in_the_format_of_docker(host: str, pull: Any, tmp_path: Path) -> None:
    gguf = b"GGUF" + os.urandom(100_000)
    (tmp_path / "smol.gguf").write_bytes(gguf)
    (tmp_path / "config.json").write_text('{"config": {"format": "gguf"}}')
    digest = push(
        host, "ai/smol:latest", ["smol.gguf:application/vnd.docker.ai.gguf.v3"], tmp_path,
        "config.json:application/vnd.docker.ai.model.config.v0.1+json",
    )  # fmt: skip
    assert pull(f"ai/smol@{digest}") == {"1/model.gguf": gguf}


@pytest.mark.skipif(shutil.which("buildah") is None, reason="needs buildah")
def test_a_modelcar_built_by_buildah_and_copied_by_skopeo(host: str, pull: Any, tmp_path: Path) -> None:
    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def buildah(*arguments: str) -> str:
        return run(
            "buildah", f"--root={tmp_path / 'root'}", f"--runroot={tmp_path / 'run'}", "--storage-driver=vfs",
            *arguments,
        )  # fmt: skip

    (tmp_path / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    (tmp_path / "model/1").mkdir(parents=True)
    (tmp_path / "model/1/model.onnx").write_bytes(b"onnx")
    container = buildah("from", "scratch")
    buildah("copy", container, "/bin/sh", "/bin/sh")
    buildah("commit", "--disable-compression", container, "base")
    container = buildah("from", "base")
    buildah("copy", container, str(tmp_path / "model"), "/models")
    buildah("commit", container, f"oci:{tmp_path / 'layout'}:v1")
    run(
        f"{REGISTRY}/skopeo", f"--policy={tmp_path / 'policy.json'}", "copy", "--dest-tls-verify=false",
        "--dest-creds=me:secret", f"oci:{tmp_path / 'layout'}:v1", f"docker://{host}/team/car:v1",
    )  # fmt: skip
    headers = {"Accept": MANIFEST, "Authorization": f"Basic {basic('me', 'secret')}"}
    request = urllib.request.Request(f"http://{host}/v2/team/car/manifests/v1", headers=headers)
    with urllib.request.urlopen(request) as response:
        manifest = response.read()
    assert len(json.loads(manifest)["layers"]) == 2
    assert pull(f"team/car@sha256:{hashlib.sha256(manifest).hexdigest()}") == {"1/model.onnx": b"onnx"}
