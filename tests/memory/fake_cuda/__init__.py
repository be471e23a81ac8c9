"""The CUDA driver without a GPU: libcuda.so.1 compiled from `fake_cuda.c`, whose device memory is shared memory.

A test allocates as a client would, with `allocate`, and hands the 64 bytes of `Allocation.handle` to the server.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import uuid
from multiprocessing import shared_memory
from pathlib import Path

import pytest

LIBRARY = "libcuda.so.1"
_MAGIC = b"FAKEUCDA"


class Allocation:
    """Device memory of a client's. `buffer` is it, as no CPU could see the real one."""

    def __init__(self, byte_size: int) -> None:
        self.byte_size = byte_size
        self._segment = shared_memory.SharedMemory(f"fake_cuda_{uuid.uuid4().hex[:12]}", create=True, size=byte_size)
        self.buffer = self._segment.buf[:byte_size]
        name = f"/{self._segment.name.lstrip('/')}".encode().ljust(48, b"\0")
        self.handle = struct.pack("<48sQ", name, byte_size) + _MAGIC

    def free(self) -> None:
        self.buffer.release()
        self._segment.close()
        self._segment.unlink()


class FakeCuda:
    """A driver of one GPU. `environment` gives it to another process, `install` to this one."""

    def __init__(self, folder: Path) -> None:
        self.library = build(folder)
        self.state = folder / "cuda_state"
        self.tell()
        self._allocations: list[Allocation] = []

    def environment(self, **more: str) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.library.parent), "FAKE_CUDA_STATE": str(self.state), **more}

    def tell(self, *, used: int = 0, total: int = 1 << 33, fail: int = 0) -> None:
        """Change what the driver tells from now on; `fail` is the CUresult of every call that works on the GPU."""
        draft = self.state.with_suffix(".draft")
        draft.write_text(f"used={used}\ntotal={total}\nfail={fail}\n")
        draft.replace(self.state)

    def install(self, patch: pytest.MonkeyPatch) -> ctypes.CDLL:
        """Give this process the driver for one test; return its library, to ask for `fake_cuda_open_count`."""
        from edge_server.backends.cuda import cuda_ctypes, cuda_driver

        patch.setenv("FAKE_CUDA_STATE", str(self.state))
        patch.setattr(cuda_driver, "LIBRARY", str(self.library))
        made = cuda_ctypes.CudaDriver(str(self.library))
        patch.setattr(cuda_driver, "driver", lambda: made)
        patch.setattr(cuda_driver, "devices", lambda: made.devices())
        return ctypes.CDLL(str(self.library))

    def allocate(self, byte_size: int) -> Allocation:
        made = Allocation(byte_size)
        self._allocations.append(made)
        return made

    def free_all(self) -> None:
        for allocation in self._allocations:
            allocation.free()


def build(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler for the driver that stands in for NVIDIA's")
    library = folder / LIBRARY
    # Without a soname: once loaded, later tests of this process would find it as the machine's driver.
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += ["-o", str(library), str(Path(__file__).with_name("fake_cuda.c")), "-lpthread", "-lrt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library
