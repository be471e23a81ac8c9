"""Counters of robots and their observations, by policy and wire, for the metrics page."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from edge_server.errors import DeadlineExceeded, EdgeServerError, InvalidRequest
from edge_server.plugins.policies.robot_load import RobotLoad
from edge_server.telemetry.metrics_page import Family

AGE_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class WireCounts:
    """Counts of the robots of one policy at one wire. Changed on the event loop only."""

    def __init__(self, model: str, wire: str) -> None:
        self.labels = {"model": model, "wire": wire}
        self.robots = 0
        self.answered = 0
        self.overtaken = 0
        self.late = 0
        self.results = {"invalid": 0, "too_old": 0, "failed": 0}
        self.age_sum_s = 0.0
        self.newest_age_s = 0.0
        self.ages = [0] * len(AGE_BUCKETS_S)

    def answer(self, age_s: float, *, is_late: bool) -> None:
        """Count an answer. `is_late`: the actions of the answer before it had run out."""
        self.answered += 1
        self.late += is_late
        self.age_sum_s += age_s
        self.newest_age_s = age_s
        for at, edge in enumerate(AGE_BUCKETS_S):
            self.ages[at] += age_s <= edge

    def fail(self, error: EdgeServerError) -> None:
        kind = "invalid" if isinstance(error, InvalidRequest) else "failed"
        self.results["too_old" if isinstance(error, DeadlineExceeded) else kind] += 1


class PolicyCounters:
    """Counts of all policies and wires. `families` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], WireCounts] = {}
        self._loads: set[RobotLoad] = set()

    def connect(self, model: str, wire: str, load: RobotLoad) -> WireCounts:
        """Count a robot, until `disconnect`."""
        with self._lock:
            counts = self._counts.setdefault((model, wire), WireCounts(model, wire))
            self._loads.add(load)
        counts.robots += 1
        return counts

    def disconnect(self, counts: WireCounts, load: RobotLoad) -> None:
        with self._lock:
            self._loads.discard(load)
        counts.robots -= 1

    def control_need(self) -> float:
        """Return the seconds of computing per second that all robots need; infinite while one's need is unknown."""
        with self._lock:
            return sum(load.need for load in self._loads)

    def all(self) -> list[WireCounts]:
        with self._lock:
            return list(self._counts.values())

    def report(self) -> dict[str, object]:
        """Return the response to GET /edge/v1/policies. Ages are null before the first answer."""
        policies = [
            {
                **item.labels, "robots": item.robots, "answered": item.answered, "overtaken": item.overtaken,
                **item.results, "late": item.late, "newest_age_s": item.newest_age_s if item.answered else None,
                "mean_age_s": item.age_sum_s / item.answered if item.answered else None,
            }
            for item in self.all()
        ]  # fmt: skip
        return {"policies": policies}

    def families(self) -> Iterable[Family]:
        robots = Family("edge_policy_robots", "gauge", "Robots that are connected")
        observations = Family("edge_policy_observations_total", "counter", "Observations of robots by result")
        late = Family("edge_policy_late_chunks_total", "counter", "Answers that came after the actions before ran out")
        ages = Family(
            "edge_policy_observation_age_seconds", "histogram", "Age of observations when their answer is sent"
        )
        for item in self.all():
            robots.add(item.labels, item.robots)
            late.add(item.labels, item.late)
            for result, count in {"answered": item.answered, "overtaken": item.overtaken, **item.results}.items():
                observations.add({**item.labels, "result": result}, count)
            for edge, count in zip(AGE_BUCKETS_S, item.ages, strict=True):
                ages.add({**item.labels, "le": str(edge)}, count, part="_bucket")
            ages.add({**item.labels, "le": "+Inf"}, item.answered, part="_bucket")
            ages.add(item.labels, item.age_sum_s, part="_sum")
            ages.add(item.labels, item.answered, part="_count")
        return robots, observations, late, ages
