"""`edge-server rollback`: pin a model of a running server to an earlier version, or remove the pin."""

from __future__ import annotations

import argparse
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.cli import http_client


def run(arguments: Sequence[str]) -> int:
    """Give the order and say what came of it; 0 when it was carried out, 1 when not."""
    parser = argparse.ArgumentParser(
        prog="edge-server rollback",
        description="Pin a model of a running server to the version before the one that serves. No other version is "
        "served, and new ones wait, until --undo. A version that does not load leaves everything as it was.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--to", type=_version, metavar="VERSION", help="pin this version instead")
    which.add_argument("--undo", action="store_true", help="lift the pin: the version policy decides again")
    http_client.add_options(parser)
    options = parser.parse_args(arguments)
    base = f"/edge/v1/models/{urllib.parse.quote(options.model, safe='')}"
    try:
        if options.undo:
            words, problem = _undone(http_client.ask(options, f"{base}/unpin", {}))
        else:
            body = {} if options.to is None else {"version": options.to}
            words, problem = _pinned(http_client.ask(options, f"{base}/rollback", body)), ""
    except http_client.Refused as error:
        print(f"edge-server rollback: {error}", file=sys.stderr)
        return 1
    except (*http_client.NO_ANSWER, KeyError, TypeError) as error:
        print(f"edge-server rollback: no answer from {options.url}: {http_client.reason_of(error)}", file=sys.stderr)
        return 1
    print(words)
    if problem:
        print(f"not all of it is served: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _pinned(report: Mapping[str, Any]) -> str:
    serves = report["serves"]
    now = "it is not loaded" if serves is None else f"version {serves} serves"
    words = f"{report['name']} is pinned to version {report['pin']}; {now}"
    if not report["survives_restart"]:
        words += "\nthe pin lasts until the server ends: it was started without --state-dir"
    return words


def _undone(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return the result of the rollback, and the versions that are not served."""
    serves = report["serves"]
    now = "it is not loaded" if serves is None else f"version {serves} serves"
    return f"{report['name']} is not pinned to version {report['before']} any more; {now}", str(report["problem"] or "")


def _version(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got '{text}'")
    return int(text)
