"""Cost of a reload, a start and the unloading of all models, among many models and among ten:
`python tests/bench/many_models.py [--models=1000] [--rounds=3] [--tree=FOLDER]`, with the test extra.

Each round starts a server in mode poll on so many identity models, reloads one of them several times, removes the
folders of all, and does the same with ten models. Printed are medians, and the ratio of the two per round. `--tree`
measures the source tree in a folder, such as that of an earlier commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness

FEW = 10
RELOADS = 5
PATIENCE_S = 120.0
CONFIG = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
"""


@dataclass
class Figures:
    """Seconds of wall clock and of the server's CPU; `start_s` and `start_cpu_s` are for all models."""

    start_s: float
    start_cpu_s: float
    threads: int
    most_threads: int
    reload_s: float
    reload_cpu_s: float
    remove_s: float
    remove_cpu_s: float


def measure(count: int, tree: Path | None) -> Figures:
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name) / "models"
        for number in range(count):
            harness.write_model(repository, f"m{number:04}", CONFIG)
        with harness.server(repository, "--model-control-mode=poll", tree=tree) as server:
            start_cpu_s, threads = server.cpu_s(), thread_count(server)
            reloads = [reload(server, repository / "m0005", mark) for mark in range(RELOADS)]
            most_threads = max(threads, *(found for _, _, found in reloads))
            remove_s, remove_cpu_s, found = remove_all(server, repository)
            return Figures(
                server.start_s,
                start_cpu_s,
                threads,
                max(most_threads, found),
                statistics.median(took for took, _, _ in reloads),
                statistics.median(cpu for _, cpu, _ in reloads),
                remove_s,
                remove_cpu_s,
            )


def reload(server: harness.Server, model: Path, mark: int) -> tuple[float, float, int]:
    """Change a model's configuration as an editor does, and wait until it serves."""
    new = model / ".config.pbtxt"
    new.write_text(f'{CONFIG}\nparameters {{ key: "mark" value {{ string_value: "{mark}" }} }}\n')

    def serves() -> bool:
        parameters = server.get(f"/v2/models/{model.name}/config").get("parameters", {})
        return bool(parameters.get("mark", {}).get("string_value") == str(mark))

    return until(server, lambda: new.rename(model / "config.pbtxt"), serves)


def remove_all(server: harness.Server, repository: Path) -> tuple[float, float, int]:
    aside = repository.with_name("aside")
    aside.mkdir()

    def remove() -> None:
        for model in list(repository.iterdir()):
            model.rename(aside / model.name)

    return until(server, remove, lambda: not ready_count(server), pause_s=0.2)


def ready_count(server: harness.Server) -> int:
    request = urllib.request.Request(f"http://{server.http}/v2/repository/index", b'{"ready": true}', method="POST")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return len(json.loads(reply.read()))


def until(
    server: harness.Server, change: Callable[[], object], is_done: Callable[[], bool], pause_s: float = 0.02
) -> tuple[float, float, int]:
    """Make a change; return the seconds until it is done, the server's CPU seconds for it, and its most threads."""
    cpu_s, began, most_threads = server.cpu_s(), time.monotonic(), 0
    change()
    while not is_done():
        most_threads = max(most_threads, thread_count(server))
        if time.monotonic() - began > PATIENCE_S:
            raise SystemExit(f"the change was not done after {PATIENCE_S:g} s")
        time.sleep(pause_s)
    return time.monotonic() - began, server.cpu_s() - cpu_s, most_threads


def thread_count(server: harness.Server) -> int:
    return sum(1 for _ in Path(f"/proc/{server.pid}/task").iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree", type=Path)
    given = parser.parse_args()
    rounds = [(measure(given.models, given.tree), measure(FEW, given.tree)) for _ in range(given.rounds)]
    rows = [
        (
            name,
            f"{statistics.median(getattr(many, name) for many, _ in rounds):.2f}",
            f"{statistics.median(getattr(few, name) for _, few in rounds):.2f}",
            f"{statistics.median(getattr(many, name) / max(getattr(few, name), 0.01) for many, few in rounds):.2f}",
        )
        for name in vars(rounds[0][0])
    ]
    print(harness.markdown(("", f"{given.models} models", f"{FEW} models", "ratio"), rows))


if __name__ == "__main__":
    main()
