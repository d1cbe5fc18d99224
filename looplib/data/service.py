"""Batches that data workers make, on this or other machines: a tf.data service for each, read in turn.

A data worker is a process with a dispatcher and one worker of tf.data service, so that its batches come in their order.
"""

import functools
import re
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf
from absl import logging

from looplib.base.messages import gist
from looplib.data import causes
from looplib.errors import DatasetError, WorkerError

_JOIN = 120.0  # seconds that a data worker has to start, after which it has to give an element
_ANSWER = 5.0  # seconds that it has to answer, and until it is asked again
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # how a client of gRPC begins
_START = "start it with python -m looplib data_worker --port=PORT, and name its HOST:PORT in --data_service"
_MOST_SHOWN = 400  # characters of an error
_SETTINGS = 4  # the type of the frame that answers it


def serve(port: int, host: str, worker_port: int = 0) -> NoReturn:
    """Runs a data worker until a signal ends the process.

    Args:
      port: where trainings find it.
      host: the name or address of this machine, by which trainings reach it.
      worker_port: of the batches; 0 for any free one.

    Raises:
      UsageError: if a port cannot be used.
    """
    tf.config.set_visible_devices([], "GPU")
    service = tf.data.experimental.service
    try:
        dispatcher = service.DispatchServer(service.DispatcherConfig(port=port, protocol="grpc"))
        worker = service.WorkerServer(
            service.WorkerConfig(f"localhost:{port}", f"{host}:%port%", worker_port, protocol="grpc")
        )
    except tf.errors.OpError as error:
        raise WorkerError(
            f"no data worker can listen on port {port}: {gist(error)}; name a port that is free"
        ) from error
    while dispatcher and worker:  # in a wait for them, Python would not see signals
        time.sleep(60)


def served(
    who: str, addresses: Sequence[str], parts: Sequence[tf.data.Dataset], cardinality: int, skips: bool
) -> tf.data.Dataset:
    """Returns a data set whose elements are made by data workers, and come in turn: one of each, in its order.

    Reading it fails where an element is not the next one, as after the loss of one on its way.

    Args:
      who: the class of the task, for messages.
      addresses: of the data workers, HOST:PORT.
      parts: what each of them makes.
      cardinality: of all elements.
      skips: whether elements that were used before are read again.

    Raises:
      UsageError: for a part that runs Python, or a data worker that does not answer.
    """
    ops = set[str]().union(*map(_ops, parts))
    if not ops.isdisjoint(causes.PYTHON):
        raise DatasetError(
            f"{who}.dataset runs Python, as context.records, numpy_function, py_function and from_generator do, and a "
            "data worker cannot run it; read by context.indices or files by tf.data, such as tf.data.TFRecordDataset, "
            "and process the examples by TensorFlow's ops; or leave out --data_service"
        )
    if skips and (conditions := sorted({causes.condition(op, by_skipping=True) for op in ops} - {""})):
        logging.warning(
            "the data workers make again what %s.dataset has given before, to skip it; this is exact only if %s",
            who, ", and ".join(conditions),
        )  # fmt: skip
    read = []
    for address, part in zip(addresses, parts, strict=True):
        _reach(address)
        read.append(_in_order(address, part).prefetch(2))
    turns = tf.data.Dataset.range(len(read)).repeat()
    dataset = read[0] if len(read) == 1 else tf.data.Dataset.choose_from_datasets(read, turns, False)
    known = cardinality != tf.data.UNKNOWN_CARDINALITY
    return dataset.apply(tf.data.experimental.assert_cardinality(cardinality)) if known else dataset


def _in_order(address: str, part: tf.data.Dataset) -> tf.data.Dataset:
    off = tf.data.experimental.service.ShardingPolicy.OFF
    numbered = part.enumerate().apply(
        tf.data.experimental.service.distribute(off, f"grpc://{address}", compression=None)
    )
    cure = "start each data worker by itself, name all in --data_service, and resume the run"

    @tf.autograph.experimental.do_not_convert
    def check(due: tf.Tensor, given: tuple[tf.Tensor, Any]) -> Any:
        number, element = given
        text = tf.strings.format(
            f"DataError: the data service at {address} gave batch {{}} where batch {{}} was due: it has several data "
            f"workers, or was restarted, or a batch was lost on its way; {cure}",
            (number, due),
        )
        with tf.control_dependencies([tf.debugging.Assert(number == due, [text])]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    return tf.data.Dataset.zip((tf.data.Dataset.counter(), numbered)).map(check)


def _ops(dataset: tf.data.Dataset) -> set[str]:
    """Returns the types of the ops in the functions of a pipeline."""
    graph = tf.raw_ops.DatasetToGraphV2(input_dataset=tf.data.experimental.to_variant(dataset))
    functions = tf.compat.v1.GraphDef.FromString(graph.numpy()).library.function
    return {node.op for function in functions for node in function.node_def}


def _reach(address: str) -> None:
    """Waits until a data worker gives an element; raises `UsageError` if that takes too long."""
    end = time.monotonic() + _JOIN
    while why := _unanswered(address):
        if time.monotonic() > end:
            raise WorkerError(f"the data worker at {address} does not answer within {_JOIN:.0f} s ({why}); {_START}")
        time.sleep(0.2)
    _try_out(address)


@functools.cache
def _try_out(address: str) -> None:
    found: list[str] = []

    def read() -> None:
        try:
            next(iter(_in_order(address, tf.data.Dataset.range(1))))
            found.append("")
        except tf.errors.OpError as error:
            found.append(gist(error))

    thread = threading.Thread(target=read, name="looplib-data-service", daemon=True)  # TensorFlow waits without end
    thread.start()
    thread.join(_JOIN)
    if why := found[0] if found else f"no data within {_JOIN:.0f} s":
        raise WorkerError(f"no data comes from the data worker at {address} ({why}); {_START}")


def _unanswered(address: str) -> str:
    """Returns why no server of gRPC answers at an address, as a clause; "" if one does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER) as connection:
            connection.sendall(_HTTP2)
            frame = connection.recv(9)
    except OSError as error:
        return gist(error)
    return "" if frame[3:4] == bytes([_SETTINGS]) else "it is another server"


def lost(addresses: Sequence[str]) -> str:
    """Returns which data worker has ended or is frozen, as a sentence; "" if all answer."""
    for address in addresses:
        if _unanswered(address):
            time.sleep(_ANSWER)  # the network may have failed for a moment
            if why := _unanswered(address):
                return f"the data worker at {address} does not answer ({why}); start it again"
    return ""


def explained(error: tf.errors.OpError) -> str:
    """Returns an error of a data worker as a sentence; "" for any other error."""
    if "Unknown iteration client id" in error.message:
        return "a data worker was restarted and has lost its place in the data; resume the run"
    if not (found := re.search(r"Failed to get element from worker (\S+): (.*)", error.message)):
        return ""
    text = found[2].rpartition("Failed to get element: ")[2][:_MOST_SHOWN]
    return f"the data worker {found[1]} fails: {text}; mend the data or the functions of its maps, and resume the run"
