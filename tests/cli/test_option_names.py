"""Each option has the same name in all commands, and older spellings still work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pytest

from edge_server.cli import main
from edge_server.cli.http_client import server_url
from edge_server.cli.options import parse_grpc_address
from edge_server.plugin import own_plugins
from edge_server.plugins.cameras.commands import stream
from edge_server.plugins.tuning import analyze, optimize, perf

PARSERS = {"perf": perf, "stream": stream, "optimize": optimize, "analyze": analyze}
NEEDED = {
    "perf": ["--model=m"],
    "stream": ["--model=m", "--source=pattern"],
    "optimize": ["m"],
    "analyze": ["m", "--model-repository=r"],
}


@pytest.mark.parametrize(
    ("command", "name", "older", "value"),
    [
        ("perf", "--model-version", "--version", "3"),
        ("stream", "--model-version", "--version", "3"),
        ("stream", "--url", "--address", "box:8001"),
        ("optimize", "--model-version", "--version", "3"),
        ("analyze", "--overwrite", "--force", None),
    ],
)
def test_an_option_has_its_common_name_and_accepts_the_older_one(
    command: str, name: str, older: str, value: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = PARSERS[command]._parser()
    given = [[word] if value is None else [word, value] for word in (name, older)]
    by_name, by_older = (parser.parse_args([*NEEDED[command], *words]) for words in given)
    assert vars(by_name) == vars(by_older) != vars(parser.parse_args(NEEDED[command]))
    parser.print_help()
    told = capsys.readouterr().out
    assert name in told
    assert f" {older} " not in told


def test_an_invalid_value_names_the_option_as_it_was_spelt(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["stream", *NEEDED["stream"], "--version=newest"])
    assert "--version: expected a whole number" in capsys.readouterr().err


SUBCOMMANDS = {
    "cameras": ["find"],
    "fleet": ["status"],
    "ros": ["bridge", "replay"],
}
COMMANDS = [
    (command, *rest)
    for command in main.find_all_commands(own_plugins())
    for rest in ([[word] for word in SUBCOMMANDS.get(command, [])] or [[]])
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_command_and_subcommand_names_the_nearest_option(
    command: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = run([*command, "--hel"], capsys)
    assert code in (2, 78)
    assert error.splitlines()[0].endswith("--hel, did you mean '--help'?")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("status --wach", "edge-server status: error: unrecognized arguments: --wach, did you mean '--watch'?"),
        ("perf -m=m --proto=http", "unrecognized arguments: --proto=http, did you mean '--protocol'?"),
        ("fleet status a --timout=3",
         "edge-server fleet status: error: unrecognized arguments: --timout=3, did you mean '--timeout'?"),
        # What is missing may be missing because of its spelling.
        ("perf --modl=m", "required: -m/--model; unrecognized arguments: --modl=m, did you mean '--model'?"),
        ("status --htp-port 3", "arguments: --htp-port 3; the address of the server is --url=http://127.0.0.1:PORT"),
        ("status --http-port=18310",
         "arguments: --http-port=18310; the address of the server is --url=http://127.0.0.1:18310"),
        ("status --host x", "arguments: --host x; the address of the server is --url=http://x:8000"),
        ("stream --grpc-port=7 --model=m", "--grpc-port=7; the address of the server is --url=127.0.0.1:7"),
        ("perf -m=m --port=7", "arguments: --port=7; the address of the server is --url=127.0.0.1:7"),
        ("perf iris", "required: -m/--model, did you mean -m iris?"),
        ("models --verbose", "arguments: --verbose; tensors and load times are in edge-server status -v"),
        ("models one -v", "arguments: -v; tensors and load times are in edge-server status -v"),
        ("status --xyzzy", "edge-server status: error: unrecognized arguments: --xyzzy"),
        ("perf --version=3", "the following arguments are required: -m/--model"),
        ("cameras fnd", ", did you mean 'find'?"),
        ("ros bridg", "edge-server ros: there is no command 'bridg', did you mean 'bridge'?"),
        ("ros bridge --model=m --transport=zenho", ", did you mean 'zenoh'?"),
        ("chat m --system --seed=3", "edge-server chat: error: --system needs a value: --system=..."),
        ("perf -m", "edge-server perf: error: --model needs a value: --model=..."),
    ],
)  # fmt: skip
def test_errors_of_options_and_subcommands_name_what_was_meant(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = run(words.split(), capsys)
    assert code == 2
    assert error.splitlines()[0].endswith(message)


def run(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Run the program, and return the exit code and the standard error."""
    try:
        code: object = main.main(words)
    except SystemExit as error:
        code = error.code
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "http", "grpc"),
    [
        ("box", "http://box:8000", "box:8001"),
        ("[::1]", "http://[::1]:8000", "[::1]:8001"),
        ("http://box:8000/", "http://box:8000", "box:8001"),
        ("https://box:8000", "https://box:8000", "box:8001"),
        ("grpc://box:8001", "http://box:8000", "box:8001"),
        ("grpcs://box", "https://box:8000", "box:8001"),
        # As before: a port alone is that of the command's protocol.
        ("box:9000", "http://box:9000", "box:9000"),
        ("https://box", "https://box", "box:8001"),
        # Nothing says which port the other protocol has.
        ("http://box:9000", "http://box:9000", None),
        ("grpc://box:9001", None, "box:9001"),
        ("unix:/run/edge.sock", None, "unix:/run/edge.sock"),
        ("ftp://box", None, None),
        ("box/path", None, None),
        ("", None, None),
    ],
)
def test_one_address_of_a_server_is_understood_by_every_command(text: str, http: str | None, grpc: str | None) -> None:
    for parse, expected in ((server_url, http), (parse_grpc_address, grpc)):
        if expected is None:
            with pytest.raises(argparse.ArgumentTypeError, match="expected"):
                parse(text)
        else:
            assert parse(text) == expected


def test_an_address_with_tls_turns_it_on_or_is_refused_by_a_command_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = stream._parser()
    for url, is_secure in (("grpcs://box", True), ("https://box:8000", True), ("grpc://box", False), ("box", False)):
        options = parser.parse_args([*NEEDED["stream"], f"--url={url}"])
        assert (options.address, options.tls) == ("box:8001", is_secure)
    with pytest.raises(SystemExit):
        main.main(["ros", "replay", "a.mcap", "--model=m", "--url=grpcs://box"])
    assert "--url: expected an address without TLS for this command, got 'grpcs://box'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["stream", *NEEDED["stream"], "--url=http://box:9000"])
    assert "--url: expected the address of the server's gRPC" in capsys.readouterr().err
