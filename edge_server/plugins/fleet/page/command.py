"""`edge-server fleet page`: show many boxes in a browser, and lead their rollouts there."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import signal
from concurrent.futures import ThreadPoolExecutor

from edge_server.core.exit_code import ExitCode
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.forked_signals import reset_in_forked_children
from edge_server.plugins.fleet.page.box_poller import BoxPoller
from edge_server.plugins.fleet.page.fleet_state import FleetState
from edge_server.plugins.fleet.page.page_server import PageServer
from edge_server.plugins.fleet.page.rollout_state import RolloutState
from edge_server.plugins.fleet.reports.box_options import open_boxes
from edge_server.plugins.fleet.reports.http_boxes import read_hosts

REFRESH_S = 5.0
"""Time between two looks at the files of boxes and at the signed repository."""
MQTT_INTERVAL_S = 2.0
"""Time between two looks at what a broker has sent."""
_MIN_KEY_CHARS = 16
_MAX_KEY_BYTES = 4096


def run(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM. Return 0.

    Raises EdgeServerError if it cannot start, ArgumentTypeError for files that do not go with a broker.
    """
    if not options.hosts and not options.mqtt:
        raise InvalidRequest("expected --boxes or --mqtt")
    key = _read_key(options)
    return asyncio.run(_serve(options, RolloutState(options.repository, options.keys), key))


def _read_key(options: argparse.Namespace) -> str:
    """Return the key with which browsers lead rollouts, "" if none may."""
    if options.keys is None:
        if options.page_key_file:
            raise InvalidRequest("--page-key-file needs --keys: without them the page leads no rollouts")
        return ""
    if options.repository is None:
        raise InvalidRequest("--keys needs --repository, the folder of the signed repository")
    if not options.page_key_file:
        return secrets.token_urlsafe(24)
    try:
        with options.page_key_file.open("rb") as file:
            text: str = file.read(_MAX_KEY_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--page-key-file={options.page_key_file} cannot be read: {error}") from None
    if len(text) < _MIN_KEY_CHARS or not text.isprintable() or " " in text:
        raise InvalidRequest(
            f"--page-key-file={options.page_key_file}: expected one line of {_MIN_KEY_CHARS} characters or more"
        )
    return text


async def _serve(options: argparse.Namespace, rollouts: RolloutState, key: str) -> int:
    state = FleetState()
    source = MqttSource(options, state) if options.mqtt else HttpSource(options, state)
    server = PageServer(state, rollouts, key, lambda: source.problem, options.page_allowed_host)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    reset_in_forked_children((signal.SIGINT, signal.SIGTERM))
    try:
        await source.refresh()
        port = await server.start(options.page_address, options.page_port)
        host = f"[{options.page_address}]" if ":" in options.page_address else options.page_address
        print(f"the fleet is at http://{host}:{port}/", flush=True)
        if options.page_key_file:
            print(f"rollouts are led there with the key in {options.page_key_file}", flush=True)
        elif key:
            print(f"rollouts are led from http://{host}:{port}/#key={key}", flush=True)
        while not ended.is_set():
            await loop.run_in_executor(None, rollouts.refresh)
            await source.refresh()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended.wait(), REFRESH_S)
    finally:
        await server.stop()
        await source.close()
    return ExitCode.OK


class MqttSource:
    """Boxes that report to a broker of MQTT. They are read on a thread of their own."""

    def __init__(self, options: argparse.Namespace, state: FleetState) -> None:
        self._boxes = open_boxes(options)
        self._state = state
        self._thread = ThreadPoolExecutor(1, "fleet-mqtt")
        self._task: asyncio.Task[None] | None = None
        self.problem = ""

    async def refresh(self) -> None:
        """Begin to read, at first."""
        self._task = self._task or asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                reports = await loop.run_in_executor(self._thread, self._boxes.read)
            except EdgeServerError as error:
                self.problem = f"{error.message}; what is shown below was reported before"
            else:
                self.problem = ""
                self._state.set_boxes([report.name for report in reports])
                for report in reports:
                    self._state.set_report(report)
                    # Thousands of long reports would hold up the page.
                    await asyncio.sleep(0)
            await asyncio.sleep(MQTT_INTERVAL_S)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._boxes.close)
        self._thread.shutdown()


class HttpSource:
    """Servers that are asked over HTTP, from hosts and files of hosts, which are read again."""

    def __init__(self, options: argparse.Namespace, state: FleetState) -> None:
        self._given = options.hosts
        self._state = state
        self._poller = BoxPoller(options, state.set_report)
        self._urls: list[str] = []
        self.problem = ""

    async def refresh(self) -> None:
        """Have the boxes that the files name now; with a file that cannot be read, those from before.

        Raises InvalidRequest at first.
        """
        try:
            urls = await asyncio.get_running_loop().run_in_executor(None, read_hosts, self._given)
        except argparse.ArgumentTypeError as error:
            if not self._urls:
                raise InvalidRequest(f"--boxes: {error}") from None
            self.problem = f"--boxes: {error}"
            return
        self.problem = ""
        if urls != self._urls:
            self._poller.set_urls(urls)
            self._state.set_boxes(urls)
            self._urls = urls

    async def close(self) -> None:
        await self._poller.close()
