"""Passwords, tokens and keys, masked in everything that a run writes about its own start.

A secret is recognized by the name of its setting, and by the form of a URL: `scheme://user:secret@host` or
`?token=secret`.
"""

import re
from typing import Any

MASK = "<masked>"
_LEAST_KNOWN = 6  # minimum length of a secret to search for in other texts; a shorter one may be an ordinary word
_NAME = (
    r"(?:[A-Za-z0-9_.-]{0,80}(?:[_.-]|(?<=[a-z])(?=[A-Z])))?(?i:pass(?:words?|wd|phrase)?|secrets?|credentials?|cookie|"
    r"authorization|api[_-]?keys?|(?:access|secret|private|account|signing|encryption)[_-]?keys?|"
    r"(?:access|api|auth|bearer|refresh|session)[_-]?tokens?|"
    r"(?<!pad.)(?<!eos.)(?<!bos.)(?<!unk.)(?<!cls.)(?<!sep.)(?<!mask.)(?<!start.)(?<!end.)(?<!special.)token)"
)
_IS_SECRET = re.compile(rf"alert|{_NAME}")  # whose URL holds a secret as a part of its path
_IS_FLAG = re.compile(rf"--?(?:alert|{_NAME})")
_IN_TEXT = re.compile(
    r"(?P<url>(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://[^/\s:@'\"]{0,200}:)[^/\s@'\"]+(?=@)"
    rf"|(?P<query>[?&](?:{_NAME}|(?i:[a-z-]*signature|sig))=)[^&\s'\"#]+"
    rf"|(?P<flag>(?<![^\s'\"])--?{_NAME}=)[^\s'\"]+"
    rf"|(?P<literal>(?<![A-Za-z0-9_.-]){_NAME}['\"]?\s*(?::\s*\w+\s*)?[:=]\s*(?P<quote>['\"]))(?:(?!(?P=quote)).)+"
)
_known: set[str] = set()  # secrets that this process has masked


def masked(value: Any, secret: bool = False) -> Any:
    """Masks the secrets in a tree of dicts, lists and values; with `secret`, all text in it is secret."""
    if isinstance(value, dict):
        return {name: masked(item, secret or is_secret(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        flags = [isinstance(item, str) and _IS_FLAG.fullmatch(item) is not None for item in ("", *value)]
        return [masked(item, secret or flag) for item, flag in zip(value, flags)]
    if not isinstance(value, str) or not value:
        return value
    if not secret:
        is_flag = value.startswith("-") and "=" in value and _IS_FLAG.fullmatch(value.partition("=")[0])
        return f"{value.partition('=')[0]}={masked(value.partition('=')[2], True)}" if is_flag else _in_text(value)
    if len(value) >= _LEAST_KNOWN and value != MASK:
        _known.add(value)
    return MASK


def is_secret(name: object) -> bool:
    """Returns whether a setting with this name holds a secret."""
    return isinstance(name, str) and _IS_SECRET.fullmatch(name) is not None


def masked_text(text: str) -> str:
    """Masks secrets in text such as an error: those with a known form, and those seen before in settings."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _in_text(text)


def _in_text(text: str) -> str:
    return _IN_TEXT.sub(
        lambda match: f"{next(filter(None, match.group('url', 'query', 'flag', 'literal')))}{MASK}", text
    )
