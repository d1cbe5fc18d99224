"""`python -m looplib average DIR OUTPUT`: the mean of successive checkpoints of a run."""

import os
from typing import Any

import numpy as np
import tensorflow as tf

from looplib import folders
from looplib.checkpoint import choice, commits
from looplib.errors import EXIT_DONE, MismatchError, NoCheckpointError, RunDirectoryError
from looplib.messages import whole_number


def average(directory: str, output: str, last: int = 5, checkpoint: str = choice.LATEST) -> int:
    """Writes the mean of successive checkpoints of a run as a run directory of its own.

    Floating-point values are averaged in float64 (Izmailov et al., 2018, arXiv:1803.05407); everything else is the
    last checkpoint's. The result is for `--mode=eval --model_dir=OUTPUT` and `--warm_start=OUTPUT`.

    Args:
      directory: a run directory, or one that holds checkpoints; unchanged.
      output: the new directory.
      last: number of checkpoints.
      checkpoint: the last of them: "latest", "final", "best" or a step, see `choice.choose`.

    Returns:
      The exit code.

    Raises:
      UsageError: if there are fewer intact checkpoints, they are of different models, or `output` has files.
    """
    whole_number("--last", last)
    folder = commits.place_of(directory)
    end = choice.choose(folder, choice.check(checkpoint, "--checkpoint"))
    found = [done for done in commits.committed(folder) if end and done.step <= end.step and not commits.verify(done)]
    found = sorted(found, key=lambda done: done.step)[-last:]
    if len(found) < last:
        up_to = f" up to step {end.step}" if end and checkpoint != choice.LATEST else ""
        raise NoCheckpointError(
            f"{directory} has {len(found)} intact checkpoints{up_to}, and --last is {last}; keep more of them in the "
            "training (--keep_last), or average fewer"
        )
    if tf.io.gfile.exists(output) and tf.io.gfile.listdir(output):
        raise RunDirectoryError(f"{output} is not empty; name a new directory for the average")
    folder = folders.make_folder(output, "checkpoints")
    path = commits.path_of(folder, found[-1].step)
    commits.begin(path)
    values = _mean([done.path for done in found])
    tf.raw_ops.SaveV2(
        prefix=path, tensor_names=list(values), shape_and_slices=[""] * len(values), tensors=list(values.values())
    )
    commits.commit(path, found[-1].step)
    print(f"wrote the mean of {', '.join(os.path.basename(done.path) for done in found)} to {path}")
    return EXIT_DONE


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
