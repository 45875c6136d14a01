"""Conversations to tokens with an exact mask of what the target itself would have generated.

Each row of a file (`training.rows`) becomes tokens and spans: token i has span k when it belongs to the k-th assistant
reply, end-of-turn token included, and span 0 elsewhere. Only tokens that follow the very prefix which decoding would
have fed to the target get a span.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3_jax.errors import InputError
from eagle3_jax.tokenizer import chat_text, plain_ids, unseen
from eagle3_jax.training.rows import ReadReport, Row, RowError, Tally, read_rows, says_something, told

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Words that no template treats in a special way.
_PROBE_USER, _PROBE_REPLY = "zqaskqz", "zqreplyqz"


@dataclass(frozen=True)
class Encoded:
    """One document: `tokens` int32 [n] and `spans` int32 [n], 0 where a token is no part of a supervised reply.

    `left_out` counts replies without a span although the row has them: the template shows them otherwise in a later
    turn's history than the target wrote them, they are empty, or only the last reply was asked for.
    """

    tokens: np.ndarray
    spans: np.ndarray
    left_out: int = 0

    def __post_init__(self) -> None:
        if self.tokens.shape != self.spans.shape or self.tokens.ndim != 1 or not self.tokens.size or self.spans[0]:
            raise ValueError("a document has tokens [n], spans [n] and a first token outside every span")


@dataclass(frozen=True)
class EncodeReport:
    """What became of the rows of a file: rows and tokens kept, replies left out, rows cut, rows dropped."""

    read: ReadReport
    rows: int
    tokens: int
    supervised: int
    replies: int
    left_out: int
    cut: int
    max_length: int
    dropped: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        left_out = (
            f", {self.left_out} replies left out (rewritten in later turns, empty, or not the last)"
            if self.left_out
            else ""
        )
        return (
            f"{self.read} {self.rows} rows encoded: {self.tokens} tokens, {self.supervised} of them supervised in "
            f"{self.replies} replies{left_out}; {self.cut} rows cut at {self.max_length} tokens; {told(self.dropped)}."
        )


@dataclass(frozen=True)
class Markers:
    """How a chat template surrounds a reply, found by rendering a probe conversation.

    Attributes:
      header: what stands before a reply ("<|im_start|>assistant" and a newline).
      end_token: the token that ends a reply ("<|im_end|>"), `end_id` its id.
      turn_ids: ids of the tokens that open and close turns; a reply has none of them inside.
      end_of_turn: what a finished reply is followed by, up to and including that token.
      tail: everything the template writes after a reply.
      bos: the token that opens a conversation and occurs nowhere else, or "".
      options: what the template is given besides messages and tools, such as enable_thinking.
    """

    header: str
    end_token: str
    end_id: int
    turn_ids: frozenset[int]
    end_of_turn: str
    tail: str
    bos: str
    options: Mapping[str, Any] = field(default_factory=dict)


def find_markers(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] = MappingProxyType({})) -> Markers:
    """How the target's chat template surrounds a reply, under the options that it is given.

    Raises:
      InputError: there is no chat template, or it ends a reply with no token of its own.
    """
    user = [{"role": "user", "content": _PROBE_USER}]
    render = partial(chat_text, tokenizer, options=options)
    whole = render([*user, {"role": "assistant", "content": _PROBE_REPLY}], add_generation_prompt=False)
    at = whole.rfind(_PROBE_REPLY)
    tail = whole[at + len(_PROBE_REPLY) :] if at >= 0 else ""
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    ends = [(tail.find(token), -len(token), token) for token in added if token in tail]
    if not ends:
        raise InputError(
            expected="a chat template that ends a reply with a token of its own",
            found=f"{tail!r} after the reply" if at >= 0 else "a template that does not write the reply",
            remedy="Use the chat template of the instruct model.",
        )
    start, _, end_token = min(ends)
    opened = render(user, add_generation_prompt=True)
    closed = render(user, add_generation_prompt=False)
    header = opened.removeprefix(closed) if opened.startswith(closed) else ""
    header = header or opened[opened.rfind(_PROBE_USER) + len(_PROBE_USER) :]
    # Some models name the marker that opens every turn as their BOS (SmolLM2): that one belongs to the turns.
    bos = tokenizer.bos_token
    opens_once = isinstance(bos, str) and whole.startswith(bos) and whole.count(bos) == 1
    return Markers(
        header=header,
        end_token=end_token,
        end_id=added[end_token],
        turn_ids=frozenset(added.values()) & frozenset(plain_ids(tokenizer, closed + tail)),
        end_of_turn=tail[: start + len(end_token)],
        tail=tail,
        bos=str(bos) if opens_once else "",
        options=options,
    )


def _chat_cuts(
    tokenizer: PreTrainedTokenizerBase, row: Row, markers: Markers
) -> tuple[str, list[tuple[int, int]], int]:
    """Text of a conversation up to its last reply, the replies as (start, end) in it, and how many are left out."""
    turns = [k for k, message in enumerate(row.messages) if message["role"] == "assistant"]

    def render(count: int, prompt: bool) -> str:
        try:
            return chat_text(
                tokenizer, row.messages[:count], add_generation_prompt=prompt, tools=row.tools, options=markers.options
            )
        except InputError as error:
            raise RowError("refused by the chat template") from error

    def through(k: int, finished: bool) -> str | None:
        """Text up to the end of reply k, or None where the template writes something else after it."""
        whole = render(k + 1, False)
        if not whole.endswith(markers.tail):
            return None
        return whole.removesuffix(markers.tail) + (markers.end_of_turn if finished else "")

    try:
        hidden = unseen(tokenizer, row.messages, row.tools, markers.options)
    except InputError as error:
        raise RowError("refused by the chat template") from error
    if hidden:
        raise RowError(f"{hidden!r} that the chat template does not show")
    last = turns[-1]
    prompt, text = render(last, True), through(last, row.finished)
    if text is None or not text.startswith(prompt):
        if not row.generated:
            raise RowError("the chat template does not write the reply after the generation prompt")
        # A template that opens the reply's thoughts in the prompt and leaves them out of the history.
        text = prompt + row.messages[last]["content"] + (markers.end_of_turn if row.finished else "")
    if not row.finished:
        text = text.rstrip(_UNFINISHED)  # a reply cut inside a character
    cuts = []
    for k in turns[:-1]:
        start, end = render(k, True), through(k, True)
        if end is not None and end.startswith(start) and text.startswith(end) and says_something(row.messages[k]):
            cuts.append((len(start), len(end)))
    return text, [*cuts, (len(prompt), len(text))], len(turns) - 1 - len(cuts)


def _text_cuts(row_text: str, markers: Markers) -> tuple[str, list[tuple[int, int]], int]:
    """The same for text that already has the template's markers."""
    text = row_text
    if markers.bos:
        if text.startswith(markers.bos * 2):
            raise RowError("text with two BOS")
        text = text if text.startswith(markers.bos) else markers.bos + text
    cuts: list[tuple[int, int]] = []
    left_out = 0
    start = text.find(markers.header) if markers.header else -1
    while start >= 0:
        start += len(markers.header)
        end, following = text.find(markers.end_token, start), text.find(markers.header, start)
        if text[start : end if end >= 0 else None].strip():
            cuts.append((start, end + len(markers.end_token) if end >= 0 else len(text)))
        else:
            left_out += 1
        start = following
    if not cuts:
        raise RowError("no assistant reply between the target's own markers")
    return text[: cuts[-1][1]], cuts, left_out


def encode_row(tokenizer: PreTrainedTokenizerBase, row: Row, markers: Markers, last_turn_only: bool = False) -> Encoded:
    """Tokens and spans of one row, up to the end of its last reply.

    A reply has a span iff the tokens before it are exactly `chat_ids(messages before it, add_generation_prompt=True)`
    and the row then goes on as the reply's own turn was rendered: nothing that the template rewrote for the history,
    nothing where a token reaches over the border. What the template writes after the end-of-turn token has none.

    Args:
      tokenizer: of the target.
      row: see `read_rows`.
      markers: `find_markers(tokenizer)`.
      last_turn_only: give a span to the last reply alone.

    Raises:
      RowError: the row cannot be used, with the reason.
    """
    text, cuts, left_out = _chat_cuts(tokenizer, row, markers) if row.text is None else _text_cuts(row.text, markers)
    if last_turn_only:
        left_out, cuts = left_out + len(cuts) - 1, cuts[-1:]
    tokens = plain_ids(tokenizer, text)
    spans = np.zeros(len(tokens), np.int32)
    count = 0
    for start, end in cuts:
        before = plain_ids(tokenizer, text[:start])
        upto = tokens if end == len(text) else plain_ids(tokenizer, text[:end])
        exact = tokens[: len(before)] == before and tokens[: len(upto)] == upto
        if not exact or not 0 < len(before) < len(upto):
            left_out += 1
            continue
        reply = upto[len(before) :]
        if not markers.turn_ids.isdisjoint(reply[:-1] if reply[-1] == markers.end_id else reply):
            raise RowError("a token that opens or closes a turn inside a reply")
        count += 1
        spans[len(before) : len(upto)] = count
    if not count:
        raise RowError("a token reaches over the border between prompt and reply")
    return Encoded(np.asarray(tokens, np.int32), spans, left_out)


def encode_file(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    last_turn_only: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[Encoded], EncodeReport]:
    """Documents of a jsonl file, each cut at `max_length` tokens, and the report on all rows.

    Args:
      path: the file.
      tokenizer: of the target.
      max_length: tokens of the longest document.
      last_turn_only: supervise the last reply of a conversation alone.
      options: for the chat template, such as enable_thinking.

    Raises:
      InputError: the file is missing or holds no usable row, the tokenizer has no usable chat template, or no row has
        a supervised token (one row is shown as the tokenizer sees it).
    """
    if max_length < 3:
        raise InputError(
            expected="a max_length of 3 tokens or more", found=str(max_length), remedy="Raise it: 2048 is usual."
        )
    markers = find_markers(tokenizer, options)
    rows, read = read_rows(path)
    encoded: list[Encoded] = []
    tally = Tally()
    cut = 0
    for row in rows:
        try:
            document = encode_row(tokenizer, row, markers, last_turn_only)
        except RowError as error:
            tally.add(error.reason, row.line)
            continue
        if document.tokens.size > max_length:
            cut += 1
            document = Encoded(document.tokens[:max_length], document.spans[:max_length], document.left_out)
        if document.spans.any():
            encoded.append(document)
        else:
            tally.add(f"without a supervised token in the first {max_length} tokens", row.line)
    if not encoded:
        raise InputError(
            expected=f"assistant replies after {markers.header!r} and before {markers.end_token!r}",
            found=f"0 supervised tokens in {len(rows)} rows ({told(tally.frozen())}); line {rows[0].line} reads "
            f"{_as_tokenised(tokenizer, rows[0])!r}",
            remedy="Check that the rows were written with this target's chat template, or pass them as messages.",
        )
    return encoded, EncodeReport(
        read=read,
        rows=len(encoded),
        tokens=sum(document.tokens.size for document in encoded),
        supervised=sum(int(np.count_nonzero(document.spans)) for document in encoded),
        replies=sum(int(document.spans.max()) for document in encoded),
        left_out=sum(document.left_out for document in encoded),
        cut=cut,
        max_length=max_length,
        dropped=tally.frozen(),
    )


def _as_tokenised(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    """The beginning of a row, encoded and decoded again with its special tokens."""
    try:
        text = row.text if row.text is not None else chat_text(tokenizer, row.messages, add_generation_prompt=False)
    except InputError:
        text = "\n".join(f"{message['role']}: {message['content']}" for message in row.messages)
    return str(tokenizer.decode(plain_ids(tokenizer, text)[:100], skip_special_tokens=False))
