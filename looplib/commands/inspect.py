"""`python -m looplib inspect DIR`: the checkpoints of a run directory, and which of them are intact."""

import contextlib
import os
import time

import tensorflow as tf

from looplib.base.console import printable
from looplib.base.numbers import format_seconds, format_size
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, UsageError
from looplib.run import choice, commits


def inspect(directory: str, verify: bool = False) -> int:
    """Prints a table of the checkpoints of a run, newest first.

    Args:
      directory: a run directory, or one that holds checkpoints.
      verify: whether to read the files through; if not, only their sizes are compared with the marker.

    Returns:
      The exit code: `EXIT_DONE` if a run can resume from a checkpoint here and none is damaged.

    Raises:
      UsageError: if there is no such directory.
    """
    folder = commits.checkpoint_folder(directory)
    rows, damaged, good = [("step", "size", "age", "verdict", "scores")], 0, []
    for found in commits.listing(folder):
        step, done = found.step, found.commit
        if done is None:
            rows.append((str(step), "", "", f"invalid: {found.reason}", ""))
            damaged += os.path.exists(f"{commits.path_of(folder, step)}.commit")  # a marker that proves nothing
            continue
        reason = commits.verify(done, thorough=verify)
        damaged, good = damaged + bool(reason), good + [done] * (not reason)
        verdict = f"damaged: {reason}" if reason else "intact" if verify else "committed"
        scores = "  ".join(
            f"{name} {'not finite' if value is None else f'{value:.4g}'}" for name, value in sorted(done.scores.items())
        )
        rows.append(
            (str(step), format_size(done.bytes), format_seconds(max(0.0, time.time() - done.time)), verdict, scores)
        )
    if len(rows) == 1:
        print(printable(f"there is no checkpoint in {folder}"))
    else:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            print(printable("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip()))
    if ended := choice.final(folder):
        print(f"the run ended with step {ended.step} (--checkpoint=final)")
    with contextlib.suppress(UsageError):  # where no metric decides
        if best := choice.best(folder):
            print(f"the best is step {best.step} (--checkpoint=best)")
    aside = os.path.join(folder, commits.SET_ASIDE)
    if tf.io.gfile.isdir(aside) and (names := sorted(tf.io.gfile.listdir(aside))):
        print(printable(f"set aside in {aside}: {', '.join(name.rstrip('/') for name in names)}"))
    return EXIT_DONE if good and not damaged else EXIT_DIFFERENT
