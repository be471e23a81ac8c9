"""Check of bearer tokens: reads the file of --auth-tokens-file, and finds what the token of a request allows.

The file has one line for each token: a name, the SHA-256 of the token in hexadecimal digits, and the categories that
the token allows, separated by commas; `*` means all. Empty lines and lines that begin with # are ignored.

    alice      9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  model-repository,logging
    camera-7   60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11d7fa2  inference
    protect    inference

With such a file, requests that change the server need a token or a shared key. Any other category needs one if a line
names it. `*` names all except health, metrics, reflection and openapi: load balancers, Prometheus and tools have no
token. A `protect` line names categories without a token, so that they stay closed when their last token is revoked. A
category that a line has ever named stays closed until a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from edge_server.config import CATEGORIES, OPEN_CATEGORIES
from edge_server.errors import EdgeServerError, Forbidden, ServingFault, Unauthenticated
from edge_server.frontends.access_control import ORDERING_CATEGORIES
from edge_server.telemetry.metrics_page import Family

_MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class _Token(NamedTuple):
    """A line of the file."""

    name: str
    digest: bytes
    categories: frozenset[str]


class Tokens:
    """The tokens of the file, and counts of their requests. Thread-safe. Without a file, no request needs a token."""

    def __init__(self, path: str = "") -> None:
        """Load the file. Raises ServingFault when it cannot be read or a line is wrong."""
        self._tokens: tuple[_Token, ...] = ()
        self._protected: frozenset[str] = frozenset()
        self._watchers: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._allowed: Counter[tuple[str, str]] = Counter()
        self._refused: Counter[str] = Counter()
        if path:
            self.load(path)

    @property
    def is_used(self) -> bool:
        """Whether a file has been loaded."""
        return bool(self._protected)

    def load(self, path: str) -> frozenset[str]:
        """Replace the tokens by those of the file. Raises ServingFault, and changes nothing then.

        Return the categories that lines named before, but none names now. They still need a token, until a restart.
        """
        self._tokens, named = _read_tokens(path)
        no_longer_named = self._protected - named
        # No reading opens a category: who revokes the last token of one wants fewer callers, not all of them.
        self._protected |= named
        for watcher in self._watchers:
            watcher()
        return no_longer_named

    def on_change(self, watcher: Callable[[], object]) -> None:
        """Call `watcher`, on any thread, after each load of the file."""
        self._watchers.append(watcher)

    def requires_token(self, category: str) -> bool:
        """Return whether requests of a category need a token."""
        return category in self._protected

    def admit(self, authorization: Sequence[str | bytes], category: str) -> str:
        """Return the token's name as `name_of` does, and count the request."""
        try:
            name = self.name_of(authorization, category)
        except EdgeServerError:
            self.count_refused(category)
            raise
        self.count(name, category)
        return name

    def name_of(self, authorization: Sequence[str | bytes], category: str) -> str:
        """Return the name of the token in a request's Authorization headers.

        Raises Unauthenticated without exactly one known token, Forbidden when the token does not allow `category`.
        """
        found = self._find(authorization)
        if found is not None and category in found.categories:
            return found.name
        if found is None:
            raise Unauthenticated(f"'{category}' needs a header 'Authorization: Bearer <token>' with a known token")
        raise Forbidden(f"the token '{found.name}' does not open '{category}'")

    def count(self, name: str, category: str) -> None:
        """Count a request that a token allows."""
        with self._lock:
            self._allowed[name, category] += 1

    def count_refused(self, category: str) -> None:
        """Count a request refused without a valid token."""
        with self._lock:
            self._refused[category] += 1

    def families(self) -> list[Family]:
        """Return the metrics."""
        allowed = Family("edge_auth_requests_total", "counter", "Requests allowed by a bearer token, by its name")
        refused = Family("edge_auth_refused_total", "counter", "Requests refused without a valid bearer token")
        with self._lock:
            for (name, category), count in self._allowed.items():
                allowed.add({"name": name, "category": category}, count)
            for category, count in self._refused.items():
                refused.add({"category": category}, count)
        return [allowed, refused]

    def _find(self, authorization: Sequence[str | bytes]) -> _Token | None:
        if len(authorization) != 1:
            return None
        given = authorization[0]
        text = given.encode("utf-8", "surrogateescape") if isinstance(given, str) else given
        scheme, _, token = text.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        found = None
        # Compare with all of them, each in constant time: the duration then tells nothing about a guess.
        for known in self._tokens:
            if hmac.compare_digest(known.digest, digest):
                found = known
        return found if scheme.lower() == b"bearer" else None


def _read_tokens(path: str) -> tuple[tuple[_Token, ...], frozenset[str]]:
    """Return the tokens, and the categories that need one."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ServingFault(f"the file of tokens '{path}' cannot be read: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ServingFault(f"the file of tokens '{path}' has more than {_MAX_FILE_BYTES} bytes")
    tokens: dict[bytes, _Token] = {}
    named: set[str] = set()
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        try:
            if len(fields) == 2 and fields[0] == "protect":
                categories = _parse_categories(*fields)
            else:
                token = _parse_token(fields)
                if token.digest in tokens:
                    raise ValueError(f"the same token as '{tokens[token.digest].name}'")
                tokens[token.digest] = token
                categories = token.categories
        except ValueError as error:
            raise ServingFault(f"'{path}' line {number}: {error}") from None
        named |= categories - {"health", *OPEN_CATEGORIES} if fields[-1] == "*" else categories
    if not named:
        # A full disk leaves such a file. Taken as "no tokens", it would open categories at the next start.
        raise ServingFault(
            f"the file of tokens '{path}' has no line: expected one for each token, or 'protect <category>,...'"
        )
    return tuple(tokens.values()), frozenset(named.union(ORDERING_CATEGORIES))


def _parse_token(fields: Sequence[str]) -> _Token:
    """Return the token of a line. Raises ValueError without the digest, which could be the token itself by mistake."""
    if len(fields) != 3:
        raise ValueError("expected three words: <name> <SHA-256 of the token> <category>,...")
    name, digest, listed = fields
    if not _NAME.fullmatch(name):
        raise ValueError("expected a name of 1 to 64 letters, digits and . _ @ -")
    if not _DIGEST.fullmatch(digest.lower()):
        raise ValueError(f"'{name}': expected the SHA-256 of the token, 64 hexadecimal digits")
    return _Token(name, bytes.fromhex(digest), _parse_categories(name, listed))


def _parse_categories(name: str, listed: str) -> frozenset[str]:
    """Return the categories of a list, all for *. Raises ValueError for an unknown one."""
    categories = frozenset(CATEGORIES if listed == "*" else listed.split(","))
    for category in sorted(categories):
        if category not in CATEGORIES:
            raise ValueError(f"'{name}': unknown category '{category[:40]}', expected * or of {', '.join(CATEGORIES)}")
    return categories
