"""Man pages and shell completion of the Debian package, in the real shells where they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edge_server.cli.main import find_all_commands, main
from edge_server.config.server_config import DeclaredSettings
from edge_server.plugin import own_plugins

ROOT = Path(__file__).parents[2]
MAN, COMPLETION = ROOT / "systemd/man", ROOT / "edge_server/cli/completions"

COMMANDS = find_all_commands(own_plugins())
SETTINGS = DeclaredSettings(own_plugins()).settings

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh: apt-get install zsh")
needs_fish = pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish: apt-get install fish")
needs_mandoc = pytest.mark.skipif(shutil.which("mandoc") is None, reason="needs mandoc: apt-get install mandoc")


def output(*command: str, **options: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def bash_offers(*words: str) -> list[str]:
    """Return what bash offers for the last word. bash splits "--option=value" into three."""
    line = " ".join(f"'{word}'" for word in ("edge-server", *words))
    script = f"source {COMPLETION}/edge-server.bash; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _edge_server; "
    return output("bash", "--norc", "-uc", script + 'printf "%s\\n" "${COMPREPLY[@]}"').split()


@needs_bash
class TestBash:
    def test_commands_are_offered(self) -> None:
        assert bash_offers("") == list(COMMANDS)
        assert bash_offers("st") == ["status", "stream"]

    def test_options_are_offered_after_a_dash(self) -> None:
        assert {setting.flag for setting in SETTINGS} - set(bash_offers("serve", "--")) == set()
        assert bash_offers("fleet", "status", "--js") == ["--json"]

    def test_subcommands_are_offered(self) -> None:
        assert bash_offers("ros", "") == ["bridge", "replay"]
        assert bash_offers("completion", "") == ["bash", "zsh", "fish"]
        assert bash_offers("ros", "bridge", "--node") == ["--node-name"]
        assert bash_offers("ros", "replay", "--node") == []

    @pytest.mark.parametrize(
        "words", [("--grpc-transport", ""), ("--grpc-transport", "="), ("--grpc-transport", "=", "")]
    )
    def test_values_are_offered_with_and_without_an_equals_sign(self, words: tuple[str, ...]) -> None:
        assert bash_offers("serve", *words) == ["http2", "grpcio"]
        assert bash_offers("check", *words) == ["http2", "grpcio"]

    @pytest.mark.parametrize(
        "words", [("check", "mod"), ("serve", "--model-repository", ""), ("serve", "--model-repository", "=")]
    )
    def test_file_names_are_completed_by_bash(self, words: tuple[str, ...]) -> None:
        assert bash_offers(*words) == []


@pytest.mark.full
@needs_zsh
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("edge-server st", ["status", "stream"]),
        ("edge-server serve --grpc-transport=", ["http2", "grpcio"]),
        ("edge-server pull --sha", ["--sha256"]),
        ("edge-server ros ", ["bridge", "replay"]),
        ("edge-server --ver", ["--version"]),
    ],
)
def test_zsh_offers_commands_options_and_values(tmp_path: Path, typed: str, offered: list[str]) -> None:
    (tmp_path / "_edge-server").write_bytes((COMPLETION / "edge-server.zsh").read_bytes())
    # A zsh with a terminal, because only its line editor completes. The last read waits for the words.
    script = f"""
        zmodload zsh/zpty
        zpty shell zsh -f -i
        send() {{ zpty -w shell "$1" }}
        send 'PROMPT=; fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -d {tmp_path}/dump'
        send 'zstyle ":completion:*" list-prompt ""; LISTMAX=1000; stty rows 500 columns 200; print -r rea''dy'
        zpty -r shell line '*ready*'
        zpty -w -n shell $'{typed}\\t\\t'
        zpty -r shell line '*{"*".join(offered)}*'
        zpty -d shell
    """
    done = subprocess.run(["zsh", "-fc", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@needs_fish
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("edge-server st", ["status", "stream"]),
        ("edge-server serve --grpc-transport ", ["grpcio", "http2"]),
        ("edge-server check --grpc-transport=", ["--grpc-transport=grpcio", "--grpc-transport=http2"]),
        ("edge-server pull --sha", ["--sha256"]),
        ("edge-server ros br", ["bridge"]),
        ("edge-server completion b", ["bash"]),
        ("edge-server --ver", ["--version"]),
        ("edge-server perf --model status --wat", []),
        ("edge-server serve --http-port=1", []),
        ("edge-server serve --http-port pyproj", []),
        ("edge-server serve --config pyproj", ["pyproject.toml"]),
    ],
)
def test_fish_offers_commands_options_and_values(typed: str, offered: list[str]) -> None:
    lines = output(
        "fish",
        "--no-config",
        "-c",
        f"source {COMPLETION}/edge-server.fish; complete -C '{typed}'",
        cwd=str(ROOT),
    )
    assert [line.split("\t")[0] for line in lines.splitlines()] == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_command_prints_the_completion_of_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == (COMPLETION / f"edge-server.{shell}").read_text()


def test_every_command_and_setting_is_in_a_man_page() -> None:
    assert {path.name for path in MAN.iterdir()} == {
        "edge-server.1", *(f"edge-server-{name}.1" for name in COMMANDS)
    }  # fmt: skip
    page = (MAN / "edge-server-serve.1").read_text().replace("\\-", "-")
    assert [setting.flag for setting in SETTINGS if f"\n.B {setting.flag}" not in page] == []


@pytest.mark.full
@needs_mandoc
def test_the_man_pages_are_valid() -> None:
    pages = [str(path) for path in MAN.iterdir()]
    assert output("mandoc", "-Tlint", "-Werror", *pages) == ""
    shown = output("mandoc", "-Tascii", str(MAN / "edge-server-fleet.1"))
    plain = re.sub(".\b", "", shown)
    assert "edge-server-fleet - show the models of many running servers" in plain
    assert "--timeout SECONDS" in plain
