"""Client that fetches the pictures of a chat that are URLs, from the hosts that the model's configuration allows."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Collection, Sequence
from urllib.parse import urljoin, urlsplit

from edge_server.bounded_http import HttpClient
from edge_server.errors import InvalidRequest, LoadError
from edge_server.plugins.language.engines.pictures import MAX_BYTES, MAX_PICTURES

HOSTS = "image_hosts"
"""Parameter of a model: hosts from which the server fetches pictures, with a port where it is not the scheme's."""

_HOST = re.compile(r"(?:[a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
_MAX_HOSTS = 64
_MAX_REDIRECTS = 3
_MAX_URL = 2048
"""Characters of the URL in a redirect."""
_TIMEOUT_S = 10.0
"""For all pictures of a call."""
_PORTS = {"http": 80, "https": 443}


def read_hosts(model: str, text: str) -> frozenset[str]:
    """Return the hosts of the parameter `image_hosts`, which are separated by commas. Raises LoadError."""
    hosts = [host.strip().lower() for host in text.split(",") if host.strip()]
    wrong = next((host for host in hosts if not _HOST.fullmatch(host)), None)
    if wrong is not None or len(hosts) > _MAX_HOSTS:
        given = f"{len(hosts)} hosts" if wrong is None else f"'{wrong[:80]}'"
        raise LoadError(
            f"model '{model}': parameter {HOSTS}: expected up to {_MAX_HOSTS} hosts such as nvr.local,10.0.0.5:5000, "
            f"got {given}"
        )
    return frozenset(hosts)


def fetch_pictures(images: Sequence[bytes | str], hosts: Collection[str]) -> tuple[bytes, ...]:
    """Return the files, those that are URLs fetched from `hosts`. Blocks. Raises InvalidRequest."""
    if len(images) > MAX_PICTURES:
        raise InvalidRequest(f"expected at most {MAX_PICTURES} pictures, got {len(images)}")
    left, end_s = MAX_BYTES, time.monotonic() + _TIMEOUT_S
    files = []
    for image in images:
        files.append(_fetch(image, hosts, left, end_s) if isinstance(image, str) else image)
        left -= len(files[-1])
    return tuple(files)


def _fetch(url: str, hosts: Collection[str], max_bytes: int, end_s: float) -> bytes:
    """Return the file. `end_s`: time of the monotonic clock at which it must be there."""
    first = url
    client = HttpClient(uses_proxy=False)
    for _ in range(_MAX_REDIRECTS + 1):
        _check_url(url, hosts)
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise InvalidRequest(f"the picture {_shown(first)} cannot be fetched: the pictures took {_TIMEOUT_S:g} s")
        try:
            # Half of it to connect, and half for the head.
            with client.open(url, None, {"User-Agent": "edge-server"}, timeout_s=left_s / 2) as response:
                location = response.headers.get("Location")
                if response.status in (301, 302, 303, 307, 308) and location:
                    url = urljoin(url, location[:_MAX_URL])
                    continue
                response.set_deadline(max(end_s - time.monotonic(), 0.0))
                data = response.read(max_bytes + 1) if response.status == 200 else b""
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InvalidRequest(f"the picture {_shown(first)} cannot be fetched: {error}") from None
        if response.status != 200:
            raise InvalidRequest(f"the picture {_shown(first)} cannot be fetched: status {response.status}")
        if len(data) > max_bytes:
            raise InvalidRequest(
                f"the picture {_shown(first)} cannot be fetched: expected files of at most {MAX_BYTES >> 20} MiB "
                "together"
            )
        return data
    raise InvalidRequest(f"the picture {_shown(first)} cannot be fetched: more than {_MAX_REDIRECTS} redirects")


def _check_url(url: str, hosts: Collection[str]) -> None:
    """Raise InvalidRequest unless the URL is sound, and its host one of `hosts`."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
        host = parts.hostname or ""
        is_sound = "@" not in parts.netloc and all("!" <= character <= "~" for character in url)
    except (ValueError, KeyError):
        is_sound = False
    if not is_sound:
        raise InvalidRequest(f"the picture {_shown(url)} cannot be fetched: expected a URL of http or https")
    shown = f"[{host}]" if ":" in host else host
    if f"{shown}:{port}" not in hosts and (shown not in hosts or port != _PORTS[parts.scheme]):
        raise InvalidRequest(
            f"the picture {_shown(url)} cannot be fetched: the host '{shown}:{port}' is not in the model's parameter "
            f"{HOSTS}; send the picture itself, as a data: URL"
        )


def _shown(url: str) -> str:
    return repr(url[:100])
