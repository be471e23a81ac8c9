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
from edge_server.cli.console import render
from edge_server.cli.options import CommandParser

COLUMN_TITLES = ("MODEL", "VERSION", "STATE", "GENERATION", "SINCE", "SERVED", "SHARE", "REASON")


def run(arguments: Sequence[str]) -> int:
    """Print the versions of the models of the server at `--url`. Return 0, or 1 if the server does not answer."""
    parser = CommandParser(
        prog="edge-server models",
        description="Show all versions of the models of a running server. SINCE is the time of the last state change. "
        "SERVED counts requests since the version was loaded. SHARE is its share of the requests without a version.",
        allow_abbrev=False,
    )
    parser.hints = dict.fromkeys(("-v", "--verbose"), "; tensors and load times are in edge-server status -v")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="show only this model")
    parser.add_argument("--json", action="store_true", help="print the server's JSON response")
    http_client.add_options(parser)
    options = parser.parse_args(arguments)
    query = "" if options.model is None else "?" + urllib.parse.urlencode({"model": options.model})
    try:
        text = _text(options, "/edge/v1/versions" + query)
    except http_client.Refused as error:
        guess = http_client.nearest_model(options, options.model, error) if options.model is not None else ""
        print(f"edge-server models: {error}{guess}", file=sys.stderr)
        return 1
    except (*http_client.NO_ANSWER, KeyError, TypeError) as error:
        print(f"edge-server models: {http_client.no_answer(options, error)}", file=sys.stderr)
        return 1
    print(text)
    return 0


def _text(options: argparse.Namespace, path: str) -> str:
    """Return the table or the JSON text.

    A folder without versions, or with an invalid configuration, appears only in the repository index.
    """
    if options.json:
        return json.dumps(http_client.request_json(options, path), indent=1)
    index = http_client.request_json(options, "/v2/repository/index", {})
    # Entries without a version report a problem of the model as a whole.
    faulty: list[tuple[str, ...]] = [
        (entry["name"], "-", "UNAVAILABLE", "-", "-", "-", "-", entry["reason"])
        for entry in index
        if entry.get("state") == "UNAVAILABLE" and not entry.get("version") and options.model in (None, entry["name"])
    ]
    try:
        # Skip versions of a faulty model that were never loaded: the row of the model has the reason.
        names = {row[0] for row in faulty}
        versions = http_client.request_json(options, path)["versions"]
        rows = [_row(item) for item in versions if item["generation"] or item["name"] not in names]
    except http_client.Refused:
        if not faulty:
            raise
        rows = []
    if not rows and not faulty:
        return "there is no model"
    rows = sorted(rows + faulty, key=lambda row: row[0])
    optional = ("REASON", "GENERATION", "SHARE", "SERVED")
    return render(COLUMN_TITLES, rows, sys.stdout, optional=optional, stacked=("REASON",))


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    notes = [*(["pinned"] if item["is_pinned"] else []), *([item["reason"]] if item["reason"] else [])]
    return (
        item["name"],
        str(item["version"]),
        item["state"],
        str(item["generation"]) if item["generation"] else "-",
        format_local_time(item["since_s"]) if item["since_s"] else "-",
        str(item["served_count"]),
        f"{item['share']:.0%}",
        "; ".join(notes),
    )


def format_local_time(time_s: float) -> str:
    """Return a Unix time as date and time in the local time zone."""
    return datetime.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S")
