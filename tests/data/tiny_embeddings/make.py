"""Makes the embedding model of the tests as an OpenVINO export: a BERT of 4,300 random weights with 65 tokens.

    pip install torch transformers openvino openvino-tokenizers
    python tests/data/tiny_embeddings/make.py [FOLDER]

It takes a few seconds. FOLDER is this one by default. Each letter is a token, and [CLS] and [SEP] enclose a text; the
vectors mean nothing.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path

import openvino
import openvino_tokenizers
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

WIDTH, CONTEXT = 16, 64
VOCABULARY = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *string.ascii_lowercase,
    *(f"##{letter}" for letter in string.ascii_lowercase),
    *".,?!'\"-:",
]
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class TokenVectors(torch.nn.Module):
    """The model with its inputs in a fixed order, and the token vectors as its only output."""

    def __init__(self, model: BertModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(INPUTS, tensors, strict=True))).last_hidden_state


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    model = TokenVectors(BertModel(config, add_pooling_layer=False).eval())
    example = tuple(torch.ones(2, 8, dtype=torch.long) for _ in INPUTS)
    exported = openvino.convert_model(model, example_input=example, input=[openvino.PartialShape([-1, -1])] * 3)
    for port, name in zip(exported.inputs, INPUTS, strict=True):
        port.get_tensor().set_names({name})
    exported.outputs[0].get_tensor().set_names({"last_hidden_state"})
    openvino.save_model(exported, folder / "openvino_model.xml", compress_to_fp16=True)
    tokenizer = BertTokenizerFast(
        vocab={token: number for number, token in enumerate(VOCABULARY)}, model_max_length=CONTEXT
    )
    openvino.save_model(openvino_tokenizers.convert_tokenizer(tokenizer), folder / "openvino_tokenizer.xml")
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
