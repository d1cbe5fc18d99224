"""`python -m looplib inspect DIR`: what checkpoints a run directory holds, and what they are worth."""

import os
import time

import tensorflow as tf

from looplib.checkpoint import commits


def inspect(directory, verify=False):
    """Prints a table of the checkpoints of a run, newest first.

    Args:
      directory: a run directory, or one that holds checkpoints.
      verify: reads the files through; otherwise only their sizes are compared with the marker.

    Returns:
      int, the exit code: 0 if there is a checkpoint to go on from and none is damaged, else 1.

    Raises:
      UsageError: if there is no such directory.
    """
    folder = commits.place_of(directory)
    rows, damaged, good = [("step", "size", "age", "verdict", "scores")], 0, 0
    for found in commits.listing(folder):
        step, done = found.step, found.commit
        if done is None:
            rows.append((str(step), "", "", f"does not count: {found.reason}", ""))
            continue
        reason = commits.verify(done, thorough=verify)
        damaged, good = damaged + bool(reason), good + (not reason)
        verdict = f"damaged: {reason}" if reason else "intact" if verify else "committed"
        scores = "  ".join(
            f"{name} {'not finite' if value is None else f'{value:.4g}'}" for name, value in sorted(done.scores.items())
        )
        rows.append((str(step), _size(done.bytes), _age(time.time() - done.time), verdict, scores))
    if len(rows) == 1:
        print(f"there is no checkpoint in {folder}")
    else:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            print(_printable("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip()))
    aside = os.path.join(folder, commits.SET_ASIDE)
    if tf.io.gfile.isdir(aside) and (names := sorted(tf.io.gfile.listdir(aside))):
        print(_printable(f"set aside in {aside}: {', '.join(name.rstrip('/') for name in names)}"))
    return 0 if good and not damaged else 1


def _printable(text: str) -> str:
    """The text without what a terminal would take for a command; a run directory may come from somebody else."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _size(size):
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _age(seconds):
    for unit, limit in (("s", 120), ("min", 120), ("h", 48)):
        if seconds < limit:
            return f"{seconds:.0f} {unit}"
        seconds /= 60 if unit != "h" else 24
    return f"{seconds:.0f} days"
