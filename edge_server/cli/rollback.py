"""`edge-server rollback`: make a running server serve one earlier version of a model, and no other, until --undo."""

from __future__ import annotations

import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.cli import http_client
from edge_server.cli.options import CommandParser, natural_number


def run(arguments: Sequence[str]) -> int:
    """Send the request and print the result. Return 0 on success, 1 on failure."""
    options = _parser().parse_args(arguments)
    base = f"/edge/v1/models/{urllib.parse.quote(options.model, safe='')}"
    try:
        body = {} if options.to is None else {"version": options.to}
        report = http_client.request_json(options, f"{base}/{'unpin' if options.undo else 'rollback'}", body)
        text = _describe_unpin(report) if options.undo else _describe_pin(report)
        problem = str(report["problem"] or "") if options.undo else ""
    except http_client.Refused as error:
        print(f"edge-server rollback: {error}", file=sys.stderr)
        return 1
    except (*http_client.NO_ANSWER, KeyError, TypeError) as error:
        print(f"edge-server rollback: {http_client.no_answer(options, error)}", file=sys.stderr)
        return 1
    print(text)
    if problem:
        print(f"some versions are not served: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="edge-server rollback",
        description="Pin a model of a running server to the version before the current one. Until --undo, no other "
        "version is served and new versions are not loaded. If the version does not load, nothing changes.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--to", type=natural_number, metavar="VERSION", help="pin this version instead")
    action.add_argument("--undo", action="store_true", help="remove the pin; the version policy applies again")
    http_client.add_options(parser)
    return parser


def _describe_pin(report: Mapping[str, Any]) -> str:
    text = f"{report['name']} is pinned to version {report['pin']}; {_describe_serving(report)}"
    if not report["survives_restart"]:
        text += "\nthe pin lasts until the server ends: it was started without --state-dir"
    return text


def _describe_unpin(report: Mapping[str, Any]) -> str:
    return f"{report['name']} is not pinned to version {report['before']} any more; {_describe_serving(report)}"


def _describe_serving(report: Mapping[str, Any]) -> str:
    serves = report["serves"]
    return "it is not loaded" if serves is None else f"version {serves} serves"
