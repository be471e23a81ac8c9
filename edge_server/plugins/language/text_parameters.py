"""List of request parameters for constrained text that other servers support and this one does not, so that requests
with them are refused.

All wires refuse them, so that no answer looks as if it obeyed.
"""

from __future__ import annotations

from collections.abc import Mapping

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # llama.cpp's and ollama's
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "format": (),
    "mirostat": (0,),
    "n_predict": (),
    "num_predict": (),
    "repeat_penalty": (1,),
    "return_progress": (False,),
    "timings_per_token": (False,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    # TensorRT-LLM's and TGI's
    "max_new_tokens": (),
    "stop_words": (),
}
"""Name -> values beside null that ask for nothing."""

SAME_AS: Mapping[str, str] = {
    **dict.fromkeys(
        ("guided_json", "guided_decoding", "structured_outputs", "format", "response_format"), "json_schema"
    ),
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "guided_regex": "regex",
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_completion_tokens"), "max_tokens"),
    "repeat_penalty": "repetition_penalty",
    "stop_words": "stop",
}  # fmt: skip
"""Name -> the sampling parameter that does the same, or comes near it."""
