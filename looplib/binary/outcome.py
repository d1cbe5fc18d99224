"""How a run of a binary ends: its exit code, its status in `run.json`, its last line, and the end of its process."""

import contextlib
import dataclasses
import functools
import os
import sys
import traceback
from typing import Any, NoReturn

import tensorflow as tf
from absl import logging

from looplib.base import folders
from looplib.base.messages import cure_of, parse_error
from looplib.binary.command_line import TRAINING_MODES
from looplib.cluster import peers, runtime, tpu
from looplib.cluster.collectives import PEER_ERRORS
from looplib.compat import places
from looplib.compat import tensorflow as _tf
from looplib.controller import Controller
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, CoordinatorGone, DataError, Preempted, UsageError
from looplib.masks import masked_text
from looplib.run.directory import RunDir
from looplib.run.report import RunReport, read_report

_PEER_SECONDS, _OTHER_SECONDS = 30.0, 3.0  # to wait for news of another worker after a peer error, or any other error


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
    """Returns the outcome of a worker or parameter server whose run ended with a status."""
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


def failed(sentence: str, line: str = "") -> Outcome:
    """Returns the outcome of a run that has failed, from the sentence that says why; the last line may say more."""
    return Outcome(EXIT_FAILED, "failed", f"looplib: error: {line or sentence}", sentence, alone=True)


def broken(error: Exception, place: str, advice: str) -> Outcome:
    """Returns the outcome of a run that an error of the program has ended, other than a `UsageError`.

    Args:
      error: the error.
      place: the user's line that it comes from; "" if it is not known.
      advice: how to resume the run, as a clause.
    """
    if is_quit(error):
        return failed(f"the run was ended by quitting the debugger; {advice}")
    because = f" (because of {parse_error(error.__cause__)})" if error.__cause__ else ""
    cure, line = cure_of(error), place or "the line that the trace above names"
    todo = f"{cure}, or fix {place}" if cure and place else cure or f"fix {line}"
    return failed(f"{parse_error(error)}{because}; {todo}; {advice}")


def is_quit(error: Exception) -> bool:
    """Returns whether an error means that the user has quit a debugger."""
    return parse_error(error).kind == "BdbQuit"


@dataclasses.dataclass
class Session:
    """A run of a binary, as a `with` block whose end is the end of the process.

    Attributes:
      values: the value of each flag, by name.
      strategy: None until it is made.
      controller: None until it is built.
      earlier: `run.json` as it was before this process.
      temporary: the run directory of a trial, such as a dry run, which is removed at the end.
      tried: the last lines of a trial that went well.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    strategy: tf.distribute.Strategy | None = None
    controller: Controller | None = None
    earlier: RunReport | None = None
    temporary: str = ""
    tried: str = ""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end(self._done())
        elif isinstance(error, CoordinatorGone):
            report = read_report(self.report_path)
            self.end(served(error, "not known" if report is None or report == self.earlier else report.status))
        elif isinstance(error, Preempted):
            self.end(preempted(error))
        elif isinstance(error, UsageError):
            logging.debug("where it was raised:", exc_info=error)
            kept = isinstance(error, DataError) and self._trains and self.controller.latest_checkpoint
            advice = f"; after that, the same command resumes from {kept}" if kept else ""
            self.end(failed(f"{error}{advice}", f"{error.line}{advice}"))
        elif isinstance(error, Exception):  # other ends, such as a `SystemExit` of the program's own, pass through
            self.end(self._broken(error))

    @property
    def report_path(self) -> str:
        """The path of the run's report."""
        return RunDir(self.values["model_dir"]).report_path(self.values["mode"] in TRAINING_MODES)

    @property
    def page(self) -> str:
        """The path of the page that the run has written; "" if there is none."""
        return self.controller.report.page.path if self.controller else ""

    @property
    def _trains(self) -> bool:
        """Whether there is a controller that trains, so that its checkpoints are this run's."""
        return self.controller is not None and "train" in self.controller.loops

    def close(self, status: str, sentence: str = "") -> None:
        """Closes the controller and writes the report; an error is only logged."""
        if self.controller is None:
            return
        write = functools.partial(self.controller.report.write, status, sentence)
        for action in (write, self.controller.close) * 2:  # before too, because trackers read there how it ended
            try:
                action()
            except Exception as error:  # the disk may be full, and the last line must come out all the same
                logging.error("%s", error)

    def end(self, how: Outcome) -> NoReturn:
        """Closes and reports what is open, tells the other workers, prints the last line, and ends the process."""
        has_failed, controller = how.code not in (EXIT_DONE, EXIT_PREEMPTED), self.controller
        how = dataclasses.replace(how, line=masked_text(how.line), sentence=masked_text(how.sentence))
        if how.code != EXIT_DONE:
            self.close(how.status, how.sentence if has_failed else "")
        if self.temporary:
            with contextlib.suppress(OSError):
                folders.remove(*os.path.split(self.temporary))
        if controller and controller.is_chief and not has_failed:
            print(*filter(None, [*controller.clock.summary(), controller.report.facts.speed]), sep="\n")
        sys.stdout.flush()
        if has_failed:
            _tf.log_errors_only()  # warnings as objects are deleted would come after the last line
            peers.current.announce_exit(how.code, how.sentence)  # ends here if another worker failed first
            if self.page and not self.temporary:
                print(f"looplib: the page of the run is {self.page}", file=sys.stderr)
        if how.line:
            print(how.line, file=sys.stdout if how.is_news else sys.stderr, flush=True)
        if how.alone:
            peers.current.announce_exit(how.code, how.sentence)  # has no effect the second time
        peers.current.leave()  # has no effect after last words
        # TensorFlow would wait for other processes, or complain of those that have ended.
        if how.at_once or runtime.connected() or peers.current.joined:
            sys.stdout.flush()
            os._exit(how.code)
        sys.exit(how.code)

    def _done(self) -> Outcome:
        if self.tried:
            return done(self.tried)
        url, directory = self.controller.report.standing().url, self.values["model_dir"]
        place = f"{url}, its local copy {directory}" if url else directory
        line = f"done at step {_where(self.controller)}; the run directory is {place}"
        line += f", and its page {self.page}" * bool(self.page)
        return done(line if self.controller.is_chief else "")

    def _broken(self, error: Exception) -> Outcome:
        # Ends the process in here if the error is one that another worker's end has led to.
        peers.current.exit_with_first_cause(_PEER_SECONDS if isinstance(error, PEER_ERRORS) else _OTHER_SECONDS)
        kept = self.controller and self.controller.latest_checkpoint
        loops = self.controller.loops.values() if self.controller else ()
        place = places.place_of(error) or next(filter(None, (loop.place_of(error) for loop in loops)), "")
        if cure_of(error) and not place:  # of a file that looplib reads or writes
            logging.debug("where it was raised:", exc_info=error)
        elif not is_quit(error):
            print(masked_text("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        on_tpu = isinstance(self.strategy, tf.distribute.TPUStrategy)
        if on_tpu and tpu.is_lost(self.strategy, error):
            self.close("restarted")  # what is on the TPU cannot be saved any more
            try:
                tpu.start_again(int(kept.rsplit("-", 1)[1]) if kept else 0)
            except UsageError as refusal:
                return failed(str(refusal), refusal.line)
        if self._trains:
            advice = f"run the same command to resume from {kept}" if kept else "no checkpoint was saved"
            return broken(error, place, advice)
        return broken(error, place, "then run the same command again")


def _where(controller: Controller) -> str:
    """Returns the step at which a run has ended, and which of its checkpoints other jobs take."""
    standing = controller.report.standing()
    rule = controller.policy.best if "train" in controller.loops else None
    path = controller.best_checkpoint if rule and standing.saved_step is not None else None
    best = int(path.rsplit("-", 1)[1]) if path else None
    if (final := standing.final_step) is not None:
        named = f", the best by {rule.metric}," if final == best else ","
        return (
            f"{standing.step}, and back at step {final}{named} which eval, predict, export and --warm_start take; a "
            f"longer training continues from step {standing.saved_step} (--checkpoint=latest)"
        )
    if best is None or best == standing.step:
        return f"{standing.step}"
    return f"{standing.step}; the best by {rule.metric} is step {best} (--checkpoint=best)"
