"""ShardedEmbedding: a table of embeddings in parts, which several processes may hold."""

import contextlib
import functools
import importlib
import random
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.cluster.holders import Holders
from looplib.compat import keras as _keras
from looplib.compat.row_updates import CHECK, add_table, keep_slots_with_tables
from looplib.errors import SettingError, StepError

_COMBINERS = (None, "sum", "mean", "sqrtn")
_INITIALIZERS = ("RandomUniform", "RandomNormal", "TruncatedNormal", "Constant", "Zeros", "Ones")
_CHUNK = 2**20  # elements that are drawn together, so that the value of a row does not depend on the number of parts
_ODD = 0x9E3779B1  # an odd factor gives each chunk a seed of its own
Ids = tf.Tensor | tf.RaggedTensor | tf.SparseTensor


class ShardedEmbedding:
    """A layer that looks up rows of a table, and whose training reads and writes only these rows.

    The table is divided by rows into `shards` parts, each a variable. One device holds all of them. Replicas, workers
    and parameter servers hold some parts each, and a step moves only the rows of its batch. A checkpoint holds each
    part, so a run resumes on any number of servers or replicas.

    Gradients are sparse. The optimizer updates the rows that have been looked up, and their slots, by Keras's formula:
    `SGD`, `Adagrad`, `Adam`, `AdamW` without decay of this table, and `Ftrl`. Other rows keep their value and slots,
    so that momentum and Adam's moments are "lazy". Each other optimizer, and each setting that needs a whole table
    (clipping, micro-batches, loss scaling, the optimizer's moving averages), is refused. So is an optimizer that the
    trainer does not hold.

    The initial value of a row depends on the seed of the initializer and on the row, not on `shards`.

    Args:
      rows: int, number of rows; ids are from 0 to `rows` - 1.
      dim: int, size of a row.
      initializer: a Keras initializer that draws each element for itself, or its name: uniform, normal, zeros...
      combiner: how the rows of an example are combined: "sum", "mean" (the sum over the sum of the weights), "sqrtn"
        (the sum over the root of the sum of the squared weights); None for a row for each id.
      shards: int, number of parts, and so the greatest number of servers or replicas that can hold the table. It is
        part of the checkpoint, so a resumed run needs the number that it began with.
      family: the Keras of the model that holds the layer: "keras" (Keras 3) or "tf_keras".
      **settings: other arguments of a Keras layer: name, dtype, trainable.

    Raises:
      UsageError: for a bad argument.

    Example:
        ```python
        items = looplib.ShardedEmbedding(1_000_000, 16, combiner="mean", shards=4)
        vectors = items(tf.ragged.constant([[3, 14], [15]]))  # [2, 16]
        ```
    """

    _spread = True  # whether replicas and workers hold parts of the table, and not the whole

    def __new__(cls, *args: Any, family: str = "keras", **settings: Any) -> "ShardedEmbedding":
        """Makes the layer as one of its Keras family."""
        if _keras.family_of_class(cls) is None:
            made = _class_of(cls, family)
            return made.__new__(made, *args, family=family, **settings)
        return super().__new__(cls, *args, family=family, **settings)

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        initializer: Any = "uniform",
        combiner: str | None = None,
        shards: int = 1,
        family: str = "keras",
        **settings: Any,
    ) -> None:
        super().__init__(**{**settings, "autocast": False})  # which would round ids and weights in mixed precision
        self.rows, self.dim, self.shards = (
            whole_number(name, value) for name, value in (("rows", rows), ("dim", dim), ("shards", shards))
        )
        if combiner not in _COMBINERS:
            raise SettingError(f'combiner is {combiner!r}; expected "sum", "mean", "sqrtn" or None')
        if self.shards > self.rows:
            raise SettingError(f"shards is {shards}, and the table has {rows} rows; expected at most one part a row")
        if isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy):
            raise SettingError(
                "a ShardedEmbedding is made under a TPUStrategy, and TPUs compute no update of single rows; use "
                "keras.layers.Embedding"
            )
        if not tf.as_dtype(self.variable_dtype).is_floating:
            raise SettingError(
                f"a ShardedEmbedding has the dtype {self.variable_dtype}; expected a floating-point type"
            )
        self.combiner, self.family = combiner, family
        self.initializer = _checked(initializer, family)
        strategy = tf.distribute.get_strategy()
        self._holders = Holders(strategy, self._spread)
        if self._holders.in_step:
            keep_slots_with_tables(family)
        for number, name in enumerate(self._names):
            start = number * self._part
            rows = min(self._part, self.rows - start)
            shape = (rows if self._holders.is_here(number) else 0, self.dim)
            scope = f"{self.name}/" if family == "tf_keras" else ""  # which has no scope outside of `build`
            # Attributes, because TensorFlow's checkpoints do not see the variables in a list of Keras 3. In mixed
            # precision, autocast would make each lookup cast the whole table.
            make = functools.partial(
                self.add_weight, name=scope + name, shape=shape, initializer="zeros", autocast=False
            )
            part = self._holders.make(number, make, (rows, self.dim))
            with tf.init_scope():
                for one in strategy.experimental_local_results(_keras.tf_variable(part)):
                    _draw_rows(self.initializer, start, one)
            setattr(self, name, part)
            add_table(part, self._holders.exchanges)
        self.built = True

    @property
    def tables(self) -> list[Any]:
        """The parts, variables `[about rows / shards, dim]`, in the order of their rows."""
        return [getattr(self, name) for name in self._names]

    @property
    def _part(self) -> int:
        return -(-self.rows // self.shards)

    @property
    def _names(self) -> list[str]:
        return [f"rows_{number}" for number in range(-(-self.rows // self._part))]

    if TYPE_CHECKING:

        def __call__(self, ids: Ids, weights: Ids | None = None) -> Any:
            """Calls the layer, by Keras's method of its base class."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, for Keras to save it."""
        kept = {name: getattr(self, name) for name in ("rows", "dim", "combiner", "shards", "family")}
        initializer = sys.modules[self.family].initializers.serialize(self.initializer)
        return {**super().get_config(), **kept, "initializer": initializer}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ShardedEmbedding":
        """Makes the layer from what `get_config` returned."""
        return cls(**config)

    def call(self, ids: Ids, weights: Ids | None = None) -> tf.Tensor | tf.RaggedTensor:
        """Looks up rows.

        Args:
          ids: integers, dense or ragged of any rank, or sparse `[batch, n]`.
          weights: floats of the structure of `ids`, for a combiner; None for ones.

        Returns:
          A row for each id, `[..., dim]`, ragged for ragged ids; or with a combiner the combined rows of the last
          dimension of `ids`, zeros for an example without ids. In the compute dtype of the layer.

        Raises:
          UsageError: for weights without a combiner, or a structure that has no rows of its own.
          tf.errors.InvalidArgumentError: in the step, for an id that the table does not have.
        """
        if weights is not None and self.combiner is None:
            raise StepError("a ShardedEmbedding got weights and has no combiner; give it combiner=, or no weights")
        uneven = (tf.RaggedTensor, tf.SparseTensor)
        if weights is not None and {type(ids), type(weights)} & set(uneven) and type(ids) is not type(weights):
            raise StepError(
                f"a ShardedEmbedding got ids as a {type(ids).__name__} and weights as a {type(weights).__name__}; "
                "expected a weight for each id, in the same structure"
            )
        if isinstance(ids, uneven):
            return self._of_uneven(ids, weights)
        ids = tf.convert_to_tensor(ids)
        vectors = self._looked_up(ids)
        if self.combiner is None:
            return tf.cast(vectors, self.compute_dtype)
        weights = None if weights is None else tf.broadcast_to(weights, tf.shape(ids))
        return self._combined(vectors, weights, lambda values: tf.reduce_sum(values, axis=-2))

    def _of_uneven(self, ids: Ids, weights: Ids | None) -> tf.Tensor | tf.RaggedTensor:
        ragged = isinstance(ids, tf.RaggedTensor)
        vectors = self._looked_up(ids.flat_values if ragged else ids.values)
        if ragged and self.combiner is None:
            return ids.with_flat_values(tf.cast(vectors, self.compute_dtype))
        if self.combiner is None or ids.shape.rank != 2:
            raise StepError(
                f"a ShardedEmbedding with the combiner {self.combiner!r} got {'ragged' if ragged else 'sparse'} ids of "
                f"rank {ids.shape.rank}; expected ids [batch, n] and a combiner, or ragged or dense ids and none"
            )
        if weights is not None:
            theirs, ours = (one.row_splits if ragged else one.indices for one in (weights, ids))
            wrong = "the weights of a ShardedEmbedding have another structure than its ids"
            with _asserted(tf.reduce_all(tf.equal(tf.shape(theirs), tf.shape(ours))), [wrong]):
                theirs = tf.identity(theirs)
            with _asserted(tf.reduce_all(tf.equal(theirs, ours)), [wrong]):
                weights = tf.identity(weights.flat_values if ragged else weights.values)
        rows, count = (ids.value_rowids(), ids.nrows()) if ragged else (ids.indices[:, 0], ids.dense_shape[0])
        return self._combined(
            vectors, weights, lambda values: tf.math.unsorted_segment_sum(values, segment_ids=rows, num_segments=count)
        )

    def _combined(
        self, vectors: tf.Tensor, weights: tf.Tensor | None, total: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        factors = tf.ones(tf.shape(vectors)[:-1], vectors.dtype) if weights is None else tf.cast(weights, vectors.dtype)
        factors = tf.expand_dims(factors, -1)  # which TFLite knows
        combined = total(vectors * factors)
        if self.combiner == "mean":
            combined = tf.math.divide_no_nan(combined, total(factors))
        elif self.combiner == "sqrtn":
            combined = tf.math.divide_no_nan(combined, tf.sqrt(total(factors**2)))
        return tf.cast(combined, self.compute_dtype)

    def _looked_up(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the rows `[..., dim]` of ids `[...]`, in the type of the table."""
        if ids.dtype == tf.string:
            raise StepError("a ShardedEmbedding got texts as ids; map them to rows with keras.layers.StringLookup")
        static, shape = ids.shape, tf.shape(ids)
        ids = tf.reshape(tf.cast(ids, tf.int64), [-1])  # also floats, the default of Keras's inputs
        wrong = tf.boolean_mask(ids, (ids < 0) | (ids >= self.rows))
        found = f"ids that the table {self.name} of {self.rows} rows does not have; expected 0 to {self.rows - 1}:"
        with _asserted(tf.equal(tf.size(wrong), 0), [found, wrong]):
            ids = tf.identity(ids)
        in_step = not tf.distribute.in_cross_replica_context()
        if self._holders.exchanges and in_step:
            vectors = self._holders.exchanged(ids, self._is_here, self._rows_here)
        elif self._holders.exchanges and tf.executing_eagerly():
            raise StepError(
                f"the table {self.name} is called outside of a step, where no worker has all its rows; call it in "
                "a step, or in a process that trains alone"
            )
        else:
            vectors = self._rows_here(ids)
        return tf.ensure_shape(tf.reshape(vectors, tf.concat([shape, [self.dim]], axis=0)), [*static, self.dim])

    def _is_here(self, ids: tf.Tensor) -> tf.Tensor:
        here = tf.constant([self._holders.is_here(number) for number in range(len(self._names))])
        return tf.gather(here, ids // self._part)

    def _rows_here(self, ids: tf.Tensor) -> tf.Tensor:
        """Looks up the rows `[n, dim]` of ids `[n]` that this process can read."""
        parts = [_keras.tf_variable(table) for table in self.tables]
        if len(parts) == 1:
            return tf.gather(parts[0], ids)
        distinct, places = tf.unique(ids)  # each row moves once
        owner = tf.cast(distinct // self._part, tf.int32)
        wanted = tf.dynamic_partition(distinct % self._part, owner, len(parts))
        order = tf.dynamic_partition(tf.range(tf.size(distinct)), owner, len(parts))
        vectors = tf.dynamic_stitch(order, [tf.gather(part, each) for part, each in zip(parts, wanted)])
        return _taken(vectors, places)


def _asserted(condition: tf.Tensor, data: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Lets what is computed in the `with` block wait for an assertion.

    By the op, because the function adds a condition, of which TensorFlow's optimizer prints a line in each trace.
    """
    op = tf.raw_ops.Assert(condition=condition, data=data, name=CHECK)
    return contextlib.nullcontext() if op is None else tf.control_dependencies([op])


@functools.cache
def _class_of(cls: type, family: str) -> type:
    """Makes the class of a family's layers, known to Keras by name, so that saved models are read again."""
    if family not in ("keras", "tf_keras"):
        raise SettingError(f'family is {family!r}; expected "keras" (Keras 3) or "tf_keras"')
    keras = importlib.import_module(family)
    made = type(cls.__name__, (cls, keras.layers.Layer), {"__doc__": cls.__doc__, "__module__": cls.__module__})
    return keras.saving.register_keras_serializable("looplib")(made)


def _checked(initializer: Any, family: str) -> Any:
    initializers = sys.modules[family].initializers
    found = initializers.get(initializer)
    if not any(isinstance(found, getattr(initializers, name)) for name in _INITIALIZERS):
        raise SettingError(
            f"the initializer of a ShardedEmbedding is {initializer!r}, whose values may depend on the whole table; "
            f"expected one of keras.initializers.{', '.join(_INITIALIZERS)}"
        )
    config = found.get_config()
    if np.ndim(config.get("value", 0)):
        raise SettingError("the initializer of a ShardedEmbedding is a Constant of an array; expected one of a number")
    if "seed" in config and not isinstance(config["seed"], int):
        config["seed"] = random.randint(1, 10**9)  # noqa: S311  (as Keras draws it, so that its set_random_seed counts)
    return type(found).from_config(config)


def _draw_rows(initializer: Any, start: int, table: tf.Variable) -> None:
    """Draws the rows from `start` on of a whole table into a part: a chunk of rows depends on the seed and its number.

    By chunks, so that the part is in memory once.
    """
    config, (size, dim) = initializer.get_config(), table.shape
    rows = max(1, _CHUNK // dim)
    for chunk in range(start // rows, -(-(start + size) // rows) if size else 0):
        if "seed" in config:
            config["seed"] = (initializer.seed + chunk * _ODD) % 2**31
        first, last = max(chunk * rows, start), min((chunk + 1) * rows, start + size)
        with tf.device(table.device):
            values = type(initializer).from_config(config)((rows, dim), dtype=table.dtype.name)
            values = tf.convert_to_tensor(values)[first - chunk * rows : last - chunk * rows]
            ids = tf.range(first - start, last - start)
            tf.raw_ops.ResourceScatterUpdate(resource=table.handle, indices=ids, updates=values)


@tf.custom_gradient
def _taken(rows: tf.Tensor, places: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Gathers rows; the gradient of a row that is taken several times is one sum."""

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tf.math.unsorted_segment_sum(upstream, places, tf.shape(rows)[0]), None

    return tf.gather(rows, places), gradient
