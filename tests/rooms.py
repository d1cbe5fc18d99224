"""Which tests are a room's own: `pytest --room=loop` runs these, to be tried while one works on it."""

import configparser
import pathlib

# Of each room of looplib; `house` is the files that stand at the top. What is in none of them tries the whole.
TESTS = {
    "checkpoint": ["checkpoints", "choice", "continue", "names", "store", "markers", "faults/lock"],
    "cluster": ["cluster", "tpu"],
    "compat": ["tf"],
    "data": [
        "device_copies",
        "empty_shares",
        "feeds",
        "global_batches",
        "lengths",
        "resident",
        "sources",
    ],
    "extras": [
        "bottleneck",
        "checks",
        "class_weight",
        "every_kind",
        "faults/replay_faults",
        "flops",
        "foreign",
        "keras_building",
        "keras_replicas",
        "keras_results",
        "keras_trainer",
        "local_launch",
        "preflight",
        "faults/records_faults",
        "mixtures",
        "records",
        "replay",
        "report_page",
        "rerun",
        "status",
        "sweep",
        "trackers",
        "workers/peers",
    ],
    "health": ["debuggers", "guards", "preemption"],
    "house": [
        "configuration",
        "controller",
        "errors",
        "exports",
        "flags",
        "imports",
        "launch",
        "lifecycle",
        "runtime",
        "settings",
    ],
    "loop": [
        "checksums",
        "engines",
        "evaluation_loop",
        "fused",
        "loops",
        "media",
        "metrics",
        "optimizers",
        "traced",
    ],
    "report": ["clock", "predictions", "program", "writers"],
    "task": [
        "another_batch_size",
        "batch_sizes",
        "derived",
        "evaluator",
        "gradient_trainer",
        "inputs",
        "memories",
        "plain",
        "plateau",
        "profile",
        "trainer",
    ],
}
_FOLDER = pathlib.Path(__file__).absolute().parent


def plug_ins(group):
    """Returns where the plug-ins of a group are, by name, such as {"records": "extras.records.reader.RecordReader"}."""
    setup = configparser.ConfigParser()
    setup.read(_FOLDER.parent / "setup.cfg")
    lines = setup["options.entry_points"][group].split("\n")
    found = dict(line.replace(" ", "").replace(":", ".").split("=") for line in lines if line)
    return {name: place.removeprefix("looplib.") for name, place in found.items()}


def stem(path):
    """Returns the name that a test file has here: tests/faults/lock_test.py is faults/lock."""
    return str(path.absolute().relative_to(_FOLDER)).removesuffix("_test.py")
