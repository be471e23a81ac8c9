"""The CUDA driver through pycuda and ctypes: both behave the same on a driver that is compiled for the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from edge_server.backends.cuda import cuda_driver, cuda_pycuda

SCRIPT = """
import sys
from edge_server.backends.cuda import cuda_driver
found = cuda_driver.driver()
print(found.access_library, found.devices()[0])
context = found.retain_context(0)
with context.current():
    stream, memory = context.create_stream(), context.allocate(100)
    block = context.allocate_host(100, is_mapped=True)
    block.array[:] = 7
    context.copy_to_device(memory, block.address, 100, stream)
    block.array[:] = 0
    context.copy_to_host(block.address, memory, 100, stream)
    context.synchronise(stream)
    assert block.array.tolist() == [7] * 100 and block.device_address
    other = context.allocate(100)
    context.fill_zero(other, 100, stream)
    context.copy_on_device(other + 10, memory, 60, stream)
    context.copy_to_host(block.address, other, 100, stream)
    context.synchronise(stream)
    assert block.array.tolist() == [0] * 10 + [7] * 60 + [0] * 30
    context.free(other)
    assert context.free_bytes() == (1 << 33) - 100
    context.begin_capture(stream)
    assert context.end_capture(stream) == 0
    try:
        context.copy_to_device(memory, block.address, 101, stream)
    except cuda_driver.CudaFault as fault:
        assert fault.is_context_lost and "ILLEGAL_ADDRESS" in str(fault), fault
    else:
        raise AssertionError("a copy past the end was taken")
    context.free(memory)
    context.free_host(block)
    context.destroy_stream(stream)
context.close()
"""


@pytest.mark.parametrize(("name", "library"), [("pycuda", "pycuda.driver"), ("ctypes", "ctypes")])
def test_each_library_allocates_copies_and_reports_faults(name: str, library: str, fake_gpu: Any) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(fake_gpu.library).parent)}
    try_it = [sys.executable, "-c", f"import {library}"]
    if subprocess.run(try_it, env=environment, capture_output=True, check=False).returncode:
        pytest.skip(f"{library} does not import here")
    # A None in sys.modules makes the import fail.
    script = ("import sys; sys.modules['pycuda'] = None\n" if name == "ctypes" else "") + SCRIPT
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name} CudaDevice(name='Fake GPU', capability=(8, 6)")


def test_the_reason_for_no_gpu_is_found_without_a_runtime(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = str(fake_gpu.library)
    assert cuda_driver.unavailable_reason(library) == ""
    assert cuda_driver.unavailable_reason("libnone.so.1") == "there is no NVIDIA driver (libnone.so.1 does not load)"
    monkeypatch.setenv("FAKE_CUDA_COUNT", "0")
    assert cuda_driver.unavailable_reason(library) == "the NVIDIA driver finds no GPU"
    monkeypatch.setenv("FAKE_CUDA_INIT", "304")
    assert cuda_driver.unavailable_reason(library) == "the NVIDIA driver does not start (cuInit: CUresult 304)"


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (3, "kernel module"),
        (34, "stub .* LD_LIBRARY_PATH"),
        (100, "nvidia-modprobe -u -c 0.* CUDA_VISIBLE_DEVICES"),
        (801, "group render .* /dev/host1x-fence"),
        (802, "still starting"),
        (803, "start the machine again"),
        (804, "LD_LIBRARY_PATH"),
        (999, "nvidia-modprobe -u -c 0"),
    ],
)
def test_a_driver_that_does_not_start_is_reported_with_the_cause_and_the_cure(
    code: int, cure: str, fake_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_INIT", str(code))
    reason = cuda_driver.unavailable_reason(str(fake_gpu.library))
    assert re.match(rf"the NVIDIA driver does not start \(cuInit: CUresult {code}\): .*{cure}", reason)


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        # Texts of cuGetErrorString, which pycuda quotes.
        ("cuStreamSynchronize failed: unspecified launch failure", True),
        ("cuStreamSynchronize failed: an illegal memory access was encountered", True),
        ("cuStreamSynchronize failed: the launch timed out and was terminated", True),
        ("cuStreamSynchronize failed: device-side assert triggered", True),
        ("cuMemcpyHtoDAsync_v2 failed: misaligned address", True),
        ("cuMemcpyHtoDAsync_v2 failed: uncorrectable ECC error encountered", True),
        ("cuMemcpyHtoDAsync_v2 failed: invalid argument", False),
        ("cuStreamCreate failed: invalid resource handle", False),
    ],
)
def test_messages_of_pycuda_show_whether_the_context_is_lost(
    message: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pycuda: Any = ModuleType("pycuda.driver")
    pycuda.Error = type("Error", (Exception,), {})
    pycuda.MemoryError = type("MemoryError", (pycuda.Error,), {})
    pycuda.RuntimeError = type("RuntimeError", (pycuda.Error,), {})
    monkeypatch.setitem(sys.modules, "pycuda", ModuleType("pycuda"))
    monkeypatch.setitem(sys.modules, "pycuda.driver", pycuda)
    with pytest.raises(cuda_driver.CudaFault, match=message) as fault, cuda_pycuda._translated_errors():
        raise pycuda.Error(message)
    assert fault.value.is_context_lost is is_lost


def test_a_driver_that_becomes_ready_later_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (cuda_driver.CudaDevice("late", (8, 7), 1 << 30, True),)
    cuda_driver._devices_of_driver.cache_clear()
    monkeypatch.setattr(cuda_driver, "driver", lambda: SimpleNamespace(devices=lambda: found))
    monkeypatch.setattr(
        cuda_driver, "unavailable_reason", lambda: "the NVIDIA driver does not start (cuInit: CUresult 802)"
    )
    assert cuda_driver.devices() == ()
    monkeypatch.setattr(cuda_driver, "unavailable_reason", lambda: "")
    try:
        assert cuda_driver.devices() == found
    finally:
        cuda_driver._devices_of_driver.cache_clear()
