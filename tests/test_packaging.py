"""What the wheel's metadata says that pip installs for each extra."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from edge_server import errors
from edge_server.errors import install_hint

ROOT = Path(__file__).parents[1]
X86 = {"platform_machine": "x86_64", "sys_platform": "linux", "python_version": "3.11"}
ARM = {**X86, "platform_machine": "aarch64"}
ONNX_RUNTIMES = {"onnxruntime", "onnxruntime-gpu"}


@pytest.fixture(scope="module")
def metadata() -> importlib.metadata.PackageMetadata:
    """The metadata of the installed wheel. That of an editable installation may be older than pyproject.toml."""
    return importlib.metadata.metadata("edge-server")


@pytest.fixture(scope="module")
def extras(metadata: importlib.metadata.PackageMetadata) -> set[str]:
    return set(metadata.get_all("Provides-Extra") or ())


def wanted(metadata: importlib.metadata.PackageMetadata, extra: str, target: dict[str, str]) -> set[str]:
    """Return the packages that an extra adds on a machine, those of the extras that it names among them."""
    found: set[str] = set()
    for line in metadata.get_all("Requires-Dist") or ():
        need = Requirement(line)
        if need.marker is None or need.marker.evaluate({**target, "extra": ""}):
            continue
        if need.marker.evaluate({**target, "extra": extra}):
            if canonicalize_name(need.name) == "edge-server":
                for other in need.extras:
                    found |= wanted(metadata, other, target)
            else:
                found.add(canonicalize_name(need.name))
    return found


def test_cpu_and_gpu_name_the_devices_that_such_a_machine_uses(metadata: importlib.metadata.PackageMetadata) -> None:
    assert wanted(metadata, "cpu", X86) == {"opencv-python-headless", "onnxruntime", "openvino"}
    assert wanted(metadata, "gpu", X86) == {"opencv-python-headless", "onnxruntime-gpu", "tensorrt"}
    # What PyPI has without NVIDIA's index, on both.
    assert wanted(metadata, "onnxruntime-gpu", X86) == {"onnxruntime-gpu"}
    for target in (X86, ARM):
        assert wanted(metadata, "tensorrt-rtx", target) == {"tensorrt-rtx-cu13"}
        assert wanted(metadata, "tensorrt-lean", target) == {"tensorrt-lean-cu13"}
    # A Jetson's TensorRT comes with its system, and PyPI has no onnxruntime-gpu for it.
    assert wanted(metadata, "gpu", ARM) == {"opencv-python-headless"}


def test_messages_about_missing_libraries_name_extras_that_a_clone_has(extras: set[str]) -> None:
    assert install_hint("mqtt") == (
        "install the extra mqtt: pip install '.[mqtt]' in a clone of edge_server, with the Python of this program"
    )
    text = "\n".join(path.read_text() for path in (ROOT / "edge_server").rglob("*.py"))
    assert "edge-server[" not in text, "no package index has edge-server: use install_hint"
    hinted = re.findall(r"""install_hint\(["'](.*?)["']\)""", text)
    runtimes = re.findall(r"""import_runtime\("(\w+)[\w.]*", "\w+"(?:, "(.*?)")?\)""", text)
    language = re.findall(r"""^    extra = "(.+)"$""", text, re.MULTILINE)
    assert (len(hinted), len(runtimes), len(language)) > (12, 12, 1)
    named = {*hinted, *language, *(extra or module for module, extra in runtimes)} - {"EXTRA"}
    assert {canonicalize_name(name) for name in named} - {canonicalize_name(extra) for extra in extras} == set()


def test_the_debian_package_is_told_to_build_packages_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib/edge_server/errors.py"))
    assert "pip install" in install_hint("fleet")
    (tmp_path / "version").touch()
    assert install_hint("fleet") == (
        "install the extra fleet: build the Debian packages with `systemd/build_deb.sh --extras cpu,fleet OUT`, and "
        "install those"
    )
    assert "--extras) extras=$2" in (ROOT / "systemd/build_deb.sh").read_text()


@pytest.mark.parametrize(
    ("page", "extra"), [("fleet", "fleet"), ("robots", "policies"), ("ros", "ros"), ("ros", "zenoh")]
)
def test_pages_for_boxes_say_how_the_debian_packages_get_an_extra(page: str, extra: str) -> None:
    assert f"systemd/build_deb.sh --extras cpu,{extra} OUT" in (ROOT / f"docs/{page}.md").read_text()


def test_no_extra_brings_both_distributions_of_onnx_runtime(
    metadata: importlib.metadata.PackageMetadata, extras: set[str]
) -> None:
    assert {"cpu", "gpu", "test"} <= extras
    for extra in extras:
        assert not wanted(metadata, extra, X86) >= ONNX_RUNTIMES, extra


def test_pycuda_which_is_built_from_source_comes_by_its_own_extra_alone(
    metadata: importlib.metadata.PackageMetadata, extras: set[str]
) -> None:
    assert [extra for extra in sorted(extras) if "pycuda" in wanted(metadata, extra, X86)] == ["pycuda"]


@pytest.mark.full
def test_sdist_and_wheel_build_cleanly_and_hold_what_the_server_reads(tmp_path: Path) -> None:
    for tool in ("build", "twine"):
        pytest.importorskip(tool, reason=f"needs {tool}, of the extra test-all")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    own_model = clone / "model_repository/mine/1/model.onnx"
    own_model.parent.mkdir(parents=True)
    own_model.write_bytes(b"a model of the user")

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", *words], cwd=clone, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    assert "deprecated" not in run("build", "--no-isolation").lower()
    (wheel,), (sdist,) = (clone / "dist").glob("*.whl"), (clone / "dist").glob("*.tar.gz")
    assert run("twine", "check", "--strict", str(wheel), str(sdist)).count("PASSED") == 2
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    documents = (":(glob)docs/*.md", ":(glob)docs/reference/*.md")
    command = ["git", "ls-files", "edge_server", "model_repository", *documents]
    tracked = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True).stdout.splitlines()
    # All of the package, with the bundled models and the documents that links in it name, and nothing else.
    links = {"edge_server/demo_models": "model_repository/", "edge_server/plugins/dashboard/documents": "docs/"}
    expected = set(tracked) - links.keys()
    for link, folder in links.items():
        expected = {name.replace(folder, f"{link}/", 1) if name.startswith(folder) else name for name in expected}
    assert {name for name in packed if ".dist-info/" not in name} == expected
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "edge_server/py.typed"} <= names
