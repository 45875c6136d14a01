"""`eagle3-jax data regenerate`: the target answers the questions of conversations, turn by turn.

What others answered in the data is dropped; each later question follows the target's own earlier answers. A
conversation is written as one line when its last answer has ended, so that an interruption never leaves half of one.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from eagle3_jax import runtime
from eagle3_jax.checkpoint import load_target, read_target_config
from eagle3_jax.config import TargetConfig
from eagle3_jax.engine import decode
from eagle3_jax.errors import InputError
from eagle3_jax.files import at
from eagle3_jax.prompts import Conversation, encode_prompt, read_conversation, read_jsonl, read_lines
from eagle3_jax.requests import Answer, Request, check_request
from eagle3_jax.sharding import entered, make_mesh, unsplit
from eagle3_jax.target import Target, target_specs
from eagle3_jax.tokenizer import chat_text, eos_ids, load_tokenizer
from eagle3_jax.tokenizer import decode as decode_text

logger = logging.getLogger(__name__)

Message = dict[str, Any]
_ASKED = {"system", "user", "assistant"}


def questions(conversation: Conversation, where: str, most: int | None = None) -> list[tuple[Message, ...]]:
    """The messages that come before each answer: a user's, with what precedes it, answers of others left out.

    Args:
      conversation: of a data file.
      where: names it in messages.
      most: so many of the first questions; None for all. Those after a tool's result are never asked: it belongs to
        another model's call.

    Raises:
      InputError: no question, or one without text.
    """
    found: list[tuple[Message, ...]] = []
    before: list[Message] = []
    for message in conversation.messages:
        if message["role"] == "assistant":
            continue
        if message["role"] not in _ASKED or len(found) == most:
            break
        before.append(message)
        if message["role"] == "user":
            if not message["content"].strip():
                raise InputError(
                    expected=f"some text in turn {len(found) + 1} of {where}",
                    found="an empty prompt",
                    remedy="Give a prompt.",
                )
            found.append(tuple(before))
            before = []
    if not found:
        raise InputError(
            expected=f"a user's turn in {where}",
            found="roles " + (", ".join(message["role"] for message in conversation.messages) or "none"),
            remedy="Correct the row or leave it out.",
        )
    return found


@dataclasses.dataclass
class Dialogue:
    """A conversation on its way.

    Attributes:
      id, source: of its row.
      tools: described to the target at every turn.
      waiting: questions that have not been asked.
      messages: all up to the question that is asked now.
      request: that question; None once the last answer has ended.
      replies: texts of the answers.
      finished: whether the last one came to its end-of-turn token.
      tokens: of all answers.
      ended: why questions were left unasked, if some were.
    """

    id: str
    source: Any
    tools: tuple[Message, ...]
    waiting: list[tuple[Message, ...]]
    messages: list[Message]
    request: Request | None = None
    replies: list[str] = dataclasses.field(default_factory=list)
    finished: bool = True
    tokens: int = 0
    ended: str = ""

    def record(self, temperature: float) -> dict[str, Any]:
        """As training reads it: all earlier answers among the messages, the last one as the response."""
        tools = {"tools": list(self.tools)} if self.tools else {}
        return {
            "id": self.id, "source": self.source, "messages": self.messages, **tools, "temperature": temperature,
            "response": self.replies[-1], "finished": self.finished, "n_tokens": self.tokens,
        }  # fmt: skip


class Asker:
    """Makes requests of dialogues, one turn after another."""

    def __init__(self, args: argparse.Namespace):
        self.folder = Path(args.target)
        self.config, self.tokenizer = read_target_config(self.folder), load_tokenizer(self.folder)
        self.options, self.longest = dict(args.template), args.max_prompt_tokens
        self.values = {
            "max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "top_k": args.top_k,
            "top_p": args.top_p,
        }  # fmt: skip

    def begin(self, row: Mapping[str, Any], name: str, where: str, *, turns: int | None, seed: int) -> Dialogue | None:
        """The dialogue of a row with its first request; None where the first question is too long for it.

        Raises:
          InputError: nothing to ask; a question that the template refuses, also a later one; a first one that leaves
            no room in the context.
        """
        whole = read_conversation(row, where)
        first, *rest = questions(whole, where, turns)
        one = Dialogue(name, row.get("source"), whole.tools, rest, list(first))
        if (turns is None or len(rest) + 1 < turns) and {message["role"] for message in whole.messages} - _ASKED:
            one.ended = "a result of another model's call"
        tokens = self._tokens(one, where)
        if self.longest is not None and len(tokens) > self.longest:
            return None
        one.request = Request(tokens=tokens, seed=seed, **self.values)
        check_request(one.request, self.config, where)
        if rest:
            # Found out now, not when the answers of hours are there.
            trial = [*first, *(part for later in rest for part in ({"role": "assistant", "content": "x"}, *later))]
            chat_text(self.tokenizer, trial, add_generation_prompt=True, tools=whole.tools, options=self.options)
        return one

    def _tokens(self, one: Dialogue, where: str) -> tuple[int, ...]:
        return encode_prompt(self.tokenizer, one.messages, where, tools=one.tools, options=self.options)

    def take(self, one: Dialogue, answer: Answer) -> None:
        """Put an answer into its dialogue, and make the next request where there is one."""
        asked, one.request = one.request, None
        assert asked is not None
        one.tokens += len(answer.token_ids)
        ended = answer.finish_reason == "stop"
        text = decode_text(self.tokenizer, answer.token_ids[:-1] if ended else answer.token_ids)
        if one.replies and not text.strip():
            # Nothing to learn from; the line ends with the answer before.
            while one.messages[-1]["role"] != "assistant":
                one.messages.pop()
            one.messages.pop()
            one.ended = "an empty answer"
            return
        one.replies.append(text)
        one.finished = ended
        if not one.waiting:
            return
        if not ended or not text.strip():
            # What is cut short, or says nothing, is no turn that a conversation goes on from.
            one.ended = "an answer cut short" if not ended else "an empty answer"
            return
        messages = one.messages
        one.messages = [*messages, {"role": "assistant", "content": text}, *one.waiting[0]]
        tokens = self._tokens(one, f"a later turn of {one.id}")
        most = min(self.config.context_limit - 1, self.longest or self.config.context_limit)
        if len(tokens) > most:
            one.messages, one.ended = messages, "no room for the next question"
            return
        del one.waiting[0]
        one.request = dataclasses.replace(asked, tokens=tokens)


def waves(asked: Sequence[Dialogue], batch: int, turns: int | None) -> Iterator[list[Dialogue]]:
    """Groups that are answered to their ends one after another, small enough that an interruption loses little.

    Prompts of like length share a short cache; long and short groups alternate, so that any prefix of the output is a
    mix.
    """
    ordered = sorted(asked, key=lambda one: len(one.request.tokens) if one.request else 0)
    # Answers of a single turn are written as they end; those of several when the last one has.
    group = max(batch * (16 if turns == 1 else 4), 64)
    starts = list(range(0, len(ordered), group))
    for start in [start for pair in zip(starts, reversed(starts)) for start in pair][: len(starts)]:
        yield ordered[start : start + group]


def regenerate(args: argparse.Namespace) -> int:
    """Let the target answer prompts, appending each conversation as it ends."""
    if "://" in args.out:
        raise InputError(
            expected="a local file as --out, which answers are appended to",
            found=args.out,
            remedy="Write a local file and copy it to the bucket.",
        )
    info = runtime.start(args.device, args.dtype, args.cache_dir)
    print(info, file=sys.stderr)
    out = Path(args.out)
    rows = read_jsonl(at(args.prompts))[args.skip :][: args.limit]
    known = known_ids(map(at, args.exclude)) | (set() if args.force else answered(out))
    asker = Asker(args)
    mesh = _mesh(args.tensor, asker.config)
    asked: list[Dialogue] = []
    before = too_long = 0
    for index, row in enumerate(rows):
        name = str(args.skip + index if row.get("id") is None else row["id"])
        if name in known:
            before += 1
            continue
        where = f"row {args.skip + index + 1} of {args.prompts}"
        one = asker.begin(row, name, where, turns=args.turns, seed=args.seed + index)
        if one is None:
            too_long += 1
        else:
            asked.append(one)
    skipped = f", {too_long} longer than {args.max_prompt_tokens} tokens left out" if too_long else ""
    print(f"{len(asked)} prompts to answer, {before} answered before{skipped}", file=sys.stderr)
    if not asked:
        return 0
    with entered(mesh):
        return _answer(asker, asked, out, args, load_target(asker.folder, runtime.DTYPES[info.dtype], mesh=mesh))


def _mesh(tensor: int, config: TargetConfig) -> Mesh | None:
    """Devices that split the target, not its rows; None for one."""
    if tensor == 1:
        return None
    if tensor > jax.device_count():
        raise InputError(
            expected=f"--tensor of at most the {jax.device_count()} devices here", found=str(tensor),
            remedy="Give a smaller number, which should divide the target's heads.",
        )  # fmt: skip
    mesh = make_mesh((1, 1, tensor), devices=jax.devices()[:tensor])
    for note in unsplit(target_specs(config), mesh):
        logger.info("%s", note)
    return mesh


def _answer(asker: Asker, asked: Sequence[Dialogue], out: Path, args: argparse.Namespace, target: Target) -> int:
    """Run the target over the dialogues and write them."""
    ends = eos_ids(asker.folder, asker.tokenizer)
    began, tokens, done, replies = time.perf_counter(), 0, 0, 0
    early: collections.Counter[str] = collections.Counter()
    out.parent.mkdir(parents=True, exist_ok=True)
    # Replaced only now, when nothing can be wrong with the input any more.
    with out.open("w" if args.force else "a", encoding="utf-8") as file:
        for wave in waves(asked, args.batch, args.turns):
            while wave:
                # Fewer than a batch are decoded by few sizes of program, powers of two.
                batch = args.batch if len(wave) >= args.batch else 1 << (len(wave).bit_length() - 1)
                requests = [one.request for one in wave if one.request is not None]
                for event in decode(target, None, requests, batch=batch, eos=ends):
                    if event.answer is None:
                        continue
                    one = wave[event.index]
                    asker.take(one, event.answer)
                    tokens += len(event.answer.token_ids)
                    if one.request is not None:
                        continue
                    file.write(json.dumps(one.record(args.temperature), ensure_ascii=False) + "\n")
                    file.flush()
                    done, replies = done + 1, replies + len(one.replies)
                    early.update([one.ended] if one.ended else [])
                    if done % 20 == 0:
                        rate = tokens / (time.perf_counter() - began)
                        print(
                            f"{done}/{len(asked)} answered, {tokens} tokens, {rate:.0f} tok/s",
                            file=sys.stderr, flush=True,
                        )  # fmt: skip
                wave = [one for one in wave if one.request is not None]
    if args.turns != 1:
        reasons = "".join(f"; {count} ended early: {reason}" for reason, count in early.items())
        print(f"{done} conversations with {replies} answers{reasons}", file=sys.stderr)
    print(args.out)
    return 0


def known_ids(paths: Iterable[Path]) -> set[str]:
    """Ids of the rows of files."""
    rows = (row for path in paths for row in read_jsonl(path))
    return {str(row["id"]) for row in rows if row.get("id") is not None}


def answered(path: Path) -> set[str]:
    """Ids of the answers in a file whose last line an interruption may have left without its end; cuts that line off.

    Raises:
      InputError: another line does not parse; nothing is cut then.
    """
    if not path.exists() or not path.stat().st_size:
        return set()
    content = path.read_bytes()
    whole, broken = content.rfind(b"\n") + 1, len(content)
    if whole < broken:
        try:
            json.loads(content[whole:])
            with path.open("ab") as file:
                file.write(b"\n")
        except ValueError:
            if not whole:
                raise InputError(
                    expected=f"answers, one JSON object a line, at {path}",
                    found="a single line that does not parse",
                    remedy="Choose another --out, or --force to replace the file.",
                ) from None
            whole_lines = read_lines(content[:whole].decode("utf-8"), str(path))
            with path.open("r+b") as file:
                file.truncate(whole)
            return {str(row["id"]) for row in whole_lines if row.get("id") is not None}
    return known_ids([path])
