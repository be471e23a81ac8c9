"""Token engine on llama.cpp's server for a GGUF file with a projector for pictures (`mmproj*.gguf`) beside it.

The server takes a prompt with pictures as text, with a marker at the place of each
(https://github.com/ggml-org/llama.cpp, tools/server/README.md, `multimodal_data`). Checked against xllamacpp
2026.10.11549.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_server.plugins.language.engines.llama_cpp_engine import LlamaCppEngine, PendingSequence
from edge_server.plugins.language.engines.pictures import decode_picture
from edge_server.plugins.language.engines.settings import LlmSettings
from edge_server.plugins.language.engines.token_engine import ImageEngine, ImagePrompt, Sampling, TokenEvent


class LlamaCppVisionEngine(LlamaCppEngine, ImageEngine):
    """A model with its tokenizer and projector. See LlamaCppEngine.

    A sequence with pictures starts when the KV cache has room for all its tokens, as far as they are known, and is
    never stopped.
    """

    image_tag = "<__media__>"
    takes_tokens = True

    def __init__(
        self, path: Path, projector: Path, settings: LlmSettings, block_tokens: int, bytes_per_token: int,
        device_id: int | None = None,
    ) -> None:  # fmt: skip
        self._projector = projector
        super().__init__(path, settings, block_tokens, bytes_per_token, device_id)
        room = self.total_blocks * self.block_tokens
        self._most = min(room, self.max_context or room)
        self.special_texts = [*self.special_texts, self.image_tag]
        self._marker = str(self._call("GET", "/props")["media_marker"])

    def has_image_tag(self, text: str) -> bool:
        return self.image_tag in text

    def without_image_tags(self, text: str) -> str:
        return text.replace(self.image_tag, "")

    def add_image_prompt(self, sequence_id: int, prompt: ImagePrompt, sampling: Sampling) -> None:
        known_tokens = prompt.text_tokens + len(prompt.images)
        sampling = replace(sampling, max_tokens=sampling.max_tokens or max(self._most - known_tokens, 1))
        files = [_to_ppm(file, f"picture {index}") for index, file in enumerate(prompt.images)]
        body = {
            # The server adds the first token itself.
            "prompt_string": prompt.text.removeprefix(self._begin_text).replace(self.image_tag, self._marker),
            "multimodal_data": [base64.b64encode(file).decode() for file in files],
        }
        self._waiting.append(_ImageSequence(sequence_id, body, known_tokens, sampling, self._options(sampling)))

    def _parameters(self, *arguments: Any) -> Any:
        parameters = super()._parameters(*arguments)
        parameters.mmproj.path = str(self._projector)
        if self._device_id is not None:
            parameters.mmproj_device = f"CUDA{self._device_id}"
        return parameters

    def _read(self, sequence: PendingSequence) -> TokenEvent | None:
        event = super()._read(sequence)
        if not isinstance(sequence, _ImageSequence):
            return event
        if sequence.prompt_tokens >= self._most:
            self.cancel(sequence.sequence_id)
            problem = (
                f"the prompt is too long: expected less than {self._most} tokens with its pictures, got "
                f"{sequence.prompt_tokens}"
            )
            return TokenEvent(sequence.sequence_id, error=problem)
        if event is None or event.error:
            return event
        surplus = sequence.total_tokens - self._most
        if surplus > 0 or (surplus == 0 and event.finish is None):
            self.cancel(sequence.sequence_id)
            event = self._without_last_tokens(event, surplus)
        return replace(event, prompt_tokens=sequence.prompt_tokens)

    def _without_last_tokens(self, event: TokenEvent, count: int) -> TokenEvent:
        """Return the event as the last of its sequence, without tokens that came after the context was full."""
        if not count:
            return replace(event, finish="length")
        kept = len(event.tokens) - count
        # Of a character cut in two nothing is left.
        text = self.decode([[token for token in event.tokens[:kept] if token >= 0]])[0].rstrip("\ufffd")
        return replace(
            event,
            tokens=event.tokens[:kept],
            logprobs=event.logprobs[:kept],
            top_logprobs=event.top_logprobs[:kept],
            text=text,
            finish="length",
        )


class _ImageSequence(PendingSequence):
    """A sequence with pictures. `prompt_tokens` is what is known, until the server tells it."""

    is_stoppable = False

    def __init__(
        self, sequence_id: int, body: dict[str, Any], prompt_tokens: int, sampling: Sampling, options: dict[str, Any]
    ) -> None:
        super().__init__(sequence_id, [], sampling, options)
        self._body = body
        self.prompt_tokens = prompt_tokens

    @property
    def request_prompt(self) -> dict[str, Any]:
        return self._body

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def needed_tokens(self) -> int:
        return self.prompt_tokens + self.sampling.max_tokens

    def take(self, message: Any) -> None:
        self.prompt_tokens = message["tokens_evaluated"]
        super().take(message)


def _to_ppm(file: bytes, title: str) -> bytes:
    """Return a picture in the format PPM, which llama.cpp reads: its decoder knows no WebP and no EXIF rotation."""
    pixels = decode_picture(file, title)
    height, width, _ = pixels.shape
    return b"P6 %d %d 255\n%b" % (width, height, pixels.tobytes())
