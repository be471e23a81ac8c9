"""The command that runs the hardware tests on a lent machine: order, limits, results, and its environment."""

from __future__ import annotations

import ensurepip
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HIL = ROOT / "hil_tests"


def load(name: str) -> Any:
    loader = SourceFileLoader(f"hil_{name}_program", str(HIL / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return load("run")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HIL / "run"), *arguments],
        capture_output=True, text=True, timeout=550, check=False, cwd=ROOT,
    )  # fmt: skip


def result(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("*.json")
    return dict(json.loads(path.read_text()))


def test_each_file_of_hardware_tests_belongs_to_a_part_and_the_first_nine_fit_into_25_minutes(program: Any) -> None:
    files = {path.name for part in program.PARTS for test in part.tests for path in HIL.glob(test.partition("::")[0])}
    assert files == {path.name for path in HIL.glob("test_*.py")}
    [*first, _] = program.PARTS[:10]
    assert [part.name for part in first] == [
        "machine", "doctor", "tensorrt", "gpu_faults", "cuda_shared_memory", "parity", "governor", "frames", "soak",
    ]  # fmt: skip
    assert sum(part.limit_s + program.CLOSING_S for part in first) <= 25 * 60


def test_the_columns_of_the_row_are_those_of_the_table_and_name_figures_of_the_tests(program: Any) -> None:
    headings = " | ".join(heading for heading, _, _ in program.ROW)
    assert headings in (ROOT / "docs/benchmarks.md").read_text()
    figures = {"tensorrt f16: an answer took": "{runtime} {precision}: an answer took"}
    figures["4 camera(s): age of results, p50"] = "{cameras} camera(s): age of results, p50"
    figures["4 camera(s): age of results, p99"] = "{cameras} camera(s): age of results, p99"
    for _, part, figure in program.ROW:
        [test] = next(one.tests for one in program.PARTS if one.name == part)
        text = (HIL / test).read_text()
        assert f'"{figures.get(figure, figure)}"' in text, figure


def test_parts_without_time_are_named_and_the_next_call_goes_on_with_them(tmp_path: Path) -> None:
    first = run("--dry", "--seconds=70", f"--results={tmp_path}")
    assert first.returncode == 0, first.stderr
    assert "machine: passed" in first.stdout
    assert "doctor: not run: needs 160 s, " in first.stdout
    assert result(tmp_path)["not_run"].keys() >= {"doctor", "tensorrt", "energy"}
    second = run("--dry", "--seconds=0", f"--results={tmp_path}")
    assert "machine: has a result of this code" in second.stdout
    assert "doctor: not run: needs 160 s, 0 s are left: call this again" in second.stdout
    assert list(result(tmp_path)["parts"]) == ["machine"]


def test_a_result_of_other_code_is_run_again_and_the_file_of_an_earlier_day_goes_on(
    program: Any, tmp_path: Path
) -> None:
    machine = {"board": "", "gpus": [{"name": "NVIDIA H200"}], "driver": "580.1", "l4t": "", "problem": ""}
    part = program.PARTS[0]
    earlier = {"parts": {part.name: {"code": program.fingerprint(part)}, "tensorrt": {"code": "of another commit"}}}
    (tmp_path / "2026-01-02-nvidia-h200.json").write_text(json.dumps(earlier))
    found = program.Results(tmp_path, machine, False)
    assert found.path.name == "2026-01-02-nvidia-h200.json"
    assert found.has(part, program.fingerprint(part))
    assert not found.has(program.PARTS[2], program.fingerprint(program.PARTS[2]))
    earlier["parts"][part.name]["code"] = "of another commit"
    (tmp_path / "2026-01-02-nvidia-h200.json").write_text(json.dumps(earlier))
    assert program.Results(tmp_path, machine, False).path.name != "2026-01-02-nvidia-h200.json"


def test_without_a_gpu_the_reason_is_the_result_and_no_test_runs(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = {**program.look_at_machine(), "problem": "cuInit failed with 999", "gpus": [], "board": ""}
    monkeypatch.setattr(program, "look_at_machine", lambda: machine)
    monkeypatch.setattr(sys, "argv", ["run", f"--results={tmp_path}"])
    assert program.main() == 1
    assert "machine: failed in 0 s  cuInit failed with 999" in capsys.readouterr().out
    found = result(tmp_path)
    assert found["card"] == "no-gpu"
    assert found["not_run"]["doctor"] == "no GPU: cuInit failed with 999"


def test_unknown_parts_and_folders_are_refused(tmp_path: Path) -> None:
    assert "expected parts of machine, doctor" in run("--dry", "gpu").stderr
    assert "nowhere' is no folder" in run("--dry", f"--wheels={tmp_path / 'nowhere'}").stderr


def test_results_have_no_folders_of_this_machine(program: Any) -> None:
    said = program.without_names(f"{ROOT}/hil_tests/x.py {Path.home()}/.cache/y")
    assert said == "./hil_tests/x.py ~/.cache/y"


@pytest.mark.full
def test_a_part_at_its_limit_is_interrupted_and_keeps_what_it_has(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path in HIL.glob("*.py"):
        if not path.name.startswith("test_"):
            shutil.copy(path, tmp_path)
    (tmp_path / "test_slow.py").write_text(
        "import time\n"
        "def test_first(measure):\n    measure.value('figure', 7, 's')\n"
        "def test_second():\n    time.sleep(1000)\n"
    )
    monkeypatch.setattr(program, "HERE", tmp_path)
    found = program.run_tests(program.Part("slow", 8, ("test_slow.py",)), sys.executable, True)
    assert (found["outcome"], found["reason"]) == ("interrupted", "at its limit of 8 s")
    assert found["counts"]["passed"] == 1
    assert found["values"] == {"figure": {"value": 7, "unit": "s"}}


@pytest.mark.full
def test_an_environment_is_made_offline_of_the_wheels_that_are_there_and_the_others_are_named(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    [pip] = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    shutil.copy(pip, folder)
    write_wheel(folder, "of_the_tests", "print('it runs')")
    (folder / "groups.json").write_text(json.dumps({"server": ["of-the-tests", "not-in-the-folder>=2"]}))
    load("fetch_wheels").split(folder, 1 << 20)
    assert max(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 1 << 20
    assert len(list(folder.rglob("pip-*.whl.*of*"))) > 1
    monkeypatch.setattr(program, "VENV", tmp_path / "venv")
    python, missing = program.make_environment(folder)
    assert Path(python).parent.parent == tmp_path / "venv"
    done = subprocess.run([python, "-m", "of_the_tests"], capture_output=True, text=True, check=True)
    assert done.stdout == "it runs\n"
    assert len(missing) == 1
    assert missing[0].startswith("not-in-the-folder>=2 (server): ERROR: No matching distribution found")
    # What the Python of this test has, is there too.
    subprocess.run([python, "-c", "import numpy, pytest"], check=True)


def write_wheel(folder: Path, name: str, code: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", code)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.full
def test_a_piece_of_a_wheel_that_is_missing_is_named(program: Any, tmp_path: Path) -> None:
    (tmp_path / "big.whl.1of3").write_bytes(b"a")
    (tmp_path / "big.whl.3of3").write_bytes(b"c")
    assert program.join_pieces(tmp_path) == ["big.whl: 2 of its 3 pieces are there"]


@pytest.mark.full
def test_every_file_of_hardware_tests_can_be_imported() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "hil_tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_dry_run_runs_every_part_on_the_processor(tmp_path: Path) -> None:
    done = run("--dry", f"--results={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = result(tmp_path)
    assert found["is_proof_of_the_tests_only"]
    assert found["not_run"] == {}
    outcomes = {name: part["outcome"] for name, part in found["parts"].items()}
    assert list(outcomes) == [part.name for part in load("run").PARTS]
    passed = {"machine", "doctor", "parity", "frames", "soak", "models", "reload", "shared_memory"}
    assert {name for name, outcome in outcomes.items() if outcome == "passed"} >= passed
    assert found["parts"]["doctor"]["doctor"]["runtimes"]
    assert found["parts"]["soak"]["values"]["p50"]["value"] > 0
    row = done.stdout.splitlines()[-1]
    assert row.startswith(f"| {found['date']} | dry | ")
    assert str(Path.home()) not in next(tmp_path.glob("*.json")).read_text()
