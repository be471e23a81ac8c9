"""Servers of boxes that are asked over HTTP for what `edge-server status` shows."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from edge_server.cli import http_client
from edge_server.cli.status import NO_REPORT, read_report
from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.reports.box_report import BoxReport, check_follow

MAX_HOSTS = 1000


class HttpBoxes:
    """The servers at `urls`, as `read_hosts` returns them."""

    def __init__(self, urls: Sequence[str], options: argparse.Namespace) -> None:
        """`options`: those of `http_client.add_request_options`."""
        self._urls = urls
        self._options = options

    def read(self) -> list[BoxReport]:
        """Ask all servers at the same time. Return the report of each, in their order.

        --timeout limits the time for all answers of a server. A thread that still waits then is left behind, as a
        daemon.
        """
        answers: dict[str, BoxReport] = {}

        def ask(url: str) -> None:
            answers[url] = self._ask(url)

        threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in self._urls]
        for thread in threads:
            thread.start()
        end_s = time.monotonic() + self._options.timeout
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        late = f"no complete answer within {self._options.timeout:g} s"
        return [answers.get(url) or BoxReport(url, late, None) for url in self._urls]

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    def _ask(self, url: str) -> BoxReport:
        try:
            report = read_report(argparse.Namespace(**{**vars(self._options), "url": url}))
            if "follow" in report:
                report["follow"] = check_follow(report["follow"])
            return BoxReport(url, "", report)
        except (http_client.Refused, InvalidRequest) as error:
            return BoxReport(url, str(error), None)
        except NO_REPORT as error:
            return BoxReport(url, http_client.describe_failure(error), None)


def read_lines(given: Sequence[str]) -> list[str]:
    """Return the texts, and in place of each that names a file its lines without comments, each once.

    Raises ArgumentTypeError.
    """
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
    return list(dict.fromkeys(texts))


def read_hosts(given: Sequence[str]) -> list[str]:
    """Return the URLs of hosts and of files with hosts, each once. Raises ArgumentTypeError."""
    urls: list[str] = []
    for text in read_lines(given):
        url = http_client.server_url(text)
        if url not in urls:
            urls.append(url)
    if not 0 < len(urls) <= MAX_HOSTS:
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_HOSTS} hosts, got {len(urls)}")
    return urls
