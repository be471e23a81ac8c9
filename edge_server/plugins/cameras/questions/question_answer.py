"""Class `QuestionAnswer`, the text of a model about a picture, and its JSON for sinks and events."""

from __future__ import annotations

from typing import NamedTuple

from edge_server.protocol.frame_messages import FrameHeader

QUESTION_ANSWERED = "question.answered"
"""Kind of the event, and of the JSON object."""


class QuestionAnswer(NamedTuple):
    """The answer to a question about an object of one frame, which has the `header`.

    `track_id` is 0 for an object that is not tracked. `zones` are those that the object was in, of `required_zones` if
    the question has some. `time_s` is when the answer came, in seconds since 1970, `seconds` how long the model took.
    """

    source: str
    question: str
    model: str
    label: str
    track_id: int
    zones: tuple[str, ...]
    text: str
    time_s: float
    seconds: float
    header: FrameHeader
    clock: str

    def fields(self) -> dict[str, str | int | float]:
        """Return the answer as JSON, without its source, its frame and the time."""
        return {
            "question": self.question,
            "model": self.model,
            "label": self.label,
            "track_id": self.track_id,
            "zone": self.zones[0] if self.zones else "",
            "text": self.text,
            "seconds": round(self.seconds, 3),
        }
