"""Model Garden's experiments under its own driver and under looplib: `python -m benchmarks.model_garden`.

Both hold the same experiment, built from the same configuration, in one process, and take turns at training and at
evaluating. The ready configurations in trainers/configs are measured, on the data of `python -m trainers.small_data`.
"""

import dataclasses
import os
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tf_keras
from absl import app, flags, logging
from official.common import registry_imports  # noqa: F401
from official.core import exp_factory, task_factory, train_lib
from official.modeling import hyperparams

import looplib
from benchmarks import records
from trainers import model_garden, model_garden_config

_EXPERIMENTS = {
    "resnet": "resnet_imagenet", "vision_transformer": "vit_imagenet_pretrain", "masked_lm": "bert/pretraining",
    "text_classification": "bert/sentence_prediction",
}  # fmt: skip
_NAMES = flags.DEFINE_list("experiments", ["resnet", "masked_lm", "text_classification"], "Files in trainers/configs.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Turns of each that count.")
_STEPS = flags.DEFINE_integer("steps", 100, "Steps of a turn, which are two loops.")
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratios to.")


@dataclasses.dataclass
class Contestant:
    """Someone who trains for a number of steps, and evaluates."""

    train: object
    evaluate: object


def _driver(params, strategy, model_dir):
    with strategy.scope():
        task = task_factory.get_task(params.task)
    runner = train_lib.OrbitExperimentRunner(strategy, task, "train_and_eval", params, model_dir, save_summary=False)
    controller = runner.controller

    def train(steps):
        controller.train(int(controller.global_step) + steps, checkpoint_at_completion=False)

    return Contestant(train, lambda: controller.evaluate(steps=-1))


def _looplib(params, strategy):
    values = model_garden_config.flag_values(params)
    with strategy.scope():
        trainer, evaluators = model_garden.make(params, None)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=values["global_batch_size"], steps_per_loop=values["steps_per_loop"]),
        trainer=trainer,
        evaluator=evaluators,
        strategy=strategy,
        writers=[],
    )  # fmt: skip
    return Contestant(lambda steps: controller.train(controller.global_step + steps), controller.evaluate)


def measure(name):
    """Lets both take turns; returns dict from what is measured to the ratios of their times, float array `[rounds]`."""
    params = exp_factory.get_exp_config(_EXPERIMENTS[name])
    params = hyperparams.override_params_dict(params, f"trainers/configs/{name}.yaml", is_strict=True)
    params.override({"trainer": {"steps_per_loop": _STEPS.value // 2, "checkpoint_interval": 10**9}})
    tf_keras.utils.set_random_seed(0)
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with tempfile.TemporaryDirectory() as folder:  # of the driver
        return _take_turns(name, {"driver": _driver(params, strategy, folder), "looplib": _looplib(params, strategy)})


def _take_turns(name, both):
    for contestant in both.values():  # traces
        contestant.train(_STEPS.value)
        contestant.evaluate()
    found, order = {}, list(both)
    for what in ("train", "evaluate"):
        seconds = {who: [] for who in both}
        for _ in range(_ROUNDS.value):
            order.reverse()
            for who in order:
                start = time.perf_counter()
                both[who].train(_STEPS.value) if what == "train" else both[who].evaluate()
                seconds[who].append(time.perf_counter() - start)
        medians = {who: f"{np.median(values):.3f} s" for who, values in seconds.items()}
        print(f"{name}, {what}: {medians}", flush=True)
        found[what] = np.array(seconds["driver"]) / np.array(seconds["looplib"])
    return found


def main(argv):
    """Measures each experiment and adds the ratios to the records."""
    del argv
    logging.set_verbosity(logging.WARNING)
    found = []
    for name in _NAMES.value:
        for what, ratios in measure(name).items():
            found.append(records.record(f"{name}, {what}", "Model Garden's driver", ratios))
    records.show(found)
    records.add(_OUTPUT.value, found)


if __name__ == "__main__":
    app.run(main)
