"""Archives of boards: what they hold, what they do not, and that no file keeps them from being written."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.plugins.doctor import collect as module
from edge_server.plugins.doctor.collect import collect
from edge_server.plugins.doctor.plugin import PLUGIN as DOCTOR
from edge_server.plugins.governor.plugin import PLUGIN as GOVERNOR
from edge_server.plugins.governor.sensors.all_sensors import read_machine
from edge_server.telemetry.sysfs import SysfsFiles, read_once

CUDA_FACTS = DOCTOR.machine_facts["cuda"]
NVML_FACTS = GOVERNOR.machine_facts["nvml"]
COMMAND = Path(sys.executable).parent / "edge-server"

PLANTED = {
    "host": "kitchen-robot-7",
    "domain": "kitchen-robot-7.example.org",
    "user": "alice",
    "full name": "Alice Example",
    "serial number": "1423921034567",
    "machine id": "0123456789abcdef0123456789abcdef",
    "UUID": "GPU-6f0c1f4e-8a36-4b5f-9a51-2f8d3c4b5a69",
    "MAC": "48:b0:2d:c1:9e:42",
    "IPv4": "192.168.7.93",
    "IPv6": "fe80::4ab0:2dff:fec1:9e42",
    "mail": "alice@example.org",
}


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ask", lambda what: {"problem": f"no {what} in this test"})


def read(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as file:
        return {item.name: file.extractfile(item).read().decode() for item in file.getmembers()}  # type: ignore[union-attr]


def unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # not in every patch release of 3.10 and 3.11
        file.extractall(folder)
    return folder


@pytest.mark.parametrize("name", ["orin_nano_jp6", "agx_orin_jp6", "thor_jp7"])
def test_the_sensors_read_an_archive_as_they_read_the_board(name: str, make_board: Any, tmp_path: Path) -> None:
    board = make_board(name)
    unread = collect(SysfsFiles(board.root), board.root, tmp_path / "a.tar.gz")
    found, real = read_machine(unpack(tmp_path / "a.tar.gz", tmp_path / "root")), read_machine(board.root)
    assert found.zones
    # What is switched off on the board is not in the archive.
    known = [zone for zone in real.zones if zone.temperature_c is not None]
    assert [zone for zone in found.zones if zone.temperature_c is not None] == known
    for field in ("board", "soc", "l4t", "jetpack", "power_mode", "power_mw", "rails", "clocks", "fans", "memory"):
        assert getattr(found, field) == getattr(real, field), field
    off = {path for path, content in board.files.items() if not isinstance(content, bytes)}
    assert set(unread) == off
    assert all("try again" in why for why in unread.values())
    assert json.loads(read(tmp_path / "a.tar.gz")["board.json"])["unread"] == unread


def test_device_files_are_listed_with_numbers_modes_and_owners(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make device files")
    (tmp_path / "dev/nvgpu/igpu0").mkdir(parents=True)
    os.mknod(tmp_path / "dev/nvgpu/igpu0/ctrl", 0o020660, os.makedev(505, 300))
    (tmp_path / "dev/nvgpu/igpu0/ctrl").chmod(0o660)
    os.chown(tmp_path / "dev/nvgpu/igpu0/ctrl", 1234, 5678)
    os.mknod(tmp_path / "dev/nvidia0", 0o020666, os.makedev(195, 0))
    collect(SysfsFiles(tmp_path), tmp_path, tmp_path / "a.tar.gz")
    assert read(tmp_path / "a.tar.gz")["nodes.txt"].splitlines() == [
        "/dev/nvidia0 c 195:0 0644 root:root",
        "/dev/nvgpu/igpu0/ctrl c 505:300 0660 1234:5678",
    ]


def test_no_name_address_or_serial_number_is_in_the_archive(
    make_board: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = make_board("agx_orin_jp6")
    for path, content in board.files.items():
        if isinstance(content, bytes) and not path.startswith("/proc/device-tree/compatible"):
            board.write(path, content.rstrip(b"\n\0") + "".join(f"\n{value}" for value in PLANTED.values()).encode())
    for path, key in {
        "/proc/sys/kernel/hostname": "host",
        "/etc/hostname": "domain",
        "/etc/machine-id": "machine id",
        "/proc/device-tree/serial-number": "serial number",
    }.items():
        board.write(path, PLANTED[key])
    board.write("/etc/passwd", f"root:x:0:0::/root:/bin/sh\nalice:x:1000:1000:{PLANTED['full name']},,,:/home/alice:\n")
    told = " ".join(value for key, value in PLANTED.items() if key != "IPv4")
    board.write("/etc/os-release", f'PRETTY_NAME="Ubuntu 22.04 {told}"')
    board.write(
        "/var/lib/dpkg/status", f"Package: libnvinfer10\nStatus: install ok installed\nVersion: 10.3.0.30 {told}\n"
    )
    for value in ("alice", PLANTED["host"], PLANTED["IPv4"]):
        board.write(f"/dev/nvhost-{value}", "")
        board.write(f"/sys/class/devfreq/{value}/governor", "podgov")
    board.block("/sys/class/devfreq/alice/max_freq")
    monkeypatch.setattr(module, "_ask", lambda what: {"problem": told, told: [told]})
    assert collect(SysfsFiles(board.root), board.root, tmp_path / "a.tar.gz")
    with gzip.open(tmp_path / "a.tar.gz") as file:
        whole = file.read().decode().lower()
    # What was planted was in what was read.
    assert whole.count("removed") > len(board.files) * 5
    assert "10.3.0.30" in whole
    for key, value in PLANTED.items():
        assert value.lower() not in whole, key
    assert "alice" not in whole
    assert "kitchen" not in whole


def test_names_that_every_board_has_stay(make_board: Any, tmp_path: Path) -> None:
    board = make_board("orin_nano_jp6")
    board.write("/etc/hostname", "orin-nano")
    board.write("/etc/passwd", "nvidia:x:1000:1000:Nvidia,,,:/home/nvidia:\ngp:x:1001:1001:::\n")
    collect(SysfsFiles(board.root), board.root, tmp_path / "a.tar.gz")
    found = read(tmp_path / "a.tar.gz")
    assert "removed" not in "".join(found.values())
    assert "nvidia,tegra234" in found["proc/device-tree/compatible"]


def test_comments_of_an_operator_are_left_out(make_board: Any, tmp_path: Path) -> None:
    board = make_board("orin_nano_jp6")
    board.write("/etc/nvpmodel.conf", "# for the hall\n< POWER_MODEL ID=0 NAME=15W > # ours\nGPU MAX_FREQ 1\n")
    collect(SysfsFiles(board.root), board.root, tmp_path / "a.tar.gz")
    text = read(tmp_path / "a.tar.gz")["etc/nvpmodel.conf"]
    assert "POWER_MODEL ID=0 NAME=15W" in text
    assert "hall" not in text
    assert "ours" not in text


def test_files_that_hang_or_fail_or_are_long_are_named_and_cost_nothing_else(
    make_board: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = make_board("thor_jp7")
    monkeypatch.setattr(module, "_FILE_TIMEOUT_S", 0.2)
    is_over = threading.Event()
    hung, failed, long = (f"{board.zone(zone)}/temp" for zone in ("cpu-thermal", "tj-thermal", "soc012-thermal"))

    def read_badly(path: Path) -> bytes:
        if str(path).endswith(hung):
            is_over.wait(60)
        if str(path).endswith(failed):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return b"1" * 100_000 if str(path).endswith(long) else read_once(path)

    try:
        unread = collect(SysfsFiles(board.root, read=read_badly), board.root, tmp_path / "a.tar.gz")
    finally:
        is_over.set()
    found = read(tmp_path / "a.tar.gz")
    assert unread[hung] == f"{hung} did not answer in time"
    assert unread[failed] == f"{failed}: Input/output error"
    assert unread[long] == f"{long} is too long: 100000 bytes"
    assert json.loads(found["board.json"])["unread"] == unread
    assert not {path.lstrip("/") for path in (hung, failed, long)} & found.keys()
    assert f"{board.zone('soc345-thermal')}/temp".lstrip("/") in found


def test_an_archive_of_many_long_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        folder = tmp_path / f"sys/class/thermal/thermal_zone{number}"
        folder.mkdir(parents=True)
        (folder / "type").write_text("1" * 60_000)
    monkeypatch.setattr(module, "_MAX_BYTES", 300_000)
    unread = collect(SysfsFiles(tmp_path), tmp_path, tmp_path / "a.tar.gz")
    assert len(unread) == 15
    assert sum(map(len, read(tmp_path / "a.tar.gz").values())) < 310_000


def test_the_command_writes_a_new_file_only(make_board: Any, tmp_path: Path) -> None:
    board = make_board("orin_nano_jp6")
    archive = tmp_path / "board.tar.gz"
    command = [str(COMMAND), "doctor", f"--sysfs-root={board.root}", f"--collect={archive}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"wrote {archive}: look at it before you send it" in done.stdout
    assert "not read: /sys/class/thermal/" in done.stdout
    assert read(archive)["etc/nv_tegra_release"].startswith("# R36")
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 2
    assert f"--collect: {archive} cannot be written: File exists" in again.stderr


CUDA = """
#include <unistd.h>
int cuInit(int flags) { INIT }
int cuDriverGetVersion(int *version) { *version = 12060; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return 3; }
"""


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes processes find a libcuda.so.1 whose cuInit is this C code."""

    def build(code: str) -> None:
        source = tmp_path / "cuda.c"
        source.write_text(CUDA.replace("INIT", code))
        try:
            build = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)]
            subprocess.run(build, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("needs a C compiler: apt-get install gcc")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    return build


ask = module._ask


@pytest.mark.full
def test_the_code_of_cu_init_and_the_drivers_version_are_told(cuda: Callable[[str], None]) -> None:
    cuda("return 801;")
    assert ask(CUDA_FACTS) == {"cuInit": 801, "version": 12060, "devices": 0}


@pytest.mark.full
def test_a_driver_that_hangs_or_crashes_is_told_and_nothing_else(
    cuda: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda("*(volatile int *)0 = 1; return 0;")
    assert ask(CUDA_FACTS) == {"problem": "the process ended with -11"}
    monkeypatch.setattr(module, "_DRIVER_TIMEOUT_S", 3.0)
    cuda("sleep(600); return 0;")
    assert ask(CUDA_FACTS) == {"problem": "no answer within 3 s"}


def test_nvml_tells_values_and_what_it_does_not_support_without_the_uuid(
    fake_nvml: Any, nvidia_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia = fake_nvml.FakeNvml(tmp_path / "state")
    nvidia.add_gpu(name="Orin (nvgpu)", uuid="GPU-secret", power=fake_nvml.Error(fake_nvml.NOT_SUPPORTED))
    for name, value in nvidia.environment(nvidia_library).items():
        monkeypatch.setenv(name, value)
    told = ask(NVML_FACTS)
    (gpu,) = told["gpus"]
    assert (told["problem"], gpu["name"], gpu["temperature_c"], gpu["power_mw"]) == ("", "Orin (nvgpu)", 45, None)
    assert "Not Supported" in gpu["missing"]["power_mw"]
    assert "secret" not in json.dumps(told)
