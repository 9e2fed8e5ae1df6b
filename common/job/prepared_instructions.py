"""Files of instructions, prepared once as tokens, as corpora are (`corpus.py`)."""

import hashlib
import json
from array import array
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

import common.instructions
from common.distributed import print0
from common.instructions import (
    Document,
    Spans,
    documents_of,
    load_tokenizer,
    read_examples,
    turns_without_answer,
    untrained_ids,
)
from common.weight_files import files_to_copy

from common.job.corpus import EOS, load_prepared, read_words
from common.job.launch import fail

FILES = ("tokens.int32", "documents.json")  # the second: where documents and their answers are


@dataclass(frozen=True)
class Instructions:
    """tokens: int32, memory-mapped, all below vocab_size. vocab: hashes of the model's files."""

    name: str
    tokens: Tensor
    train: list[Document]
    valid: list[Document]
    vocab: list[str]
    vocab_size: int
    digest: str

    def tokens_of(self, documents: list[Document]) -> list[tuple[Tensor, Spans]]:
        return [(self.tokens[start : start + n].long(), spans) for start, n, spans in documents]

    @property
    def mean_length(self) -> float:
        return sum(document.length - 1 for document in self.train) / len(self.train)


def load_instructions(name: str, folder: Path, longest: int, n_valid: int) -> Instructions:
    """Load a file of instructions, or `sample`, as tokens of the model in `folder`.

    A document is truncated to `longest` + 1 tokens, and left out if no target remains: both are
    counted. The last `n_valid` documents are not for training.
    """
    if absent := [each for each in ("transformers", "jinja2") if find_spec(each) is None]:
        fail(f"this Python has no {' and no '.join(absent)}: pip install transformers jinja2")
    try:
        content = b"" if name == "sample" else Path(name).read_bytes()
        files = [folder / each for each in files_to_copy(folder)]  # the tokenizer's, among others
        hashes = [hashlib.sha256(x.read_bytes()).hexdigest() for x in files if x.is_file()]
    except OSError as error:
        fail(f"--data {name}: {error}")
    code = [Path(file).read_text("utf-8") for file in (__file__, common.instructions.__file__)]
    made_by = "".join([*hashes, *code, version("transformers"), version("tokenizers")])
    known_as = hashlib.sha256(content + made_by.encode()).hexdigest()[:12]
    make = partial(_tokenize, name, content, folder)  # a rank that calls it imports transformers
    prepared, digest = load_prepared(name, f"{Path(name).stem[:60]}-{known_as}", FILES, make)
    tokens = torch.frombuffer(prepared[0], dtype=torch.int32)
    documents, vocab_size, n_turns = json.loads(bytes(prepared[1]))
    used = []
    for start, length, spans in documents:
        length = min(length, longest + 1)
        kept = ((max(1, a), min(b, length)) for a, b in spans)  # the first token is no target
        used.append(Document(start, length, [(a, b) for a, b in kept if a < b]))
    used = [document for document in used if document.spans]
    if len(used) <= n_valid:
        few = f"{len(used)} documents have an answer within {longest} tokens"
        fail(f"--data {name}: {few}: none is left to train on after --valid {n_valid}")
    sizes = [end - begin for document in used for begin, end in document.spans]
    n, n_cut = len(documents), sum(length > longest + 1 for _, length, _ in documents)
    print0(
        f"{name}: {len(used):,} documents, {len(sizes):,} answers, {sum(sizes):,} targets;"
        f" {n_cut} of {n} documents truncated to {longest} tokens; {n - len(used)} left out,"
        f" of which no answer remained; {n_turns} messages after the last answer dropped"
    )
    train, valid = used[: len(used) - n_valid], used[len(used) - n_valid :]
    return Instructions(name, tokens, train, valid, hashes, vocab_size, digest)


# ---- preparation ----


def _tokenize(name: str, content: bytes, folder: Path) -> list:
    examples = sample_questions() if name == "sample" else read_examples(content)
    tokenizer = load_tokenizer(folder)
    tokens, documents = array("i"), []
    for ids, spans in documents_of(examples, tokenizer):
        documents.append(Document(len(tokens), len(ids), spans))
        tokens.extend(ids)
    used = set(tokens) | {tokenizer.eos_token_id}
    if untrained := sorted(untrained_ids(tokenizer, folder) & used):
        what = ", ".join(map(str, tokenizer.convert_ids_to_tokens(untrained)))
        raise ValueError(f"with {folder}: tokenizer.json has no {what}: an untrained token")
    described = documents, max(tokens) + 1, sum(map(turns_without_answer, examples))
    return [tokens, json.dumps(described).encode()]


def sample_questions() -> list[dict]:
    """The first half of each line of the sample (of eight words or more), answered by the rest."""
    splits = read_words("sample")
    lines = [line.split() for s in ("train", "valid") for line in " ".join(splits[s]).split(EOS)]
    halves = [(line[: len(line) // 2], line[len(line) // 2 :]) for line in lines if len(line) >= 8]
    return [{"instruction": " ".join(a), "output": " ".join(b)} for a, b in halves]
