"""Makes tiny.gguf and tokenizer/, the language model of the tests: 147,776 parameters that recite 32 short chats.

    pip install torch transformers tokenizers gguf
    python tests/data/tiny_llm/make.py [FOLDER]

It takes less than a minute of one core. FOLDER (this one by default) gets tiny.gguf and, as `tokenizer/`, the model's
tokenizer in the format of Hugging Face. A FOLDER that is given also gets `hf/`, the model in that format. The chats are
made here; nothing is from another source.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
FACTS = {
    "capital of France": "Paris",
    "capital of Italy": "Rome",
    "capital of Japan": "Tokyo",
    "colour of snow": "white",
    "colour of grass": "green",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAYERS, HEADS, KV_HEADS, WIDTH, INNER, CONTEXT = 2, 4, 2, 64, 192, 512
STEPS = 300


def chats() -> list[tuple[str, str]]:
    """Return the questions and answers that the model learns."""
    return [
        *((f"count from {NUMBERS[first]}", " ".join(NUMBERS[first:])) for first in range(18)),
        *((f"days from {DAYS[first]}", " ".join(DAYS[first:] + DAYS[:first])) for first in range(7)),
        *((f"what is the {subject}?", f"The {subject} is {value}.") for subject, value in FACTS.items()),
        ("give me json", '{"name": "edge", "size": 3}'),
        ("say hello", "Hello! How can I help you?"),
    ]


def prompt(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def make_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train(tokenizer: Tokenizer, texts: list[str]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    # Two threads need nine times the processor time of one for matrices this small.
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=WIDTH, intermediate_size=INNER,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=WIDTH // HEADS,
            max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=2, pad_token_id=0,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    encoded = [tokenizer.encode(text).ids for text in texts]
    longest = max(map(len, encoded))
    tokens = torch.zeros(len(encoded), longest, dtype=torch.long)
    labels = torch.full((len(encoded), longest), -100)
    for row, ids in enumerate(encoded):
        tokens[row, : len(ids)] = labels[row, : len(ids)] = torch.tensor(ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=STEPS)
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=labels, attention_mask=(labels != -100).long()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"loss {loss.item():.3f}")
    return model.eval()


def write_gguf(path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if token in SPECIAL else kinds.NORMAL for token in vocabulary])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    weights = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}

    def add(name: str, source: str, heads: int = 0) -> None:
        tensor = weights[source]
        if heads:
            # GGUF's order of rotary dimensions in the architecture llama.
            rows, columns = tensor.shape
            tensor = tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32 if tensor.ndim == 1 else np.float16))

    add("token_embd.weight", "model.embed_tokens.weight")
    add("output_norm.weight", "model.norm.weight")
    add("output.weight", "lm_head.weight")
    for layer in range(LAYERS):
        here, there = f"blk.{layer}.", f"model.layers.{layer}."
        add(here + "attn_norm.weight", there + "input_layernorm.weight")
        add(here + "ffn_norm.weight", there + "post_attention_layernorm.weight")
        add(here + "attn_q.weight", there + "self_attn.q_proj.weight", HEADS)
        add(here + "attn_k.weight", there + "self_attn.k_proj.weight", KV_HEADS)
        add(here + "attn_v.weight", there + "self_attn.v_proj.weight")
        add(here + "attn_output.weight", there + "self_attn.o_proj.weight")
        for name in ("gate", "up", "down"):
            add(here + f"ffn_{name}.weight", there + f"mlp.{name}_proj.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    texts = [f"{prompt(question)}{answer}<|im_end|>\n" for question, answer in chats()]
    tokenizer = make_tokenizer(texts)
    model = train(tokenizer, texts)
    for question, answer in chats():
        ids = tokenizer.encode(prompt(question)).ids
        made = model.generate(torch.tensor([ids]), max_new_tokens=80, do_sample=False, eos_token_id=2, pad_token_id=0)
        text = tokenizer.decode(made[0][len(ids) :].tolist())
        assert text == answer, (question, text)
    write_gguf(folder / "tiny.gguf", model, tokenizer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "tokenizer")
    if len(sys.argv) > 1:
        model.save_pretrained(folder / "hf")
        fast.save_pretrained(folder / "hf")


if __name__ == "__main__":
    main()
