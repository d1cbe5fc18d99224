"""Passwords, tokens and keys, masked in every text that leaves looplib.

`masked_text` takes any text. It masks what was a secret in settings before, however the text writes it, and recognizes
other secrets by their form: what follows a name such as `password=`, parts of a URL, and the beginnings of well-known
tokens. `masked` takes settings, whose names tell too, and remembers their secrets for later texts. All errors, log
lines and printed lines, and what a run writes about itself, go through one of them; in doubt they mask too much, most
often up to the end of the line. The time is linear in the text: what a pattern repeats is bounded, or is then masked.
"""

import base64
import contextlib
import functools
import html.entities
import json
import logging as loggers
import os
import re
import sys
import threading
import traceback
import urllib.parse
import warnings
from typing import Any

from absl import logging

MASK = "<masked>"
_LEAST_KNOWN = 6  # minimum length of a secret to search for in other texts; a shorter one may be an ordinary word
_LEAST_NUMBER = 4  # digits of a number that is masked under the name of a secret; others may be counts

# Names, in lower case with "_" between their words.
_OWNERS = "db|pg|my|sql|smtp|mail|ftp|user|root|admin|proxy|redis|hf|git|github|gitlab|bot|slack|wandb"
_KEYS = (
    "api|access|secret|private|account|signing|encryption|storage|shared|master|client|service|license|ssh|wandb|openai|"
    "google|azure|aws|gcp|hmac|kaggle|comet|neptune|datadog|dd|sentry|stripe|anthropic|gemini|mistral|cohere|groq|sendgrid"
)
_NO_TOKENS = "".join(f"(?<!{one}_)" for one in "pad eos bos unk cls sep mask start end special invalid expired".split())
_IS_SECRET = re.compile(
    rf"(?:(?:.*_)?(?:{_OWNERS})?(?:pass|passcode|pwd|pw|jwt|sas|j?session_?id|csrf|cred(?:ential)?s?|cookies?|passkeys?|otp|alert|"
    r"auth(?:orization)?|dsn|webhooks?(?:_?urls?)?|hook_?urls?|connection_?string|shared_?access_?signature|"
    rf"(?:{_KEYS})_?keys?(?:_?id)?|(?:access|api|auth|bearer|refresh|session|security|id)_?tokens?|{_NO_TOKENS}token)"
    r"|.*(?:passwords?|passwd|passphrase|secrets?|api_?keys?))"
    r"(?:_?\d{1,3}|_(?:base|read|write|prod|staging|main|dev|test|old|new|value|db|hf|github|key|hex|hash))?"
)
_HINT = re.compile(
    "pass|p_?wd?|otp|secret|jwt|sas|session|csrf|cred|cookie|alert|auth|dsn|hook|connection|key|token|signature"
)
_JOINT = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[ .-]+")  # between the words of a name

# What follows a name in a text: a separator and a value.
_WORD = re.compile(
    r"\x1b\[[\d;]*m|(?P<open>['\"])?(?P<flag>--?)?"
    r"(?P<name>[A-Za-z_][\w.-]*(?: (?i:keys?|tokens?|id|strings?|urls?|signature)\b)?)"
)
_GAP = r"(?:[ \t\xa0]|\x1b\[[\d;]*m)*"  # colors of a terminal too
_RANDOM = r"(?=\S{0,40}\d)(?=\S{0,40}[A-Za-z])[\w+/=.~-]{8,}"  # in prose, where words may follow a name
_END = r"[\\'\"]*(?![\\'\"])(?:\]|\[\d{1,9}\]| \(\w{1,20}\))?"  # of a name
_TYPE = r"(?::[ \t]*(?:str|bytes)[ \t]*(?==))?"
_TOLD = r"(?:(?:(?:that was |you )?(?:provided|given|used)|for [^\s:]{1,80}(?: [^\s:]{1,80})?)[ \t]*(?=:))?"
_SIGN = r"(?P<sign>:?=>?(?![=>])|:(?!//)|->|→|(?:%2[27])?%3[ADad])"
_IS = r"[ \t]+(?:is|was)[ \t]+(?=['\"]|\S*[^a-z\s.,;:!?'/-])"
_NO_VALUE = (
    r"(?![ \t]*(?:(?:str|bytes|int|bool|None|True|False|null|true|false)[ \t]*(?:[,)\]}|=\n]|\Z)|# ))"  # in code
)
_PAIR = (  # of a list of variables, or of a flag that a program defines
    r",?[\s+-]+(?:\w{1,20}=[^\s,]{1,40},[ \t]*){0,4}[\\'\"]*(?:value|default)[\\'\"]*[ \t]*[:=]"
)
_TAG = r"(?:[ \t]+[\w:-]+=[^<>\n]*)?>"
_ARGUMENT = r"[ \t]*(?:[(,][ \t]*)?(?=['\"])"
_FLAG = r"[ \t]+(?!(?:-|and|are|as|by|cannot|for|has|in|is|it|must|needs?|of|or|that|to|was|which|with)\b)"
_SEPARATOR = (
    rf"{_END}(?:(?:{_GAP}{_TYPE}{_TOLD}{_SIGN}|{_IS}){_NO_VALUE}|{_PAIR}|{_TAG}|{_ARGUMENT}|[ \t(\[]+(?={_RANDOM})|"
    rf"(?(flag){_FLAG}|(?!))){_GAP}"
)
_SHOWN = rf"{MASK}(?![^\s,;)}}\]'\"])"
_TRIPLE = r"\"\"\"[\s\S]*?(?:\"\"\"|\Z)[^\n]*|'''[\s\S]*?(?:'''|\Z)[^\n]*"
_QUOTED = r"(?:'(?:[^'\\]|\\[\s\S])*'|\"(?:[^\"\\]|\\[\s\S])*\")(?=[ \t]*(?:[,;:.)}\]\n]|\Z)|[ \t]+[\w-])"
_PLAIN = r"(?(open)(?!)|(?:(?<==)|(?(flag)(?<=[ \t])|(?!)))[^\s'\"\\(\[{<|>][^\s'\"\\]*(?=\s|\Z))"  # up to a space
_NAMED = re.compile(
    rf"{_WORD.pattern}(?P<separator>{_SEPARATOR})(?:{_SHOWN}|[bBrRuUfF]{{0,2}}(?:{_TRIPLE}|{_QUOTED})|{_PLAIN}|[^\n]*)"
)
_BLOCK = re.compile(  # a line with the lines below it that are further in, as of YAML, also in a diff
    r"(?P<indent>[+-]?[ \t]*)(?:-[ \t]+)?['\"]?[\w.-]+['\"]?[ \t]*[:=][^\n]*"
    r"(?:\n(?:[+-]?[ \t]*\n)*(?P=indent)(?:[ \t]+|-[ \t])[^\n]*)*"
)

# Secrets without a name: what comes before them, and they.
_RULES = [
    re.compile(f"({before}){secret}")
    for before, secret in (
        ("", r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*-----|\Z)"),
        (r"(?:alert|ALERT)['\"]?[=:, \t\[('\"]{1,9}(?=[a-z]{1,20}://)", r"[^\n]+"),
        (r"login[ \t]+\S+\s{1,9}password\s{1,9}", r"\S+"),  # of .netrc
        ("with url: /", r"\S+"),
        (r"(?<!\S)-(?:u|-user)[ =][^\s:]{1,80}:", r"(?!//)\S+"),
        ("%3[Aa]%2[Ff]%2[Ff]", r"\S+"),  # of a URL in a URL
        (r"[?&][\w.~%-]{1,80}=", r"\S+"),
        (r"[Bb](?:earer|EARER)[ \t]{0,9}[ \t:=][ \t]{0,9}", r"(?!tokens?\b|auth)[^\s'\"]+"),
        (r"Basic[ \t]{1,9}", r"(?=[\w+/-]{0,200}[A-Z0-9=+])[^\s'\"]+"),
        (r"(?<!\w)(?:(?:Negotiate|NTLM|ApiKey|Digest)[ \t]{1,9}|[Ss]ig(?:nature)?[=:][ \t]{0,9})", _RANDOM),
        (
            "(?<![A-Za-z0-9])",
            r"(?:(?:AKIA|ASIA)[A-Z0-9]{12,}|gh[opsur]_\w{6,}|github_pat_\w{6,}|glpat-[\w-]{6,}|xox[a-z]-[\w-]{6,}|"
            r"(?:hf_|sk-|AIza|ya29\.|npm_|pypi-|dop_v1_|SG\.|xapp-|[rs]k_(?:live|test)_)[\w.-]{12,}|"
            r"eyJ[\w-]{12,}[\w.-]*|(?:bot)?\d{6,20}:[\w-]{20,})",
        ),
        # user:password@host; where no "@" follows it fails at once
        (r"(?<![\w.%+@:-])", r"(?=[\w.%+-][^@]{0,280}@)[\w.%+-]{1,80}:(?!//)[^\s'\"]{3,200}(?=@[\w\[])"),
    )
]

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
_known: dict[str, str] = {}  # secrets that this process has masked, each with its longest word


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
        flags = [isinstance(item, str) and item.startswith("-") and is_secret(item) for item in ("", *value)]
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
        return f"{flag[0]}{masked(value[flag.end() :], is_secret(flag[1]))}"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
        _remember("", value)
    if value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            masked(json.loads(value))  # to remember its secrets
    hidden: list[str] = []
    text = _masked(value, hidden)
    for one in hidden:
        inner = one.strip(" \t\n'\"\\,;)]}")
        for part in {inner, *(part for part in re.split(r"[\s'\"\\,;&(){}\[\]]+", inner) if re.match(_RANDOM, part))}:
            if MASK not in part:
                _remember(part, "")
    return text


def _masked_key(name: Any, secret: bool) -> Any:
    """Masks what a dict has as a key, unless it is a name, which may be a known secret by chance."""
    return name if re.fullmatch(r"[A-Za-z_]{1,40}" if secret else r"[\w./-]*", str(name)) else masked(name, secret)


@functools.lru_cache(maxsize=10_000)
def is_secret(name: object) -> bool:
    """Returns whether a setting with this name holds a secret."""
    if not isinstance(name, str) or not _HINT.search(name.lower()):  # most names
        return False
    return _IS_SECRET.fullmatch(_JOINT.sub("_", name[-80:]).lower()) is not None


def masked_text(text: str) -> str:
    """Masks secrets in text such as an error: those with a known form, and those seen before in settings."""
    return _masked(text, [])


def _masked(text: str, hidden: list[str]) -> str:
    """Masks secrets in text, and appends those which a name or a rule has told of."""
    for secret in sorted((one for one, word in _known.items() if word in text), key=len, reverse=True):
        text = _written(secret).sub(MASK, text)
    before, *parts = text.split("://")
    found = [before]
    for part in parts:
        found.append(_masked_url(found[-1], part))
    text = _masked_values("://".join(found), hidden)

    def hide(match: re.Match) -> str:
        hidden.append(match[0][len(match[1]) :])
        return f"{match[1]}{MASK}"

    for rule in _RULES:
        text = rule.sub(hide, text)
    return text


def _masked_values(text: str, hidden: list[str]) -> str:
    """Masks the values that follow the names of secrets."""
    shown, done = [], 0
    for word in _WORD.finditer(text):
        if word.start() < done or not word["name"] or not is_secret(word["name"]):
            continue
        if "alert" in word["name"].lower() or not (match := _NAMED.match(text, word.start())):
            continue  # of an alert, only a URL is a secret
        end, near = match.end(), max(0, word.start() - 80)
        line = text.rfind("\n", near, word.start()) + 1 or near
        is_first = not text[line : word.start()].strip(" \t+-")
        if match["sign"] and is_first and (block := _BLOCK.match(text, line)):
            end = max(end, block.end())
        if text[match.end("separator") : end].strip():
            shown += [text[done : match.end("separator")], MASK]
            hidden.append(text[match.end("separator") : end])
            done = end
    return "".join([*shown, text[done:]])


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
    """Remembers a secret, and those in a URL, for later texts, also as URLs, base64 and other forms write them."""
    rest = url.partition("://")[2]
    users = {rest.rpartition("@")[0], rest.partition("/")[0].rpartition("@")[0]}
    found = {secret, *secret.splitlines(), *users, *(user.partition(":")[2] for user in users)}
    if secret:  # the path is one too, which errors of a connection name alone
        place = rest.rpartition("@")[2].partition("/")[2]
        found |= {place, place.partition("?")[0]}
    for one in found:
        if len(one) < _LEAST_KNOWN or re.fullmatch(r"[\w+.-]+://?", one):  # a scheme alone is none
            continue
        for form in {one, urllib.parse.unquote(one), *_coded(one)}:
            if len(form) >= _LEAST_KNOWN and form not in MASK:
                _known[form] = max(re.findall("[A-Za-z0-9]*", form), key=len)


def _coded(secret: str) -> set[str]:
    """Returns a secret in base64, also after other bytes, such as of USER:."""
    raw, coded = secret.encode(errors="surrogatepass"), set()
    for skipped in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            whole = encode(b"x" * skipped + raw[: len(raw) - (skipped + len(raw)) % 3]).decode()
            coded.add(whole[(0, 2, 3)[skipped] :])
    return coded


@functools.lru_cache(maxsize=1000)
def _written(secret: str) -> re.Pattern:
    """Returns a pattern of a secret as URLs, HTML, JSON, YAML, shells and Python write it, also one after the other.

    Letters and digits are written as they are. All other characters may be escaped, and where the secret has spaces or
    quotes, a text may have any of them, as shells write quotes and where lines are broken.
    """
    if len(re.sub(r"[\s'\"\\]", "", secret)) < _LEAST_KNOWN:
        return re.compile(re.escape(secret))
    found, escaped = [], ""
    for plain, gap, other in re.findall(r"([A-Za-z0-9]+)|([\s'\"\\]+)|(.)", secret.strip(" \t\r\n'\"\\")):
        found.append(plain or (_ANY_GAP if gap else rf"{escaped}(?:{re.escape(other)}|{_escapes(other)})"))
        escaped = "" if gap else r"(?:\\|%(?:25)*5[Cc])*"  # which a gap has taken
    return re.compile("".join(found))


@functools.lru_cache(maxsize=200)
def _escapes(character: str) -> str:
    r"""Returns a pattern of the escapes of a character, such as %40, %2540, &#64;, \x40 and \u0040."""
    code, raw = ord(character), character.encode(errors="surrogatepass")
    slash, sharp, end = r"(?:\\|%(?:25)*5c)", "(?:#|%(?:25)*23)", "(?:;|%(?:25)*3b)"
    names = [re.escape(name[:-1]) for name, one in html.entities.html5.items() if one == character and name[-1] == ";"]
    entity = rf"(?:amp{end})*(?:{'|'.join([f'{sharp}0*{code}', f'{sharp}x0*{code:x}', *names])}){end}"
    plain = json.dumps(character)[1:-1].lstrip("\\") or "\\"
    slashed = [rf"[xu]\{{?0*{code:x}\}}?", f"0*{code:o}", re.escape(plain).replace(r"\\", f"{slash}+")]
    slashed += [f"{slash}+".join(f"{sign}{byte:{kind}}" for byte in raw) for sign, kind in (("x", "02x"), ("", "03o"))]
    after = f"(?:{'|'.join(slashed)})"
    percent = "%".join(f"(?:25)*{byte:02x}" for byte in raw)
    return rf"%(?i:{percent}|(?:25)*(?:26{entity}|5c{after}))|&(?i:{entity})|\\(?i:{after})"


_GAPS = "|".join(map(_escapes, " \n\t'\"\\"))
_ANY_GAP = rf"(?:[\s+'\"\\]|%(?:25)*2[Bb]|{_GAPS})*"


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
