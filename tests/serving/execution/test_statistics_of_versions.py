"""Counters of a version, as clients and the governor read them."""

from __future__ import annotations

from edge_server.core.model_statistics import VersionWork
from edge_server.errors import QueueFull
from edge_server.serving.execution.counters import VersionCounters


def test_the_work_of_a_version_is_that_of_its_statistics() -> None:
    counters = VersionCounters("m", 2)
    for size in (1, 4, 4):
        counters.record_batch([10], size, size, 20, 23, 30, 31)
    counters.record_failure(QueueFull("full"), 10, 20)
    counters.record_failure(QueueFull("full"), 10, 20, in_backend=True)
    found = counters.snapshot(0)
    assert counters.work() == VersionWork("m", 2, {1: (1, 11), 4: (2, 22)}, 1)
    for size, (count, ns) in counters.work().batches.items():
        batch = found.batches[size]
        assert count == batch.compute_infer.count
        assert ns == batch.compute_input.ns + batch.compute_infer.ns + batch.compute_output.ns
