"""The metric of CUDA shared memory: bytes copied between clients' regions and the host."""

from __future__ import annotations

from collections.abc import Callable

from edge_server.telemetry.metrics_page import Family, Source


def cuda_memory_families(read: Callable[[], tuple[int, int]]) -> Source:
    """Return a source of the page; `read` gives the bytes copied out of regions, and into them, since the start."""

    def families() -> list[Family]:
        family = Family(
            "edge_cuda_shared_memory_copied_bytes_total",
            "counter",
            "Bytes copied between the GPU memory of clients and the host, by direction",
        )
        for direction, count in zip(("input", "output"), read(), strict=True):
            family.add({"direction": direction}, count)
        return [family]

    return families
