"""Runs the small experiments under Model Garden's own driver, one after another in this process.

    python tests/model_garden/under_the_driver.py [--output=FILE.json] [names ...]

Prints a line for each and writes the record as JSON. What fails here cannot be asked of another driver.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
import tf_keras
from official.common import distribute_utils, registry_imports  # noqa: F401
from official.core import exp_factory, task_factory, train_lib
from official.modeling import performance
from official.vision.utils import summary_manager
from vision_experiments import VISION

EXPERIMENTS = {**VISION}


def train_and_evaluate(name, experiment, directory):
    """Runs one experiment as Model Garden's `train.py` does, and returns the metrics of its last evaluation."""
    params = exp_factory.get_exp_config(name)
    params.override(experiment.overrides(experiment.make_data(os.path.join(directory, "data"))), is_strict=True)
    params.validate()
    params.lock()
    tf_keras.utils.set_random_seed(0)
    if params.runtime.mixed_precision_dtype:
        performance.set_mixed_precision_policy(params.runtime.mixed_precision_dtype)
    strategy = distribute_utils.get_distribution_strategy(
        distribution_strategy=params.runtime.distribution_strategy, num_gpus=params.runtime.num_gpus
    )
    model_dir = os.path.join(directory, "run")
    with strategy.scope():
        task = task_factory.get_task(params.task, logging_dir=model_dir)
    metrics = {}
    train_lib.run_experiment(
        distribution_strategy=strategy,
        task=task,
        mode="train_and_eval",
        params=params,
        model_dir=model_dir,
        eval_actions=[metrics.update],
        eval_summary_manager=summary_manager.maybe_build_eval_summary_manager(params=params, model_dir=model_dir),
    )
    return {key: float(value) for key, value in metrics.items() if tf.rank(value) == 0}


def record(name, experiment):
    """Runs one experiment in a directory and a Keras session of its own; an error becomes part of the record."""
    tf_keras.backend.clear_session()
    start, cpu_start = time.monotonic(), time.process_time()
    try:
        # Orbit and COCO's evaluation print much.
        with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as directory:
            result = {"ok": True, "metrics": train_and_evaluate(name, experiment, directory)}
    except Exception as error:
        result = {"ok": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
    seconds = {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - cpu_start}
    return {"name": name, **seconds, **result}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(EXPERIMENTS))
    parser.add_argument("--output", default="build/under_the_driver.json")
    arguments = parser.parse_args()
    os.makedirs(os.path.dirname(os.path.abspath(arguments.output)), exist_ok=True)

    records = []
    for name in arguments.names:
        one = record(name, EXPERIMENTS[name])
        records.append(one)
        outcome = one["metrics"] if one["ok"] else one["error"].splitlines()[0]
        seconds = f"{one['seconds']:6.1f} s {one['cpu_seconds']:6.1f} s of CPU"
        print(f"{name:40} {'ok' if one['ok'] else 'error':5} {seconds}  {outcome}", flush=True)
        with open(arguments.output, "w") as file:
            json.dump(records, file, indent=2)


if __name__ == "__main__":
    main()
