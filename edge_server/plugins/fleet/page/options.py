"""Arguments of `edge-server fleet page`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from edge_server.cli import http_client
from edge_server.cli.options import int_range
from edge_server.plugins.fleet.reports.box_options import add_broker_options

DEFAULT_PORT = 8090


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "page",
        help="show many boxes in a browser",
        description="Serve a page with all boxes: which are in trouble and why, what they serve, how warm they are, "
        "and how far releases have come. With --repository it shows the waves of a signed repository, and with --keys "
        "too it leads them for browsers that have the key which this command prints. Runs until Ctrl-C.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--boxes", action="append", default=[], dest="hosts", metavar="HOST",
        help="HOST, HOST:PORT or https://HOST:PORT (default port 8000), or a file with one on each line, which is read "
        "again when it changes; may be repeated. With --mqtt names of boxes; without any, all that report.",
    )  # fmt: skip
    add_broker_options(
        parser, "to which the boxes report (--follow-mqtt); its TLS takes --tls-root, --tls-cert, --tls-key"
    )
    parser.add_argument("--repository", type=Path, metavar="REPOSITORY", help="folder of `edge-server publish`")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="folder of the private keys: lead rollouts there")
    parser.add_argument(
        "--page-key-file", type=Path, metavar="FILE",
        help="file with the key for browsers that lead rollouts; default: another one at each start, which is printed",
    )  # fmt: skip
    parser.add_argument("--page-address", default="127.0.0.1", help="address to listen on; default: this machine only")
    parser.add_argument(
        "--page-port", type=int_range(0, 65535), default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}; 0: any"
    )
    parser.add_argument(
        "--page-allowed-host", action="append", default=[], metavar="NAME",
        help="name under which a proxy serves the page; may be repeated",
    )  # fmt: skip
    http_client.add_request_options(parser, timeout_s=5.0)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from edge_server.plugins.fleet.page import command

    return command.run(options)
