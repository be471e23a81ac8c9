"""A GPU that fails: what the runtimes' own words mean, which models it takes down, and where they come up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_server.core.gpu_fault import GpuFault, classify_gpu_fault, named_gpu
from edge_server.core.model_spec import InstanceGroup, InstanceKind, ModelFile
from edge_server.core.version_lifecycle import DesiredModel, DesiredVersion, Resolved
from edge_server.errors import BackendError, LoadError, NotReady, OutOfMemory, SessionLost
from edge_server.serving.execution.gpu_state import Gpus, gpus_of

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
    assert named_gpu(BackendError(ORT_STICKY)) == 1
    assert named_gpu(BackendError("CUDA out of memory")) is None


def on_gpu(house: Any, name: str, *gpus: int, **more: Any) -> Any:
    groups = (InstanceGroup(name, InstanceKind.GPU, 1, gpus or (0,)),)
    return house.spec(name, instance_groups=groups, **more)


def fail_with(house: Any, message: str, model: str = "m") -> None:
    plain = house.script.on_run

    def run(name: str, inputs: Any) -> Any:
        if name.startswith(f"{model}_") or name == model:
            raise BackendError(message)
        return plain(name, inputs)

    house.script.on_run = run


def test_a_sticky_error_fails_every_model_on_that_gpu_and_no_other(house: Any, eventually: Any) -> None:
    for spec in (on_gpu(house, "m"), on_gpu(house, "beside"), on_gpu(house, "elsewhere", 1), house.spec("host")):
        house.load(spec)
    house.service.started()
    assert house.service.is_ready()
    fail_with(house, "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=box")
    assert "illegal memory access" in house.submit(1.0)[1].final().error.message
    eventually(lambda: {item.state for name in ("m", "beside") for item in house.manager.versions(name)} == {"FAILED"})
    assert not house.service.is_ready()
    for name in ("m", "beside"):
        assert not house.service.is_model_ready(name, 1)
        with pytest.raises(NotReady, match=r"GPU 0 is lost to this process: .*illegal memory access"):
            house.submit(1.0, model=name, version=1)
        (report,) = house.manager.versions(name)
        assert "illegal memory access" in report.reason
    for name in ("elsewhere", "host"):
        assert house.submit(1.0, model=name)[1].final().error is None
    eventually(lambda: "gpu.lost" in [kind for kind, _ in house.events])


def test_an_order_to_load_does_not_touch_a_lost_gpu_again(house: Any, eventually: Any) -> None:
    house.load(on_gpu(house, "m"))
    house.manager.mark_gpu_lost(0, "NVML: GPU is lost")
    eventually(lambda: [item.state for item in house.manager.versions("m")] == ["FAILED"])
    count = len(house.script.opened)
    with pytest.raises(LoadError, match="GPU 0 is lost to this process: NVML: GPU is lost"):
        house.service.load_model("m")
    assert len(house.script.opened) == count


def test_a_model_with_a_choice_comes_up_on_the_cpu_and_the_server_is_ready_again(house: Any, eventually: Any) -> None:
    """As an ONNX file with an engine: its GPU runtime is refused, the next runtime of the choice takes it."""
    first, second = on_gpu(house, "m"), house.spec("m", backend="scripted", parameters={"on": "cpu"})
    file = ModelFile(Path("/nowhere/m/1"), Path("/nowhere/m"), 1)

    def resolve(passed_over: Any) -> Resolved:
        return Resolved(second, file) if passed_over else Resolved(first, file, has_alternatives=True)

    without_fallback = house.without_fallback
    house.wishes["m"] = DesiredModel("m", {1: DesiredVersion("a", resolve)})
    house.manager.set_desired(house.wishes["m"])
    assert house.manager.wait_settled(["m"], 20)
    house.service.started()
    before = house.manager.route("m", None)
    assert gpus_of(before.spec) == (0,)
    fail_with(house, "CUDA failure 719: unspecified launch failure ; GPU=0")
    plain = house.script.on_run
    assert house.submit(1.0)[1].final().error is not None
    house.script.on_run = lambda name, inputs: {"OUT": inputs["IN"]}
    assert plain is not None
    eventually(lambda: [gpus_of(version.spec) for version in house.manager.ready_versions("m")] == [()])
    assert house.submit(7.0)[1].final().error is None
    assert house.service.is_ready()
    assert without_fallback == []


def test_a_model_without_a_fallback_is_reported_to_the_callback(house: Any, eventually: Any) -> None:
    without_fallback = house.without_fallback
    house.load(on_gpu(house, "m"))
    house.load(on_gpu(house, "n"))
    house.manager.mark_gpu_lost(0, "NVML: GPU is lost")
    house.manager.mark_gpu_lost(0, "said again")
    eventually(lambda: len(without_fallback) == 2)
    assert all("GPU 0 is lost to this process: NVML: GPU is lost" in reason for reason in without_fallback)


def test_files_that_do_not_load_later_are_no_word_about_the_gpu(house: Any, eventually: Any) -> None:
    without_fallback = house.without_fallback
    file = ModelFile(Path("/nowhere/m/1"), Path("/nowhere/m"), 1)
    # What is loaded anew finds its place on the CPU.
    specs = [on_gpu(house, "m"), house.spec("m")]
    house.manager.set_desired(
        DesiredModel("m", {1: DesiredVersion("a", lambda passed_over: Resolved(specs.pop(0), file))})
    )
    assert house.manager.wait_settled(["m"], 20)
    house.manager.mark_gpu_lost(0, "NVML: GPU is lost")
    eventually(lambda: [gpus_of(version.spec) for version in house.manager.ready_versions("m")] == [()])

    def broken(passed_over: Any) -> Resolved:
        raise LoadError("the new file is damaged")

    house.manager.set_desired(DesiredModel("m", {1: DesiredVersion("b", broken)}))
    assert house.manager.wait_settled(["m"], 20)
    assert "the new file is damaged" in str(house.manager.failure("m"))
    assert house.submit(1.0)[1].final().error is None, "the old one goes on serving"
    assert without_fallback == []


def test_what_waits_when_the_gpu_is_lost_is_answered(house: Any, gate: Any, eventually: Any) -> None:
    house.load(on_gpu(house, "m", max_batch_size=1))
    mailboxes = [house.submit(1.0)[1] for _ in range(4)]
    gate.wait_entered()
    house.manager.mark_gpu_lost(0, "NVML: GPU is lost")
    errors = [mailbox.final().error for mailbox in mailboxes]
    assert all(isinstance(error, SessionLost) and "NVML: GPU is lost" in error.message for error in errors)
    gate.let_go(9)
    eventually(lambda: house.manager.table._models["m"].loaded == [])


def test_one_request_too_large_for_the_gpu_costs_itself_only(house: Any) -> None:
    version = house.load(on_gpu(house, "m"))
    plain = house.script.on_run

    def run(name: str, inputs: Any) -> Any:
        if inputs["IN"].shape[1] > 1:
            raise BackendError(ORT_MEMORY)
        return plain(name, inputs)

    house.script.on_run = run
    for _ in range(10):
        assert "Failed to allocate" in house.submit(1.0, width=2)[1].final().error.message
        assert house.submit(1.0)[1].final().error is None
    assert version.state.name == "READY"


def test_a_gpu_without_memory_for_anything_fails_the_version_which_is_loaded_again(house: Any, eventually: Any) -> None:
    house.load(on_gpu(house, "m"))
    house.load(on_gpu(house, "beside"))
    plain = house.script.on_run
    fail_with(house, ORT_MEMORY)
    for _ in range(3):
        assert house.submit(1.0)[1].final().error is not None
    eventually(lambda: "tried again at" in house.manager.versions("m")[-1].reason)
    assert house.submit(1.0, model="beside")[1].final().error is None, "it is no fault of the device's"
    house.script.on_run = plain
    eventually(lambda: house.service.is_model_ready("m", 1))
    assert house.submit(1.0)[1].final().error is None


def test_a_load_that_meets_a_sticky_error_takes_the_gpu_from_the_others_too(house: Any, eventually: Any) -> None:
    house.load(on_gpu(house, "beside"))

    def refuse(job: Any) -> None:
        if job.spec.name == "m":
            raise LoadError("onnxruntime cannot load it: CUDA failure 700: an illegal memory access ; GPU=0")

    house.script.on_open = refuse
    house.set_desired(on_gpu(house, "m"))
    eventually(lambda: {item.state for n in ("m", "beside") for item in house.manager.versions(n)} == {"FAILED"})


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


def test_what_a_load_takes_of_the_gpu_is_measured_and_shown(new_house: Any) -> None:
    meter = FakeMeter(1000)
    house = new_house(gpus=Gpus(meter))
    house.script.on_open = lambda job: setattr(meter, "used", meter.used + (300 if job.spec.name == "m" else 50))
    house.load(on_gpu(house, "m"))
    house.load(on_gpu(house, "n"))
    house.load(house.spec("host"))
    taken = {item.name: dict(item.gpu_bytes) for item in house.service.instance_reports()}
    assert taken == {"m": {0: 300}, "n": {0: 50}, "host": {}}
    (statistics,) = house.service.statistics("m", None)
    assert statistics.gpu_bytes == {0: 300}
    from edge_server.frontends.v2 import control_responses

    (shown,) = control_responses.statistics([statistics])["model_stats"]  # type: ignore[misc]
    assert shown["memory_usage"] == [{"type": "GPU", "id": 0, "byte_size": 300}]


def test_beyond_the_limit_nothing_is_loaded_onto_the_gpu_until_there_is_room(new_house: Any, eventually: Any) -> None:
    meter = FakeMeter(1000)
    meter.used = 601
    house = new_house(gpus=Gpus(meter, {0: 0.6}))
    house.load(on_gpu(house, "other", 1))
    house.load(house.spec("host"))
    house.set_desired(on_gpu(house, "m"))
    assert house.manager.wait_settled(["m"], 20)
    message = "can not create model 'm': memory limit set for GPU 0 has exceeded, model loading is rejected."
    assert message in house.manager.failure("m")
    assert [name for name, _ in house.script.opened if name.startswith("m")] == []
    meter.used = 600
    eventually(lambda: house.service.is_model_ready("m", 1))


def test_a_load_that_itself_passes_the_limit_is_taken_back(new_house: Any) -> None:
    """As in Triton, which looks after each instance is there."""
    meter = FakeMeter(1000)
    house = new_house(gpus=Gpus(meter, {0: 0.6}))
    house.script.on_open = lambda job: setattr(meter, "used", meter.used + 400)
    house.script.on_close = lambda *_: setattr(meter, "used", meter.used - 400)
    house.load(on_gpu(house, "first"))
    assert meter.used == 400
    house.set_desired(on_gpu(house, "m"))
    assert house.manager.wait_settled(["m"], 20)
    assert "memory limit set for GPU 0 has exceeded, model loading is rejected. 80% of its memory is used" in (
        house.manager.failure("m")
    )
    assert {name for name, _ in house.script.opened if name.startswith("m")}, "it was opened, and found too large"
    assert house.service.is_model_ready("first", 1)
    assert not house.service.is_model_ready("m", 1)


def test_a_limit_on_a_gpu_that_cannot_be_read_refuses(new_house: Any) -> None:
    meter = FakeMeter(1000)
    meter.fails = True
    house = new_house(gpus=Gpus(meter, {0: 0.9}))
    house.set_desired(on_gpu(house, "m"))
    assert house.manager.wait_settled(["m"], 20)
    assert "Its memory cannot be read" in house.manager.failure("m")
