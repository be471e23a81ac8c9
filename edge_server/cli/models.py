"""`edge-server models`: list every version of every model of a running server, with its history."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.cli import http_client
from edge_server.cli.table import render

HEADS = ("MODEL", "VERSION", "STATE", "GENERATION", "SINCE", "SERVED", "SHARE", "REASON")


def run(arguments: Sequence[str]) -> int:
    """Print the versions that the server at `--url` knows; 0 when it answered, 1 when not."""
    parser = argparse.ArgumentParser(
        prog="edge-server models",
        description="Ask a running server for all versions of its models. SINCE is when the version came to its state; "
        "SERVED counts answered requests since it was loaded; SHARE is its part of the requests that name no version.",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="just this one")
    parser.add_argument("--json", action="store_true", help="print the server's answer as it is")
    http_client.add_options(parser)
    options = parser.parse_args(arguments)
    query = "" if options.model is None else "?" + urllib.parse.urlencode({"model": options.model})
    try:
        text = _text(options, "/edge/v1/versions" + query)
    except http_client.Refused as error:
        print(f"edge-server models: {error}", file=sys.stderr)
        return 1
    except (*http_client.NO_ANSWER, KeyError, TypeError) as error:
        print(f"edge-server models: no answer from {options.url}: {http_client.reason_of(error)}", file=sys.stderr)
        return 1
    print(text)
    return 0


def _text(options: argparse.Namespace, path: str) -> str:
    """Return the rows to print. A folder without versions or with a wrong configuration is only in the index."""
    if options.json:
        return json.dumps(http_client.ask(options, path), indent=1)
    index = http_client.ask(options, "/v2/repository/index", {})
    faulty = [_faulty(entry) for entry in index if _is_faulty(entry) and options.model in (None, entry["name"])]
    try:
        # What was never loaded of a faulty model has no reason of its own.
        names = {row[0] for row in faulty}
        versions = http_client.ask(options, path)["versions"]
        rows = [_row(item) for item in versions if item["generation"] or item["name"] not in names]
    except http_client.Refused:
        if not faulty:
            raise
        rows = []
    if not rows and not faulty:
        return "there is no model"
    least = ("GENERATION", "SHARE", "SERVED")
    return render(HEADS, sorted(rows + faulty, key=lambda row: row[0]), sys.stdout, least=least)


def _is_faulty(entry: Mapping[str, str]) -> bool:
    """Return whether the index gives a reason that concerns a model as a whole."""
    return entry.get("state") == "UNAVAILABLE" and not entry.get("version")


def _faulty(entry: Mapping[str, str]) -> tuple[str, ...]:
    return (entry["name"], "-", entry.get("state", "-"), "-", "-", "-", "-", entry["reason"])


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    notes = [*(["pinned"] if item["is_pinned"] else []), *([item["reason"]] if item["reason"] else [])]
    return (
        item["name"],
        str(item["version"]),
        item["state"],
        str(item["generation"]) if item["generation"] else "-",
        moment(item["since_s"]) if item["since_s"] else "-",
        str(item["served_count"]),
        f"{item['share']:.0%}",
        "; ".join(notes),
    )


def moment(time_s: float) -> str:
    """Return a unix time as the clock on this machine's wall tells it."""
    return datetime.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S")
