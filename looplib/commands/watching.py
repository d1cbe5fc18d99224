"""`python -m looplib watch DIR...`: alerts about all runs below some folders, by a process beside them."""

import itertools
import os
import time
from collections.abc import Sequence

from looplib.base.console import printable
from looplib.commands.status import run_folders
from looplib.errors import EXIT_DONE, CommandError, RunDirectoryError
from looplib.report.alert import Condition
from looplib.report.observer import RunObserver
from looplib.report.sending import Sender

_SHORTEST, _LONGEST = 0.1, 86_400.0  # seconds between two looks
_LAST_SECONDS = 60.0  # for what still waits to be sent at the end
_PAUSE = 0.5


def watch(
    directories: Sequence[str],
    urls: Sequence[str] = (),
    conditions: Sequence[str] = (),
    every: float = 10.0,
    until_end: bool = False,
    process: int | None = None,
) -> int:
    """Prints what happens to the runs below some folders, and sends it to addresses, until Ctrl-C.

    Args:
      directories: the folders; runs that begin later are watched too.
      urls: see `sending.Sender`.
      conditions: see `alert.Condition`.
      every: seconds between two looks.
      until_end: whether to return once all runs have ended, and there is one.
      process: the id of the process that trains in the only directory, or None; see `RunObserver`.

    Returns:
      The exit code.

    Raises:
      UsageError: for a folder that does not exist, or another value that cannot be used.
    """
    if not _SHORTEST <= every <= _LONGEST:
        raise CommandError(f"--every is {every:g}; expected seconds from {_SHORTEST:g} to {_LONGEST:,.0f} (a day)")
    for directory in directories:
        if not os.path.isdir(directory):
            raise RunDirectoryError(f"{directory} is not a directory on this machine; name folders that hold runs")
    senders, parsed = [Sender(url, _say) for url in urls], [Condition.parse(text) for text in conditions]
    observers: dict[str, RunObserver] = {}
    try:
        while True:
            for folder in directories if process is not None else run_folders(directories):
                if folder not in observers:
                    observers[folder] = RunObserver(folder, parsed, process)
            for alert in itertools.chain.from_iterable(observer.look() for observer in observers.values()):
                _say(f"{alert.title}: {alert.sentence}")
                for sender in senders:
                    sender.add(alert)
            if until_end and observers and all(observer.has_ended for observer in observers.values()):
                break
            time.sleep(every)
    except KeyboardInterrupt:
        pass
    end = time.monotonic() + _LAST_SECONDS
    while not all(sender.is_done for sender in senders) and time.monotonic() < end:
        time.sleep(_PAUSE)
    return EXIT_DONE


def _say(sentence: str) -> None:
    print(printable(f"{time.strftime('%F %T')} {sentence}"), flush=True)
