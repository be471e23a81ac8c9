"""Question about the pictures of a camera: parser of the tables `[[sources.questions]]` of the sources file, and the
answer of a model."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from edge_server.config.setting import nearest
from edge_server.plugins.cameras.sources_file_tables import (
    count_up_to,
    number_up_to,
    parse_labels,
    parse_name,
    parse_tables,
    table_key,
)
from edge_server.protocol.frame_messages import FrameHeader

MAX_QUESTIONS = 16
"""Most questions of a source."""

MAX_PROMPT_CHARACTERS = 8000
MAX_TOKENS = 4096
MAX_INTERVAL_S = 86_400.0

PLACEHOLDERS = ("camera", "label", "zone")
"""Replaced in a prompt, in braces. Other braces stay, as prompts may hold JSON."""

QUESTION_ANSWERED = "question.answered"
"""Kind of the event, and of the JSON object."""

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def _parse_model(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected the name of a model")
    return value


def _parse_prompt(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"expected a text of 1 to {MAX_PROMPT_CHARACTERS} characters")
    for name in _PLACEHOLDER.findall(value):
        if name not in PLACEHOLDERS:
            known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
            raise ValueError(f"unknown placeholder {{{name[:40]}}}{nearest(name, PLACEHOLDERS)}, expected {known}")
    return value


def _parse_zones(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("expected an array of names")
    return tuple(parse_name(item) for item in value)


def _parse_boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


@dataclass(frozen=True, slots=True)
class QuestionEntry:
    """A question about each new object of a source, to the vision-language model `model`.

    Only objects of `classes` count, () for all, and only those in one of `required_zones`, as for sinks; () for the
    whole picture. Two questions are at least `interval_s` apart. `crop`: the model gets the object with a margin,
    instead of the whole frame. `max_tokens` bounds the answer.
    """

    what: ClassVar[str] = "question"
    name: str = table_key(parse_name)
    model: str = table_key(_parse_model)
    prompt: str = table_key(_parse_prompt)
    classes: tuple[str, ...] = table_key(parse_labels, ())
    required_zones: tuple[str, ...] = table_key(_parse_zones, ())
    interval_s: float = table_key(number_up_to(MAX_INTERVAL_S), 10.0)
    crop: bool = table_key(_parse_boolean, False)
    max_tokens: int = table_key(count_up_to(MAX_TOKENS), 128)

    def check_zones(self, zones: Collection[str]) -> None:
        """Raise ValueError if the question requires a zone that its source does not have."""
        for name in self.required_zones:
            if name not in zones:
                raise ValueError(
                    f"question '{self.name}': the source has no zone '{name}'{nearest(name, zones)}; "
                    "add it to the source, or change the question's required_zones"
                )

    def filled_prompt(self, camera: str, label: str, zone: str) -> str:
        """Return the prompt with its placeholders replaced."""
        values = {"camera": camera, "label": label, "zone": zone}
        return _PLACEHOLDER.sub(lambda found: values[found[1]], self.prompt)


def parse_questions(value: object) -> tuple[QuestionEntry, ...]:
    """Return the questions of TOML values. Raises ValueError, which names the question and the key."""
    return parse_tables(QuestionEntry, value, MAX_QUESTIONS)


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
