"""The rows of a batch: the first dimension of its tensors, which are dense, ragged or sparse, or in extension types."""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from looplib.errors import DatasetError

Tensor = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
UNEVEN = (  # without quotes, which TensorFlow would write as it writes them in a string
    ", and looplib, which divides these, does not know which rows of the parts belong together, such as the nodes and "
    "edges of a graph; give each part as many rows, where a row may hold several examples; or make the batches of each "
    "replica in place of global ones, without micro_batches; for parts whose rows are examples by themselves, such as "
    "labelled and unlabelled ones, set uneven_parts of the trainer: each is then divided by its own rows"
)


@tf.autograph.experimental.do_not_convert
def parts(batch: Any) -> list:
    """Lists the tensors of a batch that have rows, or their specs of a structure of specs; scalars have none."""
    known = (*_TENSORS, *SPECS)
    opened = ([part] if isinstance(part, known) else tf.nest.flatten(part, True) for part in tf.nest.flatten(batch))
    return [part for own in opened for part in own if isinstance(part, known) and part.shape.rank != 0]


@tf.autograph.experimental.do_not_convert
def map_parts(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Applies a function to each tensor of a batch that has rows; the rest stays.

    Raises:
      UsageError: for an extension type with ragged or sparse fields.
    """

    def mapped(part: Any) -> Any:
        if isinstance(part, _TENSORS):
            return function(part) if part.shape.rank != 0 else part
        if not isinstance(part, tf.experimental.ExtensionType):
            return part
        if _has_composites(part):
            raise DatasetError(
                f"a batch has a {type(part).__name__} with ragged or sparse fields, whose rows looplib does not divide"
                "; give its tensors in a tuple or dict, and make it of them in the step"
            )
        return tf.nest.map_structure(mapped, part, expand_composites=True)

    return tf.nest.map_structure(mapped, batch)


def _has_composites(part: tf.experimental.ExtensionType) -> bool:
    fields = tf.nest.flatten(list(vars(part).values()))
    return any(
        isinstance(field, _TENSORS[1:]) or (isinstance(field, tf.experimental.ExtensionType) and _has_composites(field))
        for field in fields
    )


def of_whole(function: Callable[[Any], Any], spec: Any) -> Callable[..., Any]:
    """Returns what calls a function with whole elements of a spec in a `map`: tf.data unpacks tuples, only those."""

    @tf.autograph.experimental.do_not_convert
    def of_parts(*parts: Any) -> Any:
        return function(parts if type(spec) is tuple else parts[0])

    return of_parts


@tf.autograph.experimental.do_not_convert
def count(part: Tensor) -> tf.Tensor:
    """Returns the number of rows of a tensor of any kind, int64 scalar."""
    if isinstance(part, tf.RaggedTensor):
        return part.nrows(out_type=tf.int64)
    return part.dense_shape[0] if isinstance(part, tf.SparseTensor) else tf.shape(part, tf.int64)[0]


@tf.autograph.experimental.do_not_convert
def between(part: Tensor, start: tf.Tensor, stop: tf.Tensor) -> Tensor:
    """Returns the rows of a tensor of any kind from one number up to another, int64 scalars."""
    if not isinstance(part, tf.SparseTensor):
        return part[start:stop]
    shape = part.dense_shape
    begin = tf.concat([[start], tf.zeros_like(shape[1:])], axis=0)
    return tf.sparse.slice(part, begin, tf.concat([[stop - start], shape[1:]], axis=0))


def check_structure(who: str, structure: Any) -> None:
    """Raises `UsageError` for a structure of other classes than dicts and tuples, such as of attrs."""
    if isinstance(structure, (Mapping, list, tuple)):
        for part in structure.values() if isinstance(structure, Mapping) else structure:
            check_structure(who, part)
    elif tf.nest.is_nested(structure):
        raise DatasetError(
            f"{who} has elements of the class {type(structure).__name__}, which TensorFlow's iterators and strategies "
            "do not take; give dicts, tuples, named tuples or a tf.experimental.ExtensionType"
        )


def check_even(who: str, specs: list[tf.TypeSpec]) -> None:
    """Raises `UsageError` if parts, such as those that `parts` lists, are known to have different numbers of rows."""
    sizes = {spec.shape[0] for spec in specs if spec.shape.rank} - {None}
    if len(sizes) > 1:
        raise DatasetError(f"{who} has batches whose parts have {' and '.join(map(str, sorted(sizes)))} rows{UNEVEN}")


@tf.autograph.experimental.do_not_convert
def assert_even(who: str, sizes: list[tf.Tensor], least: int | None = None) -> list[tf.Operation]:
    """Returns ops that fail, with the text of a `UsageError`, where parts have different numbers of rows.

    Args:
      who: what the batch comes from.
      sizes: int64 scalars, the rows of the parts.
      least: rows that a part may have in place of as many as the first one has; None for no other number.
    """
    found = tf.stack(sizes)
    good = found == found[0]
    if least is not None:
        good, cure = good | (found >= least), f"; looplib divides each, and needs {least} rows or more of each"
    else:
        cure = UNEVEN
    text = tf.strings.format(f"DatasetError: {who} has a batch whose parts have {{}} rows{cure}", found, summarize=8)
    return [tf.debugging.Assert(tf.reduce_all(good), [text])] if len(sizes) > 1 else []
