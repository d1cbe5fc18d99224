"""The predictions of a run: what its evaluators predict for each example of their data, written in pieces."""

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence

import tensorflow as tf

from looplib import console, files, folders
from looplib.checkpoint.lock import Kind, acquire
from looplib.compat import keras as _keras
from looplib.errors import UsageError, whole_number
from looplib.extras.outputs import pieces
from looplib.extras.outputs.folder import PredictionFolder, Source, unwritable
from looplib.extras.outputs.prediction import Prediction
from looplib.health.preemption import notice
from looplib.loop import task_loop
from looplib.loop.base import Request
from looplib.run import Run
from looplib.task.evaluator import Evaluator
from looplib.task.plain import as_array, as_bytes
from looplib.task.state import state_of, variables_of

_LOCKED = Kind("directory of predictions", "name another --predictions", "_lock")


def predict(run: Run, directory: str | None, kind: str, piece: int) -> dict[str, str]:
    """Predicts for the data of each evaluator that can, see `Controller.predict`."""
    pieces.check_kind(kind)
    whole_number("the records of a piece of predictions", piece)
    run.refuse_without_state()
    run.refuse_while_training("predict")
    if directory is None:
        run.directory.need("predict without a directory")
    place = (run.model_dir, "predictions") if directory is None else (directory,)
    evaluators = {name: loop.task for name, loop in run.loops.evaluations.items()}
    able = {name: task for name, task in evaluators.items() if type(task).predict_fn is not Evaluator.predict_fn}
    if not able:
        names = ", ".join(type(task).__name__ for task in evaluators.values())
        raise UsageError(
            f"there is nothing to predict with: {names or 'the run'} has no predict_fn; define it in an "
            "Evaluator, returning a dict from name to a tensor [batch, ...]"
        )
    with console.guarded(), notice.listening(), run.watchdog.watching():
        return {name: _predict(run, name, task, (*place, name), kind, piece) for name, task in able.items()}


@contextlib.contextmanager
def _opened(place: Sequence[str]) -> Iterator[PredictionFolder]:
    """Makes a folder of predictions, below a directory by names, and holds it for this process."""
    path = os.path.join(*place)
    try:
        folders.make_folder(*place)
    except files.failures(path) as error:
        raise unwritable(path, error) from error
    lock = acquire(path, functools.partial(_refuse_two, path), _LOCKED)
    try:
        yield PredictionFolder(path, lock.check)
    finally:
        lock.release()


def _refuse_two(path: str) -> None:
    raise UsageError(f"another prediction of this process writes to {path}; wait until it ends")


def _predict(run: Run, name: str, evaluator: Evaluator, place: Sequence[str], kind: str, piece: int) -> str:
    """Writes the predictions for the data of one evaluator; returns their folder."""
    with _opened(place) if run.workers.is_chief else contextlib.nullcontext() as folder:
        _predict_into(run, name, evaluator, folder, kind, piece)
    return os.path.join(*place)


def _predict_into(
    run: Run, name: str, evaluator: Evaluator, folder: PredictionFolder | None, kind: str, piece: int
) -> None:
    """Predicts for the data of one evaluator, into a folder in the chief."""
    chief = folder is not None
    start = run.workers.agree(folder.finished.step if chief else 0)
    task = Prediction(evaluator, folder.take if chief else lambda records, examples: None)
    run.loops.own(evaluator)
    loop = run.loops.of_prediction(name, task, start)
    with run.loops.lending(loop), evaluator.evaluating():
        task_loop.check_evaluation({name: loop}, -1)
        in_order = loop.stream.positioned or task.batches == "global"
        if not in_order and run.workers.count > 1:
            raise UsageError(
                f"{type(evaluator).__name__}.dataset divides the data among {run.workers.count} workers itself, so its "
                "order is not known; make it with context.indices, or predict in one process"
            )
        if chief:
            source = Source(
                step=run.step,
                weights=_checksum(run.loops.strategy, evaluator),
                examples=loop.stream.properties.examples,
                outputs=", ".join(f"{output} {kind}" for output, kind in task.outputs.items()),
                global_batch_size=loop.stream.properties.batch_size * run.loops.strategy.num_replicas_in_sync,
                replicas=None if in_order else run.loops.strategy.num_replicas_in_sync,
                format=kind,
                piece=piece,
            )
            folder.begin(source)
        try:
            ran = loop.run(Request(-1), "evaluate")
        finally:
            loop.close()
    if ran.stopped:
        run.leave(run.step)
    if chief:
        folder.end()
        run.say(f"{folder.finished.records} predictions of step {run.step} are in {folder.path}")


def _checksum(strategy: tf.distribute.Strategy, evaluator: Evaluator) -> str:
    """Returns a checksum of the weights that an evaluator predicts with, as this process's first replica has them."""
    held = vars(evaluator)
    state = {name: part for name, part in state_of(evaluator).items() if not _keras.is_metrics(held.get(name))}
    digest = hashlib.sha256()
    for _, variable in variables_of(state):
        value = as_array(strategy.experimental_local_results(variable)[0])
        digest.update(f"{value.dtype} {value.shape}".encode())
        digest.update(as_bytes(value))
    return digest.hexdigest()
