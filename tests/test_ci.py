"""The repetition of failed tests, the report of failed parts and the limit of .ci/run, with its own shell functions."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = (ROOT / ".ci/run").read_text()
DEFINITIONS = 'set -euo pipefail\npart() { echo "$*"; }\n' + RUN[RUN.index("MAX_FLAKY=") : RUN.index("\npart ")]
REPORT = RUN[RUN.index('\npart "done"') :]

pytestmark = pytest.mark.full

FAILS_ONCE = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_fails_once(number):
    seen = pathlib.Path(f"seen{{number}}")
    if not seen.exists():
        seen.touch()
        {failure}
def test_passes():
    pass
"""


def start(folder: Path, source: str, after: str = "tests") -> subprocess.Popen[str]:
    """Start a script with lines after the functions of .ci/run, in a folder with one test file."""
    (folder / "test_it.py").write_text(source)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    script = f"{DEFINITIONS}\n{after}\n"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Found by the interpreter's own path, a link to it knows no packages of the environment.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # No other plugins: five processes that import them all take seconds of a busy machine.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist"}
    return subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def run_tests(folder: Path, source: str, after: str = "tests") -> subprocess.CompletedProcess[str]:
    with start(folder, source, after) as process:
        try:
            out, err = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize("failure", ["assert False", "os._exit(3)"])
def test_what_fails_once_is_named_at_once_and_does_not_fail_the_run(tmp_path: Path, failure: str) -> None:
    done = run_tests(tmp_path, FAILS_ONCE.format(count=1, failure=failure))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^flaky: (.*)$", done.stdout, re.MULTILINE) == ["test_it.py::test_fails_once[0]"]


def test_the_report_repeats_the_errors_of_the_first_run(tmp_path: Path) -> None:
    parts = f"check rest tests\n{REPORT}"
    done = run_tests(tmp_path, FAILS_ONCE.format(count=1, failure="assert number == 3"), parts)
    assert done.returncode == 0, done.stdout + done.stderr
    report = done.stdout[done.stdout.index("\ndone\n") :]
    assert re.search(r"^E +assert 0 == 3$", report, re.MULTILINE)
    assert re.search(r"^_+ test_fails_once\[0\] _+$", report, re.MULTILINE)


def test_a_process_that_crashes_in_the_middle_of_a_test_is_reported_and_does_not_keep_the_run_from_its_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").symlink_to(ROOT / "tests/conftest.py")
    for number in range(200):
        # As a server that runs in this process.
        (tmp_path / f"test_{number}.py").write_text(
            "def test_passes():\n    import faulthandler; faulthandler.enable()\n"
        )
    source = FAILS_ONCE.format(count=1, failure="os.abort()")
    done = run_tests(tmp_path, source, "tests --dist=loadscope --no-loadscope-reorder")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 failed, 201 passed" in done.stdout
    assert "Fatal Python error: Aborted" in done.stderr
    assert re.findall(r"^flaky: (.*)$", done.stdout, re.MULTILINE) == ["test_it.py::test_fails_once[0]"]


FREES_OPENVINO = """
import os, signal
import openvino

def plugin():
    core = openvino.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")
    return core

def test_frees_the_older_plugin_first():
    first, second = plugin(), plugin()
    del first
    del second

def test_handles_a_signal():
    seen = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen
"""


def test_a_signal_after_openvino_was_freed_ends_no_process_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").symlink_to(ROOT / "tests/conftest.py")
    done = run_tests(tmp_path, FREES_OPENVINO, "tests -n 1 --dist=loadscope")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_what_fails_once_in_the_readme_command_is_repeated_too(tmp_path: Path) -> None:
    parts = f"command='.venv/bin/python -m pytest -n 2'\ncheck readme readme_tests\n{REPORT}"
    done = run_tests(tmp_path, FAILS_ONCE.format(count=1, failure="assert False"), parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r"^flaky: (.*)$", done.stdout, re.MULTILINE)) == {"test_it.py::test_fails_once[0]"}


def test_a_readme_command_that_installs_nothing_fails_the_run(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "", f"command=false\ncheck readme readme_tests\n{REPORT}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: readme" in done.stdout


def test_a_run_that_is_interrupted_at_its_limit_prints_what_has_failed(tmp_path: Path) -> None:
    source = "import time\ndef test_fails():\n    assert False\ndef test_hangs():\n    time.sleep(90)\n"
    with start(tmp_path, source, f"check rest tests -n 1\ncheck later true\n{REPORT}") as process:
        assert process.stdout is not None
        printed = ""
        while not re.search(r"^F", printed, re.MULTILINE):  # printed when the failure is known
            character = process.stdout.read(1)
            assert character, printed
            printed += character
        os.killpg(process.pid, signal.SIGINT)
        printed += process.stdout.read()
        process.communicate(timeout=60)
    assert process.returncode == 1, printed
    assert "FAILED test_it.py::test_fails" in printed
    assert re.findall(r"^(?:later|failed: .*)$", printed, re.MULTILINE) == ["failed: time: interrupted after 0 minutes"]


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "def test_fails():\n    assert False\n")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "flaky:" not in done.stdout


def test_what_passes_when_repeated_is_named_although_another_fails_twice(tmp_path: Path) -> None:
    source = FAILS_ONCE.format(count=2, failure="assert False") + "def test_fails():\n    assert False\n"
    done = run_tests(tmp_path, source)
    assert done.returncode == 1, done.stdout + done.stderr
    # In any order: four processes run the tests.
    assert sorted(re.findall(r"^flaky: (.*)$", done.stdout, re.MULTILINE)) == [
        f"test_it.py::test_fails_once[{number}]" for number in range(2)
    ]


def test_more_than_five_that_fail_once_fail_the_run(tmp_path: Path) -> None:
    done = run_tests(tmp_path, FAILS_ONCE.format(count=6, failure="assert False"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "at most 5 are run again" in done.stdout


def test_a_failed_part_fails_the_run_after_the_parts_that_follow(tmp_path: Path) -> None:
    parts = f"check types false\ncheck rest tests\ncheck transport true\n{REPORT}"
    done = run_tests(tmp_path, "def test_fails():\n    assert False\n", parts)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^(?:types|rest|transport|done|failed: .*)$", done.stdout, re.MULTILINE) == [
        "types", "rest", "transport", "done", "failed: types", "failed: rest"
    ]  # fmt: skip


def test_a_run_without_a_failed_part_passes(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "def test_passes():\n    pass\n", f"check rest tests\n{REPORT}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed:" not in done.stdout
