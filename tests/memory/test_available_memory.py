"""Available memory for one more model, from recorded proc trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.core.model_spec import ModelFile
from edge_server.memory import available_memory
from edge_server.memory.available_memory import (
    RUNTIME_BYTES,
    MemoryFloor,
    MemoryReading,
    estimate_bytes,
    limit_warning,
    read_memory,
    weight_bytes,
)

MIB = 1 << 20

JETSON_MEMINFO = """MemTotal:        3964808 kB
MemFree:          148840 kB
MemAvailable:     819200 kB
Buffers:           92064 kB
SwapTotal:       1982400 kB
SwapFree:        1712640 kB
"""

CALM = """some avg10=0.00 avg60=0.12 avg300=0.05 total=123456
full avg10=0.00 avg60=0.00 avg300=0.00 total=1234
"""

SHORT_OF_BREATH = """some avg10=34.53 avg60=12.10 avg300=3.05 total=99123456
full avg10=11.00 avg60=4.00 avg300=1.00 total=9901234
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "pressure").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(JETSON_MEMINFO)
    (tmp_path / "proc" / "pressure" / "memory").write_text(CALM)
    return tmp_path


def model(tmp_path: Path, sizes: dict[str, int], path: str = "model.onnx") -> ModelFile:
    version_dir = tmp_path / "m" / "1"
    for name, size in sizes.items():
        (version_dir / name).parent.mkdir(parents=True, exist_ok=True)
        with open(version_dir / name, "wb") as file:
            file.truncate(size)
    return ModelFile(version_dir / path, tmp_path / "m", 1)


def test_the_kernels_words_are_read(root: Path) -> None:
    assert read_memory(root) == MemoryReading(800 * MIB, 0.0)
    (root / "proc/pressure/memory").write_text(SHORT_OF_BREATH)
    assert read_memory(root).pressure_percent == 34.53


def test_what_this_machine_says_is_understood() -> None:
    reading = read_memory()
    assert reading.available_bytes is None or reading.available_bytes > 0


def test_a_model_must_fit_into_the_control_groups_limit_too(root: Path, tmp_path: Path) -> None:
    file = model(tmp_path, {"model.onnx": 200 * MIB})
    assert MemoryFloor(0, 0, root).refusal(file._replace(memory_bytes=300 * MIB), 1) is None
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(f"{512 * MIB}\n")
    (root / "sys/fs/cgroup/memory.current").write_text(f"{256 * MIB}\n")
    assert MemoryFloor(0, 0, root).refusal(file._replace(memory_bytes=300 * MIB), 1) == (
        "memory is short: 256 MiB are available, the model needs about 300 MiB"
    )


def test_a_limit_near_the_need_of_the_models_is_named_before_they_are_loaded(root: Path, tmp_path: Path) -> None:
    version = tmp_path / "models/m/1"
    version.mkdir(parents=True)
    with (version / "model.onnx").open("wb") as file:
        file.truncate(50 << 20)
    (root / "proc/self").mkdir(exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True, exist_ok=True)
    assert limit_warning([version], root) == ""
    (group / "memory.current").write_text("0\n")
    need = RUNTIME_BYTES + 2 * (50 << 20)
    (group / "memory.max").write_text(f"{2 * need}\n")
    assert limit_warning([version], root) == ""
    (group / "memory.max").write_text(f"{need}\n")
    assert limit_warning([version], root).startswith(
        "the memory limit of this control group leaves 250 MiB, and the models need about 250 MiB"
    )


def test_a_load_that_no_figure_can_refuse_reads_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(available_memory, "read_memory", read.append)
    assert MemoryFloor(0, 0).refusal(model(tmp_path, {"model.onnx": MIB}), 1) is None
    assert read == []


@pytest.mark.parametrize("text", ["", "MemAvailable: plenty\n", "MemAvailable:\n"])
def test_a_kernel_that_does_not_tell_refuses_nothing(root: Path, tmp_path: Path, text: str) -> None:
    (root / "proc/meminfo").write_text(text)
    (root / "proc/pressure/memory").unlink()
    assert read_memory(root) == MemoryReading(None, None)
    assert MemoryFloor(1 << 40, 0.1, root).refusal(model(tmp_path, {"model.onnx": MIB}), 1) is None


SIZES = [
    ("the file alone", {"model.onnx": 10}, "model.onnx", 10),
    ("not its neighbours", {"model.onnx": 10, "model.plan": 500, "labels.txt": 3}, "model.onnx", 10),
    ("its external data", {"model.onnx": 10, "model.onnx.data": 100, "model.onnx_data": 5}, "model.onnx", 115),
    ("the weights of an IR", {"model.xml": 10, "model.bin": 90}, "model.xml", 100),
    ("no weights of another format", {"model.onnx": 10, "model.bin": 90}, "model.onnx", 10),
    ("all of a folder", {"model/saved.pb": 10, "model/variables/data": 90, "other": 7}, "model", 100),
    ("a model without files", {"readme": 1}, "none", 0),
    (
        "a name with the signs of patterns",
        {"m[1]*.onnx": 10, "m[1]*.onnx.data": 5, "m1.onnx.data": 9},
        "m[1]*.onnx",
        15,
    ),
]


@pytest.mark.parametrize(("what", "sizes", "path", "count"), SIZES, ids=[row[0] for row in SIZES])
def test_the_weights_of_a_model_are(tmp_path: Path, what: str, sizes: dict[str, int], path: str, count: int) -> None:
    assert weight_bytes(model(tmp_path, sizes, path)) == count


def test_a_load_needs_its_weights_as_read_and_once_for_each_instance(tmp_path: Path) -> None:
    file = model(tmp_path, {"model.onnx": 100})
    assert [estimate_bytes(file, count) for count in (0, 1, 3)] == [200, 200, 400]


def test_a_load_that_would_pass_the_floor_is_refused_with_all_three_numbers(root: Path, tmp_path: Path) -> None:
    file = model(tmp_path, {"model.onnx": 200 * MIB})
    assert MemoryFloor(400 * MIB, 0, root).refusal(file, 1) is None
    assert MemoryFloor(401 * MIB, 0, root).refusal(file, 1) == (
        "memory is short: 800 MiB are available, the model needs about 400 MiB, "
        "and --memory-floor-mb keeps 401 MiB free"
    )
    assert "the model needs about 600 MiB" in str(MemoryFloor(400 * MIB, 0, root).refusal(file, 2))


def test_a_model_whose_memory_is_known_must_fit_without_a_floor_too(root: Path, tmp_path: Path) -> None:
    file = model(tmp_path, {"model.gguf": MIB})._replace(memory_bytes=300 * MIB)
    assert estimate_bytes(file, 2) == 600 * MIB
    assert MemoryFloor(0, 0, root).refusal(file, 2) is None
    assert MemoryFloor(0, 0, root).refusal(file, 3) == (
        "memory is short: 800 MiB are available, the model needs about 900 MiB"
    )


def test_pressure_above_the_limit_refuses_whatever_is_available(root: Path, tmp_path: Path) -> None:
    file = model(tmp_path, {"model.onnx": 1})
    (root / "proc/pressure/memory").write_text(SHORT_OF_BREATH)
    assert MemoryFloor(0, 40, root).refusal(file, 1) is None
    assert "34.53 % of the last 10 s, --memory-pressure-limit is 30 %" in str(MemoryFloor(0, 30, root).refusal(file, 1))


def test_with_both_off_nothing_is_looked_at(tmp_path: Path) -> None:
    assert MemoryFloor(0, 0, tmp_path / "absent").refusal(model(tmp_path, {"model.onnx": 1 << 40}), 64) is None
