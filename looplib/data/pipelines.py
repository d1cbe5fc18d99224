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
from looplib.data import causes, rows, service
from looplib.data.block_stream import BlockStream, KeyedStream, Rows, block_size, block_size_of_ids
from looplib.data.context import BadRecords, DatasetRequests, InputContext, PipelineMemory, per_replica_batch_size
from looplib.data.order import Batches, BatchSizePeriod
from looplib.data.streams import BatchProperties, HostStream, ShareLengths, Stream
from looplib.errors import (
    BatchSizeError,
    DatasetError,
    EmptyDataError,
    ParameterServerError,
    ShardingError,
    TaskError,
)

_ENDLESS = 2**62

# What is added to the batches of a pipeline, once they are those of the replicas, in turn.


class PipelineTask(Protocol):
    """The attributes that are read of a `Trainer` or an `Evaluator`; see there."""

    batches: str  # "per_replica" or "global"
    batch_size_varies: bool  # whether its batches have other sizes than the context's
    uneven_parts: bool  # whether parts of a batch have different numbers of rows, and each is divided by its own

    def dataset(self, context: InputContext) -> tf.data.Dataset:
        """Makes the batches of one pipeline."""


@dataclasses.dataclass(frozen=True)
class BuiltPipeline:
    """Facts about a pipeline that was built."""

    context: InputContext
    cardinality: int  # in batches; in steps, where that decides whether there is one at all
    share: int  # batches from the beginning of the data, as tf.data says it
    sure: int  # steps that it is certain to have
    sized: bool  # whether the size of its batches need not be checked in each step
    sequential: bool  # whether the ids of each batch, as a replica gets it, follow one another
    skipped: int  # steps that it leaves out to begin where the run is; 0 if it begins there by itself


@dataclasses.dataclass(eq=False)
class Pipelines:
    """The pipelines of one task, each for a worker of a strategy, and what is known of each that was built.

    Raises:
      UsageError: for a batch that does not divide, or `batches` of no kind.
    """

    strategy: tf.distribute.Strategy  # runs the steps
    task: PipelineTask
    config: RunConfig  # the settings of the controller; of an evaluator, with its own global batch size
    left_out: BadRecords | None = None  # the damaged records that the run has left out
    memory: PipelineMemory | None = None  # what outlives the pipelines; None for nothing
    _: dataclasses.KW_ONLY
    training: bool  # whether the data is for a training
    start_step: int = 0  # global batches that were consumed before
    earlier: Sequence[BatchSizePeriod] = ()  # batches of other sizes
    in_blocks: bool = False  # whether the loop takes the batches of several steps at once, on one replica
    # makes the stream where workers read by themselves, of the arguments of a `Stream` and `make`, which makes the
    # pipeline of a worker there
    remote: Callable[..., Stream] | None = None

    def __post_init__(self) -> None:
        self._who, kind = type(self.task).__name__, self.task.batches
        if kind not in KINDS:
            raise TaskError(f"{self._who}.batches is {kind!r}; expected one of {', '.join(KINDS)}")
        if self.remote is not None and self.config.data_service:
            raise ParameterServerError(
                "with parameter servers, each worker reads its own batches, so that there is nothing for data workers; "
                "leave out --data_service"
            )
        self._whole = kind == "global" and self.remote is None  # remote workers each read batches of their own
        self._replicas, self._workers = self.strategy.num_replicas_in_sync, Workers(self.strategy)
        self._batch_size = per_replica_batch_size(self.config.global_batch_size, self._replicas)
        self._sizes = Batches(self.config.global_batch_size, tuple(self.earlier))
        plain = self.config.distribute == "auto" and self.remote is None
        self._local = local_devices(self.strategy) if plain else None
        # Whether plain iterators read the batches, and not those of tf.distribute.
        self._on_host = self.remote is not None or self._local is not None
        self._built: list[BuiltPipeline] = []
        self._newest: tf.data.Dataset | None = None  # the pipeline that was built last
        self._warned: set[str] = set()  # the formats of the warnings so far

    def distribute(self) -> Stream:
        """Builds `task.dataset` for every input pipeline of the strategy.

        Raises:
          UsageError: for something that is not a data set, or an empty data set.
        """
        dataset, on_cpus = self._make(), runs_on_host(self.strategy)
        context, newest = self._built[0].context, self._built[-1]
        properties = self._properties(context.requests, newest.sized, newest.sequential and on_cpus)
        stream, arrays = Stream, context.requests.arrays
        in_blocks = self.in_blocks and self.training and self._workers.count == 1
        in_blocks = in_blocks and context.memory.followed is None  # which does not wait for batches of several steps
        if self.remote is not None:
            stream = functools.partial(self.remote, make=self.build_on_worker)
        elif self._on_host and in_blocks and on_cpus:
            stream, dataset, arrays = _of_blocks(dataset, context, self._batch_size)
        elif self._on_host:
            stream = functools.partial(HostStream, devices=() if on_cpus else self._local)
        return stream(
            strategy=self.strategy,
            dataset=dataset,
            renew=self._make if self.training else None,
            properties=properties,
            context=lambda: self._built[-1].context,
            start_step=self.start_step,
            positioned=context.requests.positioned,
            skipped=newest.skipped * max(1, self._replicas // self._workers.count),
            arrays=arrays,
        )

    def _make(self) -> tf.data.Dataset | tf.distribute.DistributedDataset:
        if self.remote is not None:  # each worker builds its own; the coordinator looks at one
            return self.build(tf.distribute.InputContext())
        distributed = self.strategy.distribute_datasets_from_function(self.build)
        # The default strategy hands back the pipeline itself. Of the others, CPUs and GPUs read the one pipeline that
        # the call has built for this process by a plain iterator: see `HostStream`.
        return self._newest if self._on_host else distributed

    def build(self, tf_context: tf.distribute.InputContext) -> tf.data.Dataset:
        """Builds the pipeline of a `tf.distribute.InputContext`."""
        start_step = 0 if self.config.overfit_batch else self.start_step
        context, dataset = self._build(tf_context, start_step)
        if context.memory.followed is not None:
            self._check_followed(context)
        if self.training and self.config.data_workers:
            dataset = self._served(tf_context, context, dataset, start_step)
        if self.config.overfit_batch:
            dataset = _first_again(dataset, context)
        if self._workers.count > 1 and not context.requests.part and not self._whole:
            raise ShardingError(
                f"{self._who}.dataset gives all {self._workers.count} workers the same data, because it does not use "
                "context.pipeline_index; use context.indices, or dataset.shard(context.num_pipelines, "
                "context.pipeline_index)"
            )
        training, replicas = context.training, context.replicas_per_pipeline
        call = context.requests.last
        sequential = call is not None and call.sequential and dataset is call.ids and not self._whole
        size, sized = context.per_replica_batch_size, True
        shapes = [part.shape for part in rows.parts(dataset.element_spec)]
        fixed = all(shape.rank is not None and shape[0] == size for shape in shapes)
        if training and not self.task.batch_size_varies:
            sized = _check_batch_size(self._who, shapes, size)
        _check_resident(self._who, context, dataset)
        share = int(dataset.cardinality())
        if training and not self._on_host and self._workers.count > 1:
            dataset = self._ended_together(dataset, share)
        skipped = 0 if context.requests.positioned else self._to_skip()
        if skipped and not self._on_host:
            dataset = dataset.skip(skipped * replicas)
        cardinality = int(dataset.cardinality())
        endless = cardinality == tf.data.INFINITE_CARDINALITY
        # Behind tf.distribute's iterators sizes are not known.
        known = _ENDLESS if endless else cardinality - 1 if self._on_host else 0
        in_steps = training and context.num_replicas > 1 and cardinality > 0
        cardinality = cardinality // replicas if in_steps else cardinality
        sure = max(0, known // replicas)
        self._built.append(BuiltPipeline(context, cardinality, share, sure, sized, sequential, skipped))
        if self._whole and self._replicas > 1:
            local_replicas = self._replicas // self._workers.count
            first = tf_context.input_pipeline_id * local_replicas
            who, uneven = f"{self._who}.dataset", self.task.uneven_parts
            dataset = to_replicas(who, dataset, first, local_replicas, self._replicas, shares=not fixed, uneven=uneven)
        if self._replicas > 1 and not endless and not self._on_host:
            dataset = _forget_batch_size(dataset)
            dataset = _drop_incomplete_steps(dataset, replicas) if training and not self._whole else dataset
        self._newest = dataset
        return dataset

    def _check_followed(self, context: InputContext) -> None:
        """Raises `UsageError` where files cannot be followed."""
        if self.config.overfit_batch or self.config.data_workers:
            flag = "--overfit_batch" if self.config.overfit_batch else "--data_service"
            raise DatasetError(f"{self._who}.dataset follows files as they appear; leave out {flag}")
        if not context.requests.positioned:
            raise DatasetError(
                f"{self._who}.dataset has a stage behind context.records(follow=...) that mixes batches, such as "
                "shuffle or batch, so that a resumed run would not find its place; leave it out: files are shuffled "
                "where they are read"
            )

    def _properties(self, requests: DatasetRequests, sized: bool, sequential: bool) -> BatchProperties:
        """Returns what is known of the batches; raises `UsageError` if there is none to begin with."""
        cardinalities, shares = [built.cardinality for built in self._built], [self._built[0].share]
        if self._workers.count > 1:
            cardinalities = self._workers.gather(np.int64(cardinalities)).ravel().tolist()
            shares = self._workers.gather(np.int64(shares)).ravel().tolist()
            self._check_parts(requests)
        per_worker = max(1, self._replicas // len(shares))
        divides = self.training and self.remote is None
        lengths = ShareLengths(shares, 1 if self._whole else per_worker) if divides else None
        if self.start_step == 0:
            self._refuse_without_batches(cardinalities, lengths)
        infinite = all(cardinality == tf.data.INFINITE_CARDINALITY for cardinality in cardinalities)
        return BatchProperties(
            who=self._who,
            infinite=infinite,
            unknown=tf.data.UNKNOWN_CARDINALITY in cardinalities,
            served=self.training and bool(self.config.data_workers),
            may_be_empty=not self.training and not infinite and self._replicas > 1 and not self._whole,
            sure=min(built.sure for built in self._built),
            batch_size=self._batch_size,
            sized=sized,
            sequential=sequential,
            epoch=requests.epoch,
            examples=requests.examples,
            order=requests.order() if self.training else (),
            fingerprint=requests.reader.fingerprint() if self.training and requests.reader else {},
            lengths=lengths,
        )

    def _check_parts(self, requests: DatasetRequests) -> None:
        """Warns if the workers' loaders begin with one batch, where each has to have a part of the data."""
        if requests.loader is None or self._whole:
            return
        if len(set(self._workers.gather(np.int64(requests.loader.first_digest)).ravel().tolist())) == 1:
            self._warn_once(
                "%s.dataset gives all %d workers loaders that begin with equal batches; use the index and the count "
                "that context.loader hands to your function, so that each has its part of the data",
                self._who, self._workers.count,
            )  # fmt: skip

    def _refuse_without_batches(self, cardinalities: list[int], lengths: ShareLengths | None) -> None:
        """Raises `UsageError` where a run begins with data that has not a batch for each replica."""
        if not any(cardinalities):
            raise EmptyDataError(
                f"the {'training' if self.training else 'evaluation'} data set is empty: {self._who}.dataset has no "
                f"batch{f', or not one for each of {self._replicas} replicas' * (self._replicas > 1)}; check where the "
                "data is read from, and that drop_remainder does not drop the only batch"
            )
        if lengths is not None and lengths.steps == 0:
            raise EmptyDataError(
                f"the training data has no batch for the first step of all workers: the shares of {self._who}.dataset "
                f"have {', '.join(map(str, lengths.batches))} batches, in the order of the workers; divide the data "
                "evenly, such as by dataset.shard before batch, or repeat() it"
            )

    def _ended_together(self, dataset: tf.data.Dataset, share: int) -> tf.data.Dataset:
        """Ends this worker's share where the shortest one ends; tf.distribute would go on with empty batches."""
        shares = self._workers.gather(np.int64(share))
        if (shares == tf.data.UNKNOWN_CARDINALITY).any():
            raise DatasetError(
                f"the length of {self._who}.dataset is not known, and tf.distribute trains on empty batches where a "
                "worker's share ends before the others; repeat() the data, give it a length with "
                'tf.data.experimental.assert_cardinality, or leave out distribute="tf"'
            )
        return dataset.take(shares[shares >= 0].min()) if (shares >= 0).any() else dataset

    def _build(self, tf_context: tf.distribute.InputContext, start_step: int) -> tuple[InputContext, tf.data.Dataset]:
        index, count = tf_context.input_pipeline_id, tf_context.num_input_pipelines
        context = self._context(index, count, start_step, self._sizes.earlier if start_step else ())
        dataset = self.task.dataset(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise DatasetError(
                f"{self._who}.dataset returned a {type(dataset).__name__}; expected a tf.data.Dataset of batches"
            )
        rows.check_structure(f"{self._who}.dataset", (dataset.element_spec, context.requests.arrays))
        if context.training and context.requests.unnamed > 1:
            self._warn_once(
                "%s.dataset asks context for examples %d times without a name, and each time they come in another "
                "order; those of inputs and targets that belong together need one name=, others may have one of their "
                "own",
                self._who,
                context.requests.unnamed,
            )
        requests, made = context.requests, [call.batches for call in context.requests.calls]
        positioned = context.training and requests.positioned
        if positioned and not _tf.is_by_element(dataset, made, any_other=requests.start):
            # A shuffle or the like behind `indices` depends on the batches before: its position is not that of the ids.
            requests.positioned, requests.calls[-1].ids = False, None
            return (context, dataset) if start_step == 0 else self._build(tf_context, 0)
        if start_step and not requests.positioned and requests.start:
            # The pipeline of a new run, which is then brought to its position. One that is the same anyway is not built
            # twice: the seeds that TensorFlow derives for its shuffles depend on how many there were before.
            return self._build(tf_context, 0)
        if positioned:
            self._warn_of_state(_tf.stateful_ops_of_maps(dataset, made), resumes=start_step > 0)
        return context, dataset

    def _served(
        self, tf_context: tf.distribute.InputContext, context: InputContext, dataset: tf.data.Dataset, start_step: int
    ) -> tf.data.Dataset:
        """Returns the batches of a pipeline as data workers make them; of several, each makes a part of them."""
        addresses, requests = self.config.data_workers, context.requests
        count, skips = len(addresses), start_step > 0 and not requests.positioned
        if requests.arrays is not None:
            raise DatasetError(
                f"{self._who}.dataset returns context.resident, whose batches are gathered on the device, so that a "
                "data worker has nothing to do; leave out --data_service, or use context.indices and tf.gather"
            )
        if count == 1:
            return service.served(self._who, addresses, [dataset], int(dataset.cardinality()), skips)
        if not requests.part or requests.start:
            why = "because it does not use context.pipeline_index" if not requests.part else "at context.start_step"
            raise ShardingError(
                f"{self._who}.dataset gives each of {count} data workers the same data, {why}; use context.indices, or "
                "dataset.shard(context.num_pipelines, context.pipeline_index) and no start_step; or name one data "
                "worker"
            )
        index, pipelines = tf_context.input_pipeline_id, tf_context.num_input_pipelines
        start, earlier = (0, ()) if skips or not start_step else (start_step, self._sizes.earlier)
        parts = [
            self.task.dataset(self._context(index, pipelines, start, earlier, share=(number, count)))
            for number in range(count)
        ]
        lengths = [int((dataset if requests.positioned else part).cardinality()) for part in parts]
        total = sum(lengths) if min(lengths) >= 0 else min(lengths)
        return service.served(self._who, addresses, parts, total, skips)

    def _to_skip(self) -> int:
        """Returns the steps that a pipeline without positions leaves out; says so for batches of another size."""
        sizes, size = self._sizes, self._sizes.size
        if not sizes.earlier:
            return self.start_step
        if self.task.batch_size_varies:
            raise BatchSizeError(
                f"the run had batches of {sizes}, and those of {self._who}.dataset vary, so that it is not known which "
                f"examples it has read; continue with {sizes.original}, make the data with context.indices or "
                "context.records, or start a new run from the weights (--warm_start)"
            )
        steps = sizes.whole(self.start_step)
        self._warn_once(
            "the run had batches of %s: %s.dataset leaves out the first %d examples, as %d batches of %d; these are "
            "the ones that were read if all batches are full and the order of the examples does not depend on their "
            "size",
            sizes, self._who, steps * size, steps, size,
        )  # fmt: skip
        return steps

    def _warn_of_state(self, ops: set[str], resumes: bool) -> None:
        """Warns once if maps may not repeat their results at a resume; without a resume, only of random numbers."""
        ops = ops if resumes else ops & _tf.RANDOM_OPS
        conditions = {op: found for op in sorted(ops) if (found := causes.condition(op, by_skipping=False))}
        if conditions:
            self._warn_once(
                "%s.dataset has %s in a map; a resume from the position of its ids is exact only if %s",
                self._who,
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
        return self.task.dataset(self._context(pipeline_index, num_pipelines, 0, self._sizes.earlier, numbers))

    @tf.autograph.experimental.do_not_convert
    def _context(
        self,
        index: Any,
        count: int,
        start_step: int,
        earlier: Sequence[BatchSizePeriod],
        numbers: Any = None,
        share: tuple[int, int] = (0, 1),
    ) -> InputContext:
        """Makes the context of a pipeline; one of global batches is for all replicas, and needs to know of none."""
        return InputContext(
            global_batch_size=self.config.global_batch_size,
            num_replicas=1 if self._whole else self._replicas,
            pipeline_index=0 if self._whole else index,
            num_pipelines=1 if self._whole else count,
            seed=self.config.seed,
            training=self.training,
            start_step=start_step,
            global_batches=self.task.batches == "global",
            batch_size_varies=self.training and self.task.batch_size_varies,
            numbers=numbers,
            bad_records=self.left_out,
            memory=self.memory,
            earlier=earlier,
            share=share,
            remote=self.remote is not None,
        )


def _first_again(dataset: tf.data.Dataset, context: InputContext) -> tf.data.Dataset:
    """Repeats the batches of the first step without end; does not if there are too few for a step."""
    first = dataset.take(context.replicas_per_pipeline)
    if 0 <= first.cardinality() < context.replicas_per_pipeline:
        return first
    context.requests.positioned = True  # every step has the same batch
    return first.cache().repeat()


def _check_batch_size(who: str, shapes: Sequence[tf.TensorShape], expected: int) -> bool:
    """Refuses batches of another size, which would scale means and gradients wrongly; returns whether it is known."""
    sizes = {shape[0] for shape in shapes if shape.rank and shape[0] is not None}
    if sizes and expected not in sizes:
        raise BatchSizeError(
            f"{who}.dataset makes batches of {' or '.join(map(str, sorted(sizes)))} examples; expected "
            f"context.per_replica_batch_size, which is {expected}"
        )
    return bool(sizes)


def _check_resident(who: str, context: InputContext, dataset: tf.data.Dataset) -> None:
    spec = dataset.element_spec
    if context.requests.arrays is not None and not (isinstance(spec, tf.TensorSpec) and spec.dtype == tf.int64):
        raise DatasetError(
            f"{who}.dataset changed what context.resident returned to elements of {spec}; return it unchanged, "
            "and process batches in step_fn"
        )


def _drop_incomplete_steps(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """Leaves out the last batches if they do not reach all replicas of a pipeline.

    A replica that trains on no example has a batch normalization of NaN, which the other replicas would share.
    """

    def zip_again(windows: Any) -> tf.data.Dataset:
        return tf.data.Dataset.zip(windows) if tf.nest.is_nested(windows) else windows

    windows = dataset.window(replicas, drop_remainder=True)
    return windows.flat_map(rows.of_whole(zip_again, dataset.element_spec))


def _forget_batch_size(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Makes the first dimension of every tensor unknown.

    tf.distribute hands out the last, uneven batches of data that ends only where it sees that sizes may differ; with a
    static batch size it drops what does not fill all replicas.
    """

    def forget(tensor: rows.Tensor) -> rows.Tensor:
        if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
            return tensor
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])

    return dataset.map(rows.of_whole(functools.partial(rows.map_parts, forget), dataset.element_spec))


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

    def divide(batch: Any) -> tf.data.Dataset:
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

    divided = dataset.flat_map(rows.of_whole(divide, spec))
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


def _of_blocks(
    dataset: tf.data.Dataset, context: InputContext, batch_size: int
) -> tuple[Callable[..., Stream], tf.data.Dataset, Any]:
    """Returns the stream of a training on one CPU, its pipeline, and the arrays whose rows a step has to gather."""
    call, arrays, block = context.requests.last, context.requests.arrays, block_size(dataset.element_spec)
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
