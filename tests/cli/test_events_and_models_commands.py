"""The commands `models`, `events` and `rollback` as processes, against the server as a process."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.cli.events import find_events
from tests.kit.model_folder import model_folder
from tests.kit.server import COMMAND, clean_environment, serve
from tests.kit.site import Handler, Site

Edge = Callable[..., subprocess.CompletedProcess[str]]
IDENTITY = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1] }
"""


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


@contextlib.contextmanager
def serving(repository: Path, *flags: str, port: int = 0) -> Iterator[str]:
    """Run a server and yield its address."""
    flags = ("--allow-grpc=false", "--allow-metrics=false", "--model-control-mode=none", f"--http-port={port}", *flags)
    with serve(repository, *flags) as server:
        yield server.url("")
        assert server.stop() == 0


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, versions in (("one", (1, 2)), ("other", (1,))):
        for version in versions:
            (path / name / str(version)).mkdir(parents=True)
        (path / name / "config.pbtxt").write_text(IDENTITY)
    model_folder(path / "broken", 'backend: "nonsense"')
    (path / "bad name" / "1").mkdir(parents=True)
    (path / "loose.onnx").touch()
    model_folder(path / "typo", 'bakcend: "identity"')
    return path


@pytest.fixture(scope="module")
def url(repository: Path) -> Iterator[str]:
    with serving(repository) as address:
        yield address


def test_models_prints_every_version_with_its_history(edge: Edge, url: str) -> None:
    done = edge("models", "--url", url)
    assert done.returncode == 0, done.stderr
    heads, _, *rows = done.stdout.splitlines()
    assert cells(heads) == ["MODEL", "VERSION", "STATE", "GENERATION", "SINCE", "SERVED", "SHARE", "REASON"]
    table = {tuple(cells(row)[:2]): cells(row) for row in rows}
    assert table["one", "1"][2] == "NOT_LOADED"
    assert table["one", "2"][2:4] == ["READY", "1"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", table["one", "2"][4])
    assert table["one", "2"][5:] == ["0", "100%"]
    assert table["broken", "1"][2] == "UNAVAILABLE"
    assert "nonsense" in done.stdout
    assert [cells(row)[1:3] for row in rows if cells(row)[0] == "typo"] == [["-", "UNAVAILABLE"]]
    assert "bakcend" in done.stdout
    for name in ("bad name", "loose.onnx"):
        assert table[name, "-"][2] == "UNAVAILABLE"
        assert table[name, "-"][-1].endswith(("its name does not fit a URL (no spaces, none of \\ ? # %)", "'"))


def test_models_status_and_the_index_name_states_alike(edge: Edge, url: str) -> None:
    done = edge("status", "--url", url)
    states = {cells(row)[0]: cells(row) for row in done.stdout.splitlines()}
    assert states["broken"][2] == "UNAVAILABLE"
    assert states["typo"][1] == states["loose.onnx"][1] == states["bad name"][1] == "UNAVAILABLE"
    assert "a model is a folder" in done.stdout
    assert edge("models", "typo", "--json", "--url", url).stdout.count('"UNAVAILABLE"') == 1


def test_models_of_one_model_in_json(edge: Edge, url: str) -> None:
    done = edge("models", "one", "--json", f"--url={url}/")
    assert done.returncode == 0, done.stderr
    versions = json.loads(done.stdout)["versions"]
    assert [(item["name"], item["version"], item["state"]) for item in versions] == [
        ("one", 1, "NOT_LOADED"), ("one", 2, "READY"),
    ]  # fmt: skip
    done = edge("models", "no/body", "--url", url)
    assert done.returncode == 1
    assert done.stderr == "edge-server models: Request for unknown model: 'no/body' is not found\n"
    done = edge("models", "onne", "--url", url)
    assert done.stderr == "edge-server models: Request for unknown model: 'onne' is not found, did you mean 'one'?\n"


def test_rollback_prints_the_serving_version_and_how_long_the_pin_lasts(edge: Edge, url: str) -> None:
    done = edge("rollback", "one", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "one is pinned to version 1; version 1 serves",
        "the pin lasts until the server ends: it was started without --state-dir",
    ]
    assert "pinned" in next(line for line in edge("models", "--url", url).stdout.splitlines() if "one  " in line)
    done = edge("rollback", "one", "--undo", "--url", url)
    assert done.stdout == "one is not pinned to version 1 any more; version 2 serves\n"
    done = edge("rollback", "one", "--to", "2", "--url", url)
    assert "one is pinned to version 2; version 2 serves" in done.stdout
    assert edge("rollback", "one", "--undo", "--url", url).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("one", "--to", "9"), 1, "no version 9 in the repository"),
        (("other",), 1, "there is nothing to roll back to"),
        (("nobody",), 1, "'nobody' has no version in the repository"),
        (("one", "--undo"), 1, "'one' is not pinned"),
        (("one", "--to", "x"), 2, "expected a number"),
        (("one", "--to", "1", "--undo"), 2, "not allowed with"),
        ((), 2, "MODEL"),
    ],
)
def test_an_impossible_rollback_prints_the_reason(
    url: str, run_command: Edge, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run_command("rollback", *arguments, "--url", url)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_key_is_sent_as_a_header(edge: Edge, repository: Path) -> None:
    with serving(repository, "--http-restricted-api=model-repository:x-key=s3=cret") as address:
        for command in (("models",), ("events", "--no-follow"), ("events",), ("rollback", "one")):
            done = edge(*command, "--url", address)
            assert done.returncode == 1, command
            assert "expecting header 'x-key'; give it with --header x-key=VALUE" in done.stderr
        for command, header in (
            (("models",), "x-key=s3=cret"),
            (("events", "--no-follow"), "X-Key: s3=cret"),
            (("rollback", "one"), "x-key=s3=cret"),
        ):
            done = edge(*command, "--url", address, "--header", header)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [
    ["--header", "Authorization Bearer s3cret"],
    ["--header", "Authorization:", "Bearer", "s3cret"],
    ["--header", "x key=s3cret"],
    ["--header", "x-key=s3cret\r\nx-other: 1"],
    ["--header=x-key=s3cret-\N{GREEK SMALL LETTER ALPHA}"],
    ["--hedaer", "Authorization: Bearer s3cret"],
    ["--hedaer=x-key=s3cret"],
])  # fmt: skip
@pytest.mark.parametrize("command", [("status",), ("perf", "-m=m"), ("perf",)])
def test_the_error_of_a_wrong_header_does_not_show_the_key(
    run_command: Edge, command: tuple[str, ...], words: list[str]
) -> None:
    done = run_command(*command, *words)
    assert done.returncode == 2
    assert "s3cret" not in done.stderr
    assert ", did you mean '--header'?\n" in done.stderr or "expected NAME=VALUE or 'NAME: VALUE'" in done.stderr


def test_past_events_are_printed_as_text_and_as_json(edge: Edge, url: str) -> None:
    done = edge("events", "--no-follow", "--url", url)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d model.ready +one version 2", line) for line in lines)
    failed = next(line for line in lines if "model.failed" in line)
    assert "broken version 1" in failed
    assert "nonsense" in failed
    before, later, after = (
        [json.loads(line) for line in edge("events", "--no-follow", "--json", *more, "--url", url).stdout.splitlines()]
        for more in ((), ("--after", "2"), ())
    )
    # Past events do not change. The machine may report between two readings, after them.
    assert [event["number"] for event in after] == list(range(1, len(after) + 1))
    assert before == after[: len(before)]
    assert later == after[2 : len(later) + 2]
    assert len(lines) <= len(before) <= len(later) + 2 <= len(after)


@pytest.mark.parametrize("command", [("models",), ("rollback", "one"), ("events", "--no-follow")])
@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://127.0.0.1:1/", "127.0.0.1:1"])
def test_without_a_server_the_error_is_one_line(run_command: Edge, command: tuple[str, ...], address: str) -> None:
    done = run_command(*command, "--url", address, "--timeout=5")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert (
        "no answer from http://127.0.0.1:1: connection refused: nothing listens there; start `edge-server serve` there"
        in done.stderr
    )


@pytest.mark.parametrize("command", [("models",), ("status",), ("rollback", "one"), ("events",)])
@pytest.mark.parametrize(
    "address",
    ["", "grpc://127.0.0.1:9001", "ftp://127.0.0.1", "http://", "127.0.0.1:port", "box:8000 x", "http://me:pw@h:1"],
)
def test_an_invalid_address_is_refused_before_a_request_is_sent(
    run_command: Edge, command: tuple[str, ...], address: str
) -> None:
    done = run_command(*command, "--url", address)
    assert done.returncode == 2
    assert f"argument --url: expected http://HOST:PORT, got '{address}'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", [b"[]", b"{}", b"no json", b'{"versions": [1]}', b'{"versions": [{}]}'])
def test_a_response_from_another_server_gives_no_traceback(run_command: Edge, text: bytes) -> None:
    class Odd(Handler):
        def do_GET(self) -> None:
            self.answer(text)

    with Site(Odd) as odd:
        done = run_command("models", "--url", odd.url)
    assert "Traceback" not in done.stderr
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


@pytest.fixture
def follow() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [str(COMMAND), "events", *arguments]
        started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def next_of(kind: str, lines: Any) -> dict[str, Any]:
    for line in lines:
        event: dict[str, Any] = json.loads(line)
        if event["kind"] == kind:
            return event
    raise AssertionError(f"the output ended before {kind}")


def test_events_are_followed_across_a_restart_of_the_server(repository: Path, follow: Any, free_ports: Any) -> None:
    (port,) = free_ports(1)
    follower = follow("--json", "--url", f"http://127.0.0.1:{port}")
    # It waits for a server that has not started yet, and reports that once.
    assert "trying again" in follower.stderr.readline()
    with serving(repository, port=port):
        first = next_of("server.ready", follower.stdout)
        assert first["number"] > 1
    next_of("server.stopping", follower.stdout)
    with serving(repository, port=port):
        # Events are numbered from 1 again, and none is passed over.
        assert json.loads(follower.stdout.readline())["kind"] in ("model.draining", "model.unloaded", "model.loading")
        assert next_of("server.ready", follower.stdout)["time_s"] > first["time_s"]
        follower.send_signal(signal.SIGINT)
        assert follower.wait(30) == 0
    assert "Traceback" not in follower.stderr.read()


def test_a_closed_output_pipe_ends_the_command(edge: Edge, url: str, follow: Any) -> None:
    follower = follow("--url", url)
    follower.stdout.readline()
    follower.stdout.close()
    # The next event finds a closed pipe.
    assert edge("rollback", "one", "--url", url).returncode == 0
    assert edge("rollback", "one", "--undo", "--url", url).returncode == 0
    assert follower.wait(30) == 0
    assert follower.stderr.read() == ""


def test_server_sent_events_are_parsed_as_they_are_written() -> None:
    lines = [
        b": hello\n",
        b"\n",
        b"id: 1\n",
        b"event: x\n",
        b'data: {"number":\r\n',
        b"data:1}\r\n",
        b"\r\n",
        b"data: {",
    ]
    assert list(find_events(iter(lines))) == [{"number": 1}]
    for bad in (b"data: []", b"data: {}", b"data: {"):
        with pytest.raises(ValueError):
            list(find_events([bad, b""]))
