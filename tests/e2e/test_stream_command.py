"""`edge-server stream` as a process: its end by a pipe and by signals, its terminal, and a server that dies."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.models import BUNDLED
from tests.kit.server import COMMAND, serve

MODEL = "efficientnet_lite0"
LIMIT_S = 90


@pytest.fixture(scope="module")
def address(shared_server: Callable[..., AbstractContextManager[Any]]) -> Iterator[str]:
    with shared_server(BUNDLED) as server:
        yield server.grpc


def test_a_closed_output_pipe_ends_the_stream_command(address: str) -> None:
    process = subprocess.Popen(
        # At --fps=0 no frame is dropped for a newer one, not even the first.
        [str(COMMAND), "stream", f"--address={address}", f"--model={MODEL}", "--source=pattern", "--fps=0", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["seq"] == 1
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(LIMIT_S) == 0


class Terminal:
    """The command on a terminal of its own of 100 columns and 24 rows. `text` is what it wrote so far."""

    def __init__(self, *arguments: str) -> None:
        self._mine, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = subprocess.Popen([str(COMMAND), "stream", *arguments], stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._mine, 65536)
            except OSError:  # the other end is closed
                break
            self.text += data.decode(errors="replace")
        os.close(self._mine)

    def end(self) -> int:
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return code


# Both signals have the same handler.
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_ctrl_c_prints_the_summary_and_restores_the_terminal(address: str, number: signal.Signals) -> None:
    terminal = Terminal(f"--address={address}", f"--model={MODEL}", "--source=pattern", "--streams=2")
    try:
        assert eventually(lambda: terminal.text.count("governor: ") > 3)
        assert "\x1b[?25l" in terminal.text
        terminal.process.send_signal(number)
        assert terminal.end() == 0
    finally:
        terminal.process.kill()
        terminal.end()
    live, _, after = terminal.text.rpartition("\x1b[?25h")
    assert "\x1b[?25l" not in after
    live, after = (re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) for text in (live, after))
    assert all(len(line) <= 100 for line in live.splitlines())
    assert re.search(r"offered (\d+) = answered (\d+) \+ dropped (\d+) \+ lost 0", after)
    assert "Ctrl-C ends it" not in after


@pytest.mark.full
def test_after_a_restart_the_command_reconnects_and_counts_frames_in_flight_as_lost(
    free_ports: Callable[[int], list[int]],
) -> None:
    (port,) = free_ports(1)
    with serve(BUNDLED, f"--grpc-port={port}") as first:
        process = subprocess.Popen(
            [
                str(COMMAND), "stream", f"--address={first.grpc}", f"--model={MODEL}", "--source=pattern", "--json",
                "--depth=4",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        lines: list[dict[str, Any]] = []

        def collect() -> None:
            assert process.stdout is not None
            with process.stdout as output:
                lines.extend(json.loads(line) for line in output)

        reader = threading.Thread(target=collect)
        reader.start()
        assert eventually(lambda: len(lines) > 10)
        first.stop(signal.SIGKILL)
    try:
        before = len(lines)
        with serve(BUNDLED, f"--grpc-port={port}"):
            assert eventually(lambda: len(lines) > before + 30)
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
        reader.join(LIMIT_S)
    summary = lines[-1]
    assert summary["kind"] == "summary"
    assert summary["offered"] == summary["answered"] + summary["dropped"] + summary["lost"]
    assert process.returncode == (1 if summary["lost"] else 0)
