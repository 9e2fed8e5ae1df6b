"""What the stages share and no stage teaches. A map, in reading order:

model.py               the transformer as a list of units
loss.py                cross-entropy in chunks, without the full logits in memory
module_checks.py       what is checked of a module that is replaced, and of a backward
counter_rng.py         stateless randomness: seeds from names, dropout masks from counters
data.py                corpora as memory-mapped tokens, batches as functions of (seed, step);
                       with it sample.txt.gz, the text of `--data sample`, and its license
optimization.py        AdamW's settings, the learning-rate schedule, clipping
distributed.py         the process group: launchers, start, end, errors
collectives.py         PyTorch's collectives, a ledger of their bytes, buckets, the global norm
arguments.py           the flags that every stage has, and their checks
run.py                 a run: its folder, its steps, when it saves and when it stops
run_folder.py          its folder: the name, the lock, and what is moved aside of another run
atomic_files.py        files that are complete or absent, on disks and file systems that fail
metrics.py             what a logged line holds, how it prints, where it is written
checkpoint.py          sharded checkpoints in the format of torch.distributed.checkpoint
checkpoint_storage.py  how checkpoints are stored: checksums, and loading that runs no code
ssd_state.py           for stage 12: a rank's files, and how they survive a kill
guards.py              what breaks the contract of a wrapper is an error, seen from outside
llama.py               for stage 13: models with the parameter names of Hugging Face
instructions.py        its data: instructions and answers as tokens
packing.py             its micro-batches: documents side by side
weight_files.py        its files: where the values of a tensor are
units.py               for 03, 04, 12 and 13: a model's units and parameters, and their checks
"""
