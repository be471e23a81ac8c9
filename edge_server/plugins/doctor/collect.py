"""Archive of facts about a board, for people who do not have it: files of the sensors, device files, versions, and what
drivers answer (`Plugin.machine_facts`).

Unpacked, it is a folder for `--sysfs-root`. Only the files listed here are read. Names of hosts and users, addresses
and serial numbers are replaced by "removed".
"""

from __future__ import annotations

import ctypes
import grp
import gzip
import importlib.metadata
import io
import json
import os
import platform
import re
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from edge_server.backends.cuda.cuda_driver import LIBRARY
from edge_server.child_command import child_command
from edge_server.plugin import find_plugins
from edge_server.plugins.doctor.machine import installed_packages
from edge_server.plugins.doctor.runtimes import DISTRIBUTIONS
from edge_server.telemetry.sysfs import MissingReason, SysfsFiles
from edge_server.version import __version__

_FILES = (
    "/etc/nv_tegra_release", "/etc/nvpmodel.conf", "/var/lib/nvpmodel/status", "/proc/devices", "/proc/meminfo",
    "/proc/pressure/memory", "/proc/device-tree/model", "/proc/device-tree/compatible", "/proc/sys/kernel/osrelease",
    "/sys/devices/platform/gpu.0/load", "/sys/devices/platform/bus@0/17000000.gpu/load",
)  # fmt: skip
_FOLDERS: tuple[tuple[str, str, str], ...] = (
    ("/sys/class/thermal", r"thermal_zone\d+", r"type|temp|mode|trip_point_\d+_(type|temp|hyst)"),
    ("/sys/class/thermal", r"cooling_device\d+", r"type|cur_state|max_state"),
    ("/sys/class/hwmon", r"hwmon\d+", r"name|label|rpm|(in|curr|power|temp|fan|pwm|oc)\d+(_\w+)?"),
    ("/sys/class/devfreq", r".+", r"(cur|min|max)_freq|available_(frequencies|governors)|governor"),
    ("/sys/class/devfreq", r".+", r"device/of_node/name"),
    ("/sys/devices/system/cpu/cpufreq", r"policy\d+", r"(scaling|cpuinfo)_((cur|min|max)_freq|governor)"),
)
"""Folder, pattern of the folders in it, pattern of the files in those; a pattern with a slash is a path."""

_NODES = (("/dev", r"nv.*|host1x.*"), ("/dev/nvgpu/igpu0", r".+"), ("/dev/dri", r".+"))
_GROUPS = ("root", "video", "render", "debug", "trusty", "crypto")
"""Groups of systems and of NVIDIA's rules. Other owners and groups are numbers."""

_SECRETS = (
    "/proc/sys/kernel/hostname", "/etc/hostname", "/etc/machine-id", "/proc/device-tree/serial-number",
    *(f"/sys/class/dmi/id/{name}" for name in ("product_serial", "board_serial", "chassis_serial", "product_uuid")),
)  # fmt: skip
_ORDINARY = {
    *("nvidia", "jetson", "tegra", "orin", "thor", "nano", "nx", "agx"),
    *("ubuntu", "debian", "linux", "localhost", "edge", "gpu", "cpu", "root"),
}
"""Words that tell no machine or user from others: a user `nvidia`, a host `orin-nano`."""
_IDENTIFIERS = re.compile(
    r"(?:[0-9a-f]{0,4}:){4,7}[0-9a-f]{0,4}|[0-9a-f]{1,4}::[0-9a-f:]*|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"
    r"|\b[0-9a-f]{32}\b|(?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.]+",
    re.IGNORECASE,
)
"""MAC and IPv6 addresses, UUIDs, machine ids, addresses of mail."""
_IPV4 = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")

_MAX_FILE_BYTES, _MAX_BYTES = 64 << 10, 4 << 20
_FILE_TIMEOUT_S, _TIMEOUT_S, _DRIVER_TIMEOUT_S = 2.0, 60.0, 30.0
"""Of one file, of all files (a driver may let each of its files hang), and of one driver."""


def collect(files: SysfsFiles, root: Path, output: Path) -> dict[str, str]:
    """Write the archive (tar, gzip) of the machine below `root` to a new file. Return the files that could not be read,
    with the reasons; the archive has them too. Raises OSError if it cannot be written."""
    texts, unread = _read_all(files)
    texts["/nodes.txt"] = "\n".join(_nodes(files, root))
    packages = installed_packages(files)
    for name in sorted({*DISTRIBUTIONS.values(), "onnxruntime-gpu", "nvidia-ml-py", "numpy"}):
        packages |= {f"python {name}": item.version for item in importlib.metadata.distributions(name=name)}
    about = {
        "edge_server": __version__, "python": platform.python_version(), "processor": platform.machine(),
        "system": re.findall(r'(?m)^PRETTY_NAME="?(.*?)"?$', files.maybe_text("/etc/os-release") or "")[:1],
        "unread": unread,
    }  # fmt: skip
    about |= {
        name: _ask(function) for plugin in find_plugins().plugins for name, function in plugin.machine_facts.items()
    }
    secrets = [_secrets(files), _IDENTIFIERS]
    contents: dict[str, str] = _scrub(texts, [*secrets, _IPV4])
    # Versions of four numbers look like addresses.
    about = {**_scrub(about, [*secrets, _IPV4]), "packages": _scrub(packages, secrets)}
    contents["/board.json"] = json.dumps(about, indent=1)
    _write_archive(output, contents)
    return unread


def _read_all(files: SysfsFiles) -> tuple[dict[str, str], dict[str, str]]:
    """Return the contents of the files by path, and the reasons of those that were not read."""
    texts: dict[str, str] = {}
    unread: dict[str, str] = {}
    end_s, bytes_left = time.monotonic() + _TIMEOUT_S, _MAX_BYTES
    for path in _paths(files):
        text = _read(files, path, min(_FILE_TIMEOUT_S, end_s - time.monotonic()))
        if isinstance(text, MissingReason):
            if not text.reason.endswith(" is not there"):
                unread[path] = text.reason
        elif len(text) > min(_MAX_FILE_BYTES, bytes_left):
            unread[path] = f"{path} is too long: {len(text)} bytes"
        else:
            # What a person wrote into nvpmodel.conf is left out.
            texts[path] = re.sub(r"(?m)#.*", "", text) if path == "/etc/nvpmodel.conf" else text
            bytes_left -= len(text)
    return texts, unread


def _write_archive(output: Path, contents: Mapping[str, str]) -> None:
    with (
        output.open("xb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for path, text in sorted(contents.items()):
            member = tarfile.TarInfo(path.lstrip("/"))
            data = f"{text}\n".encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def _paths(files: SysfsFiles) -> Iterator[str]:
    yield from _FILES
    for folder, entries, names in _FOLDERS:
        for entry in files.names(folder, entries):
            found = [names] if "/" in names else files.names(f"{folder}/{entry}", names)
            yield from (f"{folder}/{entry}/{name}" for name in found)


def _read(files: SysfsFiles, path: str, timeout_s: float) -> str | MissingReason:
    """Return the text of a file. A driver may let a reader wait for ever: its thread is then left behind."""
    found: list[str | MissingReason] = []
    thread = threading.Thread(target=lambda: found.append(files.text(path)), daemon=True)
    if timeout_s > 0:
        thread.start()
        thread.join(timeout_s)
    return found[0] if found else MissingReason(f"{path} did not answer in time")


def _nodes(files: SysfsFiles, root: Path) -> Iterator[str]:
    """Yield a line for each device file: path, kind, number, mode, owner and group."""
    groups = {entry.gr_gid: entry.gr_name for entry in grp.getgrall() if entry.gr_name in _GROUPS}
    for folder, pattern in _NODES:
        for name in files.names(folder, pattern):
            found = (root / folder.lstrip("/") / name).lstat()
            if not stat.S_ISDIR(found.st_mode):
                kind, number = stat.filemode(found.st_mode)[0], f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
                owner = f"{found.st_uid or 'root'}:{groups.get(found.st_gid, found.st_gid)}"
                yield f"{folder}/{name} {kind} {number} {stat.S_IMODE(found.st_mode):04o} {owner}"


def _secrets(files: SysfsFiles) -> re.Pattern[str]:
    """Return a pattern of the names of this host and its users, and of its serial numbers."""
    found = [files.maybe_text(path) or "" for path in _SECRETS]
    for line in (files.maybe_text("/etc/passwd") or "").splitlines():
        user = line.split(":")
        if len(user) > 4 and user[2].isdigit() and 1000 <= int(user[2]) < 65534:
            found += [user[0], *user[4].split(",")]
    found += [name.partition(".")[0] for name in found[:2]]
    # A name of fewer characters is in too many words.
    names = {name for name in found if len(name) > 2 and not {*re.findall("[a-z0-9]+", name.lower())} <= _ORDINARY}
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"
    return re.compile(rf"(?<![a-z0-9])(?:{alternatives})(?![a-z0-9])", re.IGNORECASE)


def _scrub(value: Any, patterns: Sequence[re.Pattern[str]]) -> Any:
    """Replace what identifies the machine in a text, or in the texts of a JSON value."""
    if isinstance(value, dict):
        return {_scrub(key, patterns): _scrub(item, patterns) for key, item in value.items()}
    if isinstance(value, list):
        return [_scrub(item, patterns) for item in value]
    for pattern in patterns if isinstance(value, str) else ():
        value = pattern.sub("removed", value)
    return value


def _ask(function: str) -> Any:
    """Return the answer of a function of `Plugin.machine_facts`, from a process of its own: a broken driver hangs, or
    ends its process."""
    command = child_command("edge_server.plugins.doctor.collect", function)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False)
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer within {_DRIVER_TIMEOUT_S:g} s"}
    except ValueError:
        return {"problem": f"the process ended with {done.returncode}"}


def cuda_facts() -> dict[str, object]:
    """Return the version of the CUDA driver, the number of its devices, and the result of `cuInit`; or the problem."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return {"problem": f"{LIBRARY} does not load"}
    version, count = ctypes.c_int(), ctypes.c_int()
    code = driver.cuInit(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    return {"cuInit": code, "version": version.value, "devices": count.value}


if __name__ == "__main__":
    print(json.dumps(resolve_name(sys.argv[1])(), default=lambda value: sorted(map(str, value))))
