"""Client of OCI registries: reads manifests and downloads blobs, each checked by its SHA-256.

Format: https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md and image-spec/blob/v1.1.0/manifest.md;
tokens: https://distribution.github.io/distribution/spec/auth/token/.

The package `oras` (0.2.43) is not used: its pull checks no digest, resumes nothing, has no bounds and reads no index of
platforms. What it adds to urllib is the request of a token.
"""

from __future__ import annotations

import hashlib
import http
import json
import platform
import re
import ssl
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edge_server.bounded_http import BoundedResponse
from edge_server.errors import InvalidRequest
from edge_server.plugins.remote.pull.archive import PullFailed
from edge_server.plugins.remote.pull.docker_credentials import read_credentials
from edge_server.plugins.remote.pull.resumable_download import DownloadClient, UnexpectedStatus

MAX_LAYERS = 1000

_MAX_MANIFEST_BYTES = 4 << 20
"""Above it a registry may refuse a manifest, says the specification."""
_MAX_TOKEN_BYTES = 1 << 20
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}
"""Names of machines -> those of Go, which indexes have."""

_NAME = "[a-z0-9]+(?:(?:[.]|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    r"oci://(?P<scheme>http://|https://|)(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?)"
    rf"/(?P<repository>{_NAME}(?:/{_NAME})*)(?P<tag>:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?"
    r"(?:@sha256:(?P<sha256>[0-9a-f]{64}))?"
)
_CHALLENGE = re.compile(r'(?<![A-Za-z])([A-Za-z]+)="([^"\\]*)"')


class OciReference(NamedTuple):
    """Address of a manifest. `site` is https://HOST[:PORT], or http://. `sha256` is that of the manifest, or ""."""

    site: str
    repository: str
    tag: str
    sha256: str

    def __str__(self) -> str:
        site = self.site if self.site.startswith("http:") else self.site.removeprefix("https://")
        return f"oci://{site}/{self.repository}" + (f"@sha256:{self.sha256}" if self.sha256 else f":{self.tag}")


class OciBlob(NamedTuple):
    """Descriptor of a layer or a configuration. `size` is in bytes."""

    media_type: str
    sha256: str
    size: int
    annotations: Mapping[str, str]


class OciManifest(NamedTuple):
    """What a registry has at a reference. `sha256` is that of the reference: of the index, if there is one."""

    sha256: str
    config: OciBlob
    layers: tuple[OciBlob, ...]


def parse_reference(text: str) -> OciReference:
    """Read `oci://[http://]HOST[:PORT]/REPOSITORY[:TAG][@sha256:HEX]`; the tag is "latest" by default.

    Raises InvalidRequest.
    """
    found = _REFERENCE.fullmatch(text)
    if found is None or len(found["repository"]) > 255 or not re.search("[.:]|^localhost$", found["host"]):
        raise InvalidRequest(
            f"expected oci://HOST[:PORT]/REPOSITORY[:TAG][@sha256:64 HEXADECIMAL DIGITS], with docker.io as the host "
            f"of Docker Hub, given '{_without_user(text)[:300]}'"
        )
    host, repository = found["host"], found["repository"]
    if host in ("docker.io", "index.docker.io"):
        # The name that people write, and where its registry is.
        host, repository = "registry-1.docker.io", repository if "/" in repository else f"library/{repository}"
    tag = found["tag"].removeprefix(":") if found["tag"] else "latest"
    return OciReference(f"{found['scheme'] or 'https://'}{host}", repository, tag, found["sha256"] or "")


def _without_user(text: str) -> str:
    """Return an address without USER:PASSWORD@, which belongs into Docker's file of passwords."""
    return re.sub("//[^/]*@", "//...@", text)


class OciRegistry(DownloadClient):
    """Client for one reference. Reads only. Logs in if the registry asks, as `docker login` left it."""

    def __init__(
        self,
        reference: OciReference,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        timeout_s: float,
        *,
        is_command: bool = True,
    ) -> None:
        super().__init__(reference.site, headers, tls, timeout_s, is_command=is_command)
        self._reference = reference
        self._url = f"{reference.site}/v2/{reference.repository}"
        self._tls = tls
        self._has_own_key = any(name.lower() == "authorization" for name in headers)

    def open(self, url: str, headers: Mapping[str, str], method: str = "GET") -> BoundedResponse:
        """As DownloadClient, with a log-in after the first refusal: tokens expire while large files are loaded.

        The refusal of a host to which the registry redirects is final: a log-in there would give it the password.
        """
        try:
            return super().open(url, headers, method)
        except UnexpectedStatus as error:
            is_asked = error.status == http.HTTPStatus.UNAUTHORIZED and error.is_from_named_host
            if not is_asked or self._has_own_key:
                raise
            self._log_in(error.challenges)
        try:
            return super().open(url, headers, method)
        except UnexpectedStatus as error:
            is_refusal = error.status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN)
            if not is_refusal or not error.is_from_named_host:
                raise
            raise PullFailed(
                f"'{self._reference}': the registry answers {error.status} to the log-in: `docker login` makes the "
                "file with its password"
            ) from None

    def read_digest(self) -> str:
        """Return the SHA-256 of what the tag stands for now. Raises PullFailed."""
        accepted = {"Accept": ", ".join((*_MANIFESTS, *_INDEXES))}
        with self.open(f"{self._url}/manifests/{self._reference.tag}", accepted, "HEAD") as response:
            digest = response.headers.get("Docker-Content-Digest", "")
        if found := re.fullmatch("sha256:([0-9a-f]{64})", digest):
            return found[1]
        return self._read_document("")[0]

    def read_manifest(self) -> OciManifest:
        """Return the manifest, of an index that for this machine. Raises PullFailed."""
        where = f"'{self._reference}'"
        sha256, document = self._read_document(self._reference.sha256)
        if "manifests" in document:
            _, document = self._read_document(self._choose_platform(document).sha256)
            if "manifests" in document:
                raise PullFailed(f"{where} is an index of indexes: expected an index of manifests")
        layers = document.get("layers")
        if not isinstance(layers, list) or len(layers) > MAX_LAYERS:
            given = f"{len(layers)}" if isinstance(layers, list) else "none"
            raise PullFailed(f"{where}: expected a manifest with at most {MAX_LAYERS} layers, given {given}")
        blobs = [_blob(layer, f"{where}: layers[{number}]") for number, layer in enumerate(layers)]
        return OciManifest(sha256, _blob(document.get("config"), f"{where}: config"), tuple(blobs))

    def download_blob(self, blob: OciBlob, folder: Path) -> Path:
        """As `download`. Raises PullFailed and OSError."""
        return self.download(f"{self._url}/blobs/sha256:{blob.sha256}", blob.sha256, folder, blob.size)

    def _read_document(self, sha256: str) -> tuple[str, dict[str, Any]]:
        """Return SHA-256 and content of the manifest or index with this SHA-256, or with none of that of the tag."""
        name = f"sha256:{sha256}" if sha256 else self._reference.tag
        accepted = {"Accept": ", ".join((*_MANIFESTS, *_INDEXES))}
        text, media_type = self.read(f"{self._url}/manifests/{name}", accepted, _MAX_MANIFEST_BYTES)
        given = hashlib.sha256(text).hexdigest()
        if sha256 not in ("", given):
            raise PullFailed(f"'{self._reference}': a manifest has another SHA-256: expected {sha256}, given {given}")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PullFailed(f"'{self._reference}': the manifest is not JSON: {error}") from None
        is_object = isinstance(document, dict)
        media_type = document.get("mediaType", media_type) if is_object else media_type
        # What is both could be read as one of them here and as the other elsewhere (CVE-2021-41190).
        is_both = is_object and "manifests" in document and "layers" in document
        if not is_object or is_both or media_type not in (*_MANIFESTS, *_INDEXES):
            raise PullFailed(
                f"'{self._reference}': expected the manifest of an artifact or an image, or an index, given "
                f"'{str(media_type)[:80]}'"
            )
        return given, document

    def _choose_platform(self, index: dict[str, Any]) -> OciBlob:
        machine = _MACHINES.get(platform.machine(), platform.machine())
        where = f"'{self._reference}'"
        found = index["manifests"] if isinstance(index["manifests"], list) else []
        if len(found) > MAX_LAYERS:
            raise PullFailed(f"{where}: expected an index of at most {MAX_LAYERS} manifests, given {len(found)}")
        chosen, given = [], []
        for number, entry in enumerate(found):
            blob = _blob(entry, f"{where}: manifests[{number}]")
            target = entry.get("platform")
            target = target if isinstance(target, dict) else {}
            named = f"{target.get('os', 'linux')}/{target.get('architecture', machine)}"
            given.append(named[:40])
            if named == f"linux/{machine}" and blob.media_type in _MANIFESTS:
                chosen.append(blob)
        if not chosen:
            listed = ", ".join(given[:20]) or "nothing"
            raise PullFailed(f"{where} has no manifest for linux/{machine}: it has {listed}")
        return chosen[0]

    # -- log-in -----------------------------------------------------------------------------------------------------

    def _log_in(self, challenges: list[str]) -> None:
        """Set the header Authorization, by the answer 401. Raises PullFailed."""
        host = urllib.parse.urlsplit(self._reference.site).netloc
        # Headers are sent in the order of the registry's preference.
        for challenge in challenges:
            kind, _, parameters = challenge.strip().partition(" ")
            if kind.lower() == "bearer":
                self.headers["Authorization"] = f"Bearer {self._read_token(dict(_CHALLENGE.findall(parameters)), host)}"
                return
            if kind.lower() == "basic":
                if basic := read_credentials(host):
                    self.headers["Authorization"] = f"Basic {basic}"
                    return
                raise PullFailed(
                    f"'{self._reference}': the registry wants a password: `docker login {host}` makes the file with it"
                )
        kinds = ", ".join(challenge.partition(" ")[0][:20] for challenge in challenges) or "none"
        raise PullFailed(f"'{self._reference}': expected a log-in of kind Bearer or Basic, given {kinds}")

    def _read_token(self, challenge: Mapping[str, str], host: str) -> str:
        """Return a token to read this repository, whatever the registry says that it should be for."""
        realm = challenge.get("realm", "")
        scheme = urllib.parse.urlsplit(realm).scheme
        if not realm.isascii() or not realm.isprintable() or " " in realm or scheme not in (
            ("https",) if self._reference.site.startswith("https:") else ("https", "http")
        ):  # fmt: skip
            raise PullFailed(f"'{self._reference}': the log-in is at '{realm[:200]}': expected https")
        scope = f"repository:{self._reference.repository}:pull"
        query = urllib.parse.urlencode({"service": challenge.get("service", host), "scope": scope})
        basic = read_credentials(host)
        key = {"Authorization": f"Basic {basic}"} if basic else {}
        client = DownloadClient(realm, key, self._tls, self._timeout_s, is_command=self._is_command)
        try:
            text, _ = client.read(f"{realm}{'&' if '?' in realm else '?'}{query}", {}, _MAX_TOKEN_BYTES)
        except UnexpectedStatus as error:
            if error.status not in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
                raise
            advice = "" if basic else f"; `docker login {host}` makes the file with a password"
            raise PullFailed(f"'{self._reference}': no log-in: {error}{advice}") from None
        try:
            answer = json.loads(text)
            token = answer.get("token") or answer["access_token"]
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
            token = None
        if not isinstance(token, str) or not re.fullmatch("[!-~]{1,65536}", token):
            raise PullFailed(f"'{self._reference}': the log-in at '{realm[:200]}' gives no token")
        return token


def _blob(descriptor: object, where: str) -> OciBlob:
    """Return a checked descriptor. Raises PullFailed."""
    fields = descriptor if isinstance(descriptor, dict) else {}
    media_type, digest, size = (fields.get(key) for key in ("mediaType", "digest", "size"))
    annotations = fields.get("annotations") or {}
    found = re.fullmatch("sha256:([0-9a-f]{64})", digest) if isinstance(digest, str) else None
    if found is None or not isinstance(media_type, str) or type(size) is not int or not 0 <= size < 1 << 53:
        raise PullFailed(f"{where}: expected mediaType, a digest sha256:HEX and a size, given {repr(descriptor)[:160]}")
    if not isinstance(annotations, dict) or not all(isinstance(value, str) for value in annotations.values()):
        raise PullFailed(f"{where}: annotations: expected texts, given {repr(annotations)[:80]}")
    return OciBlob(media_type, found[1], size, annotations)
