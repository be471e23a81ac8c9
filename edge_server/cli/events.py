"""`edge-server events`: print the events of a running server."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from edge_server.cli import http_client
from edge_server.cli.models import moment

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0
_SILENCE_LIMIT_S = 45.0
"""The server sends a comment every 15 s: after three of these without a word, the line is dead."""

Words = Callable[[Mapping[str, Any]], str]

_RUN_HEADER = "Edge-Server-Run"
_HEAD_FIELDS = ("number", "time_s", "kind", "model", "version", "generation", "reason")
_MAY_PASS = (429, 502, 503, 504)
"""Statuses that do not last: too many followers, a proxy whose server is being restarted."""


def run(arguments: Sequence[str]) -> int:
    """Print events until interrupted, or with --no-follow those remembered; 0 when that worked, 1 when not."""
    parser = argparse.ArgumentParser(
        prog="edge-server events",
        description="Print what happens in a running server: models loading, serving, failing, draining, unloaded, "
        "pinned. Begins with what it remembers and goes on until interrupted, over restarts of the server too.",
        allow_abbrev=False,
    )
    parser.add_argument("--after", type=_number, default=0, metavar="N", help="leave out events up to number N")
    parser.add_argument("--follow", action=argparse.BooleanOptionalAction, default=True, help="wait for more to come")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    http_client.add_options(parser)
    options = parser.parse_args(arguments)
    words = _in_json if options.json else _in_words
    try:
        return EventFollower(options, words).follow() if options.follow else _list(options, words)
    except KeyboardInterrupt:
        return 0
    except OutputClosed:
        # The interpreter's own flush at the end must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except http_client.Refused as error:
        print(f"edge-server events: {error}", file=sys.stderr)
    except http_client.NO_ANSWER as error:
        print(f"edge-server events: no answer from {options.url}: {http_client.reason_of(error)}", file=sys.stderr)
    return 1


class OutputClosed(Exception):
    """Whoever read the output has enough of it. Told apart from a connection to the server that broke."""


def _list(options: argparse.Namespace, words: Words) -> int:
    for event in http_client.ask(options, f"/edge/v1/events?after={options.after}&follow=false"):
        _print(words(event))
    return 0


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise OutputClosed from None


class EventFollower:
    """Reads the stream and, when the line breaks, goes on where it was, waiting longer after each failure in a row."""

    def __init__(self, options: argparse.Namespace, words: Words) -> None:
        self._options = options
        self._words = words
        self._after: int = options.after
        self._run_id = ""
        self._failures = 0

    def follow(self) -> int:
        """Go on until an exception: Refused for good, KeyboardInterrupt, ReaderLeft."""
        while True:
            try:
                if not self._read():
                    continue
                reason = "the server ended the stream"
            except http_client.Refused as error:
                if error.status not in _MAY_PASS:
                    raise
                reason = str(error)
            except http_client.NO_ANSWER as error:
                if isinstance(error, ValueError) and not self._run_id:
                    raise  # an address that is none, or of something else: trying again cannot help
                reason = http_client.reason_of(error)
            if self._failures == 0:
                print(f"edge-server events: {self._options.url}: {reason}; trying again", file=sys.stderr, flush=True)
            time.sleep(min(FIRST_WAIT_S * 2**self._failures, LONGEST_WAIT_S))
            self._failures = min(self._failures + 1, 10)

    def _read(self) -> bool:
        """Print events until the stream ends. False when the server was started anew and must be read from 0."""
        path = f"/edge/v1/events?after={self._after}"
        with http_client.open_answer(self._options, path, timeout_s=_SILENCE_LIMIT_S) as answer:
            run_id = answer.headers.get(_RUN_HEADER, "")
            if self._run_id not in ("", run_id):
                self._run_id, self._after = run_id, 0
                return False
            self._run_id = run_id
            self._failures = 0
            for event in events_of(answer):
                self._receive(event)
        return True

    def _receive(self, event: Mapping[str, Any]) -> None:
        number = int(event["number"])
        missed = number - self._after - 1
        if missed > 0 and self._after > 0:
            print(f"edge-server events: {missed} event(s) were missed", file=sys.stderr, flush=True)
        _print(self._words(event))
        self._after = number


def events_of(lines: IO[bytes] | Any) -> Iterator[Mapping[str, Any]]:
    """Yield the data of each server-sent event. Raises ValueError for data that is no JSON object."""
    data: list[bytes] = []
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            event = json.loads(b"\n".join(data))
            if not isinstance(event, dict) or "number" not in event:
                raise ValueError("what came is no event")
            yield event
            data.clear()


def _in_json(event: Mapping[str, Any]) -> str:
    return json.dumps(event)


def _in_words(event: Mapping[str, Any]) -> str:
    words = [moment(event["time_s"]), f"{event['kind']:16}"]
    if "model" in event:
        words.append(str(event["model"]))
    if "version" in event:
        words.append(f"version {event['version']}")
    if "generation" in event:
        words.append(f"generation {event['generation']}")
    words += [f"{key}={value}" for key, value in event.items() if key not in _HEAD_FIELDS and value is not None]
    line = " ".join(words).rstrip()
    line += f": {event['reason']}" if event.get("reason") else ""
    # A reason may quote a damaged file; nothing in it may steer the terminal.
    return "".join(char if char.isprintable() else " " for char in line)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got '{text}'")
    return int(text)
