"""Text to tokens and back: prompts, stop ids, streaming and stop strings.

A target folder's own tokenizer does the work. What is added here is what its callers get wrong: one list type
under every version of transformers, one BOS, every stop id of the folder, and text that never changes once shown.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from eagle3_jax.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Classes that read tokenizer.json as it is. AutoTokenizer picks them too, but imports PyTorch on the way.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# A stream re-decodes its last tokens at each push; past the first number it forgets all but the second.
_WINDOW, _KEPT = 64, 16


@contextmanager
def _without_torch_advice() -> Iterator[None]:
    """Drops the one line in which transformers says that PyTorch is missing: nothing here needs it."""

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not ("PyTorch" in message and "found" in message)

    logger = logging.getLogger("transformers")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            expected=f"a JSON object in {path}", found=str(error), remedy="Copy the file from the model again."
        ) from error
    if not isinstance(value, dict):
        raise InputError(
            expected=f"a JSON object in {path}",
            found=type(value).__name__,
            remedy="Copy the file from the model again.",
        )
    return value


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, from local files only and without running code from the folder.

    Spaces are kept as decoded (`clean_up_tokenization_spaces` off), so that text does not depend on the version of
    transformers and can be streamed.

    Raises:
      InputError: the folder or its tokenizer files are missing or unreadable.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise InputError(
            expected=f"a tokenizer in {folder} (one of {', '.join(_VOCABULARY_FILES)})",
            found="none of these files" if folder.is_dir() else "no such folder",
            remedy="Copy the tokenizer files of the model there, tokenizer_config.json included.",
        )
    named = _read_object(folder / "tokenizer_config.json").get("tokenizer_class")
    with _without_torch_advice():
        import transformers

        plain = named in _PLAIN_CLASSES and (folder / "tokenizer.json").is_file()
        loader = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
        try:
            tokenizer = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers and tokenizers raise many types, bare Exception among them
            raise InputError(
                expected=f"a readable tokenizer in {folder}",
                found=f"{type(error).__name__}: {error}",
                remedy="Copy the tokenizer files of the model again, or save them with a newer transformers.",
            ) from error
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of `text` alone: markers written in it count as special tokens, none is added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, special: bool = False) -> str:
    """Text of generated tokens, spaces as they are; special tokens are left out unless asked for."""
    return tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)  # type: ignore[return-value]


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """A conversation as the target's chat template writes it.

    Args:
      tokenizer: of the target.
      messages: the turns.
      add_generation_prompt: end with what opens a reply.
      tools: descriptions of what the model may call.
      options: further variables of the template, such as enable_thinking.

    Raises:
      InputError: the tokenizer has no chat template, or the template refuses these messages.
    """
    from jinja2.exceptions import TemplateError

    if not tokenizer.chat_template:
        raise InputError(
            expected="a tokenizer with a chat template",
            found=f"none in {tokenizer.name_or_path or 'this tokenizer'}",
            remedy="Pass --raw to send the prompt as plain text, or add chat_template.jinja to the target's folder.",
        )
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )  # type: ignore[return-value]
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise InputError(
            expected="messages that the target's chat template accepts",
            found=f"roles {roles}: {error}",
            remedy="Change the conversation to the turns that the target was trained with.",
        ) from error


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Tokens of a conversation, a plain list under every version of transformers.

    The text of the template is tokenised with nothing added, as `apply_chat_template` does, so a BOS comes from the
    template alone and never twice.

    Raises:
      InputError: the tokenizer has no chat template, or the template refuses these messages.
    """
    text = chat_text(tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools, options=options)
    return plain_ids(tokenizer, text)


def unseen(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """What a chat template leaves out in silence: "tools", "tool_calls", or "" when it shows what there is of both.

    Raises:
      InputError: see `chat_text`.
    """
    silent = [{key: part for key, part in message.items() if key != "tool_calls"} for message in messages]
    fewer = {}
    if tools:
        fewer["tools"] = (messages, ())
    if any(message.get("tool_calls") for message in messages):
        fewer["tool_calls"] = (silent, tools)
    if not fewer:
        return ""
    whole = chat_text(tokenizer, messages, add_generation_prompt=False, tools=tools, options=options)
    for name, (some, described) in fewer.items():
        try:
            if chat_text(tokenizer, some, add_generation_prompt=False, tools=described, options=options) == whole:
                return name
        except InputError:  # a template that misses them has not left them out
            continue
    return ""


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a raw prompt: starts with a BOS iff the tokenizer adds one, never with two; no EOS.

    Raises:
      InputError: the prompt has no token at all.
    """
    ids = plain_ids(tokenizer, text)
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and list(tokenizer("", verbose=False)["input_ids"])[:1] == [bos]
    if adds_bos and ids[:1] != [bos]:
        ids = [bos, *ids]
    if not ids:
        raise InputError(
            expected="a prompt of at least one token", found=f"{text!r}", remedy="Give a prompt that is not empty."
        )
    return ids


def eos_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a reply, sorted: generation_config.json, config.json and the tokenizer together.

    Instruct models often name their end-of-turn token in generation_config.json only. Empty where none names one.

    Raises:
      InputError: a file's `eos_token_id` is neither an id, a list of ids nor null.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_object(Path(folder) / name).get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise InputError(
                expected=f"eos_token_id in {Path(folder) / name} to be an id or a list of ids",
                found=repr(value),
                remedy="Correct the file.",
            )
        found.update(ids)
    if isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that `decode` leaves out, id to text."""
    return {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def check_stops(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> tuple[str, ...]:
    """Stop strings that can occur in decoded text.

    Raises:
      InputError: one is empty, or holds a special token, which decoded text leaves out.
    """
    specials = special_tokens(tokenizer).values()
    for stop in stops:
        special = [token for token in specials if token in stop]
        if not stop or special:
            raise InputError(
                expected="stop strings of at least one character, without special tokens",
                found=f"{stop!r}" + (f", which holds {special[0]!r}" if special else ""),
                remedy="Leave it out: a special token that ends a reply is an eos_token_id of the target's folder.",
            )
    return tuple(stops)


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that is complete first, reading character by character; longest on a tie."""
    starts = [(text.find(stop), len(stop)) for stop in stops]
    found = [(start + length, start) for start, length in starts if start >= 0]
    if not found:
        return None
    end, start = min(found)
    return start, end


def find_stop(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stops: Sequence[str], start: int
) -> tuple[int, str] | None:
    """The first token that completes a stop string, whatever blocks the tokens came in.

    Args:
      ids: all tokens generated since the prompt, without the prompt.
      stops: see `check_stops`.
      start: tokens of `ids` that were searched before; a stop string may begin among them.

    Returns:
      The number of tokens up to and including the completing one, and their text cut before the stop string; None
      when no stop string is complete.
    """
    if not stops:
        return None
    ids = list(ids)
    longest = max(map(len, stops))
    for count in range(start + 1, len(ids) + 1):
        # A few tokens tell whether a stop string just ended, unless they begin inside a character.
        text = decode(tokenizer, ids[max(0, count - longest - 8) : count])
        if len(text) < longest + 4 or _UNFINISHED in text:
            text = decode(tokenizer, ids[:count])
        if _first_stop(text, stops) is None:
            continue
        text = decode(tokenizer, ids[:count])
        cut = _first_stop(text, stops)
        if cut is not None:
            return count, text[: cut[0]]
    return None


class TextStream:
    """Text of a growing list of tokens, given out as soon as it can no longer change.

    The pieces joined are exactly `decode` of all tokens, cut before the first stop string. Held back meanwhile: an
    incomplete character, and text that may be the beginning of a stop string.

    Args:
      tokenizer: decodes; see `load_tokenizer`.
      stops: see `check_stops`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._window: list[int] = []  # the last tokens
        self._read = 0  # characters of the window's text that are in _held or were given out
        self._held = ""
        self._stopped = False
        self._special = frozenset(special_tokens(tokenizer))

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that they settle, often an empty string."""
        self._window.extend(ids)
        text = decode(self._tokenizer, self._window)
        settled = self._settled(text)
        self._held += text[self._read : settled]
        self._read = max(self._read, settled)
        if settled == len(text) and len(self._window) > _WINDOW:
            self._shrink(text)
        return self._give(final=False)

    def finish(self) -> str:
        """The rest of the text; the stream takes no more tokens."""
        self._held += decode(self._tokenizer, self._window)[self._read :]
        self._window, self._read = [], 0
        return self._give(final=True)

    def _settled(self, text: str) -> int:
        """Characters of the window's text that no later token can change."""
        settled = len(text.rstrip(_UNFINISHED))
        # Byte tokens are judged as one run: a broken last byte turns the characters before it into replacements.
        run = len(self._window)
        while run > 0 and (self._window[run - 1] in self._special or self._is_byte(self._window[run - 1])):
            run -= 1
        if any(self._is_byte(i) for i in self._window[run:]):
            settled = min(settled, len(decode(self._tokenizer, self._window[:run])))
        return settled

    def _is_byte(self, token: int) -> bool:
        return bool(_BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))))

    def _shrink(self, text: str) -> None:
        """Forgets all but the last tokens; they must bring text of their own, which takes a leading strip upon it."""
        kept = self._window[-_KEPT:]
        tail = decode(self._tokenizer, kept)
        if tail.strip() and text.endswith(tail):
            self._window, self._read = kept, len(tail)

    def _give(self, *, final: bool) -> str:
        if self._stopped:
            self._held = ""
            return ""
        cut = _first_stop(self._held, self._stops)
        if cut is not None:
            self._stopped = True
            given, self._held = self._held[: cut[0]], ""
            return given
        keep = 0 if final else self._stop_prefix()
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given

    def _stop_prefix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
