"""Saves: a snapshot of all state in memory, written in the background, committed last, pruned by the policy.

TensorFlow's own asynchronous checkpoints fail on Keras 3 variables (TensorFlow 2.20, Keras 3.15: the second save makes
variables inside a `tf.function`). A snapshot reads each value as TensorFlow would save it, under the key that
TensorFlow gave it, and is written as the same files.

A position in the data may hold a shuffle buffer of many megabytes, so it is not sent to the chief. Where there are
several workers, each writes its own file `ckpt-<step>.position-<worker>-of-<workers>`, and the chief lists all of
them, with sizes and checksums, in the marker.
"""

import contextlib
import dataclasses
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base import files, folders
from looplib.base.messages import gist, with_cure
from looplib.checkpoint.directory import RunDirectory
from looplib.cluster import peers
from looplib.cluster.collectives import PEER_ERRORS, Workers
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.compat.row_updates import emptied, is_held, is_table, without_copy
from looplib.errors import SaveError, UsageError
from looplib.run import commits
from looplib.run.commits import FileChecksum
from looplib.run.mirror import Mirror
from looplib.task import averages
from looplib.task.plain import as_bytes, as_number
from looplib.task.record import Contents, RunRecord, VariableNames
from looplib.task.state import variables_of
from looplib.weights.names import LiveVariables
from looplib.weights.restoring import contents_of, objects_of, restore

_PROBE = ".seen_by_all"
_ABSENT = bytes(hashlib.sha256().digest_size)


class Checkpoints:
    """The checkpoints of one run directory, written by one process: where several workers train, by the chief.

    A save takes a snapshot of the state and hands it to a thread that writes, commits and tidies; there is one save at
    a time. The first save of a process, from which the keys are learned, and every save of state that only TensorFlow
    can write (a lookup table, say), let the caller wait.

    Args:
      run: the run directory, opened, with a `model_dir`. It is asked whether it is still this process's before files
        are written, and before they are committed. All its workers read all values together, because some are summed
        over workers.
      objects: dict from name to trackable object: the complete state.
      sync: puts on the disk what the checkpoint calls reported; called before the commit.

    Attributes:
      committed: committed paths not yet announced.
    """

    def __init__(self, run: RunDirectory, objects: Mapping[str, Any], sync: Callable[[], None]) -> None:
        self.directory, self._check, self._sync = run.checkpoints, run.check_lock, sync
        self._workers, self._mirror, self._policy, self._trains = run.workers, run.mirror, run.policy, run.trains
        self._checkpoint = tf.train.Checkpoint(**objects)
        self._objects = objects
        _ = self._checkpoint.save_counter  # makes it, as TensorFlow's own tools expect one
        self._snapshots: Snapshots | None = None
        self._noted: tuple[VariableNames, dict[str, Contents]] | None = None
        self._options = _own_files()
        variables = [one for _, one in variables_of(objects)]
        by_servers = any(is_table(one) and tf.DeviceSpec.from_string(one.device).job == "ps" for one in variables)
        self._by_workers = self._workers.count > 1 and any(map(is_held, variables))
        self._by_holders = by_servers or self._by_workers
        if self._by_holders:
            self._policy = dataclasses.replace(self._policy, in_background=False)
        if by_servers:
            self._options = _files_of_servers(self.directory)
        if self._by_workers:
            _check_seen_by_workers(self.directory, self._workers)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.committed: list[str] = []
        self._has_committed = False

    def save(self, step: int, wait: bool, position: bytes = b"") -> str:
        """Saves the state as `ckpt-<step>`; returns the path of the checkpoint.

        Args:
          step: the global step.
          wait: returns only when it is committed.
          position: this worker's position in its data, for a separate file; with one worker it is in the state.

        Raises:
          UsageError: if it, or the save before it, could not be written.
        """
        self.wait()
        path = commits.path_of(self.directory, step)
        try:
            with averages.at_rest():
                self._save(path, step, position)
        except (OSError, tf.errors.OpError) as error:
            failure = self._failure(path, error)
            if failure is error:
                raise
            raise failure from error
        if wait:
            self.wait()
        return path

    def _save(self, path: str, step: int, position: bytes) -> None:
        folders.make_folder(*os.path.split(self.directory))  # of each worker's machine
        if self._workers.is_chief:
            self._check()
            self._set_aside([done.step for done in commits.committed(self.directory) if done.step >= step])
            commits.set_foreign_aside(self.directory, step)
            if self._workers.count > 1:
                commits.begin(path)  # before any worker writes
        positions = write_position(path, position, self._workers, self._mirror)
        if self._by_workers:
            self._write_own_parts(path)
            if self._workers.is_chief:
                self._commit(path, step, positions)
            return
        if not self._workers.is_chief:
            self._read_with_chief()
            return
        if not self._policy.in_background or self._snapshots is None:
            commits.begin(path)
            self._checkpoint.write(path, self._options)
            self._commit(path, step, positions)
            self._learn_from(path)
            return
        snapshot = self._snapshots.take()

        def write() -> None:
            try:
                commits.begin(path)
                self._snapshots.write(path, snapshot)
                snapshot.clear()
                self._commit(path, step, positions)
            except Exception as error:  # of any kind; it is raised where the run waits for this save
                self._error = self._failure(path, error)

        self._thread = threading.Thread(target=write, name="looplib-save", daemon=True)
        self._thread.start()
        peers.current.wait_for_thread(self._thread)

    def _write_own_parts(self, path: str) -> None:
        """Writes the parts of tables that this worker holds, as the chief all else, and merges the files of all.

        Raises:
          UsageError: for state that only TensorFlow can write.
        """
        if self._snapshots is None:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    written = self._checkpoint.write(os.path.join(folder, "ckpt"), self._options)
                    self._snapshots = Snapshots(self._checkpoint, written)
                except NotImplementedError as error:
                    raise SaveError(
                        f"workers save the parts of a ShardedEmbedding, and only TensorFlow can save {error}; leave it "
                        "out of the trainer, or use keras.layers.Embedding"
                    ) from error
        snapshot = self._snapshots.take()
        is_own = {key: self._workers.is_chief for key in snapshot} | self._snapshots.held
        own = {key: value for key, value in snapshot.items() if is_own[key]}
        if own:
            self._snapshots.write(f"{path}.of-{self._workers.index}", own)
        counts = self._workers.gather(np.int64(len(own)))  # when all have written
        if self._workers.is_chief:
            written = [f"{path}.of-{number}" for number, count in enumerate(counts) if count]
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=written, destination_prefix=path, delete_old_dirs=False)

    def set_aside_after(self, step: int) -> None:
        """Moves the checkpoints of steps after `step` into `set_aside`; waits for a save under way."""
        self.wait()
        if self._workers.is_chief:
            self._set_aside([found.step for found in commits.listing(self.directory) if found.step > step])

    def _set_aside(self, steps: list[int]) -> None:
        for step in steps:  # newest first, so that a run which is killed in between resumes from the newest one left
            folders.delete(f"{commits.path_of(self.directory, step)}.")
            place = commits.set_aside(self.directory, step)
            logging.warning("the checkpoint of step %d was superseded by this run; moved to %s", step, place)

    def _learn_from(self, path: str) -> None:
        """Gets ready to take snapshots, by the keys of a checkpoint that TensorFlow wrote."""
        if self._policy.in_background and self._snapshots is None:
            try:
                self._snapshots = Snapshots(self._checkpoint, path)
            except NotImplementedError as error:
                self._policy = dataclasses.replace(self._policy, in_background=False)
                logging.info("only TensorFlow can save %s; training waits for each save", error)

    def _read_with_chief(self) -> None:
        """Reads all values together with the chief, because some of them are summed over workers when they are read."""
        if self._snapshots is not None:
            self._snapshots.take()
            return
        with tempfile.TemporaryDirectory() as folder:
            self._learn_from(self._checkpoint.write(os.path.join(folder, "ckpt")))

    def _commit(self, path: str, step: int, positions: Mapping[str, FileChecksum]) -> None:
        self._sync()
        self._check()
        commits.commit(path, step, positions)
        self.committed.append(path)
        self._has_committed = True
        self._prune()
        if not commits.list_is_foreign(self.directory):
            self._list()
        self._mirror.check(saved=True)

    def _list(self) -> None:
        """Writes TensorFlow's text file that lists the checkpoints, for tf.train.latest_checkpoint and other tools."""
        names = [os.path.basename(done.path) for done in reversed(commits.committed(self.directory))]
        lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
        files.write_whole(os.path.join(self.directory, "checkpoint"), "\n".join(lines) + "\n")

    def _failure(self, path: str, error: Exception) -> Exception:
        # Values are read by all workers together, so that a save also fails where another worker is lost.
        if isinstance(error, UsageError) or (self._workers.count > 1 and isinstance(error, PEER_ERRORS)):
            return error
        return _tf.lost_server(error) or SaveError(
            f"the checkpoint {path} could not be saved: {with_cure(error, 'free space or fix the permissions')}; then "
            "run the same command again"
        )

    @property
    def saving(self) -> bool:
        """Returns whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits for a save under way; raises `UsageError` if it failed."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises the `UsageError` of a save that has failed meanwhile; does not wait."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def add_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Adds metrics, by "<evaluator>/<metric>", to the checkpoint of a step, if there is one, and prunes."""
        metrics: dict[str, set[str]] = {}
        for name, _, metric in (score.partition("/") for score in scores):
            metrics.setdefault(name, set()).add(metric)
        self._policy.check(metrics)
        self.wait()
        numbers = {name: as_number(f"the score {name!r}", score) for name, score in scores.items()}
        for done in commits.committed(self.directory):
            if done.step == step:
                commits.add_scores(done, numbers)
        self._prune()

    def finish(self) -> None:
        """Waits for a save under way; after saves, also prunes what has come from a store since."""
        self.wait()
        if self._has_committed:
            self._mirror.fetch_older()
            self._prune()

    def _prune(self) -> None:
        kept = commits.committed(self.directory)
        wanted = {done.step for rule in self._policy.keep for done in rule.select(kept)}
        for done in kept[1:]:
            if done.step not in wanted:
                commits.remove(done)

    def restore(self, path: str, partial: bool = False) -> None:
        """Restores the state; waits for a save under way.

        Args:
          path: the checkpoint.
          partial: whether it and the objects here may both hold more; else it may, for a job that does not train.
        """
        self.wait()
        with averages.at_rest():
            if partial:
                from looplib.weights.loading import take_what_fits  # here, as few restores need it

                take_what_fits(self._objects, path)
                return
            for _, variable in variables_of(self._objects):
                if is_table(variable):
                    emptied(variable)  # TensorFlow reads the new value before it drops the old one
            with tempfile.TemporaryDirectory() as folder:
                values = self._write_own_values(path, folder) if self._by_workers else path
                restore(self._checkpoint, self._objects, path, self._trains, self._options, values)

    def _write_own_values(self, path: str, folder: str) -> str:
        """Writes the values of a checkpoint without the rows that other workers hold; returns the path of these files.

        TensorFlow's restore would give this worker all of them.
        """
        reader = tf.train.load_checkpoint(path)
        if (graph := _tf.object_graph(reader)) is None:
            return path
        live = objects_of(graph, self._checkpoint)
        keys = {each.checkpoint_key: live.get(n) for n, node in enumerate(graph.nodes) for each in node.attributes}
        absent = {key: one.shape for key, one in keys.items() if is_held(one) and not _has_rows(one)}
        types = reader.get_variable_to_dtype_map()
        own = [key for key in types if key not in absent]
        values = tf.raw_ops.RestoreV2(
            prefix=path, tensor_names=own, shape_and_slices=[""] * len(own), dtypes=[types[key] for key in own]
        )
        empty = {key: tf.zeros(shape, types[key]) for key, shape in absent.items() if key in types}
        written = os.path.join(folder, "values")
        Snapshots.write(written, {**dict(zip(own, values)), **empty})
        return written

    def differs(self, step: int) -> bool:
        """Returns whether the variables differ from the checkpoint of a step; False on workers that do not write.

        Tables that parameter servers write are not compared, as no process could hold them.
        """
        self.wait()
        if self._by_holders:
            return False
        with tempfile.TemporaryDirectory() as folder, averages.at_rest():
            live = self._checkpoint.write(os.path.join(folder, "live"), _own_files())
            if not self._workers.is_chief:
                return False
            path = commits.path_of(self.directory, step)
            if not os.path.exists(f"{path}.commit"):
                return True
            ours, theirs = tf.train.load_checkpoint(live), tf.train.load_checkpoint(path)
            keys = [key for key in ours.get_variable_to_shape_map() if _tf.is_variable_key(key)]
            return any(
                not theirs.has_tensor(key)  # after a partial restore
                or as_bytes(np.asarray(ours.get_tensor(key))) != as_bytes(np.asarray(theirs.get_tensor(key)))
                for key in keys
                if not key.startswith("save_counter/")
            )

    def note_in(self, record: RunRecord) -> None:
        """Notes in the record of a checkpoint what its variables are called, and what no variable holds."""
        if self._noted is None:
            self._noted = LiveVariables(self._objects).record(), contents_of(self._objects)
        record.names, record.contents = self._noted


def write_position(path: str, position: bytes, workers: Workers, mirror: Mirror) -> dict[str, FileChecksum]:
    """Writes this worker's position, and waits until all workers have written theirs.

    A worker that cannot write its file logs a warning: the run is worth more than a quick resume.

    Args:
      path: the checkpoint's path. The chief has made room for its files before it calls this.
      position: what `TaskLoop.position` returned; b"" for none.
      workers: the workers.
      mirror: the copy of the run directory, by which the file reaches the chief on another machine.

    Returns:
      The files that were written, by name, for `commits.commit`; {} for one worker.
    """
    if workers.count == 1 or not (sizes := workers.gather(np.int64(len(position)))).any():
        return {}
    digest = _ABSENT
    paths = [commits.position_path(path, index, workers.count) for index in range(workers.count)]
    if position:
        try:
            files.write_whole(paths[workers.index], position, durable=False)
            if not workers.is_chief:
                mirror.share(paths[workers.index])
            digest = hashlib.sha256(position).digest()
        except (OSError, tf.errors.OpError) as error:
            logging.warning(
                "worker %d cannot write its position in the data beside %s (%s), so that a resumed run will skip the "
                "data already used; model_dir has to be writable by all workers",
                workers.index,
                path,
                gist(error),
            )
    digests = [row.tobytes() for row in workers.gather(np.frombuffer(digest, np.uint8))]
    written = [item for item in zip(paths, sizes, digests) if item[2] != _ABSENT]
    written = [item for item in written if not workers.is_chief or mirror.take(item[0])]
    return {os.path.basename(path): {"bytes": int(size), "sha256": digest.hex()} for path, size, digest in written}


def _own_files() -> tf.train.CheckpointOptions:
    """Returns options that make this process write all files, also for variables on parameter servers."""
    return tf.train.CheckpointOptions(experimental_io_device=host_device())


def _files_of_servers(directory: str) -> tf.train.CheckpointOptions:
    """Returns options that make each parameter server write and read its own parts of tables.

    So no process needs memory for a whole table. Training waits for these saves.

    Raises:
      UsageError: if a parameter server does not see the directory.
    """
    with _probe(directory) as probe:
        try:
            for device in tf.config.list_logical_devices("CPU"):
                if tf.DeviceSpec.from_string(device.name).job == "ps":
                    with tf.device(device.name):
                        tf.io.read_file(probe)
        except tf.errors.OpError as error:
            raise SaveError(
                f"the parameter server {device.name} does not see {directory} ({gist(error)}); each one writes its own "
                "parts of a ShardedEmbedding there: use a folder that all machines share as model_dir"
            ) from error
    return tf.train.CheckpointOptions()


@contextlib.contextmanager
def _probe(directory: str) -> Iterator[str]:
    """Yields the path of a file in a directory, which is removed after the `with` block."""
    folders.make_folder(*os.path.split(directory))
    path = os.path.join(directory, _PROBE)
    files.write_whole(path, "", durable=False)
    try:
        yield path
    finally:
        folders.remove(directory, os.path.basename(path))


def _check_seen_by_workers(directory: str, workers: Workers) -> None:
    """Raises `UsageError` if a worker does not see the directory, where each writes its parts of tables."""
    path = os.path.join(directory, _PROBE)
    with _probe(directory) if workers.is_chief else contextlib.nullcontext():
        workers.gather(0)  # it is there
        seen = workers.gather(np.int64(os.path.exists(path)))
    if not seen.all():
        raise SaveError(
            f"worker {int(np.argmin(seen))} does not see {directory}; each one writes its own parts of a "
            "ShardedEmbedding there: use a folder that all machines share as model_dir"
        )


def _has_rows(variable: Any) -> bool:
    return bool(variable.shape[0])


def host_device() -> str:
    """Returns the device name of the CPU of this process; other connected processes have CPUs too."""
    with tf.device("/cpu:0"):
        return tf.constant(0).device


class Snapshots:
    """Takes snapshots of the objects of one `tf.train.Checkpoint`, and writes them as checkpoints.

    Args:
      checkpoint: the `tf.train.Checkpoint`.
      path: a checkpoint that it has written, for its keys.

    Attributes:
      held: the keys of parts of tables, and of their slots, that replicas hold; True for those of this process.

    Raises:
      NotImplementedError: if it holds a table or other state that only TensorFlow can save, while training waits.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, path: str) -> None:
        reader = tf.train.load_checkpoint(path)
        graph = _tf.object_graph(reader)
        if graph is None:
            raise NotImplementedError(f"with TensorFlow {tf.__version__} any checkpoint")
        self._graph = reader.get_tensor(_tf.OBJECT_GRAPH_KEY)
        self._readers: dict[str, Callable[[], tf.Tensor]] = {}
        self.held: dict[str, bool] = {}
        objects = objects_of(graph, checkpoint)
        for number, node in enumerate(graph.nodes):
            for attribute in node.attributes:
                self._readers[attribute.checkpoint_key] = _reader(objects.get(number), attribute)
                if is_held(objects.get(number)):
                    self.held[attribute.checkpoint_key] = _has_rows(objects[number])

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
        """Writes a snapshot, which `take` returned, as the files of a checkpoint."""
        with tf.device(host_device()):
            tf.raw_ops.SaveV2(
                prefix=path,
                tensor_names=list(snapshot),
                shape_and_slices=[""] * len(snapshot),
                tensors=list(snapshot.values()),
            )


def _reader(value: Any, attribute: Any) -> Callable[[], tf.Tensor]:
    """Returns the function that reads one saved value of an object."""
    if isinstance(value, tf.train.experimental.PythonState) and attribute.name == "py_state":
        return lambda: tf.constant(value.serialize())
    value = _keras.tf_variable(value)
    if isinstance(value, tf.Variable) and attribute.name == "VARIABLE_VALUE":
        return lambda: tf.identity(without_copy(value))
    raise NotImplementedError(attribute.checkpoint_key)
