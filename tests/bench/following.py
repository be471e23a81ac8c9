"""Cost of following a signed repository: `python tests/bench/following.py [--rounds=N] [--seconds=N]`, with the extras
test and fleet installed.

Memory and CPU time of a server with --follow beside one without, in turns, while nothing is published; CPU time and
bytes of a look at the repository; then 50 boxes that look at the same moment at one web server in plain Python, with
the CPU time of that web server.
"""

from __future__ import annotations

import argparse
import http.server
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import harness

from edge_server.plugins.fleet.follow.signed_repository import SignedRepository
from edge_server.plugins.fleet.follow.site_files import SiteFiles

BOXES = 50
INTERVAL_S = 1.0
_SETTLE_S = 8.0


class CountingSite:
    """Web server of a folder that counts requests, and the bytes of requests and answers."""

    def __init__(self, folder: Path) -> None:
        self.requests = self.received = self.sent = 0
        site = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(folder))

            def parse_request(self) -> bool:
                is_request = super().parse_request()
                site.requests += 1
                site.received += len(self.raw_requestline) + len(bytes(self.headers))
                return is_request

            def setup(self) -> None:
                super().setup()
                write = self.wfile.write

                def counted(data: Any) -> int:
                    site.sent += len(data)
                    return write(data)

                self.wfile.write = counted  # type: ignore[method-assign]

            def log_message(self, *arguments: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        yield
        self._server.shutdown()
        thread.join()
        self._server.server_close()

    def totals(self) -> tuple[int, int, int]:
        return self.requests, self.received, self.sent


def publish(folder: Path, repository: Path) -> None:
    command = [str(harness.COMMAND), "publish", str(repository), str(folder / "site"), f"--keys={folder / 'keys'}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def without_clouds(folder: Path) -> dict[str, str]:
    """Return the environment of a box, where the packages for keys in clouds are not installed: securesystemslib, of
    tuf, imports what it finds of them."""
    (folder / "python").mkdir()
    blocked = "import sys; sys.modules.update(dict.fromkeys(('boto3', 'botocore', 'azure', 'PyKCS11')))"
    (folder / "python" / "sitecustomize.py").write_text(blocked)
    return {"PYTHONPATH": str(folder / "python")}


def compare_servers(folder: Path, rounds: int, seconds: float) -> None:
    rows: dict[str, list[list[float]]] = {"without": [], "with --follow": []}
    looks: list[list[float]] = []
    variables = without_clouds(folder)
    for _ in range(rounds):
        for name, found in rows.items():
            site = CountingSite(folder / "site")
            flags = [
                f"--follow={site.url}", f"--follow-root={folder / 'site/metadata/1.root.json'}",
                f"--follow-interval-secs={INTERVAL_S}", "--box-id=box",
            ]  # fmt: skip
            is_following = name != "without"
            with (
                site.running(),
                harness.server(
                    folder / "box", "--log-info=false", *(flags if is_following else []), variables=variables
                ) as server,
            ):
                time.sleep(_SETTLE_S)
                begin, begin_cpu_s = site.totals(), server.cpu_s()
                time.sleep(seconds)
                cpu_s, memory = server.cpu_s() - begin_cpu_s, server.memory_mb()
                found.append([memory["Rss"], memory["Pss"], cpu_s / seconds * 1000, server.start_s])
                if is_following:
                    requests, received, sent = (now - then for now, then in zip(site.totals(), begin, strict=True))
                    without_ms = rows["without"][-1][2]
                    looks.append([requests, received, sent, cpu_s * 1000 - without_ms * seconds])
    table = [[name, *(describe(values) for values in zip(*found, strict=True))] for name, found in rows.items()]
    print(harness.markdown(["server", "Rss, MB", "Pss, MB", "CPU ms a second", "start, s"], table))
    count = [row[0] / 2 for row in looks]  # each asks for the next root, which is not there, and for the timestamp
    for at, what in ((1, "bytes from the box"), (2, "bytes to the box"), (3, "CPU ms of the server")):
        values = [row[at] / number for row, number in zip(looks, count, strict=True)]
        print(f"a look without news, {what}: {describe(values)}")


def describe(values: Sequence[float]) -> str:
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def look_together(folder: Path) -> None:
    (port,) = harness.free_ports(1)
    command = [sys.executable, "-m", "http.server", str(port), "--bind=127.0.0.1", f"--directory={folder / 'site'}"]
    root = (folder / "site/metadata/1.root.json").read_bytes()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            time.sleep(1.0)
            boxes = [
                SignedRepository(
                    SiteFiles(f"http://127.0.0.1:{port}", 0, 60.0), folder / "together" / str(number), root
                )
                for number in range(BOXES)
            ]
            for what in ("the first time", "without news"):
                begin_s, begin_cpu_s = time.monotonic(), harness.cpu_s(process.pid)
                with ThreadPoolExecutor(BOXES) as pool:
                    list(pool.map(SignedRepository.refresh, boxes))
                passed_s, cpu_s = time.monotonic() - begin_s, harness.cpu_s(process.pid) - begin_cpu_s
                print(f"{BOXES} boxes look at once, {what}: {passed_s:.2f} s, web server {cpu_s:.2f} CPU s")
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(10):
            model = 'backend: "identity"\ninput { name: "IN" data_type: TYPE_FP32 dims: [1] }\n'
            model += 'output { name: "OUT" data_type: TYPE_FP32 dims: [1] }\n'
            harness.write_model(folder / "models", f"model_{number}", model)
        publish(folder, folder / "models")
        (folder / "box").mkdir()
        command = [
            str(harness.COMMAND), "follow", (folder / "site").as_uri(), f"--model-repository={folder / 'box'}",
            f"--root={folder / 'site/metadata/1.root.json'}", "--box-id=box", "--once",
        ]  # fmt: skip
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        print(harness.machine())
        compare_servers(folder, options.rounds, options.seconds)
        look_together(folder)


if __name__ == "__main__":
    main()
