"""Metadata of a signed repository, as its publishers read and sign them: The Update Framework (TUF).

REPOSITORY/metadata/   N.root.json, N.targets.json, N.PUBLISHER.json, N.snapshot.json and timestamp.json
                       root.draft.json: a next root that not enough of its keys have signed yet

Three keys sign: `root` names the keys, `targets` signs releases, and `online` signs snapshot and timestamp, which say
what is newest and expire soon. The private keys of root and targets can stay on a machine that is never online.
Publishers besides have a key each, and sign releases of the models whose names match their patterns.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import fnmatch
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from edge_server.errors import InvalidRequest, ServingFault, install_hint
from edge_server.plugins.fleet.publish.signing_keys import SigningKeys, name_of
from edge_server.plugins.fleet.release import MAX_PUBLISHERS, PUBLISHED_KEY
from edge_server.repository.disk.replace_file import replace_file

try:
    from tuf.api.exceptions import RepositoryError, UnsignedMetadataError
    from tuf.api.metadata import DelegatedRole, Delegations, Metadata, MetaFile, Root, Snapshot, Targets, Timestamp
    from tuf.api.serialization import DeserializationError
except ImportError as error:
    raise ServingFault(f"{error}: {install_hint('fleet')}") from None

MAIN = "targets"
"""TUF's name of the role that signs all but what it has given to others."""
ROLES_OF_KEYS: Mapping[str, Sequence[str]] = {
    "root": ("root",),
    MAIN: (MAIN,),
    "online": ("snapshot", "timestamp"),
}
_EXPIRES_DAYS = {"root": 2 * 365, "snapshot": 30, "timestamp": 30}
_TARGETS_EXPIRE_DAYS = 365
_DRAFT_NAME = "root.draft.json"


@contextlib.contextmanager
def locked(repository: Path) -> Iterator[None]:
    """Wait until no other process writes the repository, and keep others away. Raises ServingFault."""
    try:
        repository.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(repository, os.O_RDONLY)
    except OSError as error:
        raise ServingFault(f"'{repository}' cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class RepositoryMetadata:
    """The metadata in `folder`, which is made if it does not exist. Use it within `locked`."""

    def __init__(self, folder: Path, keys: SigningKeys) -> None:
        """Raises InvalidRequest for metadata that cannot be read or that others signed, and ServingFault."""
        self.folder = folder
        self._keys = keys
        self.is_new = not folder.exists()
        self.root_problem = ""
        """What `commit` lacks for the next root, "" if there is none."""
        self.online_problem = ""
        """Why `commit` could not sign what is newest for another publisher, "" if it did."""
        if self.is_new:
            self._create()
        self.root = self._read_root()
        self.timestamp: Timestamp = self._read("timestamp.json", Timestamp).signed
        self._snapshot: Snapshot = self._read(f"{self.timestamp.snapshot_meta.version}.snapshot.json", Snapshot).signed
        self.draft: Metadata[Root] | None = None
        """The next root, before it is signed by enough keys."""
        self._is_own_draft = False
        if (folder / _DRAFT_NAME).exists():
            self.draft = self._read(_DRAFT_NAME, Root)
            if self.draft.signed.version != self.root.version + 1:
                self.draft = None
        # The newest one that is named first: a file beside it may be from a thief of the key of targets alone.
        versions = [self._snapshot.meta[f"{MAIN}.json"].version, *sorted(self._versions(MAIN), reverse=True)]
        found = self._find_signed(MAIN, self.root, versions)
        if found is None:
            raise InvalidRequest(
                f"'{folder / f'{versions[0]}.{MAIN}.json'}' is not signed by the key of '{MAIN}' that root names: "
                "somebody has changed it; take the repository from a copy"
            )
        self.main: Targets = found

    # -- what is there ----------------------------------------------------------------------------------------------

    @property
    def root_file(self) -> Path:
        """The root metadata that boxes get with their installation."""
        return self.folder / f"{self.root.version}.root.json"

    @property
    def publishers(self) -> Mapping[str, DelegatedRole]:
        """The publishers besides the main one."""
        return (self.main.delegations.roles if self.main.delegations else None) or {}

    def publisher_of(self, model: str) -> str:
        """Return the name of the publisher whose patterns the model's name matches."""
        return next((name for name, role in self.publishers.items() if role.is_delegated_path(f"{model}/0")), MAIN)

    def targets_of(self, role: str) -> Targets | None:
        """Return the newest list that a publisher signed, None if there is none.

        Raises InvalidRequest if there is no such publisher.
        """
        if role == MAIN:
            return self.main
        if role not in self.publishers:
            listed = ", ".join(self.publishers) or "none besides the main one"
            raise InvalidRequest(f"the repository has no publisher '{role[:80]}'; there is {listed}")
        return self._find_signed(role, self.main, sorted(self._versions(role), reverse=True))

    def key_of(self, role: str) -> Any:
        return self.main.get_key(self.publishers[role].keyids[0])

    def missing_signatures(self) -> str:
        """Return the signatures that the draft of root lacks, as text; "" if it lacks none or there is no draft."""
        if self.draft is None:
            return ""
        draft = self.draft
        result = draft.signed.get_root_verification_result(self.root, draft.signed_bytes, draft.signatures)
        parts = (
            f"{part.missing} of {', '.join(map(name_of, part.unsigned.values()))}"
            for part in (result.first, result.second)
            if not part
        )
        return " and ".join(dict.fromkeys(parts))

    # -- changes ----------------------------------------------------------------------------------------------------

    def change_root(self, now: datetime) -> Root:
        """Return the next root, for changes; `commit` signs it. Raises InvalidRequest if a draft waits already.

        Changes never build on a draft that was on the disk: its keys may be those of an attacker.
        """
        if self.draft is not None:
            raise InvalidRequest(
                f"'{self.folder / _DRAFT_NAME}' waits for signatures, or for `edge-server publish`: complete it, or "
                "delete it"
            )
        self.draft = Metadata(Root.from_dict(copy.deepcopy(self.root.to_dict())))
        self.draft.signed.version += 1
        self.draft.signed.expires = _expiry("root", now)
        self._is_own_draft = True
        return self.draft.signed

    def sign_draft(self) -> dict[str, str]:
        """Sign the draft of root with each key that is here, and write it. Return name -> reason of the others."""
        assert self.draft is not None
        root = self.draft.signed
        key_ids = dict.fromkeys([*self.root.roles["root"].keyids, *root.roles["root"].keyids])
        unsigned = [key_id for key_id in key_ids if key_id not in self.draft.signatures]
        reasons = self._keys.sign(self.draft, {**self.root.keys, **root.keys}, unsigned)
        write_file(self.folder / _DRAFT_NAME, self.draft.to_bytes())
        return reasons

    def check_free(self, name: str, models: Sequence[str]) -> None:
        """Raise InvalidRequest if a publisher cannot have this name, or if somebody else signs such models."""
        if name in ROLES_OF_KEYS or name in _EXPIRES_DAYS or name in self.publishers:
            raise InvalidRequest(f"the repository has '{name}' already: choose another name, or remove it first")
        if len(self.publishers) >= MAX_PUBLISHERS:
            raise InvalidRequest(f"the repository has {MAX_PUBLISHERS} publishers, which are the most that it can have")
        for pattern in models:
            for other, role in self.publishers.items():
                theirs = patterns(role)
                if any(fnmatch.fnmatchcase(pattern, one) or fnmatch.fnmatchcase(one, pattern) for one in theirs):
                    raise InvalidRequest(f"'{pattern}' meets '{', '.join(theirs)}', which '{other}' signs")
        for model in {path.partition("/")[0] for path in self.main.targets}:
            if any(fnmatch.fnmatchcase(model, pattern) for pattern in models):
                raise InvalidRequest(
                    f"the main publisher has releases of '{model}': withdraw them, and remove it from the folder"
                )

    def add_publisher(self, name: str, key: Any, models: Sequence[str]) -> None:
        """Let a key sign releases of the models whose names match, after `check_free`."""
        if self.main.delegations is None:
            self.main.delegations = Delegations({}, {})
        assert self.main.delegations.roles is not None
        # Terminating: what matches is theirs alone.
        self.main.delegations.roles[name] = DelegatedRole(name, [], 1, True, [f"{pattern}/*" for pattern in models])
        self.main.add_key(key, name)

    def remove_publisher(self, name: str) -> None:
        assert self.main.delegations is not None
        assert self.main.delegations.roles is not None
        self.main.revoke_key(self.publishers[name].keyids[0], name)
        del self.main.delegations.roles[name]
        if not self.main.delegations.roles:
            self.main.delegations = None

    def commit(self, role: str, targets: Targets, now: datetime) -> None:
        """Sign and write `targets` of a publisher, and what is newest.

        Snapshot and timestamp are signed anew each time; root and targets in the second half of their validity or for
        another key; root only if its keys are here, else `root_problem` says what is missing. Raises InvalidRequest if
        another key is not here, ServingFault if files cannot be written.
        """
        root = self._complete_root(now) if role == MAIN else self.root
        delegator = root if role == MAIN else self.main
        named = self._snapshot.meta.get(f"{role}.json")
        before = self._find_signed(MAIN, root, [targets.version]) if role == MAIN else self.targets_of(role)
        is_old = targets.expires - now < timedelta(days=_TARGETS_EXPIRE_DAYS / 2)
        if before is None or is_old or before.to_dict() != targets.to_dict():
            version = 0 if before is None and role != MAIN else targets.version
            targets.version = max(version, named.version if named else 0) + 1
            self._sign(targets, role, delegator, now)
        if root is not self.root:
            # After the targets, which its key may have signed: until the next line they are just files.
            assert self.draft is not None
            write_file(self.folder / f"{root.version}.root.json", self.draft.to_bytes())
            (self.folder / _DRAFT_NAME).unlink(missing_ok=True)
            self.root, self.draft = root, None
        try:
            self._sign_newest(now)
        except InvalidRequest as error:
            if role == MAIN:
                raise
            self.online_problem = error.message

    def _sign_newest(self, now: datetime) -> None:
        self._snapshot.meta[f"{MAIN}.json"] = MetaFile(self.main.version)
        for name in self.publishers:
            found = self.targets_of(name)
            named = self._snapshot.meta.get(f"{name}.json")
            if found is not None and (named is None or found.version > named.version):
                self._snapshot.meta[f"{name}.json"] = MetaFile(found.version)
        # A publisher that was removed stays named: boxes refuse a snapshot that names less than the one before.
        self._snapshot.version += 1
        self._sign(self._snapshot, "snapshot", self.root, now)
        self.timestamp.snapshot_meta = MetaFile(self._snapshot.version)
        self.timestamp.version += 1
        self.timestamp.unrecognized_fields[PUBLISHED_KEY] = int(now.timestamp())
        self._sign(self.timestamp, "timestamp", self.root, now)

    def _complete_root(self, now: datetime) -> Root:
        """Return the next root if enough keys have signed it, else the present one.

        A draft that was on the disk gets no signatures: somebody must look at it first.
        """
        is_old = self.draft is None and self.root.expires - now < timedelta(days=_EXPIRES_DAYS["root"] / 2)
        if is_old:
            self.change_root(now)
        if self.draft is None:
            return self.root
        reasons = self.sign_draft() if self._is_own_draft else {}
        missing = self.missing_signatures()
        if not missing:
            return self.draft.signed
        if is_old and not self.draft.signatures:
            # Its keys may be in a safe: there is time.
            (self.folder / _DRAFT_NAME).unlink()
            self.draft = None
        self.root_problem = "; ".join([missing, *(f"{name}: {reason}" for name, reason in reasons.items())])
        return self.root

    # -- files ------------------------------------------------------------------------------------------------------

    def _create(self) -> None:
        keys = self._keys.make(list(ROLES_OF_KEYS))
        now = datetime.now(timezone.utc)
        root = Root(consistent_snapshot=True)
        for name, roles in ROLES_OF_KEYS.items():
            for role in roles:
                root.add_key(keys[name], role)
        timestamp = Timestamp()
        timestamp.unrecognized_fields[PUBLISHED_KEY] = int(now.timestamp())
        try:
            for signed in (root, Targets(), Snapshot(), timestamp):
                self._sign(signed, signed.type, root, now)
        except InvalidRequest:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._keys.delete_made()
            raise

    def _sign(self, signed: Any, role: str, delegator: Any, now: datetime) -> None:
        """Sign and write metadata. Raises InvalidRequest if keys are missing; then nothing is written."""
        signed.expires = _expiry(role, now)
        metadata: Metadata[Any] = Metadata(signed)
        name = "timestamp.json" if role == "timestamp" else f"{signed.version}.{role}.json"
        description = delegator.get_delegated_role(role)
        keys = {key_id: delegator.get_key(key_id) for key_id in description.keyids}
        missing = self._keys.sign(metadata, keys, keys)
        if len(metadata.signatures) < description.threshold:
            reasons = "; ".join(f"the key {key}: {reason}" for key, reason in missing.items())
            raise InvalidRequest(f"{name} cannot be signed: {reasons}")
        write_file(self.folder / name, metadata.to_bytes())

    def _read_root(self) -> Root:
        """Return the newest root, after a check that each one is signed by the keys of the one before."""
        root: Root = self._read("1.root.json", Root).signed
        for version in range(2, max(self._versions("root")) + 1):
            found = self._read(f"{version}.root.json", Root)
            if found.signed.version != version or not found.signed.get_root_verification_result(
                root, found.signed_bytes, found.signatures
            ):
                raise InvalidRequest(
                    f"'{self.folder / f'{version}.root.json'}' is not signed by the keys of the root before it: "
                    "somebody has put it there; take the repository from a copy"
                )
            root = found.signed
        return root

    def _find_signed(self, role: str, delegator: Any, versions: Sequence[int]) -> Targets | None:
        """Return the first of these versions that the key of the role signed."""
        for version in versions:
            name = f"{version}.{role}.json"
            if not (self.folder / name).exists():
                continue
            # Other publishers write here too: what is damaged is as good as absent.
            with contextlib.suppress(UnsignedMetadataError, InvalidRequest):
                metadata = self._read(name, Targets)
                delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
                if metadata.signed.version == version:
                    found: Targets = metadata.signed
                    return found
        return None

    def _versions(self, role: str) -> list[int]:
        pattern = re.compile(rf"([1-9][0-9]{{0,8}})\.{re.escape(role)}\.json")
        found = (pattern.fullmatch(path.name) for path in self.folder.iterdir())
        return [int(match[1]) for match in found if match is not None]

    def _read(self, name: str, kind: type[Any]) -> Metadata[Any]:
        path = self.folder / name
        try:
            found: Metadata[Any] = Metadata.from_bytes(path.read_bytes())
        except OSError as error:
            raise InvalidRequest(f"'{path}' cannot be read: {error.strerror}; is this a repository?") from None
        except (DeserializationError, RepositoryError) as error:
            raise InvalidRequest(f"'{path}' cannot be read: {error}") from None
        if not isinstance(found.signed, kind):
            raise InvalidRequest(f"'{path}' cannot be read: expected {kind.type}, given {found.signed.type}")
        return found


def patterns(role: DelegatedRole) -> list[str]:
    """Return the names of models that a publisher signs, as it was given: "detectors_*"."""
    return [path.removesuffix("/*") for path in role.paths or ()]


def _expiry(role: str, now: datetime) -> datetime:
    return now.replace(microsecond=0) + timedelta(days=_EXPIRES_DAYS.get(role, _TARGETS_EXPIRE_DAYS))


def write_file(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise ServingFault(f"'{path}' cannot be written: {error.strerror}") from None
