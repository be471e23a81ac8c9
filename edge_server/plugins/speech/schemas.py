"""JSON schemas of the requests and responses of the API for audio, for the OpenAPI document. Imported for its first
reader only."""

from __future__ import annotations

from edge_server.frontends.http.schemas import (
    ANY_OBJECT,
    BYTES,
    EVENT_STREAM,
    NUMBER,
    TEXT,
    OperationSchema,
    json_content,
    list_of,
    object_of,
)

SPEECH = OperationSchema(
    request=json_content(
        object_of(
            ("model", "input"),
            model=TEXT,
            input=TEXT,
            voice={"type": ["string", "object"]},
            response_format={**TEXT, "enum": ["wav", "pcm", "mp3", "opus", "aac", "flac"]},
            speed=NUMBER,
            stream_format={**TEXT, "enum": ["audio", "sse"]},
        )
    ),
    response={"audio/*": {"schema": BYTES}, **EVENT_STREAM},
)

AUDIO = OperationSchema(
    request={
        "multipart/form-data": {
            "schema": object_of(
                ("file", "model"),
                **{"timestamp_granularities[]": list_of(TEXT)},
                file=BYTES,
                model=TEXT,
                language=TEXT,
                prompt=TEXT,
                response_format=TEXT,
                temperature=NUMBER,
                stream=TEXT,
            )
        }
    },
    response={**json_content(ANY_OBJECT), **EVENT_STREAM, "text/plain": {"schema": TEXT}},
)
