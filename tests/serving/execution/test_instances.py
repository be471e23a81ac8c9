"""Instances: sessions are opened, warmed, closed and released on their own thread, also after failures."""

from __future__ import annotations

import gc
import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, OutputSpec, WarmupInput, WarmupSample
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, LoadError
from tests.kit.eventually import eventually


def sample(name: str = "zeros", *, rows: int = 2, count: int = 1, source: str = "zero", file: str = "") -> WarmupSample:
    return WarmupSample(name, rows, (WarmupInput("IN", DType.FP32, (4,), source, file),), count)


def reason(core: Any, spec: Any, root: Path = Path("/nowhere")) -> str:
    core.set_desired(spec, root=root)
    assert core.table.wait_settled([spec.name], 20)
    found = core.router.failure(spec.name)
    assert found is not None
    return str(found)


def test_a_session_is_opened_closed_and_released_on_its_instances_own_thread(core: Any) -> None:
    core.load(core.spec(instances=2))
    for value in range(10):
        core.submit(value, may_run=bool(value % 2))[1].final()
    core.service.unload_model("m")
    assert eventually(lambda: len(core.script.dropped) == 2)
    own = {thread for _, thread in core.script.opened}
    assert len(own) == 2
    assert threading.current_thread() not in own
    assert {thread for _, thread in core.script.closed} == set(core.script.dropped) == own
    assert eventually(lambda: not any(thread.is_alive() for thread in own))


def test_every_instance_is_warmed_on_its_own_thread_and_warming_is_not_counted(core: Any) -> None:
    version = core.load(
        core.spec(instances=3, warmup=(sample(count=2), sample("skipped", rows=0), sample("one", rows=1)))
    )
    assert sorted((name, rows) for name, _, rows in core.script.ran) == sorted(
        (f"m_{index}", rows) for index in range(3) for rows in (2, 2, 1)
    )
    assert {(name, thread) for name, thread, _ in core.script.ran} == set(core.script.opened)
    assert version.statistics().inference_count == 0


@pytest.mark.parametrize("error", [BackendError("out of luck"), ValueError("out of luck"), SystemExit("out of luck")])
def test_a_failing_warm_up_fails_the_load_in_tritons_words_and_closes_the_sessions(
    core: Any, error: BaseException
) -> None:
    def run(name: str, inputs: Any) -> Any:
        if name == "m_1":
            raise error
        return {"OUT": np.array(inputs["IN"])}

    core.script.on_run = run
    said = reason(core, core.spec(instances=2, warmup=(sample("s1"),)))
    assert "version 1 is at UNAVAILABLE state:" in said
    assert "out of luck" in said
    if isinstance(error, Exception):
        assert "failed to run warmup sample 's1': " in said
    assert sorted(name for name, _ in core.script.closed) == ["m_0", "m_1"]


def test_a_warm_up_answer_that_breaks_the_models_promise_fails_the_load(core: Any) -> None:
    core.script.on_run = lambda name, inputs: {"OUT": np.zeros((9, 9), np.float32)}
    assert "failed to run warmup sample 's': model 'm' answered output 'OUT'" in reason(
        core, core.spec(warmup=(sample("s"),))
    )


def test_warm_up_data_comes_from_the_models_warmup_folder_one_item_for_every_row(core: Any, tmp_path: Path) -> None:
    seen: list[Any] = []

    def run(name: str, inputs: Any) -> Any:
        seen.append(inputs["IN"])
        return {"OUT": np.array(inputs["IN"])}

    core.script.on_run = run
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "data").write_bytes(np.arange(6, dtype="<f4").tobytes())
    core.load(core.spec(warmup=(sample(source="file", file="data"),)), root=tmp_path)
    assert seen[0].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(("content", "message"), [(b"1234567", "needs 16 bytes for an item"), (None, "cannot read")])
def test_warm_up_data_that_is_short_or_absent_fails_the_load(
    core: Any, tmp_path: Path, content: bytes | None, message: str
) -> None:
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    if content is not None:
        (tmp_path / "m" / "warmup" / "data").write_bytes(content)
    said = reason(core, core.spec(warmup=(sample("s", source="file", file="data"),)), tmp_path)
    assert "failed to run warmup sample 's'" in said
    assert message in said


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0abc", b"\x01\0\0\0a", b"\xff\xff\xff\xffabc"])
def test_warm_up_strings_that_are_cut_short_fail_the_load(core: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "words").write_bytes(content)
    inputs = (WarmupInput("IN", DType.BYTES, (2,), "file", "words"),)
    spec = core.spec(
        inputs=(InputSpec("IN", DType.BYTES, (2,)),), outputs=(OutputSpec("OUT", DType.BYTES, (2,)),),
        warmup=(WarmupSample("s", 1, inputs),),
    )  # fmt: skip
    assert "does not hold 2 length-prefixed strings" in reason(core, spec, tmp_path)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("source", ["zero", "random"])
def test_warm_up_data_can_be_made_for_every_type(core: Any, dtype: DType, source: str) -> None:
    core.load(
        core.spec(
            inputs=(InputSpec("IN", dtype, (3,)),), outputs=(OutputSpec("OUT", dtype, (3,)),),
            warmup=(WarmupSample("s", 2, (WarmupInput("IN", dtype, (3,), source),)),),
        )
    )  # fmt: skip
    assert len(core.script.ran) == 1


def test_the_second_instance_failing_to_open_closes_the_first_without_warming_it(core: Any) -> None:
    def fail_second(job: Any) -> None:
        if job.instance_name == "m_1":
            raise LoadError("device is full")

    core.script.on_open = fail_second
    assert "device is full" in reason(core, core.spec(instances=2, warmup=(sample(),)))
    assert [name for name, _ in core.script.closed] == ["m_0"]
    assert core.script.ran == []


@pytest.mark.parametrize("error", [RuntimeError("no such op"), SystemExit("no such op"), MemoryError("no such op")])
def test_whatever_a_backend_raises_while_opening_costs_only_its_version(core: Any, error: BaseException) -> None:
    def fail(job: Any) -> None:
        raise error

    core.script.on_open = fail
    assert f"{type(error).__name__}: no such op" in reason(core, core.spec())
    core.script.on_open = lambda job: None
    core.load(core.spec("other"))
    assert core.submit(5, model="other")[1].final().error is None


def test_a_session_that_fails_to_close_still_ends_its_version(core: Any, caplog: Any) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("cannot close")

    core.script.on_close = fail
    core.load(core.spec())
    core.service.unload_model("m")
    assert eventually(lambda: [entry.reason for entry in core.router.index()] == ["unloaded"])
    assert "instance m_0 failed to close" in caplog.text


def test_gpu_groups_make_count_instances_for_each_gpu(core: Any) -> None:
    seen: list[tuple[str, int | None]] = []
    core.script.on_open = lambda job: seen.append((job.instance_name, job.device_id))
    groups = (InstanceGroup("g", InstanceKind.GPU, 2, (0, 3)), InstanceGroup("c", InstanceKind.CPU, 1))
    core.load(core.spec(instance_groups=groups))
    assert sorted(seen, key=str) == [("c_0", None), ("g_0_0", 0), ("g_0_3", 3), ("g_1_0", 0), ("g_1_3", 3)]


def test_no_instance_at_all_is_a_bad_configuration(core: Any) -> None:
    assert "instance_group asks for no instance" in reason(core, core.spec(instance_groups=()))


def test_a_probe_runs_past_the_queue_on_an_instance_of_its_own(core: Any) -> None:
    version = core.load(core.spec())
    assert version.probe(lambda run: None) >= 0
    assert [(name, rows) for name, _, rows in core.script.ran] == [("probe", 1)]
    assert [name for name, _ in core.script.closed] == ["probe"]
    gc.collect()
    assert core.submit(1)[1].final().error is None


def test_a_load_that_grows_the_process_by_less_than_its_files_is_not_measured(core: Any, tmp_path: Path) -> None:
    version = tmp_path / "m/1"
    version.mkdir(parents=True)
    with (version / "model.onnx").open("wb") as file:
        file.truncate(1 << 40)
    assert core.load(core.spec(), root=tmp_path).report().load_rss_bytes == 0


def test_a_load_that_grows_the_process_is_measured(core: Any, tmp_path: Path) -> None:
    held: list[mmap.mmap] = []

    def open_model(job: Any) -> None:
        # Pages of the system: an array may come from memory that an earlier test has freed and the process still holds.
        held.append(mmap.mmap(-1, 32 << 20))
        held[0].write(b"x" * (32 << 20))

    core.script.on_open = open_model
    assert core.load(core.spec(), root=tmp_path).report().load_rss_bytes > 4 << 20
