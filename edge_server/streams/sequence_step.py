"""Sequence step of a frame: a stream to a sequence model is one sequence.

It begins with the first frame that is run and ends with the stream; frames that were dropped are no part of it. Where
the server no longer knows it (the camera paused for longer than max_sequence_idle_microseconds, or the model was
loaded anew), it begins again with the next frame. Its correlation id is the stream's id, or a number made from that
where the model takes numbers.
"""

from __future__ import annotations

import hashlib

from edge_server.core.composition_spec import ControlKind
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import SequenceStep
from edge_server.core.tensor import DType

_LARGEST = 0x7FFFFFFF
"""What fits any type that a correlation id may have, INT32 among them."""


def step(spec: ModelSpec, stream_id: str, *, has_begun: bool) -> SequenceStep | None:
    """Return the sequence step of the stream's next frame; None for a model without sequences, or for
    which each request is one."""
    if spec.sequence is None or spec.sequence.is_iterative:
        return None
    return SequenceStep(correlation_id(spec, stream_id), is_start=not has_begun)


def correlation_id(spec: ModelSpec, stream_id: str) -> int | str:
    """Return the id under which the model gets a stream's frames. Two streams may meet in one number, by a chance of
    one in two thousand millions."""
    batching = spec.sequence
    takes_numbers = batching is not None and any(
        control.kind is ControlKind.CORRID and control.dtype is not DType.BYTES for control in batching.controls
    )
    if not takes_numbers:
        return stream_id
    digest = hashlib.blake2b(stream_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _LARGEST + 1
