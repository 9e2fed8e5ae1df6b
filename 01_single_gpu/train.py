"""Stage 01: train a transformer on one device.

The plain training step, whose loss curve a later stage must reproduce if it computes the same.
Weights, data order and dropout masks depend on the seed and the step only.

    memory          16 P bytes for P parameters: weight 4, gradient 4, AdamW's first and second
                    moments 8; and the activations of one micro-batch
    communication   none

Run it:

    python 01_single_gpu/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from common.batches import eval_batches, train_batches
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, clip_grad_norm_, learning_rate, set_learning_rate
from common.shards import training_state

from common.job.arguments import base_parser, check_arguments, model_config
from common.job.corpus import load_corpus
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="torch.compile each unit")
    return check_arguments(parser.parse_args(argv))


@torch.no_grad()
def evaluate(model, tokens, args, device) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for inputs, targets in eval_batches(tokens, args.batching, device):
        with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
            loss = model(inputs, targets)
        count = (targets != IGNORED).sum()
        total += torch.stack([loss * count, count])
    model.train()
    return (total[0] / total[1]).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = load_corpus(args.data)

    config = model_config(args, corpus)
    model = Transformer(config)
    init_weights(model, args.seed)
    model.to(device)
    if args.compile:
        for unit in model.units():
            unit.compile()
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model, optimizer)
    first_step = run.checkpoints.load(args.resume, state, optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for inputs, targets, keys in micro_batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                micro_loss = model(inputs, targets, keys) / len(micro_batches)
            micro_loss.backward()
            loss += micro_loss.detach()
        grad_norm = clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    return run.finish(state)


if __name__ == "__main__":
    main()
