"""Errors of commands: one correct line and an exit code, never a traceback."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.cli import options
from edge_server.cli.console import render
from edge_server.cli.events import format_event
from tests.kit.model_folder import model_folder
from tests.kit.server import COMMAND

Edge = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[2]
IDENTITY = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] }
"""


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("EDGE_SERVER_")}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(60)
        yield made


@pytest.fixture
def answering(listener: socket.socket) -> Iterator[Callable[[bytes], str]]:
    """Return a function that has every connection answered with some bytes, and returns the address."""
    threads: list[threading.Thread] = []

    def start(answer: bytes) -> str:
        def serve() -> None:
            try:
                while True:
                    taken, _ = listener.accept()
                    with taken:
                        taken.recv(65536)
                        taken.sendall(answer)
                        # A close with unread bytes, such as the request's body, resets the connection, and the answer.
                        taken.shutdown(socket.SHUT_WR)
                        while taken.recv(65536):
                            pass
            except OSError:
                return  # closed: the test is over

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(30)


def test_a_misspelt_command_is_one_line_with_the_right_name(edge: Edge) -> None:
    done = edge("statsu")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == "edge-server: there is no command 'statsu', did you mean 'status'?\n"


@pytest.mark.parametrize(
    ("name", "meant"), [("ls", "models"), ("list", "models"), ("ps", "status"), ("run", "chat"), ("start", "serve")]
)
def test_a_command_of_another_server_is_one_line_with_the_name_here(run_command: Edge, name: str, meant: str) -> None:
    done = run_command(name)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == f"edge-server: there is no command '{name}', did you mean '{meant}'?\n"


def test_an_unknown_command_like_no_other_is_one_line(run_command: Edge) -> None:
    done = run_command("xyzq")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == "edge-server: there is no command 'xyzq'; edge-server --help lists all\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tls-root=/nowhere.pem"], "--tls-root=/nowhere.pem: No such file or directory"),
        ([f"--tls-cert={__file__}"], f"--tls-cert={__file__}: no valid PEM files: "),
        (["--tls-key=key.pem"], "--tls-key is given without --tls-cert"),
        (["--url=http://box:1", "--tls-root=ca.pem"], "need an address with https://, given http://box:1"),
    ],
)
@pytest.mark.parametrize("command", [("status",), ("perf", "-m=m", "-i=http")])
def test_files_of_tls_that_cannot_be_used_are_named(
    run_command: Edge, command: tuple[str, ...], words: list[str], message: str
) -> None:
    done = run_command(*command, "--url=https://127.0.0.1:1", *words)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


@pytest.mark.parametrize("command", [("status",), ("models",), ("rollback", "m")])
def test_ctrl_c_while_waiting_for_a_server_is_one_line_and_the_signals_exit_code(
    listener: socket.socket, command: tuple[str, ...]
) -> None:
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    process = subprocess.Popen(
        [str(COMMAND), *command, "--url", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    taken, _ = listener.accept()
    with taken:
        taken.settimeout(60)
        assert taken.recv(65536)
        process.send_signal(signal.SIGINT)
        said, problem = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert problem == f"edge-server {command[0]}: interrupted\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"\0\0\x12\4\0\0\0\0\0", "does not speak HTTP/1.1 (is it the gRPC port?)"),
        (
            b"",
            "the server closed the connection: does it use TLS (https://), or want a client certificate (--tls-cert)?",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "the server at this address is no edge-server"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "the server at this address is no edge-server"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "is it the HTTP address of an edge-server?"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://localhost:1/other\r\nContent-Length: 0\r\n\r\n",
            "redirects to http://localhost:1/other: give the address of the server itself",
        ),
    ],
)
@pytest.mark.parametrize("command", ["status", "models"])
def test_a_response_from_another_server_is_reported_in_one_line(
    answering: Callable[[bytes], str], run_command: Edge, command: str, answer: bytes, message: str
) -> None:
    done = run_command(command, "--url", answering(answer))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr


@pytest.mark.parametrize("command", [("--help",), ("doctor", "--skip-runtimes", "--json")])
def test_output_that_a_full_disk_does_not_take_is_reported_in_one_line(command: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [str(COMMAND), *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env=environment(),
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("edge-server")
    assert "cannot write" in line
    assert line.endswith(": No space left on device")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
def test_an_invalid_timeout_is_refused(run_command: Edge, value: str) -> None:
    done = run_command("status", f"--timeout={value}")
    assert done.returncode == 2
    assert f"got '{value}'" in done.stderr


def test_optimize_names_a_missing_folder(tmp_path: Path, run_command: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for model, absent in (("nowhere", "nowhere"), ("some/nowhere", tmp_path / "some")):
        done = run_command("optimize", model)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert f"there is no folder '{absent}'" in done.stderr
        assert "at least one --model-repository" not in done.stderr


def test_serve_with_a_bare_folder_names_the_flag(edge: Edge, tmp_path: Path) -> None:
    done = edge("serve", str(tmp_path))
    assert done.returncode == 78
    assert f"did you mean '--model-repository={tmp_path}'?" in done.stderr


def test_the_error_for_an_unknown_kind_of_repository_address_shows_no_credentials(edge: Edge) -> None:
    shown = edge("check", "--model-repository=ftp://user:secret@host/models")
    assert shown.returncode == 2
    assert "model repository at ftp://: expected a folder" in shown.stderr
    assert "secret" not in shown.stdout + shown.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("front_end", ["HTTP", "gRPC", "metrics"])
def test_serve_on_a_used_port_names_the_port_and_the_flag(
    edge: Edge, tmp_path: Path, listener: socket.socket, front_end: str
) -> None:
    flag, port = f"--{front_end.lower()}-port", listener.getsockname()[1]
    free = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    done = edge("serve", f"--model-repository={tmp_path}", *free, f"{flag}={port}")
    assert done.returncode == 2
    assert done.stderr == (
        f"edge-server serve: {front_end} cannot listen on 127.0.0.1:{port}: Address already in use. "
        f"Stop the program that uses it (`edge-server doctor` names it), or choose another {flag}\n"
    )


@pytest.mark.parametrize("script", ["systemd/build_deb.sh", "jetson/install.sh"])
def test_help_of_the_scripts_exits_zero(script: str) -> None:
    for flag in ("--help", "-h"):
        done = subprocess.run(["bash", str(ROOT / script), flag], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert script.rpartition("/")[2] in done.stdout
    wrong = subprocess.run(["bash", str(ROOT / script), "--nonsense"], capture_output=True, text=True, timeout=60)
    assert (wrong.returncode, wrong.stdout) == (64, "")


def test_models_and_status_list_folders_without_a_model(
    edge: Edge, start_server: Callable[..., str], tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    model_folder(repository / "good", IDENTITY)
    (repository / "flat").mkdir()
    (repository / "flat" / "model.onnx").write_bytes(b"")
    model_folder(repository / "misspelt", IDENTITY + "max_batch_siez: 3")
    url = start_server(repository, environment=environment())
    listed = edge("models", "--url", url)
    assert listed.returncode == 0
    rows = {line.split()[0]: line for line in listed.stdout.splitlines() if "UNAVAILABLE" in line}
    assert f"'{repository}/flat/1/model.onnx'" in rows["flat"]
    assert "max_batch_siez" in rows["misspelt"]
    one = edge("models", "flat", "--url", url)
    assert one.returncode == 0
    assert "no version directories" in one.stdout
    assert edge("models", "absent", "--url", url).returncode == 1
    assert {item["name"] for item in json.loads(edge("models", "--json", "--url", url).stdout)["versions"]} >= {"good"}
    asked = edge("status", "--url", url)
    assert " is ready\n" in asked.stdout, "what never served leaves a server in mode poll ready"
    assert asked.returncode == 1, "but it is a failure"
    assert "\nFAILED flat: has no version directories" in asked.stdout
    assert "\nFAILED misspelt: config.pbtxt line " in asked.stdout


def test_a_long_last_column_does_not_lengthen_the_rule() -> None:
    heads, rule, row = render(("NAME", "REASON"), [("one", "because " * 40)]).splitlines()
    assert heads.startswith("NAME  REASON")
    assert len(rule) < 40 < len(row)


def test_a_table_is_aligned_by_terminal_cells_and_shows_no_control_characters() -> None:
    """Names of streams and clients, reasons and labels are text from others."""
    rows = [("検出器", "a"), ("plain\x1b[2J", "b"), ("e\u0301t\u00e9", "c\nd")]
    lines = render(("NAME", "LAST"), rows).splitlines()
    assert lines[1] == "-" * 9 + "  " + "----"
    assert lines[2] == "検出器" + " " * 3 + "  a"
    assert lines[3] == "plain [2J  b"
    assert lines[4] == "e\u0301t\u00e9" + " " * 6 + "  c"
    assert lines[5] == " " * 11 + "d"


@pytest.mark.parametrize("text", ["016384999x480", "0000019999x480", "640x0", "640x16385"])
def test_a_size_beyond_the_limit_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options.parse_size(text)
    assert options.parse_size("16384X1") == (16384, 1)


def test_missing_fields_of_an_event_are_not_printed() -> None:
    event = {"number": 1, "time_s": 0.0, "kind": "model.failed", "model": "m", "failed_count": 1, "retry_in_s": None}
    assert format_event(event).endswith("m failed_count=1")
    assert format_event({**event, "retry_in_s": 5.0}).endswith("retry_in_s=5.0")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--http-prot=1"], ["--http-prot", "--http-port"]),
        (["--model-repositry=x"], ["--model-repository"]),
        (["--http-port=many"], ["--http-port", "many"]),
        (["--http-port=70000"], ["--http-port", "70000"]),
        (["--http-port=-1"], ["--http-port"]),
        (["--model-control-mode=sometimes"], ["--model-control-mode", "explicit"]),
        (["--strict-readiness=perhaps"], ["--strict-readiness"]),
        (["--exit-timeout-secs=-3"], ["--exit-timeout-secs"]),
        (["--log-format=xml"], ["--log-format"]),
        (["stray"], ["stray"]),
        (["--config=/nowhere.toml"], ["/nowhere.toml"]),
    ],
)
def test_a_bad_flag_is_one_line_with_the_nearest_spelling(
    tmp_path: Path, flags: list[str], words: list[str], run_command: Any
) -> None:
    given = [] if any("repositry" in flag for flag in flags) else [f"--model-repository={tmp_path}"]
    done = run_command("serve", *given, *flags)
    (line,) = done.stderr.strip().splitlines()
    assert (done.returncode, [word for word in words if word not in line]) == (78, [])


def test_a_key_that_cannot_be_used_ends_check_with_one_line(tmp_path: Path, run_command: Any) -> None:
    (tmp_path / "key.pub").write_text("not a key")
    done = run_command("check", str(tmp_path), f"--signature-public-key={tmp_path / 'key.pub'}")
    assert done.returncode == 2
    assert done.stderr == (
        f"edge-server check: '{tmp_path / 'key.pub'}' is not an Ed25519 public key: expected PEM, 32 bytes, or base64 "
        "of them\n"
    )
