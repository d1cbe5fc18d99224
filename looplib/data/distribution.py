"""Distribution: the pipelines of a task, and the stream that reads them on a strategy."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from looplib.cluster.collectives import Workers
from looplib.compat import tensorflow as _tf
from looplib.config.run_config import RunConfig
from looplib.data.batches import Batches, BatchSizePeriod
from looplib.data.block_stream import BlockStream, KeyedStream, Rows, block_size, block_size_of_ids
from looplib.data.dataset_requests import BadRecords
from looplib.data.host_stream import HostStream
from looplib.data.input_context import InputContext, per_replica_batch_size
from looplib.data.pipelines import Pipelines, PipelineTask, makes_global_batches
from looplib.data.stream import BatchProperties, ShareLengths, Stream
from looplib.errors import EmptyDataError

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
