"""Generate text: continue a prompt with the model that a run has trained.

    python -m tools.generate runs/04_fsdp/20250101-120000 --prompt "the value of" --words 40

It reads the given checkpoint, or the run's newest one, and writes nothing. Runs on the CPU.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist

from common.arguments import Parser, non_negative, positive_int
from common.data import UNKNOWN, load_corpus
from common.distributed import cleanup, fail, setup
from common.model import Transformer, TransformerConfig
from common.storage import RUN, CheckpointError, Reader
from tools.export import newest_run, run_and_checkpoint, tensors_of
from tools.stages import load_stage


def load_run(path: Path) -> tuple[Transformer, list[str]]:
    """The trained model and the corpus's words. path: a run's folder, or a checkpoint's."""
    _, checkpoint = run_and_checkpoint(path)
    try:  # what the checkpoint itself says: config.json may be of a later run
        run = Reader(checkpoint).metadata.planner_data[RUN]
        arguments, known = run["arguments"], run["vocabulary"]
    except (CheckpointError, KeyError, TypeError) as error:
        fail(f"{checkpoint}: it does not say which run saved it: {error}", status=1)
    corpus = load_corpus(arguments["data"])
    vocab = corpus.vocab
    if hashlib.sha256("\n".join(vocab).encode()).hexdigest()[:12] != known:
        fail(f"--data {arguments['data']} has another vocabulary now than {checkpoint} has")
    print(f"{checkpoint}, {corpus.name}")
    names = ("d_model", "n_layers", "n_heads", "seq_len", "n_experts", "top_k")
    shape = {name: arguments[name] for name in names if name in arguments}
    model = Transformer(TransformerConfig(vocab_size=len(vocab), **shape))
    if "n_experts" in arguments:
        setup()  # a process group of this process alone, which holds all experts
        load_stage("09").expert_parallel(model, dist.group.WORLD)
    model.load_state_dict(tensors_of(checkpoint))
    return model.eval(), vocab


def tokens_of(prompt: str, vocab: list[str]) -> list[int]:
    known = {word: token for token, word in enumerate(vocab)}
    missing = [word for word in prompt.split() if word not in known]
    if missing and UNKNOWN not in known:
        fail(f"--prompt: {missing[0]!r} is not among the {len(vocab)} words of the corpus")
    return [known.get(word, known.get(UNKNOWN)) for word in prompt.split()]


@torch.no_grad()
def continued(
    model: Transformer, tokens: list[int], count: int, temperature: float, seed: int
) -> list[int]:
    """`count` more tokens, each sampled from the model's distribution after the previous ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(tokens)
    for _ in range(count):
        seen = torch.tensor([tokens[-model.config.seq_len :]])  # [1, seq]
        logits = model(seen)[0, -1, : model.config.vocab_size]
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            # the largest is 0, and float64 holds any temperature: no division gives inf or NaN
            logits = (logits - logits.max()).double()
            probabilities = torch.softmax(logits / temperature, dim=0)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens


if __name__ == "__main__":
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", nargs="?", type=Path, help="a run's folder, or a checkpoint's")
    parser.add_argument("--prompt", default="the", help="words of the corpus")
    parser.add_argument("--words", type=positive_int, default=40, help="how many to add")
    likeliest = "0: the likeliest word"
    parser.add_argument("--temperature", type=non_negative, default=0.8, help=likeliest)
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    args = parser.parse_args()
    model, vocab = load_run(args.run or newest_run())
    tokens = tokens_of(args.prompt, vocab)
    if not tokens:
        fail("--prompt: give at least one word")
    words = continued(model, tokens, args.words, args.temperature, args.seed)
    print(" ".join("\n" if vocab[t] == "<eos>" else vocab[t] for t in words))
    cleanup()
