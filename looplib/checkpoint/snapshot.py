"""A snapshot of all state in memory, to be written while the training continues.

TensorFlow's own asynchronous checkpoints fail on Keras 3 variables (TensorFlow 2.20, Keras 3.15: the second save makes
variables inside a `tf.function`). A snapshot reads each value as TensorFlow would save it, under the key that
TensorFlow gave it, and is written as the same files.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.task.state import SlotOptimizer


def host_device() -> str:
    """Returns the name of this process's CPU, as opposed to that of another process that it is connected to."""
    with tf.device("/cpu:0"):
        return tf.constant(0).device


class Snapshots:
    """Takes snapshots of the objects of one `tf.train.Checkpoint`, and writes them as checkpoints.

    Args:
      checkpoint: the `tf.train.Checkpoint`.
      path: a checkpoint that it has written, from which the keys are learned.

    Raises:
      NotImplementedError: if it holds something that is neither a variable nor a `PythonState`, such as a table; only
        TensorFlow can save it, while training waits.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, path: str) -> None:
        reader = tf.train.load_checkpoint(path)
        graph = _tf.object_graph(reader)
        if graph is None:
            raise NotImplementedError(f"with TensorFlow {tf.__version__} any checkpoint")
        self._graph = reader.get_tensor(_tf.OBJECT_GRAPH_KEY)
        self._readers: dict[str, Callable[[], tf.Tensor]] = {}
        objects = objects_of(graph, checkpoint)
        for number, node in enumerate(graph.nodes):
            for attribute in node.attributes:
                self._readers[attribute.checkpoint_key] = _reader(objects.get(number), attribute)

    def take(self) -> dict[str, tf.Tensor]:
        """Returns a dict from checkpoint key to a tensor in host memory.

        It costs no copy on a CPU: TensorFlow copies a variable's buffer when the variable is next updated while
        another reference holds its value.
        """
        with tf.device(host_device()):
            return {
                _tf.OBJECT_GRAPH_KEY: tf.constant(self._graph),
                **{key: read() for key, read in self._readers.items()},
            }

    @staticmethod
    def write(path: str, snapshot: dict[str, tf.Tensor]) -> None:
        """Writes a snapshot as the files of a checkpoint.

        Args:
          path: the checkpoint's path.
          snapshot: the dict that `take` returned.

        Raises:
          tf.errors.OpError: if it cannot be written.
        """
        with tf.device(host_device()):
            tf.raw_ops.SaveV2(
                prefix=path,
                tensor_names=list(snapshot),
                shape_and_slices=[""] * len(snapshot),
                tensors=list(snapshot.values()),
            )


def objects_of(graph: Any, checkpoint: Any) -> dict[int, Any]:
    """Returns the live objects by the numbers of their nodes in a saved object graph."""
    view = tf.train.TrackableView(checkpoint)
    objects, todo = {0: checkpoint}, [0]
    while todo:
        number = todo.pop()
        live = view.children(objects[number])
        for child in graph.nodes[number].children:
            if child.node_id not in objects and child.local_name in live:
                objects[child.node_id] = live[child.local_name]
                todo.append(child.node_id)
    for number, node in enumerate(graph.nodes):  # the slots of an old optimizer are not its children
        for slot in node.slot_variables:
            owner, original = objects.get(number), objects.get(slot.original_variable_node_id)
            if isinstance(owner, SlotOptimizer) and original is not None and slot.slot_name in owner.get_slot_names():
                objects[slot.slot_variable_node_id] = owner.get_slot(original, slot.slot_name)
    return objects


def _reader(value: Any, attribute: Any) -> Callable[[], tf.Tensor]:
    """Returns the function that reads one saved value of an object."""
    if isinstance(value, tf.train.experimental.PythonState) and attribute.name == "py_state":
        return lambda: tf.constant(value.serialize())
    value = _keras.tf_variable(value)
    if isinstance(value, tf.Variable) and attribute.name == "VARIABLE_VALUE":
        return lambda: tf.identity(value.read_value())
    raise NotImplementedError(attribute.checkpoint_key)
