"""Makes mmproj-tiny.gguf, by which ../tiny_llm/tiny.gguf takes pictures with llama.cpp: an encoder of random weights.

    pip install gguf
    python tests/data/tiny_mmproj/make.py [FOLDER]

FOLDER is this one by default. The architecture is LLaVA's (https://arxiv.org/abs/2304.08485), the names are those that
llama.cpp reads (https://github.com/ggml-org/llama.cpp, tools/mtmd). A picture becomes 16 vectors, which mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

WIDTH, INNER, LAYERS, HEADS = 16, 32, 2, 2
SIDE, PATCH = 32, 8
MODEL_WIDTH = 64
"""Of tiny.gguf."""


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    generator = np.random.default_rng(7)
    writer = gguf.GGUFWriter(folder / "mmproj-tiny.gguf", "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", "mlp")
    numbers = {
        "image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": INNER,
        "projection_dim": MODEL_WIDTH, "block_count": LAYERS, "attention.head_count": HEADS,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.25] * 3)

    def add(name: str, *shape: int, scale: float) -> None:
        writer.add_tensor(name, generator.normal(0, scale, shape).astype(np.float32))

    def add_linear(name: str, outputs: int, inputs: int) -> None:
        add(f"{name}.weight", outputs, inputs, scale=inputs**-0.5)
        add(f"{name}.bias", outputs, scale=0.1)

    add("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH, scale=0.1)
    add("v.position_embd.weight", (SIDE // PATCH) ** 2, WIDTH, scale=0.3)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add_linear(f"v.blk.{layer}.{name}", WIDTH, WIDTH)
        for name in ("ln1", "ln2"):
            writer.add_tensor(f"v.blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
            writer.add_tensor(f"v.blk.{layer}.{name}.bias", np.zeros(WIDTH, np.float32))
        add_linear(f"v.blk.{layer}.ffn_up", INNER, WIDTH)
        add_linear(f"v.blk.{layer}.ffn_down", WIDTH, INNER)
    add_linear("mm.0", MODEL_WIDTH, WIDTH)
    add_linear("mm.2", MODEL_WIDTH, MODEL_WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
