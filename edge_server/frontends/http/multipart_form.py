"""Parser of multipart forms, as browsers and curl send files in them."""

from __future__ import annotations

import re
from itertools import islice, pairwise

from edge_server.errors import InvalidRequest
from edge_server.frontends.http.body_reader import Body

FORM_TYPE = "multipart/form-data"

MAX_PARTS = 16
"""Maximum number of parts of a form."""

_BOUNDARY = re.compile(r';[ \t]*boundary[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
"""The parameter of a Content-Type: a quoted text or a token. The standard library's email.message raises TypeError and
UnicodeEncodeError for some headers."""

_MAX_HEADERS_BYTES = 8 * 1024
"""Of a part. The rest is not read."""


def form_parts(body: Body, content_type: str) -> list[tuple[str, memoryview]]:
    """Return the parts of a form: the name of each, and its content as a view.

    Raises InvalidRequest for a malformed form and for more than MAX_PARTS parts.
    """
    given = _BOUNDARY.search(content_type)
    quoted, token = (None, "") if given is None else given.groups()
    text = token if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
    boundary = re.escape(text.encode("utf-8", "surrogateescape"))
    view = memoryview(body)
    delimiters = list(
        islice(re.finditer(rb"(?:\A|\r\n)--" + boundary + rb"(--)?[ \t]*(?=\r\n|\Z)", view), MAX_PARTS + 1)
    )
    is_closed = [bool(delimiter[1]) for delimiter in delimiters]
    malformed = InvalidRequest(
        f"a body of type {FORM_TYPE} must have 1 to {MAX_PARTS} parts with headers, and its boundary at the end"
    )
    if not boundary or len(delimiters) < 2 or is_closed != [False] * (len(delimiters) - 1) + [True]:
        raise malformed
    parts = []
    for this, following in pairwise(delimiters):
        # A part must have headers, as curl and browsers send them.
        headers = re.compile(rb"\r\n\r\n").search(view, this.end(), following.start())
        if headers is None:
            raise malformed
        lines = bytes(view[this.end() : headers.start()][:_MAX_HEADERS_BYTES])
        name = re.search(rb';[ \t]*name="([^"\r\n]*)"', lines)
        content = view[headers.end() : following.start()]
        parts.append(("" if name is None else name[1].decode("utf-8", "replace"), content))
    return parts
