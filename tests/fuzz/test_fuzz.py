"""The fuzzers of tests/fuzz, each in a process of its own."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

READERS = sorted(path.stem for path in (FOLDER / "readers").glob("*.py"))

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="needs atheris, of the extra test-all"
)


def fuzz(*arguments: str, folder: Path = FOLDER, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder), *arguments]
    return subprocess.run(
        command, cwd=FOLDER.parents[1], capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
    )


def run_for(name: str, seconds: int, work: Path, seed: int = 0) -> str:
    """Fuzz a reader, and return its line of statistics. Fails for a finding."""
    done = fuzz(name, "--seconds", str(seconds), "--seed", str(seed), "--work", str(work), timeout_s=seconds + 100)
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.splitlines()[-1]
    assert re.fullmatch(rf"{name} +[1-9]\d* +\d+ +[1-9]\d* +0", line), line
    return line


@pytest.mark.full
def test_all_readers_pass_their_seeds_and_their_corpus() -> None:
    done = fuzz("--replay")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"^(\w+): [1-9]\d* inputs pass$", done.stdout, re.MULTILINE)) == READERS


# The parsers of foreign bytes that every server has; the others in test_a_reader_withstands_fuzzing_for_minutes.
@needs_atheris
@pytest.mark.soak
@pytest.mark.parametrize("name", ["http1", "http2", "model_config"])
def test_a_reader_withstands_fuzzing_for_seconds(name: str, tmp_path: Path) -> None:
    run_for(name, 5, tmp_path, seed=1)


@needs_atheris
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", READERS)
def test_a_reader_withstands_fuzzing_for_minutes(name: str, tmp_path: Path) -> None:
    print(run_for(name, 120, tmp_path))


@needs_atheris
@pytest.mark.soak
def test_a_defect_is_found_and_its_input_repeats_it(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "fuzz")
    with (folder / "reader_list.py").open("a") as file:
        file.write('READERS["broken"] = 16\n')
    (folder / "readers/broken.py").write_text(
        "def seeds():\n    yield b'seed'\n"
        "def check(data):\n    assert not data.startswith(b'\\xff'), 'the byte that must not come'\n"
    )
    done = fuzz("broken", "--seconds", "5", "--work", str(tmp_path / "work"), folder=folder)
    assert done.returncode == 1
    assert "AssertionError: the byte that must not come" in done.stdout
    path = re.search(r"^repeat: python tests/fuzz broken --input (\S+)$", done.stdout, re.MULTILINE)
    assert path is not None, done.stdout
    assert Path(path[1]).read_bytes().startswith(b"\xff")
    again = fuzz("broken", "--input", path[1], folder=folder)
    assert "AssertionError: the byte that must not come" in again.stderr
