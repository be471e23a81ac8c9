"""The Debian packages: their contents, and that they serve without pip and without a network."""

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
from typing import Any

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
def unpacked(packages: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the three packages unpacked, and the program made of them."""
    root = tmp_path_factory.mktemp("root")
    for package in packages:
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True, timeout=60)
    update = [str(root / "usr/lib/edge-server/program-update"), "use"]
    subprocess.run(update, check=True, timeout=60, env={**os.environ, "EDGE_HOME": str(root / "opt/edge_server")})
    return root


def field(package: Path, name: str) -> str:
    command = ["dpkg-deb", "--field", str(package), name]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def environment(**more: str) -> dict[str, str]:
    """Return the packages of a bare machine, and the Python that replaces its /usr/bin/python3."""
    base = getattr(sys, "_base_executable", sys.executable)
    return {"PATH": "/usr/bin:/bin", "EDGE_PYTHON": base, "PYTHONDONTWRITEBYTECODE": "1", **more}


def test_the_packages_depend_only_on_python_and_on_each_other(packages: Any) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    names = [field(package, "Package") for package in packages]
    assert names == ["edge-server", "edge-server-runtimes", "edge-server-models"]
    runtimes, models = (field(package, "Version") for package in packages[1:])
    base = f"python{version}, libc6 (>= 2.28)"
    assert field(packages.program, "Depends") == f"edge-server-runtimes (= {runtimes}), {base}"
    assert field(packages.program, "Recommends") == f"edge-server-models (>= {models}), systemd"
    assert field(packages.runtimes, "Depends") == base
    assert field(packages.models, "Architecture") == "all"
    assert all(f"py{version}" in package.name for package in packages[:2])


def test_the_package_contains_the_unit_the_drop_ins_and_no_caches(unpacked: Path) -> None:
    unit = (unpacked / "lib/systemd/system/edge-server.service").read_text()
    assert unit == (ROOT / "systemd/edge-server.service").read_text()
    for drop_in in (unpacked / "usr/share/edge-server").glob("*.conf"):
        for wanted in re.findall(r"(?m)^Wants=(.*)$", drop_in.read_text()):
            assert (unpacked / "lib/systemd/system" / wanted).is_file()
    assert {"jetson.conf", "nvidia.conf", "cpu-only.conf"} <= set(os.listdir(unpacked / "usr/share/edge-server"))
    assert not list(unpacked.rglob("__pycache__"))
    assert os.readlink(unpacked / "usr/bin/edge-server") == "/opt/edge_server/bin/edge-server"
    # The unit, and drop-ins of operators, start the program by this path.
    assert os.readlink(unpacked / "opt/edge_server/bin/edge-server") == "../current/bin/edge-server"


MAX_PROGRAM_BYTES = 4_000_000
"""Of the program's package, which each update downloads: 1.8 MB, and more with the lowest level of compression."""
MAX_MODELS_BYTES = 20_000_000
MAX_RUNTIMES_BYTES = 55_000_000
"""Of the package of runtimes without a runtime."""


def test_the_packages_contain_the_code_the_bundled_models_the_documents_and_nothing_else(
    packages: Any, unpacked: Path
) -> None:
    documents = "edge_server/plugins/dashboard/documents"
    listed = ["git", "ls-files", "edge_server", ":(glob)docs/*.md", ":(glob)docs/reference/*.md"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = {re.sub("^docs/", f"{documents}/", name) for name in tracked} - {documents}
    program = unpacked / "opt/edge_server/packages/program/lib"
    own = [path for path in program.rglob("*") if path.is_symlink() or path.is_file()]
    assert {path.relative_to(program).as_posix() for path in own} == expected | {"edge-server"}
    # Copies, as the links would lead nowhere on the machine that installs it.
    assert [path.name for path in own if path.is_symlink()] == ["demo_models"]
    assert os.readlink(program / "edge_server/demo_models") == "/opt/edge_server/models"
    models = unpacked / "opt/edge_server/models"
    listed = ["git", "ls-files", "model_repository"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {f"model_repository/{path.relative_to(models)}" for path in models.rglob("*") if path.is_file()}
    assert found == set(tracked)
    runtimes = unpacked / "opt/edge_server/packages/runtimes/lib"
    assert not {"pip", "setuptools", "pytest", "tests", "docs", "edge_server"} & set(os.listdir(runtimes))
    assert packages.program.stat().st_size < MAX_PROGRAM_BYTES
    assert packages.models.stat().st_size < MAX_MODELS_BYTES
    assert packages.runtimes.stat().st_size < MAX_RUNTIMES_BYTES


def test_a_second_build_into_the_folder_makes_only_the_program_again(packages: Any) -> None:
    build = [str(ROOT / "systemd/build_deb.sh"), "--from", sys.executable, "--extras", "", "--level", "1"]
    done = subprocess.run(
        [*build, "--version", "9.9", str(packages.program.parent)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    program, *others = map(Path, done.stdout.splitlines())
    try:
        assert others == list(packages[1:])
        assert field(program, "Version") == "9.9"
        assert field(program, "Depends") == field(packages.program, "Depends")
    finally:
        program.unlink()


@pytest.mark.parametrize("version", ["", "../1", "v1", "1:1", "1 2"])
def test_a_version_that_is_no_name_of_a_folder_is_refused(version: str, tmp_path: Path) -> None:
    build = [str(ROOT / "systemd/build_deb.sh"), "--version", version or "/", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, "--version: expected a digit" in done.stderr) == (64, True)


def test_the_package_contains_man_pages_and_completion(unpacked: Path) -> None:
    completions = ROOT / "edge_server/cli/completions"
    for name, source in {
        "bash-completion/completions/edge-server": "edge-server.bash",
        "zsh/vendor-completions/_edge-server": "edge-server.zsh",
        "fish/vendor_completions.d/edge-server.fish": "edge-server.fish",
    }.items():
        assert (unpacked / "usr/share" / name).read_text() == (completions / source).read_text()
    packed = {path.name: gzip.decompress(path.read_bytes()) for path in (unpacked / "usr/share/man/man1").iterdir()}
    assert packed == {f"{path.name}.gz": path.read_bytes() for path in (ROOT / "systemd/man").iterdir()}


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


def test_the_packaged_command_says_how_the_package_gets_an_extra(unpacked: Path, tmp_path: Path) -> None:
    program, models = str(unpacked / "opt/edge_server/bin/edge-server"), str(ROOT / "model_repository")
    done = subprocess.run(
        [program, "publish", models, str(tmp_path / "site"), f"--keys={tmp_path / 'keys'}"],
        capture_output=True, text=True, timeout=100, env=environment(), cwd="/", check=False,
    )  # fmt: skip
    assert "systemd/build_deb.sh --extras cpu,fleet OUT" in done.stderr
    assert "pip" not in done.stderr


def test_all_imports_come_from_the_package(unpacked: Path) -> None:
    """Also a helper process of the server's own finds the package's files."""
    code = "import json, edge_server, grpc, numpy; print(json.dumps([m.__file__ for m in (edge_server, grpc, numpy)]))"
    version = (unpacked / "opt/edge_server/current").resolve()
    script = (version / "bin/edge-server").read_text()
    probe = version / "bin/probe"
    probe.write_text(script.replace('"$here/../lib/edge-server" "$@"', "-c '" + code + "'"))
    done = subprocess.run(
        ["sh", str(probe)], capture_output=True, text=True, timeout=60, env=environment(), cwd="/", check=False
    )
    probe.unlink()
    assert done.returncode == 0, done.stderr
    library = version / "lib"
    assert all(Path(path).resolve().is_relative_to(library) for path in json.loads(done.stdout)), done.stdout


def test_the_command_imports_nothing_from_the_current_folder(unpacked: Path, tmp_path: Path) -> None:
    for name in ("edge_server", "json", "pkgutil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)\n")
    done = subprocess.run(
        [unpacked / "opt/edge_server/current/bin/edge-server", "--version"],
        capture_output=True, text=True, timeout=60, env=environment(), cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("edge-server "), done.stderr


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
    for folder in ("systemd", "edge_server/cli/completions"):
        shutil.copytree(ROOT / folder, source / folder)
    for file in ("edge_server/version.py", "LICENSE", *BUNDLED, "model_repository/mine/1/model.onnx"):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text('__version__ = "0.1.0"\n')
    (source / "pyproject.toml").write_text(
        '[project]\nname = "edge-server"\ndependencies = []\n[project.optional-dependencies]\n'
    )
    done = subprocess.run(
        [str(source / "systemd/build_deb.sh"), "--from", sys.executable, "--extras", "", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    listing = ["dpkg-deb", "--contents", done.stdout.splitlines()[2]]
    contents = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"edge_server/models/(\S+[^/\s])$", contents, re.MULTILINE))
    assert found == {name.removeprefix("model_repository/") for name in BUNDLED}


AARCH64 = 183
"""`e_machine` of an ELF file: EM_AARCH64."""


# Fetches and unpacks the packages of another architecture, which takes minutes.
@pytest.mark.long
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
    program, runtimes, _ = map(Path, done.stdout.splitlines())
    assert [field(package, "Architecture") for package in (program, runtimes)] == ["arm64", "arm64"]
    root = tmp_path / "root"
    for package in (program, runtimes):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    assert (root / "opt/edge_server/packages/program/lib/edge_server/version.py").exists()
    rules = root / "lib/udev/rules.d/90-edge-server.rules"
    assert rules.read_bytes() == (ROOT / "jetson/udev.rules").read_bytes()
    library = root / "opt/edge_server/packages/runtimes/lib"
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
    assert {"numpy", "grpc", "onnxruntime", "openvino", "cv2"} <= {path.name for path in library.iterdir()}
