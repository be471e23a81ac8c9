"""Limits of the control group, from file systems as Docker, Kubernetes and systemd lay them out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_server.cgroup_limits import available_memory, cpu_limit, limited_cores, usable_cores

OWN = "0::/box.slice/server.service"
"""The line of /proc/self/cgroup on a machine; in a container it is the next one."""
CONTAINED = "0::/"
OLD = "12:memory:/docker/4f\n3:cpu,cpuacct:/docker/4f\n0::/"


def lay_out(root: Path, groups: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"{groups}\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param(CONTAINED, {"cpu.max": "150000 100000"}, 1.5, id="a container"),
        pytest.param(CONTAINED, {"cpu.max": "max 100000"}, None, id="a container without a limit"),
        pytest.param(
            OWN, {"box.slice/cpu.max": "100000 100000", "box.slice/server.service/cpu.max": "400000 100000"}, 1.0,
            id="an ancestor allows less",
        ),
        pytest.param(
            OLD, {"cpu/docker/4f/cpu.cfs_quota_us": "50000", "cpu/docker/4f/cpu.cfs_period_us": "100000"}, 0.5,
            id="version 1 on the machine",
        ),
        pytest.param(
            OLD, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0,
            id="version 1 in a container: its own group is the top",
        ),
        pytest.param(OLD, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, id="no quota"),
        pytest.param(CONTAINED, {"cpu.max": "many"}, None, id="a format of another kernel"),
        pytest.param(CONTAINED, {}, None, id="no controller"),
    ],
)  # fmt: skip
def test_the_limit_of_processor_time_is_the_smallest_among_the_group_and_its_ancestors(
    tmp_path: Path, groups: str, files: dict[str, str], expected: float | None
) -> None:
    assert cpu_limit(lay_out(tmp_path, groups, files)) == expected


@pytest.mark.parametrize(
    ("quota", "cores"), [("max", 8), ("50000", 1), ("100000", 1), ("150000", 2), ("700000", 7), ("1600000", 8)]
)
def test_usable_cores_are_those_of_the_affinity_or_the_rounded_up_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    root = lay_out(tmp_path, CONTAINED, {"cpu.max": f"{quota} 100000"})
    assert usable_cores(root) == cores
    assert limited_cores(root) == (cores if cores < 8 else None)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param(CONTAINED, {"memory.max": "5000", "memory.current": "1000"}, 4000, id="a container"),
        pytest.param(CONTAINED, {"memory.max": "max", "memory.current": "1000"}, None, id="no limit"),
        pytest.param(CONTAINED, {"memory.max": "5000", "memory.current": "6000"}, 0, id="above the limit"),
        pytest.param(
            CONTAINED,
            {
                "memory.max": "5000", "memory.current": "4900",
                "memory.stat": "anon 900\nfile 3500\ninactive_file 1500\nactive_file 2000\nslab_reclaimable 100",
            },
            3700, id="the page cache of model files is available",
        ),
        pytest.param(
            OWN,
            {
                "box.slice/memory.max": "3000", "box.slice/memory.current": "1000",
                "box.slice/server.service/memory.max": "5000", "box.slice/server.service/memory.current": "1000",
            },
            2000, id="an ancestor leaves less",
        ),
        pytest.param(
            OLD,
            {
                "memory/memory.limit_in_bytes": "5000", "memory/memory.usage_in_bytes": "3000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 600\ntotal_active_file 400",
            },
            3000, id="version 1",
        ),
        pytest.param(
            OLD, {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "3000"}, None,
            id="version 1, no limit",
        ),
    ],
)  # fmt: skip
def test_available_memory_is_the_smallest_rest_among_the_group_and_its_ancestors(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int | None
) -> None:
    assert available_memory(lay_out(tmp_path, groups, files)) == expected


def test_without_proc_there_is_no_limit(tmp_path: Path) -> None:
    assert (cpu_limit(tmp_path), available_memory(tmp_path)) == (None, None)


def test_the_groups_of_this_machine_are_read() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
