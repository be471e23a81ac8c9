"""Command `edge-server fleet`: runs its subcommands `status`, `rollout`, `keys` and `page`, each from the folder with
its job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from edge_server.cli.options import CommandParser
from edge_server.plugins.fleet.page import options as page_options
from edge_server.plugins.fleet.publish import keys_command, rollout_command
from edge_server.plugins.fleet.reports import status_command


def run(arguments: Sequence[str]) -> int:
    """Run a subcommand, and return its exit code. Raises EdgeServerError."""
    parser = CommandParser(prog="edge-server fleet", description="Commands for many servers.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for subcommand in (status_command, rollout_command, keys_command, page_options):
        subcommand.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except argparse.ArgumentTypeError as error:
        print(f"edge-server fleet: {error}", file=sys.stderr)
        return 2  # as argparse
    return code
