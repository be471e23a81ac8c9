"""The commands, links, options and examples of the documentation, as they stand there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += [ROOT / "fleet" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = ROOT / "docs" / "examples"
COFFEE = ROOT / "tests" / "data" / "coffee.jpg"

OPTIONS_OF_OTHERS = {
    "--data-binary", "--cacert", "--cert", "--key", "--system-site-packages", "--dry-run", "--python", "--arch",
    "--model-repositry", "--build-arg", "--device", "--gpus", "--runtime",
}  # fmt: skip
"""Options of curl, python, docker, the installer and the package builder; and the misspelling in an error message."""


@pytest.fixture(scope="module")
def server(serve: Any) -> Iterator[Any]:
    with serve(ROOT / "model_repository") as server:
        yield server


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{target} is not there"
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, f"{target}{anchor} is no heading"


def test_every_option_exists() -> None:
    known = set(
        re.findall(r"--[a-z][a-z0-9-]+", "".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md")))
    )
    known |= OPTIONS_OF_OTHERS | {"--help", "--version"}
    for page in PAGES:
        if page.parent.name == "reference":
            continue
        text = page.read_text()
        code = re.findall(r"```.*?```", text, re.DOTALL) if page.name != "CONTRIBUTING.md" else []
        spans = re.findall(r"`[^`\n]+`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        blocks = [block.replace("\\\n", " ") for block in code]
        lines = [line for block in blocks for line in block.splitlines() if "edge-server" in line or "--" in line]
        for piece in (*spans, *lines):
            if re.search(r"\b(pip|ruff|pytest|docker|podman|git|apt|openssl|aiperf|optimum-cli)\b", piece):
                continue
            for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", piece):
                assert option in known, f"{page.name}: {option} in {piece!r}"


def commands() -> list[Any]:
    found = []
    for page in PAGES:
        for block in re.findall(r"<!-- run -->\s*```sh\n(.*?)\n```\s*<!-- end -->", page.read_text(), re.DOTALL):
            found += [pytest.param(line, id=f"{page.name}: {line[:60]}") for line in block.splitlines()]
    return found


@pytest.mark.parametrize("line", commands())
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_a_marked_command_works(line: str, server: Any) -> None:
    line = line.replace("127.0.0.1:8000", server.http)
    if line.startswith("edge-server"):
        line = f"{Path(sys.executable).with_name('edge-server')}{line.removeprefix('edge-server')} --url=http://{server.http}"
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example_lines() -> list[Any]:
    """The commands of docs/examples/README.md, each with the pattern of a line that it prints."""
    text = (EXAMPLES / "README.md").read_text()
    found = re.search(r"<!-- examples -->\s*```sh\n(.*?)\n```\s*<!-- end -->", text, re.DOTALL)
    assert found is not None
    lines = [line for line in found[1].splitlines() if ".venv/bin/pip" not in line]  # the test extra has the package
    coffee = r"0\.949 espresso"
    patterns = (coffee, r"frame \d+: 0\.9\d at 17\d,6\d", r"probabilities \(1, 1000\)", coffee, ".*:espresso.*")
    return [
        pytest.param(
            line,
            pattern,
            id=line.split()[0].rpartition("/")[2] + " " + line.split()[1],
            marks=pytest.mark.skipif(
                "/" not in line.split()[0] and shutil.which(line.split()[0]) is None, reason="not installed"
            ),
        )
        for line, pattern in zip(lines, patterns, strict=True)
    ]


@pytest.mark.parametrize(("line", "pattern"), example_lines())
def test_a_command_of_the_examples_works_as_written(line: str, pattern: str, server: Any, tmp_path: Path) -> None:
    host, port = server.http.split(":")
    for written, here in (
        ("127.0.0.1:8000", server.http), ("127.0.0.1:8001", server.grpc), ("127.0.0.1 8000", f"{host} {port}"),
        (".venv/bin/python", sys.executable), ("/tmp/", f"{tmp_path}/"),
    ):  # fmt: skip
        line = line.replace(written, here)
    assert re.search(rf"^{pattern}$", run("sh", "-c", line), re.MULTILINE)


@pytest.mark.parametrize("name", ["infer_http.py", "camera_stream.py", "infer_grpc.py --help", "infer.js"])
def test_an_example_without_its_arguments_prints_its_usage(name: str) -> None:
    file, *options = name.split()
    program = sys.executable if file.endswith(".py") else "node"
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    ended = subprocess.run([program, EXAMPLES / file, *options], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert re.fullmatch(rf"usage: .*{re.escape(file)} .*\[HOST:PORT\]\n", ended.stderr)


def test_the_ros2_example_compiles() -> None:
    """It runs against a live ROS 2 only, which no test here has."""
    compile((EXAMPLES / "ros2_detections.py").read_text(), "ros2_detections.py", "exec")
