"""Client of a signed repository: reads its releases and their files, and trusts nothing that TUF does not vouch for.

Source of the rules: The Update Framework, specification 1.0; `tuf` is its reference implementation. It protects against
other files, old ones (rollback), ones that are held back (expiry) and mixed ones.
"""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from edge_server.errors import EdgeServerError, InvalidRequest, ServingFault, Untrusted, install_hint
from edge_server.plugins.fleet.follow.site_files import SiteFiles, SiteUnavailable, WrongBytes
from edge_server.plugins.fleet.release import (
    MAX_LIST_BYTES,
    MAX_PUBLISHERS,
    PUBLISHED_KEY,
    SHA256,
    Release,
    read_files,
    read_release,
)

try:
    # Used by tuf: without it signatures by keys of P-256 count as wrong ones.
    import cryptography  # noqa: F401
    from tuf.api.exceptions import DownloadError, DownloadHTTPError, LengthOrHashMismatchError, RepositoryError
    from tuf.api.metadata import DelegatedRole, Metadata, Snapshot, TargetFile, Targets, Timestamp
    from tuf.ngclient import Updater
    from tuf.ngclient.fetcher import FetcherInterface
except ImportError as error:
    raise ServingFault(f"{error}: {install_hint('fleet')}") from None

_MAX_CLOCK_ERROR_S = 300
_MAX_LISTED = 20_000
"""Files in the list of a publisher besides the main one; each is looked up."""
_PUBLISHER = re.compile("[A-Za-z0-9_-]{1,50}")


class ClockBehind(ServingFault):
    """The machine's clock is before the time at which the newest metadata on this box was signed."""


class _Fetcher(FetcherInterface):
    """Reads metadata for tuf, whose errors it raises."""

    def __init__(self, site: SiteFiles) -> None:
        self._site = site

    def _fetch(self, url: str) -> Iterator[bytes]:
        chunks = self._site.read(url.removeprefix(self._site.url))
        try:
            next(chunks)
            yield from chunks
        except FileNotFoundError as error:
            raise DownloadHTTPError(str(error), 404) from None
        except SiteUnavailable as error:
            raise DownloadError(error.message) from None


class SignedRepository:
    """The repository at an address, as of the last `refresh`. One thread uses it; `stop` may be called from others.

    `folder` keeps the metadata that this box trusts. `root` is the root metadata that came with the installation.
    `unreadable` says for each publisher whose list cannot be read why; what came from it is neither new nor gone.
    """

    def __init__(self, site: SiteFiles, folder: Path, root: bytes) -> None:
        """Raises Untrusted if `root` is not root metadata."""
        self._site = site
        self._folder = folder
        self._root = root
        self._updater: Updater | None = None
        self._publishers: dict[str, DelegatedRole] = {}
        self.unreadable: dict[str, str] = {}
        try:
            Metadata.from_bytes(root)
        except RepositoryError as error:
            raise Untrusted(f"the root metadata cannot be read: {error}") from None

    def stop(self) -> None:
        self._site.stop()

    def limit_downloads(self, seconds: float) -> None:
        """See SiteFiles."""
        self._site.limit_downloads(seconds)

    def update(self) -> None:
        """Fetch the newest metadata of the main publisher.

        Raises SiteUnavailable if the site cannot be read, Untrusted if it does not give valid metadata that are newer
        than those here and have not expired, ClockBehind if this machine's clock cannot judge that, OSError if the disk
        cannot be written.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # One object for each refresh: it reads the site once. The trusted root of an earlier refresh is in the
            # folder; `bootstrap` is what that chain begins with.
            self._updater = Updater(
                str(self._folder), f"{self._site.url}metadata/", fetcher=_Fetcher(self._site), bootstrap=self._root
            )
            self._updater.refresh()
        except DownloadError as error:
            # With such a clock, certificates of TLS seem not to be valid yet.
            self._check_clock()
            raise SiteUnavailable(str(error)) from None
        except RepositoryError as error:
            raise Untrusted(f"'{self._site.url}' is not trusted: {error}") from None
        # Not before: a thief of the key of the timestamp could name a day in the future, and only newer metadata, with
        # another key, end that.
        self._check_clock()

    def refresh(self) -> list[Release]:
        """Fetch the newest metadata, and return the releases of all publishers.

        Raises as `update`, and InvalidRequest for a release that cannot be understood.
        """
        self.update()
        main = self._trusted("targets", Targets)
        self._publishers = (main.delegations.roles if main.delegations is not None else None) or {}
        if len(self._publishers) > MAX_PUBLISHERS:
            raise Untrusted(f"'{self._site.url}' has {len(self._publishers)} publishers, more than {MAX_PUBLISHERS}")
        found = _releases_in(main)
        self.unreadable = {}
        signed = self._trusted("snapshot", Snapshot).meta
        for name in self._publishers:
            if f"{name}.json" in signed:
                try:
                    found += self._releases_of(name)
                except EdgeServerError as error:
                    self.unreadable[name] = f"the list of the publisher '{name[:80]}' cannot be used: {error.message}"
        return found

    def publisher_of(self, model: str) -> str:
        """Return the publisher whose patterns a model's name matches, "" for the main one."""
        found = (name for name, role in self._publishers.items() if role.is_delegated_path(f"{model}/0"))
        return next(found, "")

    def _releases_of(self, name: str) -> list[Release]:
        """Return the releases that a publisher has signed for models of its patterns. Raises EdgeServerError."""
        if _PUBLISHER.fullmatch(name) is None:
            raise Untrusted("expected a name of letters, digits, - and _")
        role = self._publishers[name]
        # A path that only matches the pattern has tuf read and verify the publisher's list.
        for pattern in role.paths or ():
            self._look_up(pattern.replace("*", "0").replace("?", "0"))
        try:
            listed = self._trusted(name, Targets)
        except (OSError, RepositoryError) as error:
            raise Untrusted(str(error)) from None
        if listed.delegations is not None:
            raise Untrusted("it names further publishers, which only the main one may do")
        if len(listed.targets) > _MAX_LISTED:
            raise Untrusted(f"it has {len(listed.targets)} files, more than {_MAX_LISTED}")
        # The file may be an earlier one, and names what it likes: tuf says for each release whether it is theirs.
        return [
            release
            for release in _releases_in(listed)
            if role.is_delegated_path(release.path) and self._look_up(release.path) == listed.targets[release.path]
        ]

    def digest(self, release: Release) -> str:
        """Return the SHA-256 of the release's list of files, which identifies what it installs."""
        return self.find_target(release.path).hashes["sha256"]

    def files(self, release: Release, parts: Path) -> dict[str, str]:
        """Return path in the model's folder -> SHA-256. Raises as `fetch`, and InvalidRequest."""
        target = self.find_target(release.path)
        if target.length > MAX_LIST_BYTES:
            raise InvalidRequest(f"release '{release.path}': its list of files has {target.length} bytes")
        return read_files(release.path, self.download(target, parts).read_bytes())

    def missing_bytes(self, release: Release, digests: Iterable[str], parts: Path) -> int:
        """Return how many bytes of these files of a release are not in `parts`."""
        missing = 0
        for digest in digests:
            if not (parts / digest).exists():
                part = _part_of(parts, digest)
                missing += self.find_target(f"{release.model}/{digest}").length
                missing -= part.stat().st_size if part.exists() else 0
        return max(0, missing)

    def fetch(self, release: Release, digests: Iterable[str], parts: Path) -> None:
        """Download files of a release into the folder `parts`, as SHA-256; those that are there are not downloaded.

        Raises SiteUnavailable if the site breaks off, which the next call resumes; WrongBytes for other bytes than
        those that were signed; DiskFull; OSError.
        """
        for digest in sorted(digests):
            self.download(self.find_target(f"{release.model}/{digest}"), parts)

    def find_target(self, path: str) -> TargetFile:
        target = self._look_up(path)
        # Hex digits alone: it becomes the name of a file, and another publisher has written it.
        if target is None or SHA256.fullmatch(target.hashes.get("sha256", "")) is None:
            raise Untrusted(f"'{path}' is not in the signed list of files, or has no SHA-256 there")
        return target

    def _look_up(self, path: str) -> TargetFile | None:
        assert self._updater is not None
        try:
            return self._updater.get_targetinfo(path)
        except DownloadError as error:
            raise SiteUnavailable(str(error)) from None
        except RepositoryError as error:
            raise Untrusted(f"'{path}' is not trusted: {error}") from None

    def download(self, target: TargetFile, parts: Path) -> Path:
        digest = target.hashes["sha256"]
        folder, slash, name = target.path.rpartition("/")
        part, whole = _part_of(parts, digest), parts / digest
        if whole.exists():
            return whole
        try:
            self._site.download(urllib.parse.quote(f"targets/{folder}{slash}{digest}.{name}"), part, target.length)
        except FileNotFoundError as error:
            raise SiteUnavailable(str(error)) from None
        file: IO[bytes]
        try:
            with part.open("rb") as file:
                target.verify_length_and_hashes(file)
        except LengthOrHashMismatchError:
            part.unlink()
            raise WrongBytes(
                f"'{target.path}' has other bytes than those that were signed; they were deleted"
            ) from None
        part.rename(whole)
        return whole

    def _check_clock(self) -> None:
        """Raise ClockBehind if the clock is before the newest time of signing that this box has seen.

        A box without a battery for its clock starts in the past, where nothing seems to have expired.
        """
        try:
            timestamp = self._trusted("timestamp", Timestamp)
        except (OSError, RepositoryError):
            # Not there yet, or damaged: then tuf fetches it again.
            return
        published = timestamp.unrecognized_fields.get(PUBLISHED_KEY, 0)
        if isinstance(published, int) and time.time() + _MAX_CLOCK_ERROR_S < published:
            behind = time.strftime("%Y-%m-%d %H:%M", time.gmtime(published))
            raise ClockBehind(f"the clock is wrong: it is before {behind} UTC, when the newest metadata were signed")

    def _trusted(self, role: str, kind: type[Any]) -> Any:
        """Return metadata of the folder, which only verified ones come into."""
        found: Metadata[Any] = Metadata.from_bytes((self._folder / f"{role}.json").read_bytes())
        assert isinstance(found.signed, kind)
        return found.signed


def _releases_in(targets: Targets) -> list[Release]:
    listed = targets.targets.items()
    found = (read_release(path, target.unrecognized_fields.get("custom")) for path, target in listed)
    return [release for release in found if release is not None]


def _part_of(parts: Path, digest: str) -> Path:
    """Return where a file is until it is complete."""
    return parts / f"{digest}.part"
