"""What the stages share and no stage teaches. What a reader needs, in reading order:

model.py               the transformer as a list of units
loss.py                cross-entropy in chunks, without the full logits in memory
counter_rng.py         stateless randomness: seeds from names, dropout masks from counters
batches.py             batches as functions of (seed, step)
optimization.py        AdamW's settings, the learning-rate schedule, clipping
collectives.py         PyTorch's collectives, a ledger of their bytes, buckets, the global norm
shards.py              what a rank has of each tensor of a checkpoint
unit_parameters.py     for 03, 04, 12 and 13: a model's units and parameters, and their checks
llama.py               for 13: models with the parameter names of Hugging Face
packing.py             its micro-batches: documents side by side
guards.py              what breaks the contract of a wrapper is an error, seen from outside
module_checks.py       what is checked of a module that is replaced, and of a backward

And what a job needs, in job/. Nothing above imports it, and no lesson is in it:

launch.py              the process group: launchers, start, end, errors
arguments.py           the flags that every stage has, and their checks
corpus.py              corpora as memory-mapped tokens; sample.txt.gz is the text of `--data sample`
run.py                 a run: its steps, when it saves and when it stops
run_folder.py          its folder: the name, the lock, and what is moved aside of another run
metrics.py             what a logged line holds, how it prints, where it is written
checkpoint.py          saving and loading, in the format of torch.distributed.checkpoint
checkpoint_hooks.py  how checkpoints are stored: checksums, and loading that runs no code
atomic_files.py        files that are complete or absent, on disks and file systems that fail
instructions.py        for 13: instructions and answers as tokens
weight_files.py        its files: where the values of a tensor are
"""
