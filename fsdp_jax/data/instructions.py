"""Instructions with responses, in Alpaca's format (Taori et al., 2023), as tokens.

A record has `instruction`, `input` (optional) and `output`, which Alpaca's template joins,
`prompt` and `completion`, which are taken as they are, or `messages`, a chat of any number of
turns, which the tokenizer's chat template joins. For decoder-only models, a prompt and
its answer are one sequence, and several sequences are packed into a row. For models with an
encoder, the encoder reads the prompt and the decoder writes the answer. Only the tokens of answers
count in the loss.

Shapes: T sequence, S inputs.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jax.data.chat import Message, Span, is_answer
from fsdp_jax.data.checks import check_choice, ignored_key_error
from fsdp_jax.data.files import Skipped, spelling_pattern
from fsdp_jax.data.options import Invalid
from fsdp_jax.data.records import Record, TextDecoder, is_records, read_dataset, read_records
from fsdp_jax.data.tokenizer import Tokenizer, encode_spelled
from fsdp_jax.errors import ConfigError, message
from fsdp_jax.io.model_files import TEMPLATE, TOKENIZER, TOKENIZER_SETTINGS

PROMPT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
"""Alpaca's templates, verbatim."""

FORMATS = (
    "instruction and output, and perhaps input (Alpaca); prompt and completion; or messages, a "
    'list of {"role": ..., "content": ...}, and perhaps tools'
)
SHIPPED = Path(__file__).with_name("instructions.jsonl")
NO_ANSWER = "without an answer"
EMPTY_ANSWER = "empty answers within chats"


@dataclass(frozen=True)
class InstructionRecord:
    """An instruction and its answer; `input` is "" if there is none.

    Where `is_prompt`, the instruction is the whole prompt, and no template is put around it.
    """

    instruction: str
    input: str
    output: str
    is_prompt: bool = False

    @property
    def prompt(self) -> str:
        """The text that the model answers."""
        if self.is_prompt:
            return self.instruction
        template = PROMPT
        if self.input:
            template = PROMPT_WITH_INPUT
        return template.format(instruction=self.instruction, input=self.input)

    @property
    def texts(self) -> tuple[str, str]:
        """The prompt and its answer."""
        return self.prompt, self.output


@dataclass(frozen=True)
class Chat:
    """Messages in turn, each with a `role` and a `content`, and the tools that the model may call.

    `where` is its place, for messages about it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    where: str = field(default="", compare=False)


@dataclass(frozen=True, eq=False)
class EncodedInstruction:
    """Token ids, int32, one dimension: a prompt, and its answer with the end-of-text token.

    Of a chat the answer begins with the first one; the turns between answers are part of it, and
    `counted`, bool of the answer's shape, is True for the tokens that count in the loss. None: all.
    """

    prompt: np.ndarray
    answer: np.ndarray
    counted: np.ndarray | None = None

    def truncate(self, length: int) -> "EncodedInstruction":
        """Keeps the first `length` tokens, which are more than the prompt has."""
        kept = length - len(self.prompt)
        counted = None if self.counted is None else self.counted[:kept]
        return EncodedInstruction(self.prompt, self.answer[:kept], counted)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def load_instructions(
    path: str | None, skipped: Skipped, *, split: str = "train", invalid: Invalid = "error"
) -> list[InstructionRecord | Chat]:
    """Reads a file of records, a Hugging Face dataset's split, or for None the shipped set.

    Records with an empty `output`, and chats without an answer, are skipped and counted. Raises
    ConfigError, with file and line, for a malformed record, and if none is left.
    """
    check_choice("invalid", invalid, Invalid)
    holds_records = path is None or is_records(path)
    if split != "train" and holds_records:
        raise ignored_key_error("data.split", split)
    decoder = TextDecoder(invalid, skipped)
    if holds_records:
        records = list(read_records(Path(path or SHIPPED).expanduser(), decoder))
    else:
        assert path is not None
        records = list(read_dataset(path, split))
    # their texts, without those that have nothing to learn
    instructions: list[InstructionRecord | Chat] = []
    for where, record in records:
        instruction = _decode_record(record, where, decoder)
        if instruction is None:
            continue  # counted by the decoder
        if isinstance(instruction, Chat):
            missing = _count_answers(instruction, skipped)
        else:
            missing = "" if instruction.output.strip() else NO_ANSWER
        if missing:
            skipped[missing] += 1
        else:
            instructions.append(instruction)
    if not instructions:
        what = "there are no instructions"
        expected = "at least one record with an output"
        got = f"{len(records)} records{skipped.note(' ({})')}"
        raise ConfigError(what, where=path or SHIPPED.name, expected=expected, got=got)
    return instructions


def _count_answers(chat: Chat, skipped: Skipped) -> str:
    """Counts the empty answers of a chat. Returns why there is nothing to learn, or ""."""
    roles = [each["role"] for each in chat.messages]
    if "assistant" not in roles:
        return f"{NO_ANSWER} (of the role assistant; {', '.join(sorted(set(roles)))})"
    answers = sum(map(is_answer, chat.messages))
    if not answers:
        return NO_ANSWER
    skipped[EMPTY_ANSWER] += roles.count("assistant") - answers
    return ""


def _decode_record(
    record: Record, where: str, decoder: TextDecoder
) -> InstructionRecord | Chat | None:
    """Decodes the texts of a record; None as soon as one is skipped, so that it counts once."""
    if record.get("messages") is not None:  # datasets fill in None
        return _decode_chat(record, where, decoder)
    is_prompt = "prompt" in record and "completion" in record
    names = ["instruction", "input", "output"]
    if is_prompt:
        names = ["prompt", "completion"]
    elif "instruction" not in record and "output" not in record:
        raise ConfigError(
            "a record of another format",
            where=where,
            expected=FORMATS,
            got=", ".join(record) or "an empty object",
            fix="rename the fields; for text to continue, set data.kind to text or datasets, and "
            "data.field to the field that holds it",
        )
    elif record.get("input") is None:  # datasets fill in None
        names.remove("input")
    texts: dict[str, str] = {"input": ""}
    for name in names:
        text = decoder.decode_field(record, name, where)
        if text is None:
            return None
        texts[name] = text
    if is_prompt:
        return InstructionRecord(texts["prompt"], "", texts["completion"], is_prompt=True)
    return InstructionRecord(texts["instruction"], texts["input"], texts["output"])


def _decode_chat(record: Record, where: str, decoder: TextDecoder) -> Chat | None:
    """Decodes the texts of a chat's messages; None if one is skipped.

    Raises ConfigError for what is not a list of objects with a role and a text.
    """
    what = "not the messages of a chat"
    expected = 'a list of {"role": "user", "content": "..."}'
    found, tools = record["messages"], record.get("tools")
    if not isinstance(found, list) or not found:
        got = "an empty list" if found == [] else type(found).__name__
        raise ConfigError(what, where=f"{where}, field 'messages'", expected=expected, got=got)
    if tools is not None and not isinstance(tools, list):
        place, got = f"{where}, field 'tools'", type(tools).__name__
        raise ConfigError("not a list of tools", where=place, expected="a list", got=got)
    messages = []
    for number, turn in enumerate(found, 1):
        place = f"{where}, message {number}"
        if not isinstance(turn, dict) or "role" not in turn:
            got = type(turn).__name__
            if isinstance(turn, dict):
                got = ", ".join(turn) or "an empty object"
            raise ConfigError(what, where=place, expected=expected, got=got)
        # what a message does not have; datasets fill in None
        decoded = {name: value for name, value in turn.items() if value is not None}
        texts = ["role", "content"]
        if "tool_calls" in decoded or (turn["role"] == "assistant" and "content" in turn):
            decoded.setdefault("content", "")  # null beside a call of a tool, or an empty answer
        elif "content" in turn:
            decoded["content"] = turn["content"]  # null is refused as what it is
        for name in texts:
            text = decoder.decode_field(decoded, name, place)
            if text is None:
                return None
            decoded[name] = text
        messages.append(decoded)
    return Chat(tuple(messages), None if tools is None else tuple(tools), where)


def digest_instructions(
    instructions: Iterable[InstructionRecord | Chat], template: str | None = None
) -> str:
    """Computes the SHA-256, in hexadecimal, of the records in order.

    `template`: the chat template, of which the rows of chats are made too.
    """
    digest = hashlib.sha256()
    for each in instructions:
        if isinstance(each, Chat):
            chat = {"messages": each.messages, "tools": each.tools, "template": template}
            digest.update(json.dumps(chat, default=str).encode() + b"\n")
            continue
        texts = [each.instruction, each.input, each.output] + ["prompt"] * each.is_prompt
        digest.update(json.dumps(texts).encode() + b"\n")
    return digest.hexdigest()


def encode_instructions(
    instructions: Sequence[InstructionRecord | Chat],
    tokenizer: Tokenizer,
    *,
    special: bool = False,
) -> list[EncodedInstruction]:
    """Encodes prompts and answers separately, so that their boundary is a token's boundary.

    A chat is encoded as a whole, by the tokenizer's template, which also ends it. `special`:
    prompts and answers spell special tokens, as chats always do.

    Raises ConfigError for a tokenizer without an end-of-text token, or without a chat template if
    there are chats.
    """
    encoded: dict[int, EncodedInstruction] = {}
    numbered = list(enumerate(instructions))
    chats = {number: each for number, each in numbered if isinstance(each, Chat)}
    records = {number: each for number, each in numbered if not isinstance(each, Chat)}
    encoded |= zip(chats, _encode_chats(list(chats.values()), tokenizer), strict=True)
    encoded |= zip(
        records, _encode_records(list(records.values()), tokenizer, special), strict=True
    )
    return [encoded[number] for number in range(len(instructions))]


def _encode_records(
    records: Sequence[InstructionRecord], tokenizer: Tokenizer, special: bool
) -> list[EncodedInstruction]:
    """Encodes prompts and answers, with the tokenizer's `begin` before and `end` after them."""
    if not records:
        return []
    if tokenizer.end is None:  # no answer would ever end
        what = "the tokenizer has no end-of-text token"
        fix = "name one as eos_token in its tokenizer_config.json"
        raise ConfigError(what, where="data.tokenizer", got=tokenizer.name, fix=fix)
    # all prompts at once, and all answers: a tokenizer encodes a batch on all cores
    begin = np.array(tokenizer.begin, np.int32)
    end = np.array([tokenizer.end], np.int32)
    prompts, answers = ([each.texts[part] for each in records] for part in (0, 1))
    if special:  # they may spell what is put around them
        encoded = [
            encode_spelled(prompts, tokenizer, begin, end[:0]),
            encode_spelled(answers, tokenizer, begin[:0], end),
        ]
    else:
        encoded = [tokenizer.encode_batch(prompts), tokenizer.encode_batch(answers)]
    return [
        EncodedInstruction(np.concatenate([begin, prompt]), np.concatenate([answer, end]))
        for prompt, answer in zip(*encoded, strict=True)
    ]


def _encode_chats(chats: Sequence[Chat], tokenizer: Tokenizer) -> list[EncodedInstruction]:
    """Encodes chats by the tokenizer's template; special tokens in their text are tokens."""
    if not chats:
        return []
    template = tokenizer.chat_template
    if template is None:
        raise ConfigError(
            "the tokenizer has no chat template",
            where="data.tokenizer",
            expected=f"a chat_template in {TOKENIZER_SETTINGS}, or {TEMPLATE}, beside {TOKENIZER}",
            got=tokenizer.name,
            fix="name the tokenizer of a model for chats (its name often ends in Instruct), or "
            f"write its {TEMPLATE}; a row of prompt and completion needs no template",
        )
    rendered = [
        template.render_answers(each.messages, tools=each.tools, where=each.where) for each in chats
    ]
    tokens = tokenizer.encode_rendered([text for text, _ in rendered])
    encoded = []
    for chat, (_, spans), (ids, places) in zip(chats, rendered, tokens, strict=True):
        counted = _in_spans(places, spans)
        if not counted.any():
            what = "the chat template marks no answer in a chat that has one"
            fix = f"mend the generation markers of {template.where}"
            raise ConfigError(
                what, where=chat.where, got=f"{len(ids)} tokens, none counts", fix=fix
            )
        first = int(counted.argmax())
        encoded.append(EncodedInstruction(ids[:first], ids[first:], counted[first:]))
    answers = [text[first:last] for text, spans in rendered for first, last in spans]
    _warn_of_endless(answers, tokenizer)
    return encoded


def _warn_of_endless(answers: Sequence[str], tokenizer: Tokenizer) -> None:
    """Warns if answers teach no token that ends them, or none of them the end-of-text token."""
    assert tokenizer.chat_template is not None
    end = tokenizer.end_spelling
    spellings = tokenizer.special_tokens if end is None else (*tokenizer.special_tokens, end)
    ended = sum(spelling_pattern(spellings).search(each) is not None for each in answers)
    if ended < len(answers):
        endless = len(answers) - ended
        got = f"{endless:,} of {len(answers):,} answers hold no special token, so none ends"
    elif end is None or not any(end in each for each in answers):
        got = f"no answer holds {end}, the end-of-text token, but only other special tokens"
    else:
        return
    warnings.warn(
        message(
            "a model that learns these answers may never stop",
            where=tokenizer.chat_template.where,
            expected=f"{end or 'an end-of-text token'} after each answer, within its markers",
            got=got,
            fix=f"mend the template, or name the token that ends an answer as eos_token in "
            f"{TOKENIZER_SETTINGS}",
        ),
        stacklevel=2,
    )


def _in_spans(places: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Tells of each token whether a character of it is in a span: bool [tokens].

    `places`, [tokens, 2], are the characters of each token. White space may have none, where the
    tokenizer trims them: such a token belongs where it ends.
    """
    first, last = places[:, 0], places[:, 1]
    is_empty = first == last
    found = np.zeros(len(places), bool)
    for start, end in spans:
        found |= (last > start) & np.where(is_empty, last <= end, first < end)
    return found
