"""A GPU that fails: what the runtimes' own words mean, which models it takes down, and where they come up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_server.core.gpu_fault import GpuFault, classify_gpu_fault, find_gpu_number
from edge_server.core.model_spec import InstanceGroup, InstanceKind, ModelFile
from edge_server.core.version_lifecycle import DesiredModel, DesiredVersion, Resolved
from edge_server.errors import BackendError, LoadError, NotReady, OutOfMemory, SessionLost
from edge_server.serving.execution.gpu_state import Gpus, gpus_of
from tests.kit.eventually import eventually

ORT_STICKY = (
    "model 'm': onnxruntime failed: [ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was "
    "encountered ; GPU=1 ; hostname=box ; file=cuda_call.cc ; line=121 ; expr=cudaStreamSynchronize(stream_);"
)
ORT_MEMORY = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. Status "
    "Message: bfc_arena.cc:376 AllocateRawInternal Failed to allocate memory for requested buffer of size 1610612736"
)


def test_the_words_of_runtimes_tell_what_became_of_the_gpu() -> None:
    table = [
        (BackendError(ORT_STICKY), GpuFault.STICKY),
        (BackendError("CUDA failure 719: unspecified launch failure ; GPU=0"), GpuFault.STICKY),
        (BackendError("CUDNN failure 8: CUDNN_STATUS_EXECUTION_FAILED ; GPU=0"), GpuFault.STICKY),
        (BackendError("CUDA error: device-side assert triggered"), GpuFault.STICKY),
        (BackendError("tensorrt: Cuda Runtime (misaligned address)"), GpuFault.STICKY),
        (BackendError("CUDA error: operation not supported on global/shared address space"), GpuFault.STICKY),
        (BackendError("cuStreamSynchronize failed: context is destroyed"), GpuFault.STICKY),
        (BackendError("CUDA error: uncorrectable NVLink error detected during the execution"), GpuFault.DEVICE_LOST),
        (SessionLost("model 'm': CUDA: cuStreamSynchronize: CUDA_ERROR_UNKNOWN; the process has lost the GPU"),
         GpuFault.STICKY),
        (BackendError("CUDA failure 100: no CUDA-capable device is detected ; GPU=0"), GpuFault.DEVICE_LOST),
        (BackendError("NVML: GPU is lost"), GpuFault.DEVICE_LOST),
        (SessionLost("CUDA: cuMemAlloc: CUDA_ERROR_ECC_UNCORRECTABLE"), GpuFault.DEVICE_LOST),
        (BackendError(ORT_MEMORY), GpuFault.OUT_OF_MEMORY),
        (BackendError("CUDA failure 2: out of memory ; GPU=0"), GpuFault.OUT_OF_MEMORY),
        (BackendError("CUDA out of memory. Tried to allocate 2.00 GiB"), GpuFault.OUT_OF_MEMORY),
        (OutOfMemory("model 'm': CUDA: cuMemAlloc"), GpuFault.OUT_OF_MEMORY),
        (BackendError("model 'm': input 'X' has the shape [700]"), None),
        (BackendError("INVALID_ARGUMENT : Got invalid dimensions for input: X"), None),
    ]  # fmt: skip
    assert [(error, classify_gpu_fault(error)) for error, _ in table] == table


def test_the_gpu_that_the_words_name_is_the_one() -> None:
    assert find_gpu_number(BackendError(ORT_STICKY)) == 1
    assert find_gpu_number(BackendError("CUDA out of memory")) is None


def on_gpu(core: Any, name: str, *gpus: int, **more: Any) -> Any:
    groups = (InstanceGroup(name, InstanceKind.GPU, 1, gpus or (0,)),)
    return core.spec(name, instance_groups=groups, **more)


def fail_with(core: Any, message: str, model: str = "m") -> None:
    plain = core.script.on_run

    def run(name: str, inputs: Any) -> Any:
        if name.startswith(f"{model}_") or name == model:
            raise BackendError(message)
        return plain(name, inputs)

    core.script.on_run = run


def test_a_sticky_error_fails_every_model_on_that_gpu_and_no_other(core: Any) -> None:
    for spec in (on_gpu(core, "m"), on_gpu(core, "beside"), on_gpu(core, "elsewhere", 1), core.spec("host")):
        core.load(spec)
    core.service.started()
    assert core.service.is_ready()
    fail_with(core, "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=box")
    assert "illegal memory access" in core.submit(1.0)[1].final().error.message
    assert eventually(
        lambda: {item.state for name in ("m", "beside") for item in core.router.versions(name)} == {"FAILED"}
    )
    assert not core.service.is_ready()
    for name in ("m", "beside"):
        assert not core.service.is_model_ready(name, 1)
        with pytest.raises(NotReady, match=r"GPU 0 is lost to this process: .*illegal memory access"):
            core.submit(1.0, model=name, version=1)
        (report,) = core.router.versions(name)
        assert "illegal memory access" in report.reason
    for name in ("elsewhere", "host"):
        assert core.submit(1.0, model=name)[1].final().error is None
    assert eventually(lambda: "gpu.lost" in [kind for kind, _ in core.events])


def test_a_load_call_does_not_use_a_lost_gpu_again(core: Any) -> None:
    core.load(on_gpu(core, "m"))
    core.table.mark_gpu_lost(0, "NVML: GPU is lost")
    assert eventually(lambda: [item.state for item in core.router.versions("m")] == ["FAILED"])
    count = len(core.script.opened)
    with pytest.raises(LoadError, match="GPU 0 is lost to this process: NVML: GPU is lost"):
        core.service.load_model("m")
    assert len(core.script.opened) == count


def test_a_model_with_a_choice_comes_up_on_the_cpu_and_the_server_is_ready_again(core: Any) -> None:
    """As an ONNX file with an engine: its GPU runtime is refused, the next runtime of the choice takes it."""
    first, second = on_gpu(core, "m"), core.spec("m", backend="scripted", parameters={"on": "cpu"})
    file = ModelFile(Path("/nowhere/m/1"), Path("/nowhere/m"), 1)

    def resolve(passed_over: Any) -> Resolved:
        return Resolved(second, file) if passed_over else Resolved(first, file, has_alternatives=True)

    without_fallback = core.without_fallback
    core.desired["m"] = DesiredModel("m", {1: DesiredVersion("a", resolve)})
    core.table.set_desired(core.desired["m"])
    assert core.table.wait_settled(["m"], 20)
    core.service.started()
    before = core.router.route("m", None)
    assert gpus_of(before.spec) == (0,)
    fail_with(core, "CUDA failure 719: unspecified launch failure ; GPU=0")
    plain = core.script.on_run
    assert core.submit(1.0)[1].final().error is not None
    core.script.on_run = lambda name, inputs: {"OUT": inputs["IN"]}
    assert plain is not None
    assert eventually(lambda: [gpus_of(version.spec) for version in core.router.ready_versions("m")] == [()])
    assert core.submit(7.0)[1].final().error is None
    assert core.service.is_ready()
    assert without_fallback == []


def test_a_model_without_a_fallback_is_reported_to_the_callback(core: Any) -> None:
    without_fallback = core.without_fallback
    core.load(on_gpu(core, "m"))
    core.load(on_gpu(core, "n"))
    core.table.mark_gpu_lost(0, "NVML: GPU is lost")
    core.table.mark_gpu_lost(0, "said again")
    assert eventually(lambda: len(without_fallback) == 2)
    assert all("GPU 0 is lost to this process: NVML: GPU is lost" in reason for reason in without_fallback)


def test_files_that_do_not_load_later_are_no_word_about_the_gpu(core: Any) -> None:
    without_fallback = core.without_fallback
    file = ModelFile(Path("/nowhere/m/1"), Path("/nowhere/m"), 1)
    # What is loaded anew finds its place on the CPU.
    specs = [on_gpu(core, "m"), core.spec("m")]
    core.table.set_desired(
        DesiredModel("m", {1: DesiredVersion("a", lambda passed_over: Resolved(specs.pop(0), file))})
    )
    assert core.table.wait_settled(["m"], 20)
    core.table.mark_gpu_lost(0, "NVML: GPU is lost")
    assert eventually(lambda: [gpus_of(version.spec) for version in core.router.ready_versions("m")] == [()])

    def broken(passed_over: Any) -> Resolved:
        raise LoadError("the new file is damaged")

    core.table.set_desired(DesiredModel("m", {1: DesiredVersion("b", broken)}))
    assert core.table.wait_settled(["m"], 20)
    assert "the new file is damaged" in str(core.router.failure("m"))
    assert core.submit(1.0)[1].final().error is None, "the old one goes on serving"
    assert without_fallback == []


def test_what_waits_when_the_gpu_is_lost_is_answered(core: Any, blocker: Any) -> None:
    core.load(on_gpu(core, "m", max_batch_size=1))
    mailboxes = [core.submit(1.0)[1] for _ in range(4)]
    blocker.wait_blocked()
    core.table.mark_gpu_lost(0, "NVML: GPU is lost")
    errors = [mailbox.final().error for mailbox in mailboxes]
    assert all(isinstance(error, SessionLost) and "NVML: GPU is lost" in error.message for error in errors)
    blocker.release(9)
    assert eventually(lambda: core.table._models["m"].loaded == [])


def test_one_request_too_large_for_the_gpu_costs_itself_only(core: Any) -> None:
    version = core.load(on_gpu(core, "m"))
    plain = core.script.on_run

    def run(name: str, inputs: Any) -> Any:
        if inputs["IN"].shape[1] > 1:
            raise BackendError(ORT_MEMORY)
        return plain(name, inputs)

    core.script.on_run = run
    for _ in range(10):
        assert "Failed to allocate" in core.submit(1.0, width=2)[1].final().error.message
        assert core.submit(1.0)[1].final().error is None
    assert version.state.name == "READY"


def test_a_gpu_without_memory_for_anything_fails_the_version_which_is_loaded_again(core: Any) -> None:
    core.load(on_gpu(core, "m"))
    core.load(on_gpu(core, "beside"))
    plain = core.script.on_run
    fail_with(core, ORT_MEMORY)
    for _ in range(3):
        assert core.submit(1.0)[1].final().error is not None
    assert eventually(lambda: "tried again at" in core.router.versions("m")[-1].reason)
    assert core.submit(1.0, model="beside")[1].final().error is None, "it is no fault of the device's"
    core.script.on_run = plain
    assert eventually(lambda: core.service.is_model_ready("m", 1))
    assert core.submit(1.0)[1].final().error is None


def test_a_load_that_meets_a_sticky_error_takes_the_gpu_from_the_others_too(core: Any) -> None:
    core.load(on_gpu(core, "beside"))

    def refuse(job: Any) -> None:
        if job.spec.name == "m":
            raise LoadError("onnxruntime cannot load it: CUDA failure 700: an illegal memory access ; GPU=0")

    core.script.on_open = refuse
    core.set_desired(on_gpu(core, "m"))
    assert eventually(lambda: {item.state for n in ("m", "beside") for item in core.router.versions(n)} == {"FAILED"})


class FakeMeter:
    """A GPU whose memory is what the test says."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.fails = False

    def memory(self, device_id: int) -> tuple[int, int]:
        if self.fails:
            raise OSError("the driver is gone")
        return self.total - self.used, self.total


def test_what_a_load_takes_of_the_gpu_is_measured_and_shown(new_core: Any) -> None:
    meter = FakeMeter(1000)
    core = new_core(gpus=Gpus(meter))
    core.script.on_open = lambda job: setattr(meter, "used", meter.used + (300 if job.spec.name == "m" else 50))
    core.load(on_gpu(core, "m"))
    core.load(on_gpu(core, "n"))
    core.load(core.spec("host"))
    taken = {item.name: dict(item.gpu_bytes) for item in core.service.instance_reports()}
    assert taken == {"m": {0: 300}, "n": {0: 50}, "host": {}}
    (statistics,) = core.service.statistics("m", None)
    assert statistics.gpu_bytes == {0: 300}
    from edge_server.frontends.v2 import control_responses

    (shown,) = control_responses.statistics([statistics])["model_stats"]  # type: ignore[misc]
    assert shown["memory_usage"] == [{"type": "GPU", "id": 0, "byte_size": 300}]


def test_beyond_the_limit_nothing_is_loaded_onto_the_gpu_until_there_is_room(new_core: Any) -> None:
    meter = FakeMeter(1000)
    meter.used = 601
    core = new_core(gpus=Gpus(meter, {0: 0.6}))
    core.load(on_gpu(core, "other", 1))
    core.load(core.spec("host"))
    core.set_desired(on_gpu(core, "m"))
    assert core.table.wait_settled(["m"], 20)
    message = "can not create model 'm': memory limit set for GPU 0 has exceeded, model loading is rejected."
    assert message in core.router.failure("m")
    assert [name for name, _ in core.script.opened if name.startswith("m")] == []
    meter.used = 600
    assert eventually(lambda: core.service.is_model_ready("m", 1))


def test_a_load_that_itself_passes_the_limit_is_taken_back(new_core: Any) -> None:
    """As in Triton, which looks after each instance is there."""
    meter = FakeMeter(1000)
    core = new_core(gpus=Gpus(meter, {0: 0.6}))
    core.script.on_open = lambda job: setattr(meter, "used", meter.used + 400)
    core.script.on_close = lambda *_: setattr(meter, "used", meter.used - 400)
    core.load(on_gpu(core, "first"))
    assert meter.used == 400
    core.set_desired(on_gpu(core, "m"))
    assert core.table.wait_settled(["m"], 20)
    assert "memory limit set for GPU 0 has exceeded, model loading is rejected. 80% of its memory is used" in (
        core.router.failure("m")
    )
    assert {name for name, _ in core.script.opened if name.startswith("m")}, "it was opened, and found too large"
    assert core.service.is_model_ready("first", 1)
    assert not core.service.is_model_ready("m", 1)


def test_a_limit_on_a_gpu_that_cannot_be_read_refuses(new_core: Any) -> None:
    meter = FakeMeter(1000)
    meter.fails = True
    core = new_core(gpus=Gpus(meter, {0: 0.9}))
    core.set_desired(on_gpu(core, "m"))
    assert core.table.wait_settled(["m"], 20)
    assert "Its memory cannot be read" in core.router.failure("m")
