"""All sensors of a machine together: precedence of sources, and the rest after one sensor fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest

from edge_server.plugins.governor.control_policy import Cause
from edge_server.plugins.governor.policy_inputs import throttle_causes
from edge_server.plugins.governor.readings import Gpu, MachineReading
from edge_server.plugins.governor.sensors.all_sensors import MachineSensors, read_machine
from edge_server.plugins.governor.sensors.nvml_sensor import OPEN_AGAIN_S

MakeBoard = Callable[[str], Any]
MakeSensors = Callable[..., MachineSensors]


@pytest.fixture
def sensors_of() -> Iterator[MakeSensors]:
    """Makes the sensors of a board, which are closed at the end."""
    made = []

    def make(board: Any, **options: Any) -> MachineSensors:
        made.append(MachineSensors(board.root, **options))
        return made[-1]

    yield make
    for sensors in made:
        sensors.close()


def read_twice(sensors: MachineSensors) -> MachineReading:
    """Read so that what takes two readings is there."""
    sensors.read(1.0)
    return sensors.read(2.0)


def gpu(reading: MachineReading, key: str) -> Gpu:
    return next(item for item in reading.gpus if item.key == key)


def power_of(reading: MachineReading, name: str) -> int:
    power_mw = next(rail.power_mw for rail in reading.rails if rail.name == name)
    assert power_mw is not None
    return power_mw


@pytest.mark.parametrize(
    ("name", "zone"),
    [("orin_nano_jp6", "gpu-thermal"), ("orin_nx_jp5", "GPU-therm"), ("agx_orin_jp6", "gpu-thermal")],
)
def test_on_a_jetson_sysfs_values_override_invented_nvml_values(
    make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors, name: str, zone: str
) -> None:
    board = make_board(name)
    # While the GPU is idle its own sensor may be off, and then there is nothing that NVML could be wrong about.
    board.set_temperature(zone, 61.5)
    board.write(next(path for path in board.files if path.endswith("/load")), 430)
    alone = sensors_of(board).read(1.0)
    nvidia.add_gpu(name="Orin (nvgpu)", memory_total=None, temperature0=3, utilization=99, power=777, clock0=1)
    reading = sensors_of(board).read(1.0)
    both = gpu(reading, "igpu")
    assert [item.key for item in reading.gpus] == ["igpu"]
    assert both.temperature_c == gpu(alone, "igpu").temperature_c == 61.5
    assert both.clock_hz == gpu(alone, "igpu").clock_hz
    assert (both.utilization, both.sources["utilization"][:6]) == (0.43, "sysfs:")
    assert (reading.heat, reading.power_mw) == (alone.heat, alone.power_mw)
    assert reading.zones == alone.zones


def test_nvml_adds_what_the_sysfs_of_a_thor_lacks(make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors) -> None:
    nvidia.add_gpu(name="NVIDIA Thor", memory_total=None, utilization=97, power=1_000, energy=None)
    reading = sensors_of(make_board("thor_jp7")).read(1.0)
    both = gpu(reading, "igpu")
    assert (both.utilization, both.sources["utilization"], both.name) == (0.97, "nvml", "NVIDIA Thor")
    assert "utilization" not in both.missing
    assert "igpu" not in {rail.name for rail in reading.rails}, "its power is part of the module's"


def test_a_gpu_card_in_a_jetson_adds_its_power_and_temperature(
    make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors
) -> None:
    board = make_board("orin_nano_jp6")
    alone = sensors_of(board).read(1.0)
    nvidia.add_gpu(power=50_000, temperature0=61)
    reading = sensors_of(board).read(1.0)
    assert alone.power_mw is not None
    assert reading.power_mw == alone.power_mw + 50_000
    assert {item.key for item in reading.gpus} == {"igpu", "gpu0"}
    assert "gpu0" in {zone.name for zone in reading.zones}


def test_the_power_of_an_x86_machine_is_the_sum_of_processor_and_cards(
    make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors
) -> None:
    board = make_board("x86_box")
    nvidia.add_gpu(power=61_000)
    nvidia.add_gpu(power=9_000)
    sensors = sensors_of(board)
    assert sensors.read(1.0).power_mw is None, "RAPL's power follows from two readings"
    energy = next(path for path in board.files if path.endswith("intel-rapl:0/energy_uj"))
    board.write(energy, int(board.at(energy).read_text()) + 15_000_000)
    reading = sensors.read(2.0)
    counted = {rail.name for rail in reading.rails if rail.is_counted}
    assert {"gpu0", "gpu1"} < counted
    assert power_of(reading, "package-0") == 15_000
    assert reading.power_mw == sum(power_of(reading, name) for name in counted)


def test_a_missing_power_reading_makes_the_total_unknown(
    make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors, fake_nvml: Any
) -> None:
    nvidia.add_gpu()
    sensors = sensors_of(make_board("x86_box"))
    assert read_twice(sensors).power_mw is not None
    nvidia.set(0, power=fake_nvml.Error(fake_nvml.TIMEOUT))
    reading = sensors.read(3.0)
    assert reading.power_mw is None
    assert "Timeout" in reading.missing["power_mw"]
    assert reading.silent == {"rail gpu0"}
    nvidia.set(0, power=20_000)
    assert sensors.read(4.0).silent == frozenset()


@pytest.mark.parametrize("metric", ["power", "temperature0"])
def test_a_metric_that_becomes_unsupported_is_silent_and_not_absent(
    make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors, metric: str
) -> None:
    nvidia.add_gpu()
    sensors = sensors_of(make_board("x86_box"))
    read_twice(sensors)
    nvidia.set(0, **{metric: None})
    assert sensors.read(3.0).silent == {"rail gpu0" if metric == "power" else "zone gpu0"}


def test_a_lost_card_is_removed_from_the_total_power(
    make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors
) -> None:
    nvidia.add_gpu()
    sensors = sensors_of(make_board("x86_box"))
    read_twice(sensors)
    nvidia.lose(0)
    reading = sensors.read(3.0)
    assert gpu(reading, "gpu0").is_lost
    assert reading.silent == frozenset()
    assert reading.power_mw is not None
    nvidia.give_back(0)
    assert not gpu(sensors.read(3.0 + OPEN_AGAIN_S), "gpu0").is_lost


def test_an_unloaded_driver_makes_its_card_silent(
    make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors, fake_nvml: Any
) -> None:
    nvidia.add_gpu()
    sensors = sensors_of(make_board("x86_box"))
    read_twice(sensors)
    nvidia.set(0, temperature0=fake_nvml.Error(fake_nvml.VERSION_MISMATCH))
    nvidia.set_init(fake_nvml.VERSION_MISMATCH)
    reading = sensors.read(3.0)
    assert reading.silent == {"rail gpu0", "zone gpu0"}
    assert reading.heat is not None, "the processor is felt as before"


def test_a_card_that_disappears_does_not_affect_metrics_of_others(
    make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors, fake_nvml: Any
) -> None:
    sensors = sensors_of(make_board("x86_box"))
    nvidia.add_gpu(**fake_nvml.A_CARD)
    whole = read_twice(sensors)
    at_s = 2.0
    for metric, value in fake_nvml.A_CARD.items():
        for answer in (None, *(fake_nvml.Error(code) for code in (2, 3, 4, 6, 10, 13, 19, 21, 27, 999))):
            at_s += 0.5
            nvidia.set(0, **{metric: answer})
            reading = sensors.read(at_s)
            assert [zone.name for zone in reading.zones if zone.name != "gpu0"] == [
                zone.name for zone in whole.zones if zone.name != "gpu0"
            ]
            assert not gpu(reading, "gpu0").is_lost
        nvidia.set(0, **{metric: value})
    assert gpu(sensors.read(at_s + 1), "gpu0").missing == {}


@pytest.mark.parametrize(("name", "causes"), [("x86_box", {Cause.THERMAL}), ("orin_nano_jp6", set())])
def test_throttle_reasons_of_an_integrated_gpu_count_if_sysfs_has_none(
    make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors, name: str, causes: set[Cause]
) -> None:
    nvidia.add_gpu(name="NVIDIA GB10" if causes else "Orin (nvgpu)", memory_total=None, reasons=0x20)
    assert throttle_causes(read_twice(sensors_of(make_board(name)))) & {Cause.THERMAL} == causes


class Faulty:
    """A sensor with a bug."""

    def __init__(self) -> None:
        self.error: Exception | None = ValueError("no such luck")
        self.is_closed = False

    def read(self, now_s: float) -> MachineReading:
        if self.error is not None:
            raise self.error
        return MachineReading(now_s, gpus=(Gpu("gpu0", temperature_c=50.0),))

    def close(self) -> None:
        self.is_closed = True
        raise OSError("stuck")


def test_a_failing_sensor_hides_no_other_and_is_logged_once_per_error_type(
    make_board: MakeBoard, sensors_of: MakeSensors, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty()
    sensors = sensors_of(make_board("orin_nano_jp6"), nvml=faulty)
    for at_s in (1.0, 2.0, 3.0):
        reading = sensors.read(at_s)
        assert reading.heat is not None
        assert reading.missing["nvml"] == "the sensor failed: ValueError: no such luck"
    assert len(caplog.records) == 1
    faulty.error = TypeError("something else")
    sensors.read(4.0)
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    faulty.error = None
    reading = sensors.read(5.0)
    assert gpu(reading, "gpu0").temperature_c == 50.0
    assert "nvml" not in reading.missing


def test_a_sensor_that_fails_to_close_keeps_no_other_open(make_board: MakeBoard, sensors_of: MakeSensors) -> None:
    faulty = Faulty()
    sensors_of(make_board("x86_box"), nvml=faulty).close()
    assert faulty.is_closed


def test_a_jetson_stays_a_jetson_while_its_files_fail(
    make_board: MakeBoard, nvidia: Any, sensors_of: MakeSensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia.add_gpu(name="NVIDIA Thor", memory_total=None)
    sensors = sensors_of(make_board("thor_jp7"))
    read_twice(sensors)

    def fail(self: object, now_s: float) -> MachineReading:
        raise RuntimeError("a file of another world")

    monkeypatch.setattr("edge_server.plugins.governor.sensors.jetson_sensor.TegraSensor.read", fail)
    reading = sensors.read(3.0)
    assert reading.rails == (), "the GPU's watts do not stand in for the module's"
    assert "zone tj" in reading.silent
    assert reading.missing["tegra"]


def test_a_single_reading_closes_nvml(make_board: MakeBoard, nvidia: Any) -> None:
    nvidia.add_gpu(temperature0=66)
    assert gpu(read_machine(make_board("x86_box").root), "gpu0").temperature_c == 66.0
    assert pynvml.nvmlLib.fake_nvml_open_count() == 0


def test_the_substitute_of_a_junction_sensor_is_not_missed_once_that_is_back(
    make_board: MakeBoard, sensors_of: MakeSensors
) -> None:
    board = make_board("orin_nano_jp6")
    sensors = sensors_of(board)
    sensors.read(0.0)
    folder = board.zone("tj-thermal")
    files = [path for path in board.files if path.startswith(f"{folder}/")]
    board.remove(folder)
    assert sensors.read(60.0).silent == {"zone tj"}
    for path in files:
        board.restore(path)
    assert sensors.read(120.0).silent == frozenset()


def test_alerts_and_alarms_that_were_reported_before_are_expected(
    make_board: MakeBoard, sensors_of: MakeSensors
) -> None:
    board = make_board("orin_nano_jp6")
    sensors = sensors_of(board)
    sensors.read(0.0)
    board.remove(board.cooler("gpu-throttle-alert"))
    board.remove(board.monitor("soctherm_oc"))
    assert sensors.read(60.0).silent == {"alert gpu-throttle-alert", "alarm oc1", "alarm oc2", "alarm oc3"}
