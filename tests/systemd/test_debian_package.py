"""The Debian package: its contents, and that it serves without pip and without a network."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import struct
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
    """Return the packages of a bare machine, and the Python that replaces its /usr/bin/python3."""
    base = getattr(sys, "_base_executable", sys.executable)
    return {"PATH": "/usr/bin:/bin", "EDGE_PYTHON": base, "PYTHONDONTWRITEBYTECODE": "1", **more}


def test_the_package_depends_only_on_its_python(package: Path) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    assert field(package, "Package") == "edge-server"
    assert field(package, "Depends") == f"python{version}, libc6 (>= 2.28)"
    assert f"py{version}" in package.name


def test_the_package_contains_the_unit_the_drop_ins_and_no_caches(unpacked: Path) -> None:
    unit = (unpacked / "lib/systemd/system/edge-server.service").read_text()
    assert unit == (ROOT / "systemd/edge-server.service").read_text()
    assert {"jetson.conf", "nvidia.conf", "cpu-only.conf"} <= set(os.listdir(unpacked / "usr/share/edge-server"))
    assert not list(unpacked.rglob("__pycache__"))
    assert os.readlink(unpacked / "usr/bin/edge-server") == "/opt/edge_server/bin/edge-server"


MAX_OWN_BYTES = 30_000_000
"""Of edge_server's own files: the bundled models have 18 MB, all else 7 MB."""
MAX_PACKAGE_BYTES = 75_000_000
"""Of the package without a runtime, which has 53 MB."""


def test_the_package_contains_the_code_the_bundled_models_the_documents_and_nothing_else(
    package: Path, unpacked: Path
) -> None:
    links = {"edge_server/demo_models": "model_repository", "edge_server/plugins/dashboard/documents": "docs"}
    listed = ["git", "ls-files", "edge_server", "model_repository", ":(glob)docs/*.md", ":(glob)docs/reference/*.md"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = set(tracked) - links.keys()
    for link, folder in links.items():
        expected = {re.sub(f"^{folder}/", f"{link}/", name) for name in expected}
    library = unpacked / "opt/edge_server/lib"
    own = [path for path in (library / "edge_server").rglob("*") if path.is_symlink() or path.is_file()]
    assert {path.relative_to(library).as_posix() for path in own} == expected
    # Copies, as the links would lead nowhere on the machine that installs it.
    assert not [path for path in own if path.is_symlink()]
    assert sum(path.stat().st_size for path in own) < MAX_OWN_BYTES
    assert not {"pip", "setuptools", "pytest", "tests", "docs", "model_repository"} & set(os.listdir(library))
    assert package.stat().st_size < MAX_PACKAGE_BYTES


def test_the_package_contains_man_pages_and_completion(unpacked: Path) -> None:
    for name, source in {
        "bash-completion/completions/edge-server": "completion/edge-server.bash",
        "zsh/vendor-completions/_edge-server": "completion/_edge-server",
        "fish/vendor_completions.d/edge-server.fish": "completion/edge-server.fish",
    }.items():
        assert (unpacked / "usr/share" / name).read_text() == (ROOT / "systemd/shell" / source).read_text()
    packed = {path.name: gzip.decompress(path.read_bytes()) for path in (unpacked / "usr/share/man/man1").iterdir()}
    assert packed == {f"{path.name}.gz": path.read_bytes() for path in (ROOT / "systemd/shell/man").iterdir()}


def test_the_packaged_command_checks_a_repository_without_a_network(unpacked: Path, tmp_path: Path) -> None:
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


def test_all_imports_come_from_the_package(unpacked: Path) -> None:
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


BUNDLED = ("model_repository/efficientnet_lite0/1/model.onnx", "model_repository/face_detection_yunet/config.pbtxt")


def test_a_dependency_that_is_not_installed_ends_the_build_with_its_name(machine: object, tmp_path: Path) -> None:
    source = tmp_path / "clone"
    shutil.copytree(ROOT / "systemd", source / "systemd")
    (source / "edge_server").mkdir()
    (source / "edge_server/version.py").write_text('__version__ = "0.1.0"\n')
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


def test_models_that_a_user_added_to_the_clone_are_not_in_the_package(machine: object, tmp_path: Path) -> None:
    source = tmp_path / "clone"
    shutil.copytree(ROOT / "systemd", source / "systemd")
    for file in ("edge_server/version.py", "LICENSE", *BUNDLED, "model_repository/mine/1/model.onnx"):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text('__version__ = "0.1.0"\n')
    (source / "edge_server/demo_models").symlink_to("../model_repository")
    (source / "pyproject.toml").write_text(
        '[project]\nname = "edge-server"\ndependencies = []\n[project.optional-dependencies]\n'
    )
    done = subprocess.run(
        [str(source / "systemd/build_deb.sh"), "--from", sys.executable, "--extras", "", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    listing = ["dpkg-deb", "--contents", done.stdout.strip()]
    contents = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"demo_models/(\S+[^/\s])$", contents, re.MULTILINE))
    assert found == {name.removeprefix("model_repository/") for name in BUNDLED}


AARCH64 = 183
"""`e_machine` of an ELF file: EM_AARCH64."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_a_package_for_arm64_contains_aarch64_files_for_its_python_only(python: str, tmp_path: Path) -> None:
    """JetPack 6 has Python 3.10, JetPack 7 has 3.12. The packages come from the registry."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb")
    build = [str(ROOT / "systemd/build_deb.sh"), "--python", python, "--arch", "arm64", "--level", "1", str(tmp_path)]
    done = subprocess.run(
        build, capture_output=True, text=True, check=False, env={**os.environ, "PIP_PYTHON": sys.executable}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    package = Path(done.stdout.strip())
    assert field(package, "Architecture") == "arm64"
    root = tmp_path / "root"
    subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    library = root / "opt/edge_server/lib"
    tag = f"cp{python.replace('.', '')}"
    wrong, machines = [], 0
    for path in library.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(20)
        if head.startswith(b"\x7fELF"):
            machines += 1
            (machine,) = struct.unpack_from("<H", head, 18)
            is_for_other_python = ".cpython-" in path.name and f".cpython-{tag[2:]}-" not in path.name
            if machine != AARCH64 or is_for_other_python:
                wrong.append(str(path.relative_to(library)))
    assert wrong == []
    assert machines > 20
    tags = [
        line.removeprefix("Tag: ")
        for wheel in library.glob("*.dist-info/WHEEL")
        for line in wheel.read_text().splitlines()
        if line.startswith("Tag: ")
    ]
    for name in tags:
        interpreter, abi, platform = name.split("-")
        assert platform == "any" or platform.endswith("aarch64"), name
        is_stable = abi == "abi3" and int(interpreter.removeprefix("cp3")) <= int(python.partition(".")[2])
        assert interpreter.startswith("py") or (interpreter, abi) == (tag, tag) or is_stable, name
    assert {"numpy", "grpc", "onnxruntime", "openvino", "cv2", "edge_server"} <= {
        path.name for path in library.iterdir()
    }
