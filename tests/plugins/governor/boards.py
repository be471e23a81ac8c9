"""Machines made of files: a board recorded in boards/*.txt becomes a folder that replaces `/`.

A file that a driver changes is replaced as a whole, so that a server that reads at that moment sees the old or the new.
Sensors are addressed by their own names; the numbers of folders have no meaning.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

BOARDS = Path(__file__).parent / "boards"

JETSONS = ("orin_nano_jp6", "orin_nx_jp5", "agx_orin_jp6", "thor_jp7")
NAMES = (*JETSONS, "x86_box")

NUMBERED = ("/sys/class/thermal/thermal_zone", "/sys/class/thermal/cooling_device", "/sys/class/hwmon/hwmon")
"""Folders that a boot may renumber."""


class SwitchedOff:
    """The content of a file whose reading fails with EAGAIN."""


OFF = SwitchedOff()


def read_board(text: str) -> dict[str, bytes | SwitchedOff]:
    """Return path -> content. The README in boards/ describes the format."""
    files: dict[str, bytes | SwitchedOff] = {}
    for number, line in enumerate(text.splitlines(), 1):
        path, _, content = line.partition(" = ")
        if line.startswith("/") and line.endswith(" ! EAGAIN"):
            files[line.removesuffix(" ! EAGAIN")] = OFF
        elif line.startswith("/") and content:
            files[path] = _ended(content.encode("latin-1").decode("unicode_escape"))
        elif line and not line.startswith("#"):
            raise ValueError(f"line {number}: expected '/path = content' or '/path ! EAGAIN', given: {line}")
    return files


class Board:
    """One board under `root`; for the name "" a machine without any sensor.

    `close` releases the files that represent disabled sensors. `files`: the original files of the board.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.root = folder / "root"
        self.root.mkdir(parents=True)
        self.files = read_board((BOARDS / f"{name}.txt").read_text(encoding="utf-8")) if name else {}
        self._staging = folder / "staging"
        self._staging.mkdir(parents=True)
        self._writers: dict[str, int] = {}
        for path in self.files:
            self.restore(path)

    def close(self) -> None:
        for path in list(self._writers):
            self._forget(path)

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, content: str | bytes | int) -> None:
        """Replace a file at one stroke, or add one. Text ends with a new line, as the kernel's does, or with a NUL."""
        self._forget(path)
        new = self._staging / "new"
        new.write_bytes(content if isinstance(content, bytes) else _ended(str(content)))
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, self.at(path))

    def remove(self, path: str) -> None:
        """Take away a file, or a folder with all in it: the driver was unloaded."""
        self._forget(path)
        target = self.at(path)
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def switch_off(self, path: str) -> None:
        """Make the file one that answers EAGAIN, in every process: a pipe that has a writer and no data."""
        self._forget(path)
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        new = self._staging / "new"
        os.mkfifo(new)
        self._writers[path] = os.open(new, os.O_RDWR | os.O_NONBLOCK)
        os.replace(new, self.at(path))

    def block(self, path: str) -> None:
        """Make the file unreadable for every user and process: a folder in its place."""
        self.remove(path)
        self.at(path).mkdir(parents=True)

    def restore(self, path: str) -> None:
        """Give the file back what the board had at first."""
        if self.at(path).is_dir():
            self.at(path).rmdir()
        content = self.files[path]
        if isinstance(content, SwitchedOff):
            self.switch_off(path)
        else:
            self.write(path, content)

    def zone(self, kind: str) -> str:
        """Return the folder of the thermal zone of that type, as a path of the machine."""
        return self._called(NUMBERED[0], "type", kind)

    def cooler(self, kind: str) -> str:
        return self._called(NUMBERED[1], "type", kind)

    def monitor(self, name: str, label: str = "") -> str:
        """Return the folder of the hardware monitor, which one of its labels may distinguish from others of its
        kind."""
        return self._called(NUMBERED[2], "name", name, label)

    def set_temperature(self, kind: str, temperature_c: float) -> None:
        self.write(f"{self.zone(kind)}/temp", round(temperature_c * 1000))

    def set_rail(self, label: str, power_w: float) -> None:
        """Let a channel of an INA3221 draw so much at the voltage that it has."""
        folder = self.monitor("ina3221", label)
        number = next(number for number in (1, 2, 3) if self._text(f"{folder}/in{number}_label") == label)
        voltage_mv = int(self._text(f"{folder}/in{number}_input"))
        self.write(f"{folder}/curr{number}_input", round(power_w * 1e6 / voltage_mv))

    def shuffle(self, seed: int) -> None:
        """Renumber zones, cooling devices and monitors from another start, as the next boot may."""
        draw = random.Random(seed)
        for prefix in NUMBERED:
            folders = self._folders(prefix)
            numbers = draw.sample(range(len(folders) + 12), len(folders))
            aside = [f"{folder}.aside" for folder in folders]
            for old, new in [*zip(folders, aside, strict=True), *self._named(aside, prefix, numbers)]:
                self._move(old, new)

    def _named(self, folders: list[str], prefix: str, numbers: list[int]) -> Iterator[tuple[str, str]]:
        return ((folder, f"{prefix}{number}") for folder, number in zip(folders, numbers, strict=True))

    def _move(self, old: str, new: str) -> None:
        os.rename(self.at(old), self.at(new))
        self.files = {_moved(path, old, new): content for path, content in self.files.items()}
        self._writers = {_moved(path, old, new): writer for path, writer in self._writers.items()}

    def _called(self, prefix: str, file: str, value: str, label: str = "") -> str:
        for folder in self._folders(prefix):
            if self._text(f"{folder}/{file}") == value and (not label or label in self._labels(folder)):
                return folder
        raise KeyError(f"{self.name} has no {prefix}* of {file} {value} {label}")

    def _folders(self, prefix: str) -> list[str]:
        parent, _, start = prefix.rpartition("/")
        if not self.at(parent).is_dir():
            return []
        return [f"{parent}/{entry}" for entry in sorted(os.listdir(self.at(parent))) if entry.startswith(start)]

    def _labels(self, folder: str) -> list[str]:
        return [path.read_text().strip() for path in self.at(folder).glob("*_label")]

    def _text(self, path: str) -> str:
        try:
            return self.at(path).read_text().strip()
        except OSError:
            return ""

    def _forget(self, path: str) -> None:
        for known in [known for known in self._writers if known == path or known.startswith(f"{path}/")]:
            os.close(self._writers.pop(known))


class Faults:
    """Reads files of a board like the kernel on a bad day: `errors` by path, each raised every time it is read.

    `once`: raised the first time only. `reads` counts by path. To be given to `Files` as its `read`.
    """

    def __init__(self, board: Board) -> None:
        self._prefix = str(board.root)
        self.errors: dict[str, int] = {}
        self.once: dict[str, int] = {}
        self.reads: dict[str, int] = {}

    def __call__(self, path: Path) -> bytes:
        # By its text: pathlib would take longer than the reading.
        name = str(path).removeprefix(self._prefix)
        self.reads[name] = self.reads.get(name, 0) + 1
        code = self.once.pop(name, 0) or self.errors.get(name, 0)
        if code:
            raise OSError(code, os.strerror(code), str(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.read(descriptor, 1 << 20)
        finally:
            os.close(descriptor)


ERRORS = (errno.EAGAIN, errno.EIO, errno.EACCES, errno.ENODATA, errno.ENODEV, errno.ENOENT, errno.ETIMEDOUT)
"""Errors of reading a sysfs file: drivers pass on those of their bus or firmware."""


def _ended(text: str) -> bytes:
    return (text if text.endswith(("\n", "\0")) else f"{text}\n").encode()


def _moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(f"{old}/") else path
