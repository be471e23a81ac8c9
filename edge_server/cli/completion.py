"""`edge-server completion SHELL`: print the file that completes edge-server's commands and options in a shell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_server.cli.options import CommandParser


def run(arguments: Sequence[str]) -> int:
    """Print the file of the shell. Return 0."""
    parser = CommandParser(
        prog="edge-server completion",
        description="Print a file that completes commands and options in bash, zsh or fish. The Debian packages bring "
        "it. Otherwise: edge-server completion bash > ~/.local/share/bash-completion/completions/edge-server; for zsh "
        "a file _edge-server in a folder of fpath; for fish ~/.config/fish/completions/edge-server.fish.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = parser.parse_args(arguments).shell
    print((Path(__file__).parent / "completions" / f"edge-server.{shell}").read_text(), end="")
    return 0
