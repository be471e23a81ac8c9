"""Releases: what a signed repository says about one state of a model, and the rule that chooses a box's release.

A release is a TUF target MODEL/NUMBER.json. Its custom metadata says for which boxes it is and what it may cost; the
file lists the model's files. A model's files are targets MODEL/SHA256, so that releases share what did not change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.repository.disk.file_fingerprint import is_ignored
from edge_server.repository.disk.safe_paths import check_relative
from edge_server.repository.disk.scan import is_model_name, parse_version
from edge_server.repository.trust.checksum_file import FILE_NAME, SIGNATURE_NAME

MAX_FILES = 10_000
"""Most files of a release."""
MAX_LIST_BYTES = 4 << 20
"""Most bytes of a release's list of files."""
MAX_PUBLISHERS = 30
"""Most publishers of a repository besides the main one: a client of TUF visits at most 32 lists for a file."""
SAMPLE_NAME = "release_sample.npz"
"""File beside config.pbtxt with arrays of inputs, by name, and of expected outputs as "expected.NAME"."""
PUBLISHED_KEY = "x-edge-server-published"
"""Field of the TUF timestamp: when it was signed, in seconds since the epoch."""

_RELEASE_PATH = re.compile(r"([^/]+)/([1-9][0-9]{0,8})\.json")
_NOT_IN_DIGEST = (FILE_NAME, SIGNATURE_NAME)
_WAVE_PERCENT = re.compile(r"([0-9]{1,2}(?:\.[0-9]+)?|100) ?%")
SHA256 = re.compile("[0-9a-f]{64}")


class Box(NamedTuple):
    """The box that follows."""

    id: str
    groups: frozenset[str]
    machines: frozenset[str]
    """What it is: its processor, as x86_64 or aarch64; jetson, and orin or another name of the module; nvidia."""


class Release(NamedTuple):
    """What a target's path and custom metadata say. None: no limit."""

    path: str
    model: str
    number: int
    groups: frozenset[str] | None = None
    machines: frozenset[str] | None = None
    ids: frozenset[str] | None = None
    stopped_at: frozenset[str] | None = None
    """Names of the boxes that had reported it when its rollout was stopped. Besides them only boxes that have it want
    it. None: it was not stopped."""
    percent: float = 100.0
    """Share of the boxes, chosen by the hash of their ids."""
    waves: tuple[str, ...] = ()
    """Who gets it after whom: names of boxes with commas between them, "10 %", or "all". (): all at once."""
    wave: int = 0
    """Index of the wave that the rollout has reached."""
    wave_since_s: float = 0.0
    """When it reached that wave, in seconds since the epoch."""
    not_before_s: float = 0.0
    """Seconds since the epoch."""
    max_latency_ms: float | None = None
    """Largest time of a run with the sample: of the medians of some rounds the least."""
    max_slowdown: float | None = None
    """Largest ratio of that time to the serving version's, measured in turns."""
    tolerance: float | None = None
    """Largest difference of an output, relative to the largest magnitude in it."""

    @property
    def name(self) -> str:
        return release_name(self.path)

    def concerns(self, box: Box, now_s: float, *, is_installed: bool = False) -> bool:
        """Return whether the box is to have this release now, if there is no later one. `is_installed`: it has it."""
        return (
            (self.groups is None or bool(self.groups & box.groups))
            and (self.machines is None or bool(self.machines & box.machines))
            and (self.ids is None or box.id in self.ids)
            # Reports are late: a box may have it that had not said so yet.
            and (self.stopped_at is None or box.id in self.stopped_at or is_installed)
            and _place(self.path, box.id) < self.percent
            and (not self.waves or any(self._is_in(wave, box) for wave in self.waves[: self.wave + 1]))
            and self.not_before_s <= now_s
        )

    def _is_in(self, wave: str, box: Box) -> bool:
        percent = _WAVE_PERCENT.fullmatch(wave)
        if percent is not None:
            return _place(self.path, box.id) < float(percent[1])
        return wave == "all" or box.id in (name.strip() for name in wave.split(","))


def release_name(path: str) -> str:
    """Return MODEL/NUMBER, given the path of a release: what people read and write."""
    return path.removesuffix(".json")


def _place(path: str, box_id: str) -> float:
    """Return the box's place among all boxes, from 0 to below 100: another one for each release."""
    digest = hashlib.sha256(f"{path}\0{box_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48 * 100


def choose(
    releases: Iterable[Release], box: Box, now_s: float, installed: Collection[str] = ()
) -> dict[str, list[Release]]:
    """Return for each model the releases that concern the box, the one with the highest number first.

    `installed`: paths of the releases that it has.
    """
    chosen: dict[str, list[Release]] = {}
    for release in sorted(releases, key=lambda release: -release.number):
        if release.concerns(box, now_s, is_installed=release.path in installed):
            chosen.setdefault(release.model, []).append(release)
    return chosen


def read_release(path: str, custom: object) -> Release | None:
    """Return the release that a target describes; None if the target is not a release.

    Raises InvalidRequest for wrong custom metadata, also for keys that this version does not know: they may limit the
    boxes that the release is for.
    """
    found = _RELEASE_PATH.fullmatch(path)
    if found is None:
        return None
    model, number = found[1], int(found[2])
    if not is_model_name(model) or is_ignored(model):
        raise InvalidRequest(f"release '{path}': '{model}' cannot be the name of a model")
    if not isinstance(custom, Mapping):
        raise InvalidRequest(f"release '{path}': expected custom metadata, a JSON object")
    given = dict(custom)
    release = Release(
        path, model, number,
        groups=_names(path, "groups", given.pop("groups", None)),
        machines=_names(path, "machines", given.pop("machines", None)),
        ids=_names(path, "ids", given.pop("ids", None)),
        stopped_at=_names(path, "stopped_at", given.pop("stopped_at", None)),
        percent=_number(path, "percent", given.pop("percent", None), 0, 100, 100.0),
        waves=_texts(path, "waves", given.pop("waves", None)) or (),
        wave=int(_number(path, "wave", given.pop("wave", None), 0, 1000, 0.0)),
        wave_since_s=_number(path, "wave_since", given.pop("wave_since", None), 0, 1e12, 0.0),
        not_before_s=_number(path, "not_before", given.pop("not_before", None), 0, 1e12, 0.0),
        max_latency_ms=_limit(path, "max_latency_ms", given.pop("max_latency_ms", None), 0.001, 1e6),
        max_slowdown=_limit(path, "max_slowdown", given.pop("max_slowdown", None), 1, 1000),
        tolerance=_limit(path, "tolerance", given.pop("tolerance", None), 0, 1000),
    )  # fmt: skip
    for wave in release.waves:
        if "%" in wave and _WAVE_PERCENT.fullmatch(wave) is None:
            raise InvalidRequest(f"release '{path}': waves: expected names of boxes, N % or all, given '{wave[:80]}'")
    if given:
        raise InvalidRequest(f"release '{path}': unknown keys {', '.join(sorted(map(str, given)))[:200]}")
    return release


def _names(path: str, key: str, value: object) -> frozenset[str] | None:
    texts = _texts(path, key, value)
    return None if texts is None else frozenset(texts)


def _texts(path: str, key: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidRequest(f"release '{path}': {key}: expected a list of texts, given {repr(value)[:80]}")
    return tuple(value)


def _limit(path: str, key: str, value: object, low: float, high: float) -> float | None:
    return None if value is None else _number(path, key, value, low, high, 0.0)


def _number(path: str, key: str, value: object, low: float, high: float, default: float) -> float:
    if value is None:
        return default
    try:
        # TUF signs canonical JSON, which has no fractions: they are texts.
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or not low <= number <= high:
        raise InvalidRequest(
            f"release '{path}': {key}: expected a number from {low:g} to {high:g}, given {repr(value)[:80]}"
        )
    return number


def custom_of(release: Release) -> dict[str, object]:
    """Return the custom metadata from which `read_release` makes the release."""
    fields: dict[str, object] = {}
    for key in ("groups", "machines", "ids", "stopped_at"):
        names = getattr(release, key)
        if names is not None:
            fields[key] = sorted(names)
    if release.waves:
        fields["waves"] = list(release.waves)
    numbers = {
        "percent": release.percent if release.percent != 100 else None,
        "wave": release.wave or None,
        "wave_since": release.wave_since_s or None,
        "not_before": release.not_before_s or None,
        "max_latency_ms": release.max_latency_ms,
        "max_slowdown": release.max_slowdown,
        "tolerance": release.tolerance,
    }
    fields |= {key: str(value) for key, value in numbers.items() if value is not None}
    return fields


def render_files(files: Mapping[str, str]) -> bytes:
    """Return the content of a release's file: path in the model's folder -> SHA-256.

    A path that ends in "/" is an empty folder, such as the version of an ensemble, and has "".
    """
    return json.dumps({"files": dict(sorted(files.items()))}, indent=0).encode()


def read_files(path: str, content: bytes) -> dict[str, str]:
    """Read what `render_files` wrote. Raises InvalidRequest."""
    try:
        document: Any = json.loads(content)
        files = document["files"]
    except (ValueError, KeyError, TypeError, RecursionError):
        files = None
    if not isinstance(files, dict) or not 0 < len(files) <= MAX_FILES:
        raise InvalidRequest(f"release '{path}': expected a list of 1 to {MAX_FILES} files")
    for name, digest in files.items():
        try:
            relative = check_relative(name.removesuffix("/"), f"release '{path}': '{name[:200]}'")
        except BadModelConfig as error:
            raise InvalidRequest(str(error)) from None
        if str(relative) != name.removesuffix("/") or any(is_ignored(part) for part in PurePosixPath(name).parts):
            raise InvalidRequest(f"release '{path}': '{name[:200]}' cannot be a file of a model")
        if not isinstance(digest, str) or (SHA256.fullmatch(digest) is None and (digest or not name.endswith("/"))):
            raise InvalidRequest(f"release '{path}': '{name[:200]}': expected a SHA-256, given {repr(digest)[:80]}")
    return files


def version_digests(files: Mapping[str, str]) -> dict[int, str]:
    """Return version -> its digest as the repository index has it (`repository/disk/served_version_digests.py`)."""
    listed = {name: digest for name, digest in files.items() if PurePosixPath(name).name not in _NOT_IN_DIGEST}
    tops = {name: parse_version(name.partition("/")[0]) if "/" in name else None for name in listed}
    found = {}
    for version in {top for top in tops.values() if top is not None}:
        names = [name for name, top in tops.items() if top in (None, version) and listed[name]]
        lines = b"".join(f"{listed[name]}  {name}\n".encode() for name in sorted(names, key=os.fsencode))
        found[version] = f"sha256:{hashlib.sha256(lines).hexdigest()}"
    return found
