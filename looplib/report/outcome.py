"""How a run ended: its exit code, its status in `run.json`, and its last line."""

import dataclasses

from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, CoordinatorGone, Preempted, cure_of, read


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      code: the exit code.
      status: the status in `run.json`.
      line: the last line; "" for none.
      sentence: why the run ended before its time, for `run.json` and the other workers.
      alone: whether the other workers do not know of it yet.
      at_once: whether the process ends without Python's own end.
      is_news: whether the line is for standard output, and not for standard error.
    """

    code: int
    status: str
    line: str
    sentence: str = ""
    alone: bool = False
    at_once: bool = False
    is_news: bool = False


def done(line: str) -> Outcome:
    """Returns the outcome of a run that has done all that it was asked for."""
    return Outcome(EXIT_DONE, "done", line, is_news=True)


def served(gone: CoordinatorGone, status: str) -> Outcome:
    """Returns the outcome of a worker or parameter server, from the status that its run ended with."""
    status = "killed" if status == "running" else status
    code = {"done": EXIT_DONE, "preempted": EXIT_PREEMPTED}.get(status, EXIT_FAILED)
    advice = "" if code == EXIT_DONE else "; restart all processes to resume"
    line = f"looplib: {gone}; status of the run: {status}{advice}"
    return Outcome(code, status, line, at_once=True)  # a server never ends otherwise


def preempted(error: Preempted) -> Outcome:
    """Returns the outcome of a run that a signal has ended."""
    sentence = str(error)
    # At once, because all is saved and closed, and Python's own end would wait for an input that stalls.
    return Outcome(EXIT_PREEMPTED, "preempted", f"looplib: {sentence}", sentence, error.alone, at_once=True)


def failed(sentence: str) -> Outcome:
    """Returns the outcome of a run that has failed, from the sentence that says why."""
    return Outcome(EXIT_FAILED, "failed", f"looplib: error: {sentence}", sentence, alone=True)


def broken(error: Exception, place: str, advice: str) -> Outcome:
    """Returns the outcome of a run that an error of the program has ended.

    Args:
      error: any but a `UsageError`, whose sentence is enough for `failed`.
      place: the user's line that it comes from; "" if it is not known.
      advice: how to resume the run, as a clause.
    """
    if is_quit(error):
        return failed(f"the run was ended by quitting the debugger; {advice}")
    because = f" (because of {read(error.__cause__)})" if error.__cause__ else ""
    cure, line = cure_of(error), place or "the line that the trace above names"
    todo = f"{cure}, or fix {place}" if cure and place else cure or f"fix {line}"
    return failed(f"{read(error)}{because}; {todo}; {advice}")


def is_quit(error: Exception) -> bool:
    """Returns whether an error is how a debugger ends the program that it has stopped."""
    return read(error).kind == "BdbQuit"
