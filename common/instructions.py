"""Instructions and their answers as documents: tokens, and where the answers are in them.

A document is a prompt and an answer, or a conversation with several answers. Targets are the tokens
of all answers, each with the token that ends it. The tokenizer and the chat template are those of
transformers.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import NamedTuple

ALPACA = (  # the prompts of Stanford Alpaca, and a line break
    "Below is an instruction that describes a task{}. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT = {"human": "user", "gpt": "assistant"}

Answers = list[tuple[str, str]]  # per answer: the prompt, and the prompt with the answer
Spans = list[tuple[int, int]]  # of a document: where each answer begins and ends


class Document(NamedTuple):
    """A range of the data's tokens. Targets are the tokens of its spans, never its first one."""

    start: int
    length: int
    spans: Spans

    @property
    def prompt(self) -> int:
        """The number of tokens before the first answer."""
        return self.spans[0][0]


# ---- examples ----


def read_examples(content: bytes) -> list[dict]:
    """The objects of a JSON list, or one per line."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if content.lstrip().startswith(b"["):
        examples = json.loads(content)
    else:
        examples = []
        for i, line in enumerate(content.split(b"\n"), 1):
            try:
                examples += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"is no JSON in line {i}: {error}") from None
    if not examples:
        raise ValueError("has no examples")
    for i, example in enumerate(examples, 1):
        if not isinstance(example, dict):
            raise ValueError(f"has no object in the place of its object {i}: {example!r:.80}")
    return examples


def text_of(example: dict, field: str) -> str:
    value = example.get(field)
    if not isinstance(value, str):
        raise ValueError(f"its {field} is no text: {value!r:.80}")
    return value


def is_chat(example: dict) -> bool:
    return "messages" in example or "conversations" in example


def messages_of(example: dict) -> list[dict]:
    """The messages of a conversation, also if it is in the form of ShareGPT."""
    field = "messages" if "messages" in example else "conversations"
    messages = example[field]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ValueError(f"its {field} are no list of objects: {messages!r:.80}")
    if field == "conversations":
        turns = [(text_of(each, "from"), text_of(each, "value")) for each in messages]
        messages = [{"role": SHAREGPT.get(who, who), "content": text} for who, text in turns]
    for message in messages:
        if text_of(message, "role") not in ROLES:
            raise ValueError(f"its role {message['role']!r:.80} is none of {', '.join(ROLES)}")
        if message.get("content") is not None or not message.get("tool_calls"):
            text_of(message, "content")
        if message.get("weight", 1) != 1:
            raise ValueError("its messages have weights, which are not supported")
    return messages


def turns_without_answer(example: dict) -> int:
    """How many messages follow the last answer. They are no part of a document."""
    messages = messages_of(example)[::-1] if is_chat(example) else [{"role": "assistant"}]
    return [message["role"] for message in messages].index("assistant")


# ---- as text ----


def alpaca_texts(tokenizer, example: dict) -> Answers:
    if tokenizer("a")["input_ids"][-1:] != ids_of(tokenizer, ["a"], special=False)[0][-1:]:
        raise ValueError("the tokenizer puts a token behind each text, also behind a prompt")
    given = text_of(example, "input") if example.get("input") is not None else ""
    context = ", paired with an input that provides further context" if given else ""
    given = f"### Input:\n{given}\n\n" if given else ""
    prompt = ALPACA.format(context, text_of(example, "instruction"), given)
    return [(prompt, prompt + text_of(example, "output") + (tokenizer.eos_token or ""))]


def chat_texts(tokenizer, example: dict) -> Answers:
    """For each answer the prompt that the chat template renders at inference."""
    messages, tools = messages_of(example), example.get("tools") or None
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    answers = []
    for i, message in enumerate(messages):
        is_asked = any(each["role"] not in ("system", "developer") for each in messages[:i])
        if message["role"] == "assistant" and is_asked:  # else it is context
            prompt = render(messages[:i], tools=tools, add_generation_prompt=True)
            whole = render(messages[: i + 1], tools=tools)
            if not whole.startswith(prompt):
                raise ValueError("the chat template does not put this answer after its prompt")
            answers.append((prompt, whole))
            last = messages[: i + 1]
    if not answers:
        raise ValueError("its messages have no answer")
    if tools and render(last) == answers[-1][1]:
        raise ValueError("it has tools, which the chat template does not use")
    return answers


# ---- as tokens ----


def load_tokenizer(folder: Path):
    try:
        from transformers import AutoTokenizer  # here alone: the import takes seconds

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"with {folder}: no tokenizer can be loaded: {reason(error)}") from None


def untrained_ids(tokenizer, folder: Path) -> set[int]:
    """Tokens that other files declare and tokenizer.json does not have: transformers adds them.

    The embedding may have rows for them, because it is often padded; they were never trained.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.exists():
        return set()
    known = Tokenizer.from_file(str(file)).get_vocab()  # also its own added tokens
    return {number for token, number in tokenizer.get_added_vocab().items() if token not in known}


def documents_of(examples: Sequence[dict], tokenizer) -> Iterator[tuple[list[int], Spans]]:
    """Yield the tokens of each document, and where its answers are."""
    ends = tuple(tokenizer.get_added_vocab())
    for i, example in enumerate(examples, 1):
        try:
            if example.get("system") or example.get("history"):
                raise ValueError("its system or history would be lost: write them as messages")
            answers = (chat_texts if is_chat(example) else alpaca_texts)(tokenizer, example)
            for _, whole in answers:
                whole.encode()  # fails on half a surrogate pair, as tokenizers would
                if not whole.rstrip().endswith(ends):
                    raise ValueError("an answer does not end with a token of its own")
            # a chat template writes the first token itself: the tokenizer would add it again
            documents = [*encode(tokenizer, answers, special=not is_chat(example))]
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(f"cannot be used, object {i}: {reason(error)}") from None
        yield from documents


def encode(tokenizer, answers: Answers, special: bool) -> Iterator[tuple[list[int], Spans]]:
    """Yield an example's documents: their tokens, and the spans of the answers.

    Usually each text begins the next one, and the tokens of the last are those of its parts. Then
    two passes over it suffice, however many answers it has.
    """
    texts = [*chain.from_iterable(answers)]
    if all(later.startswith(text) for text, later in pairwise(texts)):
        # prompt, answer, what is between it and the next answer, the next answer, ...
        places = [0, *map(len, texts)]
        first, *rest = [texts[-1][begin:end] for begin, end in pairwise(places)]
        ids, prompt = ids_of(tokenizer, [texts[-1], first], special)
        parts = [prompt, *ids_of(tokenizer, rest, False)]
        if list(chain.from_iterable(parts)) == ids:
            places = [*accumulate(map(len, parts))]
            yield ids, [*zip(places[::2], places[1::2], strict=True)]
            return
    yield from encode_each(tokenizer, answers, special)


def encode_each(tokenizer, answers: Answers, special: bool) -> Iterator[tuple[list[int], Spans]]:
    """In use a prompt is tokenized without its answer. If its tokens begin those of prompt and
    answer, the rest are the answer's (a tokenizer may put a space before each text); otherwise the
    answer is tokenized apart.

    An answer joins the previous document if the tokens of its prompt begin with that document.
    Otherwise it is a document of its own: Qwen3's template drops the reasoning of earlier answers.
    """
    ids, spans = [], []
    for prompt, whole in answers:
        before, new = ids_of(tokenizer, [prompt, whole], special)
        if new[: len(before)] != before:
            new = before + ids_of(tokenizer, [whole.removeprefix(prompt)], False)[0]
        if spans and before[: len(ids)] != ids:
            yield ids, spans
            spans = []
        ids, spans = new, [*spans, (len(before), len(new))]
    yield ids, spans


def ids_of(tokenizer, texts: list[str], special: bool) -> list[list[int]]:
    """The tokens of each text; special: with those that the tokenizer puts before a text."""
    return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]


def reason(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
