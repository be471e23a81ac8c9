"""Writer of a publisher's releases into a signed repository: copies the model files, and lists each release in the
publisher's TUF metadata.

REPOSITORY/metadata/   see `repository_metadata.py`
REPOSITORY/targets/    MODEL/HASH.NUMBER.json, and MODEL/HASH.HASH for each file of a model
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_server.errors import InvalidRequest, ServingFault, install_hint
from edge_server.plugins.fleet.publish.repository_metadata import MAIN, RepositoryMetadata, write_file
from edge_server.plugins.fleet.publish.signing_keys import SigningKeys
from edge_server.plugins.fleet.release import (
    MAX_FILES,
    MAX_LIST_BYTES,
    Release,
    custom_of,
    read_files,
    read_release,
    release_name,
    render_files,
)
from edge_server.repository.disk.file_fingerprint import is_ignored
from edge_server.repository.disk.replace_file import sync_folder
from edge_server.repository.trust.checksum_file import digest_file

try:
    from tuf.api.metadata import TargetFile, Targets
except ImportError as error:
    raise ServingFault(f"{error}: {install_hint('fleet')}") from None

KEPT_RELEASES = 5
"""Releases of a model that stay in a repository: boxes outside of the newest one's choice have an older one."""
_LAST_WAVE = 1000
_MAX_WITHDRAWN = 100
"""Withdrawn releases of a model that are remembered."""
_WITHDRAWN_KEY = "x-edge-server-withdrawn"
_LAST_NUMBERS_KEY = "x-edge-server-last-numbers"


class Publisher:
    """A publisher of the repository in `folder`: the main one, or another one by its name. Use it within `locked`."""

    def __init__(self, folder: Path, keys: SigningKeys, name: str = "") -> None:
        """Open the repository; the main publisher (`name` "") creates it with new keys. Raises InvalidRequest and
        ServingFault."""
        if name and not (folder / "metadata").is_dir():
            raise InvalidRequest(f"'{folder}' is no signed repository")
        self.metadata = RepositoryMetadata(folder / "metadata", keys)
        self._folder = folder / "targets"
        self._name = name or MAIN
        self._targets = self.metadata.targets_of(self._name) or Targets()

    def releases(self) -> dict[str, Release]:
        """Return path -> release. Raises InvalidRequest for metadata that another program wrote."""
        found = {
            path: read_release(path, target.unrecognized_fields.get("custom"))
            for path, target in self._targets.targets.items()
        }
        return {path: release for path, release in found.items() if release is not None}

    def add(self, model: str, folder: Path, selection: Mapping[str, object], now_s: float) -> Release | None:
        """Add a release of the model in `folder`, or give its newest one another selection if no file has changed; a
        rollout in waves stays where it is, at the last wave if all boxes may have it, and one that was stopped stays
        stopped.

        `selection` is the custom metadata. Returns None for files that were withdrawn. Raises InvalidRequest, also for
        a model of another publisher, and ServingFault.
        """
        owner = self.metadata.publisher_of(model)
        if owner != self._name:
            whose = "the main publisher's" if owner == MAIN else f"for the publisher '{owner}'"
            raise InvalidRequest(f"model '{model}' is {whose}, by its name: it cannot be published here")
        digests = {
            name: self._add_file(model, path) if isinstance(path, Path) else ""
            for name, path in _files_of(folder).items()
        }
        content = render_files(digests)
        if len(content) > MAX_LIST_BYTES:
            raise InvalidRequest(f"'{folder}' has too many files for one release")
        if _sha256(content) in self._noted(_WITHDRAWN_KEY).get(model, ()):
            return None
        release = self._next_release(model, content, selection, now_s)
        self._targets.targets[release.path] = TargetFile.from_data(release.path, content, ["sha256"])
        self.change(release)
        write_file(self._folder / model / f"{_sha256(content)}.{release.number}.json", content)
        return release

    def _next_release(self, model: str, content: bytes, selection: Mapping[str, object], now_s: float) -> Release:
        """Return the newest release with another selection if it has these files, else one with the next number."""
        ours = (release for release in self.releases().values() if release.model == model)
        newest = max(ours, key=lambda release: release.number, default=None)
        # A number is never used again, also if its release was withdrawn: reports name releases by it.
        last: dict[str, int] = self._noted(_LAST_NUMBERS_KEY)
        if newest is not None and self._targets.targets[newest.path].hashes["sha256"] == _sha256(content):
            number, wave, since_s, stopped_at = newest.number, newest.wave, newest.wave_since_s, newest.stopped_at
            if not newest.waves or newest.waves[wave] == "all":
                # No box that may have it loses it to waves that are meant for the next release.
                wave = _LAST_WAVE
        else:
            number, wave, since_s, stopped_at = last.get(model, 0) + 1, 0, 0.0, None
        last[model] = max(number, last.get(model, 0))
        release = read_release(f"{model}/{number}.json", selection)
        if release is None:
            raise InvalidRequest(f"'{model[:200]}' cannot be the name of a model")
        release = release._replace(stopped_at=stopped_at)
        if release.waves:
            release = release._replace(wave=min(wave, len(release.waves) - 1), wave_since_s=since_s or int(now_s))
        return release

    def change(self, release: Release) -> None:
        """Give a release this selection."""
        self._targets.targets[release.path].unrecognized_fields["custom"] = custom_of(release)

    def withdraw(self, path: str) -> None:
        """Remove a release: its boxes go back to an earlier one, or remove the model. Its files do not become a release
        again. Raises InvalidRequest."""
        if path not in self.releases():
            listed = ", ".join(sorted(release.name for release in self.releases().values())) or "none"
            raise InvalidRequest(f"there is no release '{release_name(path)}'; there is {listed}")
        target = self._targets.targets.pop(path)
        model = path.partition("/")[0]
        withdrawn = [*self._noted(_WITHDRAWN_KEY).get(model, ()), target.hashes["sha256"]]
        self._noted(_WITHDRAWN_KEY)[model] = withdrawn[-_MAX_WITHDRAWN:]

    def _noted(self, key: str) -> dict[str, Any]:
        """Return the publisher's own notes, by model, in a field of the signed list."""
        noted: dict[str, Any] = self._targets.unrecognized_fields.setdefault(key, {})
        return noted

    def commit(self, now: datetime) -> None:
        """Sign and write the changes, each file before the one that names it, and delete files without a name.

        Raises as `RepositoryMetadata.commit`.
        """
        self._prune()
        self.metadata.commit(self._name, self._targets, now)
        used = {
            self._folder / Path(path).parent / f"{target.hashes['sha256']}.{Path(path).name}"
            for path, target in self._targets.targets.items()
        }
        for path in self._folder.glob("*/*"):
            # Files of other publishers may be there before the list that names them.
            if path not in used and self.metadata.publisher_of(path.parent.name) == self._name:
                path.unlink(missing_ok=True)

    def _add_file(self, model: str, source: Path) -> str:
        """Copy a file to where its target is read from, unless it is there undamaged. Return its SHA-256."""
        try:
            digest = digest_file(source)[0].hex()
            path, copy = f"{model}/{digest}", self._folder / model / f"{digest}.{digest}"
            target = TargetFile.from_file(path, str(copy), ["sha256"]) if copy.exists() else None
            if target is None or target.hashes["sha256"] != digest:
                copy.parent.mkdir(parents=True, exist_ok=True)
                _copy_file(source, copy)
                target = TargetFile.from_file(path, str(copy), ["sha256"])
        except OSError as error:
            raise ServingFault(f"'{error.filename or source}': {error.strerror or error}") from None
        if target.hashes["sha256"] != digest:
            raise ServingFault(f"'{source}' changed while it was read, or its copy '{copy}' is damaged")
        self._targets.targets[path] = target
        return digest

    def _prune(self) -> None:
        """Remove all but the newest releases of each model from the targets, and files that no release names."""
        by_model: dict[str, list[Release]] = {}
        for release in self.releases().values():
            by_model.setdefault(release.model, []).append(release)
        for releases in by_model.values():
            for release in sorted(releases, key=lambda item: item.number)[:-KEPT_RELEASES]:
                del self._targets.targets[release.path]
        used = set()
        for path, release in self.releases().items():
            target = self._targets.targets[path]
            copy = self._folder / release.model / f"{target.hashes['sha256']}.{release.number}.json"
            digests = filter(None, read_files(path, copy.read_bytes()).values())
            used |= {path, *(f"{release.model}/{digest}" for digest in digests)}
        for path in set(self._targets.targets) - used:
            del self._targets.targets[path]


def _files_of(folder: Path) -> dict[str, Path | str]:
    """Return the files of a model by their path in it, links followed, and "" for each empty folder ("1/").

    Raises InvalidRequest for too many.
    """
    found: dict[str, Path | str] = {}
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not is_ignored(name))
        names = sorted(name for name in names if not is_ignored(name))
        relative = Path(place).relative_to(folder)
        found |= {(relative / name).as_posix(): Path(place, name) for name in names}
        if not folders and not names and relative.parts:
            found[f"{relative.as_posix()}/"] = ""
        if len(found) > MAX_FILES:
            raise InvalidRequest(f"'{folder}' has more than {MAX_FILES} files")
    return found


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file in one step, so that a server of static files never has half of it. Raises OSError."""
    draft = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(source, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, target)
    except OSError:
        # A full disk is not to stay full.
        draft.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
