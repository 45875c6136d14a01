"""Prompts as users give them: one text, or a jsonl file in one of three forms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from eagle3_jax.errors import InputError
from eagle3_jax.messages import CARRIED, MessageError, read_messages, read_text, read_tools
from eagle3_jax.tokenizer import chat_ids, text_ids, unseen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = '{"prompt": text} | {"messages": [{"role", "content"}, ...]} | {"turns": [text, ...]}, each also with "tools"'


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a jsonl file whole; every line must be an object.

    Raises:
      InputError: no such file, no lines, or a line that is not UTF-8 or not a JSON object, with its number.
    """
    if not path.is_file():
        raise InputError(expected=f"a jsonl file at {path}", found="no such file", remedy="Check the path.")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            expected=f"UTF-8 text in {path}",
            found=f"other bytes on line {content.count(10, 0, error.start) + 1}",
            remedy="Convert the file, for example with `iconv -f latin1 -t utf-8`.",
        ) from None
    return read_lines(text, str(path))


def read_lines(text: str, path: str) -> list[dict[str, Any]]:
    """The rows of a jsonl text; `path` is for messages. Raises as `read_jsonl`."""
    rows = []
    # Not splitlines(): JSON strings may hold U+2028 and other characters that it takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(
                expected=f"a JSON object on every line of {path}",
                found=f"line {number} that does not parse ({error})",
                remedy="Correct or delete the line.",
            ) from None
        if not isinstance(row, dict):
            raise InputError(
                expected=f"a JSON object on every line of {path}",
                found=f"a {type(row).__name__} on line {number}",
                remedy=f"Forms: {FORMS}.",
            )
        rows.append(row)
    if not rows:
        raise InputError(expected=f"prompts in {path}", found="an empty file", remedy=f"Forms: {FORMS}.")
    return rows


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them, and the tools that it describes to the model."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


def read_conversation(row: Mapping[str, Any], where: str) -> Conversation:
    """All that a row holds: its `messages`, answers included, its `prompt`, or each of its `turns` as a user's.

    Raises:
      InputError: a row of no known form, or with a part that would be lost on the way to the template, by its name.
    """
    try:
        if isinstance(row.get("messages"), list):
            messages = read_messages(row["messages"])
        elif isinstance(row.get("prompt"), str):
            messages = [{"role": "user", "content": read_text(row["prompt"])}]
        elif isinstance(row.get("turns"), list) and row["turns"]:
            messages = [{"role": "user", "content": read_text(turn)} for turn in row["turns"]]
        else:
            raise InputError(
                expected=f"a prompt as {FORMS} in {where}",
                found=f"keys {', '.join(map(str, row)) or 'none'}",
                remedy="Rewrite the row in one of these forms.",
            )
        return Conversation(tuple(messages), read_tools(row.get("tools")))
    except MessageError as error:
        raise InputError(
            expected=f"a prompt as {FORMS} in {where}", found=str(error), remedy="Correct the row or leave it out."
        ) from None


def read_prompt(row: Mapping[str, Any], where: str) -> Conversation:
    """What is to be answered: `messages` without the answer at their end, as data sets have one, or the first of
    `turns`.

    Raises:
      InputError: see `read_conversation`.
    """
    whole = read_conversation(row, where)
    asked = list(whole.messages)
    if not isinstance(row.get("messages"), list):
        asked = asked[:1]
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    return Conversation(tuple(asked), whole.tools)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    where: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    raw: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Tokens of a prompt, through the chat template with its options, or as plain text with `raw`.

    Raises:
      InputError: nothing to ask; tools or their calls, which the template, or `raw`, would leave out.
    """
    if not any(message["content"].strip() for message in messages if message["role"] != "system"):
        raise InputError(expected=f"some text in {where}", found="an empty prompt", remedy="Give a prompt.")
    if raw:
        parts = ["tools"] if tools else [key for key in CARRIED for message in messages if key in message]
        if parts:
            raise InputError(
                expected=f"texts alone in {where}, which --raw sends without a template",
                found=f"{parts[0]!r}",
                remedy="Leave out --raw, or the tools.",
            )
        return tuple(text_ids(tokenizer, "\n".join(message["content"] for message in messages)))
    hidden = unseen(tokenizer, messages, tools, options)
    if hidden:
        raise InputError(
            expected=f"a chat template that shows the {hidden!r} of {where}",
            found="one that leaves them out",
            remedy="Take a target whose template knows tools, or a prompt without them.",
        )
    return tuple(chat_ids(tokenizer, messages, add_generation_prompt=True, tools=tools, options=options))
