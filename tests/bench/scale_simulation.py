"""Number of replicas that a load needs: `EDGE_TEST_HAPROXY=PROGRAM python tests/bench/scale_simulation.py [REQUESTS]`.

Measures one and two servers behind HAProxy with fleet/haproxy/haproxy.cfg: a model that takes 50 ms and runs one
request at a time, with eight clients in a closed loop, and with requests at random times.
Simulates the same requests from the service times that it measured, and prints the ratios; then it simulates up to 100
replicas. Last it measures the cost of a request in HAProxy.
"""

from __future__ import annotations

import functools
import heapq
import http.client
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.harness import closed_loop, cpu_s, free_ports, markdown, percentile

CLIENTS = 8
UTILISATION = 0.7
SEED = 20
BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]})


@dataclass(frozen=True)
class Outcome:
    """Requests per second, and the latencies in seconds."""

    rate: float
    latencies_s: Sequence[float]

    @property
    def p50_ms(self) -> float:
        return percentile(self.latencies_s, 0.5) * 1000

    @property
    def p99_ms(self) -> float:
        return percentile(self.latencies_s, 0.99) * 1000


class LeastConnections:
    """Replicas that run one request at a time, in order of arrival, behind a balancer with `leastconn`."""

    def __init__(self, count: int, service_s: Callable[[], float]) -> None:
        self._service_s = service_s
        self._free_at = [0.0] * count
        # (requests inside, turn of its last request, replica): of equals, the one that was chosen longest ago.
        self._order = [(0, turn, turn) for turn in range(count)]
        self._leaving: list[tuple[float, int]] = []
        self._turn = itertools.count(count)

    def arrive(self, now: float) -> float:
        """Give a request to a replica; return when it is answered. `now` must not decrease."""
        while self._leaving and self._leaving[0][0] <= now:
            _, leaves = heapq.heappop(self._leaving)
            self._order = [(count - (replica == leaves), turn, replica) for count, turn, replica in self._order]
        count, _, replica = chosen = min(self._order)
        self._order[self._order.index(chosen)] = (count + 1, next(self._turn), replica)
        done = max(now, self._free_at[replica]) + self._service_s()
        self._free_at[replica] = done
        heapq.heappush(self._leaving, (done, replica))
        return done


def simulate_open(arrivals: Iterable[float], replicas: int, service_s: Callable[[], float]) -> Outcome:
    """Simulate requests that come at these times, whether others are answered or not."""
    balancer = LeastConnections(replicas, service_s)
    times = list(arrivals)
    done = [balancer.arrive(at) for at in times]
    return Outcome(len(times) / (max(done) - times[0]), [end - at for at, end in zip(times, done, strict=True)])


def simulate_closed(clients: int, requests: int, replicas: int, service_s: Callable[[], float]) -> Outcome:
    """Simulate clients that each ask again as soon as they are answered."""
    balancer = LeastConnections(replicas, service_s)
    ready, latencies = [0.0] * clients, []
    for _ in range(requests):
        at = heapq.heappop(ready)
        done = balancer.arrive(at)
        latencies.append(done - at)
        heapq.heappush(ready, done)
    return Outcome(requests / max(ready), latencies)


def random_arrivals(rate: float, count: int, seed: int = SEED) -> list[float]:
    """Return `count` times of a Poisson process."""
    draw = random.Random(seed)
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def drawn_from(samples: Sequence[float], seed: int = SEED) -> Callable[[], float]:
    return functools.partial(random.Random(seed).choice, samples)


# -- measured


class Client:
    """Requests to one model over connections that are kept, one a thread."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._path = port, f"/v2/models/{model}/infer"
        self._own = threading.local()

    def ask(self) -> None:
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("POST", self._path, BODY, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        assert reply.status == 200, text


def measure_closed(client: Client, clients: int, requests: int) -> Outcome:
    latencies, left = [], iter(range(requests))

    def run() -> None:
        while next(left, None) is not None:
            begin = time.perf_counter()
            client.ask()
            latencies.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Outcome(requests / (time.perf_counter() - begin), latencies)


def measure_open(client: Client, arrivals: Sequence[float]) -> Outcome:
    """Latencies count from the time at which a request was due."""
    begin = time.perf_counter() + 0.1

    def run(due: float) -> float:
        client.ask()
        return time.perf_counter() - begin - due

    with ThreadPoolExecutor(128) as pool:
        answers = []
        for due in arrivals:
            time.sleep(max(0.0, begin + due - time.perf_counter()))
            answers.append(pool.submit(run, due))
        latencies = [answer.result() for answer in answers]
    return Outcome(len(arrivals) / (time.perf_counter() - begin - arrivals[0]), latencies)


def compared(name: str, measured: Outcome, simulated: Outcome) -> list[str]:
    cells = [name]
    for here, there in (
        (measured.rate, simulated.rate),
        (measured.p50_ms, simulated.p50_ms),
        (measured.p99_ms, simulated.p99_ms),
    ):
        cells.append(f"{here:.1f} / {there:.1f} = {here / there:.2f}")
    return cells


def main(requests: int) -> None:
    if not os.environ.get("EDGE_TEST_HAPROXY"):
        sys.exit("EDGE_TEST_HAPROXY must name HAProxy's program; tests/fleet/fetch_haproxy.sh brings one")
    from tests.fleet.test_haproxy import Fleet

    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), free_ports(11))
        try:
            fleet.start()
            alone = measure_closed(Client(fleet.replicas[0].http, "slow"), 1, requests // 2)
            service = list(alone.latencies_s)
            print(f"service time of one request: p50 {alone.p50_ms:.1f} ms, p99 {alone.p99_ms:.1f} ms\n")
            rows = []
            for replicas in (2, 1):
                if replicas == 1:
                    fleet.replicas[1].end(signal.SIGTERM)
                capacity = replicas / (sum(service) / len(service))
                client = Client(fleet.http, "slow")
                busy = measure_closed(client, CLIENTS, requests * replicas)
                same = simulate_closed(CLIENTS, requests * replicas, replicas, drawn_from(service))
                rows.append(compared(f"{replicas} busy, {CLIENTS} clients", busy, same))
                arrivals = random_arrivals(UTILISATION * capacity, requests * replicas)
                seen = measure_open(client, arrivals)
                same = simulate_open(arrivals, replicas, drawn_from(service))
                rows.append(compared(f"{replicas} at {UTILISATION:.0%}, random", seen, same))
            heads = ("Replicas", "Rate a second", "p50 in ms", "p99 in ms")
            print("measured / simulated = ratio\n" + markdown(heads, rows) + "\n")
            print(
                markdown(("Replicas", "Load", "Requests a second", "p50 in ms", "p99 in ms"), predicted(service)) + "\n"
            )
            measure_balancer(fleet.balancer_pid(), Client(fleet.replicas[0].http, "fast"), Client(fleet.http, "fast"))
        finally:
            fleet.stop()


def predicted(service: Sequence[float]) -> list[list[str]]:
    rows = []
    for replicas in (1, 2, 5, 10, 20, 50, 100):
        for load in (0.5, 0.7, 0.9):
            capacity = replicas / (sum(service) / len(service))
            seen = simulate_open(random_arrivals(load * capacity, 20_000), replicas, drawn_from(service))
            rows.append(
                [f"{replicas}", f"{load:.0%}", f"{load * capacity:.0f}", f"{seen.p50_ms:.0f}", f"{seen.p99_ms:.0f}"]
            )
    return rows


def measure_balancer(pid: int, direct: Client, balanced: Client) -> None:
    """Print what a small request costs HAProxy, and the rates of one client with and without it."""
    through = closed_loop(balanced.ask, 5.0, functools.partial(cpu_s, pid))
    without = closed_loop(direct.ask, 5.0)
    rate = 1e6 / through.cpu_us
    print(f"HAProxy: {through.cpu_us:.0f} us of processor time a request, so {rate:,.0f} requests a second and core")
    print(f"one client with / without HAProxy: {through.rate:.0f} / {without.rate:.0f} requests a second")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
