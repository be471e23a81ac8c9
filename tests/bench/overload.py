"""Latency under overload, with the test extra installed: `python tests/bench/overload.py [ROUNDS]`.

A model of 10 ms is offered 0.25 to 4 times what it can do, with a short queue and with an unlimited one. Printed are
p50 and p99 of the answered requests, and the fraction refused: medians of the rounds.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import harness
import numpy as np
import short

OFFERED = (0.25, 0.5, 0.8, 1.0, 1.5, 2.0, 4.0)
"""Times what the model can do."""

RUN_MS = 10
TURN_S = 3.0
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
                took, refused, sent, passed = offer(where, model, times * capacity, TURN_S)
                p50, p99 = (harness.percentile(took, part) * 1000 for part in (0.5, 0.99))
                found.setdefault((queue, times), []).append(
                    Overload(queue, times, len(took) / passed, p50, p99, refused / sent)
                )
    fields = ("answered_rate", "p50_ms", "p99_ms", "refused")
    return [
        Overload(*place, *(statistics.median(getattr(one, name) for one in rows) for name in fields))
        for place, rows in found.items()
    ]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as name:
        overload = under_overload(Path(name), rounds)
    heads = ("queue", "offered", "answered/s", "p50 ms", "p99 ms", "refused")
    rows = [
        (one.queue, f"{one.offered:g}", f"{one.answered_rate:.0f}", f"{one.p50_ms:.0f}", f"{one.p99_ms:.0f}",
         f"{one.refused:.0%}")
        for one in overload
    ]  # fmt: skip
    print(harness.markdown(heads, rows))


if __name__ == "__main__":
    main()
