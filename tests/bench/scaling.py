"""Cost by the number of models, connections and versions, and by load, with the test extra installed.

`python tests/bench/scaling.py [--rounds=N] [--output=FOLDER]`

- The server's CPU time for a request as models (1 to 200), connections (1 to 500) and versions (1 to 20) grow, over
  gRPC and HTTP, with requests to all of them in turn, and its memory. Both should be constant.
- Latency under overload: a model of 10 ms is offered 0.25 to 4 times what it can do, with a short queue and with an
  unlimited one. Printed are p50 and p99 of the answered requests, and the fraction refused.

The steps take turns within each round. Prints tables; writes scaling.json and scaling.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import grpc
import harness
import numpy as np
import short
from harness import Load

from edge_server.cli.svg_charts import COLORS, ChartCurve, CurvePanel, draw_panels

MODELS = (1, 10, 50, 100, 200)
CONNECTIONS = (1, 10, 50, 200, 500)
VERSIONS = (1, 2, 5, 10, 20)
OFFERED = (0.25, 0.5, 0.8, 1.0, 1.5, 2.0, 4.0)
"""Times what the model can do."""

TURN_S = 0.6
RUN_MS = 10
OVERLOAD_S = 3.0
SMALL = np.arange(16, dtype=np.float32)
LIMITED = f"""
backend: "identity"
max_batch_size: 1
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
instance_group {{ count: 1 kind: KIND_CPU }}
parameters {{ key: "execute_delay_ms" value {{ string_value: "{RUN_MS}" }} }}
"""
SHORT_QUEUE = "dynamic_batching { default_queue_policy { max_queue_size: 8 } }\n"


# -- requests that go round


def around(calls: Sequence[harness.Call]) -> harness.Call:
    """Return a call that makes each of `calls` in turn, and then starts again."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


@contextlib.contextmanager
def calls_by_protocol(
    where: harness.Server, models: Sequence[str], connections: int
) -> Iterator[dict[str, harness.Call]]:
    """Yield one call for each wire. Request n goes to model n, over connection n, each counted round."""
    body, header_length = short.binary_body(SMALL)
    messages = [short.message(model, "INPUT0", SMALL) for model in models]
    paths = [f"/v2/models/{model}/infer" for model in models]
    with contextlib.ExitStack() as stack:
        count = max(connections, len(models))
        if connections == 1:
            channel = stack.enter_context(short.channel(where))
            unary = channel.unary_unary(short.METHOD)
            over_grpc = [partial(unary, message) for message in messages]
            send = stack.enter_context(short.http_sender(where))
            over_http = [partial(send, path, body, header_length) for path in paths]
        else:
            over_grpc, over_http = [], []
            for number in range(count):
                unary = stack.enter_context(short.channel(where)).unary_unary(short.METHOD)
                over_grpc.append(partial(unary, messages[number % len(messages)]))
                send = stack.enter_context(short.http_sender(where))
                over_http.append(partial(send, paths[number % len(paths)], body, header_length))
        for call in (*over_grpc, *over_http):
            call()
        yield {"gRPC": around(over_grpc), "HTTP": around(over_http)}


# -- growth


@dataclass(frozen=True)
class Step:
    """One step of a scaling series."""

    size: int
    memory_mb: float
    start_s: float
    loads: dict[str, Load]


def measure_steps(steps: Sequence[tuple[int, harness.Server, dict[str, harness.Call]]], rounds: int) -> list[Step]:
    """Measure the sizes in turns."""
    ways: dict[str, Callable[[], Load]] = {
        f"{size} {wire}": partial(harness.closed_loop, call, TURN_S, where.cpu_s)
        for size, where, calls in steps
        for wire, call in calls.items()
    }
    found = harness.in_turns(ways, rounds)
    return [
        Step(
            size,
            where.memory_mb()["Rss"],
            where.start_s,
            {wire: harness.median_load(found[f"{size} {wire}"]) for wire in calls},
        )
        for size, where, calls in steps
    ]


def write_small(repository: Path, name: str, versions: int = 1) -> None:
    folder = harness.write_model(repository, name, short.IDENTITY + "version_policy { all {} }\n")
    for version in range(2, versions + 1):
        (folder / str(version)).mkdir()


def with_models(folder: Path, rounds: int) -> list[Step]:
    with contextlib.ExitStack() as stack:
        steps = []
        for size in MODELS:
            names = [f"small_{number}" for number in range(size)]
            for name in names:
                write_small(folder / str(size), name)
            where = stack.enter_context(harness.server(folder / str(size), "--log-info=false"))
            steps.append((size, where, stack.enter_context(calls_by_protocol(where, names, 1))))
        return measure_steps(steps, rounds)


def with_versions(folder: Path, rounds: int) -> list[Step]:
    with contextlib.ExitStack() as stack:
        steps = []
        for size in VERSIONS:
            write_small(folder / str(size), "small", size)
            where = stack.enter_context(harness.server(folder / str(size), "--log-info=false"))
            steps.append((size, where, stack.enter_context(calls_by_protocol(where, ["small"], 1))))
        return measure_steps(steps, rounds)


def with_connections(folder: Path, rounds: int) -> list[Step]:
    write_small(folder, "small")
    with contextlib.ExitStack() as stack:
        steps = []
        for size in CONNECTIONS:
            where = stack.enter_context(harness.server(folder, "--log-info=false"))
            steps.append((size, where, stack.enter_context(calls_by_protocol(where, ["small"], size))))
        return measure_steps(steps, rounds)


# -- overload


@dataclass(frozen=True)
class Overload:
    """Results at one offered load. `refused` is a fraction of the sent requests."""

    queue: str
    offered: float
    answered_rate: float
    p50_ms: float
    p99_ms: float
    refused: float


def offer(where: harness.Server, model: str, rate: float, seconds: float) -> tuple[list[float], int, int, float]:
    """Send at a steady rate, whatever comes back; return latencies of answers, refusals, how many were sent, and how
    long it took until the last came back."""
    data, took, refused, lock = short.message(model, "INPUT0", SMALL[None]), [0.0] * 0, [0], threading.Lock()
    with short.channel(where) as channel:
        infer = channel.unary_unary(short.METHOD)
        infer(data)
        calls, began = [], time.perf_counter()

        def count(sent: float, call: grpc.Future) -> None:
            passed = time.perf_counter() - sent
            with lock:
                if call.code() is grpc.StatusCode.OK:
                    took.append(passed)
                else:
                    refused[0] += 1

        for number in range(max(1, int(rate * seconds))):
            time.sleep(max(0.0, began + number / rate - time.perf_counter()))
            call = infer.future(data)
            call.add_done_callback(partial(count, time.perf_counter()))
            calls.append(call)
        for call in calls:
            call.exception()
        passed = time.perf_counter() - began
        while True:  # the last call-backs run after their calls have ended
            with lock:
                if len(took) + refused[0] == len(calls):
                    return took, refused[0], len(calls), passed
            time.sleep(0.001)


def under_overload(folder: Path, rounds: int) -> list[Overload]:
    queues = {"queue of 8": ("bounded", SHORT_QUEUE), "endless queue": ("endless", "")}
    for name, more in queues.values():
        harness.write_model(folder, name, LIMITED + more)
    capacity = 1000 / RUN_MS
    found: dict[tuple[str, float], list[Overload]] = {}
    with harness.server(folder, "--log-info=false") as where:
        for _ in range(rounds):
            for (queue, (model, _)), times in itertools.product(queues.items(), OFFERED):
                took, refused, sent, passed = offer(where, model, times * capacity, OVERLOAD_S)
                p50, p99 = (harness.percentile(took, part) * 1000 for part in (0.5, 0.99))
                found.setdefault((queue, times), []).append(
                    Overload(queue, times, len(took) / passed, p50, p99, refused / sent)
                )
    fields = ("answered_rate", "p50_ms", "p99_ms", "refused")
    return [
        Overload(*place, *(statistics.median(getattr(one, name) for one in rows) for name in fields))
        for place, rows in found.items()
    ]


# -- telling


def panels(growth: dict[str, list[Step]], overload: Sequence[Overload]) -> list[CurvePanel]:
    made = []
    for title, steps in growth.items():
        curves = [
            ChartCurve(wire, [(step.size, step.loads[wire].cpu_us) for step in steps], color)
            for wire, color in zip(("gRPC", "HTTP"), COLORS, strict=False)
        ]
        made.append(CurvePanel(f"CPU time of a request, microseconds, as {title} grow", curves, title))
        memory = [ChartCurve("Rss, MB", [(step.size, step.memory_mb) for step in steps], COLORS[2])]
        made.append(CurvePanel(f"memory as {title} grow", memory, title))
    for title, field in (("p99 latency of what was answered, ms", "p99_ms"), ("share refused", "refused")):
        curves = [
            ChartCurve(queue, [(one.offered, getattr(one, field)) for one in overload if one.queue == queue], color)
            for queue, color in zip(("queue of 8", "endless queue"), COLORS, strict=False)
        ]
        made.append(
            CurvePanel(f"under overload: {title}", curves, f"offered, times what a model of {RUN_MS} ms can do")
        )
    return made


def tell(growth: dict[str, list[Step]], overload: Sequence[Overload]) -> None:
    for title, steps in growth.items():
        rows = [
            (str(step.size), *(f"{step.loads[wire].cpu_us:.0f}" for wire in ("gRPC", "HTTP")), f"{step.memory_mb:.0f}",
             f"{step.start_s:.2f}")
            for step in steps
        ]  # fmt: skip
        print(f"\n{harness.markdown((title, 'gRPC CPU us', 'HTTP CPU us', 'Rss MB', 'start s'), rows)}")
    heads = ("queue", "offered", "answered/s", "p50 ms", "p99 ms", "refused")
    rows = [
        (one.queue, f"{one.offered:g}", f"{one.answered_rate:.0f}", f"{one.p50_ms:.0f}", f"{one.p99_ms:.0f}",
         f"{one.refused:.0%}")
        for one in overload
    ]  # fmt: skip
    print(f"\n{harness.markdown(heads, rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("."), help="folder for the report")
    given = parser.parse_args()
    # A thousand connections of the client's, and as many of a server's, which inherits the limit.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = harness.machine()
    growth: dict[str, list[Step]] = {}
    for title, grow in (("models", with_models), ("connections", with_connections), ("versions", with_versions)):
        with tempfile.TemporaryDirectory() as name:
            growth[title] = grow(Path(name), given.rounds)
        print(f"{title} done", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as name:
        overload = under_overload(Path(name), max(1, given.rounds // 2))
    tell(growth, overload)
    report = {
        "facts": {"before": before, "after": harness.machine(), "rounds": given.rounds},
        "growth": {title: [asdict(step) for step in steps] for title, steps in growth.items()},
        "overload": [asdict(one) for one in overload],
    }
    words = f"{before['cores']} cores, load {before['load_average'][0]:.1f} before, medians of {given.rounds} rounds"
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "scaling.json").write_text(json.dumps(report, indent=1) + "\n")
    picture = draw_panels("What grows with what", panels(growth, overload), words)
    (given.output / "scaling.svg").write_text(picture)


if __name__ == "__main__":
    main()
