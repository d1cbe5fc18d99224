"""Passwords, tokens and keys, masked in every text that leaves looplib.

`masked_text` takes any text, and recognizes secrets by their form: what follows a name such as `password=`, and parts
of a URL. `masked` takes settings, whose names tell too, and remembers their secrets for later texts. All errors, log
lines and printed lines, and what a run writes about itself, go through one of them; in doubt they mask too much.
"""

import json
import logging as loggers
import os
import re
import sys
import threading
import traceback
import urllib.parse
from typing import Any

from absl import logging

MASK = "<masked>"
_LEAST_KNOWN = 6  # minimum length of a secret to search for in other texts; a shorter one may be an ordinary word
_NAME = (
    r"(?:[A-Za-z0-9_.-]{0,80}(?:[_.-]|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])))?"
    r"(?i:pass(?:words?|wd|phrase|code)?|pwd|pw|secrets?|jwt|sas|"
    r"credentials?|cookies?|auth(?:orization)?|dsn|webhooks?(?:[_-]?urls?)?|connection[_-]?string|"
    r"(?:api|access|secret|private|account|signing|encryption|storage|shared|master|client|service|license|ssh|wandb|openai|google|azure|aws|gcp|hmac)"
    r"[_-]?keys?(?:[_-]?id)?|shared[_-]?access[_-]?signature|"
    r"(?:access|api|auth|bearer|refresh|session|security|id)[_-]?tokens?|(?<!pad.)(?<!eos.)(?<!bos.)(?<!unk.)(?<!cls.)"
    r"(?<!sep.)(?<!mask.)(?<!start.)(?<!end.)(?<!special.)(?<!invalid)(?<!expired)token)"
    r"(?i:[_-]?\d{1,3}(?!\w)|[_-](?:base|read|write|prod|dev|test|old|new|value))?"
)
_ALERT = r"(?:[A-Za-z0-9_.-]{0,80}[_.-])?(?i:alert)"  # whose URL holds a secret as a part of its path
_IS_SECRET = re.compile(rf"{_ALERT}|{_NAME}")
_IS_FLAG = re.compile(rf"--?(?:{_ALERT}|{_NAME})")
_QUOTED = r"""(?:'(?:\\.|[^'\\\n])*'?|"(?:\\.|[^"\\\n])*"?)"""  # the end may have been cut off
_WORD = rf"(?:\\.|{_QUOTED}|[^\s'\"\\])+"  # as a shell takes it
_TAIL = rf"(?:{_QUOTED}|[^\s'\",;)}}\]\\])*"
_LITERAL = rf"[bBrRuUfF]{{0,2}}{_QUOTED}{_TAIL}"
_NO_VALUE = r"(?![ \t]*(?:(?:str|bytes|int|bool|None|True|False|null|true|false)[ \t]*(?:[,)\]}|=\n]|$)|# ))"  # in code
_SHOWN = rf"{MASK}(?![^\s,;)}}\]'\"])"
_IN_TEXT = re.compile(
    # What ends in a secret is kept up to it. First arguments of a command line, where prose may follow a flag.
    rf"(?P<single>(?<=')(?:--?)?{_NAME}=)(?:{_SHOWN}|(?:\\.|[^'\\\n])*(?:'(?=[\"\\]){_TAIL})?)"
    rf'|(?P<double>(?<=")(?:--?)?{_NAME}=)(?:{_SHOWN}|(?:\\.|[^"\\\n])*)'
    rf"|(?P<flag>(?<![A-Za-z0-9_.-])--?{_NAME}(?:=|['\"],[ \t]*|[ \t]+"
    rf"(?!(?:-|and|are|as|by|cannot|for|has|in|is|it|must|needs?|of|or|that|to|was|which|with)\b))){_WORD}"
    rf"|(?P<alert>(?<![A-Za-z0-9_.-])--?alert(?:=|[ \t]+))(?=['\"]?[a-z]+://){_WORD}"
    rf"|(?P<name>(?<![A-Za-z0-9_.-]){_NAME}\\?['\"]?[ \t]*(?::[ \t]*(?:str|bytes)[ \t]*(?==))?"
    rf"(?::?=>?(?![=>])|:|%3[ADad]|(?:is|,)(?=[ \t]*['\"])){_NO_VALUE}[ \t]*)"
    rf"(?:{_SHOWN}|[|>][^\s\w]?[ \t]*(?:\n[ \t]+[^\n]*)+|{_LITERAL}|(?<==){_WORD}|[^\n]+)"
    rf"|(?P<tag><{_NAME}>)[^<\n]+|(?P<login>(?<!\S)(?:-u|--user)[ =])[^\s:]+:\S+"
    r"|(?P<encoded>(?i:%3A%2F%2F))(?=\S*%40)\S+|(?P<parameter>[?&][\w.~%-]{1,80}=)\S+"
    r"|(?P<scheme>(?i:\bbearer)[ \t]+(?!tokens?\b|auth)|\bBasic[ \t]+(?=[\w+/-]*[A-Z0-9=+]))[^\s'\"]+"
    r"|(?<![\w.%+@:-])[\w.%+-]{1,80}:(?!//)[^\s'\"]{3,200}(?=@[\w\[])"  # user:password@host without a scheme
    r"|\b(?:(?:AKIA|ASIA)[A-Z0-9]{12,}|gh[opsur]_\w{6,}|github_pat_\w{6,}|glpat-[\w-]{6,}|xox[a-z]-[\w-]{6,}"
    r"|(?:hf_|sk-|AIza|ya29\.)[\w-]{16,}|eyJ[\w-]{6,}\.[\w.-]+|(?:bot)?\d{6,}:[\w-]{20,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*-----|\Z)"
)
# What follows the "://" of a URL. A colon that begins no port begins a password, which may hold anything up to an "@";
# without one it was cut off.
_PORT = r"(?:\d{1,5}(?:[/?#\s'\"),;:.\]}>|`]|$)|\s|$)"
_USER = re.compile(
    rf"[^\s/?#\"'<\[]{{0,200}}?:(?!{_PORT})(?:[^\n]*(?=@)|\S*(?:['\"…]|\.{{3}}|$))|[^\s/?#]{{0,200}}:\S*(?=@)"
    r"|(?!USER@)[^\s/?#]+(?=@)",
    re.MULTILINE,
)
_IN_STORE = re.compile(r"(?:abfss?|wasbs?)\Z")  # whose URLs are CONTAINER@ACCOUNT
_HOOK = re.compile(r"(?i)hook|telegram\.org|ifttt\.com|logic\.azure|ntfy\.")  # whose path is a secret
_known: set[str] = set()  # secrets that this process has masked


def masked(value: Any, secret: bool = False) -> Any:
    """Masks the secrets in a tree of dicts, lists and values; with `secret`, all text in it is secret."""
    if isinstance(value, dict):
        return {name: masked(item, secret or is_secret(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        flags = [isinstance(item, str) and _IS_FLAG.fullmatch(item) is not None for item in ("", *value)]
        return [masked(item, secret or flag) for item, flag in zip(value, flags)]
    if secret and type(value) in (int, float) and len(str(value)) >= _LEAST_KNOWN:
        value = str(value)
    if not isinstance(value, str) or not value:
        return value
    if secret:
        _remember(value, value)
        return MASK
    if flag := re.match(r"(--?[\w.-]+)=", value):
        return f"{flag[0]}{masked(value[flag.end() :], _IS_FLAG.fullmatch(flag[1]) is not None)}"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
        _remember("", value)
    return masked_text(value)


def is_secret(name: object) -> bool:
    """Returns whether a setting with this name holds a secret."""
    return isinstance(name, str) and _IS_SECRET.fullmatch(name) is not None


def masked_text(text: str) -> str:
    """Masks secrets in text such as an error: those with a known form, and those seen before in settings."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    before, *parts = text.split("://")
    found = [before]
    for part in parts:
        found.append(_masked_url(found[-1], part))
    return _IN_TEXT.sub(lambda match: f"{match[match.lastgroup] if match.lastgroup else ''}{MASK}", "://".join(found))


def _masked_url(scheme: str, text: str) -> str:
    """Masks the secrets of a URL in the text that follows its "://", where `scheme` ends before it."""
    user = _USER.match(text)
    if user and (":" in user[0] or not _IN_STORE.search(scheme)):
        text = f"{MASK}{text[user.end() :]}"
    url = text.split(maxsplit=1)[0] if text[:1].strip() else ""
    shown, rest = url, text[len(url) :]
    for mark in "?#":
        place, found, query = shown.partition(mark)
        if "=" in query or (mark == "?" and re.match(r"\w{8}", query)):
            shown = f"{place}{mark}{MASK}"
    host, slash, _ = shown.partition("/")
    is_hook = slash and scheme.endswith(("http", "https")) and _HOOK.search(shown)
    return f"{host}/{MASK}{rest}" if is_hook else f"{shown}{rest}"


def _remember(secret: str, url: str) -> None:
    """Remembers a secret, and those in a URL, for later texts, also as URLs, JSON and Python write them."""
    rest = url.partition("://")[2]
    users = {rest.rpartition("@")[0], rest.partition("/")[0].rpartition("@")[0]}
    found = {secret, *secret.splitlines(), *users, *(user.partition(":")[2] for user in users)}
    if secret:  # the path is one too, which errors of a connection name alone
        place = rest.rpartition("@")[2].partition("/")[2]
        found |= {place, place.partition("?")[0]}
    for one in found:
        parts = [urllib.parse.quote(one, safe=safe, errors="surrogatepass") for safe in ("/", "")]
        for form in (one, *parts, urllib.parse.unquote(one), repr(one)[1:-1], json.dumps(one)[1:-1]):
            if len(form) >= _LEAST_KNOWN and form not in MASK and not re.fullmatch(r"[\w+.-]+(:|%3A)//?", form):
                _known.add(form)


def _mask_record(record: loggers.LogRecord) -> bool:
    """Masks a log record, with the traceback in it."""
    try:
        record.msg, record.args = masked_text(record.getMessage()), None
    except Exception:  # arguments that do not fit, which the handler tells of
        return True
    if record.exc_info and record.exc_info[1] and not record.exc_text:
        record.exc_text = masked_text("".join(traceback.format_exception(record.exc_info[1])).rstrip())
    return True


def mask_tracebacks() -> None:
    """Makes Python mask the traceback of an error that ends the process or a thread."""

    def show(kind: Any, error: BaseException | None, trace: Any) -> None:
        print(masked_text("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)

    sys.excepthook = show
    threading.excepthook = lambda ended: show(*ended[:3])


# What these have as secrets is in no text from now on; a path, as of a file of credentials, is none.
_environment = {name: value for name, value in os.environ.items() if not (is_secret(name) and os.path.exists(value))}
masked([_environment, sys.argv])
for _place in (logging.get_absl_logger(), logging.get_absl_handler().python_handler, loggers.lastResort):
    _place.addFilter(_mask_record)  # the handlers print what other packages log too, such as an address
