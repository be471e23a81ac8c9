"""Stand-ins for servers of boxes: they answer what `edge-server fleet page` asks for, in the form of a real server, or
misbehave. Many share one thread. Run as a program, it keeps a mixed fleet for a look at the page."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Coroutine
from typing import Any

SITE = "https://models.example.com/site"


def followed(
    model: str, number: int, *, state: str = "installed", reason: str = "", installed: int | None = None
) -> Any:
    """Return what a follower says of a model. `installed`: the release that is, if not the wanted one; 0: none."""
    have = number if installed is None else installed
    return {
        "wanted": f"{model}/{number}.json",
        "state": state,
        "reason": reason,
        "installed": f"{model}/{have}.json" if have else "",
        "digest": f"{number:064x}",
        "wave": "",
        "since_s": 1_790_000_000.0,
    }


class StandIn:
    """One box. Change its fields at any time. `manner` is "", "hang", "endless", "garbage", "refuse" or "close"."""

    def __init__(self, name: str, models: dict[str, Any] | None = None, *, groups: tuple[str, ...] = ()) -> None:
        self.name = name
        self.url = ""
        self.manner = ""
        self.version = "1.0"
        self.is_ready = True
        self.groups = groups
        self.models = {"detector": followed("detector", 2)} if models is None else models
        """Model -> as `followed`."""
        self.index: list[dict[str, str]] = []
        """Entries of models that did not come from the signed repository."""
        self.knows_files = True
        """Whether it gives the SHA-256 of the files of `models`."""
        self.problem = ""
        self.follows = True
        self.heat = ("NORMAL", 45.0, 1.0)
        self.requests: list[str] = []

    def answer(self, path: str) -> tuple[int, Any]:
        if self.manner == "refuse":
            return 403, {"error": "This API is restricted, expecting header 'x-key'"}
        if path == "/v2/health/ready":
            return (200 if self.is_ready else 400), {}
        if path == "/v2":
            return 200, {"name": "edge-server", "version": self.version, "extensions": []}
        if path == "/v2/repository/index":
            numbers = {name: model["installed"].rpartition("/")[2] for name, model in self.models.items()}
            served = [
                {
                    "name": name,
                    "version": "1",
                    "state": "READY",
                    "digest": f"sha256:{int(number.split('.')[0]):064x}" if self.knows_files else "",
                }
                for name, number in numbers.items()
                if number
            ]
            return 200, served + self.index
        if path == "/edge/v1/plugins":
            return 200, {"plugins": self.plugins()}
        return 404, {"error": "Not Found"}

    def plugins(self) -> list[dict[str, Any]]:
        state, temperature_c, share = self.heat
        governor = {"enabled": True, "state": state, "temperature_c": temperature_c, "share": share}
        found = [{"name": "governor", "error": "", "rows": [], "reports": {"governor": governor}}]
        if self.follows:
            row = {
                "title": "follow",
                "state": "ok",
                "text": f"{SITE} as box {self.name}, last complete 2026-11-01 00:00:00",
            }
            follow = {
                "box": self.name,
                "groups": list(self.groups),
                "machines": ["aarch64", "jetson", "orin"],
                "repository": SITE,
                "models": self.models,
                "problem": self.problem,
                "checked_s": 1_790_000_000.0,
            }
            found.append({"name": "fleet", "error": "", "rows": [row], "reports": {"follow": follow}})
        return found


class StandIns:
    """The stand-ins on ports of 127.0.0.1, from the start to `close`."""

    def __init__(self, boxes: list[StandIn]) -> None:
        self.boxes = boxes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers: dict[str, asyncio.Server] = {}
        self._run(self._open())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _open(self) -> None:
        for box in self.boxes:
            server = await asyncio.start_server(
                lambda reader, writer, box=box: self._serve(box, reader, writer), "127.0.0.1", 0
            )
            box.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._servers[box.url] = server

    async def _serve(self, box: StandIn, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                size = 0
                while (field := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = field.decode().partition(":")
                    if name.lower() == "content-length":
                        size = int(value)
                await reader.readexactly(size)
                path = line.split()[1].decode()
                box.requests.append(path)
                if box.manner == "close":
                    return
                if box.manner == "hang":
                    await asyncio.sleep(3600)
                if box.manner == "endless":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
                    while True:
                        writer.write(b"[" * 65536)
                        await writer.drain()
                status, document = box.answer(path)
                body = b'{"\xff[[' if box.manner == "garbage" else json.dumps(document).encode()
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def stop(self, box: StandIn) -> None:
        """Have nothing listen at the box's address. Its connections end with their next request."""
        box.manner = "close"
        self._loop.call_soon_threadsafe(self._servers[box.url].close)

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers.values():
                server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def mixed_fleet(count: int) -> list[StandIn]:
    """Return boxes of which about a sixth is in trouble, in all its kinds, and some are not known to be equal."""
    boxes = []
    for number in range(count):
        line = f"line-{number % 5 + 1}"
        box = StandIn(f"box-{number:03}", groups=(line, "test") if number % 10 == 0 else (line,))
        box.models = {name: followed(name, release) for name, release in (("detector", 4), ("ocr", 12), ("reader", 1))}
        box.heat = ("NORMAL", 40.0 + number % 23, 1.0)
        boxes.append(box)
    slow = "release 'detector/4.json': its median with the sample is 812 ms, at most 500 ms are allowed"
    for box in boxes[3::25]:
        box.models["detector"] = followed("detector", 4, state="failed", reason=slow, installed=3)
    for box in boxes[7::30]:
        box.manner = "hang"
    for box in boxes[11::40]:
        box.heat = ("THROTTLED", 97.5, 0.4)
    for box in boxes[13::35]:
        box.models["ocr"] = followed(
            "ocr",
            12,
            state="waiting",
            reason="'https://models.example.com/site/ocr/1f0c': 40 of 310 MB came",
            installed=11,
        )
    for box in boxes[17::45]:
        box.problem = "the clock of this box is before the newest signed date that it knows; it waits"
    for box in boxes[19::50]:
        box.is_ready = False
        box.index = [
            {"name": "segment", "version": "2", "state": "UNAVAILABLE", "reason": "model.onnx: Protobuf parsing failed"}
        ]
    for box in boxes[23::60]:
        box.follows = False
        box.version = "0.9"
    for box in boxes[29::70]:
        box.manner = "garbage"
    for box in boxes[31::60]:
        box.knows_files = False
    return boxes


if __name__ == "__main__":
    fleet = StandIns(mixed_fleet(int(sys.argv[1])))
    print("\n".join(box.url for box in fleet.boxes), flush=True)
    threading.Event().wait()
