"""`edge-server pull SOURCE`: download a model from a web server or an OCI registry into a repository, with its SHA-256
verified."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edge_server.cli import http_client
from edge_server.cli.console import clean, render
from edge_server.cli.options import CommandParser, int_range
from edge_server.config.setting import shown_url
from edge_server.core.exit_code import ExitCode
from edge_server.errors import InvalidRequest
from edge_server.plugins.remote.pull import oci_model
from edge_server.plugins.remote.pull.archive import (
    ARCHIVES,
    DEFAULT_MAX_BYTES,
    PullFailed,
    UnpackLimits,
    check_names,
    unpack,
)
from edge_server.plugins.remote.pull.model_installation import (
    Fill,
    check_name,
    find_model_folder,
    install,
    locked,
    remove_other_files,
)
from edge_server.plugins.remote.pull.oci_model import MODEL_FILES
from edge_server.plugins.remote.pull.oci_registry import OciReference, OciRegistry, parse_reference
from edge_server.plugins.remote.pull.resumable_download import DownloadClient
from edge_server.repository.choice.model_formats import describe_code
from edge_server.repository.disk.free_space import DiskFull

_MAX_INDEX_BYTES = 1 << 20


class _Source(NamedTuple):
    """Where a model comes from, and its name in the repository."""

    name: str
    url: str
    fill: Fill


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
        source = _choose_source(options, index)
        with locked(options.model_repository):
            versions = install(options.model_repository, source.name, source.url, source.fill, replaces=options.replace)
        folder = options.model_repository / source.name
        print(f"{folder}: version {', '.join(map(str, versions))}")
        if code := describe_code(file.relative_to(folder) for file in folder.rglob("*") if file.is_file()):
            print(f"edge-server pull: {code}", file=sys.stderr)
    except (PullFailed, DiskFull) as error:
        print(f"edge-server pull: {clean(str(error))}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server pull",
        description="Download a model into a repository and verify its SHA-256. SOURCE is the URL of an archive "
        f"({' '.join(ARCHIVES)}) or of one model file ({' '.join(MODEL_FILES)}), or an artifact or image in an OCI "
        "registry, oci://HOST/REPOSITORY:TAG or oci://HOST/REPOSITORY@sha256:HEX; with --index it is a name in the "
        "index. After an interruption the same command resumes the download.",
        allow_abbrev=False,
    )
    parser.add_argument("source", nargs="?", default="", metavar="SOURCE", help="URL, or with --index a name")
    parser.add_argument(
        "--sha256", type=_sha256, metavar="HEX", help="SHA-256 of the file, which URLs need, or of the manifest of oci://",
    )  # fmt: skip
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR",
        help="repository to install into (default: model_repository here, or models if there is only that)",
    )  # fmt: skip
    parser.add_argument("--name", default="", help="name of the model; default: that of the file, or in the index")
    parser.add_argument("--replace", action="store_true", help="replace the model of this name, if there is one")
    parser.add_argument(
        "--max-bytes",
        type=int_range(1, 99_999_999_999),
        default=DEFAULT_MAX_BYTES,
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


def _choose_source(options: argparse.Namespace, index: dict[str, dict[str, Any]]) -> _Source:
    """Return the source that the command line names. Raises InvalidRequest."""
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
        name, url, sha256 = "", options.source, options.sha256
    if url.startswith("oci://"):
        return _choose_reference(options, options.name or name, url, sha256)
    if not sha256:
        raise InvalidRequest("--sha256 is missing: give the SHA-256 that the model's publisher states")
    _check_scheme(url, has_hash=bool(options.sha256))
    file = urllib.parse.unquote(urllib.parse.urlsplit(url).path).rpartition("/")[2]
    suffix = next((end for end in (*ARCHIVES, *MODEL_FILES) if file.lower().endswith(end)), "")
    if not suffix:
        expected = " ".join((*ARCHIVES, *MODEL_FILES))
        raise InvalidRequest(f"'{url}': expected a file that ends in one of {expected}, given '{file}'")
    name = options.name or name or file[: -len(suffix)]
    check_name(name)
    return _Source(
        name, url, functools.partial(_fill_from_file, _client(options, url), options.max_bytes, url, suffix, sha256)
    )


def _choose_reference(options: argparse.Namespace, name: str, url: str, sha256: str | None) -> _Source:
    reference = parse_reference(url)
    if sha256 and reference.sha256 not in ("", sha256):
        raise InvalidRequest(f"'{url}' names another SHA-256 than {sha256}, which is given too")
    reference = reference._replace(sha256=reference.sha256 or sha256 or "")
    if reference.site.startswith("http:") and not reference.sha256:
        raise InvalidRequest(
            f"'{url}' can be changed on its way: leave http:// out, or give the digest, @sha256:HEX or --sha256=HEX"
        )
    name = name or reference.repository.rpartition("/")[2]
    check_name(name)
    # An index names other hosts than its own, which must not get its keys.
    headers = {} if options.index else dict(options.header)
    registry = OciRegistry(reference, headers, http_client.tls_context(options, reference.site), options.timeout)
    return _Source(name, url, functools.partial(_fill_from_registry, registry, options.max_bytes, reference))


def _check_scheme(url: str, *, has_hash: bool) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidRequest(f"expected https://HOST/PATH, given '{url[:200]}'")
    if "@" in parts.netloc:
        # http.client would look up USER:PASSWORD@HOST, which tells the password to name servers.
        raise InvalidRequest(
            f"'{shown_url(url)}': expected an address without user and password: "
            "--header='Authorization=Basic BASE64' sends them"
        )
    if parts.scheme == "http" and not has_hash:
        raise InvalidRequest(f"'{url}' can be changed on its way: use https, or give its SHA-256 with --sha256")


def _read_index(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return name -> entry, with absolute URLs. Raises PullFailed and InvalidRequest."""
    url = options.index
    _check_scheme(url, has_hash=bool(options.sha256) and not options.list)
    text, _ = _client(options, url).read(url, {}, _MAX_INDEX_BYTES)
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


def _client(options: argparse.Namespace, url: str) -> DownloadClient:
    named_url = options.index or url
    return DownloadClient(named_url, dict(options.header), http_client.tls_context(options, named_url), options.timeout)


def _fill_from_file(
    client: DownloadClient,
    max_bytes: int,
    url: str,
    suffix: str,
    sha256: str,
    downloads: Path,
    unpacked: Path,
    model: Path,
) -> None:
    remove_other_files(downloads, {sha256, f"{sha256}.json"})
    file = client.download(url, sha256, downloads)
    if suffix in ARCHIVES:
        unpack(file, unpacked, suffix, UnpackLimits(max_bytes, unpacked))
        check_names(unpacked, "archive")
        os.rename(find_model_folder(unpacked), model)
    else:
        (model / "1").mkdir(parents=True)
        os.rename(file, model / "1" / f"model{suffix}")


def _fill_from_registry(
    registry: OciRegistry, max_bytes: int, reference: OciReference, downloads: Path, unpacked: Path, model: Path
) -> None:
    manifest = registry.read_manifest()
    if not reference.sha256:
        print(f"edge-server pull: {reference} is @sha256:{manifest.sha256}", file=sys.stderr)
    oci_model.fill(registry, reference, manifest, max_bytes, downloads, unpacked, model)
