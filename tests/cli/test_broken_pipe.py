"""Broken pipes: the reader of a command's output may end early, as `head` does. With real pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from edge_server.cli import main as command_line
from tests.kit.server import COMMAND
from tests.kit.site import Handler, Site

ENDED_BY_SIGPIPE = 128 + signal.SIGPIPE

ANSWERS = {
    "/v2": {"name": "triton", "version": "1"},
    "/v2/health/ready": {},
    "/v2/repository/index": [],
    "/edge/v1/models": {"models": []},
    "/edge/v1/versions": {"versions": []},
    "/edge/v1/models/one/rollback": {"name": "one", "pin": 1, "serves": 1, "survives_restart": False},
    "/edge/v1/models/one/unpin": {"name": "one", "before": 1, "serves": 2, "problem": ""},
}


class Answering(Handler):
    """Answers as a server without models does."""

    def do_GET(self) -> None:
        found = ANSWERS.get(self.path)
        self.body()
        self.answer(json.dumps(found).encode(), 404 if found is None else 200)

    do_POST = do_GET


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Site(Answering) as site:
        yield site.url


def run_unread(*arguments: str, is_said_unread: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command whose standard output is a pipe without a reader; with `is_said_unread` also its errors."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            [str(COMMAND), *arguments],
            stdout=writing, stderr=writing if is_said_unread else subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--help",),
        ("--version",),
        ("status",),
        ("models",),
        ("models", "--json"),
        ("rollback", "one"),
        ("rollback", "one", "--undo"),
    ],
    ids=" ".join,
)
def test_a_command_whose_output_pipe_is_closed_ends_silently(url: str, arguments: tuple[str, ...]) -> None:
    asks = bool(arguments) and arguments[0] in ("status", "models", "rollback")
    done = run_unread(*arguments, *(("--url", url) if asks else ()))
    assert (done.returncode, done.stderr) == (ENDED_BY_SIGPIPE, "")


def test_help_ends_silently_if_its_output_pipe_is_closed() -> None:
    done = run_unread("perf", "--help")
    # argparse keeps to itself that a long help could not be written.
    assert done.returncode in (0, ENDED_BY_SIGPIPE)
    assert done.stderr == ""


def test_a_command_ends_silently_if_stderr_is_the_closed_pipe_too() -> None:
    done = run_unread("status", "--url=http://127.0.0.1:1", "--timeout=2", is_said_unread=True)
    assert done.returncode == ENDED_BY_SIGPIPE


def test_status_piped_into_head_shows_its_first_line_and_nothing_else(url: str) -> None:
    done = subprocess.run(
        f"'{COMMAND}' status --url '{url}' | head -n 1", shell=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"edge-server 1 at {url} is ready\n"
    assert done.stderr == ""


def test_another_broken_pipe_is_still_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise BrokenPipeError("a connection broke")

    monkeypatch.setattr("edge_server.cli.status.run", fail)
    with pytest.raises(BrokenPipeError, match="a connection broke"):
        command_line.main(["status"])
