"""Interface of token engines: adapters to libraries that continue several token sequences together, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

FinishReason: TypeAlias = Literal["stop", "length"]
"""Why a sequence ended: the model or a stop string ended it, or it reached its most tokens."""

Place: TypeAlias = Callable[[tuple[str | int, ...]], str]
"""Names a part of a JSON schema in messages, by the keys and indices from its root."""

ChatMessage: TypeAlias = Mapping[str, Any]
"""One message of a chat in OpenAI's form: `role` and `content`, and more for some templates."""

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
"""Of a chat template."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence is continued. The names are those of vLLM's SamplingParams.

    `temperature` 0 takes the most likely token. `seed` None is different each time. At most one of these constrains the
    text: it is JSON that fits `json_schema`, itself JSON; it is one of the texts of `choice`; all of it matches
    `regex`; or it fits `grammar`, rules in GBNF. `engine_grammar` is then what the engine's `write_grammar` returned.
    `has_logprobs`: the events must have the probabilities of tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    json_schema: str = ""
    has_logprobs: bool = False
    top_logprobs: int = 0
    """How many of the most likely tokens at each place the events must have, beside the chosen one."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits. -100 excludes a token."""
    choice: tuple[str, ...] = ()
    regex: str = ""
    grammar: str = ""
    engine_grammar: str = ""
    adapter: str = ""
    """Name of the LoRA adapter that changes the model for this sequence."""

    @property
    def constraint(self) -> str:
        """Name of the parameter that constrains the text, "" if none does."""
        return next((name for name in ("json_schema", "choice", "regex", "grammar") if getattr(self, name)), "")


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt as text, with the tags of its pictures. `text_tokens` counts its tokens without the tags.

    `images` are the files of the pictures, in the order of the tags. Their bounds are checked; see `pictures`.
    """

    text: str
    images: Sequence[bytes]
    text_tokens: int


TopLogprobs: TypeAlias = Sequence[tuple[str, float]]
"""Texts of tokens with the logarithms of their probabilities, the most likely first."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Result of one step for one sequence.

    `tokens` are the new ones, without the token that ends the text. `logprobs` has the natural logarithm of each new
    token's probability, `top_logprobs` the most likely tokens at its place with theirs. `finish` ends the sequence.
    `error` ends it too: the engine could not continue it. `cached_tokens`, with `finish`: tokens of the prompt that
    were not computed, None if the engine does not tell. `prompt_tokens`, with `finish`: all of an ImagePrompt.
    `text` is that of the new tokens, without incomplete characters, from an engine that decodes them itself. Such an
    engine may tell only the last token of a character; -1 stands for the others, with the logprob 0. With `logprobs` it
    gives the text of each token in `token_texts`.
    """

    sequence_id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: FinishReason | None = None
    error: str = ""
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    text: str | None = None
    top_logprobs: tuple[TopLogprobs, ...] = ()
    token_texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Use of the KV cache in blocks, and its size in bytes (0 before the engine has taken any memory)."""

    used_blocks: int
    total_blocks: int
    cache_bytes: int


class TokenEngine(Protocol):
    """One loaded model. `encode`, `decode`, `chat_prompt`, `write_grammar` and `wake` may be called from any thread,
    the others from one."""

    name: str
    """Library and version, for people."""
    block_tokens: int
    """Tokens of one block of the KV cache."""
    total_blocks: int
    max_context: int
    """Most tokens of prompt and answer together, 0 if the model states no limit."""
    vocabulary_size: int
    """Number of different tokens."""
    has_logit_bias: bool
    """Whether it can make tokens more or less likely: Sampling.logit_bias."""
    max_top_logprobs: int
    """Largest `top_logprobs`."""
    default_sampling: Sampling
    """What applies where a request says nothing."""
    adapters: Sequence[str]
    """Names of the LoRA adapters that a sequence may choose."""
    begin_tokens: Sequence[int]
    """Tokens that the model expects before a prompt that no chat template made."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text without added special tokens."""

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence. An incomplete character at the end becomes U+FFFD. Special tokens give
        nothing. One call for several sequences may cost much less than a call for each."""

    special_texts: Sequence[str]
    """Of the special tokens: `encode` finds them by their text, `decode` leaves them out."""

    def show_special_texts(self, texts: Sequence[str]) -> None:
        """Give these of `special_texts` as text from now on, in `decode` and in events. Called once, before `add`."""

    chat_template: str
    """Of the model, in Jinja; "" if it has none."""

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Return the prompt that the model's chat template makes with `variables`, such as `enable_thinking`. Raises
        InvalidRequest with the template's message."""

    def write_grammar(self, sampling: Sampling, place: Place) -> str:
        """Return the constraint of a sampling as a grammar for this engine. Raises BadSchema for what it cannot
        hold."""

    def add(self, sequence_id: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """Add a sequence; the next step takes it into the batch. `sequence_id` was never used before.

        Raises InvalidRequest if the engine cannot sample like this.
        """

    def cancel(self, sequence_id: int) -> None:
        """Remove a sequence; its blocks are free after the next step. Does nothing for one that has ended."""

    def step(self) -> list[TokenEvent] | None:
        """Continue all sequences by one step: a token each, or a part of a prompt. Return None if the step has not
        ended: the next call goes on with it."""

    def wake(self) -> None:
        """End a step that waits for an engine with threads of its own: there is a sequence to add."""

    def is_idle(self) -> bool:
        """Return whether there is no sequence to continue."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


@runtime_checkable
class ImageEngine(TokenEngine, Protocol):
    """A loaded vision-language model."""

    image_tag: str
    """Text that stands for a picture in an ImagePrompt. `{}` is the place of its number, if it has one."""
    takes_tokens: bool
    """Whether `add` works, too. Otherwise prompts without pictures are given as ImagePrompt."""

    def has_image_tag(self, text: str) -> bool:
        """Return whether a text has a tag of a picture, `image_tag` or the model's own."""

    def without_image_tags(self, text: str) -> str: ...

    def add_image_prompt(self, sequence_id: int, prompt: ImagePrompt, sampling: Sampling) -> None:
        """The same as `add`. `max_tokens` 0: as many as fit.

        Also raises InvalidRequest for a picture that cannot be read, and ContextTooLong for a prompt that is too long
        with its pictures.
        """


def schema_place(name: str, path: Sequence[str | int]) -> str:
    """Return the name of a part of a schema, such as `json_schema.properties.x.anyOf[1]`. `name` is the schema's."""
    return name + "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in path)
