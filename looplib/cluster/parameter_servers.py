"""The processes of a cluster with parameter servers: which one this is, its server, and the coordinator's strategy.

TF_CONFIG names the cluster and the task. A worker or parameter server runs a `tf.distribute.Server` and executes the
functions that the coordinator, the task "chief", sends; it never builds a trainer. An op in these may call a function
of looplib in the process that runs it: see `called`.
"""

import functools
import importlib
import logging as python_logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from absl import logging

from looplib.base.messages import gist
from looplib.cluster import environment
from looplib.cluster.preemption import notice
from looplib.errors import CoordinatorGone, ParameterServerError, Preempted, UsageError

# A coordinator counts as gone when its port has not answered this often, with this many seconds in between.
_TRIES, _PAUSE = 3, 1.0


def connect() -> tf.distribute.ParameterServerStrategy:
    """Makes the coordinator's strategy; a worker or parameter server serves in this function, and does not return.

    Raises:
      UsageError: if TF_CONFIG names no such cluster, or a server cannot be reached or started.
      CoordinatorGone: in a worker or parameter server, at the end.
      looplib.Preempted: in a worker or parameter server that a signal asks to end.
    """
    # So that calls to a process that has died fail at once, and another process does them (TensorFlow's own advice).
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    found = _cluster()
    _registered()  # at the same place of the same program, so that all processes give it one token
    if found.task_type == "chief":
        return _strategy(found)
    _serve(found)


def counts() -> tuple[int, int]:
    """Returns the numbers of (workers, parameter servers) that this coordinator is connected to."""
    devices = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices("CPU")]
    tasks = {(device.job, device.task) for device in devices}
    return sum(job == "worker" for job, _ in tasks), sum(job == "ps" for job, _ in tasks)


def called(function: Callable[..., Any], inputs: Sequence[Any], types: Any) -> Any:
    """Calls a function of looplib, in the process that runs this op: that of a worker, in a graph for it.

    That of `tf.numpy_function` runs in the process that made it, here the coordinator's, for all workers.

    Args:
      function: one of a module of looplib, of numpy arrays. Workers find it by its name, as with `pickle`.
      inputs: its arguments, tensors or what becomes one.
      types: the type of its result, or a list of those of its results.

    Returns:
      A tensor, or a list of tensors.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    inputs = [tf.convert_to_tensor(value) for value in (name, *inputs)]
    is_list = isinstance(types, list)
    found = tf.raw_ops.PyFunc(input=inputs, token=_registered()[1], Tout=types if is_list else [types])
    return found if is_list else found[0]


@functools.cache
def _registered() -> tuple[tf.Graph, bytes]:
    """Lets ops call this process; returns the token that names it, and the graph that keeps it registered."""
    with tf.Graph().as_default() as graph:
        result = tf.numpy_function(_answer, [""], tf.int64)
    return graph, result.op.get_attr("token")


def _answer(name: bytes, *inputs: Any) -> Any:
    module, _, function = name.decode().partition(":")
    if not module.startswith("looplib."):
        raise ParameterServerError(f"a worker was asked to call {function} of {module}, which is no part of looplib")
    try:
        return getattr(importlib.import_module(module), function)(*inputs)
    except UsageError as error:  # without its stack, which would be a part of the message that crosses the network
        raise error.with_traceback(None) from None


def _cluster() -> environment.Cluster:
    found = environment.resolve()
    if found is None or not found.parameter_servers:
        names = "the environment defines no cluster" if found is None else f"{found.source} lists no parameter servers"
        raise ParameterServerError(
            f"the strategy is parameter_server, but {names}; expected TF_CONFIG with a chief, workers and ps, as "
            "`python -m looplib launch --workers=2 --parameter_servers=1 -- COMMAND` sets it"
        )
    if found.task_type == "evaluator":
        raise ParameterServerError(
            f"{found.source} declares this process as an evaluator, which a parameter_server training does not "
            "coordinate; start it with --strategy=one_device --mode=continuous_eval"
        )
    return found


def _strategy(found: environment.Cluster) -> tf.distribute.ParameterServerStrategy:
    spec = tf.train.ClusterSpec(found.spec)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=found.task_type, task_id=found.task_index, rpc_layer="grpc"
    )
    try:
        strategy = tf.distribute.ParameterServerStrategy(resolver)
    except (tf.errors.OpError, ValueError) as error:
        raise ParameterServerError(
            f"the workers and parameter servers of TF_CONFIG cannot be reached ({gist(error)}); start every one of "
            "them with the same command"
        ) from error
    _shorten_messages_about_workers()
    return strategy


def _serve(found: environment.Cluster) -> NoReturn:
    spec, job, index = tf.train.ClusterSpec(found.spec), found.task_type, found.task_index
    # A call may hold a thread while it waits for another process; with fewer of them all could wait for each other.
    threads = max(os.cpu_count() or 1, len(found.workers) + 1)
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads)
    try:
        server = tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc", config=config)
    except tf.errors.OpError as error:
        raise ParameterServerError(
            f"{job} {index} cannot serve at {spec.task_address(job, index)} ({gist(error)}); end the process that uses "
            "that address, or set another one in TF_CONFIG"
        ) from error
    coordinator = found.chief
    logging.info("%s %d serves at %s until the coordinator at %s is gone", job, index, server.target, coordinator)
    try:
        with notice.listening():
            _wait_until_gone(coordinator)
    except Preempted:
        raise Preempted(
            f"ended by {notice.requested}: {job} {index} has stopped serving; run the same command again"
        ) from None
    raise CoordinatorGone(f"{job} {index} served until the coordinator at {coordinator} was gone")


def _wait_until_gone(address: str) -> None:
    """Waits until a port answers, and then until it no longer does."""
    host, _, port = address.rpartition(":")
    seen, missed = False, 0
    while missed < _TRIES:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            seen, missed = True, 0
        except OSError:
            missed += seen
        time.sleep(_PAUSE)


def _shorten_messages_about_workers() -> None:
    """Makes TensorFlow log one line when a worker is lost or comes back, in place of dozens with stack traces."""
    logger = tf.get_logger()
    if not any(isinstance(notes, _WorkerMessages) for notes in logger.filters):
        logger.addFilter(_WorkerMessages(logger.getEffectiveLevel()))
        logger.setLevel(python_logging.INFO)  # TensorFlow logs the return of a worker as information


class _WorkerMessages(python_logging.Filter):
    """Recognizes the messages of the ClusterCoordinator of TensorFlow 2.20 and 2.21; others are not changed."""

    _NOISE = (
        "Cluster update failed", "Remote function on worker", "Start cancelling closures", " /job:worker/task",
        "A `tf.distribute.experimental.ParameterServerStrategy` method is",
    )  # fmt: skip

    def __init__(self, level: int) -> None:
        super().__init__()
        self._level = level
        self._gone: set[str] = set()

    def filter(self, record: python_logging.LogRecord) -> bool:
        """Returns whether TensorFlow's record is shown."""
        message, worker = str(record.msg), str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        if message.startswith("Worker %s failed with"):
            if worker not in self._gone:
                self._gone.add(worker)
                logging.warning("%s is gone; the other workers do its steps until it is back", worker)
            return False
        if message.startswith("Worker %s has been recovered") and worker in self._gone:
            self._gone.remove(worker)
            logging.warning("%s is back", worker)
        if "MultiDeviceSaver.save" in message:  # each save of the servers is traced once
            return False
        return record.levelno >= self._level and not message.lstrip("\n").startswith(self._NOISE)
