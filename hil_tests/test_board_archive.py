"""The archive of `edge-server doctor --collect`, of this machine or of another one (`--board=ARCHIVE`): the governor's
sensors, the doctor and the service's filter of devices fit the board."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from edge_server.plugins.governor.sensors.all_sensors import read_machine

UNIT = Path(__file__).parent.parent / "systemd/edge-server.service.d/jetson.conf"


def about(board: Path) -> dict[str, Any]:
    return dict(json.loads((board / "board.json").read_text()))


def test_every_file_of_the_board_was_read_or_is_switched_off(board: Path) -> None:
    unread = about(board)["unread"]
    assert [why for why in unread.values() if "try again" not in why] == []


def test_the_governor_reads_heat_power_and_clocks_of_the_board(board: Path, measure: Any) -> None:
    reading = read_machine(board)
    known = {zone.name: zone.temperature_c for zone in reading.zones if zone.temperature_c is not None}
    for name, temperature_c in known.items():
        measure.value(f"zone {name}", temperature_c, "°C")
        assert -20 < temperature_c < 125, name
    for rail in reading.rails:
        if rail.power_mw is not None:
            measure.value(f"rail {rail.name}", rail.power_mw, "mW")
    if reading.soc is not None:
        assert "tj" in known
        assert reading.jetpack is not None, f"L4T {reading.l4t} has no JetPack in jetson_identity.py"
        assert reading.power_mw is not None
        assert reading.power_mode is not None
        assert any(clock.name == "gpu" for clock in reading.clocks)


def test_the_doctor_finds_no_problem_on_the_board(board: Path) -> None:
    command = [sys.executable, "-m", "edge_server", "doctor", "--json", "--skip-runtimes", f"--sysfs-root={board}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_the_service_may_open_the_gpus_devices_of_the_board(board: Path) -> None:
    """By the names under which they are registered; see tests/jetson/test_board_devices.py for the whole filter."""
    if read_machine(board).soc is None:
        return
    registered = (board / "proc/devices").read_text().partition("Block devices:")[0].split()
    gpu = {name for name in registered if name.endswith((".gpu", ".ga10b")) or name.startswith(("nvgpu", "nvidia"))}
    allowed = [line[17:-3] for line in UNIT.read_text().splitlines() if line.startswith("DeviceAllow=char-")]
    assert gpu, "no driver of the GPU is registered"
    assert [name for name in gpu if not any(name.startswith(prefix.rstrip("*")) for prefix in allowed)] == []
