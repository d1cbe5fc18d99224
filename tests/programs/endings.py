"""Trains and evaluates on pipelines that end, on several workers: `python -m endings --model_dir=RESULT CASE...`.

Each worker's share is some numbers; the chief writes what was done with them to RESULT, as JSON.
"""

import json
import logging
import sys

import tensorflow as tf

import looplib
from looplib.cluster import runtime

BATCH = 4  # of a worker
# The examples of each worker, and how the pipeline says how many there are.
CASES = {
    "even": ([8, 8], "known"),
    "uneven": ([9, 22], "known"),
    "uneven, remainder dropped": ([11, 21], "dropped"),
    "uneven, filtered": ([21, 9], "filtered"),
    "uneven, flat_map": ([8, 13], "flat_map"),
    "one never ends": ([-1, 10], "known"),
    "one empty": ([9, 0], "known"),
    "one empty, filtered": ([0, 9], "filtered"),
    "all dropped": ([3, 9], "dropped"),
}


def share(case, index):
    sizes, kind = CASES[case]
    data = tf.data.Dataset.range(1000 * index, 1000 * index + (sizes[index] if sizes[index] >= 0 else 10))
    data = data.repeat() if sizes[index] < 0 else data
    if kind == "filtered":
        data = data.filter(lambda i: i >= 0)
    if kind == "flat_map":
        data = data.flat_map(lambda i: tf.data.Dataset.from_tensors(i))
    return data.batch(BATCH, drop_remainder=kind == "dropped")


class Task:
    def __init__(self, case):
        self.case = case

    def dataset(self, context):
        return share(self.case, context.pipeline_index)

    def step_fn(self, inputs):
        return {"sum": looplib.total(tf.reduce_sum(inputs)), "count": looplib.total(tf.size(inputs))}


class Training(Task, looplib.Trainer):
    pass


class Evaluation(Task, looplib.Evaluator):
    pass


class Notes(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def do(strategy, case, job, distribute):
    with strategy.scope():
        task = (Training if job == "train" else Evaluation)(case)
    key = "trainer" if job == "train" else "evaluator"
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=2 * BATCH, steps_per_loop=100, distribute=distribute),
        **{key: task},
        strategy=strategy,
        writers=[],
    ) as controller:  # fmt: skip
        found = controller.train(-1) if job == "train" else controller.evaluate()["eval"]
        return {"steps": controller.global_step, "sum": found["sum"], "count": found["count"]}


def main(path, *jobs):
    strategy = runtime.setup("multi_worker")
    notes = Notes()
    logging.getLogger("absl").addHandler(notes)
    results = []
    for job in jobs:
        case, how, distribute = job.split("/")
        notes.lines.clear()
        try:
            result = do(strategy, case, how, distribute)
        except looplib.UsageError as error:
            result = {"error": str(error)}
        results.append({**result, "warnings": list(notes.lines)})
    if strategy.cluster_resolver.task_id == 0:
        with open(path, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1].removeprefix("--model_dir="), *[argument for argument in sys.argv[2:] if "/" in argument])
