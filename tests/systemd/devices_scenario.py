"""Scenario inside the booted machine: the service opens NVIDIA's devices, whose drivers were not loaded at the boot."""

import json
import subprocess
import time
import traceback
from pathlib import Path

NAME = "edge-server.service"
DEVICES = Path("/run/devices")
"""Replaces /proc/devices: the list of what is registered, by which systemd resolves `DeviceAllow=char-...`."""
RESULT = Path("/var/lib/edge_server/state/opened")
found: dict = {}


def do(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


def what_the_service_opens() -> dict:
    """Start the service; return what it could open, and its journal."""
    RESULT.unlink(missing_ok=True)
    do("systemctl", "restart", NAME)
    opened = json.loads(RESULT.read_text())
    do("systemctl", "stop", NAME)
    return opened


def unload() -> None:
    """As after a boot: nvidia-uvm is not registered, and has no file."""
    DEVICES.write_text("".join(line for line in REGISTERED if "nvidia-uvm" not in line))
    Path("/dev/nvidia-uvm").unlink(missing_ok=True)


REGISTERED = Path("/proc/devices").read_text().splitlines(keepends=True)


def main() -> None:
    do("systemd-sysusers", "/etc/sysusers.d/edge-server.conf")
    do("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/edge-server.conf")
    # A device that no line of the unit names, and one that is known from the start.
    do("mknod", "--mode=666", "/dev/stranger", "c", "7", "0")
    do("mknod", "--mode=666", "/dev/nvhost-gpu", "c", "10", "229")
    do("chmod", "4755", "/usr/bin/nvidia-modprobe")
    unload()
    do("mount", "--bind", str(DEVICES), "/proc/devices")
    do("systemctl", "daemon-reload")
    found["first"] = what_the_service_opens()
    # As after a driver was unloaded and loaded again: every start looks.
    unload()
    found["second"] = what_the_service_opens()
    unload()
    Path("/usr/bin/nvidia-modprobe").unlink()
    found["no_driver"] = what_the_service_opens()
    # The device is registered while the service runs.
    unload()
    Path("/run/wait").touch()
    do("systemctl", "start", "--no-block", NAME)
    while not Path("/var/lib/edge_server/state/waits").exists():
        time.sleep(0.05)
    do("/late-nvidia-modprobe", "-u", "-c", "0")
    Path("/run/wait").unlink()
    while do("systemctl", "show", "--property=ActiveState", "--value", NAME).strip() == "activating":
        time.sleep(0.05)
    found["late"] = json.loads(RESULT.read_text())
    # A Jetson Orin: its driver registers by the name of the device.
    Path("/etc/systemd/system/edge-server.service.d/box.conf").write_text(Path("/jetson.conf").read_text())
    do("systemctl", "daemon-reload")
    unload()
    found["no_nvgpu"] = what_the_service_opens()
    DEVICES.write_text(DEVICES.read_text().replace("devices:\n", "devices:\n 10 17000000.gpu\n", 1))
    found["nvgpu"] = what_the_service_opens()


try:
    main()
except Exception as error:  # noqa: BLE001 - every error is reported to the test outside
    found["error"] = f"{traceback.format_exc()}\n{getattr(error, 'stderr', '')}"
finally:
    subprocess.run(["journalctl", "--sync"], check=False)
    journal = ["journalctl", "--unit", NAME, "--unit=edge-server-nvidia.service", "--output=cat"]
    found["journal"] = subprocess.run(journal, capture_output=True, text=True, check=False).stdout
    Path("/results/results.json").write_text(json.dumps(found))
