"""The loops that are compared: each a function from a `workloads.Task` to a `workloads.Contestant`.

Each peer stands at its best setting: Orbit keeps its metrics in one variable rather than in Keras metrics, and prints
to nowhere; Keras runs with and without XLA, and its fit brings metrics to the host only once an epoch, where the others
do once a loop.
"""

import functools
import importlib.util
import os
import time

import keras
import tensorflow as tf

import looplib
from benchmarks.workloads import Contestant, means, timed

os.environ["LOOPLIB_CACHE"] = os.devnull  # each run finds its engine by itself
ENGINE = "auto"  # looplib's engine in all rows but "looplib, graph"
_LONGEST_CHOICE = 60  # seconds
_ALL_ON = looplib.Guards("halt", spike_score=1e15, on_spike="halt")  # so high that a bad start does not end the run
_ALL_OFF = looplib.Guards("off", stall_limit=0)


def make_controller(task, engine=ENGINE, own_input=False, guards=_ALL_ON, actions=(), compiled=False, strategy=None):
    """Builds looplib's controller, which finds the end of the data by itself."""
    if compiled:
        _compile(task)
        own = looplib.KerasTrainer(task.model, task.dataset)
    else:
        own = _LooplibTask(task, own_input)
    return looplib.Controller(
        looplib.RunConfig(global_batch_size=task.workload.batch, steps_per_loop=task.steps_per_loop, loop=engine),
        **{"trainer" if task.training else "evaluator": own},
        strategy=strategy,
        guards=guards,
        writers=[],
        actions=actions,
    )


def looplib_loop(task, engine=ENGINE, own_input=False, guards=_ALL_ON, compiled=False, strategy=None):
    """Builds looplib's loop, of a trainer of its own or of a compiled model, on a strategy or the default one."""
    settling = []

    def stop_when_chosen(event):
        if settling and event.controller.engines:
            event.controller.stop()

    controller = make_controller(task, engine, own_input, guards, [stop_when_chosen], compiled, strategy)

    def settle():
        """Lets auto choose, as it would in the first seconds of a long run."""
        settling.append(True)
        until = time.monotonic() + _LONGEST_CHOICE
        while engine == "auto" and not controller.engines and time.monotonic() < until:
            if task.training:
                controller.train(controller.global_step + 10**8)
            else:
                controller.evaluate()
        settling.clear()
        return controller.engines

    if task.training:
        return timed(lambda steps: controller.train(controller.global_step + steps), task.loss, settle)
    return timed(lambda times: [controller.evaluate()["eval"] for _ in range(times)][-1], task.loss, settle)


class _LooplibTask(looplib.Trainer, looplib.Evaluator):
    def __init__(self, task, own_input):
        self.model, self.optimizer = task.model, task.optimizer
        self._task, self._own_input = task, own_input

    def dataset(self, context):
        return self._task.own_input(context) if self._own_input else self._task.dataset(context.num_replicas)

    def step_fn(self, inputs):
        losses, right = self._task.step(*inputs, mean=self.global_mean)
        return {"loss": losses, "accuracy": right}


def by_hand(task, in_graph=True):
    """Builds a tf.range loop that keeps its metrics in loop variables, or else a Python loop that calls each step."""
    dataset = task.dataset()
    endless = iter(dataset) if task.training else None

    def step(iterator, sums):
        return sums + task.sums(*next(iterator))

    def loop(iterator, steps):
        sums = tf.zeros(3)
        for _ in steps:
            sums = step(iterator, sums)
        return sums

    if in_graph:
        whole_loop = tf.function(lambda iterator: loop(iterator, tf.range(task.steps_per_loop)))
    else:
        step = tf.function(step)

        def whole_loop(iterator):
            return loop(iterator, range(task.steps_per_loop))

    def run(amount):
        for _ in range(amount // (task.workload.loop or 1)):
            metrics = means(whole_loop(endless or iter(dataset)))
        return metrics

    return timed(run, task.loss)


def orbit_loop(task, to_the_end=False, strategy=None):
    """Builds Orbit's controller, on a strategy or the default one."""
    from benchmarks import orbit_peer

    return orbit_peer.controller_loop(task, to_the_end, strategy)


def keras_loop(task, jit_compile=False):
    """Builds Keras's fit or evaluate, timed in the steady state: a fit's second epoch, an evaluation's steps."""
    _compile(task, jit_compile=jit_compile, steps_per_execution=task.steps_per_loop)
    dataset, stopwatch = task.dataset(), _Stopwatch()
    options = {"verbose": 0, "callbacks": [stopwatch]}

    def fit(steps):
        epochs = 2 if int(task.optimizer.iterations) else 1  # the check wants the first steps alone
        history = task.model.fit(dataset, epochs=epochs, steps_per_epoch=steps, shuffle=False, **options)
        return stopwatch.seconds, {name: values[-1] for name, values in history.history.items()}

    def evaluate(times):
        seconds = 0.0
        for _ in range(times):
            metrics = task.model.evaluate(dataset, return_dict=True, **options)
            seconds += stopwatch.seconds
        return seconds, metrics

    return Contestant(fit if task.training else evaluate, task.loss)


def _compile(task, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.model.compile(task.optimizer, loss, metrics=["accuracy"], **options)


class _Stopwatch(keras.callbacks.Callback):
    def _start(self, *_):
        self._started = time.perf_counter()

    def _stop(self, *_):
        self.seconds = time.perf_counter() - self._started

    on_epoch_begin = on_test_begin = _start
    on_epoch_end = on_test_end = _stop


def program_loop(task):
    """Builds one XLA program, written by hand."""
    from benchmarks import program_peer

    return program_peer.program_loop(task)


def jax_loop(task):
    """Builds a scan of JAX."""
    from benchmarks import jax_peer

    return jax_peer.scan_loop(task)


def lightning_loop(task):
    """Builds the Trainer of PyTorch Lightning."""
    from benchmarks import lightning_peer

    return lightning_peer.fit_loop(task)


# Contestant -> (module, what pip installs).
_OPTIONAL = {"jax": ("jax", "jax"), "lightning": ("lightning", "lightning"), "orbit": ("orbit", "looplib[models]")}
_OPTIONAL["orbit, to the end"] = _OPTIONAL["orbit"]
TOLERANCES = {  # relative differences that count as the same, where they are larger than the workload's
    "looplib, own input": 0.1,  # it trains on the same examples in another order
    "one program": 0.1,  # likewise
    "jax": 0.1,  # likewise
    "lightning": 5e-3,  # PyTorch's Adam adds epsilon after the correction of the second moment's bias, not before
}
CONTESTANTS = {
    "looplib": looplib_loop,
    "looplib, graph": functools.partial(looplib_loop, engine="graph"),
    "looplib, own input": functools.partial(looplib_loop, own_input=True),
    "looplib, unguarded": functools.partial(looplib_loop, guards=_ALL_OFF),
    "looplib, KerasTrainer": functools.partial(looplib_loop, compiled=True),
    "looplib, KerasTrainer, graph": functools.partial(looplib_loop, engine="graph", compiled=True),
    "bare": by_hand,
    "orbit": orbit_loop,
    "orbit, to the end": functools.partial(orbit_loop, to_the_end=True),
    "keras": keras_loop,
    "keras, XLA": functools.partial(keras_loop, jit_compile=True),
    "step a call": functools.partial(by_hand, in_graph=False),
    "one program": program_loop,
    "jax": jax_loop,
    "lightning": lightning_loop,
}


def present(names):
    """Returns those whose packages are installed, and prints a line for each other."""
    missing = [name for name in names if name in _OPTIONAL and not importlib.util.find_spec(_OPTIONAL[name][0])]
    for name in missing:
        print(f"without {name}, which is not installed: pip install '{_OPTIONAL[name][1]}'")
    return [name for name in names if name not in missing]
