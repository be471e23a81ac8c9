"""NVIDIA's devices, whose driver is loaded late, on a machine booted by systemd with the filter of devices."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

SYSTEMD = Path(__file__).parents[2] / "systemd"
SCENARIO = Path(__file__).parent / "devices_scenario.py"

MODPROBE = """#!/bin/sh
# As nvidia-modprobe: loads the module, which registers its number, and makes the device file. The number is that of
# /dev/fuse, which the service may not open otherwise.
set -e
[ "$*" = "-u -c 0" ]
[ "$(id -u)" = 0 ]
registered=$(sed '/nvidia-uvm/d; /^Character/a\\ 10 nvidia-uvm' /run/devices)
echo "$registered" >/run/devices
[ -e /dev/nvidia-uvm ] || mknod --mode=666 /dev/nvidia-uvm c 10 229
"""

OPENS = """#!/usr/bin/python3
# As CUDA: a device file that is not there is made by the setuid program, and then opened.
import json, os, subprocess, time
if os.path.exists("/run/wait"):
    open("/var/lib/edge_server/state/waits", "w").close()
    while os.path.exists("/run/wait"):
        time.sleep(0.05)
if not os.path.exists("/dev/nvidia-uvm") and os.path.exists("/usr/bin/nvidia-modprobe"):
    subprocess.run(["/usr/bin/nvidia-modprobe", "-u", "-c", "0"], check=False)
opened = {"uid": os.getuid()}
for name in ("nvidia-uvm", "nvhost-gpu", "stranger", "null"):
    try:
        os.close(os.open(f"/dev/{name}", os.O_RDWR))
        opened[name] = "open"
    except OSError as error:
        opened[name] = error.strerror
open("/var/lib/edge_server/state/opened", "w").write(json.dumps(opened))
"""

ONCE = """[Service]
Type=oneshot
WatchdogSec=0
Restart=no
ExecStart=
ExecStart=/opens
"""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def seen(machine: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenario saw inside; one boot for all tests."""
    why = machine.missing_requirement()
    if why or not Path("/dev/fuse").exists():
        pytest.skip(why or "needs /dev/fuse, whose number stands in for that of nvidia-uvm")
    folder = tmp_path_factory.mktemp("devices")
    files = folder / "files"
    for source, target in [
        *((unit, f"etc/systemd/system/{unit.name}") for unit in SYSTEMD.glob("*.service")),
        (SYSTEMD / "edge-server.service.d/nvidia.conf", "etc/systemd/system/edge-server.service.d/box.conf"),
        (SYSTEMD / "edge-server.service.d/jetson.conf", "jetson.conf"),
        (SYSTEMD / "sysusers.conf", "etc/sysusers.d/edge-server.conf"),
        (SYSTEMD / "tmpfiles.conf", "etc/tmpfiles.d/edge-server.conf"),
    ]:
        (files / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, files / target)
    (files / "etc/systemd/system/edge-server.service.d/once.conf").write_text(ONCE)
    (files / "usr/bin").mkdir(parents=True)
    for path, text in (
        (files / "usr/bin/nvidia-modprobe", MODPROBE),
        (files / "late-nvidia-modprobe", MODPROBE),
        (files / "opens", OPENS),
    ):
        path.write_text(text)
        path.chmod(0o755)
    found: dict[str, Any] = machine.boot(None, files, folder, SCENARIO, 100)
    assert "error" not in found, f"{found.get('error')}\n{found.get('journal')}"
    return found


def test_nvidia_uvm_that_is_not_loaded_at_the_boot_is_open_to_the_service(seen: dict[str, Any]) -> None:
    assert seen["first"]["uid"] != 0
    assert (seen["first"]["nvidia-uvm"], seen["first"]["null"]) == ("open", "open"), seen["journal"]


def test_every_start_loads_a_driver_that_was_unloaded_since(seen: dict[str, Any]) -> None:
    assert seen["second"]["nvidia-uvm"] == "open", seen["journal"]


def test_devices_that_the_unit_does_not_name_stay_closed(seen: dict[str, Any]) -> None:
    assert seen["first"]["stranger"] == "Operation not permitted"


def test_a_machine_without_the_driver_starts_the_service(seen: dict[str, Any]) -> None:
    assert (seen["no_driver"]["nvidia-uvm"], seen["no_driver"]["null"]) == ("No such file or directory", "open")


def test_a_device_that_is_registered_after_the_start_is_closed_to_the_service(seen: dict[str, Any]) -> None:
    """Why the driver is loaded by a unit before it."""
    assert seen["late"]["nvidia-uvm"] == "Operation not permitted", seen["journal"]


def test_nodes_of_an_orin_are_open_by_the_name_under_which_its_driver_registers_them(seen: dict[str, Any]) -> None:
    assert seen["no_nvgpu"]["nvhost-gpu"] == "Operation not permitted"
    assert (seen["nvgpu"]["nvhost-gpu"], seen["nvgpu"]["stranger"]) == ("open", "Operation not permitted")
