"""HTTP client of downloads: files that resume after an interruption, with their SHA-256 verified. Keys are sent only to
the host that was named, and a redirect never leaves https."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import re
import ssl
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path

from edge_server.bounded_http import BoundedResponse, HttpClient, same_site
from edge_server.cli import http_client
from edge_server.cli.console import Progress, clean
from edge_server.config.setting import shown_url
from edge_server.plugins.remote.pull.archive import PullFailed
from edge_server.repository.disk.free_space import check_space

_CHUNK_BYTES = 1 << 20


class Interrupted(PullFailed):
    """The pull failed in the transfer. The downloaded bytes are kept."""


class UnexpectedStatus(Interrupted):
    """The server answered with an error. `status` is the HTTP status, `challenges` are its WWW-Authenticate headers.

    `is_from_named_host`: no redirect to another scheme, host or port came before.
    """

    def __init__(self, message: str, status: int, challenges: list[str], *, is_from_named_host: bool) -> None:
        super().__init__(message)
        self.status = status
        self.challenges = challenges
        self.is_from_named_host = is_from_named_host


class DownloadClient:
    """Client for one named URL and what it redirects to. Used by one thread at a time."""

    def __init__(
        self,
        named_url: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        timeout_s: float,
        *,
        is_command: bool = True,
    ) -> None:
        """`headers` are sent to the scheme, host and port of `named_url` alone. `timeout_s`: see BoundedResponse.

        A command shows redirects, and the progress on its terminal.
        """
        self.headers = dict(headers)
        self._named_url = named_url
        self._timeout_s = timeout_s
        self._is_command = is_command
        self._client = HttpClient(self._follows, tls=tls, named_url=named_url, headers=self.headers)

    def open(self, url: str, headers: Mapping[str, str], method: str = "GET") -> BoundedResponse:
        """Send a request and return the open response. `headers` also go to where the URL redirects to.

        Raises Interrupted, UnexpectedStatus, and PullFailed for a refused redirect.
        """
        try:
            response = self._client.open(url, None, headers, method=method, timeout_s=self._timeout_s)
        except http_client.NO_ANSWER as error:
            raise Interrupted(f"'{url}' cannot be read: {http_client.describe_failure(error)}") from None
        if response.is_success:
            return response
        response.close()
        is_named = same_site(response.url, self._named_url)
        server = "the server" if is_named else f"{shown_url(response.url)}, to which it redirects,"
        message = f"'{url}': {server} answers {response.status} {response.reason}"
        challenges = response.headers.get_all("WWW-Authenticate", [])
        raise UnexpectedStatus(message, response.status, challenges, is_from_named_host=is_named)

    def read(self, url: str, headers: Mapping[str, str], max_bytes: int) -> tuple[bytes, str]:
        """Return a document and its Content-Type. Raises the errors of `open`, and PullFailed above `max_bytes`."""
        with self.open(url, headers) as response:
            try:
                content = response.read(max_bytes + 1)
            except http_client.NO_ANSWER as error:
                raise Interrupted(f"'{url}' cannot be read: {http_client.describe_failure(error)}") from None
            if len(content) > max_bytes:
                raise PullFailed(f"'{url}' is too large: expected at most {max_bytes} bytes")
            return content, response.headers.get_content_type()

    def download(self, url: str, sha256: str, folder: Path, size: int | None = None) -> Path:
        """Complete the file in `folder` that is named after its SHA-256, and return it.

        An earlier part of it is resumed. With `size` the file must have so many bytes, and the URL stands for this
        content alone; without, If-Range says which file the part is of, with the validator in `SHA256.json`. Raises the
        errors of `open`, PullFailed and OSError.
        """
        path, note = folder / sha256, folder / f"{sha256}.json"
        digest, start, validator = hashlib.sha256(), 0, ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if size is None:
                validator = str(json.loads(note.read_text("utf-8"))["validator"])
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    start += len(chunk)
        if digest.hexdigest() == sha256:
            path.touch()  # The file without bytes has not been created.
            return path
        asks_range = bool(start and (validator or size is not None))
        condition = {"If-Range": validator} if validator else {}
        with self._open_range(url, {"Range": f"bytes={start}-", **condition} if asks_range else {}) as response:
            content_range = response.headers.get("Content-Range", "")
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                digest, start = hashlib.sha256(), 0
            elif not asks_range or not content_range.startswith(f"bytes {start}-"):
                raise PullFailed(
                    f"'{url}': expected bytes from {start}, given '{content_range}'; run the command again"
                )
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if re.fullmatch("[0-9]{1,18}", length) else size
            if size is not None and total != size:
                raise PullFailed(f"'{url}' has another size: expected {size} bytes, given {total}")
            tag = response.headers.get("ETag", "")
            # A weak ETag may stand for other bytes, so If-Range does not accept it (RFC 9110, 13.1.5).
            validator = tag if tag.startswith('"') else response.headers.get("Last-Modified", "")
            check_space(folder, (total or 0) - start, f"'{url}'")
            with path.open("r+b" if start else "wb") as output:
                if size is None:
                    note.write_text(json.dumps({"validator": validator}), "utf-8")
                output.seek(start)
                for chunk in _chunks(response, url, start, total, shows_progress=self._is_command):
                    if size is not None and output.tell() + len(chunk) > size:
                        raise PullFailed(f"'{url}' has another size: expected {size} bytes, given more")
                    check_space(folder, len(chunk), f"'{url}'")
                    output.write(chunk)
                    output.flush()
                    digest.update(chunk)
        if digest.hexdigest() != sha256:
            raise PullFailed(
                f"'{url}' has another SHA-256: expected {sha256}, given {digest.hexdigest()}; it was deleted"
            )
        return path

    def _follows(self, url: str, next_url: str) -> bool:
        """Return True for a redirect, which the command shows. Raises PullFailed for one from https to http."""
        if urllib.parse.urlsplit(next_url).scheme not in ("https", urllib.parse.urlsplit(url).scheme):
            raise PullFailed(f"'{url}' redirects to '{next_url}': expected https; ask its publisher")
        if self._is_command:
            # Without the rest of the URLs, which may hold a signature.
            print(f"edge-server pull: {clean(f'{shown_url(url)} redirects to {shown_url(next_url)}')}", file=sys.stderr)
        return True

    def _open_range(self, url: str, headers: Mapping[str, str]) -> BoundedResponse:
        try:
            return self.open(url, headers)
        except UnexpectedStatus as error:
            if error.status != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not headers:
                raise
        return self.open(url, {})


def _chunks(
    response: http.client.HTTPResponse, url: str, start: int, total: int | None, *, shows_progress: bool
) -> Iterator[bytes]:
    """Yield the response's bytes with progress on a terminal. Raises Interrupted if they end before `total`."""
    is_terminal = shows_progress and sys.stderr is not None and sys.stderr.isatty()
    progress = Progress(sys.stderr) if is_terminal else None
    reason = "the server closed the connection"
    try:
        while True:
            try:
                chunk = response.read1(_CHUNK_BYTES)
            except http_client.NO_ANSWER as error:
                chunk, reason, total = b"", f"the connection broke ({error or type(error).__name__})", total or -1
            if not chunk:
                break
            yield chunk
            is_next_mb = start // _CHUNK_BYTES != (start + len(chunk)) // _CHUNK_BYTES
            start += len(chunk)
            if progress is not None and is_next_mb:
                progress.show(start / total if total else 0.0, f"{start / 1e6:.0f} MB")
    finally:
        if progress is not None:
            progress.close()
    if total is not None and start != total:
        of = f" of {total}" if total > 0 else ""
        raise Interrupted(f"'{url}': {reason} after {start}{of} bytes; run the same command again to resume")
