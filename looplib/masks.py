"""Passwords, tokens and keys, masked in every text that leaves looplib.

`masked_text` takes any text, and recognizes secrets by their form: what follows a name such as `password=`, and parts
of a URL. `masked` takes settings, whose names tell too, and remembers their secrets for later texts. All errors, log
lines and printed lines, and what a run writes about itself, go through one of them; in doubt they mask too much.
"""

import base64
import contextlib
import html
import json
import logging as loggers
import os
import re
import sys
import threading
import traceback
import urllib.parse
import warnings
from collections.abc import Iterator
from typing import Any

from absl import logging

MASK = "<masked>"
_LEAST_KNOWN = 6  # minimum length of a secret to search for in other texts; a shorter one may be an ordinary word
_LEAST_NUMBER = 4  # digits of a number that is masked under the name of a secret; others may be counts
_NAME = (
    r"(?:[A-Za-z0-9_.-]{0,80}(?:[_.-]|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?=(?i:passw|passphr|secret|apikey))|"
    r"(?i:db|pg|my|sql|smtp|mail|ftp|user|root|admin|proxy|redis|hf|git|github|gitlab|bot|slack|wandb)(?=(?i:pass|pwd|token))))?"
    r"(?i:pass(?:words?|wd|phrase|code)?|pwd|pw|secrets?|jwt|sas|j?session[_-]?id|csrf|"
    r"credentials?|cookies?|auth(?:orization)?|dsn|webhooks?(?:[_-]?urls?)?|hook[_-]?urls?|connection[_-]?string|"
    r"(?:api|access|secret|private|account|signing|encryption|storage|shared|master|client|service|license|ssh|wandb|openai|"
    r"google|azure|aws|gcp|hmac|kaggle|comet|neptune|datadog|dd|sentry|stripe|anthropic|gemini|mistral|cohere|groq|sendgrid)"
    r"[ _.-]?keys?(?:[ _-]?id)?|shared[_-]?access[_-]?signature|"
    r"(?:access|api|auth|bearer|refresh|session|security|id)[ _-]?tokens?|(?<!pad.)(?<!eos.)(?<!bos.)(?<!unk.)(?<!cls.)"
    r"(?<!sep.)(?<!mask.)(?<!start.)(?<!end.)(?<!special.)(?<!invalid)(?<!expired)token)"
    r"(?i:[_-]?\d{1,3}(?!\w)|[_-](?:base|read|write|prod|staging|main|dev|test|old|new|value|db|hf|github|key|hex|hash))?"
)
_ALERT = r"(?:[A-Za-z0-9_.-]{0,40}[_.-])?(?i:alert)"  # whose URL holds a secret as a part of its path
_IS_SECRET = re.compile(rf"{_ALERT}|{_NAME}")
_IS_FLAG = re.compile(rf"--?(?:{_ALERT}|{_NAME})")
_QUOTED = r"""(?:'(?:\\.|[^'\\\n])*'?|"(?:\\.|[^"\\\n])*"?)"""  # the end may have been cut off
_WORD = rf"(?:\\.|{_QUOTED}|[^\s'\"\\])+"  # as a shell takes it
_TAIL = rf"(?:{_QUOTED}|[^\s'\",;)}}\]\\])*"
_TRIPLE = r"(?:\"\"\"[\s\S]*?(?:\"\"\"|\Z)|'''[\s\S]*?(?:'''|\Z))"
_LINES = r"(?:'(?:\\.|[^'\\])*'(?=[\s,;)}\]]|\Z)|\"(?:\\[\s\S]|[^\"\\])*\"(?=[\s,;)}\]]|\Z))"  # which are closed
_LITERAL = rf"[bBrRuUfF]{{0,2}}(?:{_TRIPLE}|{_LINES}|{_QUOTED}){_TAIL}"
_LITERALS = rf"{_LITERAL}(?:[ \t]*\+?[ \t]*(?=['\"]){_LITERAL})*"
_BRACKETS = "(?!)"
for _ in range(3):  # levels of brackets
    _BRACKETS = rf"[(\[{{](?:{_BRACKETS}|{_TRIPLE}|{_QUOTED}|[^'\"()\[\]{{}}])*[)\]}}]?"
_GAP = r"(?:[ \t\xa0]|\x1b\[[\d;]*m)*"  # colors of a terminal too
_RANDOM = r"(?=\S*\d)(?=\S*[A-Za-z])[\w+/=.~-]{8,}"  # in prose, where words may follow a name
_NO_VALUE = r"(?![ \t]*(?:(?:str|bytes|int|bool|None|True|False|null|true|false)[ \t]*(?:[,)\]}|=\n]|$)|# ))"  # in code
_SHOWN = rf"{MASK}(?![^\s,;)}}\]'\"])"
_IN_TEXT = re.compile(
    # What ends in a secret is kept up to it. First arguments of a command line, where prose may follow a flag.
    rf"(?P<single>(?<=')(?:--?)?{_NAME}=)(?:{_SHOWN}|(?:\\.|[^'\\\n])*(?:'(?=[\"\\]){_TAIL})?)"
    rf'|(?P<double>(?<=")(?:--?)?{_NAME}=)(?:{_SHOWN}|(?:\\.|[^"\\\n])*)'
    rf"|(?P<block>^(?P<indent>[ \t]*)(?:-[ \t]+)?['\"]?{_NAME}['\"]?[ \t]*:(?=[ \t\n]){_NO_VALUE})"  # of YAML
    r"[^\n]*(?:\n(?:[ \t]*\n)*(?P=indent)(?:[ \t]+|(?=-[ \t]))[^\n]*)+"
    rf"|(?<![A-Za-z0-9_.-])(?:(?P<flag>--?{_NAME}(?:=|['\"],[ \t]*|[ \t]+"
    rf"(?!(?:-|and|are|as|by|cannot|for|has|in|is|it|must|needs?|of|or|that|to|was|which|with)\b))){_WORD}"
    rf"|(?P<alert>(?:--?)?{_ALERT}['\"]?[=:,]?[ \t\[('\"]*)(?=[a-z]+://){_WORD}(?:,[ \t]*['\"][a-z]+://{_WORD})*"
    rf"|(?P<name>{_NAME}(?:['\"]?[ \t]*,?\s+['\"]?(?:value|default)['\"]?[ \t]*[:=][ \t]*|"
    rf"\\{{0,15}}['\"]?{_GAP}(?::[ \t]*(?:str|bytes)[ \t]*(?==))?"
    r"(?:(?:(?:that was |you )?(?:provided|given|used)|for [^\s:]{1,80}(?: [^\s:]{1,80})?)[ \t]*(?=:))?"
    rf"(?::?=>?(?![=>])|:|->|→|%3[ADad]|(?:is|,|\()(?=[ \t]*['\"])|(?<=\w[ \t])(?=['\"]|{_RANDOM})){_NO_VALUE}{_GAP}))"
    rf"(?:{_SHOWN}|[|>][^\s\w]?[ \t]*(?:\n[ \t]+[^\n]*)+|(?<=[=( ]){_BRACKETS}|{_LITERALS}|(?<==){_WORD}|[^\n]+)"
    r"|(?P<netrc>login\s+\S+\s+password\s+)\S+|(?P<url>with url: )/\S+)"
    rf"|(?P<tag><{_NAME}(?:[ \t][^<>\n]*)?>)[^<\n]+|(?P<login>-(?:(?<=\s-)|(?<=^-))(?:u|-user)[ =])[^\s:]+:\S+"
    r"|(?P<encoded>%3[Aa]%2[Ff]%2[Ff])(?=\S*%40)\S+|(?P<parameter>[?&][\w.~%-]{1,80}=)\S+"
    rf"|\b(?:(?P<scheme>(?i:bearer)[ \t]*[ \t:=][ \t]*(?!tokens?\b|auth)|Basic[ \t]+(?=[\w+/-]*[A-Z0-9=+]))[^\s'\"]+"
    rf"|(?P<signed>(?:Negotiate|NTLM|ApiKey|Digest)[ \t]+|[Ss]ig(?:nature)?[=:][ \t]*){_RANDOM}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|gh[opsur]_\w{6,}|github_pat_\w{6,}|glpat-[\w-]{6,}|xox[a-z]-[\w-]{6,}"
    r"|(?:hf_|sk-|AIza|ya29\.|npm_|pypi-|dop_v1_|SG\.|xapp-|[rs]k_(?:live|test)_)[\w.-]{12,}|eyJ[\w-]{6,}\.[\w.-]+"
    r"|(?:bot)?\d{6,}:[\w-]{20,})"
    r"|(?<![\w.%+@:-])[\w.%+-]{1,80}:(?!//)[^\s'\"]{3,200}(?=@[\w\[])"  # user:password@host without a scheme
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*-----|\Z)",
    re.MULTILINE,
)
# One of them is in the first line of each match, and soon after its start.
_HINTS = (
    *("pass", "pwd", "pw", "secret", "jwt", "sas", "session", "csrf", "credential", "cookie", "auth", "dsn", "hook"),
    *("connection", "key", "sig", "token", "alert", "-u", "login", "url: /", "%3a", "?", "&", "bearer", "basic"),
    *("negotiate", "ntlm", "digest", "@", "akia", "asia", "gh", "glpat", "xox", "hf_", "sk-", "aiza", "ya29", "npm_"),
    *("pypi", "dop_", "sg.", "xapp", "k_live", "k_test", "eyj", "-----begin"),
)
_DIGITS = re.compile(r"\d{6}:")
_PIECE, _MORE = 1000, 200  # characters of a long line that are looked at, and after them, which a match may need
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
# Services of alerts, all of whose URL is a secret.
_SERVICE = re.compile(
    r"\b(?:slack|discord|tgram|pover|pbul|pushy|ntfys?|gotifys?|msteams|workflows?|mmosts?|rocketd?s?|matrixs?|mailgun|"
    r"sendgrid|resend|twilio|vonage|sns|ses|wxpusher|wxteams|feishu|lark|dingtalk|wecombot|ifttt|pagerduty|opsgenie|"
    r"zulip|signals?|whatsapp|line|join|bark[s]?|prowl|simplepush|spontit|push|guilded|ryver|revolt|sinch|webex)\Z"
)
_known: set[str] = set()  # secrets that this process has masked


def masked(value: Any, secret: bool = False) -> Any:
    """Masks the secrets in a tree of dicts, lists and values; with `secret`, all text in it is secret."""
    if isinstance(value, dict):
        named = any(is_secret(value.get(name)) for name in ("name", "key"))  # as a list of variables has them
        return {
            _masked_key(name, secret): masked(
                item, secret or is_secret(name) or (named and name in ("value", "default"))
            )
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        flags = [isinstance(item, str) and _IS_FLAG.fullmatch(item) is not None for item in ("", *value)]
        return [masked(item, secret or flag) for item, flag in zip(value, flags)]
    if secret and isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode(errors="backslashreplace")
    is_number = type(value) in (int, float)
    if secret and not (value is None or type(value) is bool or (is_number and len(str(value)) < _LEAST_NUMBER)):
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
    if value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            masked(json.loads(value))  # to remember its secrets
    for found in _found(value):
        inner = found[0][len(found[found.lastgroup]) if found.lastgroup else 0 :].strip(" \t\n'\"\\,;)]}")
        if MASK not in inner:
            _remember(inner, "")
    return masked_text(value)


def _masked_key(name: Any, secret: bool) -> Any:
    """Masks what a dict has as a key, unless it is a name, which may be a known secret by chance."""
    return name if re.fullmatch(r"[A-Za-z_]{1,40}" if secret else r"[\w./-]*", str(name)) else masked(name, secret)


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
    text, done, shown = "://".join(found), 0, []
    for match in _found(text):
        shown += [text[done : match.start()], match[match.lastgroup] if match.lastgroup else "", MASK]
        done = match.end()
    return "".join([*shown, text[done:]])


def _found(text: str) -> Iterator[re.Match]:
    """Yields the secrets of a known form: matches of `_IN_TEXT`, which is too slow for lines without any hint."""
    at = start = 0
    while start < len(text):
        newline = text.rfind("\n", start, start + _PIECE)
        end = newline + 1 or min(start + _PIECE, len(text))
        piece = text[start : end if newline >= 0 else end + _MORE].lower()
        at = max(at, start)
        has_hint = at < end and (any(hint in piece for hint in _HINTS) or _DIGITS.search(piece))
        while has_hint and at < end:
            first = _IN_TEXT.search(text, at, end + _MORE)
            if not first or first.start() >= end:
                break
            match = _IN_TEXT.match(text, first.start()) or first  # which may go on after the piece
            yield match
            at = match.end()
        start = end


def _masked_url(scheme: str, text: str) -> str:
    """Masks the secrets of a URL in the text that follows its "://", where `scheme` ends before it."""
    if _SERVICE.search(scheme[-20:]):
        return re.sub(r"\A[^\s'\"]+", MASK, text)
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
        if len(one) >= _LEAST_KNOWN and not re.fullmatch(r"[\w+.-]+://?", one):  # a scheme alone is none
            _known.update(form for form in _forms(one) if len(form) >= _LEAST_KNOWN and form not in MASK)


def _forms(text: str) -> set[str]:
    """Returns how URLs, HTML, JSON, YAML, shells, Python and base64 write a text."""
    quoted = [urllib.parse.quote(text, safe=safe, errors="surrogatepass") for safe in ("/", "", "!$&'()*+,;=:@/")]
    quoted += [urllib.parse.quote_plus(text, errors="surrogatepass"), urllib.parse.quote(quoted[1], safe="")]
    lower = [re.sub("%..", lambda found: found[0].lower(), one) for one in quoted]
    raw = text.encode(errors="surrogatepass")
    written = [repr(text), ascii(text), repr(raw)[1:], json.dumps(text), json.dumps(text, ensure_ascii=False)]
    inner = [one[1:-1] for one in written]
    again = [write(one)[1:-1] for one in inner for write in (repr, json.dumps)]
    shell = [text.replace("'", other) for other in ("''", "'\"'\"'", "'\\''", "\\'")]
    coded = set()
    for skipped in range(3):  # bytes before it, such as of USER:
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            whole = encode(b"x" * skipped + raw[: len(raw) - (skipped + len(raw)) % 3]).decode()
            coded.add(whole[(0, 2, 3)[skipped] :])
    pages = [html.escape(text), html.escape(text, quote=False)]
    return {text, urllib.parse.unquote(text), *quoted, *lower, *inner, *again, *shell, *coded, *pages}


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
    """Makes Python mask its warnings, and the traceback of an error that ends the process or a thread."""

    def show(kind: Any, error: BaseException | None, trace: Any) -> None:
        print(masked_text("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)

    write = warnings.formatwarning
    warnings.formatwarning = lambda *told, **more: masked_text(write(*told, **more))
    sys.excepthook = show
    threading.excepthook = lambda ended: show(*ended[:3])


# What these have as secrets is in no text from now on; a path, as of a file of credentials, is none.
_environment = {name: value for name, value in os.environ.items() if not (is_secret(name) and os.path.exists(value))}
masked([_environment, sys.argv])
for _place in (logging.get_absl_logger(), logging.get_absl_handler().python_handler, loggers.lastResort):
    _place.addFilter(_mask_record)  # the handlers print what other packages log too, such as an address
