"""`python -m looplib average DIR OUTPUT`: the mean of successive checkpoints of a run."""

import itertools
import os
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base import folders
from looplib.base.messages import whole_number, with_cure
from looplib.base.orders import ReplayOrder
from looplib.commands.replay import Replayable
from looplib.compat import tensorflow as _tf
from looplib.errors import EXIT_DONE, CommandError, FileError, MismatchError, NoCheckpointError, RunDirectoryError
from looplib.exports.new_folder import new_folder
from looplib.processes.child import TemporaryFolder
from looplib.run import choice, commits
from looplib.run.commits import Commit
from looplib.task.record import RunRecord
from looplib.weights.names import SavedVariables

_MOVING = "/moving_variance"  # in the key of a statistic of batch normalization


def average(
    directory: str,
    output: str,
    last: int | None = None,
    checkpoint: str = choice.LATEST,
    statistics_steps: int | None = None,
    averages: bool = False,
) -> int:
    """Writes the mean of successive checkpoints of a run as a run directory of its own.

    Floating-point values are averaged in float64 (Izmailov et al., 2018, arXiv:1803.05407); everything else is the
    last checkpoint's. The result is for `--mode=eval --model_dir=OUTPUT` and `--warm_start=OUTPUT`.

    Args:
      directory: a run directory, or one that holds checkpoints; unchanged.
      output: the new directory.
      last: number of checkpoints; None for 5.
      checkpoint: the last of them: "latest", "final", "best" or a step, see `choice.choose`.
      statistics_steps: how many batches of the training data the moving statistics of batch normalization are computed
        from, by the run's own command, see `normalization.recompute`; None averages them too.
      averages: whether to write, in place of the mean, the moving averages of the weights (`WeightAverages`) that the
        last checkpoint has, as its weights.

    Returns:
      The exit code.

    Raises:
      UsageError: if there are fewer intact checkpoints, they are of different models, `output` has files, or the run's
        command cannot compute the statistics.
    """
    if averages and last is not None:
        raise CommandError(f"--averages takes the moving averages of one checkpoint; leave out --last={last}")
    last = 1 if averages else whole_number("--last", 5 if last is None else last)
    run = None
    if statistics_steps is not None:
        whole_number("--statistics_steps", statistics_steps)
        run = Replayable(directory)
    folder = commits.checkpoint_folder(directory)
    end = choice.choose(folder, choice.check(checkpoint, "--checkpoint"))
    found = [done for done in commits.committed(folder) if end and done.step <= end.step and not commits.verify(done)]
    found = sorted(found, key=lambda done: done.step)[-last:]
    if len(found) < last:
        up_to = f" up to step {end.step}" if end and checkpoint != choice.LATEST else ""
        raise NoCheckpointError(
            f"{directory} has {len(found)} intact checkpoints{up_to}, and --last is {last}; keep more of them in the "
            "training (--keep_last), or average fewer"
        )
    output = _free(output)
    values, note = _mean([done.path for done in found]), ""
    values |= _moving_averages(found[-1].path, values) if averages else {}
    if run:
        values |= _statistics(run, found[-1], values, statistics_steps)
        note = f", with statistics of batch normalization from {statistics_steps} batches"
    elif any(_MOVING in key for key in values) and averages:
        note = ", with the statistics of batch normalization of the last weights; --statistics_steps=N computes others"
    elif any(_MOVING in key for key in values):
        note = ", also of the statistics of batch normalization; --statistics_steps=N computes them from data"
    try:
        with new_folder(output) as place:
            path = _write(place, found[-1].step, values)
            folders.move(*os.path.split(place), *os.path.split(output))
    except OSError as error:
        reason = OSError(error.errno, error.strerror)  # without a temporary name, which nobody knows
        raise FileError(f"{output} cannot be made: {with_cure(reason, 'name another directory')}") from error
    path = os.path.join(output, os.path.relpath(path, place))
    what = "moving averages" if averages else "mean"
    print(f"wrote the {what} of {', '.join(os.path.basename(done.path) for done in found)} to {path}{note}")
    return EXIT_DONE


def _free(output: str) -> str:
    """Returns the path of a new or empty directory, without links.

    Raises:
      UsageError: if it is something else, or among the checkpoints of a run.
    """
    path = os.path.realpath(output)
    if os.path.lexists(path) and not os.path.isdir(path):
        raise RunDirectoryError(f"{output} is a file; name a new directory for the average")
    if os.path.isdir(path) and os.listdir(path):
        raise RunDirectoryError(f"{output} is not empty; name a new directory for the average")
    for above in itertools.accumulate(path.split(os.sep)[1:-1], os.path.join, initial=os.sep):
        if os.path.isdir(above) and commits.newest(above):
            raise RunDirectoryError(
                f"{output} is in {above}, which has the checkpoints of a run; name a directory outside of it"
            )
    return path


def _moving_averages(path: str, values: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the averages in a checkpoint by the keys of the weights that they are of."""
    reader = tf.train.load_checkpoint(path)
    graph, names = _tf.object_graph(reader), RunRecord.in_checkpoint(reader, path).names
    attributes = {child.local_name for child in graph.nodes[0].children} - {"save_counter"} if graph else set()
    roots = {name: tf.train.Checkpoint() for name in attributes}
    leaves = SavedVariables(reader, graph, names, roots).leaves.values() if names and roots else []
    found = {leaf.origin.key: values[leaf.key] for leaf in leaves if leaf.kind == "average" and leaf.origin}
    if not found:
        raise MismatchError(f"{path} has no averages of weights (average_decay, WeightAverages); leave out --averages")
    return found


def _statistics(run: Replayable, last: Commit, values: dict[str, tf.Tensor], steps: int) -> dict[str, tf.Tensor]:
    """Returns the statistics of batch normalization for some weights, by their keys in a checkpoint of them."""
    with TemporaryFolder() as folder:
        weights = _write(os.path.join(folder.path, "weights"), last.step, values)
        to = os.path.join(folder.path, "statistics.npz")
        order = ReplayOrder(run.directory, last.step + steps, exact=False, weights=weights, arrays=to)
        run.start_again(last, order, folder)
        with np.load(to) as found:
            return {key: tf.constant(found[key], values[key].dtype) for key in found.files}


def _write(directory: str, step: int, values: dict[str, tf.Tensor]) -> str:
    """Writes a checkpoint of values, by key, into a new run directory; returns its path."""
    path = commits.path_of(folders.make_folder(directory, "checkpoints"), step)
    commits.begin(path)
    tf.raw_ops.SaveV2(
        prefix=path, tensor_names=list(values), shape_and_slices=[""] * len(values), tensors=list(values.values())
    )
    commits.commit(path, step)
    return path


def _mean(paths: list[str]) -> dict[str, tf.Tensor]:
    """Returns the values of a checkpoint by key, averaged over all of them."""
    readers = [tf.train.load_checkpoint(path) for path in paths]
    shapes = readers[-1].get_variable_to_shape_map()
    dtypes = readers[-1].get_variable_to_dtype_map()
    for path, reader in zip(paths, readers):
        floating = {key: shape for key, shape in shapes.items() if dtypes[key].is_floating}
        others = reader.get_variable_to_shape_map()
        if any(others.get(key) != shape for key, shape in floating.items()):
            raise MismatchError(f"{path} and {paths[-1]} are of different models; average the checkpoints of one model")
    return {key: _value(readers, key, dtypes[key]) for key in sorted(shapes)}


def _value(readers: list[Any], key: str, dtype: tf.DType) -> tf.Tensor:
    if not dtype.is_floating:
        return tf.constant(readers[-1].get_tensor(key), dtype)
    total = np.sum([reader.get_tensor(key).astype(np.float64) for reader in readers], axis=0)
    return tf.cast(total / len(readers), dtype)
