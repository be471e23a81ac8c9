"""Parser of a remote repository's address: turns Triton's spelling into the protocol, path and options of fsspec."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_server.errors import InvalidRequest

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_ENDPOINT = re.compile(r"(?:(https?)://)?([A-Za-z0-9.-]+:[0-9]{1,5})/(.*)", re.DOTALL)

SCHEMES = ("s3", "gs", "as", "file", "oci")

PACKAGES: Mapping[str, str] = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}
"""fsspec protocol -> Python package that implements it."""


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """Address of a remote repository. `url` as the operator wrote it. `protocol`, `path` and `options` are fsspec's."""

    url: str
    protocol: str
    path: str
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def folder_name(self) -> str:
        """Readable folder name for the copy, different for every address."""
        readable = re.sub(r"[^A-Za-z0-9]+", "-", self.url).strip("-")[:60]
        return f"{readable}-{hashlib.blake2b(self.url.encode(), digest_size=6).hexdigest()}"


def is_remote(path: str) -> bool:
    """Return whether a repository is given by an address of SCHEMES, and not by a path or by an address of others."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in SCHEMES


def parse_address(url: str) -> RemoteAddress:
    """Read `s3://bucket/prefix`, `s3://[https://]host:port/bucket/prefix`, `gs://bucket/prefix`,
    `as://account/container/prefix`, `file:///folder` or `oci://host/repository:tag`, of which fsspec knows nothing.

    Raises InvalidRequest for another scheme, no bucket, or credentials in the address, which would show in logs.
    """
    found = _URL.fullmatch(url)
    if found is None or found[1] not in SCHEMES:
        raise InvalidRequest(f"model repository '{url}': expected one of {', '.join(s + '://' for s in SCHEMES)}")
    scheme, rest = found.groups()
    if scheme == "oci":
        return RemoteAddress(url, scheme, rest)
    if "@" in rest:
        shown = f"{scheme}://..."
        raise InvalidRequest(f"model repository '{shown}': credentials belong in the environment, not here")
    path = rest.rstrip("/")
    if not path:
        raise InvalidRequest(f"model repository '{url}': expected the name of a bucket or folder after the scheme")
    if scheme == "s3":
        return _s3(url, path)
    if scheme == "as":
        return _azure(url, path)
    if scheme == "file" and not path.startswith("/"):
        raise InvalidRequest(f"model repository '{url}': expected an absolute path, as in file:///models")
    return RemoteAddress(url, scheme, path)


def _s3(url: str, path: str) -> RemoteAddress:
    endpoint = _ENDPOINT.fullmatch(path)
    if endpoint is None:
        if "://" in path or ":" in path.partition("/")[0]:
            raise InvalidRequest(f"model repository '{url}': expected s3://[https://]host:port/bucket/prefix")
        return RemoteAddress(url, "s3", path)
    scheme, host, inner = endpoint.groups()
    if not inner:
        raise InvalidRequest(f"model repository '{url}': expected a bucket after the host")
    return RemoteAddress(url, "s3", inner, {"endpoint_url": f"{scheme or 'http'}://{host}"})


def _azure(url: str, path: str) -> RemoteAddress:
    account, slash, inner = path.partition("/")
    if not slash or not inner:
        raise InvalidRequest(f"model repository '{url}': expected as://account/container/prefix")
    return RemoteAddress(url, "abfs", inner, {"account_name": account})
