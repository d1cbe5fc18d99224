"""DynamicEmbedding: a table of embeddings for ids that are not known before, in a fixed number of rows."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.cluster import updates
from looplib.cluster.holders import joined
from looplib.compat.keras import tf_variable
from looplib.compat.optimizers import handle_of, num_replicas
from looplib.compat.patches import may_join
from looplib.compat.row_updates import RowOwners, add_table
from looplib.data.order import mix
from looplib.errors import SettingError, StepError
from looplib.task.sharded_embedding import Ids, ShardedEmbedding, _asserted, _checked

_NEVER = -1  # the step of the last sight of a row that nobody has had
_ODD = 0x9E3779B97F4A7C15


class DynamicEmbedding(ShardedEmbedding):
    """A layer that looks up vectors of any ids, and gives rows of a table to new ones, and to others later.

    A call with `training=True` gives an id its row at its `admit_after`-th sight. Each occurrence in the global batch
    is a sight. The id then has its initial value, which depends on the seed of the initializer and on the id alone, and
    is trained from this step on. A row may go to another id, whose value and slots of the optimizer begin anew, once
    its id has not been seen for `expire_after` steps; until this happens the id keeps it. The row that was seen longest
    ago goes first.

    Other calls, of evaluations, predictions and exports, look up alone. The vector of an id without a row is zeros, and
    counts in a combiner as any other one. No gradient goes to it.

    The map from ids to rows is in variables of the layer, so a checkpoint has it, and a resumed run continues bit by
    bit. On replicas and workers, each has the whole table and map, and all see the ids of the global batch. Rows are
    updated as those of `ShardedEmbedding`, and the trainer must hold the layer. Parameter servers, TPUs, XLA,
    micro-batches and averages of weights are refused.

    Args:
      dim: int, size of a vector.
      capacity: int, number of rows.
      admit_after: int, the sight of an id at which it gets a row. With more than 1, as many ids as there are rows can
        wait for theirs; beyond that the one that was seen longest ago is forgotten.
      expire_after: int, a row whose id has not been seen for more than this many steps is free; None for never. Steps
        are updates of the table.
      full: what to do when a new id finds no free row: "error" ends the step with a message, "evict" takes the row that
        was seen longest ago, whenever that was.
      combiner: see `ShardedEmbedding`.
      initializer: see `ShardedEmbedding`.
      family: see `ShardedEmbedding`.
      **settings: other arguments of a Keras layer: name, dtype, trainable.

    Raises:
      UsageError: for a bad argument, or on a strategy that cannot have it.

    Example:
        ```python
        words = looplib.DynamicEmbedding(16, 100_000, admit_after=2, full="evict", combiner="mean")
        vectors = words(tf.constant([["a", "rose", "is", "a", "rose"]]), training=True)  # [1, 16]
        ```
    """

    _spread = False  # as each replica has the map

    def __init__(
        self,
        dim: int,
        capacity: int,
        *,
        admit_after: int = 1,
        expire_after: int | None = None,
        full: str = "error",
        combiner: str | None = None,
        initializer: Any = "uniform",
        family: str = "keras",
        **settings: Any,
    ) -> None:
        if isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy):
            raise SettingError(
                "a DynamicEmbedding is made under a ParameterServerStrategy, whose workers do not wait for each other, "
                "so that two could give a row to two ids; use a ShardedEmbedding, or workers that train in step"
            )
        self.capacity = whole_number("capacity", capacity)
        super().__init__(self.capacity, dim, initializer="zeros", combiner=combiner, family=family, **settings)
        self.admit_after = whole_number("admit_after", admit_after)
        self.expire_after = None if expire_after is None else whole_number("expire_after", expire_after)
        if full not in ("error", "evict"):
            raise SettingError(f'full is {full!r}; expected "error" or "evict"')
        self.full, self.initializer = full, _checked(initializer, family)
        self.steps, self.new_owners = self._whole("steps", 1), self._whole("new_owners", capacity)
        self._map, self._candidates = self._places(""), None
        if self.admit_after > 1:
            self._candidates, self.sights = self._places("waiting_"), self._whole("sights", capacity)
        self._owners = RowOwners(self.new_owners, self.steps)
        add_table(self.tables[0], False, self._owners, self.non_trainable_variables)

    def _places(self, prefix: str) -> "_PlaceMap":
        """Makes a map to as many places as there are rows, with its variables as attributes, which a checkpoint has."""
        size, slots = self.capacity, 1 << (3 * self.capacity - 1).bit_length()
        made = {
            "keys": (size, 0),
            "seen": (size, _NEVER),
            "index": (slots, 0),
            "queue": (size, None),
            "position": (2, 0),
        }
        variables = {name: self._whole(prefix + name, *each) for name, each in made.items()}
        for name, variable in variables.items():
            setattr(self, prefix + name, variable)
        return _PlaceMap(**variables)

    def _whole(self, name: str, size: int, value: int | None = 0) -> Any:
        """Makes a variable of whole numbers: of one value, or with None of 0 to `size` - 1."""
        scope = f"{self.name}/" if self.family == "tf_keras" else ""

        def initial(shape: Any, dtype: Any = None, **_: Any) -> tf.Tensor:
            return tf.range(size, dtype=tf.int64) if value is None else tf.fill([size], tf.constant(value, tf.int64))

        return self.add_weight(
            name=scope + name, shape=(size,), dtype="int64", initializer=initial, trainable=False, autocast=False
        )

    if TYPE_CHECKING:

        def __call__(self, ids: Ids, weights: Ids | None = None, training: bool | None = None) -> Any:
            """Calls the layer, by Keras's method of its base class."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, for Keras to save it."""
        config = {key: value for key, value in super().get_config().items() if key not in ("rows", "shards")}
        kept = {name: getattr(self, name) for name in ("capacity", "admit_after", "expire_after", "full")}
        return {**config, **kept}

    def call(self, ids: Ids, weights: Ids | None = None, training: bool | None = None) -> tf.Tensor | tf.RaggedTensor:
        """Looks up vectors.

        Args:
          ids: whole numbers or texts, of the structures that `ShardedEmbedding` takes.
          weights: see `ShardedEmbedding`.
          training: whether new ids may get rows. Keras hands on what the model is called with.

        Returns:
          See `ShardedEmbedding`.

        Raises:
          UsageError: for ids of another type, in a micro-batch, and as `ShardedEmbedding` does.
          tf.errors.InvalidArgumentError: in the step, if there is no row for a new id.
        """
        grows = bool(training) and self.trainable and not tf.distribute.in_cross_replica_context()
        if isinstance(ids, tf.RaggedTensor):
            rows: Ids = ids.with_flat_values(self._rows_of(ids.flat_values, grows))
        elif isinstance(ids, tf.SparseTensor):
            rows = tf.SparseTensor(ids.indices, self._rows_of(ids.values, grows), ids.dense_shape)
        else:
            rows = self._rows_of(tf.convert_to_tensor(ids), grows)
        return super().call(rows, weights)

    def is_unknown(self, ids: Ids) -> tf.Tensor:
        """Returns whether each of some ids has no row of its own, boolean `[...]`; for metrics.

        Args:
          ids: as for a call; those of ragged or sparse ids are in one dimension.
        """
        flat = ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids
        flat = ids.values if isinstance(ids, tf.SparseTensor) else tf.convert_to_tensor(flat)
        return self._rows_of(flat, grows=False) < 0

    def _looked_up(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the vectors `[..., dim]` of rows `[...]`; zeros for the row -1."""
        static, shape, rows = ids.shape, tf.shape(ids), tf.reshape(ids, [-1])
        known = tf.where(rows >= 0)
        vectors = tf.gather(tf_variable(self.tables[0]), tf.gather_nd(rows, known))
        vectors = tf.scatter_nd(known, vectors, tf.stack([tf.size(rows, tf.int64), self.dim]))
        return tf.ensure_shape(tf.reshape(vectors, tf.concat([shape, [self.dim]], axis=0)), [*static, self.dim])

    def _rows_of(self, ids: tf.Tensor, grows: bool) -> tf.Tensor:
        """Returns the rows of ids, -1 for those without one; first gives rows to new ones, if the map `grows`."""
        if ids.dtype != tf.string and not ids.dtype.is_integer:
            raise StepError(
                f"a DynamicEmbedding got ids of {ids.dtype.name}, which would round them; expected whole numbers or "
                'texts (an Input layer needs dtype="int64" or "string")'
            )
        flat = tf.reshape(ids, [-1])
        if ids.dtype == tf.string:
            flat = tf.bitcast(tf.fingerprint(flat), tf.int64)
        keys, places, counts = tf.unique_with_counts(tf.cast(flat, tf.int64), tf.int64)
        rows = self._grown(keys, counts) if grows else self._map.find(keys)
        return tf.reshape(tf.gather(rows, places), tf.shape(ids))

    def _grown(self, keys: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Sees distinct ids of this replica and of all others; returns the rows of this replica's."""
        if updates.micro_batch() is not None:
            raise StepError(
                "a DynamicEmbedding is called in a micro-batch, and the ids of a step are seen together; leave out "
                "micro_batches"
            )
        self._owners.grows = True
        for variable in self.weights:
            handle_of(variable)  # so that the trace counts it as one of the step's
        every, counts = _of_all_replicas(keys, counts)
        rows, now = self._map.find(every), _value(self.steps)[0]
        _write(self._map.seen, tf.boolean_mask(rows, rows >= 0), now)
        new, times = tf.boolean_mask(every, rows < 0), tf.boolean_mask(counts, rows < 0)

        def admitted() -> tf.Tensor:
            order = tf.argsort(new)  # so that rows do not depend on how a batch is divided
            self._admit(tf.gather(new, order), tf.gather(times, order), now)
            return self._map.find(keys)

        known = (lambda: rows) if keys is every else (lambda: self._map.find(keys))
        return tf.cond(tf.size(new) > 0, admitted, known)

    def _admit(self, ids: tf.Tensor, counts: tf.Tensor, now: tf.Tensor) -> None:
        """Counts sights of sorted ids without rows, and gives rows to those that have been seen often enough."""
        if self._candidates is not None:
            ids = self._after_waiting(self._candidates, ids, counts, now)
        rows = self._map.oldest(tf.size(ids), now)
        before = tf.gather(tf_variable(self._map.seen), rows)
        limit = now if self.full == "evict" else now - (self.expire_after or now)
        enough = tf.equal(tf.size(rows), tf.size(ids)) & tf.reduce_all(before < tf.maximum(limit, 0))
        with _asserted(enough, [self._too_many, tf.size(ids)]):
            rows = tf.identity(rows)
        self._map.give(rows, ids, now)
        _write(self.tables[0], rows, _initial(self.initializer, ids, self.dim, tf_variable(self.tables[0]).dtype))
        _write(self.new_owners, rows, 1)

    def _after_waiting(self, waiting: "_PlaceMap", ids: tf.Tensor, counts: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """Counts sights of ids; returns those that need wait no longer."""
        places = waiting.find(ids)
        known, before = places >= 0, tf.gather(tf_variable(self.sights), tf.maximum(places, 0))
        counts += tf.where(known, before, _long(0))
        ready = counts >= self.admit_after
        again = tf.boolean_mask(places, known)
        _write(self.sights, again, tf.boolean_mask(tf.where(ready, _long(0), counts), known))
        _write(waiting.seen, again, now)
        first = ~known & ~ready
        given = waiting.oldest(tf.math.count_nonzero(first, dtype=tf.int32), now)
        waiting.give(given, tf.boolean_mask(ids, first)[: tf.size(given)], now)
        _write(self.sights, given, tf.boolean_mask(counts, first)[: tf.size(given)])
        return tf.boolean_mask(ids, ready)

    @property
    def _too_many(self) -> str:
        who = f"the DynamicEmbedding {self.name} of {self.capacity} rows"
        if self.full == "evict":
            return (
                f"{who} got more ids in one step than it has rows, or is trained by an optimizer that its trainer does "
                "not hold; give it more capacity; new ids:"
            )
        unless = f", and none has been unseen for more than {self.expire_after} steps" if self.expire_after else ""
        return (
            f"{who} is full{unless}; give it more capacity, a greater admit_after, a smaller expire_after, or "
            'full="evict"; new ids:'
        )


class _PlaceMap:
    """A map from ids to places, in variables, of which the place that was seen longest ago is given first.

    `index` is a hash table with open addresses, of places + 1, and 0 where it is free. An entry of a place that has
    been given to another id since is passed, because `keys` has the id of each place. `queue` has all places in the
    order of their last sights at the step `made`; of those from `head` on, the ones that have not been seen since are
    still the oldest of all, in this order. When they are too few, both are made anew, which costs a sort of all places,
    once in about as many gifts as there are places.

    Args:
      keys: int64 variable `[places]`, the id of each.
      seen: int64 variable `[places]`, the step of its last sight.
      index: int64 variable, a power of two at least three times as long, so that a third of it is always free.
      queue: int64 variable `[places]`.
      position: int64 variable, (head, made).
    """

    def __init__(self, keys: Any, seen: Any, index: Any, queue: Any, position: Any) -> None:
        self._keys, self.seen, self._index, self._queue, self._position = keys, seen, index, queue, position

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the places of distinct ids, -1 for those without one."""
        index, keys = tf_variable(self._index), tf_variable(self._keys)

        def probe(step: tf.Tensor, at: tf.Tensor, who: tf.Tensor, found: tf.Tensor) -> tuple[tf.Tensor, ...]:
            entries = tf.gather(index, at)
            hit = (entries > 0) & tf.equal(tf.gather(keys, tf.maximum(entries - 1, 0)), tf.gather(ids, who))
            place = tf.boolean_mask(entries, hit) - 1
            found = tf.tensor_scatter_nd_update(found, tf.boolean_mask(who, hit)[:, tf.newaxis], place)
            rest = ~hit & (entries > 0)
            return step + 1, self._next(tf.boolean_mask(at, rest), step), tf.boolean_mask(who, rest), found

        start = (tf.constant(1, tf.int64), self._first(ids), tf.range(tf.size(ids)), tf.fill([tf.size(ids)], _long(-1)))
        return _while_any(probe, start)[-1]

    def give(self, places: tf.Tensor, ids: tf.Tensor, now: tf.Tensor) -> None:
        """Gives places to ids, both distinct, that have none."""
        _write(self._keys, places, ids)
        _write(self.seen, places, now)
        self._enter(places, ids)

    def oldest(self, count: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """Takes the places that were seen longest ago, in this order; fewer if the others were seen in this step."""
        count = tf.cast(count, tf.int64)
        taken, head = self._unseen(count)

        def renewed() -> tuple[tf.Tensor, tf.Tensor]:
            self._renew(now)
            return self._unseen(count)

        taken, head = tf.cond(tf.size(taken, tf.int64) < count, renewed, lambda: (taken, head))
        _assign(self._position, tf.stack([head, _value(self._position)[1]]))
        return taken

    def _unseen(self, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the next places of the queue that were not seen since it was made, and the new `head`."""
        head, made = tf.unstack(_value(self._position))
        size = self._queue.shape[0]

        def window(width: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            places = tf.gather(tf_variable(self._queue), tf.range(head, tf.minimum(head + width, size)))
            return places, tf.gather(tf_variable(self.seen), places) < made

        def lacks(width: tf.Tensor) -> tf.Tensor:
            return (tf.math.count_nonzero(window(width)[1]) < count) & (head + width < size)

        (width,) = tf.while_loop(lacks, lambda width: (2 * width,), (count,))
        places, unseen = window(width)
        passed = tf.math.count_nonzero(tf.cumsum(tf.cast(unseen, tf.int64)) < count) + tf.minimum(count, 1)
        return tf.boolean_mask(places, unseen)[:count], tf.minimum(head + passed, size)

    def _renew(self, now: tf.Tensor) -> None:
        seen = _value(self.seen)
        order = tf.math.top_k(-seen, tf.size(seen))[1]  # of equal ones, the first place first
        _assign(self._queue, tf.cast(order, tf.int64))
        _assign(self._position, tf.stack([0, now]))
        _assign(self._index, tf.zeros(self._index.shape, tf.int64))
        given = tf.where(seen > _NEVER)[:, 0]
        self._enter(given, tf.gather(tf_variable(self._keys), given))

    def _enter(self, places: tf.Tensor, ids: tf.Tensor) -> None:
        """Notes the places of ids in the index."""
        index = tf_variable(self._index)

        def probe(step: tf.Tensor, at: tf.Tensor, entries: tf.Tensor) -> tuple[tf.Tensor, ...]:
            free = tf.equal(tf.gather(index, at), 0)
            wanted, own = tf.boolean_mask(at, free), tf.boolean_mask(entries, free)
            tf.raw_ops.ResourceScatterMax(resource=index.handle, indices=wanted, updates=own)  # of several, one gets it
            rest = tf.not_equal(tf.gather(index, at), entries)
            return step + 1, self._next(tf.boolean_mask(at, rest), step), tf.boolean_mask(entries, rest)

        _while_any(probe, (tf.constant(1, tf.int64), self._first(ids), places + 1))

    def _first(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns where in the index to look for ids first."""
        return tf.bitcast(_right(mix(tf.bitcast(ids, tf.uint64)), 1), tf.int64) % self._index.shape[0]

    def _next(self, at: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return (at + step) % self._index.shape[0]  # by 1, 2, 3...: this comes to each entry of a power of two


def _while_any(body: Callable[..., tuple[tf.Tensor, ...]], start: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
    """Repeats a function while its second value has elements."""
    shapes = tuple(tf.TensorShape([None] * value.shape.rank) for value in start)
    return tf.while_loop(lambda _, at, *__: tf.size(at) > 0, body, start, shape_invariants=shapes)


def _value(held: Any) -> tf.Tensor:
    return tf.convert_to_tensor(tf_variable(held))


def _write(held: Any, places: tf.Tensor, values: Any) -> None:
    """Writes elements or rows of this replica's copy of a variable; tf.distribute would aggregate them."""
    variable = tf_variable(held)
    values = tf.cast(values, variable.dtype)
    values = tf.broadcast_to(values, tf.shape(places)) if values.shape.rank == 0 else values
    tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=places, updates=values)


def _assign(held: Any, value: tf.Tensor) -> None:
    tf.raw_ops.AssignVariableOp(resource=tf_variable(held).handle, value=value)


@tf.autograph.experimental.do_not_convert
def _of_all_replicas(ids: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the distinct ids of all replicas, and their counts."""
    context, share = tf.distribute.get_replica_context(), updates.current()
    if share is not None:  # a replica without an example has the first one of another
        none = tf.zeros([], tf.int32)
        kept = tf.where(share.examples > 0, tf.size(ids), none)
        ids, counts = ids[:kept], counts[:kept]
    if num_replicas() == 1 or not may_join():
        return ids, counts
    ids, counts = context.merge_call(joined, args=(ids, counts))
    ids, places = tf.unique(ids)
    return ids, tf.math.unsorted_segment_sum(counts, places, tf.size(ids))


# The initial values.


def _long(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)


def _unsigned(*numbers: int) -> tf.Tensor:
    # By numpy, because TensorFlow rounds a list of such large numbers in a graph.
    return tf.constant(np.array([number % 2**64 for number in numbers], np.uint64))


def _right(numbers: tf.Tensor, shift: int) -> tf.Tensor:
    return tf.bitwise.right_shift(numbers, _unsigned(shift))


def _initial(initializer: Any, ids: tf.Tensor, dim: int, dtype: tf.DType) -> tf.Tensor:
    """Draws the initial values of ids, `[ids, dim]`; each depends on the seed and its id."""
    config = initializer.get_config()
    if "seed" not in config:
        return tf.repeat(tf.convert_to_tensor(initializer((1, dim), dtype=dtype)), tf.size(ids), axis=0)
    seeds = mix(tf.bitwise.bitwise_xor(tf.bitcast(ids, tf.uint64), mix(_unsigned(config["seed"]))))
    columns = _unsigned(*((column + 1) * _ODD for column in range(dim)))
    bits = tf.bitcast(_right(mix(seeds[:, tf.newaxis] + columns), 11), tf.int64)
    uniform = (tf.cast(bits, tf.float64) + 0.5) / 2.0**53
    if "minval" in config:
        values = config["minval"] + uniform * (config["maxval"] - config["minval"])
    else:
        tail = math.erfc(math.sqrt(2)) / 2 if type(initializer).__name__ == "TruncatedNormal" else 0.0
        values = config["mean"] + config["stddev"] * tf.math.ndtri(tail + uniform * (1 - 2 * tail))
    return tf.cast(values, dtype)
