"""`edge-server governor`: tables, JSON, pictures, and one line for options that make no sense."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from edge_server.cli import main
from edge_server.cli.console import Progress
from edge_server.plugins.governor import command as governor
from edge_server.plugins.governor.simulation.simulator import SCENARIOS, Strategy

TRACE = Path(__file__).parent / "recorded" / "synthetic_hot_noon.csv"
SVG = "{http://www.w3.org/2000/svg}"


def _simulate(*options: str) -> int:
    return main.main(["governor", "simulate", "--seconds", "240", *options])


def _words(path: Path) -> list[str]:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert root.tag == f"{SVG}svg"
    return ["".join(item.itertext()) for item in root.iter(f"{SVG}text")]


def test_the_table_has_a_row_for_each_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert _simulate() == 0
    out = capsys.readouterr().out
    assert out.startswith("scenario ambient-45, set-point 95 °C\nWAY")
    assert [line.split("  ")[0] for line in out.splitlines()[3:]] == [item.value for item in Strategy]


def test_the_same_seed_prints_the_same_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One strategy for all: test_simulation.py has the seed of each.
    monkeypatch.setattr(governor, "Strategy", (Strategy.GOVERNOR,))
    outs = []
    for seed in ("3", "3", "4"):
        assert _simulate("--json", "--seed", seed) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2]


def test_json_of_several_scenarios_is_one_document_and_progress_covers_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, str]] = []
    monkeypatch.setattr(Progress, "show", lambda self, share, text: seen.append((share, text)))
    # Replaced and not shortened: entries that monkeypatch puts back would be in another order for the other tests.
    scenarios = dict(list(SCENARIOS.items())[:2])
    monkeypatch.setattr(governor, "SCENARIOS", scenarios)
    strategies = (Strategy.KERNEL_ONLY, Strategy.GOVERNOR)
    monkeypatch.setattr(governor, "Strategy", strategies)
    assert _simulate("--json", "--scenario", "all") == 0
    sums = json.loads(capsys.readouterr().out)
    assert [(item["scenario"], item["strategy"]) for item in sums] == [
        (name, strategy.name.lower()) for name in scenarios for strategy in strategies
    ]
    assert all(0.0 <= part <= 1.0 for item in sums for part in item["on_time_part"].values())
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert 0 == shares[0] < shares[-1] < 1
    assert len(shares) >= len(scenarios) * len(strategies) * 4
    assert list(dict.fromkeys(text for _, text in seen)) == [
        f"{name}: {strategy.value}" for name in scenarios for strategy in strategies
    ]


def test_the_chart_is_svg_with_a_column_per_strategy_and_a_legend(tmp_path: Path) -> None:
    picture = tmp_path / "box.svg"
    assert _simulate("--scenario", "ambient-55", "--svg", str(picture)) == 0
    words = _words(picture)
    for strategy in Strategy:
        assert strategy.value in words
    assert words.count("set-point 95") == words.count("trip 99") == len(Strategy)
    titles = {"chip, °C", "power, W", "responses in time, per second", "ambient", "control", "normal", "bulk"}
    assert titles <= set(words)
    assert not re.search(r"nan|inf", picture.read_text(encoding="utf-8"))


def test_constants_of_the_machine_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert _simulate("--json", "--set", "trip_c=70", "--set", "critical_c=80", "--set", "clock_steps=4") == 0
    assert all(item["hottest_c"] < 80 for item in json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "colour=1"), "there is no constant 'colour'; there are chip_j_per_k"),
        (("--set", "trip_c=hot"), "--set trip_c: expected a number, given 'hot'"),
        (("--set", "clock_steps=2.5"), "--set clock_steps: expected a number, given '2.5'"),
        (("--set", "dynamic_w=-1"), "dynamic_w: expected a number above 0, given -1"),
        (("--set", "dynamic_w=nan"), "dynamic_w: expected a number above 0"),
        (("--set", "chip_j_per_k=0.001"), "expected at least 1 s"),
        (("--set", "critical_c=90"), "expected critical_c above trip_c"),
        (("--seconds", "10"), "--seconds must lie between 240 and 86400, given 10"),
        (("--scenario", "all", "--picture", "x.svg"), "--svg draws one scenario; name it"),
        (("--scenario", "moon"), "invalid choice: 'moon'"),
    ],
)
def test_invalid_options_are_refused(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _simulate(*options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["governor", "replay", str(TRACE), "--picture", str(tmp_path / "no" / "x.svg")])
    assert "No such file or directory" in capsys.readouterr().err


def test_a_replay_prints_the_states_over_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["governor", "replay", str(TRACE)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["FROM", "TO", "STATE", "LEAST", "SHARE", "HOTTEST", "C", "WHY"]
    states = [line.split()[2] for line in lines[2:]]
    assert states[0] == states[-1] == "NORMAL"
    assert "HOT" in states
    assert any("no reading of temperature" in line for line in lines)


def test_a_replay_as_json_and_as_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "replay.svg"
    assert main.main(["governor", "replay", str(TRACE), "--json", "--svg", str(picture)]) == 0
    stretches = json.loads(capsys.readouterr().out)
    assert stretches[0]["from_s"] == 0
    assert stretches[-1]["to_s"] == 1498
    assert all(0.1 <= item["least_share"] <= 1.0 for item in stretches)
    assert {"recorded power, W", "set-point", "NORMAL", "CRITICAL", "state"} <= set(_words(picture))


def test_a_replay_respects_a_budget_and_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["governor", "replay", str(TRACE), "--power-budget-watts", "10"]) == 0
    assert "the power budget of 10.0 W is used up" in capsys.readouterr().out
    assert main.main(["governor", "replay", str(TRACE), "--temperature-limit", "60"]) == 0
    assert "to be kept at 60 °C" in capsys.readouterr().out


def test_an_invalid_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "noise.csv"
    trace.write_bytes(bytes(range(256)) * 4)
    assert main.main(["governor", "replay", str(trace)]) == 2
    assert "noise.csv" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["governor", "replay", str(tmp_path / "absent.csv")])
    assert "No such file or directory" in capsys.readouterr().err
