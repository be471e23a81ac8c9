"""Reader of the files of a signed repository: over HTTPS or HTTP, or from a folder (`file:`), with resume and a limit
of its rate. What it reads is not trusted; TUF and SHA-256 check it."""

from __future__ import annotations

import contextlib
import http
import math
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator
from pathlib import Path

from edge_server.bounded_http import BoundedResponse, HttpClient
from edge_server.cli import http_client
from edge_server.config.setting import shown_url
from edge_server.errors import EdgeServerError, InvalidRequest, ServingFault
from edge_server.repository.disk.free_space import check_space

CHUNK_BYTES = 1 << 16
_MAX_URL_CHARS = 2000


class SiteUnavailable(ServingFault):
    """The site cannot be reached, or does not have a file now."""


class DownloadPaused(SiteUnavailable):
    """The time for downloads is over. The next download of the file goes on."""


class WrongBytes(EdgeServerError):
    """A file has other bytes than those that were signed."""


class SiteFiles:
    """Files below one address. `stop` ends a transfer of another thread."""

    def __init__(self, url: str, max_bytes_per_s: float, timeout_s: float) -> None:
        """`max_bytes_per_s` 0: no limit. `timeout_s`: see BoundedResponse. Raises InvalidRequest for an address that
        is none."""
        self.url = url.rstrip("/") + "/"
        self._rate = max_bytes_per_s
        self._timeout_s = timeout_s
        self._end_s = math.inf
        self._has_ranges = False
        """Whether the last answer can be resumed."""
        self._stopping = threading.Event()
        _check_url(self.url)
        # What is signed may come over HTTP and from where the site redirects to, but never from files of this machine.
        self._client = HttpClient(lambda url, next_url: True)

    def stop(self) -> None:
        self._stopping.set()

    def limit_downloads(self, seconds: float) -> None:
        """Pause downloads after this time from now, where the site has ranges."""
        self._end_s = time.monotonic() + seconds

    def read(self, name: str, start: int = 0) -> Generator[bytes, None, None]:
        """Yield the bytes of a file, from `start` on if the site can, else from 0. `name`: quoted, as in a URL.

        The first item says where the bytes begin, as a decimal number. Raises SiteUnavailable, and FileNotFoundError if
        the site says that there is no such file.
        """
        url = self.url + name
        if self.url.startswith("file:"):
            yield from self._read_file(url, start)
            return
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            response = self._client.open(url, None, headers, timeout_s=self._timeout_s)
        except http_client.NO_ANSWER as error:
            raise SiteUnavailable(f"'{url}' cannot be read: {http_client.describe_failure(error)}") from None
        with response:
            if response.status == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                yield from self.read(name)
                return
            if not response.is_success:
                is_missing = response.status in (403, 404, 410)
                raise (FileNotFoundError if is_missing else SiteUnavailable)(
                    f"'{url}': the server answers {response.status} {response.reason}"
                )
            yield str(self._begin(response, start)).encode()
            yield from self._chunks(response.read1, url)

    def _read_file(self, url: str, start: int) -> Generator[bytes, None, None]:
        self._has_ranges = True
        try:
            with open(urllib.parse.unquote(urllib.parse.urlsplit(url).path), "rb") as file:
                file.seek(start)
                yield str(start).encode()
                yield from self._chunks(file.read, url)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"'{url}' does not exist") from None
        except OSError as error:
            raise SiteUnavailable(f"'{url}' cannot be read: {http_client.describe_failure(error)}") from None

    def _begin(self, response: BoundedResponse, start: int) -> int:
        is_part = response.status == http.HTTPStatus.PARTIAL_CONTENT
        self._has_ranges = is_part or response.headers.get("Accept-Ranges", "") == "bytes"
        given = response.headers.get("Content-Range", "") if is_part else ""
        return start if given.startswith(f"bytes {start}-") else 0

    def _chunks(self, read: Callable[[int], bytes], url: str) -> Generator[bytes, None, None]:
        begin_s, count = time.monotonic(), 0
        while True:
            if self._rate and self._stopping.wait(max(0.0, begin_s + count / self._rate - time.monotonic())):
                raise SiteUnavailable(f"'{url}': stopped")
            if self._stopping.is_set():
                raise SiteUnavailable(f"'{url}': stopped")
            try:
                # read1: a chunk as it comes, so that a slow site does not delay `stop` for long.
                chunk = read(CHUNK_BYTES)
            except http_client.NO_ANSWER as error:
                raise SiteUnavailable(f"'{url}': the connection broke: {http_client.describe_failure(error)}") from None
            if not chunk:
                return
            count += len(chunk)
            yield chunk

    def download(self, name: str, part: Path, size: int) -> None:
        """Complete the file `part` of `size` bytes, which may hold the beginning from an earlier attempt.

        Raises SiteUnavailable if the transfer broke; then `part` keeps what came. Raises FileNotFoundError, DiskFull,
        WrongBytes if the file has another size, and OSError.
        """
        kept = part.stat().st_size if part.exists() else 0
        if kept > size:
            part.unlink()
            kept = 0
        if kept == size:
            return
        check_space(part.parent, size - kept, f"'{self.url}{name}'")
        chunks = self.read(name, kept)
        with contextlib.closing(chunks), part.open("r+b" if kept else "wb") as output:
            output.seek(int(next(chunks)))
            output.truncate()
            for chunk in chunks:
                if output.tell() + len(chunk) > size:
                    part.unlink()
                    raise WrongBytes(f"'{self.url}{name}' has more than the {size} bytes that were signed")
                # Others write to the disk too.
                check_space(part.parent, len(chunk), f"'{self.url}{name}'")
                output.write(chunk)
                if output.tell() < size and self._has_ranges and time.monotonic() >= self._end_s:
                    raise DownloadPaused(f"'{self.url}{name}': {output.tell()} of {size} bytes came until now")
            if output.tell() < size:
                raise SiteUnavailable(f"'{self.url}{name}': {output.tell()} of {size} bytes came")


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        # A user would become part of the name that is looked up, which tells the password to name servers.
        is_host = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        is_url = is_host if parts.scheme in ("http", "https") else (
            parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
        )  # fmt: skip
    except ValueError:
        is_url = False
    if not is_url or not url.isascii() or not url.isprintable() or " " in url or len(url) > _MAX_URL_CHARS:
        raise InvalidRequest(
            f"expected the address of a signed repository, https://HOST/PATH, http://HOST/PATH or file:///PATH, given "
            f"'{shown_url(url)[:200]}'"
        )
