"""Files of conversations, read row by row.

A file of rows (jsonl, several forms) is read leniently, one bad row never costs a good one, and strictly, nothing is
dropped without a reason and a line number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_jax.errors import InputError
from eagle3_jax.messages import MessageError, read_messages, read_text, read_tools

FORMS = (
    '{"messages": [{"role", "content"}, ...]}',
    '{"messages": [...], "response": text, "finished": true}',
    '{"conversations": [{"from": "human", "value": text}, ...]}',
    '{"prompt": text, "response": text}',
    '{"text": conversation in the target\'s own template}',
)
_FORM_KEYS = ("messages", "conversations", "prompt", "text")
_ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "tool": "tool",
}  # fmt: skip
_SHOWN_LINES = 5


class RowError(InputError):
    """One row that cannot be used; `reason` is the short text under which it is counted."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(
            expected="a row with an assistant reply, in one of the forms " + " | ".join(FORMS),
            found=reason,
            remedy="Correct the row or leave it out.",
        )


@dataclass(frozen=True)
class Row:
    """One row of a file: a conversation as messages, or as text in the target's template.

    `tools` are the descriptions that the template shows to the model. `finished` says whether the last reply came to
    its end-of-turn token; `generated` whether that reply is text which the target wrote after the prompt (a
    "response"), rather than a turn of a dialogue.
    """

    line: int
    id: str
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    finished: bool = True
    generated: bool = False


@dataclass(frozen=True)
class ReadReport:
    """What became of the lines of a file; `dropped` maps each reason to its line numbers."""

    path: Path
    read: int
    kept: int
    blank: int
    dropped: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        blank = f" ({self.blank} blank lines skipped)" if self.blank else ""
        return f"{self.path}: {self.read} rows read{blank}, {self.kept} kept, {told(self.dropped)}."


@dataclass
class Tally:
    """Line numbers under each reason."""

    lines: dict[str, list[int]] = field(default_factory=dict)

    def add(self, reason: str, line: int) -> None:
        """Count a line."""
        self.lines.setdefault(reason, []).append(line)

    def frozen(self) -> dict[str, tuple[int, ...]]:
        """As reports hold it."""
        return {reason: tuple(lines) for reason, lines in self.lines.items()}


def told(dropped: Mapping[str, tuple[int, ...]]) -> str:
    """Reasons with their counts and first line numbers, for a report."""
    if not dropped:
        return "0 dropped"
    parts = []
    for reason, lines in dropped.items():
        shown = ", ".join(map(str, lines[:_SHOWN_LINES])) + (", ..." if len(lines) > _SHOWN_LINES else "")
        parts.append(f"{len(lines)} {reason} (line{'s' if len(lines) > 1 else ''} {shown})")
    return f"{sum(map(len, dropped.values()))} dropped: " + "; ".join(parts)


def _messages(value: Any, role_key: str, content_key: str) -> list[dict[str, Any]]:
    """Messages of a conversation with the roles system, user, assistant and tool."""
    messages = read_messages(value, role_key, content_key)
    for message in messages:
        if message["role"] not in _ROLES:
            raise RowError(f"a message from {message['role']!r}, which is not supported")
        message["role"] = _ROLES[message["role"]]
    return messages


def _parse(value: Any, line: int) -> Row:
    """One row from one JSON value. Null counts as absent: files with mixed forms fill their columns with it."""
    if not isinstance(value, dict):
        raise RowError("not a JSON object")
    value = {key: item for key, item in value.items() if item is not None}
    forms = [key for key in _FORM_KEYS if key in value]
    if len(forms) != 1:
        raise RowError("several of the keys " + ", ".join(forms) if forms else "none of the keys of a known form")
    form = forms[0]
    tools = read_tools(value.get("tools"))
    if tools and form == "text":
        raise RowError("'tools' beside a text, which has no place for them")
    name = str(value.get("id", line))
    finished = value.get("finished", True)
    if not isinstance(finished, bool):
        raise RowError("'finished' is neither true nor false")
    if form == "text":
        text = read_text(value["text"])
        if not text.strip():
            raise RowError("empty text")
        return Row(line, name, text=text)
    if form == "messages":
        messages = _messages(value["messages"], "role", "content")
    elif form == "conversations":
        messages = _messages(value["conversations"], "from", "value")
    else:
        messages = [{"role": "user", "content": read_text(value["prompt"])}]
    generated = "response" in value
    if generated:
        if messages and messages[-1]["role"] == "assistant":
            raise RowError("a response after an assistant turn")
        messages.append({"role": "assistant", "content": read_text(value["response"])})
    _check_turns(messages)
    return Row(line, name, tuple(messages), tools, finished=finished, generated=generated)


def _check_turns(messages: Sequence[Mapping[str, Any]]) -> None:
    """A conversation can train a draft when a user asked first and the last reply is not empty."""
    if not messages:
        raise RowError("empty conversation")
    replies = [message for message in messages if message["role"] == "assistant"]
    if not replies:
        raise RowError("no assistant reply")
    first = next(message["role"] for message in messages if message["role"] != "system")
    if first != "user":
        raise RowError("a reply before the first user turn")
    if not says_something(replies[-1]):
        raise RowError("empty reply")


def says_something(reply: Mapping[str, Any]) -> bool:
    """Whether a reply has a text or calls a tool."""
    return bool(reply["content"].strip() or reply.get("tool_calls"))


def read_rows(path: Path) -> tuple[list[Row], ReadReport]:
    """Rows of a jsonl file in any mixture of `FORMS`.

    Returns:
      The good rows in file order, and the report on all lines.

    Raises:
      InputError: the file is missing, or no row is left.
    """
    if not path.is_file():
        raise InputError(expected=f"a jsonl file at {path}", found="no such file", remedy="Check the path.")
    rows: list[Row] = []
    tally = Tally()
    read = blank = 0
    with path.open("rb") as file:  # bytes: text mode would fail on one bad line
        for line, raw in enumerate(file, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
            if not raw.strip():
                blank += 1
                continue
            read += 1
            try:
                rows.append(_parse(json.loads(raw.decode("utf-8")), line))
            except RowError as error:
                tally.add(error.reason, line)
            except MessageError as error:
                tally.add(str(error), line)
            except UnicodeDecodeError:
                tally.add("not UTF-8", line)
            except (ValueError, RecursionError):  # of JSON, or of a number too long for Python
                tally.add("not valid JSON", line)
    report = ReadReport(path, read, len(rows), blank, tally.frozen())
    if not rows:
        raise InputError(
            expected="rows in one of the forms " + " | ".join(FORMS),
            found=str(report).rstrip("."),
            remedy="Bring the file into one of these forms.",
        )
    return rows, report
