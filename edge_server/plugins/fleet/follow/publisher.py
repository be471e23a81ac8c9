"""Writer of a signed repository: keys, releases of models, and the metadata of The Update Framework (TUF).

REPOSITORY/metadata/   N.root.json, N.targets.json, N.snapshot.json and timestamp.json
REPOSITORY/targets/    MODEL/HASH.NUMBER.json, and MODEL/HASH.HASH for each file of a model

Three keys sign: `root` names the keys, `targets` signs releases, and `online` signs snapshot and timestamp, which say
what is newest and expire soon. The private keys of root and targets can stay on a machine that is never online.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from edge_server.errors import InvalidRequest, ServingFault, install_hint
from edge_server.plugins.fleet.follow.release import (
    MAX_FILES,
    MAX_LIST_BYTES,
    PUBLISHED_KEY,
    Release,
    custom_of,
    read_files,
    read_release,
    render_files,
)
from edge_server.plugins.fleet.follow.signing_keys import SigningKeys
from edge_server.repository.file_fingerprint import is_ignored
from edge_server.repository.replace_file import replace_file, sync_folder
from edge_server.repository.trust.checksum_file import digest_file

try:
    from tuf.api.exceptions import RepositoryError
    from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp
    from tuf.api.serialization import DeserializationError
except ImportError as error:
    raise ServingFault(f"{error}: {install_hint('fleet')}") from None

ROLES_OF_KEYS: Mapping[str, Sequence[str]] = {
    "root": ("root",),
    "targets": ("targets",),
    "online": ("snapshot", "timestamp"),
}
KEPT_RELEASES = 5
"""Releases of a model that stay in a repository: boxes outside of the newest one's choice have an older one."""
_LAST_WAVE = 1000
_MAX_WITHDRAWN = 100
"""Withdrawn releases of a model that are remembered."""
_WITHDRAWN_KEY = "x-edge-server-withdrawn"
_LAST_NUMBERS_KEY = "x-edge-server-last-numbers"
_EXPIRES_DAYS = {"root": 2 * 365, "targets": 365, "snapshot": 30, "timestamp": 30}


class Publisher:
    """The repository in `folder`. Not thread-safe; one process at a time may write it."""

    def __init__(self, folder: Path, keys: SigningKeys) -> None:
        """Open the repository, or create it with new keys. Raises InvalidRequest and ServingFault."""
        self.metadata = folder / "metadata"
        self.targets = folder / "targets"
        self._keys = keys
        self.is_new = not self.metadata.exists()
        self.root_problem = ""
        """Why `commit` could not renew root, "" if it did or need not."""
        if self.is_new:
            self._create()
        newest = max((int(path.name.split(".")[0]) for path in self.metadata.glob("*.root.json")), default=1)
        self._root: Root = self._read(f"{newest}.root.json", Root).signed
        self._timestamp: Timestamp = self._read("timestamp.json", Timestamp).signed
        self._snapshot: Snapshot = self._read(f"{self._timestamp.snapshot_meta.version}.snapshot.json", Snapshot).signed
        self._targets: Targets = self._read(
            f"{self._snapshot.meta['targets.json'].version}.targets.json", Targets
        ).signed

    @property
    def root_file(self) -> Path:
        """The root metadata that boxes get with their installation."""
        return self.metadata / f"{self._root.version}.root.json"

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

        `selection` is the custom metadata. Returns None for files that were withdrawn. Raises InvalidRequest and
        ServingFault.
        """
        digests = {
            name: self._add_file(model, path) if isinstance(path, Path) else ""
            for name, path in _files_of(folder).items()
        }
        content = render_files(digests)
        if len(content) > MAX_LIST_BYTES:
            raise InvalidRequest(f"'{folder}' has too many files for one release")
        if _sha256(content) in self._noted(_WITHDRAWN_KEY).get(model, ()):
            return None
        newest = max(self.releases_of(model), key=lambda release: release.number, default=None)
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
        path = f"{model}/{number}.json"
        release = read_release(path, selection)
        if release is None:
            raise InvalidRequest(f"'{model[:200]}' cannot be the name of a model")
        release = release._replace(stopped_at=stopped_at)
        if release.waves:
            release = release._replace(wave=min(wave, len(release.waves) - 1), wave_since_s=since_s or int(now_s))
        self._targets.targets[path] = TargetFile.from_data(path, content, ["sha256"])
        self.change(release)
        _write(self.targets / model / f"{_sha256(content)}.{number}.json", content)
        return release

    def releases_of(self, model: str) -> list[Release]:
        return [release for release in self.releases().values() if release.model == model]

    def change(self, release: Release) -> None:
        """Give a release this selection."""
        self._targets.targets[release.path].unrecognized_fields["custom"] = custom_of(release)

    def withdraw(self, path: str) -> None:
        """Remove a release: its boxes go back to an earlier one, or remove the model. Its files do not become a release
        again. Raises InvalidRequest."""
        if path not in self.releases():
            listed = ", ".join(sorted(item.removesuffix(".json") for item in self.releases())) or "none"
            raise InvalidRequest(f"there is no release '{path.removesuffix('.json')}'; there is {listed}")
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

        Snapshot and timestamp are signed anew each time; targets and root in the second half of their validity, root
        only if its key is here. Raises InvalidRequest if another key is not, ServingFault if files cannot be written.
        """
        self._prune()
        if self._is_old(self._root, "root", now):
            self._renew_root(now)
        before = self._read(f"{self._snapshot.meta['targets.json'].version}.targets.json", Targets).signed
        if self._is_old(self._targets, "targets", now) or before.to_dict() != self._targets.to_dict():
            self._targets.version += 1
            self._sign(self._targets, "targets", now)
            self._snapshot.meta["targets.json"] = MetaFile(self._targets.version)
        self._snapshot.version += 1
        self._sign(self._snapshot, "snapshot", now)
        self._timestamp.snapshot_meta = MetaFile(self._snapshot.version)
        self._timestamp.version += 1
        self._timestamp.unrecognized_fields[PUBLISHED_KEY] = int(now.timestamp())
        self._sign(self._timestamp, "timestamp", now)
        self._delete_unused()

    # -- files ------------------------------------------------------------------------------------------------------

    def _create(self) -> None:
        keys = self._keys.make(list(ROLES_OF_KEYS))
        now = datetime.now(timezone.utc)
        self._root = Root(consistent_snapshot=True)
        for name, roles in ROLES_OF_KEYS.items():
            for role in roles:
                self._root.add_key(keys[name], role)
        timestamp = Timestamp()
        timestamp.unrecognized_fields[PUBLISHED_KEY] = int(now.timestamp())
        try:
            for signed in (self._root, Targets(), Snapshot(), timestamp):
                self._sign(signed, signed.type, now)
        except InvalidRequest:
            shutil.rmtree(self.metadata, ignore_errors=True)
            self._keys.delete_made()
            raise

    def _renew_root(self, now: datetime) -> None:
        renewed = Root.from_dict(copy.deepcopy(self._root.to_dict()))
        renewed.version += 1
        try:
            self._sign(renewed, "root", now)
        except InvalidRequest as error:
            # Nothing is lost yet: root has half of its validity left, and its key may be in a safe.
            self.root_problem = error.message
        else:
            self._root = renewed

    @staticmethod
    def _is_old(signed: Any, role: str, now: datetime) -> bool:
        return bool(signed.expires - now < timedelta(days=_EXPIRES_DAYS[role] / 2))

    @property
    def root_expires(self) -> datetime:
        return self._root.expires

    def _sign(self, signed: Any, role: str, now: datetime) -> None:
        """Sign and write metadata. Raises InvalidRequest if keys are missing; then nothing is written."""
        signed.expires = now.replace(microsecond=0) + timedelta(days=_EXPIRES_DAYS[role])
        metadata: Metadata[Any] = Metadata(signed)
        name = "timestamp.json" if role == "timestamp" else f"{signed.version}.{role}.json"
        missing = self._keys.sign(metadata, self._root.keys, self._root.roles[role].keyids)
        if len(metadata.signatures) < self._root.roles[role].threshold:
            reasons = "; ".join(f"the key {key}: {reason}" for key, reason in missing.items())
            raise InvalidRequest(f"{name} cannot be signed: {reasons}")
        _write(self.metadata / name, metadata.to_bytes())

    def _read(self, name: str, kind: type[Any]) -> Metadata[Any]:
        path = self.metadata / name
        try:
            found: Metadata[Any] = Metadata.from_bytes(path.read_bytes())
        except OSError as error:
            raise InvalidRequest(f"'{path}' cannot be read: {error.strerror}; is this a repository?") from None
        except (DeserializationError, RepositoryError) as error:
            raise InvalidRequest(f"'{path}' cannot be read: {error}") from None
        if not isinstance(found.signed, kind):
            raise InvalidRequest(f"'{path}' cannot be read: expected {kind.type}, given {found.signed.type}")
        return found

    def _add_file(self, model: str, source: Path) -> str:
        """Copy a file to where its target is read from, unless it is there undamaged. Return its SHA-256."""
        try:
            digest = digest_file(source)[0].hex()
            path, copy = f"{model}/{digest}", self.targets / model / f"{digest}.{digest}"
            target = TargetFile.from_file(path, str(copy), ["sha256"]) if copy.exists() else None
            if target is None or target.hashes["sha256"] != digest:
                copy.parent.mkdir(parents=True, exist_ok=True)
                draft = copy.with_name(f".{copy.name}.part")
                shutil.copyfile(source, draft)
                with draft.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(draft, copy)
                sync_folder(copy.parent)
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
            copy = self.targets / release.model / f"{target.hashes['sha256']}.{release.number}.json"
            digests = filter(None, read_files(path, copy.read_bytes()).values())
            used |= {path, *(f"{release.model}/{digest}" for digest in digests)}
        for path in set(self._targets.targets) - used:
            del self._targets.targets[path]

    def _delete_unused(self) -> None:
        used = {
            self.targets / Path(path).parent / f"{target.hashes['sha256']}.{Path(path).name}"
            for path, target in self._targets.targets.items()
        }
        for path in self.targets.glob("*/*"):
            if path not in used:
                path.unlink(missing_ok=True)


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


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise ServingFault(f"'{path}' cannot be written: {error.strerror}") from None
