"""Chromium, driven through chromedriver by the W3C WebDriver protocol (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 60.0
_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>
<dir>{}</dir><dir>/usr/share/fonts</dir><cachedir>{}</cachedir>
<match><edit name="family" mode="append" binding="strong"><string>Liberation Sans</string></edit></match>
</fontconfig>"""
"""All families of fonts that are not there become one."""


class Browser:
    """One window. `run` executes the body of a JavaScript function with `arguments` and returns its value."""

    def __init__(self, driver: str, session: str) -> None:
        self._base = f"{driver}/session/{session}"

    def open(self, url: str) -> None:
        ask("POST", f"{self._base}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return ask("POST", f"{self._base}/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str, *arguments: Any) -> Any:
        """Execute a script that calls its last argument with the value."""
        return ask("POST", f"{self._base}/execute/async", {"script": script, "args": list(arguments)})

    def wait(self, expression: str, *arguments: Any) -> Any:
        """Return the value of an expression once it is true."""
        end = time.monotonic() + PATIENCE_S
        while not (value := self.run(f"return {expression}", *arguments)):
            if time.monotonic() > end:
                pytest.fail(f"{expression} never became true; the page says:\n{self.text()}\n{self.console()}")
            time.sleep(0.05)
        return value

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def click(self, css: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", css)

    def type(self, css: str, text: str) -> None:
        """Press the keys of a text in an element. WebDriver's "\ue007" is Enter."""
        found = ask("POST", f"{self._base}/element", {"using": "css selector", "value": css})
        ask("POST", f"{self._base}/element/{next(iter(found.values()))}/value", {"text": text})

    def console(self) -> list[str]:
        """Return the messages of the console, errors and warnings, since the last call."""
        found = ask("POST", f"{self._base}/se/log", {"type": "browser"})
        return [f"{item['level']}: {item['message']}" for item in found]

    def command(self, name: str, **parameters: Any) -> Any:
        """Send a command of the Chrome DevTools Protocol."""
        return ask("POST", f"{self._base}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def look(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, *, quality: int = 85) -> None:
        shot = self.command("Page.captureScreenshot", format=path.suffix[1:].replace("jpg", "jpeg"), quality=quality)
        path.write_bytes(base64.b64decode(shot["data"]))


def ask(method: str, url: str, body: object = None) -> Any:
    """Send a WebDriver command and return its value."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]
    except urllib.error.HTTPError as error:
        with error:
            pytest.fail(f"{method} {url}: {error.read().decode()[:2000]}")


@contextlib.contextmanager
def open_browser(folder: Path, *arguments: str) -> Iterator[Browser]:
    """Yield a headless browser with its files in `folder`, started with `arguments`. Skips the test without one."""
    names = ("CHROMIUM", "CHROMEDRIVER", "CHROMIUM_LIBRARIES", "CHROMIUM_FONTS")
    program, driver, libraries, fonts = (os.environ.get(f"EDGE_TEST_{name}", "") for name in names)
    if not program:
        pytest.skip("no browser: tests/e2e/fetch_chromium.sh fetches one and prints the variables to set")
    (folder / "fonts.conf").write_text(_FONTS.format(fonts, folder / "font_cache"))
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": libraries,
        "FONTCONFIG_FILE": str(folder / "fonts.conf"),
        "HOME": str(folder),
        "no_proxy": "127.0.0.1",
    }
    with (folder / "driver.log").open("wb") as log:
        process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=log, env=environment, text=True)
    try:
        assert process.stdout is not None
        port = next(line.rstrip().rpartition(" ")[2].rstrip(".") for line in process.stdout if "successfully" in line)
        options = {
            "binary": program,
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server",
                     "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}",
                     *arguments],
        }  # fmt: skip
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "WARNING"}}
        base = f"http://127.0.0.1:{port}"
        session = ask("POST", f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(base, session)
        finally:
            ask("DELETE", f"{base}/session/{session}")
    finally:
        process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
