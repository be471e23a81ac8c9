"""Makes lora/first.gguf and lora/second.gguf, two LoRA adapters of rank 2 for tiny.gguf with random numbers:
`python tests/data/tiny_llm/make_adapters.py`.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

WIDTH, RANK, LAYERS = 64, 2, 2
TEXT, FLOAT32 = 8, 6


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def make(path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    texts = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}
    metadata = b"".join(text(key) + struct.pack("<I", TEXT) + text(value) for key, value in texts.items())
    metadata += text("adapter.lora.alpha") + struct.pack("<If", FLOAT32, RANK)
    infos = data = b""
    count = 0
    for layer in range(LAYERS):
        for matrix in ("attn_q", "attn_output"):
            for name, shape in (("lora_a", (WIDTH, RANK)), ("lora_b", (RANK, WIDTH))):
                infos += text(f"blk.{layer}.{matrix}.weight.{name}") + struct.pack("<I2QIQ", 2, *shape, 0, len(data))
                data += random.standard_normal(shape[::-1], np.float32).tobytes()
                count += 1
    head = struct.pack("<4sIQQ", b"GGUF", 3, count, len(texts) + 1) + metadata + infos
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(head + bytes(-len(head) % 32) + data)


if __name__ == "__main__":
    for seed, name in enumerate(("first", "second")):
        make(Path(__file__).parent / f"lora/{name}.gguf", seed)
