"""Client of object stores (S3, Google Cloud Storage, Azure and others that fsspec knows): lists and reads a repository.
The only file that uses fsspec; its errors end here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edge_server.errors import ServingFault, install_hint
from edge_server.plugins.remote.address import PACKAGES, RemoteAddress

_Result = TypeVar("_Result")

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 30
_STAMPS = ("ETag", "etag", "generation", "md5Hash", "content_settings", "LastModified", "last_modified", "mtime")
"""Keys of fsspec's file descriptions that change with the file: content keys before time keys."""


class RemoteUnavailable(ServingFault):
    """The store cannot be reached, refuses access, or sends invalid data. A retry may help."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file in the store. `path` is relative to the repository. `stamp` changes with the content."""

    path: str
    size: int
    stamp: str


@dataclass(frozen=True, slots=True)
class ObjectListing:
    """All files and folders below an address, including empty folders if the store knows them."""

    files: tuple[RemoteFile, ...] = ()
    folders: frozenset[str] = field(default_factory=frozenset)


class ObjectStore:
    """One remote repository, read only. Used by one thread at a time."""

    def __init__(self, address: RemoteAddress) -> None:
        """Import the library for the address, without a connection. Raises ServingFault with the pip command."""
        self._url = address.url
        try:
            import fsspec

            self._fs: Any = fsspec.filesystem(address.protocol, **_options(address))
        except ImportError as error:
            package = PACKAGES.get(address.protocol, "fsspec")
            advice = install_hint("remote") if package in ("s3fs", "fsspec") else f"pip install {package}"
            raise ServingFault(f"model repository '{address.url}' needs {package} ({error}); {advice}") from error
        except Exception as error:  # each library has its own errors for bad settings
            raise ServingFault(f"model repository '{address.url}': {_describe_error(error)}") from error
        if hasattr(self._fs, "retries"):
            # The caller retries from the received part; retries of the library would only delay that.
            self._fs.retries = 1
        self._root = str(self._fs._strip_protocol(address.path)).rstrip("/")

    def list(self) -> ObjectListing:
        """Return the complete listing. Raises RemoteUnavailable; a partial listing is never returned."""
        found = self._call_store("it cannot be listed", self._find)
        files = []
        folders = set()
        for key, info in found.items():
            if not key.startswith(f"{self._root}/"):
                continue
            path = key.removeprefix(f"{self._root}/")
            if info.get("type") == "directory" or path.endswith("/"):
                folders.add(path.rstrip("/"))
            else:
                files.append(self._file(path, info))
        return ObjectListing(tuple(files), frozenset(folders))

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Return all bytes of a range. Raises RemoteUnavailable."""
        key = f"{self._root}/{file.path}"
        content = self._call_store(
            f"'{file.path}' cannot be read", lambda: self._fs.cat_file(key, start=start, end=end)
        )
        if len(content) != end - start:
            raise RemoteUnavailable(
                f"model repository '{self._url}': '{file.path}': expected {end - start} bytes, given {len(content)}"
            )
        return bytes(content)

    def _find(self) -> Mapping[str, Any]:
        self._fs.invalidate_cache()
        found: Mapping[str, Any] = self._fs.find(self._root, detail=True, withdirs=True)
        if not found and not self._fs.exists(self._root.partition("/")[0] or self._root):
            raise FileNotFoundError(f"'{self._root}' does not exist")
        return found

    def _file(self, path: str, info: Mapping[str, Any]) -> RemoteFile:
        stamp = next((f"{key}={info[key]}" for key in _STAMPS if info.get(key)), "")
        size = info.get("size")
        if not isinstance(size, int) or size < 0:
            raise RemoteUnavailable(f"model repository '{self._url}': '{path}' is listed without its size")
        return RemoteFile(path, size, stamp)

    def _call_store(self, what: str, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except Exception as error:  # the libraries below have no common error type
            raise RemoteUnavailable(f"model repository '{self._url}': {what}: {_describe_error(error)}") from error


def _options(address: RemoteAddress) -> dict[str, object]:
    """Return the options of the fsspec file system. Credentials and regions come from the environment."""
    options: dict[str, object] = {**address.options, "use_listings_cache": False, "skip_instance_cache": True}
    if address.protocol == "s3":
        options["config_kwargs"] = {
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "read_timeout": _READ_TIMEOUT_S,
            "retries": {"total_max_attempts": 2},
        }
    return options


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
