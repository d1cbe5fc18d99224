"""The run directory: its name, what it may contain, and what a controller opens in it."""

import functools
import math
import os
import time
from collections.abc import Callable

from absl import logging

from looplib.base import files, folders
from looplib.base.messages import gist
from looplib.cluster.collectives import Workers
from looplib.errors import BusyError, CheckpointError, MissingPartError, SettingError, UsageError, WorkerError
from looplib.run import choice, commits, run_json
from looplib.run.commits import Commit
from looplib.run.lock import RunLock, acquire
from looplib.run.mirror import Mirror
from looplib.run.policy import CheckpointPolicy, Start
from looplib.task.record import RunRecord
from looplib.weights.restoring import peek

_mirrors: dict[str, "Mirror"] = {}  # by their local run directory
_WAIT_NOTES = 300.0  # seconds from one line about waiting for a checkpoint to the next

# What a run directory holds; docs/reference/run_directory.md is made of it. The name of a folder ends with a slash.
CONTENTS = {
    "checkpoints/": "The checkpoints.",
    "checkpoints/set_aside/": "Damaged and unfinished checkpoints, which a start has moved there.",
    "metrics.jsonl": "The metrics, one JSON object a line: `step`, `split` and numbers.",
    "metrics.voided.jsonl": "Lines of `metrics.jsonl` whose steps a resume or a rollback has repeated.",
    "media.jsonl": "The images, texts and histograms that were shown.",
    "media.voided.jsonl": "Lines of `media.jsonl` whose steps were repeated.",
    "media/": "Their files.",
    "run.json": "Configuration, versions, strategy, last metrics, time by phase, all starts.",
    "run_eval.json": "The same of a job that does not train.",
    "config.yaml": "The settings of the program, for `--config_file`; secrets are masked.",
    "code.diff": "What differed from the git commit that `run.json` names.",
    "report.html": "The page about the run.",
    "train/": "TensorBoard events of the training, and the profile of `--profile`.",
    "eval/": "TensorBoard events of the evaluation; an evaluator of another name has its own folder.",
    "events.out.tfevents.*": "TensorBoard events with the settings, for its HParams page.",
    "alerts.log": "What `--alert` has told, and what could not be sent.",
    "csv/": "CSV files of `--trackers=csv`.",
    "wandb/": "What `--trackers=wandb` keeps.",
    "evaluations/": "The records of evaluation jobs on other machines, of a run in an object store.",
    "predictions/": "What `--mode=predict` writes.",
    "export/": "What `--mode=export` and `looplib.ExportBest` write.",
    "bad_records/": "Damaged records that `--bad_records` left out.",
    "audit.jsonl": "The verdicts of `python -m looplib audit`.",
    "lock": "Held by the process that trains.",
}


def resolve(model_dir: str | os.PathLike[str], local_dir: str | None = None) -> str:
    """Returns the one name of a run directory, see `files.resolve`; refuses one that TensorFlow takes for a pattern.

    That of a run in an object store is its local copy, `local_dir` or one in the cache.
    """
    if isinstance(model_dir, str) and files.is_remote(model_dir):
        from looplib.buckets.mirror import open_mirror  # here, as few runs need it

        mirror = open_mirror(model_dir, local_dir)
        _mirrors[mirror.directory] = mirror
        return mirror.directory
    if local_dir:
        raise SettingError(f"--local_dir={local_dir} is for a --model_dir that is a URL; leave it out")
    path = files.resolve(model_dir, "model_dir")
    files.refuse_patterns("model_dir", path)
    return path


def check_inside(model_dir: str, writes: bool) -> None:
    """Checks that what a run writes stays inside of its directory, which may come from somebody else.

    Args:
      model_dir: the run directory.
      writes: whether this process writes there; it then moves something else that stands where a file of the run
        belongs, such as a directory or a FIFO, out of the way, with a line for each.

    Raises:
      UsageError: if a folder of the run is a symbolic link or not a directory.
    """
    names = [name for name in CONTENTS if "*" not in name]
    for name in (name for name in names if name.endswith("/")):
        folders.check_folder(os.path.join(model_dir, name.rstrip("/")))  # a slash would lead through a link
    for folder in (model_dir, os.path.join(model_dir, "checkpoints")) if writes else ():
        folders.remove_unfinished(folder)
    for name in (name for name in names if writes and not name.endswith("/")):
        path = os.path.join(model_dir, name)
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
            logging.warning("%s is not a file; moved to %s", path, folders.move_aside(model_dir, name))


class RunDirectory:
    """The run directory of one controller: the lock on it, and the checkpoints in it.

    Opening it for a training locks the directory, sets damaged and unfinished checkpoints aside, and finds the newest
    one that is intact. An evaluation only reads. Workers share the directory, and the chief writes.

    Args:
      model_dir: the run directory; None for a run that keeps nothing.
      policy: `CheckpointPolicy`.
      start: `Start`.
      trains: whether the controller trains.
      workers: `Workers`.
      close: closes the controller, for another one of this process that is built for the directory.

    Attributes:
      is_training: whether a training is under way.
      writable: whether metrics can be written to the directory.
      starts_from: the `Commit` that the run starts from, or None.
      mirror: the copy of the directory in an object store, a `Mirror`.

    Raises:
      UsageError: if the directory is in use by another process, or a training cannot write to it.
    """

    def __init__(
        self,
        model_dir: str | None,
        policy: CheckpointPolicy,
        start: Start,
        trains: bool,
        workers: Workers,
        close: Callable[[], None],
    ) -> None:
        self.model_dir, self.policy, self.start, self.trains, self.workers = model_dir, policy, start, trains, workers
        self.is_training, self.writable = False, bool(model_dir)
        self._lock: RunLock | None = None
        self.mirror = _mirrors.get(model_dir, Mirror())
        self._verified: str | None = None  # the path of the checkpoint that was just read through
        self._wait_noted = -math.inf
        self.starts_from: Commit | None = None
        if not model_dir:
            return
        try:
            if workers.is_chief:
                files.check_writable(model_dir)
        except UsageError as error:
            if trains or not os.path.isdir(model_dir):
                raise
            self.writable = False
            logging.warning("%s; this evaluation reports on the console only", error)
        if workers.is_chief:
            check_inside(model_dir, trains)
            if trains:
                self._lock = acquire(model_dir, functools.partial(self._give_up, close))
            self.mirror.begin(trains)
        if workers.count > 1:
            workers.agree(0)  # that the chief has begun
            if not workers.is_chief:
                self.mirror.refresh()
        self.starts_from = self._chosen_start()
        self._check_nothing_is_lost()

    @property
    def checkpoints(self) -> str | None:
        """The path of the folder of the checkpoints; None without a `model_dir`."""
        return os.path.join(self.model_dir, "checkpoints") if self.model_dir else None

    def _give_up(self, close: Callable[[], None]) -> None:
        """Closes the controller, because another one of the process is being built for its directory."""
        if self.is_training:
            raise BusyError(
                f"another controller of this process is training in {self.model_dir}; wait until it ends, or use "
                "a separate model_dir"
            )
        logging.warning("the earlier controller for %s is closed, because another one is built for it", self.model_dir)
        try:
            close()
        except UsageError as error:  # a failed save of that run, and not of the new one
            logging.error("%s", error)

    def refuse_while_training(self, what: str) -> None:
        """Raises `UsageError` if a training is under way, so that an action calls."""
        if self.is_training:
            raise BusyError(f"{what} was called by an action inside a training; an action may save, evaluate or stop")

    def check_may_train(self) -> None:
        """Raises `UsageError` if a training may not begin: from a chosen checkpoint, or inside of another training."""
        if self.start.checkpoint is not None:
            raise SettingError(
                f"Start(checkpoint={self.start.checkpoint!r}) is for evaluations, predictions and exports, and each "
                "start of a training would go back there; leave it out, and call controller.restore_checkpoint"
            )
        self.refuse_while_training("train")

    def need(self, what: str) -> None:
        """Raises `UsageError` if there is no `model_dir`, which the call `what` needs."""
        if not self.checkpoints:
            raise MissingPartError(
                f"{what} needs a model_dir, but this controller has none; give Controller(model_dir=...)"
            )

    def check_lock(self) -> None:
        """Raises `UsageError` if the run directory is not this controller's any more."""
        self.mirror.check()
        if self._lock is not None:
            self._lock.check()

    def release(self) -> None:
        """Lets another process, or another controller of this one, write to the directory."""
        try:
            self.mirror.end()
        finally:
            if self._lock is not None:
                self._lock.release()

    def take_folder(self, path: str, as_it_is: bool) -> str:
        """Takes a folder of outputs, if it is in the run directory, see `Mirror.take_folder`; for the chief."""
        name = os.path.relpath(path, self.model_dir) if self.model_dir else os.pardir
        return path if name.startswith(os.pardir) else self.mirror.take_folder(name, as_it_is)

    def _check_nothing_is_lost(self) -> None:
        """Refuses to start from the beginning where the run had a checkpoint, unless the policy allows it."""
        if self.starts_from or not self.trains or self.start.start_anew:
            return
        known = run_json.read_report(run_json.path_of(self.model_dir, self.trains)) if self.model_dir else {}
        saved_step = known.get("saved_step") if self.workers.is_chief else None
        aside = commits.set_aside_before(self.checkpoints)
        if not (aside or saved_step):
            return
        what = f"of step {saved_step} and before" if saved_step else f"in {', '.join(aside)}"
        raise CheckpointError(
            f"no checkpoint in {self.checkpoints} is intact, although the run had checkpoints ({what}); recover "
            "one, or start from the beginning with --start_anew (Start(start_anew=True))"
        )

    def _chosen_start(self) -> Commit | None:
        which = self.start.checkpoint
        return self.newest_intact() if which is None and self.trains else self.chosen(which or choice.FINAL)

    def deleted(self, path: str) -> bool:
        """Returns whether a training has meanwhile deleted the checkpoint that this job was to start from.

        `starts_from` is then another one, if there is one.
        """
        if self.trains or self.workers.count > 1 or os.path.exists(path + ".commit"):
            return False
        self.starts_from = self._chosen_start()
        return self.starts_from is not None and self.starts_from.path != path

    def chosen(self, which: str | int) -> Commit | None:
        """Returns the checkpoint that a word or a step names, see `choice.choose`; workers wait for each other."""
        return self._verified_by_the_chief(lambda: choice.choose(self.checkpoints, which, self.policy.best))

    def peek(self) -> tuple[int, RunRecord]:
        """Returns the global batches consumed at `starts_from` and its run record; 0 and an empty one without it."""
        if not self.starts_from:
            return 0, RunRecord()
        step, record = peek(self.starts_from.path)
        return step + record.input_offset, record

    @property
    def latest(self) -> str | None:
        """The path of the newest committed checkpoint, or None."""
        return commits.latest_checkpoint(self.checkpoints) if self.checkpoints else None

    def agreed_latest(self) -> str | None:
        """Returns `latest` as the chief sees it, which may be writing another one now; workers wait for each other."""
        done = self._agreed(commits.newest(self.checkpoints)) if self.checkpoints else None
        return done.path if done else None

    def newest_intact(self) -> Commit | None:
        """Returns the newest checkpoint that reads as it was written, or None; workers wait for each other.

        A training sets newer, invalid ones aside.
        """
        return self._verified_by_the_chief(lambda: commits.newest_intact(self.checkpoints, tidy=self.trains))

    def _verified_by_the_chief(self, find: Callable[[], Commit | None]) -> Commit | None:
        done = find() if self.workers.is_chief else None
        self._verified = done.path if done else None
        return self._agreed(done)

    def best(self) -> Commit | None:
        """Returns the best checkpoint, see `choice.best`; None without a `model_dir`."""
        return choice.best(self.checkpoints, self.policy.best) if self.checkpoints else None

    def check_intact(self, path: str) -> None:
        """Raises `UsageError` for a damaged checkpoint, on which TensorFlow may crash; reads all of it."""
        if path == self._verified or not self.workers.is_chief:
            self._verified = None  # once, because it may change later
            return
        try:
            reason = commits.verify(commits.read_marker(path))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            if isinstance(error, UsageError):
                raise
            if not os.path.exists(f"{path}.index"):
                return  # not a checkpoint at all, which is said when it is opened
            reason = f"its marker cannot be read ({gist(error)})"
        if reason:
            raise CheckpointError(
                f"{path} is not a checkpoint that looplib can read: {reason}; name another one, such as those that "
                "`python -m looplib inspect --verify` calls intact"
            )

    def wait_for_newer(self, than: str | None, timeout: float | None) -> str | None:
        """Waits for a checkpoint newer than a known one; returns its path, or None if none came in time.

        Args:
          than: the path of the known checkpoint; None waits for any.
          timeout: seconds to wait; None waits forever.
        """
        done = self._verified_by_the_chief(lambda: self._wait_for_newer(than, timeout))
        return done.path if done else None

    def _wait_for_newer(self, than: str | None, timeout: float | None) -> Commit | None:
        started, damaged = time.monotonic(), None
        while True:
            self.mirror.refresh()
            done = commits.newest(self.checkpoints)
            if done and done.path != than and done != damaged:
                try:
                    reason = commits.verify(done)
                    if not reason:
                        return done
                    if os.path.exists(done.path + ".commit"):  # else the training has deleted it
                        logging.warning("the checkpoint of step %d is left out: %s", done.step, reason)
                        damaged = done
                except files.CannotReadError as error:  # it may be readable at the next attempt
                    logging.log_every_n_seconds(logging.WARNING, "%s", 60, error)
            if timeout is not None and time.monotonic() - started >= timeout:
                return None
            if time.monotonic() - self._wait_noted > _WAIT_NOTES:
                self._wait_noted = time.monotonic()
                newer = f" newer than {os.path.basename(than)}" if than else ""
                limit = "as long as it takes" if timeout is None else f"for up to {timeout:g} s"
                logging.info("waiting for a checkpoint%s in %s, %s", newer, self.checkpoints, limit)
            time.sleep(min(1.0, timeout if timeout else 1.0))

    def _agreed(self, done: Commit | None) -> Commit | None:
        """Returns the `Commit` that the chief has found, or None."""
        if self.workers.count == 1:
            return done
        step, made = (self.workers.agree(number) for number in (done.id if done else (-1, 0)))
        if step < 0:
            return None
        if self.workers.is_chief:
            return done
        self.mirror.wait_for((step, made))
        for done in commits.committed(self.checkpoints):
            if done.id == (step, made):
                return done
        raise WorkerError(
            f"worker {self.workers.index} does not see the checkpoint of step {step} in {self.checkpoints}, from "
            "which the chief resumes; use a model_dir on a file system that all workers share"
        )
