"""Parser of the model version in a request: a decimal number, or "" for the version that the server chooses."""

from __future__ import annotations

from edge_server.errors import InvalidRequest

_MAX_VERSION = 2**63 - 1


def parse_version(text: str) -> int | None:
    """Return the version named by `text`, None for "". Raises InvalidRequest for other text than a decimal number."""
    if text == "":
        return None
    # int() would also accept digits of other scripts. 19 digits are enough for 64 bits.
    if not (text.isascii() and text.isdigit()):
        raise _invalid_version(text, "not a whole number of 0 or above")
    if len(text) > 19 or int(text) > _MAX_VERSION:
        raise _invalid_version(text, f"larger than {_MAX_VERSION}")
    return int(text)


def _invalid_version(text: str, reason: str) -> InvalidRequest:
    shown = text if len(text) <= 64 else text[:64] + "..."
    return InvalidRequest(f"failed to get model version from specified version string '{shown}' (details: {reason})")
