"""Engine for vision-language models on OpenVINO GenAI, which gets prompts as text and pictures as pixels.

The pipeline makes embeddings of a prompt's text and pictures, so it takes prompts as text alone. It knows a picture's
place by a tag (https://openvinotoolkit.github.io/openvino.genai, "Use image or video tags in prompt"). Checked against
openvino-genai 2026.4.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

from edge_server.errors import ContextTooLong, InvalidRequest
from edge_server.plugins.language.engines.openvino_engine import OpenVinoEngine
from edge_server.plugins.language.engines.pictures import decode_picture
from edge_server.plugins.language.engines.settings import LlmSettings
from edge_server.plugins.language.engines.token_engine import ImageEngine, ImagePrompt, Sampling, TokenEvent

_TAGS = re.compile(
    r"<ov_genai_image_\d+>|<image>(?:\./</image>)?|<\|image_\d+\|>|<\|vision_start\|><\|image_pad\|><\|vision_end\|>"
    r"|<start_of_image>|<\|image\|>"
)
"""OpenVINO GenAI's own tag of a picture, and those of the models that it reads."""
_RESERVED = ("<ov_genai_image_", "<ov_genai_video_")
_TOO_LONG = "'max_length' must be greater than the number of prompt tokens"


class OpenVinoVisionEngine(OpenVinoEngine, ImageEngine):
    """A pipeline with its tokenizer. See OpenVinoEngine. Texts are split into tokens by the pipeline."""

    image_tag = "<ov_genai_image_{}>"
    takes_tokens = False

    def __init__(self, path: Path, settings: LlmSettings) -> None:
        super().__init__(path, settings)
        self.special_texts = [*self.special_texts, *_RESERVED]
        # The pipeline adds the token of the beginning, if the tokenizer does; a chat template writes it, too.
        begin = str(self._tokenizer.get_bos_token())
        tokens = [int(token) for token in self._tokenizer.encode("x").input_ids.data.ravel()]
        self._begin_text = begin if begin and tokens[0] == self._tokenizer.get_bos_token_id() else ""

    def has_image_tag(self, text: str) -> bool:
        return _TAGS.search(text) is not None

    def without_image_tags(self, text: str) -> str:
        return _TAGS.sub("", text)

    def add_image_prompt(self, sequence_id: int, prompt: ImagePrompt, sampling: Sampling) -> None:
        images = [
            self._tensor(decode_picture(file, f"picture {index}")[None]) for index, file in enumerate(prompt.images)
        ]
        text = prompt.text.removeprefix(self._begin_text)
        config = self._config(sampling)
        config.apply_chat_template = False
        room = self.total_blocks * self.block_tokens
        config.max_length = min(room, self.max_context or room)
        if sampling.stop:
            # The sequence must end by itself: the pipeline does not count the prompt of one that is cancelled.
            config.stop_strings = set(sampling.stop)
            config.include_stop_str_in_output = True
        try:
            self._start(sequence_id, sampling, config, text, images)
        except InvalidRequest as error:
            if _TOO_LONG not in error.message:
                raise
        else:
            return
        raise ContextTooLong(f"the prompt is too long: expected less than {config.max_length} tokens with its pictures")

    def _read(self, sequence_id: int, handle: Any, end_tokens: Set[int]) -> TokenEvent | None:
        event = super()._read(sequence_id, handle, end_tokens)
        if event is None or event.finish is None:
            return event
        return dataclasses.replace(event, prompt_tokens=int(handle.get_vlm_perf_metrics().get_num_input_tokens()))
