"""`edge-server pull URL --sha256=HEX`: download a model into a repository, with its SHA-256 verified.

The files are prepared in `.pull-NAME`, a hidden staging folder of the repository that servers ignore. They are renamed
into place when they are complete and on the disk. The next pull into the repository removes what is left of others that
were killed, or ended by a loss of power.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from edge_server.cli import http_client
from edge_server.cli.console import Progress, clean, render
from edge_server.cli.options import CommandParser, int_range
from edge_server.config.setting import shown_url
from edge_server.core.exit_code import ExitCode
from edge_server.errors import AlreadyExists, InvalidRequest
from edge_server.plugins.fleet.pull_archive import ARCHIVES, PullFailed, check_space, unpack
from edge_server.repository.file_fingerprint import is_ignored
from edge_server.repository.replace_file import sync_folder
from edge_server.repository.scan import Scanner, is_model_name, parse_version

_MODEL_FILES = (".onnx", ".gguf", ".plan", ".pt", ".pt2", ".tflite")
_MAX_NAME_BYTES = 200
_MAX_INDEX_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_DEFAULT_MAX_BYTES = 4 << 30
_STAGING_PREFIX = ".pull-"


class _Interrupted(PullFailed):
    """The pull failed in the transfer. The downloaded bytes are kept."""


def run(arguments: Sequence[str]) -> int:
    """Install the model, or print the index. Return 0, or 1 if that failed. Raises InvalidRequest, AlreadyExists."""
    options = _parser().parse_args(arguments)
    options.model_repository = options.model_repository or _default_repository()
    if options.list and not options.index:
        raise InvalidRequest("--list needs --index=URL")
    try:
        index = _read_index(options) if options.index else {}
        if options.list:
            rows = [
                (name, f"{entry['size_bytes'] / 1e6:.1f}" if entry["size_bytes"] else "", entry["licence"],
                 entry["description"], entry["url"])
                for name, entry in index.items()
            ]  # fmt: skip
            print(render(("NAME", "MB", "LICENCE", "DESCRIPTION", "URL"), rows, sys.stdout, optional=("URL",)))
            return ExitCode.OK
        name, url, suffix, sha256 = _chosen(options, index)
        with _locked(options.model_repository):
            _pull(options, name, url, suffix, sha256)
    except PullFailed as error:
        print(f"edge-server pull: {clean(str(error))}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server pull",
        description="Download a model into a repository and verify its SHA-256. SOURCE is the URL of an archive "
        f"({' '.join(ARCHIVES)}) or of one model file ({' '.join(_MODEL_FILES)}); with --index it is a name in the "
        "index. After an interruption the same command resumes the download.",
        allow_abbrev=False,
    )
    parser.add_argument("source", nargs="?", default="", metavar="SOURCE", help="URL, or with --index a name")
    parser.add_argument("--sha256", type=_sha256, metavar="HEX", help="SHA-256 of the file; URLs need it")
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR",
        help="repository to install into (default: model_repository here, or models if there is only that)",
    )  # fmt: skip
    parser.add_argument("--name", default="", help="name of the model; default: that of the file, or in the index")
    parser.add_argument("--replace", action="store_true", help="replace the model of this name, if there is one")
    parser.add_argument(
        "--max-bytes",
        type=int_range(1, 99_999_999_999),
        default=_DEFAULT_MAX_BYTES,
        metavar="N",
        help="most bytes that an archive may unpack to; never more than nine tenths of the free space; default: 4 GiB",
    )
    parser.add_argument("--index", default="", metavar="URL", help="JSON file that lists models")
    parser.add_argument("--list", action="store_true", help="print the index and download nothing")
    http_client.add_request_options(parser, timeout_s=60.0)
    return parser


def _default_repository() -> Path:
    """Return the folder that `add` has as its default, or the one that earlier versions of `pull` made here."""
    given, before = Path("model_repository"), Path("models")
    return before if before.is_dir() and not given.exists() else given


def _sha256(text: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"expected 64 hexadecimal digits, got '{text[:80]}'")
    return text.lower()


def _chosen(options: argparse.Namespace, index: dict[str, dict[str, Any]]) -> tuple[str, str, str, str]:
    """Return the model's name, and the URL, suffix and SHA-256 of its file. Raises InvalidRequest."""
    if options.index:
        if options.source not in index:
            listed = ", ".join(index) or "none"
            raise InvalidRequest(f"{options.index} has no model '{options.source}'; it has {listed}")
        name, url, sha256 = options.source, index[options.source]["url"], index[options.source]["sha256"]
        if options.sha256 not in (None, sha256):
            raise InvalidRequest(f"--sha256={options.sha256} differs from that of '{name}' in the index, {sha256}")
    else:
        if not re.match("[A-Za-z]+://", options.source):
            raise InvalidRequest(
                f"expected a URL, https://HOST/PATH, given '{options.source[:80]}': there is no library of models to "
                "pull by name; give the URL of a model's file with its --sha256, or the list of models that has the "
                "name with --index=URL"
            )
        if not options.sha256:
            raise InvalidRequest("--sha256 is missing: give the SHA-256 that the model's publisher states")
        name, url, sha256 = "", options.source, options.sha256
    _check_scheme(url, has_hash=bool(options.sha256))
    file = urllib.parse.unquote(urllib.parse.urlsplit(url).path).rpartition("/")[2]
    suffix = next((end for end in (*ARCHIVES, *_MODEL_FILES) if file.lower().endswith(end)), "")
    if not suffix:
        expected = " ".join((*ARCHIVES, *_MODEL_FILES))
        raise InvalidRequest(f"'{url}': expected a file that ends in one of {expected}, given '{file}'")
    name = options.name or name or file[: -len(suffix)]
    if not is_model_name(name) or is_ignored(name) or len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise InvalidRequest(
            f"name '{name[:80]}' cannot be used: expected 1 to {_MAX_NAME_BYTES} bytes without spaces, slashes, "
            "? # % and a leading dot; choose another with --name"
        )
    return name, url, suffix, sha256


def _check_scheme(url: str, *, has_hash: bool) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidRequest(f"expected https://HOST/PATH, given '{url[:200]}'")
    if parts.scheme == "http" and not has_hash:
        raise InvalidRequest(f"'{url}' can be changed on its way: use https, or give its SHA-256 with --sha256")


def _read_index(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return name -> entry, with absolute URLs. Raises PullFailed and InvalidRequest."""
    url = options.index
    _check_scheme(url, has_hash=bool(options.sha256) and not options.list)
    with _open(options, url) as response:
        try:
            text = response.read(_MAX_INDEX_BYTES + 1)
        except http_client.NO_ANSWER as error:
            raise PullFailed(f"'{url}' cannot be read: {http_client.describe_failure(error)}") from None
    if len(text) > _MAX_INDEX_BYTES:
        raise PullFailed(f"index '{url}' is too large: expected at most {_MAX_INDEX_BYTES} bytes")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PullFailed(f"index '{url}' is not JSON: {error}") from None
    models = document.get("models") if isinstance(document, dict) else None
    if not isinstance(models, list):
        raise PullFailed(f"index '{url}': expected {{\"models\": [...]}}")
    found: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(models):
        where = f"index '{url}': models[{number}]"
        if not isinstance(entry, dict):
            raise PullFailed(f"{where}: expected an object with name, url and sha256")
        for key, pattern, expected in (
            ("name", ".+", "a text"),
            ("url", ".+", "a URL"),
            ("sha256", "[0-9a-fA-F]{64}", "64 hexadecimal digits"),
            ("description", "(?s:.*)", "a text"),
            ("licence", "(?s:.*)", "a text"),
        ):
            value = entry.get(key, "")
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                raise PullFailed(f"{where}: {key}: expected {expected}, given {repr(entry.get(key, 'nothing'))[:80]}")
        size = entry.get("size_bytes", 0)
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise PullFailed(f"{where}: size_bytes: expected a whole number from 0, given {repr(size)[:80]}")
        if entry["name"] in found:
            raise PullFailed(f"{where}: there is a second model '{entry['name']}'")
        try:
            file_url = urllib.parse.urljoin(url, entry["url"])
        except ValueError as error:
            raise PullFailed(f"{where}: url: {error}") from None
        texts = {"description": "", "licence": "", "size_bytes": 0}
        found[entry["name"]] = {**texts, **entry, "url": file_url, "sha256": entry["sha256"].lower()}
    return found


class _Rules(urllib.request.HTTPRedirectHandler):
    """Refuses redirects from https to http, and sends the headers of --header only to the host that was named."""

    def __init__(self, named_url: str, headers: Sequence[tuple[str, str]]) -> None:
        self._named = urllib.parse.urlsplit(named_url)[:2]
        self._headers = headers

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        """Called by urllib before each request, also after a redirect."""
        if urllib.parse.urlsplit(request.full_url)[:2] == self._named:
            for key, value in self._headers:
                request.add_unredirected_header(key, value)
        return request

    https_request = http_request

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urllib.parse.urlsplit(newurl).scheme not in ("https", req.type):
            raise PullFailed(f"'{req.full_url}' redirects to '{newurl}': expected https; ask its publisher")
        # Without the rest of the URLs, which may hold a signature.
        hop = f"{shown_url(req.full_url)} redirects to {shown_url(newurl)}"
        print(f"edge-server pull: {clean(hop)}", file=sys.stderr)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(options: argparse.Namespace, url: str, more: dict[str, str] | None = None) -> http.client.HTTPResponse:
    """Send a GET and return the open response. Raises _Interrupted."""
    named_url = options.index or options.source
    opener = urllib.request.build_opener(
        _Rules(named_url, options.header), http_client.https_handler(options, named_url)
    )
    try:
        response: http.client.HTTPResponse = opener.open(
            urllib.request.Request(url, headers=more or {}), timeout=options.timeout
        )
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and more:
                return _open(options, url)
            raise _Interrupted(f"'{url}': the server answers {error.code} {error.reason}") from None
    except http_client.NO_ANSWER as error:
        raise _Interrupted(f"'{url}' cannot be read: {http_client.describe_failure(error)}") from None
    return response


@contextlib.contextmanager
def _locked(repository: Path) -> Iterator[None]:
    """Let one pull at a time into a repository. Raises InvalidRequest if there is none, or another pull runs."""
    try:
        descriptor = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidRequest(
            f"--model-repository={repository} cannot be opened: {error.strerror}; expected an existing folder"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequest(f"another pull into '{repository}' is running; wait for its end") from None
        yield
    finally:
        os.close(descriptor)


def _pull(options: argparse.Namespace, name: str, url: str, suffix: str, sha256: str) -> None:
    """Download, verify, unpack and install. Raises PullFailed and AlreadyExists."""
    target = options.model_repository / name
    work = options.model_repository / f"{_STAGING_PREFIX}{name}"
    replaced = work / "replaced"
    _clean_up(options.model_repository, resumed=work)
    if os.path.lexists(target) and not options.replace:
        if not (work / "resumable").exists():
            _discard(work)
        raise AlreadyExists(f"'{target}' exists: use --replace to replace it, or --name for another name")
    unpacked, model = work / "unpacked", work / "model" / name
    try:
        work.mkdir(exist_ok=True)
        (work / "resumable").unlink(missing_ok=True)
        _download(options, url, sha256, work)
        for folder in (unpacked, model.parent):
            folder.mkdir()
        if suffix in ARCHIVES:
            unpack(work / "download", unpacked, suffix, options.max_bytes)
            os.rename(_model_folder(unpacked), model)
        else:
            (model / "1").mkdir(parents=True)
            os.rename(work / "download", model / "1" / f"model{suffix}")
        found = Scanner([model.parent]).find(name)
        if found is None or found.problem:
            raise PullFailed(f"'{url}' holds no model that can be served: {found.problem if found else 'it is empty'}")
        # One sync for all files. A loss of power after the renames must not leave empty files in a complete model.
        os.sync()
        # Two renames and no exchange in one step: watchdog 7.1 stops watching after an exchange (renameat2).
        if os.path.lexists(target):
            os.rename(target, replaced)
        os.rename(model, target)
        sync_folder(options.model_repository)
    except _Interrupted:
        with contextlib.suppress(OSError):
            if (work / "download").exists():
                (work / "resumable").touch()
        if not (work / "resumable").exists():
            _discard(work)
        raise
    except PullFailed:
        _discard(work)
        raise
    except OSError as error:
        # Other programs need the disk too: nothing is kept when it is full.
        _discard(work)
        raise PullFailed(f"'{error.filename or work}' cannot be written: {error.strerror or error}") from None
    _discard(work)
    print(f"{target}: version {', '.join(str(version.number) for version in found.versions)}")


def _clean_up(repository: Path, resumed: Path) -> None:
    """Remove what killed pulls left: this process has the lock, so no staging folder belongs to a living one.

    Of `resumed`, and of each folder whose pull ended with the advice to run it again, the download stays. Raises
    PullFailed if a model that was being replaced cannot be put back.
    """
    for work in sorted(repository.glob(f"{_STAGING_PREFIX}*")):
        try:
            _restore(work)
        except OSError as error:
            raise PullFailed(f"'{work / 'replaced'}' cannot be put back: {error.strerror}") from None
        if work == resumed or (work / "resumable").exists():
            for name in ("unpacked", "model", "replaced"):
                shutil.rmtree(work / name, ignore_errors=True)
        else:
            shutil.rmtree(work, ignore_errors=True)


def _restore(work: Path) -> None:
    """Move a replaced model back if nothing is in its place. Raises OSError."""
    replaced, target = work / "replaced", work.with_name(work.name.removeprefix(_STAGING_PREFIX))
    if os.path.lexists(replaced) and not os.path.lexists(target):
        os.rename(replaced, target)


def _discard(work: Path) -> None:
    """Delete a staging folder, unless it holds a replaced model that cannot be put back: the next pull tries again."""
    with contextlib.suppress(OSError):
        _restore(work)
        shutil.rmtree(work, ignore_errors=True)


def _download(options: argparse.Namespace, url: str, sha256: str, work: Path) -> None:
    """Complete the file `download` in `work`. Raises PullFailed and OSError.

    `download.json` says which file it is a part of: its SHA-256, and the validator for If-Range.
    """
    path, note = work / "download", work / "download.json"
    digest, start, validator = hashlib.sha256(), 0, ""
    try:
        kept = json.loads(note.read_text("utf-8"))
        if kept["sha256"] == sha256:
            validator = str(kept["validator"])
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    start += len(chunk)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if digest.hexdigest() == sha256:
        return
    asks_range = bool(start and validator)
    with _open(options, url, {"Range": f"bytes={start}-", "If-Range": validator} if asks_range else None) as response:
        content_range = response.headers.get("Content-Range", "")
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            digest, start = hashlib.sha256(), 0
        elif not asks_range or not content_range.startswith(f"bytes {start}-"):
            raise PullFailed(f"'{url}': expected bytes from {start}, given '{content_range}'; run the command again")
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if re.fullmatch("[0-9]{1,18}", length) else None
        tag = response.headers.get("ETag", "")
        # A weak ETag may stand for other bytes, so If-Range does not accept it (RFC 9110, 13.1.5).
        validator = tag if tag.startswith('"') else response.headers.get("Last-Modified", "")
        check_space(work, (total or 0) - start, f"'{url}'")
        with path.open("r+b" if start else "wb") as output:
            note.write_text(json.dumps({"sha256": sha256, "validator": validator}), "utf-8")
            output.seek(start)
            for chunk in _chunks(response, url, start, total):
                check_space(work, len(chunk), f"'{url}'")
                output.write(chunk)
                output.flush()
                digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise PullFailed(f"'{url}' has another SHA-256: expected {sha256}, given {digest.hexdigest()}; it was deleted")


def _chunks(response: http.client.HTTPResponse, url: str, start: int, total: int | None) -> Iterator[bytes]:
    """Yield the response's bytes with progress on a terminal. Raises _Interrupted if they end before `total`."""
    progress = Progress(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None
    reason = "the server closed the connection"
    try:
        while True:
            try:
                chunk = response.read1(_CHUNK_BYTES)
            except http_client.NO_ANSWER as error:
                chunk, reason, total = b"", f"the connection broke ({type(error).__name__})", total or -1
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
        raise _Interrupted(f"'{url}': {reason} after {start}{of} bytes; run the same command again to resume")


def _model_folder(folder: Path) -> Path:
    """Return the folder with the versions: `folder`, or the only folder in it if that is no version."""
    entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if len(entries) == 1 and entries[0].is_dir() and parse_version(entries[0].name) is None:
        return entries[0]
    return folder
