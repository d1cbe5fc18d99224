"""Exports versions until it is killed.

`python -m exporting add MODEL BASE` adds copies of a SavedModel, by themselves, and prints their versions; `python -m exporting train RUN BASE [END SPOILT]`
trains, to a step, with weights that are made bad at another one.
"""

import os
import sys
import time

import tensorflow as tf
import toy

import looplib
from looplib.exports.versions import VersionRecord, versions_in

what, place, base, *steps = sys.argv[1:]
END, SPOILT = map(int, steps or (1000, -1))
if what == "add":
    versions, number = versions_in(base), 0
    while True:
        number += 1
        record = VersionRecord(number, {}, "of no use" if number % 3 == 0 else "")
        print(versions.add(place, record, keep=3), flush=True)
        time.sleep(0.02)
strategy = looplib.runtime.setup("multi_worker") if "TF_CONFIG" in os.environ else tf.distribute.get_strategy()
trainer, evaluator = toy.build(strategy)


def spoil(event):
    """Makes the weights bad at a step."""
    if (event.split, event.step) == ("train", SPOILT):
        trainer.model.layers[-1].set_weights([-10 * trainer.weights()[0], trainer.weights()[1]])


export = looplib.ExportEvery(2, base, gate=looplib.ExportGate("eval/accuracy", worse_by=0.05))
policy = looplib.CheckpointPolicy(every_steps=3)
with toy.controller(
    strategy, trainer, evaluator, model_dir=place, checkpoints=policy, actions=[spoil, export]
) as controller:
    controller.train(END)
