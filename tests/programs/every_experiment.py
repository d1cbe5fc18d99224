"""Runs every experiment that Model Garden registers, made small, under its own driver and under looplib.

    python tests/programs/every_experiment.py [--write] [--projects] [names ...]

Three training steps and an evaluation of all validation data each, one after another in this process, in the precision
that the experiment has. Prints a row for each; `--write` puts them into the table of docs/model_garden_compared.md, whose other rows stay.

With `--projects`, the experiments of Model Garden's projects instead: four steps in float32 without random augmentation,
a run that is resumed after two of them, and the driver's evaluation of looplib's checkpoint.
"""

import argparse
import contextlib
import os
import pathlib
import re
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

import side_by_side
import tf_keras
from official.core import exp_factory

from trainers import model_garden, model_garden_config

PAGE = ROOT / "docs" / "model_garden_compared.md"
PROJECTS_HEAD = (
    "| experiment | Model Garden's driver: loss | looplib: loss | weights differ by | metrics differ by | resumed "
    "| the driver evaluates looplib's checkpoint |\n|---|---|---|---|---|---|---|\n"
)
HEAD = "| experiment | precision | Model Garden's driver: loss | looplib: loss | examples evaluated |\n|---|---|---|---|---|\n"


def outcome(run, params, directory):
    """Runs an experiment; returns its last training loss and the number of examples evaluated, or an error."""
    tf_keras.mixed_precision.set_global_policy(model_garden_config.flag_values(params)["mixed_precision"])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Orbit and COCO's evaluation print much
            ran = run(params, directory)
        return f"{list(ran.losses.values())[-1]:.5g}", ran.evaluation.get("examples")
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}", None
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")


def row(name):
    """Runs an experiment under both; returns its row of the table."""
    precision = exp_factory.get_exp_config(name).runtime.mixed_precision_dtype
    with tempfile.TemporaryDirectory() as directory:
        params = side_by_side.configuration(name, directory, {"runtime": {"mixed_precision_dtype": precision}})
        theirs, _ = outcome(side_by_side.under_the_driver, params, f"{directory}/theirs")
        ours, examples = outcome(side_by_side.under_looplib, params, f"{directory}/ours")
    return f"| {name} | {precision or 'float32'} | {theirs} | {ours} | {examples} |"


def project_row(name):
    """Compares an experiment of a project; returns its row of the table."""
    import project_experiments

    with tempfile.TemporaryDirectory() as directory:
        experiment = project_experiments.PROJECTS[name]
        params = side_by_side.configuration(name, directory, experiment=experiment)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found = side_by_side.compare(params, directory)
            except Exception as error:
                return f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:200]} | | | | | |"
    theirs, ours = found.theirs, found.ours
    losses = [f"{list(run.losses.values())[-1]:.5g}" for run in (theirs, ours)]
    weights = side_by_side.differences(ours.weights, theirs.weights)
    metrics = side_by_side.metric_differences(ours.evaluation, theirs.evaluation)
    resumed = side_by_side.differences(found.resumed, ours.weights)
    again = side_by_side.metric_differences(found.driver_evaluates.evaluation, ours.evaluation)
    again["weights"] = side_by_side.differences(found.driver_evaluates.weights, ours.weights)
    return (
        f"| {name} | {' | '.join(losses)} | {_size(weights)} | {_size(max(metrics.values(), default=0))} "
        f"| {_size(resumed)} | {_size(max(again.values()))} |"
    )


def _size(difference):
    return "equal" if difference == 0 else f"{difference:.0e}"


def _write(head, rows):
    """Puts rows into the page's table with that head, in order of their names; the other rows stay."""

    def table(found):
        by_name = {line.split("|")[1].strip(): line for line in [*found[1].splitlines(), *rows]}
        return head + "".join(f"{by_name[name]}\n" for name in sorted(by_name, key=str.lower))

    PAGE.write_text(re.sub(re.escape(head) + r"((?:\|.*\n)*)", table, PAGE.read_text()))


def main():
    """Runs what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--projects", action="store_true")
    arguments = parser.parse_args()
    make, head, every = row, HEAD, model_garden.experiments()
    if arguments.projects:
        import project_experiments

        make, head, every = project_row, PROJECTS_HEAD, list(project_experiments.PROJECTS)
    rows = []
    for name in arguments.names or every:
        start = time.monotonic()
        rows.append(make(name))
        print(f"{rows[-1]} {time.monotonic() - start:.0f} s", flush=True)
    if arguments.write:
        _write(head, rows)


if __name__ == "__main__":
    main()
