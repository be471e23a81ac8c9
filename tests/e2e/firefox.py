"""Firefox, driven by WebDriver BiDi (https://w3c.github.io/webdriver-bidi/), which needs no driver program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PATIENCE_S = 60.0
_PREFERENCES = """
user_pref("remote.prefs.recommended", true);
user_pref("remote.active-protocols", 1);
"""


class Firefox:
    """One window. `problems` has the errors and warnings of its console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._command_id = 0
        self._context = ""

    async def begin(self) -> None:
        await self.command("session.new", capabilities={})
        await self.command("session.subscribe", events=["log.entryAdded"])
        tree = await self.command("browsingContext.getTree")
        self._context = tree["contexts"][0]["context"]

    async def command(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result."""
        self._command_id += 1
        await self._socket.send_json({"id": self._command_id, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE_S)
            entry = message.get("params", {})
            if message.get("method") == "log.entryAdded" and entry["level"] in ("error", "warn"):
                self.problems.append(f"{entry['level']}: {entry['text']}")
            if message.get("id") == self._command_id:
                assert message["type"] == "success", message
                return message["result"]

    async def open(self, url: str) -> None:
        await self.command("browsingContext.navigate", context=self._context, url=url, wait="complete")

    async def look(self, width: int, height: int) -> None:
        """Set the size of the window."""
        size = {"width": width, "height": height}
        await self.command("browsingContext.setViewport", context=self._context, viewport=size)

    async def run(self, expression: str) -> Any:
        """Return the value of an expression: a number, a text, a boolean or None."""
        target = {"context": self._context}
        found = await self.command("script.evaluate", expression=expression, target=target, awaitPromise=True)
        assert found["type"] == "success", found
        return found["result"].get("value")

    async def wait(self, expression: str) -> Any:
        """Return the value of an expression once it is true."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + PATIENCE_S
        while not (value := await self.run(expression)):
            if loop.time() > end_s:
                text = await self.run("document.body.innerText")
                pytest.fail(f"{expression} never became true; the page says:\n{text}\n{self.problems}")
            await asyncio.sleep(0.05)
        return value


@contextlib.asynccontextmanager
async def open_firefox(folder: Path) -> AsyncIterator[Firefox]:
    """Yield a headless Firefox with its files in `folder`. Skips the test without one."""
    program = os.environ.get("EDGE_TEST_FIREFOX", "")
    if not program:
        pytest.skip("no Firefox: tests/e2e/fetch_firefox.sh fetches one and prints the variables to set")
    (folder / "user.js").write_text(_PREFERENCES)
    libraries = [os.environ.get(f"EDGE_TEST_{name}_LIBRARIES", "") for name in ("FIREFOX", "CHROMIUM")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "HOME": str(folder), "no_proxy": "127.0.0.1"}
    command = [program, "--headless", "--no-remote", "--profile", str(folder), "--remote-debugging-port=0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = await _address(process, folder / "WebDriverBiDiServer.json")
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
            firefox = Firefox(socket)
            await firefox.begin()
            yield firefox
    finally:
        process.terminate()
        process.wait(30)


async def _address(process: subprocess.Popen[bytes], file: Path) -> str:
    """Return the address that Firefox writes into its profile once it listens."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + PATIENCE_S
    while loop.time() < end_s:
        assert process.poll() is None, "Firefox ended"
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            found = json.loads(file.read_text())
            return f"ws://{found['ws_host']}:{found['ws_port']}/session"
        await asyncio.sleep(0.05)
    pytest.fail("Firefox opened no port for WebDriver BiDi")
