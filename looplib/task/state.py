"""What the state of a run is: the objects that a checkpoint holds."""

import io
import zlib

import numpy as np
import tensorflow as tf

from looplib import _keras
from looplib.cluster.collectives import Workers


class InputState(tf.train.experimental.PythonState):
    """The saved position in the training data, kept in the checkpoint as bytes.

    Attributes:
      position: what `TaskLoop.position` returned; b"" where the step alone tells the position.
    """

    def __init__(self):
        super().__init__()
        self.position = b""

    def serialize(self):
        """Returns the bytes to save."""
        return self.position

    def deserialize(self, string_value):
        """Takes the bytes that were saved."""
        self.position = string_value


class ReplicaState(tf.train.experimental.PythonState):
    """What replicas keep each for itself, such as the moving statistics of a batch normalization, kept as bytes.

    A checkpoint itself holds one value of each variable (the first replica's, or the mean), which is what a run on
    another number of replicas, or an evaluation, goes on with.

    Args:
      strategy: `tf.distribute.Strategy`.
      variables: list of distributed `tf.Variable` whose replicas may differ.
    """

    def __init__(self, strategy, variables):
        super().__init__()
        self._workers = Workers(strategy)
        self._parts = [strategy.experimental_local_results(variable) for variable in variables]
        self._saved = b""

    def serialize(self):
        """Returns the values of those that differ, as the bytes of an `.npz` file; none on one replica.

        Workers wait for each other.
        """
        arrays = {}
        local = [np.stack([part.numpy() for part in parts]) for parts in self._parts]
        differs = [any(value.tobytes() != values[0].tobytes() for value in values[1:]) for values in local]
        if local and self._workers.count > 1:
            hashes = [zlib.crc32(values[0].tobytes()) for values in local]
            differs = self._workers.gather(np.int64(differs)).any(axis=0) | np.ptp(
                self._workers.gather(np.int64(hashes)), axis=0
            ).astype(bool)
        for number, values in enumerate(local):
            if differs[number]:
                arrays[str(number)] = self._workers.gather(values).reshape(-1, *values.shape[1:])
        if not arrays:
            return b""
        with io.BytesIO() as file:
            np.savez(file, **arrays)
            return file.getvalue()

    def deserialize(self, string_value):
        """Takes the bytes that were saved, for `apply`."""
        self._saved = string_value

    def apply(self):
        """Gives each replica its own values again, after all else is restored."""
        if not self._saved:
            return
        with np.load(io.BytesIO(self._saved)) as arrays:
            for number, values in arrays.items():
                parts = self._parts[int(number)] if int(number) < len(self._parts) else ()
                if len(parts) * self._workers.count == len(values) and parts[0].shape == values.shape[1:]:
                    for part, value in zip(parts, values[self._workers.index * len(parts) :]):
                        part.assign(value)


def differing_variables(strategy, task, objects):
    """Lists the variables of a trainer's state whose replicas may differ: all but weights and optimizers'.

    Args:
      strategy: `tf.distribute.Strategy`.
      task: the `Trainer`.
      objects: its state, dict from name to trackable object.

    Returns:
      list of `tf.Variable`; [] on one replica.
    """
    if strategy.num_replicas_in_sync == 1:
        return []
    optimizers = {str(number): optimizer for number, optimizer in enumerate(_keras.optimizers(task))}
    same = {id(variable) for _, variable in variables_of(optimizers)}
    return [
        variable
        for _, variable in variables_of(objects)
        if not variable.trainable and id(variable) not in same
        and (len(strategy.experimental_local_results(variable)) > 1 or Workers(strategy).count > 1)
    ]  # fmt: skip


def state_of(task):
    """Finds what a trainer or evaluator holds that a checkpoint must.

    Args:
      task: a `Trainer` or `Evaluator`.

    Returns:
      dict from attribute name to a trackable object, or a list of variables where TensorFlow cannot track the object
      itself: a Keras 3 metric or seed generator (its variables), and `<name>_untracked` for the seeds in a Keras 3
      model and for what a list or dict holds of these.
    """
    state = {}
    for name, value in vars(task).items():
        if name == "global_step":
            continue  # the controller's own
        untracked = _keras.untracked_variables(value)
        if _trackable(value):
            state[name] = value
            if untracked:
                state[f"{name}_untracked"] = untracked
        elif untracked:
            state[name] = untracked
    return state


def _trackable(value):
    if isinstance(value, (list, tuple, dict)):
        return any(_trackable(item) for item in (value.values() if isinstance(value, dict) else value))
    if value is None or isinstance(value, (bool, int, float, str, bytes, tf.Tensor, tf.data.Dataset)):
        return False
    try:  # TensorFlow has no public name for the class, but says what it takes
        tf.train.Checkpoint(value=value)
    except ValueError:
        return False
    return True


def variables_of(objects):
    """Lists the variables that some objects hold.

    Args:
      objects: dict from name to trackable object.

    Returns:
      list of (name, `tf.Variable`).
    """
    root = tf.train.Checkpoint(**objects)  # a view holds its root by a weak reference only
    found = list(variables_below(root))
    names = {id(variable): name for name, variable in reversed(found)}  # a Keras variable and the tf.Variable in it
    variables = {id(variable): variable for _, variable in found}
    return [(names[key], variables[key]) for key in variables]


def variables_below(root):
    """Yields (name, `tf.Variable`) of all that a trackable object holds, the one in a Keras 3 variable twice."""
    for value in tf.train.TrackableView(root).descendants():
        if _keras.is_variable(value):
            yield value.path, value.value
        elif isinstance(value, tf.Variable):
            yield value.name, value
        elif hasattr(value, "get_slot_names") and callable(getattr(value, "variables", None)):
            # The slots of an optimizer of tf_keras.optimizers.legacy are no children.
            for variable in value.variables():
                yield variable.name, variable
