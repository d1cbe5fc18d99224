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
      sentence: why the run ended early, for `run.json` and the other workers.
      alone: whether the other workers have yet to be told.
      at_once: whether to exit by `os._exit`, without Python's shutdown.
      is_news: whether the line goes to standard output; otherwise to standard error.
    """

    code: int
    status: str
    line: str
    sentence: str = ""
    alone: bool = False
    at_once: bool = False
    is_news: bool = False


def done(line: str) -> Outcome:
    """Returns the outcome of a run that has finished."""
    return Outcome(EXIT_DONE, "done", line, is_news=True)


def served(gone: CoordinatorGone, status: str) -> Outcome:
    """Returns the outcome of a worker or parameter server, given the status of its run."""
    status = "killed" if status == "running" else status
    code = {"done": EXIT_DONE, "preempted": EXIT_PREEMPTED}.get(status, EXIT_FAILED)
    advice = "" if code == EXIT_DONE else "; restart all processes to resume"
    line = f"looplib: {gone}; status of the run: {status}{advice}"
    return Outcome(code, status, line, at_once=True)  # nothing else ends a server


def preempted(error: Preempted) -> Outcome:
    """Returns the outcome of a run that was ended by a signal or a time limit."""
    sentence = str(error)
    # At once: everything is saved and closed, and Python's shutdown would wait for a stalled input.
    return Outcome(EXIT_PREEMPTED, "preempted", f"looplib: {sentence}", sentence, error.alone, at_once=True)


def failed(sentence: str) -> Outcome:
    """Returns the outcome of a failed run.

    Args:
      sentence: why it failed.
    """
    return Outcome(EXIT_FAILED, "failed", f"looplib: error: {sentence}", sentence, alone=True)


def broken(error: Exception, place: str, advice: str) -> Outcome:
    """Returns the outcome of a run that was ended by an error in the program.

    Args:
      error: not a `UsageError`; for those, `failed` suffices.
      place: the line of the user's program that raised it; "" if unknown.
      advice: how to resume the run, as a clause.
    """
    if is_quit(error):
        return failed(f"the run was ended by quitting the debugger; {advice}")
    because = f" (because of {read(error.__cause__)})" if error.__cause__ else ""
    cure, line = cure_of(error), place or "the line that the trace above names"
    todo = f"{cure}, or fix {place}" if cure and place else cure or f"fix {line}"
    return failed(f"{read(error)}{because}; {todo}; {advice}")


def is_quit(error: Exception) -> bool:
    """Returns whether an error means that the user quit a debugger."""
    return read(error).kind == "BdbQuit"
