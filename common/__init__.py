"""Two rooms. What a reader needs, in reading order; none of these files imports one of job/:

model.py               the transformer as a list of units
loss.py                cross-entropy in chunks, without the full logits in memory
counter_rng.py         stateless randomness: seeds from names, dropout masks from counters
batches.py             batches as functions of (seed, step)
optimization.py        AdamW's settings, the learning-rate schedule, clipping
distributed.py         the ranks: joining the others, groups along a mesh, printing and saving once
collectives.py         PyTorch's collectives, a ledger of their bytes, buckets, the global norm
shards.py              what a rank has of each tensor of a checkpoint
guards.py              for 02 to 04 and 11 to 15: errors for loops that misuse a wrapper
module_checks.py       for 05 to 07, 10 and 14: what is checked of a module that is replaced
unit_parameters.py     for 03, 04, 07, 12 to 15: a model's units and parameters, and their checks
llama.py               for 13 and 15: models with the parameter names of Hugging Face
instructions.py        for 13 and 15: texts as documents: tokens, and which of them are answers
weight_files.py        for 13 and 15: Hugging Face's files, and where a tensor's values are

What a job needs, in job/, with no lesson in it:

launch.py              launchers, the start and the end of a process, errors
arguments.py           the flags that every stage has, and their checks
corpus.py              corpora as memory-mapped tokens; sample.txt.gz is the text of `--data sample`
run.py                 a run: its steps, when it saves and when it stops
run_folder.py          its folder: the name, the lock, and what may change when it continues
metrics.py             what a logged line holds, how it prints, where it is written
checkpoint.py          saving and loading, in the format of torch.distributed.checkpoint
checkpoint_hooks.py    what that calls: atomic commits, checksums, loading that runs no code
paths.py               paths: whether one exists, can be written, or is taken already
prepared_instructions.py   for 13 and 15: files of instructions, prepared once as tokens
finetuning.py          for 13 and 15: flags, what they name, the folder that is written
"""
