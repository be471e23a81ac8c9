"""Assignment of frames to a sequence, for models that keep state from frame to frame: all frames of a stream share one
correlation id.

The sequence begins with the first frame that runs and ends with the stream. It does not include dropped frames. The
next frame begins it again if the server no longer knows the sequence (the camera paused for longer than
max_sequence_idle_microseconds, or the model was reloaded), or if another version serves by now. The correlation id is
the stream's id, or a hash of it if the model takes numbers.
"""

from __future__ import annotations

import hashlib

from edge_server.core.ensemble_and_sequence_spec import ControlKind
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import SequenceStep
from edge_server.core.tensor import DType

_LARGEST = 0x7FFFFFFF
"""Largest number that fits every type of correlation id, including INT32."""


def sequence_step(spec: ModelSpec, stream_id: str, *, has_begun: bool) -> SequenceStep | None:
    """Return the sequence step of the stream's next frame.

    Return None for a model without sequences, and for an iterative one: there each request is a sequence.
    """
    if spec.sequence is None or spec.sequence.is_iterative:
        return None
    return SequenceStep(correlation_id(spec, stream_id), is_start=not has_begun)


def correlation_id(spec: ModelSpec, stream_id: str) -> int | str:
    """Return the correlation id of a stream's frames. Two streams get the same number with a probability of one in two
    billion."""
    batching = spec.sequence
    takes_numbers = batching is not None and any(
        control.kind is ControlKind.CORRID and control.dtype is not DType.BYTES for control in batching.controls
    )
    if not takes_numbers:
        return stream_id
    digest = hashlib.blake2b(stream_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _LARGEST + 1
