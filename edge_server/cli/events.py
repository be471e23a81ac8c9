"""`edge-server events`: print the events of a running server, such as loads, failures and throttling."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from edge_server.cli import http_client
from edge_server.cli.models import format_local_time
from edge_server.cli.options import CommandParser, natural_number

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 15.0
_SILENCE_LIMIT_S = 45.0
"""The server sends a comment every 15 s. If three are missing, the connection is broken."""

EventFormat = Callable[[Mapping[str, Any]], str]

_RUN_HEADER = "Edge-Server-Run"
_LEADING_FIELDS = ("number", "time_s", "kind", "model", "version", "generation", "reason")
_RETRY_STATUSES = (429, 502, 503, 504)
"""Temporary errors: too many followers, or a proxy whose server is restarting."""


def run(arguments: Sequence[str]) -> int:
    """Print events until interrupted, or with --no-follow only past events. Return 0 on success, 1 on failure."""
    options = _parser().parse_args(arguments)
    event_format = json.dumps if options.json else format_event
    try:
        return EventFollower(options, event_format).follow() if options.follow else _print_past(options, event_format)
    except KeyboardInterrupt:
        return 0
    except OutputClosed:
        # Prevents an error message when the interpreter flushes the output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except http_client.Refused as error:
        print(f"edge-server events: {error}", file=sys.stderr)
    except http_client.NO_ANSWER as error:
        print(f"edge-server events: {http_client.no_answer(options, error)}", file=sys.stderr)
    return 1


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="edge-server events",
        description="Print the events of a running server, such as a model that loads, fails, drains or is pinned. "
        "Starts with past events and continues until interrupted, also when the server restarts.",
        allow_abbrev=False,
    )
    parser.add_argument("--after", type=natural_number, default=0, metavar="N", help="skip events up to number N")
    parser.add_argument("--follow", action=argparse.BooleanOptionalAction, default=True, help="wait for new events")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    http_client.add_options(parser)
    return parser


class OutputClosed(Exception):
    """The reader of the output has closed it. Differs from a broken connection to the server."""


def _print_past(options: argparse.Namespace, event_format: EventFormat) -> int:
    for event in http_client.request_json(options, f"/edge/v1/events?after={options.after}&follow=false"):
        _print_line(event_format(event))
    return 0


def _print_line(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise OutputClosed from None


class EventFollower:
    """Prints the event stream. After a broken connection, reconnects with increasing delay and continues after the
    last event."""

    def __init__(self, options: argparse.Namespace, event_format: EventFormat) -> None:
        self._options = options
        self._event_format = event_format
        self._after: int = options.after
        self._run_id = ""
        self._failures = 0

    def follow(self) -> int:
        """Print events until an exception: Refused for a permanent error, KeyboardInterrupt, or OutputClosed."""
        while True:
            try:
                if not self._print_stream():
                    continue
                reason = "the server ended the stream"
            except http_client.Refused as error:
                if error.status not in _RETRY_STATUSES:
                    raise
                reason = str(error)
            except http_client.NO_ANSWER as error:
                if isinstance(error, ValueError) and not self._run_id:
                    raise  # an invalid address, or no edge-server: a retry cannot help
                reason = http_client.describe_failure(error)
            if self._failures == 0:
                print(f"edge-server events: {self._options.url}: {reason}; trying again", file=sys.stderr, flush=True)
            time.sleep(min(FIRST_WAIT_S * 2**self._failures, MAX_WAIT_S))
            self._failures = min(self._failures + 1, 10)

    def _print_stream(self) -> bool:
        """Print events until the stream ends. Return False if the server has restarted and events restart at 0."""
        path = f"/edge/v1/events?after={self._after}"
        with http_client.open_response(self._options, path, timeout_s=_SILENCE_LIMIT_S) as response:
            run_id = response.headers.get(_RUN_HEADER, "")
            if self._run_id not in ("", run_id):
                self._run_id, self._after = run_id, 0
                return False
            self._run_id = run_id
            self._failures = 0
            for event in find_events(response):
                self._print_event(event)
        return True

    def _print_event(self, event: Mapping[str, Any]) -> None:
        number = int(event["number"])
        missed = number - self._after - 1
        if missed > 0 and self._after > 0:
            print(f"edge-server events: {missed} event(s) were missed", file=sys.stderr, flush=True)
        _print_line(self._event_format(event))
        self._after = number


def find_events(lines: IO[bytes] | Any) -> Iterator[Mapping[str, Any]]:
    """Yield the data of each server-sent event. Raises ValueError for data that is no JSON object with a number."""
    data: list[bytes] = []
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            event = json.loads(b"\n".join(data))
            if not isinstance(event, dict) or "number" not in event:
                raise ValueError("the data is no event")
            yield event
            data.clear()


def format_event(event: Mapping[str, Any]) -> str:
    parts = [format_local_time(event["time_s"]), f"{event['kind']:16}"]
    if "model" in event:
        parts.append(str(event["model"]))
    if "version" in event:
        parts.append(f"version {event['version']}")
    if "generation" in event:
        parts.append(f"generation {event['generation']}")
    parts += [f"{key}={value}" for key, value in event.items() if key not in _LEADING_FIELDS and value is not None]
    line = " ".join(parts).rstrip()
    line += f": {event['reason']}" if event.get("reason") else ""
    # A reason may quote a damaged file; remove control characters for the terminal.
    return "".join(char if char.isprintable() else " " for char in line)
