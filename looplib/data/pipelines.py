"""Pipelines: a task's data set built for each worker, checked, distributed, and brought to its position."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.cluster.collectives import Workers
from looplib.cluster.updates import KINDS, Share
from looplib.compat import tensorflow as _tf
from looplib.config.run_config import RunConfig
from looplib.data import causes, rows
from looplib.data.block_stream import BlockStream, KeyedStream, Rows, block_size, block_size_of_ids
from looplib.data.context import BadRecords, InputContext, per_replica_batch_size
from looplib.data.order import Batches, BatchSizePeriod
from looplib.data.streams import BatchProperties, HostStream, ShareLengths, Stream
from looplib.errors import BatchSizeError, DatasetError, EmptyDataError, ShardingError, TaskError

_ENDLESS = 2**62

# What is added to the batches of a pipeline, once they are those of the replicas, in turn.


class PipelineTask(Protocol):
    """What is read of a `Trainer` or an `Evaluator`; see there."""

    batches: str  # "per_replica" or "global"
    batch_size_varies: bool  # whether its batches have other sizes than the context's
    uneven_parts: bool  # whether parts of a batch have different numbers of rows, and each is divided by its own

    def dataset(self, context: InputContext) -> tf.data.Dataset:
        """Makes the batches of one pipeline."""


def makes_global_batches(task: PipelineTask) -> bool:
    """Returns whether a task makes global batches; raises `UsageError` if its `batches` is of no kind."""
    if task.batches not in KINDS:
        raise TaskError(f"{type(task).__name__}.batches is {task.batches!r}; expected one of {', '.join(KINDS)}")
    return task.batches == "global"


@dataclasses.dataclass(frozen=True)
class BuiltPipeline:
    """What is known of a pipeline that was built."""

    context: InputContext
    cardinality: int  # in batches; in steps, where that decides whether there is one at all
    share: int  # batches from the beginning of the data, as tf.data says it
    sure: int  # steps that it is certain to have
    sized: bool  # whether the size of its batches need not be checked in each step
    in_turn: bool  # whether the ids of each batch, as a replica gets it, follow one another
    skipped: int  # steps that it leaves out to begin where the run is; 0 if it begins there by itself


class Pipelines:
    """Builds the pipelines of one task, and notes what is known of each.

    Args:
      task: the trainer or evaluator.
      settings: the arguments of `InputContext` that all pipelines share.
      start_step: global batches that the run has consumed.
      sizes: of the run's global batches.
      workers: the workers of the strategy.
      on_host: whether plain iterators read the batches, and not those of tf.distribute.
      whole: whether each pipeline makes global batches, which are then divided among the replicas.
      overfit_batch: whether each step gets the first batch.
    """

    def __init__(
        self,
        task: PipelineTask,
        settings: dict[str, Any],
        start_step: int,
        sizes: Batches,
        workers: Workers,
        on_host: bool,
        whole: bool,
        overfit_batch: bool,
    ) -> None:
        self.who = type(task).__name__
        self._task, self._settings, self._start_step, self._sizes = task, settings, start_step, sizes
        self._workers, self._on_host, self._whole = workers, on_host, whole
        self._overfit_batch = overfit_batch
        self.built: list[BuiltPipeline] = []
        self.newest: tf.data.Dataset | None = None  # the pipeline that was built last
        self._warned: set[str] = set()  # the formats of the warnings so far

    @property
    def replicas(self) -> int:
        """The number of replicas of the strategy."""
        return self._settings["num_replicas"]

    def build(self, tf_context: tf.distribute.InputContext) -> tf.data.Dataset:
        """Builds the pipeline of a `tf.distribute.InputContext`."""
        context, dataset = self._build(tf_context, 0 if self._overfit_batch else self._start_step)
        if self._overfit_batch:
            dataset = _first_again(dataset, context)
        if self._workers.count > 1 and not context.asked.part and not self._whole:
            raise ShardingError(
                f"{self.who}.dataset gives all {self._workers.count} workers the same data, because it does not use "
                "context.pipeline_index; use context.indices, or dataset.shard(context.num_pipelines, "
                "context.pipeline_index)"
            )
        training, replicas = context.training, context.replicas_per_pipeline
        call = context.asked.last
        in_turn = call is not None and call.in_turn and dataset is call.ids and not self._whole
        fixed = have_size(dataset, context.per_replica_batch_size)
        sized = True
        if training and not self._task.batch_size_varies:
            sized = _check_batch_size(self.who, dataset, context.per_replica_batch_size)
        _check_resident(self.who, context, dataset)
        share = int(dataset.cardinality())
        if training and not self._on_host and self._workers.count > 1:
            dataset = self._ended_together(dataset, share)
        skipped = 0 if context.asked.positioned else self._to_skip()
        if skipped and not self._on_host:
            dataset = dataset.skip(skipped * replicas)
        cardinality = int(dataset.cardinality())
        endless = cardinality == tf.data.INFINITE_CARDINALITY
        # Behind tf.distribute's iterators sizes are not known.
        known = _ENDLESS if endless else cardinality - 1 if self._on_host else 0
        in_steps = training and context.num_replicas > 1 and cardinality > 0
        cardinality = cardinality // replicas if in_steps else cardinality
        sure = max(0, known // replicas)
        self.built.append(BuiltPipeline(context, cardinality, share, sure, sized, in_turn, skipped))
        if self._whole and self.replicas > 1:
            local_replicas = self.replicas // self._workers.count
            first = tf_context.input_pipeline_id * local_replicas
            who, uneven = f"{self.who}.dataset", self._task.uneven_parts
            dataset = to_replicas(who, dataset, first, local_replicas, self.replicas, shares=not fixed, uneven=uneven)
        if self.replicas > 1 and not endless and not self._on_host:
            dataset = _forget_batch_size(dataset)
            dataset = _drop_incomplete_steps(dataset, replicas) if training and not self._whole else dataset
        self.newest = dataset
        return dataset

    def gather_lengths(self) -> tuple[list[int], list[int]]:
        """Returns the cardinalities and the first share of all workers, in their order."""
        cardinalities, shares = [built.cardinality for built in self.built], [self.built[0].share]
        if self._workers.count > 1:
            cardinalities = self._workers.gather(np.int64(cardinalities)).ravel().tolist()
            shares = self._workers.gather(np.int64(shares)).ravel().tolist()
        return cardinalities, shares

    def _ended_together(self, dataset: tf.data.Dataset, share: int) -> tf.data.Dataset:
        """Ends this worker's share where the shortest one ends; tf.distribute would go on with empty batches."""
        shares = self._workers.gather(np.int64(share))
        if (shares == tf.data.UNKNOWN_CARDINALITY).any():
            raise DatasetError(
                f"the length of {self.who}.dataset is not known, and tf.distribute trains on empty batches where a "
                "worker's share ends before the others; repeat() the data, give it a length with "
                'tf.data.experimental.assert_cardinality, or leave out distribute="tf"'
            )
        return dataset.take(shares[shares >= 0].min()) if (shares >= 0).any() else dataset

    def _build(self, tf_context: tf.distribute.InputContext, start_step: int) -> tuple[InputContext, tf.data.Dataset]:
        # A pipeline of global batches is one for all workers and replicas, so that it needs to know of none.
        settings = {**self._settings, "num_replicas": 1} if self._whole else self._settings
        context = InputContext(
            pipeline_index=0 if self._whole else tf_context.input_pipeline_id,
            num_pipelines=1 if self._whole else tf_context.num_input_pipelines,
            start_step=start_step,
            earlier=self._sizes.earlier if start_step else (),
            **settings,
        )
        dataset = self._task.dataset(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise DatasetError(
                f"{self.who}.dataset returned a {type(dataset).__name__}; expected a tf.data.Dataset of batches"
            )
        rows.check_structure(f"{self.who}.dataset", (dataset.element_spec, context.asked.arrays))
        if context.training and context.asked.unnamed > 1:
            self._warn_once(
                "%s.dataset asks context for examples %d times without a name, and each time they come in another "
                "order; those of inputs and targets that belong together need one name=, others may have one of their "
                "own",
                self.who,
                context.asked.unnamed,
            )
        asked, made = context.asked, [call.batches for call in context.asked.calls]
        positioned = context.training and asked.positioned
        if positioned and not _tf.is_by_element(dataset, made, any_other=asked.start):
            # A shuffle or the like behind `indices` depends on the batches before: its position is not that of the ids.
            asked.positioned, asked.calls[-1].ids = False, None
            return (context, dataset) if start_step == 0 else self._build(tf_context, 0)
        if start_step and not asked.positioned and asked.start:
            # The pipeline of a new run, which is then brought to its position. One that is the same anyway is not built
            # twice: the seeds that TensorFlow derives for its shuffles depend on how many there were before.
            return self._build(tf_context, 0)
        if positioned:
            self._warn_of_state(_tf.stateful_ops_of_maps(dataset, made), resumes=start_step > 0)
        return context, dataset

    def _to_skip(self) -> int:
        """Returns the steps that a pipeline without positions leaves out; says so for batches of another size."""
        sizes, size = self._sizes, self._sizes.size
        if not sizes.earlier:
            return self._start_step
        if self._task.batch_size_varies:
            raise BatchSizeError(
                f"the run had batches of {sizes}, and those of {self.who}.dataset vary, so that it is not known which "
                f"examples it has read; continue with {sizes.original}, make the data with context.indices or "
                "context.records, or start a new run from the weights (--warm_start)"
            )
        steps = sizes.whole(self._start_step)
        self._warn_once(
            "the run had batches of %s: %s.dataset leaves out the first %d examples, as %d batches of %d; these are "
            "the ones that were read if all batches are full and the order of the examples does not depend on their "
            "size",
            sizes, self.who, steps * size, steps, size,
        )  # fmt: skip
        return steps

    def _warn_of_state(self, ops: set[str], resumes: bool) -> None:
        """Warns once if maps may not repeat their results at a resume; without a resume, only of random numbers."""
        ops = ops if resumes else ops & _tf.RANDOM_OPS
        conditions = {op: found for op in sorted(ops) if (found := causes.condition(op, by_skipping=False))}
        if conditions:
            self._warn_once(
                "%s.dataset has %s in a map; a resume from the position of its ids is exact only if %s",
                self.who,
                ", ".join(conditions),
                ", and ".join(dict.fromkeys(conditions.values())),
            )

    def _warn_once(self, sentence: str, *values: Any) -> None:
        """Logs a warning, but not again for a pipeline that is built later."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            logging.warning(sentence, *values)

    def build_on_worker(
        self, pipeline_index: Any = 0, num_pipelines: int = 1, numbers: tf.data.Dataset | None = None
    ) -> tf.data.Dataset:
        """Builds the pipeline of a worker that reads by itself; for the arguments see `InputContext`."""
        return self._task.dataset(
            InputContext(
                pipeline_index=pipeline_index,
                num_pipelines=num_pipelines,
                numbers=numbers,
                start_step=0,
                earlier=self._sizes.earlier,
                **self._settings,
            )
        )


def _first_again(dataset: tf.data.Dataset, context: InputContext) -> tf.data.Dataset:
    """Repeats the batches of the first step without end; does not if there are too few for a step."""
    first = dataset.take(context.replicas_per_pipeline)
    if 0 <= first.cardinality() < context.replicas_per_pipeline:
        return first
    context.asked.positioned = True  # every step has the same batch
    return first.cache().repeat()


def _check_batch_size(who: str, dataset: tf.data.Dataset, expected: int) -> bool:
    """Refuses batches of another size, which would scale means and gradients wrongly; returns whether it is known."""
    shapes = [spec.shape for spec in rows.parts(dataset.element_spec)]
    sizes = {shape[0] for shape in shapes if shape.rank and shape[0] is not None}
    if sizes and expected not in sizes:
        raise BatchSizeError(
            f"{who}.dataset makes batches of {' or '.join(map(str, sorted(sizes)))} examples; expected "
            f"context.per_replica_batch_size, which is {expected}"
        )
    return bool(sizes)


def _check_resident(who: str, context: InputContext, dataset: tf.data.Dataset) -> None:
    spec = dataset.element_spec
    if context.asked.arrays is not None and not (isinstance(spec, tf.TensorSpec) and spec.dtype == tf.int64):
        raise DatasetError(
            f"{who}.dataset changed what context.resident returned to elements of {spec}; return it unchanged, "
            "and process batches in step_fn"
        )


def _drop_incomplete_steps(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """Leaves out the last batches if they do not reach all replicas of a pipeline.

    A replica that trains on no example has a batch normalization of NaN, which the other replicas would share.
    """

    def zip_again(*windows: Any) -> tf.data.Dataset:
        windows = windows if type(dataset.element_spec) is tuple else windows[0]
        return tf.data.Dataset.zip(windows) if tf.nest.is_nested(windows) else windows

    return dataset.window(replicas, drop_remainder=True).flat_map(zip_again)


def _forget_batch_size(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Makes the first dimension of every tensor unknown.

    tf.distribute hands out the last, uneven batches of data that ends only where it sees that sizes may differ; with a
    static batch size it drops what does not fill all replicas.
    """

    def forget(tensor: rows.Tensor) -> rows.Tensor:
        if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
            return tensor
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])

    def forget_all(*element: Any) -> Any:  # tf.data unpacks tuples, and only those
        element = element if type(dataset.element_spec) is tuple else element[0]
        return rows.map_parts(forget, element)

    return dataset.map(forget_all)


def to_replicas(
    who: str, dataset: tf.data.Dataset, first: int, count: int, replicas: int, *, shares: bool, uneven: bool
) -> tf.data.Dataset:
    """Divides each global batch, as evenly as its size allows, in the order of its examples.

    Returns the batches for the replicas `first` to `first + count - 1` of all `replicas`, one after another; with
    `shares`, as `Share`s, which have no empty batch. Batches may be structures of dense, ragged and sparse tensors and
    of extension types. With `uneven`, each part is divided by its own number of rows, and the first one has the number
    of examples; else parts with different numbers are refused, in the name of `who`.
    """
    cardinality = dataset.cardinality()
    spec = dataset.element_spec
    if not uneven:
        rows.check_even(who, rows.parts(spec))

    @tf.autograph.experimental.do_not_convert
    def divide(*element: Any) -> tf.data.Dataset:
        batch = element if type(spec) is tuple else element[0]  # tf.data unpacks tuples, and only those
        sizes = [rows.count(part) for part in rows.parts(batch)]
        if shares:
            with tf.control_dependencies(rows.assert_even(who, sizes, replicas if uneven else None)):
                size = tf.identity(sizes[0])
        else:
            size = sizes[0]

        def part(replica: tf.Tensor) -> Any:
            def own(leaf: rows.Tensor) -> rows.Tensor:
                start, stop = _place(replica, rows.count(leaf) if uneven else size, replicas)
                if shares:
                    start, stop = tf.where(stop > start, start, 0), tf.where(stop > start, stop, 1)
                return _of_static_size(rows.between(leaf, start, stop), leaf, replicas)

            start, stop = _place(replica, size, replicas)
            inputs = rows.map_parts(own, batch)
            return Share(inputs, stop - start, size) if shares else inputs

        return tf.data.Dataset.range(first, first + count).map(part)

    divided = dataset.flat_map(divide)
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        return divided
    endless = cardinality == tf.data.INFINITE_CARDINALITY
    return divided.apply(tf.data.experimental.assert_cardinality(cardinality if endless else cardinality * count))


def _place(replica: tf.Tensor, size: tf.Tensor, replicas: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the first row of a replica's part of a batch, and the one after its last."""
    return -(-replica * size // replicas), -(-(replica + 1) * size // replicas)


def _of_static_size(part: rows.Tensor, whole: rows.Tensor, replicas: int) -> rows.Tensor:
    if not isinstance(whole, tf.Tensor) or not whole.shape.rank or not whole.shape[0] or whole.shape[0] % replicas:
        return part
    return tf.ensure_shape(part, [whole.shape[0] // replicas, *whole.shape[1:]])


def have_size(dataset: tf.data.Dataset, size: int) -> bool:
    """Returns whether the specs say that all batches have a size."""
    return all(part.shape.rank is not None and part.shape[0] == size for part in rows.parts(dataset.element_spec))


_SMALL = 2**14  # bytes of a step; rows of resident arrays are gathered ahead of it up to this size


def local_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...] | None:
    """Returns the device of each replica, if all are CPUs or GPUs of this process; otherwise None."""
    with strategy.scope():
        if not tf.distribute.has_strategy():  # the default strategy, which places ops itself: on a GPU if there is one
            found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
            return (found[0].name,)
    kinds = (tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not isinstance(strategy, kinds):
        return None
    names = _tf.worker_devices(strategy)
    devices = [tf.DeviceSpec.from_string(name) for name in names]
    one_process = len({(device.job, device.task) for device in devices}) == 1
    plain = all(device.device_type in ("CPU", "GPU") for device in devices)
    return names if plain and one_process else None


def runs_on_host(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether each process's replicas are its CPUs."""
    devices = local_devices(strategy)
    return devices is not None and all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in devices)


def distribute(
    strategy: tf.distribute.Strategy,
    task: PipelineTask,
    config: RunConfig,
    left_out: BadRecords | None = None,
    *,
    training: bool,
    start_step: int = 0,
    earlier: Sequence[BatchSizePeriod] = (),
    in_blocks: bool = False,
    remote: Callable[..., Stream] | None = None,
) -> Stream:
    """Builds `task.dataset` for every input pipeline of a strategy; for the other arguments see `Specification`.

    Args:
      strategy: runs the steps.
      task: has the `dataset`.
      config: the settings of the controller; of an evaluator, with its own global batch size.
      left_out: the damaged records that the run has left out.
      training: whether the data is for a training.
      start_step: global batches that were consumed before.
      earlier: batches of other sizes.
      in_blocks: whether the loop takes the batches of several steps at once, on one replica.
      remote: makes the stream where workers read by themselves, of the arguments of a `Stream` and `make`, which makes
        the pipeline of a worker there.

    Raises:
      UsageError: for a batch that does not divide, something that is not a data set, or an empty data set.
    """
    replicas, workers = strategy.num_replicas_in_sync, Workers(strategy)
    local = local_devices(strategy) if config.distribute == "auto" and remote is None else None
    on_host = remote is not None or local is not None
    settings = dict(
        global_batch_size=config.global_batch_size,
        num_replicas=replicas,
        seed=config.seed,
        training=training,
        global_batches=makes_global_batches(task),
        bad_records=left_out,
    )
    batch_size = per_replica_batch_size(config.global_batch_size, replicas)
    whole = settings["global_batches"] and remote is None  # remote workers each read batches of their own
    sizes = Batches(config.global_batch_size, tuple(earlier))
    pipelines = Pipelines(task, settings, start_step, sizes, workers, on_host, whole, config.overfit_batch)

    def make() -> tf.data.Dataset | tf.distribute.DistributedDataset:
        if remote is not None:  # each worker builds its own; the coordinator looks at one
            return pipelines.build(tf.distribute.InputContext())
        distributed = strategy.distribute_datasets_from_function(pipelines.build)
        # The default strategy hands back the pipeline itself. Of the others, CPUs and GPUs read the one pipeline that
        # the call has built for this process by a plain iterator: see `HostStream`.
        return pipelines.newest if on_host else distributed

    dataset, on_cpus = make(), runs_on_host(strategy)
    properties = _properties(pipelines, training, batch_size, whole, start_step, remote)
    context, newest = pipelines.built[0].context, pipelines.built[-1]
    properties = dataclasses.replace(properties, in_turn=newest.in_turn and on_cpus)
    stream, arrays = Stream, context.asked.arrays
    if remote is not None:
        stream = functools.partial(remote, make=pipelines.build_on_worker)
    elif on_host and in_blocks and on_cpus and training and workers.count == 1:
        stream, dataset, arrays = _in_blocks(dataset, context, batch_size)
    elif on_host:
        stream = functools.partial(HostStream, devices=() if on_cpus else local)
    return stream(
        strategy=strategy,
        dataset=dataset,
        renew=make if training else None,
        properties=properties,
        context=lambda: pipelines.built[-1].context,
        start_step=start_step,
        positioned=context.asked.positioned,
        skipped=newest.skipped * max(1, replicas // workers.count),
        arrays=arrays,
    )


def _properties(
    pipelines: Pipelines, training: bool, batch_size: int, whole: bool, start_step: int, remote: Any
) -> BatchProperties:
    """Returns what is known of the batches of built pipelines; raises `UsageError` if there is none to begin with."""
    asked, replicas = pipelines.built[0].context.asked, pipelines.replicas
    cardinalities, shares = pipelines.gather_lengths()
    per_worker = max(1, replicas // len(shares))
    lengths = ShareLengths(shares, 1 if whole else per_worker) if training and remote is None else None
    if start_step == 0:
        _refuse_without_batches(pipelines, training, cardinalities, lengths)
    infinite = all(cardinality == tf.data.INFINITE_CARDINALITY for cardinality in cardinalities)
    return BatchProperties(
        who=pipelines.who,
        infinite=infinite,
        unknown=tf.data.UNKNOWN_CARDINALITY in cardinalities,
        may_be_empty=not training and not infinite and replicas > 1 and not whole,
        sure=min(built.sure for built in pipelines.built),
        batch_size=batch_size,
        sized=pipelines.built[-1].sized,
        epoch=asked.epoch,
        examples=asked.examples,
        fingerprint=asked.reader.fingerprint() if training and asked.reader else {},
        lengths=lengths,
    )


def _refuse_without_batches(
    pipelines: Pipelines, training: bool, cardinalities: list[int], lengths: ShareLengths | None
) -> None:
    """Raises `UsageError` where a run begins with data that has not a batch for each replica."""
    if not any(cardinalities):
        raise EmptyDataError(
            f"the {'training' if training else 'evaluation'} data set is empty: {pipelines.who}.dataset has no batch"
            f"{f', or not one for each of {pipelines.replicas} replicas' * (pipelines.replicas > 1)}; check where the "
            "data is read from, and that drop_remainder does not drop the only batch"
        )
    if lengths is not None and lengths.steps == 0:
        raise EmptyDataError(
            f"the training data has no batch for the first step of all workers: the shares of {pipelines.who}.dataset "
            f"have {', '.join(map(str, lengths.batches))} batches, in the order of the workers; divide the data "
            "evenly, such as by dataset.shard before batch, or repeat() it"
        )


def _in_blocks(
    dataset: tf.data.Dataset, context: InputContext, batch_size: int
) -> tuple[Callable[..., Stream], tf.data.Dataset, Any]:
    """Returns the stream of a training on one CPU, its pipeline, and the arrays whose rows a step has to gather."""
    call, arrays, block = context.asked.last, context.asked.arrays, block_size(dataset.element_spec)
    if block == 1:
        return HostStream, dataset, arrays
    if call is None or dataset is not call.ids or call.draw is None:
        return functools.partial(BlockStream, block=block), dataset, arrays
    rows = None
    if arrays is not None and (gathered := _gathered(dataset, arrays, batch_size)):
        (dataset, rows), arrays = gathered, None
    stream = functools.partial(KeyedStream, block=block_size_of_ids(batch_size), draw=call.draw, rows=rows)
    return stream, dataset, arrays


def _gathered(dataset: tf.data.Dataset, arrays: Any, batch_size: int) -> tuple[tf.data.Dataset, Rows] | None:
    """Returns the pipeline of the rows of resident arrays, and what gathers them; None if a step has to do that itself.

    In the program of a step, XLA of TensorFlow 2.20 divides the gather among threads. To wake one takes longer than to
    copy a small batch (docs/speed_choices.md).
    """
    first = [tf.convert_to_tensor(array[:1]) for array in tf.nest.flatten(arrays)]
    size = batch_size * sum(math.prod(row.shape) * row.dtype.size for row in first)
    if size > _SMALL or tf.string in [row.dtype for row in first]:  # whose size is not known
        return None
    tables = tf.nest.map_structure(tf.constant, arrays)

    @tf.autograph.experimental.do_not_convert
    def gather(ids: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda table: tf.gather(table, ids), tables)

    try:
        rows = dataset.map(gather)
        tf.nest.assert_same_structure(rows.element_spec, arrays)
    except (TypeError, ValueError):  # tf.data makes one tensor of a list
        return None
    return rows, gather
