"""False alarms of `LearningWarnings` over the ready trainers: `python -m benchmarks.false_alarms --steps=10000`.

Each ready trainer and example trains and evaluates in a process of its own, with checks that may take a fifth of its
time in place of 0.4%, so that as many as possible are made. None of them has a fault, so each warning is a false alarm.
`--minutes` ends a trainer early, saved; the row has the steps that it has done. With `--plain`, the trainers run with
the flag's own settings.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

_SMALL_TEXT = ("--config.width=64", "--config.layers=2", "--config.sequence_length=64", "--config.sample_tokens=32")
_RUNS = {  # by name: the module, and its arguments
    "image_classification": ("trainers.image_classification", ()),
    "image_classification mlp": ("trainers.image_classification", ("--config.model=mlp",)),
    "image_classification sgd": (
        "trainers.image_classification",
        ("--config.optimizer=sgd", "--config.learning_rate=0.05", "--config.decay_steps=2000"),
    ),
    "contrastive": ("trainers.contrastive", ("--global_batch_size=256",)),
    "gan": ("trainers.gan", ("--config.width=64",)),
    "diffusion": ("trainers.diffusion", ("--config.width=8", "--config.sampling_steps=5")),
    "language_model": ("trainers.language_model", ("--global_batch_size=8", "--eval_steps=20", *_SMALL_TEXT)),
    "fine_tune all": ("trainers.fine_tune", ("--config.tune=all",)),
    "fine_tune last": ("trainers.fine_tune", ("--config.tune=last",)),
    "fine_tune lora": ("trainers.fine_tune", ("--config.tune=lora",)),
    "recommendation": ("trainers.recommendation", ()),
    "regression": ("examples.regression", ()),
    "retrieval": ("examples.retrieval", ()),
    "tagging": ("examples.tagging", ()),
    "mixture": ("examples.mixture", ()),
}
_CODE = """
import runpy
import sys
import looplib
from looplib import launch

run = launch.run


def with_checks(*arguments, actions=(), **settings):
    run(*arguments, actions=[*actions, looplib.LearningWarnings(every={every}, share=0.2)], **settings)


launch.run = with_checks
sys.argv[0] = "{module}"
runpy.run_module("{module}", run_name="__main__")
"""


def measure(name, options, folder, base):
    """Trains, and prints a row; returns the warnings.

    Args:
      name: of a run.
      options: the command line of this program.
      folder: for the run directory.
      base: the run directory of the classifier that is tuned.
    """
    module, arguments = _RUNS[name]
    directory = os.path.join(folder, name.replace(" ", "_"))
    if module == "trainers.fine_tune":
        arguments = (*arguments, f"--config.base={base}")
    code = _CODE.format(module=module, every=options.every)
    start = ["-m", module] if options.plain else ["-c", code]
    command = [
        sys.executable, *start, *arguments, f"--model_dir={directory}", f"--train_steps={options.steps}",
        f"--eval_interval={max(1, options.steps // 20)}", f"--steps_per_loop={min(100, options.steps)}",
        f"--max_time={60 * options.minutes:g}", "--keep_last=2", *([] if options.plain else ["--nolearning_warnings"]),
        *options.flag,
    ]  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 75):
        print(f"| {name} | failed: {done.stderr.strip().splitlines()[-1]} |", flush=True)
        return [name]
    with open(os.path.join(directory, "run.json")) as file:
        report = json.load(file)
    found = [one for start in report["starts"] for one in start.get("warnings", [])]
    texts = "; ".join(f"step {one['step']}: {one['kind']} of {', '.join(one['subjects'])}" for one in found) or "none"
    print(f"| {name} | {report['step']:,} | {time.monotonic() - began:.0f} s | {texts} |", flush=True)
    for one in found:
        print(f"    {one['text']}", file=sys.stderr)
    return found


def main():
    """Measures the runs that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000, help="of each trainer")
    parser.add_argument("--minutes", type=float, default=60, help="of each trainer, at most")
    parser.add_argument("--every", type=int, default=20, help="steps between two checks of the weights")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--plain", action="store_true", help="as a user runs them")
    parser.add_argument(
        "--flag",
        action="append",
        default=[],
        help="a further flag of the trainers, such as --flag=--num_virtual_devices=2",
    )
    options = parser.parse_args()
    names = [name for name in _RUNS if not options.only or name in options.only.split(",")]
    alarms = 0
    print("| trainer | steps | time | warnings |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        base = os.path.join(folder, "base")
        if any(name.startswith("fine_tune") for name in names):
            command = [
                sys.executable,
                "-m",
                "trainers.image_classification",
                f"--model_dir={base}",
                "--config.classes=0-4",
            ]
            subprocess.run([*command, "--train_steps=500"], check=True, capture_output=True)
        for name in names:
            alarms += len(measure(name, options, folder, base))
    print(f"{alarms} warnings")


if __name__ == "__main__":
    main()
