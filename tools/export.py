"""Export the newest checkpoint of a run as one plain file of weights, on the CPU.

    python -m tools.export runs/04_fsdp/20250101-120000 [--out model.pt]
    python -m tools.export runs/04_fsdp/20250101-120000/checkpoints/step-00000100
    python -m tools.export runs/04_fsdp/20250101-120000 --hf

`torch.load(..., weights_only=True)` reads it: the full `state_dict` of a
`common.model.Transformer`, whatever stage and topology the run had. Without a folder it exports the
run that saved last. With --hf it writes a folder that `transformers` loads, and stage 13: our model
is `ArceeForCausalLM` there, and a run of stage 13 gets a folder like the one that it has read.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import secrets
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from common.distributed import save0
from common.weight_files import WeightFiles, publish, write_tensors

from common.job.arguments import Parser
from common.job.checkpoint import checkpoints, first_error
from common.job.checkpoint_hooks import LoadPlanner, Reader
from common.job.corpus import EOS, UNKNOWN, load_corpus
from common.job.launch import fail
from common.job.paths import exists
from tools.stages import load_stage

# our names, and those of Hugging Face
NAMES = {
    "embed.tokens.": "model.embed_tokens.",
    "output.head.": "lm_head.",
    "output.norm.offset": "model.norm.weight",
    "layers.": "model.layers.",
    "attn_norm.offset": "input_layernorm.weight",
    "mlp_norm.offset": "post_attention_layernorm.weight",
    "attn.wo.": "self_attn.o_proj.",
    "mlp.w1.": "mlp.up_proj.",
    "mlp.w2.": "mlp.down_proj.",
}
WORDS = r"\w+|([^\w\s])\1*"  # of the sample; a row of dashes is one word


def newest_run() -> Path:
    """The folder under `runs/`, or under a link there, with the newest checkpoint in it."""
    runs, seen = set(), set()
    for name, folders, _ in os.walk(Path(__file__).resolve().parents[1] / "runs", followlinks=True):
        if (folder := Path(name)).resolve() in seen:
            folders.clear()  # a link to a folder above it has no end
        elif folder.name == "checkpoints" and checkpoints(folder):
            runs.add(folder.parent)
        seen.add(folder.resolve())
    if not runs:
        fail("no run here has a checkpoint: name a run's folder, or train --checkpoint-every 100")
    return max(runs, key=lambda run: checkpoints(run / "checkpoints")[-1].lstat().st_mtime)


def tensors_of(checkpoint: Path, prefix: str = "model.") -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names: unsharded."""
    try:
        reader = Reader(checkpoint)
        entries = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in sorted(entries.items())
            if name.startswith(prefix)
        }
        planner = LoadPlanner(set(entries))
        with warnings.catch_warnings(action="ignore"):  # that it loads in a single process
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except (OSError, ValueError, pickle.UnpicklingError, dcp.api.CheckpointException) as error:
        if isinstance(error, dcp.api.CheckpointException):
            error = first_error(error)
        fail(f"{checkpoint} cannot be read: {str(error).splitlines()[0]}", status=1)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def run_and_checkpoint(path: Path) -> tuple[Path, Path]:
    """A run's folder and its newest checkpoint, or a checkpoint and the folder of its run."""
    path = path.resolve()
    try:
        if exists(path / ".metadata"):
            return path.parents[path.parent.name == "checkpoints"], path
        found = checkpoints(path / "checkpoints")
    except OSError as error:
        fail(f"{path} cannot be read: {error}")
    if not found:
        fail(f"{path}: no checkpoint with its .metadata there; train with --checkpoint-every")
    return path, found[-1]


def export(checkpoint: Path, out: Path) -> None:
    weights = tensors_of(checkpoint)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save0(weights, out)
    except OSError as error:  # a folder, for example, or another user's
        fail(f"--out {out}: {error}: name a file that can be written")
    millions = sum(t.numel() for t in weights.values()) / 1e6
    print(f"{out}: {len(weights)} tensors, {millions:.2f} M parameters, from {checkpoint}")


# ---- in the form of Hugging Face ----


def export_folder(run: Path, checkpoint: Path, out: Path) -> None:
    """Write a folder with configuration, weights and tokenizer: complete, or absent."""
    # not by the process id, which a process in another container may have, too
    aside = out.with_name(f".{out.name}.writing-{secrets.token_hex(6)}")
    try:
        description = json.loads((run / "config.json").read_text("utf-8"))
        args = description["arguments"]
        if exists(out) or args.get("n_experts"):
            raise ValueError("it is already there" if exists(out) else "experts have no such form")
        weights = tensors_of(checkpoint)
        if "model" in args:
            files = WeightFiles(Path(args["model"]), {n: t.shape for n, t in weights.items()})
            files.prepare(aside)
            for name, t in weights.items():
                whole = {name: t.shape}, slice(0, t.numel()), t.flatten()
                load_stage("13").write_shard(files, aside, *whole)
        else:
            vocab = load_corpus(args["data"]).vocab
            digest = hashlib.sha256("\n".join(vocab).encode()).hexdigest()  # as in Run
            if not digest.startswith(description["vocabulary"]):
                raise ValueError(f"--data {args['data']} has other words than in the run")
            aside.mkdir(parents=True, exist_ok=True)
            write_llama(aside, args, weights, vocab)
        publish(aside, out)
    except (OSError, ValueError) as error:
        fail(f"--out {out}: {error}")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def as_llama(weights: dict[str, Tensor], n_heads: int) -> dict[str, Tensor]:
    """The tensors of our model as those of `ArceeForCausalLM`, a Llama whose MLP has no gate.

    q, k and v are matrices of their own, and rotary positions pair features half a head apart. A
    norm's weight is 1 + offset.
    """
    found = {}
    for name, t in weights.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if not name.endswith("attn.wqkv.weight"):
            found[name] = 1 + t if t.dim() == 1 else t
            continue
        qkv = t.view(n_heads, 3, -1, 2, t.shape[1])  # heads, q/k/v, pairs, in a pair, d_model
        q, k = (part.transpose(1, 2).reshape(-1, t.shape[1]) for part in (qkv[:, 0], qkv[:, 1]))
        for letter, matrix in zip("qkv", (q, k, qkv[:, 2].reshape(-1, t.shape[1])), strict=True):
            found[name.replace("attn.wqkv", f"self_attn.{letter}_proj")] = matrix
    return found


def write_llama(folder: Path, args: dict, weights: dict[str, Tensor], vocab: list[str]) -> None:
    """Write our model's configuration, weights, and a tokenizer of words."""
    weights = as_llama(weights, args["n_heads"])
    rows, width = weights["model.embed_tokens.weight"].shape
    ids = {word: i for i, word in enumerate(vocab)}
    end, unknown = EOS, UNKNOWN if UNKNOWN in ids else EOS
    config = {
        **{"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "gelu"},
        **{"vocab_size": rows, "hidden_size": width, "intermediate_size": 4 * width},
        **{"num_hidden_layers": args["n_layers"], "num_attention_heads": args["n_heads"]},
        **{"max_position_embeddings": args["seq_len"], "rms_norm_eps": 1e-6, "dtype": "float32"},
        **{"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": ids[end]},
    }
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    splits = [{"type": "WhitespaceSplit"}, *[split] * (args["data"] == "sample")]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": ids[w], "content": w, "special": True} | plain for w in dict.fromkeys((end, unknown))
    ]
    tokenizer = {
        **{"version": "1.0", "added_tokens": special},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": unknown},
    }
    tokens = {"eos_token": end, "unk_token": unknown, "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"config": config, "tokenizer": tokenizer, "tokenizer_config": tokens}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    write_tensors(folder / "model.safetensors", weights)


if __name__ == "__main__":
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", nargs="?", type=Path, help="a run's folder, or a checkpoint's")
    parser.add_argument("--out", type=Path, help="default: model.pt or hf in the run's folder")
    parser.add_argument("--hf", action="store_true", help="a folder in the form of Hugging Face")
    args = parser.parse_args()
    run, checkpoint = run_and_checkpoint(args.run or newest_run())
    if args.hf:
        export_folder(run, checkpoint, out := args.out or run / "hf")
        print(f"{out}, from {checkpoint}")
    else:
        export(checkpoint, args.out or run / "model.pt")
