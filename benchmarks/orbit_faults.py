"""What Orbit loses when things go wrong: `python -m benchmarks.orbit_faults --faults=kill,damage`.

Each fault meets real processes and real files; a row says how often it was tried and what came of it. A process is this
file with `--worker`: it trains an MLP on scikit-learn's digits with dropout, a shuffled input, momentum and a schedule,
so that a resume which forgets one of them ends with other weights. Faults of the disk need root, for a tmpfs.

Orbit stands at settings that add up, each through public interfaces, so that none of its means goes unused:
  plain: StandardTrainer, StandardEvaluator and CheckpointManager, as Orbit's documentation shows them.
  iterator: the checkpoint also holds the input's iterator, which Orbit leaves to the user.
  seeds: the checkpoint also holds the state of Keras's dropout, which tf.train.Checkpoint does not find by itself.
  preemption: orbit.actions.SaveCheckpointIfPreempted.
  recovery: the Model Garden's RecoveryCondition and RecoveryAction, which look at the mean loss of a loop.
"""

import collections
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import keras
import numpy as np
import orbit
import tensorflow as tf
from absl import app, flags

_FAULTS = flags.DEFINE_list("faults", None, "The faults to try; all by default.")
_WORKER = flags.DEFINE_string("worker", None, "JSON: be the process that meets the fault; see DEFAULTS.")
_OUTPUT = flags.DEFINE_string("output", "build/orbit_faults.json", "The file to write the rows to.")
_KILLS = flags.DEFINE_integer("kills", 6, "Kills of each setting, half of them during saves.", lower_bound=2)

_TRAIN, _BATCH = 1437, 64  # examples; the other 360 are for evaluation
_STEPS, _MOST, _LOOP, _SAVES, _EVALUATIONS = 1500, 50_000, 10, 200, 500
_KEPT = ["iterator", "seeds"]
_BEST = [*_KEPT, "preemption"]
_STEP = r"train \| step: +(\d+) \| steps/sec"
_SAVED = r"saved checkpoint to .*-(\d+)\.$"
_EVALUATES = r" eval \| step: +(\d+) \| running"
_ACCURACY = r" eval .*'percent': np\.float32\((\d+)"
_STARTED = r"WORKER started at (\d+)"
_NOISE = r"tensorflow\.[\w.]*\.|\{\{.*?\}\} *|/\S*/"  # of an error message

_COLUMNS = ["fault", "settings", "tried", "outcome"]

DEFAULTS = {
    "directory": "",  # where the checkpoints go
    "result": "",  # file to write weights and order to at the end, or none
    "settings": _BEST,
    "steps": _STEPS,  # global step to train to
    "keep": 3,  # checkpoints
    "eval_repeats": 1,  # how often an evaluation reads the test set
    "activation": "relu",
    "nan_input": -1,  # index of the batch, as the iterator counts, whose features are NaN
    "nan_gradient": -1,  # index of the batch whose loss is finite and whose gradient is NaN
    "stall": -1,  # index of the batch that never comes
}


class _Task(orbit.StandardTrainer, orbit.StandardEvaluator):
    """The classifier, trained and evaluated as orbit/examples/single_task shows."""

    def __init__(self, run):
        from sklearn import datasets  # a second of import that the parent need not pay

        self.run, (features, labels) = run, datasets.load_digits(return_X_y=True)
        self.features, self.labels = tf.constant(features / 16, tf.float32), tf.constant(labels, tf.int64)
        self.dropouts = [keras.layers.Dropout(0.3) for _ in range(2)]
        self.model = keras.Sequential([keras.Input((64,))])
        for dropout in self.dropouts:
            self.model.add(keras.layers.Dense(1024, run["activation"]))
            self.model.add(dropout)
        self.model.add(keras.layers.Dense(10))
        self.optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, _STEPS, 0.1), momentum=0.9)
        self.optimizer.build(self.model.trainable_variables)
        self.step = self.optimizer.iterations.value
        self.order = tf.Variable(tf.zeros(_MOST, tf.int64))  # a number for the examples of each step
        self.mean = keras.metrics.Mean()
        train = tf.data.Dataset.range(_TRAIN).shuffle(_TRAIN, seed=1).repeat().batch(_BATCH)
        train = train.enumerate().map(self._load).prefetch(2)
        # iter() of an iterator is itself, so the trainer's iterator is one that a checkpoint can hold.
        self.input = iter(train) if "iterator" in run["settings"] else train
        test = tf.data.Dataset.range(_TRAIN, len(labels)).repeat(run["eval_repeats"]).batch(_BATCH)
        orbit.StandardTrainer.__init__(self, self.input)
        orbit.StandardEvaluator.__init__(self, test.map(lambda ids: self._load(tf.int64.min, ids)))

    def _load(self, index, ids):
        features = tf.where(tf.equal(index, self.run["nan_input"]), np.nan, tf.gather(self.features, ids))
        if self.run["stall"] >= 0:
            # Reading a pipe that nobody writes to waits in the kernel, as a dead file server lets its readers wait.
            path = tf.where(tf.equal(index, self.run["stall"]), self.run["directory"] + ".pipe", os.devnull)
            features += tf.cast(tf.strings.length(tf.io.read_file(path)), tf.float32)
        return index, ids, features, tf.gather(self.labels, ids)

    def train_loop_begin(self):
        self.mean.reset_state()

    eval_begin = train_loop_begin

    def train_step(self, iterator):
        index, ids, features, labels = next(iterator)
        number = tf.reduce_sum(ids * tf.range(1, _BATCH + 1, dtype=tf.int64))
        self.order.scatter_nd_update([[self.step]], [number])
        with tf.GradientTape() as tape:
            logits = self.model(features, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            if self.run["nan_gradient"] >= 0:  # sqrt(0) is finite, and its gradient times 0 is not
                bad = tf.equal(index, self.run["nan_gradient"])
                loss += tf.sqrt(tf.where(bad, 0.0 * tf.reduce_sum(logits), 1.0)) * tf.where(bad, 1.0, 0.0)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.mean.update_state(loss)

    def train_loop_end(self):
        return {"training_loss": self.mean.result()}

    def eval_step(self, iterator):
        _, _, features, labels = next(iterator)
        self.mean.update_state(tf.equal(tf.argmax(self.model(features), 1), labels))

    def eval_end(self):
        return {"percent": 100 * self.mean.result()}


def work(run):
    """Trains as a dict with the keys of `DEFAULTS` says, from the newest checkpoint of its directory on."""
    keras.utils.set_random_seed(0)
    task, settings = _Task(run), run["settings"]
    parts = {"model": task.model, "optimizer": task.optimizer, "order": task.order}
    if "iterator" in settings:
        parts["iterator"] = task.input
    if "seeds" in settings:
        parts["seeds"] = [dropout.seed_generator.state.value for dropout in task.dropouts]
    checkpoint, schedule = tf.train.Checkpoint(**parts), {"step_counter": task.step, "checkpoint_interval": _SAVES}
    manager = tf.train.CheckpointManager(checkpoint, run["directory"], run["keep"], **schedule)
    actions = []
    if "preemption" in settings:
        actions.append(orbit.actions.SaveCheckpointIfPreempted(None, manager, task.step))
    if "recovery" in settings:
        from official.core import actions as garden  # seconds of import

        condition = garden.RecoveryCondition(task.step, loss_upper_bound=1e6)
        actions.append(orbit.actions.ConditionalAction(condition, garden.RecoveryAction(manager)))
    roles = {"trainer": task, "evaluator": task, "global_step": task.step, "train_actions": actions}
    controller = orbit.Controller(**roles, steps_per_loop=_LOOP, checkpoint_manager=manager)
    print("WORKER started at", int(task.step), flush=True)
    controller.train_and_evaluate(run["steps"], eval_interval=_EVALUATIONS)
    if run["result"]:
        weights = np.concatenate([np.ravel(value) for value in task.model.get_weights()])
        np.savez(run["result"], weights=weights, order=task.order.numpy())


class _Process:
    """A worker that runs in a directory, with what differs from `DEFAULTS`, and what it says."""

    def __init__(self, directory, **options):
        run = json.dumps({**DEFAULTS, **options, "directory": str(directory)})
        # SaveCheckpointIfPreempted asks Google's metadata server where it runs; here nobody is to answer.
        env = {**os.environ, "GCE_METADATA_IP": "127.0.0.1:9"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        self._process = subprocess.Popen([sys.executable, "-u", __file__, "--worker", run], env=env, **pipes)
        self.send, self.lines = self._process.send_signal, []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            self.lines.append(line)

    def last(self, pattern):
        """Returns the number in the last line that matches, -1 without one."""
        return next((int(m[1]) for m in (re.match(pattern, line) for line in reversed(list(self.lines))) if m), -1)

    def until(self, pattern, at_least=0, seconds=120):
        """Waits for a line whose number is not below `at_least`; raises RuntimeError if none comes."""
        end = time.monotonic() + seconds
        while self.last(pattern) < at_least:
            if time.monotonic() > end or not self._reader.is_alive():
                self.end(0)
                raise RuntimeError(f"a worker wrote no line like {pattern}:\n{''.join(self.lines[-20:])}")
            time.sleep(0.002)
        return self

    def end(self, seconds=120, send=None):
        """Waits for the end, after a signal if one is given; returns how it ended, or that it had to be killed."""
        if send:
            self.send(send)
        try:
            ending = f"exit {self._process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ending = f"did not end in {seconds} s"
            self._process.kill()
            self._process.wait()
        self._reader.join()
        errors = [line.strip() for line in self.lines if re.match(r"([\w.]+\.)?\w*(Error|Exception)\b", line)]
        return f"{ending}, {re.sub(_NOISE, '', errors[-1])[:100]}" if errors else ending


def _start_again(directory, reached, **options):
    """Starts a worker for a few more steps where a fault was; returns in words what it did."""
    process = _Process(directory, **{"steps": reached + _LOOP, **options})
    ending = process.end()
    if ending != "exit 0":
        return f"next start: {ending}"
    return f"next start: at step {process.last(_STARTED)}, {reached} had been reached"


def _tally(outcomes):
    return "; ".join(f"{count}x {outcome}" for outcome, count in collections.Counter(outcomes).items())


def _stored(directory):
    """Returns the steps of the checkpoints that lie in a directory, sorted."""
    return sorted(int(path.stem.split("-")[1]) for path in pathlib.Path(directory).glob("ckpt-*.index"))


# Faults: generators of (fault, Orbit's settings, how often tried, outcome), given an empty folder.


def kill(folder):
    """SIGKILL during steps and during saves."""
    for settings in ([], ["iterator"], _KEPT):
        base = folder / "+".join(["run", *settings])
        for name in ("reference", "control"):
            _Process(base / name, settings=settings, result=str(folder / f"{name}.npz")).end()
        expected, control = np.load(folder / "reference.npz"), np.load(folder / "control.npz")
        if any((expected[key] != control[key]).any() for key in expected):
            raise RuntimeError("two uninterrupted runs differ, so nothing can be said of interrupted ones")
        for moment in ("steps", "a save"):
            endings, lost, differ, cut = [], [], collections.Counter(), 0
            for number in range(_KILLS.value // 2):
                directory, result = base / f"{moment}-{number}", folder / "result.npz"
                process = _Process(directory, settings=settings).until(_STEP, random.randrange(230, 1200))
                files = set(os.listdir(directory))
                while moment == "a save" and set(os.listdir(directory)) <= files:  # until its first file is there
                    time.sleep(0.0002)
                time.sleep(random.uniform(0, 0.01))
                process.end(send=signal.SIGKILL)
                listed = re.split(r'[":\s]+', (directory / "checkpoint").read_text())
                found = {re.match(r"\w+(-\d+)?", name)[0] for name in os.listdir(directory)}
                cut += not found <= {"checkpoint", *listed}
                again = _Process(directory, settings=settings, result=str(result))
                endings.append(again.end())
                if endings[-1] == "exit 0":
                    lost.append(process.last(_STEP) - again.last(_STARTED))
                    got = np.load(result)
                    differ.update(key for key in expected if (got[key] != expected[key]).any())
            text = f"next start: {_tally(endings)}; steps lost {sorted(lost)}; saves cut short {cut}; "
            text += f"final weights differ in {differ['weights']}, example order in {differ['order']}"
            yield f"SIGKILL during {moment}", settings, len(endings), text


def damage(folder):
    """A checkpoint's files damaged."""
    whole = folder / "whole"
    _Process(whole, steps=600).end()
    newest = _stored(whole)[-1]
    data, index, state = f"ckpt-{newest}.data-00000-of-00001", f"ckpt-{newest}.index", "checkpoint"
    size = (whole / data).stat().st_size

    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    damages = {
        "newest data file truncated": (data, [0, 1000, size // 2, size - 1]),
        "newest data file, a bit flipped": (data, [flip]),
        "newest data file removed": (data, [os.unlink]),
        "newest index truncated": (index, [0, 1000]),
        "newest index, a bit flipped": (index, [flip]),
        "newest index removed": (index, [os.unlink]),
        "state file `checkpoint` emptied": (state, [0]),
        "state file `checkpoint` truncated": (state, [20, 60]),
        "state file `checkpoint` removed": (state, [os.unlink]),
    }
    for fault, (name, ways) in damages.items():
        outcomes = []
        for way in ways:
            directory = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "run"
            shutil.copytree(whole, directory)
            way(directory / name) if callable(way) else os.truncate(directory / name, way)
            outcomes.append(_start_again(directory, newest))
        yield fault, _BEST, len(ways), f"{_tally(outcomes)} (intact there: {_stored(whole)[:-1]})"


def disk(folder):
    """Nothing can be written to the disk or the directory for a while."""
    free = {"disk full": 0, "disk full but for half a checkpoint": 0.5, "disk full but for a data file": 1}
    for keep in (1, 2):
        for fault in (*free, "disk read-only", "directory replaced by a file"):
            mount = pathlib.Path(tempfile.mkdtemp(dir=folder))
            directory, aside, filler = mount / "run", mount / "aside", mount / "filler"
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "none", mount], check=True)
            try:
                process = _Process(directory, keep=keep).until(_SAVED, 200)
                space, before = os.statvfs(mount), _stored(directory)
                if fault in free:
                    size = free[fault] * (directory / f"ckpt-{before[-1]}.data-00000-of-00001").stat().st_size
                    filler.write_bytes(bytes((space.f_bavail - int(-(-size // space.f_frsize))) * space.f_frsize))
                elif fault == "disk read-only":
                    subprocess.run(["mount", mount, "-o", "remount,ro"], check=True)
                else:
                    directory.rename(aside)
                    directory.write_text("")
                ending = process.end()
                subprocess.run(["mount", mount, "-o", "remount,rw"], check=True)
                filler.unlink(missing_ok=True)
                if aside.exists():
                    directory.unlink()
                    aside.rename(directory)
                ending += f"; older checkpoints lost: {sorted(set(before) - set(_stored(directory))) or 'none'}"
                again = _start_again(directory, process.last(_STEP), keep=keep)
                yield f"{fault} for a while, max_to_keep={keep}", _BEST, 1, f"{ending}; {again}"
            finally:
                subprocess.run(["umount", "-l", mount], check=True)


def terminate(folder):
    """SIGTERM, and an input that stalls for ever."""
    moments = {
        "SIGTERM during steps": ({}, _STEP, 700),
        "SIGTERM during an evaluation": ({"eval_repeats": 200}, _EVALUATES, 0),
        "SIGTERM during the last evaluation": ({"eval_repeats": 200, "steps": 500}, _EVALUATES, 0),
        "SIGTERM during an input stall": ({"stall": 703}, _STEP, 700),
        "input stalls for ever": ({"stall": 703}, _STEP, 700),
    }
    for settings in (_KEPT, _BEST):
        for fault, (options, pattern, step) in moments.items():
            directory = folder / f"{len(settings)}-{fault}"
            os.mkfifo(f"{directory}.pipe")
            process = _Process(directory, settings=settings, **options).until(pattern, step)
            time.sleep(0.5)
            begin, before, said = time.monotonic(), process.last(_STEP), len(process.lines)
            ending = process.end(60, send=signal.SIGTERM if "SIGTERM" in fault else None)
            text = f"{ending} after {time.monotonic() - begin:.1f} s, {process.last(_STEP) - before} steps and "
            text += f"{len(process.lines) - said} lines of log"
            again = _start_again(directory, process.last(_STEP), settings=settings)
            yield fault, settings, 1, f"{text}; {again}"


def nan(folder):
    """A NaN at one step."""
    cases = {
        # In a graph TensorFlow fuses dense and relu, and makes 0 of a NaN: the weights break and the loss does not.
        "NaN in one batch, within a loop, relu": {"nan_input": 703},
        "NaN in one batch, within a loop, tanh": {"nan_input": 703, "activation": "tanh"},
        "NaN gradient, within a loop": {"nan_gradient": 703},
        "NaN gradient, at the last step before a save": {"nan_gradient": 609},
    }
    for fault, options in cases.items():
        for settings in ([], ["recovery"], [*_KEPT, "recovery"]):
            directory = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "run"
            process = _Process(directory, settings=settings, **options)
            ending, kept, poisoned = process.end(), _stored(directory), []
            for step in kept:
                reader = tf.train.load_checkpoint(str(directory / f"ckpt-{step}"))
                names = [name for name, kind in reader.get_variable_to_dtype_map().items() if kind == tf.float32]
                poisoned += [step] if not all(np.isfinite(reader.get_tensor(name)).all() for name in names) else []
            text = f"{ending} at step {process.last(_STEP)}; kept {kept}, with NaN {poisoned or 'none'}"
            yield fault, settings, 1, f"{text}; last accuracy {process.last(_ACCURACY)}%"


def two_processes(folder):
    """Two processes on one directory, at once and one after the other."""
    pair = [_Process(folder / "together", keep=2) for _ in range(2)]
    text = "; ".join(process.end() for process in pair)
    again = _start_again(folder / "together", _STEPS, keep=2)
    yield "two processes, started together", _BEST, 1, f"{text}; {again}"
    first = _Process(folder / "apart", keep=2, steps=_MOST).until(_SAVED, 200)
    second = _Process(folder / "apart", keep=2, steps=_MOST).until(_STARTED)
    second.send(signal.SIGSTOP)  # as a slow or suspended machine would fall behind
    first.until(_SAVED, second.last(_STARTED) + 4 * _SAVES)
    second.send(signal.SIGCONT)
    second.until(_SAVED, second.last(_STARTED) + _SAVES)
    text = "; ".join(process.end(send=signal.SIGKILL) for process in (first, second))
    text += f"; the first had reached {first.last(_STEP)} and saved {first.last(_SAVED)}, the second, begun at "
    text += f"{second.last(_STARTED)}, had saved {second.last(_SAVED)}"
    again = _start_again(folder / "apart", first.last(_STEP), keep=2)
    yield "two processes, one far behind, both killed", _BEST, 1, f"{text}; {again}"


FAULTS = {f.__name__: f for f in (kill, damage, disk, terminate, nan, two_processes)}


def main(argv):
    """Tries the faults, prints the rows and writes them; or is a worker."""
    del argv
    if _WORKER.value:
        work(json.loads(_WORKER.value))
        return
    if unknown := set(_FAULTS.value or ()) - set(FAULTS):
        raise app.UsageError(f"--faults: found {sorted(unknown)}, expected some of {', '.join(FAULTS)}")
    random.seed(0)
    rows = []
    print("| fault | Orbit's settings | tried | what came of it |\n|---|---|---|---|", flush=True)
    for name in _FAULTS.value or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            for row in FAULTS[name](pathlib.Path(folder)):
                rows.append({**dict(zip(_COLUMNS, row)), "settings": "+".join(row[1]) or "plain"})
                print(f"| {' | '.join(map(str, rows[-1].values()))} |", flush=True)
    os.makedirs(os.path.dirname(os.path.abspath(_OUTPUT.value)), exist_ok=True)
    with open(_OUTPUT.value, "w") as file:
        file.write(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
