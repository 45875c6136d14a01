"""Prompts as users give them: one text, or a jsonl file in one of three forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from eagle3_jax.errors import InputError
from eagle3_jax.tokenizer import chat_ids, text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = '{"prompt": text} | {"messages": [{"role", "content"}, ...]} | {"turns": [text, ...]}'


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


def prompt_messages(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    """What is to be answered: `messages` up to the last user turn, or the first of `turns`.

    An answer after that turn, as data sets have one, is not part of the question.

    Raises:
      InputError: a row of no known form, or without a user's text.
    """
    if isinstance(row.get("messages"), list):
        messages = []
        for message in row["messages"]:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
                break
            messages.append({"role": str(message["role"]), "content": message["content"]})
        else:
            users = [index for index, message in enumerate(messages) if message["role"] == "user"]
            return messages[: users[-1] + 1] if users else messages
    elif isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    elif isinstance(row.get("turns"), list) and row["turns"] and isinstance(row["turns"][0], str):
        return [{"role": "user", "content": row["turns"][0]}]
    raise InputError(
        expected=f"a prompt as {FORMS} in {where}",
        found=f"keys {', '.join(map(str, row)) or 'none'}",
        remedy="Rewrite the row in one of these forms.",
    )


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    where: str,
    *,
    raw: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Tokens of a prompt, through the chat template with its options, or as plain text with `raw`.

    Raises:
      InputError: nothing to ask.
    """
    if not any(message["content"].strip() for message in messages if message["role"] != "system"):
        raise InputError(expected=f"some text in {where}", found="an empty prompt", remedy="Give a prompt.")
    if raw:
        return tuple(text_ids(tokenizer, "\n".join(message["content"] for message in messages)))
    return tuple(chat_ids(tokenizer, messages, add_generation_prompt=True, options=options))
