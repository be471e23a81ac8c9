"""`edge-server fleet status`: show many running servers in one table, and which of them serve other versions or
configurations than the rest; and the hosts of `edge-server fleet rollout`.

It asks each server for what `edge-server status` shows. There is no server or database of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_server.cli import expected_versions, http_client
from edge_server.cli.console import render, wrap
from edge_server.cli.options import CommandParser
from edge_server.cli.status import NO_REPORT, read_report
from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.follow import keys_command, rollout_command

COLUMN_TITLES = ("HOST", "STATE", "SERVER", "MODELS", "TEMPERATURE", "WORK ALLOWED", "STREAMS", "DROPPED", "FAILED")
OPTIONAL_COLUMNS = ("STREAMS", "SERVER", "TEMPERATURE")

_DEFAULT_PORT = 8000
_MAX_HOSTS = 1000
_NOT_SERVED = "not served"


def run(arguments: Sequence[str]) -> int:
    """Print the table, or lead a rollout. Return 0 if all servers are ready, serve the same and nothing failed.

    Else return 1.
    """
    parser = CommandParser(prog="edge-server fleet", description="Commands for many servers.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    status = commands.add_parser(
        "status",
        help="show many servers in one table",
        description="Show the status of many running servers in one table, and which differ from most of the others. "
        "The servers are asked at the same time. Exits with 0 if all are ready, serve the same versions of the same "
        "files, no version failed on any and each --expect is met on all, else 1.",
        allow_abbrev=False,
    )
    _add_hosts(status)
    status.add_argument("--json", action="store_true", help="print JSON")
    expected_versions.add_options(status)
    rollout_command.add_parser(commands, _add_hosts)
    keys_command.add_parser(commands)
    options = parser.parse_args(arguments)
    if hasattr(options, "signed_repository"):
        return keys_command.run(options)
    try:
        urls = read_hosts(options.hosts)
    except argparse.ArgumentTypeError as error:
        print(f"edge-server fleet: {error}", file=sys.stderr)
        return 2
    if hasattr(options, "repository"):
        return rollout_command.run(options, _ask_all(urls, options))

    def are_settled(hosts: Sequence[Mapping[str, Any]]) -> bool:
        return _are_well(hosts) and not any(expected_versions.is_loading(host["report"]) for host in hosts)

    hosts = expected_versions.wait_until_well(lambda: _look(urls, options), are_settled, options.wait)
    print(json.dumps({"hosts": hosts}, indent=1) if options.json else "\n".join(_lines(hosts)))
    return 0 if _are_well(hosts) else 1


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "hosts",
        nargs="+",
        metavar="HOST",
        help="HOST, HOST:PORT or https://HOST:PORT (default port 8000), or a file with one on each line; # begins a "
        "comment",
    )
    http_client.add_request_options(parser, timeout_s=5.0)


def _look(urls: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what each server says, in which it differs from most others, and what is wrong with it."""
    answers = _ask_all(urls, options)
    differences = find_differences({url: report for url, report in answers.items() if not isinstance(report, str)})
    return [
        {"url": url, "error": report, "differs": [], "problems": [], "report": None}
        if isinstance(report, str)
        else {
            "url": url,
            "error": "",
            "differs": differences[url],
            "problems": expected_versions.find_failures(report) + expected_versions.find_unmet(report, options.expect),
            "report": report,
        }
        for url, report in answers.items()
    ]


def _are_well(hosts: Sequence[Mapping[str, Any]]) -> bool:
    return not any(host["error"] or host["differs"] or host["problems"] for host in hosts)


def read_hosts(given: Sequence[str]) -> list[str]:
    """Return the URLs of hosts and of files with hosts, each once. Raises ArgumentTypeError."""
    texts: list[str] = []
    for item in given:
        if "://" in item or not Path(item).is_file():
            texts.append(item)
            continue
        try:
            lines = Path(item).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"'{item}' cannot be read: {error}") from None
        texts += [text for line in lines if (text := line.partition("#")[0].strip())]
    urls = list(dict.fromkeys(http_client.server_url(_with_port(text)) for text in texts))
    if not 0 < len(urls) <= _MAX_HOSTS:
        raise argparse.ArgumentTypeError(f"expected 1 to {_MAX_HOSTS} hosts, got {len(urls)}")
    return urls


def _with_port(text: str) -> str:
    is_plain = "://" not in text and (":" not in text or text.endswith("]"))
    return f"{text}:{_DEFAULT_PORT}" if is_plain else text


def _ask_all(urls: Sequence[str], options: argparse.Namespace) -> dict[str, dict[str, Any] | str]:
    """Return for each URL the report, or why there is none.

    --timeout limits the time for all answers of a server. A thread that still waits then is left behind, as a daemon.
    """
    answers: dict[str, dict[str, Any] | str] = {}

    def ask(url: str) -> None:
        try:
            answers[url] = read_report(argparse.Namespace(**{**vars(options), "url": url}))
        except (http_client.Refused, InvalidRequest) as error:
            answers[url] = str(error)
        except NO_REPORT as error:
            answers[url] = http_client.describe_failure(error)

    threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + options.timeout
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    late = f"no complete answer within {options.timeout:g} s"
    return {url: answers.get(url, late) for url in urls}


def find_differences(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return for each server the models, or the server itself, whose served versions are not those of most servers.

    Where no version is the most frequent one, the higher counts as that of the others.
    """
    found: dict[str, list[str]] = {url: [] for url in reports}
    values = {url: _served_versions(report) for url, report in reports.items()}
    for name in sorted({name for served in values.values() for name in served}):
        mine = {url: served.get(name, _NOT_SERVED) for url, served in values.items()}
        if any(value != _NOT_SERVED and "(" not in value for value in mine.values()):
            # One does not know the digest of its files yet, or is too old to tell.
            mine = {url: re.sub(r" \([0-9a-f]+\)", "", value) for url, value in mine.items()}
        counts = Counter(mine.values())
        usual = max(counts, key=lambda value: (counts[value], value != _NOT_SERVED, [len(value), value]))
        for url, value in mine.items():
            if value != usual:
                found[url].append(f"{name}: {value}, most others: {usual}")
    return found


def _served_versions(report: Mapping[str, Any]) -> dict[str, str]:
    """Return model -> its served versions and their files, and the server's own version as "edge-server"."""
    served: dict[str, list[str]] = {}
    for model in report["models"]:
        if model["state"] == "READY":
            # Eight digits: enough to tell files apart, short enough to read. Older servers send none.
            digest = str(model.get("digest", "")).removeprefix("sha256:")[:8]
            served.setdefault(model["name"], []).append(f"version {model['version']}" + (digest and f" ({digest})"))
    versions = {name: ", ".join(sorted(texts)) for name, texts in served.items()}
    return {"edge-server": f"version {report['version']}", **versions}


def _lines(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [render(COLUMN_TITLES, [_row(host) for host in hosts], sys.stdout, optional=OPTIONAL_COLUMNS)]
    for host in hosts:
        name = _host(host["url"])
        if host["error"]:
            lines.append(wrap(f"{name}: {host['error']}", sys.stdout))
        lines += [wrap(f"{name} differs: {text}", sys.stdout) for text in host["differs"]]
        lines += [wrap(f"{name}: {text}", sys.stdout) for text in host["problems"]]
    return lines


def _row(host: Mapping[str, Any]) -> tuple[str, ...]:
    name, report = _host(host["url"]), host["report"]
    if report is None:
        return (name, "NO ANSWER", *[""] * (len(COLUMN_TITLES) - 2))
    names = {model["name"] for model in report["models"] if not expected_versions.is_removed(model)}
    ready = {model["name"] for model in report["models"] if model["state"] == "READY"}
    streams = report.get("streams")
    failed = sum(model["inference_stats"]["fail"]["count"] for model in report["models"] if "inference_stats" in model)
    governor = report.get("governor", {})
    temperature = governor.get("temperature_c")
    is_on = governor.get("enabled", False)
    return (
        name,
        "READY" if report["ready"] else "NOT READY",
        report["version"],
        f"{len(ready)} of {len(names)}",
        "-" if temperature is None else f"{temperature:.0f} °C",
        f"{governor['share']:.0%} {governor['state']}" if is_on else "-",
        "-" if streams is None else str(len(streams)),
        "-" if streams is None else str(sum(sum(stream["dropped"].values()) for stream in streams)),
        str(failed),
    )


def _host(url: str) -> str:
    return url.removeprefix("http://")
