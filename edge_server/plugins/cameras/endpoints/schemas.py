"""JSON schemas of the HTTP requests and responses of cameras, for the OpenAPI document. Imported for its first reader
only."""

from __future__ import annotations

from edge_server.frontends.http.response import MOTION_JPEG_TYPE
from edge_server.frontends.http.schemas import (
    ANY_OBJECT,
    BYTES,
    COUNT,
    NUMBER,
    TEXT,
    NamedSchema,
    OperationSchema,
    json_content,
    list_of,
    object_of,
)

MOTION_JPEG = OperationSchema(response={MOTION_JPEG_TYPE: {"schema": BYTES}})
PICTURE = OperationSchema(response={"image/jpeg": {"schema": BYTES}})

ZONES = OperationSchema(
    request=json_content(object_of((), zones=list_of(ANY_OBJECT), lines=list_of(ANY_OBJECT))),
)

_FRAME_STREAM = NamedSchema(
    "FrameStream",
    object_of(
        (),
        stream_id=TEXT,
        model=TEXT,
        version=COUNT,
        client=TEXT,
        priority=COUNT,
        weight=NUMBER,
        open_s=NUMBER,
        fps_in=NUMBER,
        fps_out=NUMBER,
        received=COUNT,
        answered=COUNT,
        late=COUNT,
        waiting=COUNT,
        dropped={**ANY_OBJECT, "additionalProperties": COUNT},
        age_p50_ms=NUMBER,
        age_p99_ms=NUMBER,
    ),
)
STREAMS = OperationSchema(response=json_content(object_of((), streams=list_of(_FRAME_STREAM))))
