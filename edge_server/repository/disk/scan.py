"""Scanner of model repositories: lists every model directory and its versions, as one complete snapshot.

A model that is not in the snapshot was removed. A scan takes one directory walk; a config.pbtxt is opened only if it
changed, to read its version_policy.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import NamedTuple

from edge_server.core.model_spec import VersionPolicy
from edge_server.core.version_lifecycle import Member
from edge_server.errors import BadModelConfig, ServingFault
from edge_server.file_stamp import FileStamp, file_stamp
from edge_server.record import record
from edge_server.repository.disk.file_fingerprint import (
    FolderScan,
    LinkBoundary,
    children,
    is_folder,
    is_ignored,
    scan_files,
    scan_folder,
)
from edge_server.repository.load_error_explanation import describe_permission
from edge_server.repository.model_config.config_to_spec import builds_engine, members, version_policy
from edge_server.repository.model_config.pbtxt import ConfigMessage, new_config, parse_json, read_file

log = logging.getLogger(__name__)

_MAX_CONTENTS = 65_536
"""Fingerprints of which the change time is remembered, the latest ones: each rewritten file makes a new one."""

MAX_VERSION = 2**63 - 1

_MODEL_ENDINGS = (".onnx", ".plan", ".engine", ".pt", ".pt2", ".tflite", ".xml")
"""Suffixes of model files that users often put beside the model folders by mistake."""

_NAME = re.compile(r"[^\x00-\x20\x7f/\\?#%\ud800-\udfff]{1,255}")


@record(frozen=True, slots=True)
class VersionOnDisk:
    """One version directory. `fingerprint` covers the files in it; `files` is the full result of the scan.

    `content_mark`: "", or what tells the content from an earlier one with the same fingerprint.
    """

    number: int
    fingerprint: str
    files: FolderScan = field(default=FolderScan(), compare=False)
    content_mark: str = ""


@record(frozen=True, slots=True)
class ModelDirectory:
    """One model directory.

    `config_path` is the configuration file, None if there is none. `versions` are all version directories in
    ascending order; `desired_versions` are those that the version policy selects. `fingerprint` covers the files
    outside the version directories, and `files` is the full scan of them. A `problem` that is not empty says why the
    model cannot be served; `desired_versions` is then empty. `is_policy_unmet`: the problem is only that the policy
    selects no existing version. `policy` is None if the configuration could not be read. `members` are the models of
    an ensemble. `builds_engine`: see DesiredModel.
    """

    name: str
    path: Path
    config_path: Path | None = None
    versions: tuple[VersionOnDisk, ...] = ()
    desired_versions: tuple[int, ...] = ()
    fingerprint: str = ""
    problem: str = ""
    is_policy_unmet: bool = False
    policy: VersionPolicy | None = field(default=None, compare=False)
    members: tuple[Member, ...] = field(default=(), compare=False)
    builds_engine: bool = field(default=False, compare=False)
    files: FolderScan = field(default=FolderScan(), compare=False)

    @property
    def has_links(self) -> bool:
        """Whether a change outside the directory may change the model."""
        return self.files.has_links or any(version.files.has_links for version in self.versions)

    def is_same_scan(self, other: ModelDirectory) -> bool:
        """Return whether both say the same about the model and all its files, whenever the files were scanned."""
        return (
            self == other
            and (self.policy, self.members, self.builds_engine, self.files, self.has_links)
            == (other.policy, other.members, other.builds_engine, other.files, other.has_links)
            and all(one.files == two.files for one, two in zip(self.versions, other.versions, strict=True))
        )

    def fingerprint_of(self, version: int) -> str:
        """Return a text that changes with any file of this version. Raises KeyError for an unknown version."""
        return self.file_fingerprint_of(version) + self._version(version).content_mark

    def file_fingerprint_of(self, version: int) -> str:
        """Return the part of `fingerprint_of` that `file_fingerprint` alone tells. Raises KeyError."""
        return f"{self.fingerprint}.{self._version(version).fingerprint}"

    def changed_ns_of(self, version: int) -> int:
        """Return the latest change time of the version's files and those outside the versions. Raises KeyError."""
        return max(self.files.file_changed_ns, self._version(version).files.file_changed_ns)

    def _version(self, number: int) -> VersionOnDisk:
        for found in self.versions:
            if found.number == number:
                return found
        raise KeyError(number)


@record(frozen=True, slots=True)
class RepositorySnapshot:
    """All models of all repositories, by name. `warnings` are sentences about ignored directories.

    `absent` maps each root that cannot be read to the reason; its models are not in the snapshot.
    """

    models: dict[str, ModelDirectory] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    absent: Mapping[Path, str] = field(default_factory=dict)
    warnings_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The warnings about one model, by its name."""


def is_model_name(name: str) -> bool:
    """Return whether a name can stand in a URL path and as a directory: no spaces, slashes, '?', '#', '%', controls."""
    return _NAME.fullmatch(name) is not None and not name.startswith(".")


def parse_version(name: str) -> int | None:
    """Return the version number of a directory name; None for "01", "-1", "warmup" and the like."""
    if not name.isascii() or not name.isdigit() or (len(name) > 1 and name[0] == "0") or len(name) > 19:
        return None
    number = int(name)
    return number if number <= MAX_VERSION else None


def select_versions(policy: VersionPolicy, present: Iterable[int]) -> tuple[int, ...]:
    """Return the present versions that a policy selects, in ascending order."""
    versions = sorted(present)
    if policy.latest is not None:
        return tuple(versions[-policy.latest :]) if policy.latest > 0 else ()
    if policy.specific:
        return tuple(version for version in versions if version in policy.specific)
    return tuple(versions)


def with_config(model: ModelDirectory, config_json: str) -> ModelDirectory:
    """Return the model with the versions and members of another configuration. Raises BadModelConfig."""
    stated = _policy_of(parse_json(config_json, model.name))
    if not model.versions:
        return model
    model = replace(model, problem="", members=stated.members, builds_engine=stated.builds_engine)
    return _with_policy(model, stated.policy)


def with_versions(model: ModelDirectory, versions: Iterable[VersionOnDisk]) -> ModelDirectory:
    """Return the model as if it had only these versions."""
    ordered = tuple(sorted(versions, key=lambda version: version.number))
    chosen = replace(model, versions=ordered, desired_versions=(), is_policy_unmet=False)
    if not ordered:
        return replace(chosen, problem=_no_versions(model))
    if model.policy is None:
        return chosen
    return _with_policy(replace(chosen, problem=""), model.policy)


def _no_versions(model: ModelDirectory) -> str:
    """Return what a model's folder without versions holds, and what to do."""
    try:
        entries = read_entries(model.path)
    except OSError:
        entries = Entries((), (), ())
    folders = sorted(entry.name for entry in (*entries.misnamed, *entries.others) if is_folder(entry))
    number = next((int(found[1]) for name in folders if (found := re.fullmatch(r"\D{0,8}0*([1-9]\d{0,8})", name))), 1)
    advice = f"files of version {number} are expected in '{model.path / str(number)}'"
    files = [entry.name for entry in entries.others if entry.name.endswith(_MODEL_ENDINGS)]
    if model.name.isdecimal() and files:
        repository = model.path.parent
        return (
            f"'{model.path}' is a version of the model '{repository.name}': "
            f"the repository is the folder above, '{repository.parent}'"
        )
    if files:
        advice = f"move '{files[0]}' to '{model.path / '1' / 'model'}{Path(files[0]).suffix}'"
    elif folders:
        names = ", ".join(f"'{name}/'" for name in folders[:8])
        advice = f"it holds {names}, and {advice} (a number without leading zeros)"
    return f"model '{model.name}' has no version directories in '{model.path}': {advice}"


def _with_policy(model: ModelDirectory, policy: VersionPolicy) -> ModelDirectory:
    selected = select_versions(policy, [version.number for version in model.versions])
    if selected:
        return replace(model, desired_versions=selected)
    problem = f"model '{model.name}': none of the versions {list(policy.specific)} of version_policy is there"
    return replace(model, desired_versions=(), problem=problem, is_policy_unmet=True)


class Scanner:
    """Scans repository roots repeatedly. `config_name` N prefers `configs/N.pbtxt` to config.pbtxt.

    A model with a link to a file outside the repositories is not served, unless `allows_external_links`. Thread-safe.
    """

    def __init__(self, roots: Sequence[Path], config_name: str = "", *, allows_external_links: bool = False) -> None:
        self.roots = tuple({os.path.realpath(root): Path(root) for root in roots}.values())
        self._allows_external_links = allows_external_links
        self._config_names = (f"configs/{config_name}.pbtxt", "config.pbtxt") if config_name else ("config.pbtxt",)
        self._policies: dict[Path, tuple[FileStamp, _StatedPolicy | BadModelConfig]] = {}
        self.has_changed_content: Callable[[ModelDirectory, int, int], bool] | None = None
        """Asked about a version whose files have a new change time (ctime), as after chmod, but the same size, time and
        inode: whether their content differs from that of an earlier change time. None: such a change is not seen."""
        self._contents: dict[tuple[Path, int, str], tuple[int, str]] = {}
        """Model, version and fingerprint of its files -> their change time, and the mark of the content."""
        self._content_lock = threading.Lock()
        """Held while the content is asked for: the answer is right only once."""

    def scan(self) -> RepositorySnapshot:
        """Return all models. Raises ServingFault if a root cannot be read: a partial snapshot would unload models."""
        snapshot = self.scan_changed()
        for reason in snapshot.absent.values():
            raise ServingFault(reason)
        return snapshot

    def scan_changed(
        self, before: RepositorySnapshot | None = None, unchanged: Collection[str] = ()
    ) -> RepositorySnapshot:
        """Return all models, and the roots that cannot be read.

        Models named in `unchanged` are taken from `before`, an earlier snapshot, if they still exist. This saves the
        walk through their files. A model that is the same as before is the same object, so that nothing is made anew
        from it.
        """
        models: dict[str, ModelDirectory] = {}
        warnings: list[str] = []
        warnings_of: dict[str, tuple[str, ...]] = {}
        absent: dict[Path, str] = {}
        boundary = self._boundary()
        for root in self.roots:
            try:
                names, passed_over = _read_root(root)
            except ServingFault as error:
                absent[root] = error.message
                continue
            warnings += passed_over.values()
            for name in names:
                known = None if before is None else before.models.get(name)
                if before is not None and known is not None and name in unchanged:
                    models[name], warnings_of[name] = known, before.warnings_of.get(name, ())
                    continue
                path = root / name
                own: list[str] = []
                found = self._scan_model(path, boundary, own)
                warnings_of[name] = (*warnings_of.get(name, ()), *own)
                if found is None:
                    continue
                if known is not None and known.is_same_scan(found):
                    found = known
                first = models.get(name)
                models[name] = found if first is None else _duplicate(first, path)
        warnings += itertools.chain.from_iterable(warnings_of.values())
        if not unchanged:
            used = {model.config_path for model in models.values()}
            self._policies = {path: stated for path, stated in list(self._policies.items()) if path in used}
        return RepositorySnapshot(models, tuple(warnings), absent, warnings_of)

    def check_roots(self) -> None:
        """Raise ServingFault if a root cannot be read."""
        for root in self.roots:
            _read_root(root)

    def names(self) -> tuple[str, ...]:
        """Return the names of all model directories, without reading them. Absent roots are skipped."""
        found: set[str] = set()
        for root in self.roots:
            with contextlib.suppress(ServingFault):
                found.update(_read_root(root)[0])
        return tuple(sorted(found))

    def passed_over(self) -> dict[str, str]:
        """Return the files and folders of the repositories that cannot be a model: printable name -> reason."""
        found: dict[str, str] = {}
        for root in self.roots:
            with contextlib.suppress(ServingFault):
                found.update(_read_root(root)[1])
        return found

    def find(self, name: str) -> ModelDirectory | None:
        """Scan one model alone. Return None if no repository has it."""
        if not is_model_name(name):
            return None
        found: ModelDirectory | None = None
        boundary = self._boundary()
        for root in self.roots:
            path = root / name
            scanned = self._scan_model(path, boundary, []) if path.is_dir() else None
            if scanned is not None:
                found = scanned if found is None else _duplicate(found, path)
        return found

    def _boundary(self) -> LinkBoundary:
        # Created for each scan: a root may be a link whose target has changed.
        return LinkBoundary(None if self._allows_external_links else self.roots)

    def _scan_model(self, path: Path, boundary: LinkBoundary, warnings: list[str]) -> ModelDirectory | None:
        """Return one model, None if it is gone. Any failure becomes the problem of this model only."""
        try:
            return self._read_model(path, boundary, warnings)
        except Exception as error:
            log.debug("model '%s' cannot be read", path.name, exc_info=True)
            return ModelDirectory(
                path.name, path, problem=f"model '{path.name}' cannot be read: {type(error).__name__}: {error}"
            )

    def _read_model(self, path: Path, boundary: LinkBoundary, warnings: list[str]) -> ModelDirectory | None:
        model = ModelDirectory(path.name, path)
        outside_link = boundary.outside_link(str(path)) if path.is_symlink() else ""
        if outside_link:
            return replace(
                model, problem=_outside_link_problem(path.name, outside_link), files=FolderScan(activity=outside_link)
            )
        try:
            # Read before the files are scanned: a configuration that changes in between cannot be settled yet.
            stated, model = self._read_policy(model)
            model = _read_dir(model, boundary, warnings)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            place = Path(error.filename or path)
            return replace(model, problem=f"model '{path.name}': '{place}' {describe_permission(place, error)}")
        except OSError as error:
            reason = error.strerror or str(error)
            return replace(model, problem=f"model '{path.name}': '{error.filename or path}' cannot be read: {reason}")
        if path.is_symlink():
            model = replace(model, files=replace(model.files, has_links=True))
        scans = (model.files, *(version.files for version in model.versions))
        outside_link = next((found.outside_link for found in scans if found.outside_link), "")
        if outside_link:
            return replace(model, problem=_outside_link_problem(path.name, outside_link))
        if not model.versions:
            return replace(model, problem=_no_versions(model))
        if isinstance(stated, BadModelConfig):
            return replace(model, problem=stated.message)
        model = self._with_content_marks(model)
        policy = stated.policy
        present = {version.number for version in model.versions}
        if absent := [version for version in policy.specific if version not in present]:
            warnings.append(f"model '{model.name}': version_policy names versions {absent} that are not there")
        model = replace(model, policy=policy, members=stated.members, builds_engine=stated.builds_engine)
        return _with_policy(model, policy)

    def _with_content_marks(self, model: ModelDirectory) -> ModelDirectory:
        """Return the model with new marks at versions with other content under an old fingerprint: a program wrote a
        file and set the time that it had."""
        if self.has_changed_content is None:
            return model
        versions: list[VersionOnDisk] = []
        for version in model.versions:
            key = model.path, version.number, f"{model.fingerprint}.{version.fingerprint}"
            changed_ns = max(model.files.file_changed_ns, version.files.file_changed_ns)
            before_ns, mark = self._contents.setdefault(key, (changed_ns, ""))
            if changed_ns != before_ns:
                with self._content_lock:
                    # Another thread may have asked in the meantime.
                    before_ns, mark = self._contents.get(key, (before_ns, mark))
                    known = replace(model, versions=(replace(version, content_mark=mark),))
                    if changed_ns != before_ns and self.has_changed_content(known, version.number, before_ns):
                        mark = f"~{changed_ns}"
                    self._contents[key] = changed_ns, mark
            versions.append(replace(version, content_mark=mark) if mark else version)
        while len(self._contents) > _MAX_CONTENTS:
            self._contents.pop(next(iter(self._contents)), None)
        return replace(model, versions=tuple(versions))

    def _read_policy(self, model: ModelDirectory) -> tuple[_StatedPolicy | BadModelConfig, ModelDirectory]:
        """Return the policy and members from the model's configuration, and the model with the configuration's path.

        The file is read again only if it changed.
        """
        path = next((path for path in map(model.path.joinpath, self._config_names) if path.is_file()), None)
        if path is None:
            return _policy_of(new_config()), model
        model = replace(model, config_path=path)
        try:
            found = path.stat()
        except OSError as error:
            return BadModelConfig(f"model '{model.name}': '{path}' cannot be read: {error.strerror}"), model
        # Includes the change time (ctime): a change of mode or owner can make a file readable.
        stamp = file_stamp(found)
        known = self._policies.get(path)
        if known is None or known[0] != stamp:
            known = (stamp, _read_policy_file(path, model.name))
            self._policies[path] = known
        return known[1], model


class Entries(NamedTuple):
    """Entries of a model directory: version folders, folders with a bad version name, and everything else."""

    versions: tuple[tuple[int, os.DirEntry[str]], ...]
    misnamed: tuple[os.DirEntry[str], ...]
    others: tuple[os.DirEntry[str], ...]


def read_entries(path: Path) -> Entries:
    """Read a model directory. Raises OSError."""
    versions: list[tuple[int, os.DirEntry[str]]] = []
    misnamed: list[os.DirEntry[str]] = []
    others: list[os.DirEntry[str]] = []
    for entry in children(path):
        number = parse_version(entry.name) if is_folder(entry) else None
        if number is not None:
            versions.append((number, entry))
        else:
            (misnamed if entry.name.isdigit() and is_folder(entry) else others).append(entry)
    return Entries(tuple(sorted(versions, key=lambda item: item[0])), tuple(misnamed), tuple(others))


def _read_dir(model: ModelDirectory, boundary: LinkBoundary, warnings: list[str]) -> ModelDirectory:
    entries = read_entries(model.path)
    warnings += [f"'{it.path}' was skipped: a version is a number without leading zeros" for it in entries.misnamed]
    versions = tuple(found for number, entry in entries.versions for found in _version(number, entry, boundary))
    files = scan_files(model.path, entries.others, boundary)
    return replace(model, versions=versions, fingerprint=files.fingerprint, files=files)


def _version(number: int, entry: os.DirEntry[str], boundary: LinkBoundary) -> list[VersionOnDisk]:
    outside_link = boundary.outside_link(entry.path) if entry.is_symlink() else ""
    if outside_link:
        return [VersionOnDisk(number, "", FolderScan(activity=outside_link, outside_link=outside_link))]
    try:
        found = scan_folder(Path(entry.path), boundary)
    except FileNotFoundError:  # deleted after it was listed
        return []
    if entry.is_symlink():
        found = replace(found, has_links=True)
    return [VersionOnDisk(number, found.fingerprint, found)]


def _outside_link_problem(name: str, outside_link: str) -> str:
    return f"model '{name}': a link leads out of the repository: {outside_link}; --allow-external-links permits it"


class _StatedPolicy(NamedTuple):
    """Settings that are read from a configuration before a load."""

    policy: VersionPolicy
    members: tuple[Member, ...]
    builds_engine: bool


def _policy_of(config: ConfigMessage) -> _StatedPolicy:
    return _StatedPolicy(version_policy(config), members(config), builds_engine(config))


def _read_policy_file(path: Path, model: str) -> _StatedPolicy | BadModelConfig:
    try:
        return _policy_of(read_file(path, model))
    except BadModelConfig as error:
        return BadModelConfig(error.message)


def _read_root(root: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of the model directories of a root in order, and the ignored entries (printable name -> reason).

    Raises ServingFault if the root cannot be read.
    """
    try:
        with os.scandir(root) as entries:
            found = [(entry.name, is_folder(entry)) for entry in entries if not is_ignored(entry.name)]
    except OSError as error:
        raise ServingFault(f"model repository '{root}' cannot be read: {error.strerror}") from error
    folders = sorted(name for name, is_dir in found if is_dir)
    passed_over = {
        _printable(name): f"{os.path.join(root, name)!r} was skipped: its name does not fit a URL "
        "(no spaces, none of \\ ? # %)"
        for name in folders
        if not is_model_name(name)
    }
    for name, is_dir in sorted(found):
        if not is_dir and name.endswith(_MODEL_ENDINGS):
            file, place = os.path.join(root, name), Path(root, Path(name).stem, "1", f"model{Path(name).suffix}")
            passed_over[_printable(name)] = f"{file!r} was skipped: a model is a folder, move it to {str(place)!r}"
    return [name for name in folders if is_model_name(name)], passed_over


def _printable(name: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def _duplicate(first: ModelDirectory, second: Path) -> ModelDirectory:
    problem = f"model '{first.name}' is in more than one repository: '{first.path}' and '{second}'"
    return ModelDirectory(first.name, first.path, problem=problem)
