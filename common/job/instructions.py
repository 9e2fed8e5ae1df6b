"""Instructions and answers as tokens.

A document is a prompt and an answer. Targets are the answer's tokens and the token that ends it.
Tokens are prepared once, as corpora are (`data.py`).
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from common.distributed import print0
from common.packing import Document

from common.job.corpus import EOS, load_prepared, read_words
from common.job.launch import fail

FILES = ("tokens.int32", "lengths.int32", "prompts.int32", "vocab.int32")  # of a prepared file
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ALPACA = (  # the prompts of Stanford Alpaca, and a line break
    "Below is an instruction that describes a task{}. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)


@dataclass(frozen=True)
class Instructions:
    """tokens: of all documents, int32, memory-mapped. vocab: hashes of the tokenizer's files."""

    name: str
    tokens: Tensor
    train: list[Document]
    valid: list[Document]
    vocab: list[str]
    vocab_size: int
    digest: str

    @property
    def mean_length(self) -> float:
        return sum(document.length - 1 for document in self.train) / len(self.train)


def load_instructions(name: str, folder: Path, longest: int, n_valid: int) -> Instructions:
    """Load a file of instructions, or `sample`, as tokens of the model in `folder`.

    A document is truncated to `longest` + 1 tokens, and left out if no target remains: both are
    counted. The last `n_valid` documents are not for training.
    """
    if find_spec("tokenizers") is None:
        fail("this Python has no tokenizers: pip install tokenizers jinja2")
    try:
        content = b"" if name == "sample" else Path(name).read_bytes()
        files = [folder / file for file in TOKENIZER if (folder / file).exists()]
        hashes = [hashlib.sha256(each.read_bytes()).hexdigest() for each in files]
    except OSError as error:
        fail(f"--data {name}: {error}")
    known_as = hashlib.sha256(content + "".join(hashes).encode()).hexdigest()[:12]
    write = partial(_write, name, content, folder)
    prepared, digest = load_prepared(name, f"{Path(name).stem}-{known_as}", FILES, write)
    tokens, *numbers = (torch.frombuffer(each, dtype=torch.int32) for each in prepared)
    lengths, prompts, (vocab_size,) = (each.tolist() for each in numbers)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    every = [
        Document(start, min(length, longest + 1), max(1, prompt))  # the first token is no target
        for start, length, prompt in zip(starts, lengths, prompts, strict=False)
    ]
    used = [document for document in every if document.prompt < document.length]
    n_cut = sum(length > longest + 1 for length in lengths)
    if n_cut:
        left_out = f"{len(every) - len(used)} left out, of which no answer remained"
        truncated = f"{n_cut} of {len(every)} documents truncated to {longest} tokens"
        print0(f"{name}: {truncated}; {left_out}")
    if len(used) <= n_valid:
        fail(f"--data {name}: {len(used)} documents have an answer within {longest} tokens")
    train, valid = used[: len(used) - n_valid], used[len(used) - n_valid :]
    return Instructions(name, tokens, train, valid, hashes, vocab_size, digest)


# ---- preparation ----


def _write(name: str, content: bytes, folder: Path, prepared: Path) -> None:
    """Tokenize prompts and answers separately: in use, a prompt is tokenized without an answer."""
    from tokenizers import Tokenizer

    for needed in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / needed).exists():
            raise ValueError(f"with {folder}: there is no {needed}")
    examples = sample_questions() if name == "sample" else read_examples(content)
    is_chat = "messages" in examples[0]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    special = {name: text_of(config.get(name)) for name in ("bos_token", "eos_token")}
    if not is_chat and tokenizer.token_to_id(special["eos_token"]) is None:
        raise ValueError(f"with {folder}: its eos_token is no token, so no answer would end")
    split = chat_splitter(folder, config, special) if is_chat else partial(split_alpaca, special)
    prompts, answers = zip(*map(split, examples), strict=True)
    # a chat template writes the first token itself: the tokenizer would add it again
    prompts = tokenizer.encode_batch(prompts, add_special_tokens=not is_chat)
    answers = tokenizer.encode_batch(answers, add_special_tokens=False)
    pairs = [(prompt.ids, answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]
    numbers = [
        [token for prompt, answer in pairs for token in (*prompt, *answer)],
        [len(prompt) + len(answer) for prompt, answer in pairs],
        [len(prompt) for prompt, _ in pairs],
        [max(tokenizer.get_vocab().values()) + 1],
    ]
    for file, values in zip(FILES, numbers, strict=True):
        (prepared / file).write_bytes(torch.tensor(values, dtype=torch.int32).numpy())


def read_examples(content: bytes) -> list[dict]:
    """The objects of a JSON list, or one per line; all of the same kind."""
    text = content.decode("utf-8-sig").strip()
    if not text.startswith("["):
        text = f"[{','.join(line for line in text.split(chr(10)) if line.strip())}]"
    examples = json.loads(text)
    if not examples:
        raise ValueError("has no examples")
    names = {"messages"} if "messages" in examples[0] else {"instruction", "output"}
    for i, example in enumerate(examples, 1):
        if missing := names - example.keys():
            raise ValueError(f"has no {' and '.join(sorted(missing))} in its object {i}")
    return examples


def sample_questions() -> list[dict]:
    """The first half of each line of the sample (of eight words or more), answered by the rest."""
    splits = read_words("sample")
    lines = [line.split() for s in ("train", "valid") for line in " ".join(splits[s]).split(EOS)]
    halves = [(line[: len(line) // 2], line[len(line) // 2 :]) for line in lines if len(line) >= 8]
    return [{"instruction": " ".join(a), "output": " ".join(b)} for a, b in halves]


def split_alpaca(special: dict[str, str], example: dict) -> tuple[str, str]:
    given = example.get("input") or ""
    context = ", paired with an input that provides further context" if given else ""
    given = f"### Input:\n{given}\n\n" if given else ""
    prompt = ALPACA.format(context, example["instruction"], given)
    return prompt, example["output"] + special["eos_token"]


def chat_splitter(folder: Path, config: dict, special: dict[str, str]) -> Callable:
    """A function that renders messages by the model's chat template, and splits off the last."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # a template is somebody's program

    file = folder / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    if not isinstance(source, str):
        raise ValueError(f"has messages, and {folder} has no chat template: a base model?")
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    jinja.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    jinja.globals["raise_exception"] = raise_exception
    render = partial(jinja.from_string(source).render, **special)

    def split(example: dict) -> tuple[str, str]:
        *asked, answer = example["messages"]
        prompt = render(messages=asked, add_generation_prompt=True)
        full = render(messages=[*asked, answer], add_generation_prompt=False)
        if answer["role"] != "assistant" or not full.startswith(prompt):
            raise ValueError(f"has messages that end with no answer to a prompt: {answer}")
        return prompt, full.removeprefix(prompt)

    return split


def raise_exception(message: str) -> None:
    raise ValueError(f"has messages that the chat template does not take: {message}")


def text_of(token: str | dict | None) -> str:
    return token["content"] if isinstance(token, dict) else token or ""
