"""Each option has the same name in all commands, and older spellings still work."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.cli import main
from edge_server.plugins.cameras.commands import stream
from edge_server.plugins.governor import command as governor
from edge_server.plugins.tuning import analyze, optimize, perf

PARSERS = {"perf": perf, "stream": stream, "optimize": optimize, "analyze": analyze}
NEEDED = {
    "perf": ["--model=m"],
    "stream": ["--model=m", "--source=pattern"],
    "optimize": ["m"],
    "analyze": ["--model=m", "--model-repository=r"],
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


@pytest.mark.parametrize("flag", ["--svg", "--picture"])
@pytest.mark.parametrize("action", ["simulate", "replay"])
def test_the_governor_command_accepts_picture_and_svg(
    action: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,temperature_c\n0,50\n1,60\n")
    where = [str(trace)] if action == "replay" else ["--scenario=all"]
    told = f"{flag} {tmp_path}/no/x.svg" if action == "replay" else "draws one scenario"
    with pytest.raises(SystemExit) as caught:
        governor.run([action, *where, flag, str(tmp_path / "no" / "x.svg")])
    assert caught.value.code == 2
    assert told.replace("--picture", "--svg") in capsys.readouterr().err


def test_an_invalid_value_names_the_option_as_it_was_spelt(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["stream", *NEEDED["stream"], "--version=newest"])
    assert "--version: expected a number" in capsys.readouterr().err


def test_an_unknown_option_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    for words, nearest in ((["status", "--wach"], "--watch"), (["perf", "-m=m", "--proto=http"], "--protocol")):
        with pytest.raises(SystemExit) as caught:
            main.main(words)
        assert caught.value.code == 2
        assert capsys.readouterr().err.endswith(f"unrecognized arguments: {words[-1]}, did you mean '{nearest}'?\n")
