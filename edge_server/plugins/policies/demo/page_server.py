"""Page of the demonstration: shows arms as they move, over server-sent events."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from edge_server.plugins.policies.demo.arm import PERIOD_S, Arm, positions, target
from edge_server.plugins.policies.demo.loop import LoopReport

_EVERY_S = 0.04
_PAGE = Path(__file__).with_name("page.html")


class ShownArm:
    """An arm on the page. Its loop calls `report` for each tick, on its own thread."""

    def __init__(self, name: str, arm: Arm) -> None:
        self.name = name
        self.arm = arm
        self.newest = LoopReport(0, 0, 0.0, 0.0)
        self._dry_until_s = 0.0

    def report(self, report: LoopReport) -> None:
        if report.dry_ticks > self.newest.dry_ticks:
            self._dry_until_s = self.arm.time_s + 0.3  # long enough to be seen
        self.newest = report

    def state(self) -> dict[str, Any]:
        arm = self.arm
        elbow, tip = positions(arm.angles)
        return {
            "name": self.name, "points": [[0, 0], elbow.tolist(), tip.tolist()], "target": target(arm.time_s).tolist(),
            "error": 1000 * arm.error_m(), "mean": self.newest.error_mm, "dry": self.newest.dry_ticks,
            "isDry": arm.time_s < self._dry_until_s,
        }  # fmt: skip


class ArmPage:
    """Serves the page on this machine, from `start` to `stop`, on a thread of its own."""

    def __init__(self, arms: list[ShownArm], about: str, port: int) -> None:
        """`port` 0: any free one."""
        self._arms = arms
        self._about = about
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="arm-page", daemon=True)

    def start(self) -> None:
        """Raises OSError for a port that is taken."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        application = web.Application()
        application.router.add_get("/", self._page)
        application.router.add_get("/state", self._states)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _page(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(_PAGE)

    async def _states(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        fixed = {"about": self._about, "eight": target(np.linspace(0, PERIOD_S, 100)).tolist()}
        try:
            while True:
                state = json.dumps({**fixed, "arms": [arm.state() for arm in self._arms]})
                await response.write(f"data: {state}\n\n".encode())
                await asyncio.sleep(_EVERY_S)
        except ConnectionError:
            return response  # the browser has left
