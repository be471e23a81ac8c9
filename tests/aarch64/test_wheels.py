"""Wheels for aarch64 of what each extra needs, for the Pythons of JetPack 6 (3.10) and JetPack 7 (3.12).

No Debian release has these Pythons, so that nothing runs here: pip resolves all dependencies and reads their metadata.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SOURCE = Path(__file__).parents[2]
EXTRAS = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["optional-dependencies"]

# `gpu`, `onnxruntime-gpu` and `tensorrt` name what is for x86-64 alone; `lint` and `test-all` are for our own work.
LEFT_OUT = {"gpu", "onnxruntime-gpu", "tensorrt", "lint", "test-all"}
WITHOUT_WHEELS = {"pycuda", "tensorrt-lean", "tensorrt-rtx"}
"""pycuda is built from its source. NVIDIA's two are small source packages whose bindings and libraries have wheels."""


@pytest.mark.parametrize("python", ["3.10", "3.12"])
@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - LEFT_OUT))
def test_an_extra_has_wheels_or_is_known_to_have_none(extra: str, python: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    listed = subprocess.run(
        [
            sys.executable, str(SOURCE / "systemd/list_requirements.py"), str(SOURCE), str(tmp_path / "empty"),
            python, "aarch64", extra,
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    # Ubuntu 22.04, which JetPack 6 is, has glibc 2.35.
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (35, 34, 31, 28, 27, 26, 24, 17)]
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--target", str(tmp_path / "none"),
            "--only-binary=:all:", "--python-version", python, "--implementation", "cp",
            "--abi", f"cp{python.replace('.', '')}", "--abi", "abi3", "--abi", "none",
            *platforms, "--platform=manylinux2014_aarch64", "--platform=any", *listed.stdout.split("\n")[:-1],
        ],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    if extra in WITHOUT_WHEELS:
        assert "No matching distribution found" in done.stderr
    else:
        assert done.returncode == 0, done.stderr[-4000:]
