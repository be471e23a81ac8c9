"""Makes a Whisper model as OpenVINO GenAI reads it: of random weights, or of a model in CTranslate2's format.

    pip install transformers openvino openvino-tokenizers
    python tests/data/tiny_whisper/make.py [FOLDER]                      # one layer of random weights, 1,700 tokens
    python tests/data/tiny_whisper/make.py FOLDER --model FOLDER_OF_AN_ENGLISH_MODEL

FOLDER is this one by default. The names of files, inputs and outputs are those of an export by optimum-intel. The
architecture is that of https://arxiv.org/abs/2212.04356; the file of CTranslate2 is described by the `model_spec.py` of
https://github.com/OpenNMT/CTranslate2 (version 6).
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo
from openvino_tokenizers import convert_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTEXT, TIMESTAMPS = 448, 1501
SPECIAL = ("endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startofprev", "notimestamps")
Weights = Mapping[str, Any]


class Layers:
    """Layers of one model. `weights`: arrays by CTranslate2's names; `heads`: of each attention."""

    def __init__(self, weights: Weights, heads: int) -> None:
        self.weights, self.heads = weights, heads
        self.width = weights["encoder/conv1/bias"].size

    def constant(self, name: str) -> Any:
        return op.convert(op.constant(self.weights[name].astype(np.float16)), "f32")

    def linear(self, value: Any, name: str, part: slice = slice(None)) -> Any:
        weight = self.weights[f"{name}/weight"][part].astype(np.float16)
        bias = self.weights[f"{name}/bias"][part].astype(np.float32)
        product = op.matmul(value, op.convert(op.constant(weight), "f32"), False, True)
        return op.add(product, op.constant(bias))

    def norm(self, value: Any, name: str) -> Any:
        unit = op.mvn(value, op.constant([-1]), True, 1e-5, "inside_sqrt")
        return op.add(op.multiply(unit, self.constant(f"{name}/gamma")), self.constant(f"{name}/beta"))

    def split(self, value: Any) -> Any:
        """(batch, length, width) -> (batch, heads, length, width of a head)"""
        shape = op.constant([0, 0, self.heads, self.width // self.heads])
        return op.transpose(op.reshape(value, shape, True), op.constant([0, 2, 1, 3]))

    def join(self, value: Any) -> Any:
        return op.reshape(op.transpose(value, op.constant([0, 2, 1, 3])), op.constant([0, 0, self.width]), True)

    def thirds(self, value: Any, name: str, first: int, count: int) -> list[Any]:
        width = self.width
        parts = (slice(index * width, (index + 1) * width) for index in range(first, first + count))
        return [self.split(self.linear(value, name, part)) for part in parts]

    def feed_forward(self, value: Any, name: str) -> Any:
        inner = op.gelu(self.linear(self.norm(value, f"{name}/layer_norm"), f"{name}/linear_0"), "erf")
        return op.add(value, self.linear(inner, f"{name}/linear_1"))

    def layer_names(self, part: str) -> Iterator[str]:
        index = 0
        while f"{part}/layer_{index}/ffn/layer_norm/beta" in self.weights:
            yield f"{part}/layer_{index}"
            index += 1


def encoder(layers: Layers) -> openvino.Model:
    mels = layers.weights["encoder/conv1/weight"].shape[1]
    features = named(op.parameter([-1, mels, 3000], np.float32), "input_features")
    value: Any = features
    for name, stride in (("encoder/conv1", 1), ("encoder/conv2", 2)):
        value = op.convolution(value, layers.constant(f"{name}/weight"), [stride], [1], [1], [1])
        value = op.gelu(op.add(value, op.unsqueeze(layers.constant(f"{name}/bias"), op.constant([0, 2]))), "erf")
    value = op.transpose(value, op.constant([0, 2, 1]))
    value = op.add(value, layers.constant("encoder/position_encodings/encodings"))
    for name in layers.layer_names("encoder"):
        attention = f"{name}/self_attention"
        query, key, content = layers.thirds(
            layers.norm(value, f"{attention}/layer_norm"), f"{attention}/linear_0", 0, 3
        )
        mixed = layers.join(op.scaled_dot_product_attention(query, key, content))
        value = layers.feed_forward(op.add(value, layers.linear(mixed, f"{attention}/linear_1")), f"{name}/ffn")
    result = op.result(layers.norm(value, "encoder/layer_norm"))
    return openvino.Model([named_output(result, "last_hidden_state")], [features], "whisper_encoder")


def decoder(layers: Layers) -> openvino.Model:
    tokens = named(op.parameter([-1, -1], np.int64), "input_ids")
    heard = named(op.parameter([-1, -1, layers.width], np.float32), "encoder_hidden_states")
    order = named(op.parameter([-1], np.int32), "beam_idx")
    axis = op.constant(0)
    embeddings = layers.constant("decoder/embeddings/weight")
    batch = op.gather(op.shape_of(tokens), op.constant([0]), axis)
    length = op.gather(op.shape_of(tokens), op.constant(1), axis)
    empty = op.broadcast(
        op.constant(np.float32(0)),
        op.concat([batch, op.constant([layers.heads, 0, layers.width // layers.heads])], 0),
    )
    sinks: list[Any] = []
    value: Any = None
    for index, name in enumerate(layers.layer_names("decoder")):
        past = []
        for kind in ("key", "value"):
            info = VariableInfo()
            info.data_shape = openvino.PartialShape([-1, layers.heads, -1, layers.width // layers.heads])
            info.data_type = openvino.Type.f32
            info.variable_id = f"past_key_values.{index}.decoder.{kind}present.{index}.decoder.{kind}"
            variable = Variable(info)
            past.append((variable, op.gather(op.read_value(empty, variable), order, axis)))
        if value is None:
            before = op.gather(op.shape_of(past[0][1]), op.constant(2), axis)
            total = op.add(before, length)
            places = op.range(before, total, op.constant(1), "i64")
            value = op.add(
                op.gather(embeddings, tokens, axis),
                op.gather(layers.constant("decoder/position_encodings/encodings"), places, axis),
            )
            is_visible = op.less_equal(
                op.unsqueeze(op.range(op.constant(0), total, op.constant(1), "i64"), op.constant(0)),
                op.unsqueeze(places, op.constant(1)),
            )
            mask = op.select(is_visible, op.constant(np.float32(0)), op.constant(np.float32(-1e9)))
            mask = op.unsqueeze(mask, op.constant([0, 1]))
        attention = f"{name}/self_attention"
        query, *new = layers.thirds(layers.norm(value, f"{attention}/layer_norm"), f"{attention}/linear_0", 0, 3)
        whole = []
        for (variable, old), added in zip(past, new, strict=True):
            whole.append(op.concat([old, added], 2))
            sinks.append(op.assign(whole[-1], variable))
        mixed = layers.join(op.scaled_dot_product_attention(query, *whole, mask))
        value = op.add(value, layers.linear(mixed, f"{attention}/linear_1"))
        attention = f"{name}/attention"
        query = layers.split(layers.linear(layers.norm(value, f"{attention}/layer_norm"), f"{attention}/linear_0"))
        key, content = layers.thirds(heard, f"{attention}/linear_1", 0, 2)
        # OpenVINO GenAI finds the layers that tell when a word is spoken by this name, and needs a mask there.
        mixed = op.scaled_dot_product_attention(query, key, content, op.constant(np.float32(0)))
        mixed.set_friendly_name(f"model.decoder.layers.{index}.encoder_attn/ScaledDotProductAttention")
        value = op.add(value, layers.linear(layers.join(mixed), f"{attention}/linear_2"))
        value = layers.feed_forward(value, f"{name}/ffn")
    logits = op.matmul(layers.norm(value, "decoder/layer_norm"), embeddings, False, True)
    result = named_output(op.result(logits), "logits")
    return openvino.Model([result], sinks, [tokens, heard, order], "whisper_decoder")


def named(parameter: Any, name: str) -> Any:
    parameter.set_friendly_name(name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def named_output(result: Any, name: str) -> Any:
    result.output(0).get_tensor().set_names({name})
    return result


def read_ctranslate2(path: Path) -> dict[str, Any]:
    """Return the arrays of a model file, also those that have no elements of float16 or float32, by name."""
    types = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
    arrays: dict[str, Any] = {}
    with path.open("rb") as file:

        def take(form: str) -> tuple[Any, ...]:
            return struct.unpack(form, file.read(struct.calcsize(form)))

        def text() -> str:
            return file.read(take("<H")[0])[:-1].decode()

        version, _, _, count = take("<I")[0], text(), take("<I"), take("<I")[0]
        if version != 6:
            raise SystemExit(f"{path}: expected version 6 of the format, got {version}")
        for _ in range(count):
            name, rank = text(), take("<B")[0]
            shape = take(f"<{rank}I")
            kind, size = take("<BI")
            arrays[name] = np.frombuffer(file.read(size), types[kind]).reshape(shape)
    return arrays


def random_weights(width: int, mels: int, vocabulary: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {}

    def linear(name: str, outputs: int, inputs: int, *kernel: int) -> None:
        arrays[f"{name}/weight"] = generator.normal(0, inputs**-0.5, (outputs, inputs, *kernel))
        arrays[f"{name}/bias"] = generator.normal(0, 0.1, outputs)

    def norm(name: str) -> None:
        arrays[f"{name}/layer_norm/gamma"], arrays[f"{name}/layer_norm/beta"] = np.ones(width), np.zeros(width)

    linear("encoder/conv1", width, mels, 3)
    linear("encoder/conv2", width, width, 3)
    arrays["encoder/position_encodings/encodings"] = generator.normal(0, 0.3, (1500, width))
    arrays["decoder/position_encodings/encodings"] = generator.normal(0, 0.3, (CONTEXT, width))
    arrays["decoder/embeddings/weight"] = generator.normal(0, 1, (vocabulary, width))
    for part in ("encoder", "decoder"):
        norm(part)
        attentions = ["self_attention"] + (["attention"] if part == "decoder" else [])
        for name in (f"{part}/layer_0/{attention}" for attention in attentions):
            norm(name)
            sizes = (3, 1) if name.endswith("self_attention") else (1, 2, 1)
            for index, size in enumerate(sizes):
                linear(f"{name}/linear_{index}", size * width, width)
        norm(f"{part}/layer_0/ffn")
        linear(f"{part}/layer_0/ffn/linear_0", 2 * width, width)
        linear(f"{part}/layer_0/ffn/linear_1", width, 2 * width)
    return arrays


def random_tokenizer() -> Any:
    """Return a tokenizer of bytes with Whisper's special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|{name}|>" for name in SPECIAL])
    return tokenizer


def save_model(folder: Path, weights: Weights, heads: int, tokenizer: Any, config: Mapping[str, Any]) -> None:
    """Write all files of an export. `config`: what generation_config.json has beside the numbers of special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = Layers(weights, heads)
    openvino.save_model(encoder(layers), folder / "openvino_encoder_model.xml", compress_to_fp16=False)
    openvino.save_model(decoder(layers), folder / "openvino_decoder_model.xml", compress_to_fp16=False)
    end = "<|endoftext|>"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, bos_token=end, unk_token=end, pad_token=end
    )
    pair = convert_tokenizer(fast, with_detokenizer=True, skip_special_tokens=True)
    for model, name in zip(pair, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(model, folder / f"openvino_{name}.xml", compress_to_fp16=False)
    number = {name: tokenizer.token_to_id(f"<|{name}|>") for name in SPECIAL}
    generation = {
        "eos_token_id": number["endoftext"],
        "pad_token_id": number["endoftext"],
        "bos_token_id": number["endoftext"],
        "decoder_start_token_id": number["startoftranscript"],
        "no_timestamps_token_id": number["notimestamps"],
        "prev_sot_token_id": number["startofprev"],
        "max_initial_timestamp_index": 50,
        **config,
    }
    mels = weights["encoder/conv1/weight"].shape[1]
    files = {
        "generation_config.json": generation,
        "config.json": {"model_type": "whisper", "max_source_positions": 1500, "num_mel_bins": mels},
        "preprocessor_config.json": {
            "feature_size": mels, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30, "n_fft": 400,
            "n_samples": 480000, "nb_max_frames": 3000,
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    if arguments.model is None:
        tokenizer = random_tokenizer()
        number = {name: tokenizer.token_to_id(f"<|{name}|>") for name in SPECIAL}
        weights = random_weights(16, 80, len(SPECIAL) + 256 + TIMESTAMPS)
        languages = {f"<|{name}|>": number[name] for name in ("en", "de")}
        tasks = {name: number[name] for name in ("translate", "transcribe")}
        config = {"is_multilingual": True, "max_length": 40, "lang_to_id": languages, "task_to_id": tasks,
                  "begin_suppress_tokens": [number["endoftext"]], "suppress_tokens": []}  # fmt: skip
        save_model(arguments.folder, weights, 2, tokenizer, config)
        return
    stated = json.loads((arguments.model / "config.json").read_bytes())
    weights = read_ctranslate2(arguments.model / "model.bin")
    config = {"is_multilingual": False, "max_length": CONTEXT, "begin_suppress_tokens": stated["suppress_ids_begin"],
              "suppress_tokens": stated["suppress_ids"], "alignment_heads": stated["alignment_heads"]}  # fmt: skip
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    save_model(arguments.folder, weights, int(weights["encoder/num_heads"]), tokenizer, config)


if __name__ == "__main__":
    main()
