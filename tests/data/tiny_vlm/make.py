"""Makes a vision-language model of random weights as OpenVINO GenAI reads it.

    pip install transformers openvino openvino-tokenizers
    python tests/data/tiny_vlm/make.py [FOLDER]

FOLDER is this one by default. The names of files, inputs and outputs are those of an export by optimum-intel of the
architecture LLaVA (https://arxiv.org/abs/2304.08485). A picture becomes 16 tokens. Texts and answers mean nothing, but
an answer depends on the picture and on the prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo
from openvino_tokenizers import convert_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WIDTH, HEADS, CONTEXT, LAYERS = 32, 2, 1024, 2
SIDE, PATCH = 32, 8
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>")
TEMPLATE = (
    "{{ '<|endoftext|>' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RANDOM = np.random.default_rng(5)


def random(*shape: int, scale: float | None = None) -> Any:
    """Return a constant of random numbers, by default scaled for a product over the second axis."""
    scale = shape[-1] ** -0.5 if scale is None else scale
    return op.convert(op.constant(RANDOM.normal(0, scale, shape).astype(np.float16)), "f32")


def named(node: Any, name: str) -> Any:
    node.set_friendly_name(name)
    node.output(0).get_tensor().set_names({name})
    return node


def norm(value: Any) -> Any:
    return op.mvn(value, op.constant([-1]), True, 1e-5, "inside_sqrt")


def text_embeddings(embeddings: Any) -> openvino.Model:
    tokens = named(op.parameter([-1, -1], np.int64), "input")
    result = op.result(op.gather(embeddings, tokens, op.constant(0)))
    return openvino.Model([named(result, "inputs_embeds")], [tokens], "text_embeddings")


def vision_embeddings() -> openvino.Model:
    pixels = named(op.parameter([-1, 3, SIDE, SIDE], np.float32), "pixel_values")
    patches = op.convolution(pixels, random(WIDTH, 3, PATCH, PATCH, scale=0.1), [PATCH] * 2, [0, 0], [0, 0], [1, 1])
    count = (SIDE // PATCH) ** 2
    value = op.transpose(op.reshape(patches, op.constant([0, WIDTH, count]), True), op.constant([0, 2, 1]))
    value = norm(op.add(value, random(1, count, WIDTH, scale=0.3)))
    return openvino.Model([named(op.result(value), "last_hidden_state")], [pixels], "vision_embeddings")


def language_model(vocabulary: int) -> openvino.Model:
    embeds = named(op.parameter([-1, -1, WIDTH], np.float32), "inputs_embeds")
    mask_input = named(op.parameter([-1, -1], np.int64), "attention_mask")
    places = named(op.parameter([-1, -1], np.int64), "position_ids")
    order = named(op.parameter([-1], np.int32), "beam_idx")
    axis, head = op.constant(0), WIDTH // HEADS
    batch = op.gather(op.shape_of(embeds), op.constant([0]), axis)
    empty = op.broadcast(op.constant(np.float32(0)), op.concat([batch, op.constant([HEADS, 0, head])], 0))
    total = op.gather(op.shape_of(mask_input), op.constant(1), axis)
    length = op.gather(op.shape_of(embeds), op.constant(1), axis)
    rows = op.range(op.subtract(total, length), total, op.constant(1), "i64")
    columns = op.range(op.constant(0), total, op.constant(1), "i64")
    is_visible = op.less_equal(op.unsqueeze(columns, op.constant(0)), op.unsqueeze(rows, op.constant(1)))
    mask = op.select(is_visible, op.constant(np.float32(0)), op.constant(np.float32(-1e9)))
    mask = op.unsqueeze(mask, op.constant([0, 1]))
    value: Any = op.add(embeds, op.gather(random(CONTEXT, WIDTH, scale=0.3), places, axis))
    sinks = []
    for layer in range(LAYERS):
        kinds = []
        for _ in ("query", "key", "value"):
            projected = op.matmul(norm(value), random(WIDTH, WIDTH, scale=0.4), False, True)
            split = op.reshape(projected, op.constant([0, 0, HEADS, head]), True)
            kinds.append(op.transpose(split, op.constant([0, 2, 1, 3])))
        whole = []
        for kind, added in zip(("key", "value"), kinds[1:], strict=True):
            info = VariableInfo()
            info.data_shape = openvino.PartialShape([-1, HEADS, -1, head])
            info.data_type = openvino.Type.f32
            info.variable_id = f"past_key_values.{layer}.{kind}present.{layer}.{kind}"
            variable = Variable(info)
            past = op.gather(op.read_value(empty, variable), order, axis)
            whole.append(op.concat([past, added], 2))
            sinks.append(op.assign(whole[-1], variable))
        mixed = op.scaled_dot_product_attention(kinds[0], *whole, mask)
        joined = op.reshape(op.transpose(mixed, op.constant([0, 2, 1, 3])), op.constant([0, 0, WIDTH]), True)
        value = op.add(value, op.matmul(joined, random(WIDTH, WIDTH), False, True))
        inner = op.gelu(op.matmul(norm(value), random(2 * WIDTH, WIDTH), False, True), "erf")
        value = op.add(value, op.matmul(inner, random(WIDTH, 2 * WIDTH), False, True))
    logits = op.matmul(norm(value), random(vocabulary, WIDTH), False, True)
    result = named(op.result(logits), "logits")
    return openvino.Model([result], sinks, [embeds, mask_input, places, order], "language_model")


def make_tokenizer() -> Any:
    """Return a tokenizer of bytes, which adds the token of the beginning that the chat template writes, too."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    begin = SPECIAL[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return tokenizer


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    vocabulary = tokenizer.get_vocab_size()
    parts = {
        "text_embeddings": text_embeddings(random(vocabulary, WIDTH, scale=1.0)),
        "vision_embeddings": vision_embeddings(),
        "language": language_model(vocabulary),
    }
    for name, model in parts.items():
        openvino.save_model(model, folder / f"openvino_{name}_model.xml", compress_to_fp16=False)
    end = "<|im_end|>"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=end, pad_token=SPECIAL[0]
    )
    fast.chat_template = TEMPLATE
    pair = convert_tokenizer(fast, with_detokenizer=True, skip_special_tokens=True)
    for model, name in zip(pair, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(model, folder / f"openvino_{name}.xml", compress_to_fp16=False)
    files = {
        "config.json": {
            "model_type": "llava",
            "text_config": {
                "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS, "max_position_embeddings": CONTEXT,
                "vocab_size": vocabulary,
            },
            "vision_config": {"image_size": SIDE, "patch_size": PATCH, "hidden_size": WIDTH},
        },
        "generation_config.json": {"eos_token_id": tokenizer.token_to_id(end)},
        "preprocessor_config.json": {
            "crop_size": {"height": SIDE, "width": SIDE}, "size": {"shortest_edge": SIDE},
            "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25],
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
