"""`edge-server pull oci://...` from a registry in this process: formats, log-ins, interruptions, hostile answers."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.repository.disk.free_space import RESERVE_BYTES
from tests.plugins.remote.pull.archives import CONFIG, MODEL, Edge, tar
from tests.plugins.remote.pull.registry import INDEX, MANIFEST, TITLE, Registry, basic, digest_of, run_registry

TAR = "application/vnd.oci.image.layer.v1.tar"
EMPTY = "application/vnd.oci.empty.v1+json"
UNKNOWN = "application/vnd.unknown.config.v1+json"
IMAGE = "application/vnd.oci.image.config.v1+json"
DOCKER = "application/vnd.docker.ai"
PACK = "application/vnd.cncf.model"


@pytest.fixture
def secure_registry(certificate: Path, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with run_registry(tls) as made:
        yield made


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def by_digest(registry: Registry, digest: str, repository: str = "team/echo") -> str:
    return f"oci://http://{registry.host}/{repository}@{digest}"


# -- formats ----------------------------------------------------------------------------------------------------------


def artifacts(registry: Registry) -> dict[str, tuple[list[dict[str, Any]], str, dict[str, bytes]]]:
    """Return a name -> layers, type of the configuration, and the files of the model that is expected."""
    file, blob = registry.add_file, registry.add_blob
    gguf = b"GGUF" + bytes(100)
    path = "org.cncf.model.filepath"
    return {
        "files of oras with folders": (
            [file("config.pbtxt", CONFIG), file("1/weights", b"w" * 5000)], UNKNOWN, MODEL,
        ),
        "a file of oras, of the type that it gives to any": (
            [file("detector v3.onnx", b"onnx", TAR), file("labels.txt", b"cat\n")], EMPTY,
            {"1/model.onnx": b"onnx", "labels.txt": b"cat\n"},
        ),
        "a folder of oras": (
            [blob(tar({"echo": None, **{f"echo/{name}": content for name, content in MODEL.items()}}, "w:gz"),
                  f"{TAR}+gzip", **{TITLE: "echo", "io.deis.oras.content.unpack": "true"})],
            EMPTY, MODEL,
        ),
        "a folder of oras-py": (
            [file("echo", tar({f"echo/{name}": content for name, content in MODEL.items()}, "w:gz"), f"{TAR}+gzip")],
            UNKNOWN, MODEL,
        ),
        "an archive": (
            [file("echo.tar.gz", tar(MODEL, "w:gz"), TAR)], EMPTY, MODEL,
        ),
        "one file twice": (
            [file("1/a", b"same"), file("1/b", b"same"), file("config.pbtxt", CONFIG)], EMPTY,
            {"config.pbtxt": CONFIG, "1/a": b"same", "1/b": b"same"},
        ),
        "a model of docker": (
            [blob(gguf, f"{DOCKER}.gguf.v3"), blob(b"MIT", f"{DOCKER}.license"), blob(b"p", f"{DOCKER}.mmproj"),
             blob(b"{{ x }}", f"{DOCKER}.chat.template.jinja")],
            f"{DOCKER}.model.config.v0.1+json",
            {"1/model.gguf": gguf, "1/LICENSE": b"MIT", "1/mmproj.gguf": b"p", "1/chat_template.jinja": b"{{ x }}"},
        ),
        "a model of docker in parts": (
            [blob(gguf, f"{DOCKER}.gguf.v3"), blob(gguf + b"2", f"{DOCKER}.gguf.v3")],
            f"{DOCKER}.model.config.v0.1+json",
            {"1/model-00001-of-00002.gguf": gguf, "1/model-00002-of-00002.gguf": gguf + b"2",
             "config.pbtxt": b'default_model_filename: "model-00001-of-00002.gguf"\n'},
        ),
        "a model of docker 0.2": (
            [blob(gguf, f"{DOCKER}.gguf.v3", **{path: "SmolLM2.Q4_1.gguf"}),
             blob(tar({"adapters/a.gguf": b"a"}), f"{DOCKER}.dir.tar", **{path: "adapters"})],
            f"{DOCKER}.model.config.v0.2+json", {"1/model.gguf": gguf, "1/adapters/a.gguf": b"a"},
        ),
        "a model pack": (
            [blob(gguf, f"{PACK}.weight.v1.raw", **{path: "smol.gguf"}),
             blob(tar({"README.md": b"r"}), f"{PACK}.doc.v1.tar", **{path: "README.md"}),
             blob(tar({"generation_config.json": b"{}"}, "w:gz"), f"{PACK}.weight.config.v1.tar+gzip",
                  **{path: "generation_config.json"})],
            f"{PACK}.config.v1+json", {"1/model.gguf": gguf, "1/README.md": b"r", "1/generation_config.json": b"{}"},
        ),
        "a modelcar over a base image with links": (
            [blob(tar({"bin/sh": b"#", "etc/passwd": b"root", "models2/no": b""}, "w:gz", {"bin/ls": "/bin/busybox"}),
                  "application/vnd.docker.image.rootfs.diff.tar.gzip"),
             blob(tar({"./models": None, "./models/1/old.onnx": b"old", "./models/1/model.onnx": b"first"}), TAR),
             blob(tar({"models/1/.wh.old.onnx": b"", "models/1/model.onnx": b"second"}, "w:gz"), f"{TAR}+gzip")],
            IMAGE, {"1/model.onnx": b"second"},
        ),
        "a modelcar with a folder that a layer replaces": (
            [blob(tar({"models/1/model.onnx": b"first", "models/1/weights/a": b"", "models/old": b""}), TAR),
             blob(tar({".wh.models": b""}), TAR),
             blob(tar({"models/echo/1/.wh..wh..opq": b"", "models/echo/1/weights": b"w"}), TAR)],
            IMAGE, {"1/weights": b"w"},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(artifacts(Registry())))
def test_each_format_becomes_a_model_folder(name: str, registry: Registry, pull: Edge, models: Path) -> None:
    layers, config, expected = artifacts(registry)[name]
    done = pull(by_digest(registry, registry.push("v1", *layers, config=config)))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{models / 'echo'}: version 1\n"
    assert files_below(models / "echo") == expected
    assert os.listdir(models) == ["echo"]


def test_a_tag_is_pulled_over_https_and_its_digest_is_printed(
    secure_registry: Registry, pull: Edge, models: Path
) -> None:
    digest = secure_registry.push("v3", secure_registry.add_file("m.onnx", b"onnx"))
    done = pull(f"oci://{secure_registry.host}/team/detector:v3")
    assert done.returncode == 0
    assert done.stderr == f"edge-server pull: oci://{secure_registry.host}/team/detector:v3 is @{digest}\n"
    assert (models / "detector/1/model.onnx").read_bytes() == b"onnx"
    assert pull(f"oci://{secure_registry.host}/team/detector:v3@{digest}", "--name=again").stderr == ""
    done = pull(f"oci://{secure_registry.host}/team/detector:v3", f"--sha256={'0' * 64}", "--name=other")
    assert done.returncode == 1
    assert "the server answers 404" in done.stderr


def test_an_index_has_the_manifest_for_this_machine(
    registry: Registry, pull: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = []
    for system, name in (("windows", "amd64"), ("unknown", "unknown"), ("linux", "amd64"), ("linux", "arm64")):
        manifest = registry.manifests[registry.push(name, registry.add_file("m.onnx", name.encode()))]
        entry = registry.add_blob(manifest, MANIFEST)
        entries.append({**entry, "platform": {"os": system, "architecture": name}})
    digest = registry.push_document("v1", {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})
    for machine, name in (("x86_64", "amd64"), ("aarch64", "arm64")):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert pull(by_digest(registry, digest), f"--name={name}").returncode == 0
        assert (models / name / "1/model.onnx").read_bytes() == name.encode()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    done = pull(by_digest(registry, digest))
    assert done.returncode == 1
    assert "has no manifest for linux/riscv64: it has windows/amd64, unknown/unknown, linux/amd64" in done.stderr


def test_the_list_of_models_may_name_artifacts(registry: Registry, pull: Edge, models: Path) -> None:
    digest = registry.push("v1", registry.add_file("m.onnx", b"onnx"))
    entry = {"name": "listed", "url": by_digest(registry, digest), "sha256": digest.removeprefix("sha256:")}
    registry.answers["/models.json"] = json.dumps({"models": [entry]}).encode()
    index = f"--index=http://{registry.host}/models.json"
    assert pull("listed", index, f"--sha256={entry['sha256']}").returncode == 0
    assert (models / "listed/1/model.onnx").read_bytes() == b"onnx"


# -- interruptions ----------------------------------------------------------------------------------------------------


def test_a_broken_layer_is_resumed_and_complete_ones_are_not_loaded_again(
    registry: Registry, pull: Edge, models: Path
) -> None:
    first, second = os.urandom(1000), os.urandom(300_000)
    digest = registry.push("v1", registry.add_file("config.pbtxt", CONFIG), registry.add_file("1/a", first),
                           registry.add_file("1/b", second))  # fmt: skip
    registry.cut_after = 100_000
    done = pull(by_digest(registry, digest))
    assert done.returncode == 1
    assert "after 100000 of 300000 bytes; run the same command again to resume" in done.stderr
    assert os.listdir(models) == [".pull-echo"]
    registry.requests.clear()
    registry.cut_after = None
    assert pull(by_digest(registry, digest)).returncode == 0
    asked = [(path, headers.get("Range")) for _, path, headers in registry.requests if "/blobs/" in path]
    assert asked == [(f"/v2/team/echo/blobs/{digest_of(second)}", "bytes=100000-")]
    assert files_below(models / "echo") == {"config.pbtxt": CONFIG, "1/a": first, "1/b": second}


def test_parts_of_another_artifact_are_removed(registry: Registry, pull: Edge, models: Path) -> None:
    digest = registry.push("v1", registry.add_file("m.onnx", os.urandom(300_000)))
    registry.cut_after = 1000
    assert pull(by_digest(registry, digest)).returncode == 1
    (kept,) = (models / ".pull-echo/downloads").iterdir()
    registry.cut_after = 2000
    other = registry.push("v2", registry.add_file("m.onnx", os.urandom(300_000)))
    assert pull(by_digest(registry, other)).returncode == 1
    assert kept.name not in os.listdir(models / ".pull-echo/downloads")


@pytest.mark.full
def test_an_artifact_that_is_resumed_needs_room_for_its_rest_alone(registry: Registry, pull: Edge, disk: Path) -> None:
    digest = registry.push("v1", registry.add_file("m.onnx", os.urandom(10 << 20)))
    registry.cut_after = 9 << 20
    arguments = (by_digest(registry, digest), f"--model-repository={disk}")
    assert pull(*arguments).returncode == 1
    assert shutil.disk_usage(disk).free < RESERVE_BYTES + (10 << 20)
    registry.cut_after = None
    assert pull(*arguments).returncode == 0


# -- log-in -----------------------------------------------------------------------------------------------------------

BEARER = 'Bearer realm="{url}/token",service="models",scope="repository:team/echo:pull,push"'


def write_docker_config(tmp_path: Path, **members: Any) -> None:
    (tmp_path / "docker").mkdir(exist_ok=True)
    (tmp_path / "docker/config.json").write_text(json.dumps(members))


def test_a_token_to_read_is_requested_with_the_password_of_docker_login(
    registry: Registry, pull: Edge, models: Path, tmp_path: Path
) -> None:
    digest = registry.push("v1", registry.add_file("m.onnx", b"onnx"))
    registry.challenge, registry.passwords = BEARER, {f"Basic {basic('me', 'secret')}"}
    done = pull(by_digest(registry, digest))
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert "the server answers 401 Unauthorized; `docker login" in done.stderr
    write_docker_config(tmp_path, auths={f"https://{registry.host}/v1/": {"auth": basic("me", "secret")}})
    assert pull(by_digest(registry, digest)).returncode == 0
    # Not what the registry proposes: a right to write is not needed.
    asked = [path for _, path, _ in registry.requests if path.startswith("/token")]
    assert asked[-1] == "/token?service=models&scope=repository%3Ateam%2Fecho%3Apull"
    assert registry.keys("/token")[-1] == f"Basic {basic('me', 'secret')}"
    assert registry.keys("/blobs/") == ["Bearer t-repository:team/echo:pull"]


def test_a_token_that_expires_during_the_pull_is_renewed(registry: Registry, pull: Edge) -> None:
    digest = registry.push("v1", *(registry.add_file(f"1/{name}", name.encode()) for name in ("a", "b", "model.onnx")))
    registry.challenge = BEARER

    class OneUse(set[str]):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.discard(str(key))
            return found

    registry.tokens = OneUse()
    assert pull(by_digest(registry, digest)).returncode == 0
    assert len(registry.keys("/token")) == 4


def test_basic_is_answered_with_a_password_of_the_file_or_of_a_helper(
    registry: Registry, pull: Edge, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = registry.push("v1", registry.add_file("m.onnx", b"onnx"))
    registry.challenge, registry.tokens = 'Basic realm="models"', {f"Basic {basic('me', 'secret')}"}
    done = pull(by_digest(registry, digest))
    assert done.returncode == 1
    assert f"the registry wants a password: `docker login {registry.host}` makes the file with it" in done.stderr
    write_docker_config(tmp_path, auths={registry.host: {"auth": basic("me", "secret")}})
    assert pull(by_digest(registry, digest), "--name=one").returncode == 0
    helper = tmp_path / "docker-credential-shelf"
    answer = json.dumps({"ServerURL": registry.host, "Username": "me", "Secret": "secret"})
    helper.write_text(f"#!/bin/sh\n[ \"$1 $(cat)\" = 'get {registry.host}' ] && echo '{answer}'\n")
    helper.chmod(helper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    write_docker_config(tmp_path, credHelpers={registry.host: "shelf"})
    assert pull(by_digest(registry, digest), "--name=two").returncode == 0
    for members, message in (
        ({"credsStore": "../evil"}, "is no name of a program for passwords"),
        ({"credsStore": "absent"}, "'docker-credential-absent', which has the passwords, fails"),
        ({"auths": {registry.host: {"auth": "???"}}}, "expected the base64 text of USER:PASSWORD"),
    ):
        write_docker_config(tmp_path, **members)
        done = pull(by_digest(registry, digest), "--name=three")
        assert done.returncode == 1
        assert message in done.stderr
    (tmp_path / "docker/config.json").write_text("{")
    assert "the file of passwords, cannot be read" in pull(by_digest(registry, digest), "--name=three").stderr
    assert sorted(os.listdir(models)) == ["one", "two"]


def test_a_header_of_the_command_line_is_the_log_in(registry: Registry, pull: Edge) -> None:
    digest = registry.push("v1", registry.add_file("m.onnx", b"onnx"))
    registry.challenge, registry.tokens = BEARER, {"Bearer mine"}
    assert pull(by_digest(registry, digest), "--header=Authorization=Bearer mine").returncode == 0
    done = pull(by_digest(registry, digest), "--header=Authorization=Bearer old", "--name=other")
    assert done.returncode == 1
    assert "the server answers 401" in done.stderr
    assert registry.keys("/token") == []


def test_a_token_is_not_sent_to_where_a_blob_is_redirected(registry: Registry, pull: Edge, models: Path) -> None:
    digest = registry.push("v1", registry.add_file("m.onnx", b"onnx"))
    registry.challenge = BEARER
    with run_registry() as store:
        store.blobs = registry.blobs
        path = f"/v2/team/echo/blobs/{digest_of(b'onnx')}"
        registry.redirects[path] = f"http://{store.host}{path}?signature=secret"
        done = pull(by_digest(registry, digest))
    assert done.returncode == 0
    assert registry.keys("/blobs/")[-1] == "Bearer t-repository:team/echo:pull"
    assert store.keys("/blobs/") == [None]
    assert done.stderr == f"edge-server pull: http://{registry.host} redirects to http://{store.host}\n"


def test_a_registry_that_refuses_its_own_tokens_is_asked_once_more(registry: Registry, pull: Edge) -> None:
    digest = registry.push("v1", registry.add_file("m.onnx", b"onnx"))
    registry.challenge = BEARER

    class Refusing(set[str]):
        def __contains__(self, key: object) -> bool:
            return False

    registry.tokens = Refusing()
    done = pull(by_digest(registry, digest))
    assert done.returncode == 1
    assert "the registry answers 401 to the log-in" in done.stderr
    assert len(registry.requests) == 3


@pytest.mark.parametrize(
    ("challenge", "token", "message"),
    [
        ('Bearer realm="http://127.0.0.1:9/token"', b"", "the log-in is at 'http://127.0.0.1:9/token': expected https"),
        ('Bearer realm="file:///etc/passwd"', b"", "expected https"),
        ("Bearer", b"", "the log-in is at '': expected https"),
        ("Negotiate", b"", "expected a log-in of kind Bearer or Basic, given Negotiate"),
        (BEARER.replace("/token", "/other"), b"{}", "gives no token"),
        (BEARER.replace("/token", "/other"), b'{"token": "a\\r\\nX: y"}', "gives no token"),
        (BEARER.replace("/token", "/other"), b"[" * 100_000, "gives no token"),
        (BEARER.replace("/token", "/other"), b" " * (1 << 20) + b"{}", "is too large: expected at most 1048576 bytes"),
    ],
)
def test_a_log_in_that_is_unsafe_or_useless_is_refused(
    challenge: str, token: bytes, message: str, secure_registry: Registry, pull: Edge, tmp_path: Path, models: Path
) -> None:
    write_docker_config(tmp_path, auths={secure_registry.host: {"auth": basic("me", "secret")}})
    secure_registry.challenge = challenge
    secure_registry.answers["/other"] = token
    secure_registry.tokens = {f"Basic {basic('me', 'secret')}"}
    done = pull(f"oci://{secure_registry.host}/team/echo:v1")
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert message in done.stderr


# -- hostile registries -----------------------------------------------------------------------------------------------


Push = Callable[[Registry, dict[str, Any]], str]
"""Pushes what a hostile registry has, given one that has the layer of a file, and returns its digest."""


def another_blob(content: bytes) -> Push:
    def push(registry: Registry, layer: dict[str, Any]) -> str:
        registry.blobs[digest_of(b"onnx")] = content
        return registry.push("v", layer)

    return push


def endless_blob(registry: Registry, layer: dict[str, Any]) -> str:
    registry.is_endless = True
    return registry.push("v", layer)


def another_manifest(registry: Registry, layer: dict[str, Any]) -> str:
    digest = registry.push("v", layer)
    registry.manifests[digest] = registry.manifests[registry.push("w", registry.add_file("m.onnx", b"evil"))]
    return digest


def deep_lists(registry: Registry, _: dict[str, Any]) -> str:
    registry.manifests["v"] = b"[" * 100_000
    registry.answers[f"/v2/team/echo/manifests/{digest_of(b'[' * 100_000)}"] = b"[" * 100_000
    return digest_of(b"[" * 100_000)


def index_of(inner: bytes) -> Push:
    """No document has its own hash in it: a registry whose index names `itself` must answer with another one."""

    def push(registry: Registry, _: dict[str, Any]) -> str:
        document: dict[str, Any] = {"schemaVersion": 2, "mediaType": INDEX, "manifests": []}
        content = inner or registry.manifests[registry.push_document("w", document)]
        document["manifests"].append(registry.add_blob(content, MANIFEST))
        outer = registry.push_document("v", document)
        registry.manifests.setdefault(digest_of(content), registry.manifests[outer])
        return outer

    return push


def with_fields(**fields: Any) -> Push:
    return lambda registry, layer: registry.push("v", {**layer, **fields})


def with_files(*files: tuple[str, bytes]) -> Push:
    return lambda registry, _: registry.push("v", *(registry.add_file(*file) for file in files))


def with_layers(*blobs: tuple[bytes, str], **options: str) -> Push:
    return lambda registry, _: registry.push("v", *(registry.add_blob(*blob) for blob in blobs), **options)


def with_bombs(*files: dict[str, bytes], **options: str) -> Push:
    return with_layers(*((tar(dict(each), "w:gz"), f"{TAR}+gzip") for each in files), **options)


BOMB = "more than 1000000 bytes: expected at most --max-bytes=1000000"
NO_LAYER = "layers[0]: expected mediaType, a digest sha256:HEX and a size"
HOSTILE: dict[str, tuple[Push, str]] = {
    "another blob": (another_blob(b"evil"), "has another SHA-256"),
    "a longer blob": (another_blob(b"onnx and more"), "has another size: expected 4 bytes, given 13"),
    "an endless blob": (endless_blob, "has another size: expected 4 bytes, given more"),
    "another manifest": (another_manifest, "a manifest has another SHA-256"),
    "a huge manifest": (
        lambda registry, layer: registry.push("v", layer, padding=" " * (4 << 20)),
        "is too large: expected at most 4194304 bytes",
    ),
    "a manifest of deep lists": (deep_lists, "the manifest is not JSON"),
    "many layers": (
        lambda registry, layer: registry.push("v", *[layer] * 1001),
        "expected a manifest with at most 1000 layers, given 1001",
    ),
    "no layers": (with_layers(), "has no files"),
    "a manifest that is an index too": (
        lambda registry, layer: registry.push("v", layer, manifests=[layer]),
        "expected the manifest of an artifact or an image, or an index",
    ),
    "another document": (
        lambda registry, layer: registry.push("v", layer, mediaType="application/vnd.example+json"),
        "given 'application/vnd.example+json'",
    ),
    "an index of indexes": (index_of(b""), "is an index of indexes"),
    "an index that names itself": (index_of(b"itself"), "a manifest has another SHA-256"),
    "a size that is none": (with_fields(size=-1), NO_LAYER),
    "a digest that leads out": (with_fields(digest="sha256:../../../etc/passwd"), NO_LAYER),
    "another hash function": (with_fields(digest="sha512:" + "0" * 128), NO_LAYER),
    "annotations of numbers": (with_fields(annotations={TITLE: 1}), "layers[0]: annotations: expected texts"),
    "a layer larger than the disk": (with_fields(size=1 << 52), "does not fit on the disk"),
    "a name that leads out": (with_files(("../../evil", b"onnx")), "expected a relative path"),
    "an absolute name": (with_files(("/tmp/evil", b"onnx")), "expected a relative path"),
    "a name twice": (with_files(("m.onnx", b"onnx"), ("m.onnx", b"other")), "'m.onnx' is in it twice"),
    "a name in capitals": (
        with_files(("m.onnx", b"onnx"), ("M.onnx", b"other")), "'m.onnx' is in it twice: expected names",
    ),
    "a long name": (with_files(("m" * 256, b"onnx")), "expected names of at most 255 bytes"),
    "a file as a folder": (with_files(("a", b"x"), ("a/b", b"other")), "'b' is in it twice"),
    "deep names": (
        with_files(*((f"{n}/" + "d/" * 400 + "f", b"x") for n in range(3))),
        "too many files: expected at most 1000 files",
    ),
    "a layer without a name": (
        with_layers((b"onnx", "application/octet-stream")), "layer 0 ('application/octet-stream') has no name",
    ),
    "a layer of zstd": (with_layers((b"onnx", f"{TAR}+zstd")), "expected gzip, or no compression"),
    "a bomb": (with_bombs({"1/zeros": bytes(3 << 20)}), BOMB),
    "a bomb beside the model of an image": (with_bombs({"zeros": bytes(3 << 20)}, config=IMAGE), BOMB),
    "a bomb in two layers": (
        with_bombs(*({f"models/1/{name}": bytes(600_000)} for name in "ab"), config=IMAGE), BOMB,
    ),
    "a link in the model of an image": (
        with_layers((tar({}, links={"models/1": "/etc"}), TAR), config=IMAGE), "'models/1' is a link or a device",
    ),
    "a link as the model of an image": (
        with_layers((tar({}, links={"models": "/etc"}), TAR), config=IMAGE), "'models' is a link or a device",
    ),
    "a path out of an image": (
        with_layers((tar({"models/../../evil": b"x"}), TAR), config=IMAGE), "expected a relative path",
    ),
    "a whiteout of the folder above": (
        with_layers((tar({"models/.wh...": b""}), TAR), config=IMAGE), "the image removes '..'",
    ),
    "an image without a model": (with_layers((tar({"bin/sh": b""}), TAR), config=IMAGE), "has no files in /models"),
    "an artifact without a model": (
        with_files(("model.safetensors", b"x"), ("config.json", b"{}")),
        "has no model: expected a version, such as 1/model.onnx",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("push", "message"), HOSTILE.values(), ids=HOSTILE)
def test_what_a_hostile_registry_sends_is_refused_and_leaves_nothing(
    push: Push, message: str, registry: Registry, pull: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In place of 10,000, which take seconds.
    monkeypatch.setattr("edge_server.plugins.remote.pull.archive.MAX_FILES", 1000)
    digest = push(registry, registry.add_file("m.onnx", b"onnx"))
    done = pull(by_digest(registry, digest), "--max-bytes=1000000")
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir(models.parent) == ["models"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("oci://ai/smollm2",), "expected oci://HOST[:PORT]/REPOSITORY"),
        (("oci://host.example",), "expected oci://HOST[:PORT]/REPOSITORY"),
        (("oci://host.example/Team/Echo",), "expected oci://HOST[:PORT]/REPOSITORY"),
        (("oci://me:secret@host.example/echo",), "expected oci://HOST[:PORT]/REPOSITORY"),
        (("oci://host.example/a/../b",), "expected oci://HOST[:PORT]/REPOSITORY"),
        (("oci://host.example/echo@sha256:12",), "expected oci://HOST[:PORT]/REPOSITORY"),
        (("oci://host.example/" + "a" * 256,), "expected oci://HOST[:PORT]/REPOSITORY"),
        (("oci://http://host.example/echo:v1",), "can be changed on its way"),
        ((f"oci://host.example/echo@sha256:{'1' * 64}", f"--sha256={'2' * 64}"), "names another SHA-256"),
        (("oci://http://host.example/echo", f"--sha256={'2' * 64}", "--tls-root=ca.pem"), "need an address with https"),
        (("oci://host.example/echo", "--name=a/b"), "cannot be used"),
    ],
)
def test_a_wrong_reference_is_refused_before_a_request_is_sent(
    arguments: tuple[str, ...], message: str, pull: Edge, models: Path
) -> None:
    done = pull(*arguments)
    assert (done.returncode, os.listdir(models)) == (2, [])
    assert message in done.stderr
