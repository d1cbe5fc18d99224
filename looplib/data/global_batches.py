"""Data sets of global batches, divided among the replicas."""

from typing import Any

import tensorflow as tf

from looplib.cluster.replicas import Share


def to_replicas(dataset: tf.data.Dataset, first: int, count: int, replicas: int, shares: bool) -> tf.data.Dataset:
    """Divides each global batch, as evenly as its size allows, in the order of its examples.

    Args:
      dataset: global batches, of any structure of dense, ragged and sparse tensors.
      first: the first replica of this pipeline.
      count: the number of its replicas.
      replicas: the number of all.
      shares: whether to make `Share`s, which have no empty batch; else the batches alone.

    Returns:
      The batches of each global batch for the replicas `first` to `first + count - 1`, one after another.
    """
    cardinality = dataset.cardinality()
    spec = dataset.element_spec

    def divide(*element: Any) -> tf.data.Dataset:
        batch = element if type(spec) is tuple else element[0]  # tf.data unpacks tuples, and only those
        size = next(_size(leaf) for leaf in tf.nest.flatten(batch) if leaf.shape.rank != 0)

        def part(replica: tf.Tensor) -> Any:
            start, stop = -(-replica * size // replicas), -(-(replica + 1) * size // replicas)
            if not shares:
                return tf.nest.map_structure(lambda leaf: _rows(leaf, start, stop, replicas), batch)
            examples = stop - start
            start, stop = tf.where(examples > 0, start, 0), tf.where(examples > 0, stop, 1)
            inputs = tf.nest.map_structure(lambda leaf: _rows(leaf, start, stop, replicas), batch)
            return Share(inputs, examples, size)

        return tf.data.Dataset.range(first, first + count).map(part)

    divided = dataset.flat_map(divide)
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        return divided
    endless = cardinality == tf.data.INFINITE_CARDINALITY
    return divided.apply(tf.data.experimental.assert_cardinality(cardinality if endless else cardinality * count))


def have_size(dataset: tf.data.Dataset, size: int) -> bool:
    """Returns whether the specs say that all batches have a size."""
    return all(
        leaf.shape.rank is not None and (leaf.shape.rank == 0 or leaf.shape[0] == size)
        for leaf in tf.nest.flatten(dataset.element_spec)
        if isinstance(leaf, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec))
    )


def _size(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    return leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf, tf.int64)[0]


def _rows(leaf: Any, start: tf.Tensor, stop: tf.Tensor, replicas: int) -> Any:
    if leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        begin = tf.concat([[start], tf.zeros_like(shape[1:])], axis=0)
        return tf.sparse.slice(leaf, begin, tf.concat([[stop - start], shape[1:]], axis=0))
    rows = leaf[start:stop]
    if isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] and leaf.shape[0] % replicas == 0:
        rows = tf.ensure_shape(rows, [leaf.shape[0] // replicas, *leaf.shape[1:]])
    return rows
