"""What a machine has of NVIDIA's, by the standard library alone: device nodes, driver, GPUs. Run as a program, it
prints that as JSON: a driver may end the process that asks it."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import json
import os
import platform
import re
import stat
from pathlib import Path
from typing import Any

COMPATIBLE = Path("/proc/device-tree/compatible")
_NODES = ("nvidia*", "nvidia-caps/*", "nvgpu/*/*", "nvhost*", "nvmap", "nvsciipc", "nvsched*", "host1x-fence", "dri/*")
# CUdevice_attribute in cuda.h.
_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18


def is_jetson() -> bool:
    with contextlib.suppress(OSError):
        return any(chip.startswith(b"nvidia,tegra") for chip in COMPATIBLE.read_bytes().split(b"\0"))
    return False


def cuda_devices() -> tuple[int, str]:
    """Return how many GPUs the driver has, and why there are none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return 0, f"no driver ({error})"
    status = int(cuda.cuInit(0))
    if status:
        return 0, f"cuInit failed with {status}"
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return count.value, "the driver finds no device"


def look() -> dict[str, Any]:
    """Return the machine without names, addresses and serial numbers. `problem` says why there is no GPU, or is ""."""
    count, problem = cuda_devices()
    nodes = [path for pattern in _NODES for path in sorted(Path("/dev").glob(pattern)) if not path.is_dir()]
    board = COMPATIBLE.with_name("model")
    return {
        "problem": "" if count else problem,
        "board": board.read_text(errors="replace").rstrip("\0") if is_jetson() else "",
        "processor": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "driver": next(iter(re.findall(r"\d+\.[\d.]+", _first_line("/proc/driver/nvidia/version"))), ""),
        "l4t": _first_line("/etc/nv_tegra_release"),
        "cuda": _cuda_version() if count else "",
        "gpus": [_gpu(number) for number in range(count)],
        "nodes": [_node(path) for path in nodes],
    }


def _first_line(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace").partition("\n")[0]
    return ""


def _cuda_version() -> str:
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _gpu(number: int) -> dict[str, Any]:
    cuda, device, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        return value.value

    return {
        "name": name.value.decode("utf-8", "replace"),
        "capability": f"{attribute(_MAJOR)}.{attribute(_MINOR)}",
        "memory_bytes": size.value,
        "is_integrated": bool(attribute(_INTEGRATED)),
    }


def _node(path: Path) -> str:
    """Return a line as `ls -l` has it."""
    found = path.stat()
    owner, group = str(found.st_uid) if found.st_uid else "root", str(found.st_gid)
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(found.st_gid).gr_name
    number = f"{os.major(found.st_rdev)}, {os.minor(found.st_rdev)}"
    return f"{stat.filemode(found.st_mode)} {owner} {group} {number} {path}"


if __name__ == "__main__":
    print(json.dumps(look()))
