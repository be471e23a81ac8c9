"""fleet/container/Containerfile, built by buildah without a daemon or a registry of images, started and asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODELS, PICTURE = ROOT / "model_repository", ROOT / "tests/data/coffee.jpg"
LIMIT_BYTES = 600_000_000
MISSING = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]

# Builds the image twice, which takes minutes.
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"apt-get install {' '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change the root folder and mount"),
]


class Builder:
    """buildah with images and containers in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._command = ["buildah", "--root", str(folder / "root"), "--runroot", str(folder / "run")]
        # vfs copies the whole image for each line of the recipe, but works on any file system.
        tried = subprocess.run(self.command("--storage-driver=overlay", "info"), capture_output=True, check=False)
        self._command.append(f"--storage-driver={'vfs' if tried.returncode else 'overlay'}")

    def command(self, *arguments: str) -> list[str]:
        return [*self._command, *arguments]

    def run(self, *arguments: str) -> str:
        """Return what it prints. Fails the test with its errors."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"buildah {' '.join(arguments)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """With the image `base`: a Debian as small as the recipe's default, which only a registry of images has."""
    folder = tmp_path_factory.mktemp("container")
    no_texts = (f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "info", "locale"))
    too_much = "usrmerge perl libperl5.36 perl-modules-5.36"
    done = subprocess.run(
        [
            "mmdebstrap", "--variant=minbase", "--include=usr-is-merged", *no_texts, "--dpkgopt=force-unsafe-io",
            '--aptopt=APT::Install-Recommends "false"',
            f'--customize-hook=chroot "$1" apt-get purge --yes --autoremove {too_much}',
            "bookworm", str(folder / "base.tar"),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
    made = Builder(folder)
    made.run("bud", "--isolation=chroot", "--tag=base", str(folder))
    yield made
    made.run("rm", "--all")
    made.run("rmi", "--all", "--force")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone: what is committed."""
    folder = tmp_path_factory.mktemp("source") / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def build(builder: Builder, source: Path, tag: str) -> str:
    """Build the recipe's image, with layers from the cache."""
    # The settings of pip on this machine: package index and trusted certificates.
    pip = source.parent / "pip.conf"
    settings = [f"index-url = {os.environ['PIP_INDEX_URL']}"] if "PIP_INDEX_URL" in os.environ else []
    volumes = [f"--volume={pip}:/etc/pip.conf:ro"]
    if certificates := os.environ.get("PIP_CERT"):
        settings.append("cert = /certificates.pem")
        volumes.append(f"--volume={certificates}:/certificates.pem:ro")
    pip.write_text("\n".join(["[global]", *settings, ""]))
    builder.run(
        "bud", "--layers", "--isolation=chroot", "--network=host", "--format=docker", *volumes,
        "--build-arg=BASE=localhost/base", f"--file={source / 'fleet/container/Containerfile'}", f"--tag={tag}",
        str(source),
    )  # fmt: skip
    return f"localhost/{tag}"


@pytest.fixture(scope="module")
def image(builder: Builder, source: Path) -> str:
    return build(builder, source, "edge-server")


def layers_of(builder: Builder, image: str) -> list[str]:
    """Return the digests of an image's layers, the base first."""
    found: list[str] = json.loads(builder.run("inspect", "--type=image", image))["Docker"]["rootfs"]["diff_ids"]
    return found


def get(url: str, data: bytes | None = None, kind: str = "application/json") -> bytes:
    request = urllib.request.Request(url, data, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()  # type: ignore[no-any-return]


def is_ready(url: str) -> bool:
    try:
        get(f"{url}/v2/health/ready")
    except OSError:
        return False
    return True


def test_the_image_is_small(builder: Builder, image: str) -> None:
    sizes = {tuple(item["names"] or ()): item["size"] for item in json.loads(builder.run("images", "--json"))}
    (said,) = [size for names, size in sizes.items() if f"{image}:latest" in names]
    number, unit = said.split()
    size = float(number) * {"MB": 1e6, "GB": 1e9}[unit]
    print(f"the image has {said}")
    assert size < LIMIT_BYTES, said


def test_an_update_of_the_program_changes_the_last_layer_alone(builder: Builder, image: str, source: Path) -> None:
    before = layers_of(builder, image)
    with (source / "edge_server/version.py").open("a") as file:
        file.write('NAME = "update"\n')
    after = layers_of(builder, build(builder, source, "update"))
    base = len(layers_of(builder, "localhost/base"))
    # Debian's packages, runtimes, models, program.
    assert len(before) == len(after) == base + 4
    assert [old == new for old, new in zip(before, after, strict=True)] == [*[True] * (base + 3), False]


def test_the_container_classifies_a_picture_and_stops_with_code_0(
    builder: Builder, image: str, free_ports: Callable[[int], list[int]]
) -> None:
    config: dict[str, Any] = json.loads(builder.run("inspect", "--type=image", image))["Docker"]["config"]
    assert config["User"] == "edge"
    container = builder.run("from", image)
    http, grpc, metrics = free_ports(3)
    server = subprocess.Popen(
        builder.command(
            "run", "--isolation=chroot", f"--volume={MODELS}:/models:ro", container, "--",
            *config["Entrypoint"], *config["Cmd"],
            f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}",
        ),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{http}"
        until = time.monotonic() + 120
        while not is_ready(url):
            assert server.poll() is None, server.communicate()[0]
            assert time.monotonic() < until, "the server is not ready"
            time.sleep(0.1)
        answer = json.loads(get(f"{url}/v2/models/efficientnet_lite0/infer", PICTURE.read_bytes(), "image/jpeg"))
        assert "espresso" in answer["outputs"][0]["data"][0]
        # The health check of the image, at this test's port.
        check = [word.replace(":8000", f":{http}") for word in config["Healthcheck"]["Test"][1:]]
        builder.run("run", "--isolation=chroot", container, "--", *check)
        nobody_there = [word.replace(f":{http}", ":9") for word in check]
        with pytest.raises(AssertionError, match="refused"):
            builder.run("run", "--isolation=chroot", container, "--", *nobody_there)
        (pid,) = [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdigit() and is_server(folder, f"--http-port={http}")
        ]
        assert os.stat(f"/proc/{pid}").st_uid != 0
        os.kill(pid, signal.SIGTERM)
        output, _ = server.communicate(timeout=60)
        assert server.returncode == 0, output
        assert re.search(r"efficientnet_lite0 version 1: onnxruntime", output)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def is_server(folder: Path, option: str) -> bool:
    """Return whether this process of /proc is the server, and not the buildah that started it."""
    try:
        words = (folder / "cmdline").read_text().split("\0")
    except OSError:  # it has ended
        return False
    return option in words and "buildah" not in " ".join(words)
