"""Messages of conversations as files hold them: roles, texts, and tools with their calls and results.

Prompts and training rows are read by the same rules, so that what a target is asked is what its draft is trained on.
"""

from __future__ import annotations

import json
from typing import Any

# Parts of a message that go to the template as they are, and those that are not carried: better none than half.
CARRIED = ("tool_calls", "tool_call_id", "name")
_UNREAD = ("function_call", "reasoning_content")


class MessageError(ValueError):
    """Messages that cannot be used; the text says why in a few words."""


def read_text(value: Any) -> str:
    """Text of a message: a string, or a list of text parts.

    Raises:
      MessageError: neither, or characters that UTF-8 cannot write.
    """
    if isinstance(value, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in value):
            raise MessageError("a message with a part that is not text")
        value = "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        raise MessageError("a message without text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MessageError("half a surrogate pair in a text") from error
    return value


def read_messages(value: Any, role_key: str = "role", content_key: str = "content") -> list[dict[str, Any]]:
    """Messages with `role`, `content` and what they have of `CARRIED`.

    Raises:
      MessageError: not messages, or with a part that is not carried.
    """
    if not isinstance(value, list):
        raise MessageError("a conversation that is not a list")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get(role_key), str):
            raise MessageError(f"a message without {role_key!r}")
        unread = [key for key in _UNREAD if message.get(key)]
        if unread:
            raise MessageError(f"a message with {unread[0]!r}, which is not supported")
        carried = {key: message[key] for key in CARRIED if message.get(key)}
        if "tool_calls" in carried:
            carried["tool_calls"] = _calls(carried["tool_calls"])
        content = message.get(content_key)
        # A message that only calls tools has null for a text.
        text = "" if content is None and "tool_calls" in carried else read_text(content)
        messages.append({"role": message[role_key], "content": text, **carried})
    return messages


def _calls(value: Any) -> list[dict[str, Any]]:
    """Calls of tools with their arguments as objects, which templates write as the model would, and not as texts."""
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise MessageError("'tool_calls' that is not a list of objects")
    calls = []
    for call in value:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                call = call | {"function": function | {"arguments": json.loads(function["arguments"])}}
            except ValueError:
                raise MessageError("arguments of a tool that are not JSON") from None
        calls.append(call)
    return calls


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Descriptions of tools; None is none.

    Raises:
      MessageError: not a list of objects.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise MessageError("'tools' that is not a list of objects")
    return tuple(value)
