"""Error texts, without secrets, for cameras, sinks and questions: why a connection fails, and the nearest class for an
unknown class name."""

from __future__ import annotations

import logging
import socket
import ssl
import traceback
from collections.abc import Sequence

from edge_server.config.setting import nearest
from edge_server.errors import EdgeServerError

_LOG = logging.getLogger(__name__)

MAX_CLASSES_SHOWN, MAX_CLASS_CHARACTERS = 10, 40


def failure_reason(title: str, error: Exception) -> str:
    """Return the reason for the report of `title`, e.g. "source 'door'". Logs the stack of an unexpected error, without
    its text: it may hold a URL with a password."""
    if isinstance(error, EdgeServerError):
        return error.message
    reason = f"internal error: {type(error).__name__}"
    stack = "".join(traceback.format_tb(error.__traceback__))
    _LOG.error("%s failed unexpectedly: %s\n%s", title, reason, stack)
    return reason


def connection_failure(error: Exception, host: str | None, timeout_s: float) -> str:
    """Return why a connection to `host` was not made or broke. Texts of exceptions may hold its URL, so only known ones
    are used."""
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not valid: {error.verify_message}"
    if isinstance(error, socket.gaierror):
        return f"the host name '{host}' is not known: {error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"the connection broke ({type(error).__name__})"


def unknown_class_hint(label: str, known: Sequence[str]) -> str:
    """Return the nearest known class as `, did you mean '...'?`; if none is near, the first classes as `; ...`."""
    hint = nearest(label, known)
    if hint or not known:
        return hint
    shown = [f"'{name[:MAX_CLASS_CHARACTERS]}'" for name in known[:MAX_CLASSES_SHOWN]]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return f"; the classes are {', '.join(shown)}{more}"
