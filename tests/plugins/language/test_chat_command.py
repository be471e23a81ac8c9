"""`edge-server chat`: one prompt, a chat in a terminal, and error messages."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from edge_server.plugins.language import chat_command
from tests.kit.site import Handler, Site

HELLO = "Hello! How can I help you?"
LONG = "word " * 2000
COMMAND = Path(sys.executable).with_name("edge-server")
PACKAGES = Path(__file__).parents[2] / "kit/packages"


@pytest.fixture(scope="module")
def url(start_server: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    models = tmp_path_factory.mktemp("models")
    for name, script in (
        ("talker", {"answers": {"hello": HELLO, "again": "Yes.", "steer": "a\x1b[2Jb"}}),
        ("slow", {"answers": {"talk": LONG}, "step_s": 0.005}),
    ):
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text('backend: "scripted_llm"')
        (models / name / "1/script.json").write_text(json.dumps(script))
    return start_server(models, environment={**os.environ, "PYTHONPATH": str(PACKAGES)})


def test_one_prompt_is_answered_and_statistics_go_to_stderr(url: str, run_command: Any) -> None:
    done = run_command("chat", "talker", f"--url={url}", "--prompt=hello", "--seed=3", "--temperature=0")
    assert (done.returncode, done.stdout) == (0, f"{HELLO}\n")
    assert re.fullmatch(
        r"5 tokens of prompt, 26 of answer, the first after \d+ ms, [\d.]+ tokens a second\n", done.stderr
    )


def test_max_tokens_limits_the_response(url: str, run_command: Any) -> None:
    done = run_command("chat", "talker", f"--url={url}", "--prompt=hello", "--max-tokens=5")
    assert done.stdout == "Hello\n"


def test_without_a_terminal_stdin_is_the_prompt(url: str) -> None:
    done = subprocess.run(
        [COMMAND, "chat", "talker", f"--url={url}"], input="hello", capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"{HELLO}\n")


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("nosuch", (), "Request for unknown model: 'nosuch' is not found; models that serve here: slow, talker\n"),
        ("talkr", (), "'talkr' is not found, did you mean 'talker'?"),
        ("talker", ("--system=" + "x" * 9000,), "the prompt is too long: expected less than"),
        ("talker", ("--url=127.0.0.1:1",), "no answer from http://127.0.0.1:1: connection refused"),
    ],
)
def test_an_error_is_one_line(url: str, run_command: Any, model: str, more: tuple[str, ...], message: str) -> None:
    done = run_command("chat", model, f"--url={url}", "--prompt=hello", *more)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("edge-server chat: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_model_the_names_are_listed_if_there_are_several(url: str, run_command: Any) -> None:
    done = run_command("chat", f"--url={url}", "--prompt=hello")
    assert (done.returncode, done.stdout) == (2, "")
    assert "required: MODEL; language models that serve there: slow, talker\n" in done.stderr


class LoadingServer(Handler):
    """A server whose model is loaded at the second look, and which keeps the bodies of chats."""

    states: ClassVar[list[str]] = []
    chats: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.answer(json.dumps({"data": [] if self.states else [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.body())
        if self.path == "/v2/repository/index":
            answer = json.dumps([{"name": "m", "version": "1", "state": self.states.pop(0)}])
        else:
            assert not self.states, "asked before the model was loaded"
            self.chats.append(body)
            answer = 'data: {"choices": [{"delta": {"content": "Yes."}}]}\n\ndata: [DONE]\n\n'
        self.answer(answer.encode())


@pytest.mark.parametrize(("more", "temperature"), [(("m",), None), (("m", "--temperature=0"), 0), ((), None)])
def test_a_loading_model_is_waited_for_and_the_temperature_is_left_to_the_server_by_default(
    more: tuple[str, ...], temperature: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    LoadingServer.states, LoadingServer.chats = ["LOADING", "READY"], []
    with Site(LoadingServer) as server:
        assert chat_command.run([f"--url=127.0.0.1:{server.server_port}", "--prompt=hello", *more]) == 0
    said = capsys.readouterr()
    assert said.out == "Yes.\n"
    assert said.err.startswith("edge-server chat: waiting: the server loads m\n")
    assert {chat["model"] for chat in LoadingServer.chats} == {"m"}
    assert [chat.get("temperature") for chat in LoadingServer.chats] == [temperature]


class Terminal:
    """A chat in a pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self._controller, terminal = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [COMMAND, "chat", *arguments],
            stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True,
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(terminal)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def wait_for(self, pattern: str) -> None:
        """Wait for text after that of the last wait."""
        end_s = time.monotonic() + 30
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < end_s, self.text
            if select.select([self._controller], [], [], 0.5)[0]:
                self.text += os.read(self._controller, 4096).decode()
        self.text = self.text[found.end() :]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._controller)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Terminal:
            started = Terminal(*arguments)
            stack.callback(started.close)
            return started

        yield start


def test_a_chat_in_a_terminal_keeps_its_history(url: str, terminal: Any) -> None:
    chat = terminal("talker", f"--url={url}", "--system=be brief")
    chat.wait_for("> ")
    chat.type("hello\n")
    chat.wait_for(re.escape(HELLO) + r"\r\n.*14 tokens of prompt, 26 of answer")
    chat.wait_for("> ")
    chat.type("again\n")
    # "be brief", "hello" and "again", the first answer, and a line end between two of them.
    chat.wait_for(r"Yes\.\r\n.*47 tokens of prompt, 4 of answer")
    chat.wait_for("> ")
    chat.type("steer\n")
    chat.wait_for(r"\na\[2Jb\r\n")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.process.wait(30) == 0


def test_ctrl_c_stops_the_response_but_not_the_chat(url: str, terminal: Any) -> None:
    chat = terminal("slow", f"--url={url}")
    chat.wait_for("> ")
    chat.type("talk\n")
    chat.wait_for("word word word")
    chat.type("\x03")
    chat.wait_for(r"\n> ")
    chat.type("\x04")
    assert chat.process.wait(30) == 0
