"""The predictions of a run: what its evaluators predict for each example of their data, written in pieces."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base import files, folders
from looplib.base.messages import whole_number
from looplib.checkpoint.checkpointer import Checkpointer
from looplib.checkpoint.directory import RunDirectory
from looplib.cluster.collectives import Workers
from looplib.compat import keras as _keras
from looplib.compat.tensorflow import converted
from looplib.data.context import InputContext
from looplib.errors import MissingPartError, PredictionError
from looplib.exports.folder import PredictionFolder, PredictionSource, Record, check_kind, rows_of, unwritable
from looplib.exports.new_folder import check_free
from looplib.loop import additions, task_loop
from looplib.loop.contracts import Request
from looplib.loop.loops import Loops
from looplib.loop.packing import batch_size
from looplib.report.reporter import Reporter
from looplib.run.lock import LockKind, acquire
from looplib.task import reductions
from looplib.task.plain import as_array, checksum_of
from looplib.task.state import state_of, variables_of
from looplib.task.trainer import Evaluator

Take = Callable[[list[Record], np.ndarray], None]  # gets the records of a step, and a checksum of each example


class Prediction(Evaluator):
    """Predicts for the data of an evaluator.

    Args:
      evaluator: has the data and `predict_fn`.
      take: gets what each step predicts, in the order of the data.

    Attributes:
      outputs: the name, type and shape of each output, once the step is traced.
    """

    def __init__(self, evaluator: Evaluator, take: Take) -> None:
        self._evaluator, self._take = evaluator, take
        self._who, self._data = type(evaluator).__name__, _data_of(evaluator)
        self.batches, self.global_batch_size = evaluator.batches, evaluator.global_batch_size
        self.uneven_parts = evaluator.uneven_parts
        self.outputs: dict[str, str] = {}

    def dataset(self, context: InputContext, /) -> tf.data.Dataset:
        """See `Evaluator`."""
        return self._evaluator.predict_dataset(context)

    @tf.autograph.experimental.do_not_convert
    def step_fn(self, inputs: Any, /) -> dict[str, Any]:
        """See `Evaluator`."""
        batch = batch_size(inputs)
        if batch is None:
            raise PredictionError(f"{self._data} has batches without a batch dimension, so no example to predict for")
        parts = self._parts(converted(self._evaluator.predict_fn)(inputs))
        return {"predictions": reductions.each({"examples": _checksums(inputs, batch[1]), "outputs": parts})}

    @tf.autograph.experimental.do_not_convert
    def _parts(self, outputs: Any) -> dict[str, list[tf.Tensor]]:
        """Returns of each output the values, and the row splits where it is ragged."""
        if not isinstance(outputs, Mapping) or not outputs or not all(isinstance(name, str) for name in outputs):
            raise PredictionError(
                f"{self._who}.predict_fn returned {type(outputs).__name__}; expected a dict from name to a tensor "
                "[batch, ...] with a row for each example"
            )
        parts = {}
        for name, value in sorted(outputs.items()):
            if isinstance(value, tf.SparseTensor):
                raise PredictionError(
                    f"{self._who}.predict_fn returned {name!r} as a sparse tensor; return it dense "
                    "(tf.sparse.to_dense) or ragged (tf.RaggedTensor.from_sparse)"
                )
            value = value if isinstance(value, tf.RaggedTensor) else tf.convert_to_tensor(value)
            shape, dtype = value.shape, value.dtype
            if shape.rank == 0 or not (dtype.is_floating or dtype.is_integer or dtype in (tf.bool, tf.string)):
                raise PredictionError(
                    f"{self._who}.predict_fn returned {name!r} as {dtype.name} of shape {shape}; expected numbers, "
                    "booleans or strings [batch, ...] with a row for each example"
                )
            ragged = isinstance(value, tf.RaggedTensor)
            rest = shape[1:] if shape.rank else "unknown"
            self.outputs[name] = f"{dtype.name}{rest}{' ragged' if ragged else ''}"
            parts[name] = [value.flat_values, *value.nested_row_splits] if ragged else [value]
        return parts

    def collect(self, outputs: list[dict[str, Any]]) -> None:
        """See `Evaluator`."""
        records: list[Record] = []
        examples = []
        for output in outputs:
            of_replica = output["predictions"]
            examples.append(of_replica["examples"].numpy())
            columns = {}
            for name, (values, *splits) in of_replica["outputs"].items():
                columns[name] = rows_of(values.numpy(), [part.numpy() for part in splits])
                if len(columns[name]) != len(examples[-1]):
                    raise PredictionError(
                        f"{self._who}.predict_fn returned {name!r} with {len(columns[name])} rows for a batch of "
                        f"{len(examples[-1])} examples; expected a row for each example"
                    )
            records += [dict(zip(columns, rows)) for rows in zip(*columns.values())]
        self._take(records, np.concatenate(examples))


def _data_of(evaluator: Evaluator) -> str:
    """Returns the name of the method that makes the data to predict for."""
    kind = type(evaluator)
    own = kind.predict_dataset is not Evaluator.predict_dataset
    return f"{kind.__name__}.{'predict_dataset' if own else 'dataset'}"


@tf.autograph.experimental.do_not_convert
def _checksums(inputs: Any, size: tf.Tensor) -> tf.Tensor:
    """Returns a checksum of each example, int64 `[batch]`; zeros on a TPU, which has no op for it."""
    found = None
    if not isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy):
        found = additions.hash_of_each(inputs)
    return tf.zeros([size], tf.int64) if found is None else found


_LOCKED = LockKind("directory of predictions", "name another directory (--predictions)", "_lock")


def predict(
    loops: Loops,
    checkpointer: Checkpointer,
    reporter: Reporter,
    directory: str | os.PathLike[str] | None,
    kind: str,
    piece: int,
) -> dict[str, str]:
    """Predicts for the data of each evaluator that can, see `Controller.predict`.

    Args:
      loops: the loops of the run.
      checkpointer: has its directory, and ends it for a signal.
      reporter: says what was written.
      directory: where to write, or None for the run directory.
      kind: the files' format.
      piece: records of a file.
    """
    check_kind(kind)
    whole_number("the records of a piece of predictions", piece)
    run_directory = checkpointer.directory
    if directory is None:
        run_directory.need("predict without a directory")
        place = (run_directory.model_dir, "predictions")
    else:
        place = (files.resolve(directory, "the directory of the predictions"),)
    evaluators = {name: loop.task for name, loop in loops.evaluations.items()}
    able = {name: task for name, task in evaluators.items() if type(task).predict_fn is not Evaluator.predict_fn}
    if not able:
        if not evaluators:
            raise MissingPartError(
                "this controller has no evaluator; give Controller(evaluator=...) to predict, such as "
                "trainer.evaluator(predict_data=...) of a KerasTrainer"
            )
        names = ", ".join(type(task).__name__ for task in evaluators.values())
        raise PredictionError(
            f"there is nothing to predict with: {names} has no predict_fn; define it in an Evaluator, returning a dict "
            "from name to a tensor [batch, ...]"
        )
    found = {}
    for name, task in able.items():
        check_free(os.path.join(*place, name), run_directory.model_dir, "predictions", loops.evaluations)
        folder_of = (
            _opened((*place, name), run_directory) if run_directory.workers.is_chief else contextlib.nullcontext()
        )
        with folder_of as folder:
            if not _predict_into(loops, run_directory.workers, reporter, name, task, folder, kind, piece):
                checkpointer.leave(int(loops.global_step))
        found[name] = os.path.join(*place, name)
    return found


@contextlib.contextmanager
def _opened(place: Sequence[str], run_directory: RunDirectory) -> Iterator[PredictionFolder]:
    """Makes a folder of predictions, below a directory by names, and holds it for this process."""
    path = os.path.join(*place)
    shown = run_directory.take_folder(path, as_it_is=True)
    try:
        folders.make_folder(*place)
    except OSError as error:
        raise unwritable(path, error) from error
    lock = acquire(path, functools.partial(_refuse_two, path), _LOCKED)
    try:
        yield PredictionFolder(path, lock.check, shown)
    finally:
        lock.release()


def _refuse_two(path: str) -> None:
    raise PredictionError(f"another prediction of this process writes to {path}; wait until it ends")


def _predict_into(
    loops: Loops,
    workers: Workers,
    reporter: Reporter,
    name: str,
    evaluator: Evaluator,
    folder: PredictionFolder | None,
    kind: str,
    piece: int,
) -> bool:
    """Predicts for the data of one evaluator, into a folder in the chief; returns False if a signal ended it."""
    chief, step = folder is not None, int(loops.global_step)
    start = workers.agree(folder.finished.step if chief else 0)
    task = Prediction(evaluator, folder.take if chief else lambda records, examples: None)
    loops.attach(evaluator)
    loop = loops.prediction_loop(name, task, start)
    with loops.borrowing(loop), evaluator.evaluating():
        task_loop.check_evaluation({name: loop}, -1)
        in_order = loop.data.stream.positioned or task.batches == "global"
        if not in_order and workers.count > 1:
            raise PredictionError(
                f"{_data_of(evaluator)} divides the data among {workers.count} workers itself, so its "
                "order is not known; make it with context.indices, or predict in one process"
            )
        if chief:
            source = PredictionSource(
                step=step,
                weights=_checksum(loops.strategy, evaluator),
                examples=loop.data.stream.properties.examples,
                outputs=", ".join(f"{output} {kind}" for output, kind in task.outputs.items()),
                global_batch_size=loop.data.stream.properties.batch_size * loops.strategy.num_replicas_in_sync,
                replicas=None if in_order else loops.strategy.num_replicas_in_sync,
                format=kind,
                piece=piece,
                data=evaluator.predict_checksum(),
            )
            folder.begin(source)
        try:
            ran = loop.run(Request(-1), "evaluate")
        finally:
            loop.close()
    if ran.stopped:
        return False
    if chief:
        folder.end()
        reporter.say(f"{folder.finished.records} predictions of step {step} are in {folder.path}")
    return True


def _checksum(strategy: tf.distribute.Strategy, evaluator: Evaluator) -> str:
    """Returns a checksum of the weights that an evaluator predicts with, as this process's first replica has them."""
    held = vars(evaluator)
    state = {name: part for name, part in state_of(evaluator).items() if not _keras.is_metrics(held.get(name))}
    held_here = (strategy.experimental_local_results(variable)[0] for _, variable in variables_of(state))
    return checksum_of(map(as_array, held_here))
