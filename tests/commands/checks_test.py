"""`python -m looplib check`: true binaries that pass, and faults that are found and named."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from conftest import more
from lazily import Results
from paths import PYTHONPATH

from looplib import __main__ as tools
from looplib.commands import check as checks
from looplib.commands.compare import compare

ROOT = pathlib.Path(__file__).parents[2]
MLP = [
    *("trainers.image_classification", "--config.model=mlp", "--train_steps=60", "--eval_interval=20"),
    *("--steps_per_loop=10", "--checkpoint_interval=15"),
]
FEW = ["--train_steps=10", "--loop=eager"]
RIGHT = ["unreliable", *FEW, "--eval_interval=10", "--checkpoint_interval=6"]
CASES = {
    "resume": (["resume", "--kills=1"], MLP),
    "step": (["resume", "--kills=1"], ["unreliable", "--config.fault=step", "--train_steps=60", "--loop=eager"]),
    "data": (["resume", "--kills=1"], ["unreliable", "--config.fault=data"]),
    "unseeded": (["resume", "--baseline=2"], ["unreliable", "--config.fault=unseeded", *FEW]),
    "crash": (["resume"], ["unreliable", "--config.fault=crash"]),
    "slow": (["resume", "--timeout=1"], MLP),
    "replicas": (["replicas", "--counts=1,2"], RIGHT),
    "replicas of a model": (["replicas", "--counts=1,2"], MLP),
    "csv": (["resume", "--kills=1"], ["csv_reader", "--train_steps=400"]),
    "loss": (["replicas", "--counts=1,2"], ["unreliable", "--config.fault=loss", *FEW]),
}


def check(python, arguments, binary, folder):
    return subprocess.run(
        [python, "-m", "looplib", "check", *arguments, f"--dir={folder}", "--", python, "-m", *binary],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checks")


@pytest.fixture(scope="module")
def results(folder, python):
    """What the check of each case comes to."""
    return Results(lambda case: check(python, *CASES[case], folder / case))


@pytest.mark.slow
def test_a_run_that_resumes_exactly_is_equal(results):
    result = results["resume"]
    assert result.returncode == 0, result.stdout + result.stderr
    verdict = result.stdout.splitlines()[-1]
    assert re.match(r"EQUAL, uninterrupted and after 1 kill: ", verdict)
    assert "9 records of metrics.jsonl (with the examples trained on), 15 tensors" in verdict and "(115,340 " in verdict
    assert "it had saved step" in result.stdout and "covers little" not in result.stdout


@pytest.mark.slow
def test_a_pipeline_that_tensorflow_would_restore_wrongly_is_equal(results):
    result = results["csv"]
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.match(r"EQUAL, uninterrupted and after 1 kill: ", result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "fault, first", [("step", r"train keras_accuracy|train loss"), *more([("data", "train examples_checksum")])]
)
def test_a_run_that_does_not_resume_exactly_is_different_and_its_first_difference_is_named(fault, first, results):
    result = results[fault]
    assert result.returncode == 1, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("DIFFERENT, uninterrupted and after 1 kill: "))
    step = int(re.search(r"resumed from the steps (\d+)$", lines[at - 1])[1])
    match = re.match(rf"  step (\d+) ({first}): \S+ uninterrupted, \S+ after 1 kill", lines[at + 1])
    assert match and step < int(match[1]) <= step + 20, lines[at + 1]
    hint = "check the data first" if fault == "data" else "the examples are equal, so the step uses"
    assert lines[-1].startswith(f"possible cause: {hint}")


@pytest.mark.slow
def test_two_uninterrupted_runs_that_differ(results):
    result = results["unseeded"]
    assert result.returncode == 1, result.stderr
    assert "two uninterrupted runs differ already" in result.stdout
    assert "step 10 train examples_checksum" in result.stdout and "uninterrupted runs differ too" in result.stdout


@pytest.mark.slow
def test_a_command_that_fails_is_code_2_with_its_last_line(results):
    result = results["crash"]
    assert result.returncode == 2 and "Traceback" in result.stderr
    assert "  | looplib: error: RuntimeError: the printer is on fire" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("looplib: error: the command failed with code 1; its last lines")


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_ended(results):
    result = results["slow"]
    assert result.returncode == 2
    assert "looplib: error: the command did not end within 1 s (--timeout)" in result.stderr


# The small step is evaluated by its accuracy alone, which rounding does not change.
@pytest.mark.parametrize(
    "case, evaluation", [("replicas", "none"), *more([("replicas of a model", r"\S+e-\d\d \(\S+ ")])]
)
def test_replicas_that_agree(case, evaluation, results, folder):
    result = results[case]
    assert result.returncode == 0, result.stdout + result.stderr
    rounding = r"\S+e-\d\d \(\S+ "
    for split, found in {"train": rounding, "eval": evaluation, "final checkpoint": rounding}.items():
        assert re.search(rf"2 replicas against 1 replica, {split}: largest relative difference {found}", result.stdout)
    runs = [json.loads((folder / case / name / "run.json").read_text()) for name in ("replicas_1", "replicas_2")]
    assert [run["num_replicas"] for run in runs] == [1, 2]


@pytest.mark.slow
def test_replicas_that_do_not(results):
    result = results["loss"]
    assert result.returncode == 1, result.stdout + result.stderr
    assert "possible cause: the examples are equal, and the difference is larger than rounding" in result.stdout


def test_records_twice_and_tensors_of_another_checkpoint_are_differences(results, folder, tmp_path):
    whole = folder / "replicas" / "replicas_1"
    assert compare(whole, whole).differences == []
    other = shutil.copytree(whole, tmp_path / "other")
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join([*lines[:-1], lines[0]]))
    found = [each.where for each in compare(whole, other).differences]
    assert found[:2] == ["step 1 train: records", "step 10 eval: records"]
    for path in other.glob("checkpoints/ckpt-10*"):
        path.unlink()
    (other / "checkpoints" / "checkpoint").unlink()
    found = {each.where: each for each in compare(whole, other).differences}
    assert found["tensor global_step"].text("one", "other") == "tensor global_step: 10 one, 6 other"
    bias = found["tensor optimizer/_trainable_variables/1"]
    assert bias.one.startswith("[0] ") and re.search(r" now, \d+ of 3 elements differ$", bias.text("then", "now"))


def test_times_are_not_compared_and_what_has_time_in_its_name_is(results, folder, tmp_path):
    one, other = (shutil.copytree(folder / "replicas" / "replicas_1", tmp_path / name) for name in ("one", "other"))
    for path, number in ((one, 1), (other, 2)):
        report = json.loads((path / "run.json").read_text())
        names = ("timesteps", "second_moment", "time", "steps_per_second", "share_of_peak")
        report["metrics"]["train"] |= {name: number for name in names}
        (path / "run.json").write_text(json.dumps(report))
    found = [each.where.rpartition(" ")[2] for each in compare(one, other).differences]
    assert sorted(found) == ["second_moment", "time", "timesteps"]


def test_a_missing_record_is_no_matter_of_the_training(results, folder, tmp_path, capsys):
    whole = folder / "replicas" / "replicas_1"
    other = shutil.copytree(whole, tmp_path / "other")
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(lines[1:]))
    assert checks._verdict(compare(whole, other), "the hint", "one", "other", tmp_path, True) == 1
    text = capsys.readouterr().out
    assert (
        "step 1 train: records: 1 one, nothing other" in text
        and "the training is right and only the report differs" in text
    )


COMMAND = ["--", "python", "-m", "trainers.image_classification"]
BAD = {
    "no command": (["check", "resume"], "there is no command to check"),
    "the check's own flag": (["check", "resume", *COMMAND, "--model_dir=/tmp/x"], "has --model_dir, which the check sets itself"),
    "the other": (["check", "replicas", *COMMAND, "--num_virtual_devices", "2"], "has --num_virtual_devices, which"),
    "one count": (["check", "replicas", "--counts=2", *COMMAND], "--counts is 2; expected two or more numbers"),
    "a strategy besides workers": (["check", "replicas", "--workers=2", *COMMAND, "--strategy=tpu"], "has --strategy, which"),
    "no kills": (["check", "resume", "--kills=0", *COMMAND], "--kills is 0; expected at least 1"),
    "no tolerance": (["check", "replicas", "--rtol=0", *COMMAND], "--rtol is 0.0 and --atol 1e-05; expected positive numbers"),
    "used directory": (["check", "resume", f"--dir={ROOT}", *COMMAND], f"--dir {ROOT} is not empty"),
    "no such program": (["check", "resume", "--", "/no/such"], "'/no/such' cannot be started: No such file"),
    "bad number": (["check", "resume", "--kills=x", *COMMAND], "argument --kills: invalid int value: 'x'"),
    "unknown tool": (["chekc"], "invalid choice: 'chekc'"),
    "unknown option": (["check", "resume", "--x=1"], "arguments: --x=1 (see python -m looplib check resume --help)"),
}  # fmt: skip


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_sentence_and_code_2(case, capsys):
    arguments, sentence = BAD[case]
    try:
        code = tools.main(arguments)
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("looplib: error: ") and sentence in error


def test_help_says_what_to_type(capsys):
    with pytest.raises(SystemExit) as end:
        tools.main(["check", "resume", "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and "-- python -m trainers" in text and "exit codes: 0 equal; 1 different" in text
