"""NVML sensor: the real pynvml with a compiled library in place of the driver's."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from edge_server.plugins.governor.readings import Gpu, MachineReading, ThrottleReason, TripPoints
from edge_server.plugins.governor.sensors.gpu_clock_actuators import NvmlCap
from edge_server.plugins.governor.sensors.nvml_sensor import MISMATCH_AGAIN_S, OPEN_AGAIN_S, NvmlSensor

METRICS = {
    "temperature_c": ("temperature0",),
    "power_mw": ("power",),
    "power_limit_mw": ("power_limit",),
    "energy_mj": ("energy",),
    "utilization": ("utilization",),
    "memory_total_bytes": ("memory_total",),
    "clock_hz": ("clock0",),
    "reasons": ("reasons",),
}
"""Metric of a Gpu -> what it is asked for."""

needs_newer_calls = pytest.mark.skipif(
    not hasattr(pynvml, "nvmlDeviceGetMarginTemperature") or not hasattr(pynvml, "nvmlDeviceGetTemperatureV"),
    reason="this pynvml is older than the call: pip install -U nvidia-ml-py",
)


@pytest.fixture
def sensor() -> Iterator[NvmlSensor]:
    sensor = NvmlSensor()
    yield sensor
    sensor.close()


def only_gpu(reading: MachineReading) -> Gpu:
    assert len(reading.gpus) == 1
    return reading.gpus[0]


def open_count() -> int:
    """Number of initialisations of NVML minus its shutdowns."""
    return int(pynvml.nvmlLib.fake_nvml_open_count())


def test_a_reading_contains_everything_that_a_card_reports(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu(temperature0=71, power=61_500, utilization=83, memory_used=3 << 30)
    reading = sensor.read(10.0)
    gpu = only_gpu(reading)
    assert (gpu.key, gpu.name, gpu.uuid, gpu.is_integrated, gpu.is_lost) == (
        "gpu0", "NVIDIA Fake 0", "GPU-fake-0", False, False,
    )  # fmt: skip
    assert (gpu.temperature_c, gpu.power_mw, gpu.power_limit_mw, gpu.energy_mj) == (71.0, 61_500, 70_000, 1_000_000)
    assert (gpu.utilization, gpu.memory_total_bytes, gpu.memory_used_bytes) == (0.83, 16 << 30, 3 << 30)
    assert gpu.clock_hz == 1_590_000_000
    assert gpu.reasons == frozenset()
    assert gpu.missing == {}
    zone, rail = reading.zones[0], reading.rails[0]
    assert (zone.name, zone.temperature_c, zone.trips) == ("gpu0", 71.0, TripPoints(90.0, 93.0, 98.0))
    assert (rail.name, rail.power_mw, rail.is_counted, rail.limit_mw) == ("gpu0", 61_500, True, 70_000)
    assert [fan.duty for fan in reading.fans] == [0.3]
    assert reading.missing == {}


def test_a_value_that_changes_is_seen_by_the_next_read(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu(temperature0=50)
    assert only_gpu(sensor.read(1.0)).temperature_c == 50.0
    nvidia.set(0, temperature0=88, power=70_000)
    gpu = only_gpu(sensor.read(1.5))
    assert (gpu.temperature_c, gpu.power_mw) == (88.0, 70_000)


@pytest.mark.sample(4)
@pytest.mark.parametrize("metric", METRICS)
def test_an_unsupported_metric_is_none_with_a_reason(nvidia: Any, sensor: NvmlSensor, metric: str) -> None:
    nvidia.add_gpu(**dict.fromkeys(METRICS[metric]))
    gpu = only_gpu(sensor.read(1.0))
    assert getattr(gpu, metric) is None
    assert "Not Supported" in gpu.missing[metric]
    known = [name for name in METRICS if getattr(gpu, name) is not None]
    assert known == [name for name in METRICS if name != metric]


@pytest.mark.sample(4)
@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_that_appears_later_is_read(nvidia: Any, sensor: NvmlSensor, metric: str) -> None:
    nvidia.add_gpu()
    given = {name: pynvml_value for name, pynvml_value in _values(nvidia).items() if name in METRICS[metric]}
    nvidia.set(0, **dict.fromkeys(METRICS[metric]))
    assert getattr(only_gpu(sensor.read(1.0)), metric) is None
    nvidia.set(0, **given)
    gpu = only_gpu(sensor.read(1.5))
    assert getattr(gpu, metric) is not None
    assert metric not in gpu.missing


def _values(nvidia: Any) -> dict[str, str]:
    lines = (line.split("=", 1) for line in nvidia.state.read_text().splitlines())
    return {key.removeprefix("0."): value for key, value in lines}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_NOT_READY])
def test_a_temporary_error_makes_the_total_power_unknown(
    nvidia: Any, sensor: NvmlSensor, fake_nvml: Any, code: int
) -> None:
    nvidia.add_gpu()
    sensor.read(1.0)
    nvidia.set(0, power=fake_nvml.Error(code), temperature0=fake_nvml.Error(code))
    reading = sensor.read(1.5)
    assert (reading.rails[0].power_mw, reading.rails[0].is_counted) == (None, True)
    assert reading.rails[0].problem
    assert (reading.zones[0].temperature_c, bool(reading.zones[0].problem)) == (None, True)
    nvidia.set(0, power=20_000, temperature0=45)
    assert sensor.read(2.0).rails[0].power_mw == 20_000


def test_power_that_a_gpu_never_reports_is_not_part_of_the_total(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu(power=None)
    assert not sensor.read(1.0).rails[0].is_counted


def test_several_gpus_keep_their_keys_when_one_goes(nvidia: Any, sensor: NvmlSensor) -> None:
    for celsius in (40, 50, 60):
        nvidia.add_gpu(temperature0=celsius)
    assert [(gpu.key, gpu.temperature_c) for gpu in sensor.read(1.0).gpus] == [
        ("gpu0", 40.0), ("gpu1", 50.0), ("gpu2", 60.0),
    ]  # fmt: skip
    nvidia.lose(1)
    assert [(gpu.key, gpu.temperature_c, gpu.is_lost) for gpu in sensor.read(2.0).gpus] == [
        ("gpu0", 40.0, False), ("gpu1", None, True), ("gpu2", 60.0, False),
    ]  # fmt: skip


@pytest.mark.parametrize("code", [15, 16, 28])
def test_a_lost_gpu_has_no_id_and_no_expected_readings(nvidia: Any, sensor: NvmlSensor, code: int) -> None:
    nvidia.add_gpu()
    sensor.read(1.0)
    nvidia.lose(0, code)
    reading = sensor.read(2.0)
    assert only_gpu(reading).is_lost
    assert only_gpu(reading).missing["nvml"]
    assert (reading.zones, reading.rails, reading.energy) == ((), (), ())


def test_a_gpu_that_was_reset_is_found_after_nvml_is_reinitialised(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu(temperature0=40)
    nvidia.add_gpu(temperature0=50)
    sensor.read(1.0)
    nvidia.lose(1)
    sensor.read(2.0)
    nvidia.give_back(1)
    assert sensor.read(2.5).gpus[1].is_lost, "the library remembers"
    gpus = sensor.read(2.0 + OPEN_AGAIN_S).gpus
    assert [(gpu.key, gpu.is_lost, gpu.temperature_c) for gpu in gpus] == [
        ("gpu0", False, 40.0), ("gpu1", False, 50.0),
    ]  # fmt: skip
    assert open_count() == 1


def test_a_gpu_lost_before_the_start_is_listed_once_when_it_returns(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu()
    nvidia.lose(0)
    assert [(gpu.key, gpu.is_lost) for gpu in sensor.read(1.0).gpus] == [("gpu0", True)]
    nvidia.give_back(0)
    gpu = only_gpu(sensor.read(1.0 + OPEN_AGAIN_S))
    assert (gpu.key, gpu.uuid, gpu.is_lost, gpu.temperature_c) == ("gpu0", "GPU-fake-0", False, 45.0)


def test_a_gpu_that_nvml_no_longer_lists_is_lost(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu()
    nvidia.add_gpu()
    sensor.read(1.0)
    nvidia.lose(1)
    sensor.read(2.0)
    nvidia.set_count(1)
    gpus = sensor.read(2.0 + OPEN_AGAIN_S).gpus
    assert [(gpu.key, gpu.is_lost) for gpu in gpus] == [("gpu0", False), ("gpu1", True)]


def test_an_inaccessible_gpu_hides_no_other(nvidia: Any, sensor: NvmlSensor, fake_nvml: Any) -> None:
    nvidia.add_gpu()
    nvidia.add_gpu()
    nvidia.set(0, handle=fake_nvml.NO_PERMISSION)
    reading = sensor.read(1.0)
    mute, other = sorted(reading.gpus, key=lambda gpu: gpu.key)
    assert (mute.is_lost, mute.missing["nvml"]) == (False, "Insufficient Permissions")
    assert other.temperature_c == 45.0
    assert [rail.name for rail in reading.rails if rail.is_counted] == ["gpu1"]


def test_a_library_installed_later_is_found_without_a_restart(
    nvidia: Any, install_nvidia: Callable[[Path | None], None], sensor: NvmlSensor, tmp_path: Path
) -> None:
    nvidia.add_gpu()
    install_nvidia(None)
    reading = sensor.read(1.0)
    assert reading.gpus == ()
    assert reading.missing["nvml"] == "NVML: NVML Shared Library Not Found"
    install_nvidia(tmp_path / "libnvidia-ml.so.1")
    assert sensor.read(1.0 + OPEN_AGAIN_S / 2).gpus == (), "it is not looked for all the time"
    assert only_gpu(sensor.read(1.0 + OPEN_AGAIN_S)).temperature_c == 45.0


def test_a_driver_loaded_later_is_found_without_a_restart(nvidia: Any, sensor: NvmlSensor, fake_nvml: Any) -> None:
    nvidia.add_gpu()
    nvidia.set_init(fake_nvml.DRIVER_NOT_LOADED)
    assert sensor.read(1.0).missing["nvml"] == "NVML: Driver Not Loaded"
    nvidia.set_init(0)
    assert only_gpu(sensor.read(1.0 + OPEN_AGAIN_S)).temperature_c == 45.0


def test_a_driver_version_mismatch_is_logged_once_and_retried_rarely(
    nvidia: Any, sensor: NvmlSensor, fake_nvml: Any, caplog: pytest.LogCaptureFixture
) -> None:
    nvidia.add_gpu()
    nvidia.set_init(fake_nvml.VERSION_MISMATCH)
    with caplog.at_level(logging.WARNING):
        for at_s in (1.0, 1.0 + OPEN_AGAIN_S, 1.0 + MISMATCH_AGAIN_S):
            assert "version mismatch" in sensor.read(at_s).missing["nvml"]
    assert len(caplog.records) == 1
    assert "The driver was replaced" in caplog.text
    nvidia.set_init(0)
    assert sensor.read(1.0 + MISMATCH_AGAIN_S + OPEN_AGAIN_S).gpus == ()
    assert only_gpu(sensor.read(1.0 + 2 * MISMATCH_AGAIN_S)).temperature_c == 45.0


def test_a_driver_replaced_at_run_time_makes_its_gpus_silent_and_not_lost(
    nvidia: Any, sensor: NvmlSensor, fake_nvml: Any
) -> None:
    nvidia.add_gpu()
    sensor.read(1.0)
    nvidia.set(0, temperature0=fake_nvml.Error(fake_nvml.VERSION_MISMATCH))
    nvidia.set_init(fake_nvml.VERSION_MISMATCH)
    reading = sensor.read(2.0)
    assert (only_gpu(reading).is_lost, reading.zones[0].temperature_c) == (False, None)
    assert (reading.rails[0].power_mw, reading.rails[0].is_counted) == (None, True)
    assert "version mismatch" in reading.missing["nvml"]


def test_nvml_is_reinitialised_after_another_user_shut_it_down(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu()
    sensor.read(1.0)
    pynvml.nvmlShutdown()
    sensor.read(20.0)
    assert only_gpu(sensor.read(20.5)).temperature_c == 45.0


def test_close_shuts_nvml_down_and_may_be_called_again(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu()
    sensor.read(1.0)
    assert open_count() == 1
    sensor.close()
    sensor.close()
    assert open_count() == 0
    assert only_gpu(sensor.read(1.5)).temperature_c == 45.0, "a closed sensor may be read again"


def test_a_child_process_opens_nvml_for_itself(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu()
    sensor.read(1.0)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, str(only_gpu(sensor.read(1.5)).temperature_c).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told == "45.0"
    assert only_gpu(sensor.read(2.0)).temperature_c == 45.0


@pytest.mark.parametrize(
    ("without", "metric"),
    [
        ("nvmlDeviceGetTemperatureV", "temperature_c"),
        pytest.param("nvmlDeviceGetTemperature", "temperature_c", marks=needs_newer_calls),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_mw"),
        ("nvmlDeviceGetMemoryInfo_v2", "memory_total_bytes"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "reasons"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", "reasons"),
    ],
)
def test_old_and_new_names_of_nvml_calls_are_tried(
    nvidia: Any,
    install_nvidia: Callable[[Path | None], None],
    sensor: NvmlSensor,
    fake_nvml: Any,
    tmp_path: Path,
    without: str,
    metric: str,
) -> None:
    nvidia.add_gpu(management_limit=60_000)
    (tmp_path / "older").mkdir()
    install_nvidia(fake_nvml.build(tmp_path / "older", without=[without]))
    gpu = only_gpu(sensor.read(1.0))
    assert getattr(gpu, metric) is not None
    assert metric not in gpu.missing


def test_a_driver_without_optional_calls_still_lists_its_gpus(
    nvidia: Any,
    install_nvidia: Callable[[Path | None], None],
    sensor: NvmlSensor,
    fake_nvml: Any,
    tmp_path: Path,
) -> None:
    nvidia.add_gpu()
    (tmp_path / "bare").mkdir()
    without = [
        name for name in dir(pynvml)
        if name.startswith("nvmlDeviceGet") and name not in ("nvmlDeviceGetName", "nvmlDeviceGetUUID")
    ] + ["nvmlDeviceGetMemoryInfo_v2"]  # fmt: skip
    install_nvidia(fake_nvml.build(tmp_path / "bare", without=without))
    gpu = only_gpu(sensor.read(1.0))
    assert gpu.name == "NVIDIA Fake 0"
    assert all("Function Not Found" in gpu.missing[metric] for metric in METRICS)


def test_a_gpu_without_own_memory_shares_system_memory(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu(name="NVIDIA GB10", memory_total=None)
    gpu = only_gpu(sensor.read(1.0))
    assert (gpu.key, gpu.is_integrated, gpu.temperature_c) == ("igpu", True, 45.0)


@pytest.mark.parametrize("name", ["Orin (nvgpu)", "NVIDIA Thor"])
def test_invented_zeros_of_a_jetsons_driver_are_ignored(nvidia: Any, sensor: NvmlSensor, name: str) -> None:
    zeros = dict.fromkeys(("temperature0", "power", "memory_total", "memory_used", "clock0", "utilization"), 0)
    nvidia.add_gpu(name=name, **zeros)
    gpu = only_gpu(sensor.read(1.0))
    assert (gpu.key, gpu.is_integrated, gpu.utilization) == ("igpu", True, 0.0)
    assert (gpu.temperature_c, gpu.power_mw, gpu.memory_total_bytes, gpu.clock_hz) == (None, None, None, None)


@pytest.mark.parametrize(
    ("bits", "words", "causes"),
    [
        (0x1 | 0x2 | 0x10 | 0x100, set(), set()),
        (0x4, {"sw_power_cap"}, {ThrottleReason.POWER_CAP}),
        (0x20, {"sw_thermal_slowdown"}, {ThrottleReason.THERMAL}),
        (0x48, {"hw_slowdown", "hw_thermal_slowdown"}, {ThrottleReason.THERMAL}),
        (0x88, {"hw_slowdown", "hw_power_brake_slowdown"}, {ThrottleReason.POWER_BRAKE}),
    ],
)
def test_clock_throttle_reasons_are_reported_as_text(
    nvidia: Any, sensor: NvmlSensor, bits: int, words: set[str], causes: set[ThrottleReason]
) -> None:
    nvidia.add_gpu(reasons=bits)
    gpu = only_gpu(sensor.read(1.0))
    assert (gpu.reasons, gpu.slowed_by) == (words, causes)


@pytest.mark.parametrize(("celsius", "cause"), [(60, ThrottleReason.POWER_BRAKE), (87, ThrottleReason.THERMAL)])
def test_a_slowdown_without_a_reason_counts_as_heat_only_near_the_limit(
    nvidia: Any, sensor: NvmlSensor, celsius: int, cause: ThrottleReason
) -> None:
    nvidia.add_gpu(reasons=0x8, temperature0=celsius)
    assert only_gpu(sensor.read(1.0)).slowed_by == {cause}


@needs_newer_calls
def test_the_thermal_margin_replaces_thresholds_that_newer_drivers_lack(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu(threshold0=None, threshold1=None, threshold3=None, margin=12, temperature0=None)
    reading = sensor.read(1.0)
    assert (reading.zones[0].headroom_c, reading.zones[0].temperature_c) == (12.0, None)
    nvidia.set(0, margin=-2)
    assert sensor.read(1.5).zones[0].headroom_c == -2.0


def test_energy_does_not_decrease_if_its_counter_restarts(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu(energy=5_000)
    assert sensor.read(1.0).energy[0].energy_mj == 5_000
    nvidia.set(0, energy=6_000)
    assert sensor.read(2.0).energy[0].energy_mj == 6_000
    nvidia.set(0, energy=300)
    assert sensor.read(3.0).energy[0].energy_mj == 6_300


def test_the_library_is_found_by_name_in_a_separate_process(
    fake_nvml: Any, nvidia_library: Path, tmp_path: Path
) -> None:
    nvidia = fake_nvml.FakeNvml(tmp_path / "nvidia")
    nvidia.add_gpu(temperature0=77)
    program = (
        "from edge_server.plugins.governor.sensors.nvml_sensor import NvmlSensor\n"
        "sensor = NvmlSensor()\n"
        "for line in iter(input, ''):\n"
        "    print(sensor.read(float(line)).gpus[0].temperature_c, flush=True)\n"
    )
    environment = {**os.environ, **nvidia.environment(nvidia_library)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print("1.0", file=process.stdin, flush=True)
        assert process.stdout.readline() == "77.0\n"
        nvidia.set(0, temperature0=81)
        print("2.0", file=process.stdin, flush=True)
        assert process.stdout.readline() == "81.0\n"
        print(file=process.stdin, flush=True)
        assert process.wait(10) == 0


def test_a_clock_cap_does_not_disturb_the_sensor(nvidia: Any, sensor: NvmlSensor) -> None:
    nvidia.add_gpu()
    sensor.read(1.0)
    cap = NvmlCap()
    assert cap.cap(1_200_400_000) == 1_200_000_000
    cap.release()
    assert only_gpu(sensor.read(2.0)).temperature_c is not None
    assert open_count() == 1


def test_a_clock_cap_that_one_card_refuses_is_removed_from_the_others(nvidia: Any, fake_nvml: Any) -> None:
    nvidia.add_gpu()
    nvidia.add_gpu(lock=fake_nvml.Error(fake_nvml.NOT_SUPPORTED))
    with pytest.raises(OSError, match="Not Supported"):
        NvmlCap().cap(1_000_000_000)
    assert nvidia.locked_clocks(0) is None


def test_a_lost_card_does_not_leave_the_others_capped(nvidia: Any) -> None:
    nvidia.add_gpu()
    nvidia.add_gpu()
    NvmlCap().cap(1_200_000_000)
    nvidia.lose(0)
    NvmlCap().release()
    assert nvidia.locked_clocks(1) is None
    assert NvmlCap().highest_hz() == 1_590_000_000
    assert open_count() == 0
