"""Messages of errors: values as a sentence shows them, and one sentence for an error of any library."""

import ast
import dataclasses
import datetime
import errno
import itertools
import operator
import os
import re
import reprlib
import textwrap
from collections.abc import Sequence
from typing import Any

import looplib.errors as errors
from looplib.errors import SettingError
from looplib.masks import masked_text

# Kinds of errors with sentences of looplib's, which ops raise as others.
OURS = frozenset({name for name, kind in vars(errors).items() if isinstance(kind, type)} | {"BadRecordError"})


_LAYERS = 20
_MOST_SHOWN = 200  # characters of a value in a sentence
_MOST_WHOLE = 2**63 - 1  # of TensorFlow's integers
_MOST_SECONDS = 1e9  # of a duration, 31 years; timers take no more than about ten times as much
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 100, 100
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = 10
_LONGEST = 300  # characters of a sentence
_WRAPPED = re.compile(r"in user code:|Exception encountered when calling")
_ROOT = re.compile(r"\d+ root error\(s\) found\.\s*\(0\) [^\n:]*:\s*(.*?)(?:\n\s*\(1\) |\Z)", re.DOTALL)
# Bold type of Keras 3; the functions and nodes of TensorFlow's graphs; lines of these alone; the op of an eager call.
_DECORATION = re.compile(
    r"\x1b\[\d*m|\{\{function_node .*?\}\}\s*|\n\s*\[\[.*\]\].*|\s*\[Op:[^\]]*\](?: name: ?\S*)?\s*$"
)
# What to do about an error of a file system, by its number; TensorFlow's errors have only the text of the number.
_CURES = {
    number: cure
    for cure, *numbers in (
        ("free space on that disk", errno.ENOSPC),
        ("free space, or have the quota raised", errno.EDQUOT),
        ("raise the largest size of a file (ulimit -f)", errno.EFBIG),
        ("make that file system writable, or use another directory", errno.EROFS),
        ("fix the permissions, or use another directory", errno.EACCES, errno.EPERM),
        ("check the disk, or the connection to it", errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV),
        ("raise the number of open files (ulimit -n)", errno.EMFILE, errno.ENFILE),
        ("use a shorter name", errno.ENAMETOOLONG),
        ("remove the symbolic link there", errno.ELOOP),
        ("a part of that path is a file; move it away", errno.ENOTDIR),
        ("move away what has that name", errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST),
        ("restore it, or check the path", errno.ENOENT),
        ("end the program that uses it", errno.ETXTBSY, errno.EBUSY),
    )
    for number in numbers
}


def is_utf8(text: str) -> bool:
    """Returns whether a text has no lone surrogates, which neither files nor TensorFlow take."""
    return text.encode(errors="replace").decode() == text


def shown(value: object) -> str:
    """Returns a value that may come from anywhere as Python writes it, shortened for a sentence."""
    try:
        text = _REPR.repr(masked_text(value) if isinstance(value, str) else value)  # before it is cut
    except Exception:  # of a number of more than 4300 digits, or a __repr__ of any class
        return f"a value of the type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None, or_all: bool = False) -> int:
    """Checks a whole number and returns it as a Python int, which JSON can hold; a bool is refused by `UsageError`.

    Args:
      name: what it is, for the message.
      value: anything that `operator.index` takes.
      least: the smallest value that is allowed.
      most: the largest allowed value; None for the largest 64-bit integer.
      or_all: whether -1, which stands for all, is allowed too.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    top = _MOST_WHOLE if most is None else most
    allowed = number is not None and least <= number <= top
    if not allowed and not (or_all and number == -1):
        is_bounded = most is not None or (number is not None and number > top)
        bounds = f"from {least} to {top}" if is_bounded else f"of at least {least}"
        raise SettingError(f"{name} is {shown(value)}; expected a whole number {bounds}{', or -1 for all' * or_all}")
    return number


def duration(name: str, value: Any) -> float | None:
    """Checks a duration and returns its seconds; anything else, and less than nothing, is a `UsageError`.

    Args:
      name: what it is, for the message.
      value: seconds, a `datetime.timedelta`, or text such as "90", "45m", "1h30m" or "2d12h"; None for no limit.
    """
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if isinstance(value, str):
        parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", value.strip())
        if parts and any(parts.groups()):
            seconds = sum(float(part or 0) * unit for part, unit in zip(parts.groups(), (86400, 3600, 60, 1)))
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= _MOST_SECONDS:
        raise SettingError(
            f"{name} is {shown(value)}; expected seconds above 0 and up to {_MOST_SECONDS:.0g}, or a duration such as "
            '"45m", "1h30m" or "2d12h"'
        )
    return float(seconds)


def join_names(names: Sequence[str], most: int = 3) -> str:
    """Returns names as a part of a sentence: the first ones, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclasses.dataclass(frozen=True)
class ErrorGist:
    """The kind and the sentence of an error, without the lines that AutoGraph, Keras and TensorFlow put around it.

    Attributes:
      kind: the name of its type, also of an error in AutoGraph or `tf.numpy_function`, which raise one of another type.
      sentence: its message on one line; "" if it has none. Of at most 300 characters, cut between words, unless looplib
        wrote it, whose advice comes last.
    """

    kind: str
    sentence: str

    def __str__(self) -> str:
        if not self.sentence:
            return self.kind
        return f"{self.kind} {self.sentence}" if self.kind == "KeyError" else f"{self.kind}: {self.sentence}"


def parse_error(error: BaseException) -> ErrorGist:
    """Returns the `ErrorGist` of an error, with secrets masked."""
    kind, text = type(error).__name__, masked_text(str(getattr(error, "message", error)))
    if isinstance(error, KeyError) and len(error.args) == 1 and not _WRAPPED.search(str(error.args[0])):
        return ErrorGist(kind, masked_text(repr(error.args[0])))
    for _ in range(_LAYERS):  # each may hold another
        kind, inner = _unwrapped(kind, text)
        if inner == text:
            break
        text = inner
    sentence = _first_sentence(text, most=None if kind in OURS else _LONGEST)
    return ErrorGist(kind, repr(sentence) if kind == "KeyError" and sentence and sentence[0] not in "'\"" else sentence)


def gist(error: BaseException) -> str:
    """Returns an error's message on one line, see `parse_error`; the name of its type if it has none."""
    found = parse_error(error)
    return found.sentence or found.kind


def cure_of(error: BaseException) -> str:
    """Returns what to do about an error of the file system, Python's or TensorFlow's; "" for any other error."""
    if not isinstance(error, OSError) and not type(error).__module__.startswith("tensorflow."):
        return ""
    number = getattr(error, "errno", None) or next((one for one in _CURES if os.strerror(one) in str(error)), None)
    return _CURES.get(number, "")


def with_cure(error: BaseException, otherwise: str = "") -> str:
    """Returns an error of reading or writing as the end of a sentence: its message, and what to do.

    What to do about an error that is not of the file system is `otherwise`.
    """
    return "; ".join(filter(None, (gist(error), cure_of(error) or otherwise)))


def _unwrapped(kind: str, text: str) -> tuple[str, str]:
    """Takes one layer off a message that AutoGraph, a layer of either Keras or TensorFlow has put around it.

    The text stays as it is where another version of these writes it differently.
    """
    text = _DECORATION.sub("", text.partition("\nAdditional GRPC error information from remote ")[0]).strip()
    if text.startswith("in user code:"):
        lines = textwrap.dedent(text.partition("\n")[2].lstrip("\n")).splitlines()
        rest = itertools.dropwhile(lambda line: not line.strip() or line.startswith((" ", 'File "')), lines)
        text = "\n".join(rest)
    if text.startswith("Graph execution error:"):
        lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
        kept = [line for line in lines if not line.startswith(("Detected at", "File ", "<stack"))]
        text = text if _ROOT.search(text) else "".join(kept[-1:])
    if match := _ROOT.search(text):  # each replica has one
        text = match[1]
    if match := re.match(r"assertion failed: \[(.*)\]", text):  # a list of what it was given
        text = match[1].replace("] [", " ").replace('\\"', '"')
    if match := re.match(r"Error in user-defined function passed to \S+ transformation with iterator: \S+:\s", text):
        text = text[match.end() :]
    if match := re.match(r"([A-Za-z_][\w.]*(?:Error|Exception|Quit|Interrupt|Iteration|Warning)):(?:\s|$)", text):
        kind, text = match[1].rpartition(".")[2], text[match.end() :]
        if kind == "KeyError" and len(text) > 1 and text[0] == text[-1] in "'\"" and "\\n" in text:
            text = ast.literal_eval(text)  # a KeyError shows its message as Python writes a string
    if match := re.match(r"Exception encountered when calling .*\n\n", text):  # Keras 3 and tf_keras
        text = re.split(r"\n\s*(?:Arguments|Call arguments) received by ", text[match.end() :])[0]
    return kind, text


def _first_sentence(text: str, most: int | None) -> str:
    """Returns the first line of a message, and the next one after each line that ends in a colon."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    size = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    found = " ".join(lines if size > 1 else lines[:1])
    found = re.sub(r"'\{\{node (\S+?)\}\} = \w+\[.*?\]\(.*?\)'", r"\1", found)
    found = re.sub(r"\{\{node (\S+?)\}\}", r"\1", found)
    if most is None or len(found) <= most:
        return found
    return f"{found[: most - 1].rpartition(' ')[0] or found[: most - 2]} …"
