"""Registry of OCI artifacts in this process, which can also lie, cut, redirect and ask for a log-in."""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kit.site import Handler, Site

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
TITLE = "org.opencontainers.image.title"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass
class Registry:
    """Manifests and blobs of any repository, by digest or tag. `requests` are method, path and headers."""

    host: str = ""
    manifests: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    """Path -> where it is."""
    answers: dict[str, bytes] = field(default_factory=dict)
    """Path -> another body, with 200."""
    cut_after: int | None = None
    """Close the connection after so many bytes of a blob."""
    is_endless: bool = False
    """Send blobs without Content-Length and without an end."""
    challenge: str = ""
    """WWW-Authenticate of 401; {url} becomes the registry's own."""
    tokens: set[str] = field(default_factory=set)
    """What Authorization may be if there is a challenge."""
    passwords: set[str] = field(default_factory=set)
    """What Authorization may be at /token. Without any, all get a token."""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def add_blob(self, content: bytes, media_type: str, **annotations: str) -> dict[str, Any]:
        self.blobs[digest_of(content)] = content
        return {
            "mediaType": media_type, "digest": digest_of(content), "size": len(content),
            **({"annotations": annotations} if annotations else {}),
        }  # fmt: skip

    def add_file(self, name: str, content: bytes, media_type: str = "application/octet-stream") -> dict[str, Any]:
        return self.add_blob(content, media_type, **{TITLE: name})

    def push(
        self,
        tag: str,
        *layers: dict[str, Any],
        config: str = "application/vnd.oci.empty.v1+json",
        **changes: Any,
    ) -> str:
        """Add a manifest, and return its digest."""
        document = {
            "schemaVersion": 2, "mediaType": MANIFEST, "config": self.add_blob(b"{}", config), "layers": layers,
            **changes,
        }  # fmt: skip
        return self.push_document(tag, document)

    def push_document(self, tag: str, document: dict[str, Any]) -> str:
        content = json.dumps(document).encode()
        self.manifests[tag] = self.manifests[digest_of(content)] = content
        return digest_of(content)

    def keys(self, part: str) -> list[str | None]:
        """Return Authorization of the requests whose path has this part."""
        return [headers.get("Authorization") for _, path, headers in self.requests if part in path]


@contextmanager
def run_registry(tls: ssl.SSLContext | None = None) -> Iterator[Registry]:
    registry = Registry()

    class Answers(Handler):
        def do_GET(self) -> None:
            registry.requests.append((self.command, self.path, dict(self.headers)))
            path = urlsplit(self.path).path
            if path == "/token":
                self._send_token()
            elif registry.challenge and self.headers.get("Authorization") not in registry.tokens:
                url = f"{'https' if tls else 'http'}://{registry.host}"
                self.answer(status=401, WWW_Authenticate=registry.challenge.format(url=url))
            elif path in registry.redirects:
                self.answer(status=307, Location=registry.redirects[path])
            elif path in registry.answers:
                self._send(registry.answers[path], MANIFEST)
            elif "/manifests/" in path and (content := registry.manifests.get(path.rpartition("/")[2])):
                self._send(content, json.loads(content).get("mediaType", MANIFEST))
            elif "/blobs/" in path and (content := registry.blobs.get(path.rpartition("/")[2])) is not None:
                self._send_blob(content)
            else:
                self.send_error(404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def _send(self, content: bytes, media_type: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Docker-Content-Digest", digest_of(content))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def _send_blob(self, content: bytes) -> None:
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if registry.is_endless:
                self.end_headers()
                with suppress(OSError):
                    while True:
                        self.wfile.write(content or b"x")
                return
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : None if registry.cut_after is None else start + registry.cut_after])

        def _send_token(self) -> None:
            if registry.passwords and self.headers.get("Authorization") not in registry.passwords:
                self.send_error(401)
                return
            scope = parse_qs(urlsplit(self.path).query)["scope"][0]
            token = f"t-{scope}"
            registry.tokens.add(f"Bearer {token}")
            self._send(json.dumps({"token": token}).encode(), "application/json")

    with Site(Answers, tls) as server:
        registry.host = f"127.0.0.1:{server.server_port}"
        yield registry


def basic(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()
