"""The commands of the README, as they stand there, do what the README says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def command(name: str) -> str:
    """Return the shell command between `<!-- name -->` and `<!-- end -->`."""
    found = re.search(rf"<!-- {name} -->\s*```sh\n(.*?)\n```\s*<!-- end -->", README, re.DOTALL)
    assert found, f"the README has no command marked {name}"
    return found[1]


def test_the_serve_command_installs_the_cpu_flavour_and_serves_the_bundled_repository() -> None:
    make, install, serve = (shlex.split(part) for part in command("serve-command").split("&&"))
    assert make[:3] == ["python3", "-m", "venv"]
    folder = make[3]
    assert install[0] == f"{folder}/bin/pip"
    assert install[1] == "install"
    assert install[-1] == ".[cpu]"
    assert serve[:2] == [f"{folder}/bin/edge-server", "serve"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_the_serve_and_curl_commands_answer_the_picture_with_espresso_first(serve: Any) -> None:
    flags = shlex.split(command("serve-command").split("&&")[-1])[2:]
    repository = next(flag.partition("=")[2] for flag in flags if flag.startswith("--model-repository="))
    rest = [flag for flag in flags if not flag.startswith("--model-repository=")]
    with serve(ROOT / repository, *rest) as server:
        words = [word.replace("127.0.0.1:8000", server.http) for word in shlex.split(command("curl-command"))]
        assert any(server.http in word for word in words), "the curl command does not ask 127.0.0.1:8000"
        done = subprocess.run(
            [words[0], "-sS", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    labels = json.loads(done.stdout)["outputs"][0]["data"]
    assert len(labels) == 5
    assert labels[0].split(":")[2] == "espresso"


def test_the_test_command_installs_the_test_flavour_and_runs_them() -> None:
    make, install, run = (shlex.split(part) for part in command("test-command").split("&&"))
    assert make[:3] == ["python3", "-m", "venv"]
    assert install[-1] == ".[test]"
    assert run[1:3] == ["-m", "pytest"]
