"""Make tests/golden: small random models of each family, by `transformers`.

Each folder has config.json and the weights, as `save_pretrained` writes them; `tokenizer/` has the
files of a tokenizer for all of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

GOLDEN = Path(__file__).with_name("golden")
SHAPE = dict(
    vocab_size=304,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0)
LLAMA3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=16)
BIASES = dict(attention_bias=True, mlp_bias=True)
EVERY = {  # class, further fields of the configuration, dtype, largest file
    "llama": ("Llama", dict(rope_parameters=LLAMA3, rms_norm_eps=1e-5), "float32", "40KB"),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True, **BIASES), "float16", "1GB"),
    "qwen2": ("Qwen2", dict(), "bfloat16", "1GB"),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True), "float32", "1GB"),
    "qwen3": ("Qwen3", dict(head_dim=8), "float32", "1GB"),
    "arcee": ("Arcee", dict(tie_word_embeddings=True), "bfloat16", "1GB"),
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """Byte-level BPE, which begins each text with <|bos|>, as that of Llama 3."""
    special = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = dict(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([__doc__] * 2, trainers.BpeTrainer(**options))
    begins = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer.post_processor = begins
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = dict(bos_token="<|bos|>", eos_token="<|eos|>", chat_template=TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_model(name: str) -> None:
    family, more, dtype, shard_size = EVERY[name]
    config = getattr(transformers, f"{family}Config")(**SHAPE, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():  # norms and biases that matter, logits that differ
            p.mul_(8) if p.dim() > 1 else p.add_(0.3 * torch.randn_like(p))
    model.to(getattr(torch, dtype)).save_pretrained(GOLDEN / name, max_shard_size=shard_size)
    (GOLDEN / name / "generation_config.json").unlink()


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    make_tokenizer(GOLDEN / "tokenizer")
    for name in EVERY:
        make_model(name)
