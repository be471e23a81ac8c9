"""Poller of servers over HTTP: asks each again and again in a task of its own, for what `edge-server status` shows.

A server that hangs, sends without end or sends garbage costs its own task a few seconds and a few hundred kilobytes;
the others are asked meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from edge_server.cli import http_client
from edge_server.cli.status import make_report
from edge_server.plugins.fleet.reports.box_report import BoxReport

log = logging.getLogger(__name__)

MIN_INTERVAL_S = 5.0
"""Least time between two looks at a box."""
MAX_BOXES_PER_S = 25.0
"""Boxes that are asked in a second: many are asked more seldom, at the same cost."""
MAX_ANSWER_BYTES = 1 << 20
"""Most bytes of one answer; a box is asked for four."""
_MAX_OPEN = 300
"""Most boxes that are asked at the same time, each for at most the timeout."""
_MAX_MESSAGE = 300


class _Unusable(Exception):
    """A server answered, and not with what it was asked for."""


class BoxPoller:
    """Asks servers from `set_urls` until `close`. Lives on one event loop. `on_report` gets each report."""

    def __init__(self, options: argparse.Namespace, on_report: Callable[[BoxReport], None]) -> None:
        """`options` are those of `http_client.add_request_options`. Raises InvalidRequest for the files of TLS."""
        self._options = options
        self._on_report = on_report
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_MAX_OPEN)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=1),
            # A small answer could unpack to a large one.
            headers={**dict(options.header), "Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=True,
        )

    def set_urls(self, urls: Sequence[str]) -> None:
        """Ask these servers, and no others. Raises InvalidRequest for a URL that does not go with the files of TLS."""
        contexts = {url: http_client.tls_context(self._options, url) for url in urls}
        for url in set(self._tasks) - set(urls):
            self._tasks.pop(url).cancel()
        for url in urls:
            if url not in self._tasks:
                self._tasks[url] = asyncio.create_task(self._poll(url, contexts[url] or True))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _poll(self, url: str, tls: Any) -> None:
        # Not all at once, and not in step later.
        await asyncio.sleep(random.random() * len(self._tasks) / MAX_BOXES_PER_S)
        # Before Python 3.12, `wait_for` drops a cancellation that comes together with its result.
        while self._tasks.get(url) is asyncio.current_task():
            async with self._slots:
                try:
                    report = await self._ask(url, tls)
                except Exception:
                    # An unforeseen error must not end the looks at a box: it would be shown as it was, for ever.
                    log.exception("a look at %s failed", url)
                    report = BoxReport(url, "the page cannot read it: see the messages of `fleet page`", None)
            if self._tasks.get(url) is asyncio.current_task():
                self._on_report(report)
                interval_s = max(MIN_INTERVAL_S, len(self._tasks) / MAX_BOXES_PER_S)
                await asyncio.sleep(interval_s * (0.9 + 0.2 * random.random()))

    async def _ask(self, url: str, tls: Any) -> BoxReport:
        try:
            return BoxReport(url, "", await asyncio.wait_for(self._read_report(url, tls), self._options.timeout))
        except asyncio.TimeoutError:
            reason = f"no complete answer within {self._options.timeout:g} s"
        except _Unusable as error:
            reason = str(error)
        except (aiohttp.ClientError, OSError) as error:
            reason = http_client.describe_failure(_cause(error))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            reason = http_client.describe_failure(ValueError())
        return BoxReport(url, reason, None)

    async def _read_report(self, url: str, tls: Any) -> dict[str, Any]:
        """Return the report of `edge-server status --json`, without tensors and statistics of models."""
        status, _ = await self._request(url, "/v2/health/ready", tls)
        if status not in (200, 400, 503):
            raise _Unusable(f"HTTP {status} for /v2/health/ready")
        server = await self._get(url, "/v2", tls)
        index = await self._get(url, "/v2/repository/index", tls, method="POST")
        found, body = await self._request(url, "/edge/v1/plugins", tls)
        plugins = json.loads(body).get("plugins", []) if found == 200 else []
        return make_report(url, server["version"], is_ready=status == 200, models=index, plugins=plugins)

    async def _get(self, url: str, path: str, tls: Any, method: str = "GET") -> Any:
        status, body = await self._request(url, path, tls, method)
        if status != 200:
            raise _Unusable(_refusal(status, body))
        return json.loads(body)

    async def _request(self, url: str, path: str, tls: Any, method: str = "GET") -> tuple[int, bytes]:
        data = b"{}" if method == "POST" else None
        headers = {"Content-Type": "application/json"} if data else None
        request = self._session.request(method, url + path, data=data, headers=headers, ssl=tls, allow_redirects=False)
        async with request as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise _Unusable(f"its answer to {path} has more than {MAX_ANSWER_BYTES >> 20} MB")
            return response.status, bytes(body)


def _refusal(status: int, body: bytes) -> str:
    """Return the message of an answer that is an error."""
    if 300 <= status < 400:
        return f"HTTP {status}: it redirects; give the address of the server itself"
    try:
        message = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = ""
    return f"HTTP {status}: {str(message)[:_MAX_MESSAGE]}" if message else f"HTTP {status}"


def _cause(error: Exception) -> BaseException:
    """Return the error that `http_client.describe_failure` has a sentence for."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return error.certificate_error
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return ConnectionResetError()
    if isinstance(error, OSError):
        return error
    return http.client.HTTPException()
