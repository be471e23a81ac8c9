"""Command `edge-server chat`: talk to a language model of a running server in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections.abc import Generator, Sequence
from http.client import HTTPResponse
from typing import Any

from edge_server.cli import http_client
from edge_server.cli.console import clean
from edge_server.cli.options import CommandParser, float_range, int_range

_PROMPT = "> "
_LOAD_TIMEOUT_S = 600.0
"""Longest time to wait for a model that is being loaded."""
_POLL_S = 0.5
_DIM, _PLAIN = "\033[2m", "\033[0m"


def run(arguments: Sequence[str]) -> int:
    """Chat until the input ends, or answer one question; 0 when that worked, 1 when not."""
    parser = _parser()
    options = parser.parse_args(arguments)
    chat = Chat(options)
    try:
        names = [] if options.model is not None else _find_language_models(options)
        if not names:
            _wait_while_loading(options)
        if options.model is None:
            names = names or _find_language_models(options)
            if len(names) != 1:
                found = clean(", ".join(names)) or "none"
                parser.error(f"the following arguments are required: MODEL; language models that serve there: {found}")
            (options.model,) = names
        if options.prompt is not None or not sys.stdin.isatty():
            chat.ask(sys.stdin.read() if options.prompt is None else options.prompt)
            return 0
        return _talk(chat)
    except (http_client.Refused, BadAnswer) as error:
        print(f"edge-server chat: {error}", file=sys.stderr)
    except http_client.NO_ANSWER as error:
        print(f"edge-server chat: {http_client.no_answer(options, error)}", file=sys.stderr)
    return 1


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="edge-server chat",
        description="Chat with a language model of a running server. Ctrl-C stops an answer; Ctrl-D ends the chat. "
        "Without a terminal the standard input is one question.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="default: the server's language model, if it has one alone"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="ask this one question, and end")
    parser.add_argument("--system", metavar="TEXT", help="system message, before the first question")
    parser.add_argument("--max-tokens", type=int_range(1), metavar="N", help="longest answer; default: what fits")
    parser.add_argument(
        "--temperature", type=float_range(0, 100), metavar="T",
        help="0: always the most likely token; default: what the model's files state, else 0.8",
    )  # fmt: skip
    parser.add_argument("--seed", type=int_range(0), metavar="N", help="the same seed gives the same answers")
    http_client.add_options(parser)
    return parser


def _find_language_models(options: argparse.Namespace) -> list[str]:
    """Return the names of models that serve for text. Raises Refused and the errors in NO_ANSWER."""
    listed = http_client.request_json(options, "/v1/models")
    try:
        return [str(model["id"]) for model in listed["data"]]
    except (KeyError, TypeError):
        raise ValueError("no list of models as in OpenAI's API") from None


def _wait_while_loading(options: argparse.Namespace) -> None:
    """Say that the model is loaded, and wait until it is or has failed. Raises Refused and the errors in NO_ANSWER."""
    end_s = time.monotonic() + _LOAD_TIMEOUT_S
    is_said = False
    while (names := _loading_models(options)) and time.monotonic() < end_s:
        if not is_said:
            is_said = True
            print(f"edge-server chat: waiting: the server loads {clean(', '.join(names))}", file=sys.stderr)
        time.sleep(_POLL_S)


def _loading_models(options: argparse.Namespace) -> list[str]:
    """Return the model if it is being loaded and no version of it serves; without a name, all such models."""
    try:
        index = http_client.request_json(options, "/v2/repository/index", {})
    except http_client.Refused:
        return []  # the key may be for chats alone
    found: dict[str, set[str]] = {}
    for entry in index:
        found.setdefault(str(entry.get("name", "")), set()).add(str(entry.get("state", "")))
    return [
        name
        for name, states in found.items()
        if options.model in (None, name) and "LOADING" in states and "READY" not in states
    ]


def _talk(chat: Chat) -> int:
    with contextlib.suppress(ImportError):  # a Python may be built without it
        importlib.import_module("readline")  # lets `input` edit lines
    while True:
        try:
            question = input(_PROMPT)
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not question.strip():
            continue
        try:
            chat.ask(question)
        except KeyboardInterrupt:
            print()
        except (http_client.Refused, BadAnswer) as error:
            print(f"error: {error}")


class BadAnswer(Exception):
    """The server ended the stream of an answer with an error."""


class Chat:
    """One conversation. `ask` prints the answer while it comes, and keeps question and answer for the next ones."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._messages: list[dict[str, str]] = []
        if options.system is not None:
            self._messages.append({"role": "system", "content": options.system})

    def ask(self, question: str) -> None:
        """Raises Refused, BadAnswer, NO_ANSWER's errors, and KeyboardInterrupt after Ctrl-C: the server then stops.

        What was printed by then stays in the conversation.
        """
        messages = [*self._messages, {"role": "user", "content": question}]
        answer, is_reasoning = "", False
        try:
            with contextlib.closing(self._stream(messages)) as pieces:
                for reasoning, text in pieces:
                    if reasoning:
                        # Not part of the answer, which may be written to a file.
                        words = f"{_DIM}{_safe(reasoning)}{_PLAIN}" if sys.stderr.isatty() else reasoning
                        print(words, end="", file=sys.stderr, flush=True)
                        is_reasoning = True
                        continue
                    if is_reasoning:
                        print("\n", file=sys.stderr, flush=True)
                        is_reasoning = False
                    print(_safe(text) if sys.stdout.isatty() else text, end="", flush=True)
                    answer += text
        finally:
            if answer:
                self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _stream(self, messages: Sequence[dict[str, str]]) -> Generator[tuple[str, str]]:
        """Yield the pieces of reasoning and answer, of which one is empty, then print a line end and the statistics."""
        options = self._options
        body: dict[str, Any] = {
            "model": options.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for name in ("max_tokens", "temperature", "seed"):
            if getattr(options, name) is not None:
                body[name] = getattr(options, name)
        begin_s, first_s, usage = time.monotonic(), 0.0, None
        # The server stops the model when the connection closes.
        with self._open(body) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise BadAnswer(event["error"]["message"])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    delta = choice["delta"]
                    reasoning, text = delta.get("reasoning_content") or "", delta.get("content") or ""
                    if reasoning or text:
                        first_s = first_s or time.monotonic()
                    yield from [(reasoning, "")] if reasoning else []
                    yield from [("", text)] if text else []
        print(flush=True)
        # Servers of others may count one of the two only.
        if usage is not None and {"prompt_tokens", "completion_tokens"} <= usage.keys():
            _print_stats(usage, begin_s, first_s or time.monotonic(), time.monotonic())

    def _open(self, body: dict[str, Any]) -> HTTPResponse:
        options = self._options
        try:
            return http_client.open_response(options, "/v1/chat/completions", body)
        except http_client.Refused as error:
            guess = http_client.nearest_model(options, options.model, error)
            raise http_client.Refused(error.status, f"{error}{guess}") from None


def _safe(text: str) -> str:
    """Return the text without characters that would control a terminal."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")


def _print_stats(usage: dict[str, int], begin_s: float, first_s: float, end_s: float) -> None:
    made = usage["completion_tokens"]
    speed = f", {(made - 1) / (end_s - first_s):.1f} tokens a second" if made > 1 and end_s > first_s else ""
    words = (
        f"{usage['prompt_tokens']} tokens of prompt, {made} of answer, the first after "
        f"{(first_s - begin_s) * 1000:.0f} ms{speed}"
    )
    # Not part of the answer, which may be written to a file.
    print(f"{_DIM}{words}{_PLAIN}" if sys.stderr.isatty() else words, file=sys.stderr)
