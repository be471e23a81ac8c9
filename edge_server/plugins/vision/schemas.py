"""JSON schemas of the HTTP responses with the results of an image, for the OpenAPI document. Imported for its first
reader only."""

from __future__ import annotations

from edge_server.frontends.http.schemas import (
    COUNT,
    IMAGE,
    NUMBER,
    TEXT,
    NamedSchema,
    OperationSchema,
    json_content,
    list_of,
    object_of,
)

_PERCEPTION = NamedSchema(
    "Perception",
    object_of(
        (),
        model=TEXT,
        version=TEXT,
        width=COUNT,
        height=COUNT,
        classes=list_of(object_of((), index=COUNT, label=TEXT, score=NUMBER)),
        detections=list_of(
            object_of(
                (),
                x_min=NUMBER,
                y_min=NUMBER,
                x_max=NUMBER,
                y_max=NUMBER,
                score=NUMBER,
                class_index=COUNT,
                label=TEXT,
                keypoints=list_of(list_of(NUMBER)),
                rotated=object_of((), x=NUMBER, y=NUMBER, width=NUMBER, height=NUMBER, angle=NUMBER),
                text=TEXT,
                text_score=NUMBER,
                polygons={
                    **list_of(list_of(list_of(COUNT))),
                    "description": "Outlines [x, y] of the object's parts, if the model gives masks of objects.",
                },
            )
        ),
        mask=object_of(
            (),
            classes=list_of(object_of((), index=COUNT, label=TEXT, share=NUMBER)),
            png={**TEXT, "description": "Class of each pixel, one byte each, as base64."},
        ),
        map=object_of(
            (),
            kind={"type": "string", "enum": ["metric_depth", "relative_depth", "inverse_depth", "anomaly"]},
            height=COUNT,
            width=COUNT,
            minimum=NUMBER,
            maximum=NUMBER,
            score=NUMBER,
            png={**TEXT, "description": "One byte for each pixel, 0 the minimum and 255 the maximum, as base64."},
        ),
    ),
)
PERCEPTION = OperationSchema(request=IMAGE, response=json_content(_PERCEPTION))
