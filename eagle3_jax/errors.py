"""The one kind of error that bad input raises.

Every check of user input raises `InputError`, so that the command line can print one paragraph and exit with
code 2, and callers of the Python API can catch a single type. Anything else that escapes is a fault of ours.
"""

from __future__ import annotations


class InputError(ValueError):
    """Input that cannot be used, said in three parts.

    Args:
      expected: what would have been right.
      found: what was there instead, with the file, key or value that decides it.
      remedy: what the user can do about it.
    """

    def __init__(self, *, expected: str, found: str, remedy: str):
        self.expected = expected
        self.found = found
        self.remedy = remedy
        super().__init__(f"expected {expected}; found {found}. {remedy}")
