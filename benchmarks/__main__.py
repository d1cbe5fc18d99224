"""All benchmarks, one after another, each in a process of its own: `python -m benchmarks`.

Workloads:
  W1 to W5: training: two multi-layer perceptrons, a CNN, a transformer, the Model Garden's ResNet-18; 100 steps a loop
    (ResNet: 10).
  W6: evaluation of 10,007 examples.
  W7-1, W7-10: W2 with 1 and 10 steps a loop, where the outer loop shows.
  W8: how long the training stands still for a checkpoint.
  W9: memory over 1,000 rounds of training and evaluation.
  W10: all guards on against off, in the runs of W1 to W4.
  K1 to K3: the compiled models of W1 to W3 in KerasTrainer, beside fit.
  W1x2, W2x2, W3x2: the trainings of W1 to W3 on two replicas of one CPU, beside Orbit.
  choice: what a run of a minute gains or loses by `loop="auto"` against "graph", for W1 to W5.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import subprocess
import sys

from absl import app, flags

from benchmarks import picture, records

_COMMANDS = {
    **{name: ["benchmarks.speed", f"--workload={name}"] for name in ("W1", "W2", "W3", "W4", "W5", "W6")},
    **{name: ["benchmarks.speed", f"--workload={name}"] for name in ("W7-1", "W7-10")},
    **{name: ["benchmarks.speed", f"--workload={name}"] for name in ("K1", "K2", "K3")},
    **{f"{name}x2": ["benchmarks.replicas", f"--workload={name}"] for name in ("W1", "W2", "W3")},
    "W8": ["benchmarks.checkpoint_stall"],
    "W9": ["benchmarks.memory"],
    "choice": ["benchmarks.choice"],
}
_OF_MODEL_GARDEN = ("W1x2", "W2x2", "W3x2", "W5", "W9", "choice")  # for its ResNet, and its Orbit
_WORKLOADS = flags.DEFINE_list("workloads", list(_COMMANDS), "The workloads to run; W10 is in W1 to W4.")
_ROUNDS = flags.DEFINE_integer(
    "rounds", None, "Rounds of each workload but W9 and choice; by default each has its own."
)
_SECONDS = flags.DEFINE_float("seconds", None, "Length of a contestant's turn in W1 to W7.")
_WARM_UP = flags.DEFINE_float("warm_up", None, "Seconds that each contestant of W1 to W7 runs before its turns count.")
_COPIES = flags.DEFINE_integer("copies", None, "Copies of each contestant of W1 to W7, whose speeds are averaged.")
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file for the ratios; the picture lies beside it.")


def main(argv):
    """Runs the workloads, shows all ratios and draws them; ends with an error if a workload could not be measured."""
    del argv
    if unknown := set(_WORKLOADS.value) - set(_COMMANDS):
        raise app.UsageError(f"--workloads has {', '.join(sorted(unknown))}; expected some of {', '.join(_COMMANDS)}")
    output = pathlib.Path(_OUTPUT.value)
    output.unlink(missing_ok=True)  # numbers of an older run beside these would mislead
    failed, names = [], _WORKLOADS.value
    if not importlib.util.find_spec("official"):
        left_out = [name for name in names if name in _OF_MODEL_GARDEN]
        names = [name for name in names if name not in left_out]
        records.add(str(output), [records.not_measured(name, "needs looplib[models]") for name in left_out])
    for name in names:
        command = [sys.executable, "-m", *_COMMANDS[name], f"--output={output}"]
        if _ROUNDS.value and name not in ("W9", "choice"):
            command.append(f"--rounds={_ROUNDS.value}")
        if "benchmarks.speed" in command:
            given = {"seconds": _SECONDS.value, "warm_up": _WARM_UP.value, "copies": _COPIES.value}
            command += [f"--{flag}={value}" for flag, value in given.items() if value is not None]
        if subprocess.run(command, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}).returncode:
            failed.append(name)
            records.add(str(output), [records.not_measured(name)])
    found = records.read(output)
    print(f"\n{_machine()}")
    records.show(found)
    if measured := [entry for entry in found if entry["ratio"] is not None]:
        picture.draw(measured, output.with_suffix(".png"))
        print(f"\nwrote {output} and {output.with_suffix('.png')}")
    goals = [entry for entry in found if entry["target"]]
    print(f"{sum(entry['met'] for entry in goals)} of {len(goals)} targets met")
    return f"could not be measured: {', '.join(failed)}" if failed else None


def _machine():
    """Returns the name of the machine, its processor, and the versions that the numbers hold for."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.processor() or platform.machine()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("looplib", "tensorflow", "keras"))
    return f"{platform.node()}: {os.cpu_count()} x {processor}; Python {platform.python_version()}, {versions}"


if __name__ == "__main__":
    app.run(main)
