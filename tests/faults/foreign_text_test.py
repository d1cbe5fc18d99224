"""Text from somebody else: settings, run records, records of metrics and media. It is read, or refused in a sentence.

What is asked: a start, the page of a run, a page that compares runs, `status`, `inspect` and `diff`.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess

import hostile_test
import numpy as np
import pytest
from conftest import make_strategy, repetitions
from paths import ROOT
from tampering import NUL, SURROGATE, WRONG, aliases, make_directory, make_endless, make_fifo, mutate_fields, mutated

from looplib.__main__ import main as cli
from looplib.base.decoding import parse_json
from looplib.base.messages import duration, shown, whole_number
from looplib.binary import config
from looplib.config import field_types
from looplib.errors import ConfigurationError, SettingError, UsageError
from looplib.loop.host_loop import as_shown
from looplib.report.writers.files import CsvWriter, MediaWriter
from looplib.report.writers.tensorboard_writer import TensorBoardWriter
from looplib.run.directory import RunDir
from looplib.run.records import read_jsonl
from looplib.run.report import RunReport
from looplib.task.reductions import Media

MUTATIONS = int(os.environ.get("LOOPLIB_MUTATIONS", repetitions(28, 40)))
STARTS = MUTATIONS // 4  # each is a training of a step
SECONDS = 60  # of one question
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc000000301010018dd8db0"
    "0000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of six steps with an evaluation job, images, texts, and a program that started it."""
    folder = tmp_path_factory.mktemp("run")
    hostile_test.train(folder, 6)
    trainer, evaluator = hostile_test.toy.build(make_strategy("default"))
    with hostile_test.toy.controller(make_strategy("default"), None, evaluator, model_dir=folder, writers=None) as job:
        job.evaluate()
    report = json.loads((folder / "run.json").read_text())
    program = {"arguments": ["-c", ""], "directory": str(folder), "repository": "", "commit": "", "changes": ""}
    report["program"] = report["starts"][0]["program"] = program
    report |= {
        "flags": {"keep_best": "eval/loss", "global_batch_size": 8, "steps_per_loop": 2},
        "config": {"a": {"b": 1}},
    }
    (folder / "run.json").write_text(json.dumps(report))
    (folder / "media").mkdir(exist_ok=True)
    (folder / "media" / "x.png").write_bytes(PIXEL)
    media = [
        {"step": 2, "split": "train", "name": "x", "kind": "image", "files": ["x.png"]},
        {"step": 2, "split": "train", "name": "t", "kind": "text", "texts": ["some", "words"]},
        {"step": 2, "split": "train", "name": "h", "kind": "histogram", "edges": [0.0, 1.0, 2.0], "counts": [3, 4]},
    ]
    (folder / "media.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in media))
    (folder / "metrics.voided.jsonl").write_text('{"step": 5, "split": "train", "loss": 1.0}\n')
    return folder


@pytest.fixture
def folder(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


@contextlib.contextmanager
def limited(number):
    """Fails if a `with` block takes long."""

    def late(*_):
        raise AssertionError(f"mutation {number} takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ask(run, other, capsys, number=0):
    """Asks all tools of a run; none may raise, and what they refuse is one printable line."""
    page, both = run.parent / "page.html", run.parent / "both.html"
    questions = [
        ["status", str(run)],
        ["inspect", str(run)],
        ["report", str(run), f"--output={page}"],
        ["report", str(run), str(other), f"--output={both}"],
        ["diff", str(run), str(other)],
        ["replay", str(run), "--step=2", "--save=nothing"],
        ["rerun", str(run), f"--to={other}"],  # which is not empty
        ["export", str(run)],  # by a command that does nothing
    ]
    codes = []
    for question in questions:
        with limited(number):
            codes.append(cli(question))
        out, err = capsys.readouterr()
        assert codes[-1] in (0, 1, 2), (number, question)
        assert "\x1b[2J" not in out + err and "Traceback" not in out + err, (number, question)
        if codes[-1] == 2:
            *_, last = (out + err).splitlines()
            assert len(last) < 2000, (number, question)
    for path in (page, both):
        assert path.read_text(encoding="utf-8").startswith("<!doctype html>"), number
        path.unlink()
    return codes


TEXTS = ["run.json", "run_eval.json", "media.jsonl", "metrics.jsonl", "metrics.voided.jsonl"]


def mutate(run, chance):
    """Changes one of the texts of a run."""
    path = run / chance.choice([*TEXTS, "run.json", "media.jsonl"])
    if chance.random() < 0.3:
        path.write_bytes(mutated(path.read_bytes(), chance))
    elif path.suffix == ".json":
        fields = json.loads(path.read_text())
        mutate_fields(fields, chance, WRONG)
        path.write_text(json.dumps(fields))
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            mutate_fields(line, chance, WRONG)
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.slow
def test_every_tool_answers_for_any_mutation_of_the_texts_of_a_run(run, tmp_path, capsys):
    chance = random.Random(3)
    for number in range(MUTATIONS):
        changed = shutil.copytree(run, tmp_path / "changed")
        mutate(changed, chance)
        ask(changed, run, capsys, number)
        shutil.rmtree(changed)


@pytest.mark.slow
def test_a_start_goes_well_after_any_mutation_of_the_texts_of_a_run(run, tmp_path):
    chance = random.Random(4)
    for number in range(STARTS):
        changed = shutil.copytree(run, tmp_path / "changed")
        mutate(changed, chance)
        with limited(number):
            assert hostile_test.train(changed, 7).global_step == 7, number
        report = json.loads((changed / "run.json").read_text())
        assert report["status"] == "done" and report["step"] == 7 and report["starts"], number
        shutil.rmtree(changed)


# Settings.


@dataclasses.dataclass
class Part:
    width: int = 1
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Settings:
    rate: float = 1.0
    text: str = ""
    part: Part = dataclasses.field(default_factory=Part)
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    pair: tuple[int, float] | None = None


SETTINGS = """\
rate: 1e-3
text: &t some words
part: &p {width: 3, names: [*t, b]}
table: {a: 1, <<: {b: 2}}
pair: [1, 2.5]
"""
ODD = ["*p", "*t", "&p", "<<:", "!!binary", "!!timestamp", "!!int", "!!bool", "!!set", "!!python/name:os.system", "{", "[", "]",
       "? ", "- ", "1e999", ".nan", "9" * 400, "0x" + "f" * 5000, "\0", "\ud800", '"\\ud800"', "\x1b", "x" * 3000, "|", "#", "%",
       "---", "1:59:59", "2020-13-45", "~", "\t", "rate: 2\n"]  # fmt: skip


def given(text):
    tree = config.given(Settings())
    config.merge(tree, Settings, field_types.load(text), lambda where: f"{where} in a.yaml")
    made = field_types.typed(tree, Settings, str, "")
    return made, config.text_of(made, tree)


def test_any_mutation_of_settings_is_taken_and_written_again_or_is_a_sentence(tmp_path):
    chance, path = random.Random(5), tmp_path / "settings.yaml"
    taken = 0
    for number in range(10 * MUTATIONS):
        content = SETTINGS
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(content))
            content = content[:place] + chance.choice(ODD) + content[place + chance.randrange(3) :]
        content = content.encode(errors="surrogatepass")
        path.write_bytes(mutated(content, chance) if chance.random() < 0.2 else content)
        with limited(number):
            try:
                tree = config.given(Settings())
                config.merge(tree, Settings, config.read_yaml(str(path)), lambda where: f"{where} in a.yaml")
                made = field_types.typed(tree, Settings, str, "")
            except UsageError as error:
                assert len(str(error)) < 1000, number
                continue
            taken += 1
            assert repr(given(config.text_of(made, tree))[0]) == repr(made), number
    assert taken > MUTATIONS / 10


REFUSED = {
    "nested aliases": (aliases(9), "more than 50,000 values"),
    "an alias within itself": ("part: &a [*a]", "or 50 levels"),
    "a merge within itself": ("table: &a {<<: *a}", "or 50 levels"),
    "deep": ("rate: " + "[" * 100_000, "nested too deep"),
    "deep, and closed": ("rate: " + "[" * 60 + "]" * 60, "or 50 levels"),
    "many values": ("table: [" + "1," * 60_000 + "]", "more than 50,000 values"),
    "large": ("text: " + "x" * 300_000, "more than 262,144 bytes"),
    "400 digits": ("rate: " + "9" * 400, "a number of 400 characters, line 1"),
    "5000 digits": ("rate: " + "9" * 5000, "a number of 5,000 characters, line 1"),
    "5000 hexadecimal digits": ("text: 0x" + "f" * 5000, "a number of 5,002 characters"),
    "a number of base 60": ("rate: 1" + ":59" * 5000, "a number of 15,001 characters"),
    "1e999": ("pair: [1e999, 1]", "pair[0] in a.yaml is inf; expected int"),
    "a bad date": ("text: 2020-13-45", "month must be in 1..12"),
    "a tag that does not fit": ("text: !!timestamp foo", "does not fit its tag"),
    "an empty number": ("rate: !!int ''", "does not fit its tag"),
    "bad bytes": ("text: !!binary é", "failed to convert base64 data into ascii|failed to decode"),
    "an object": ("text: !!python/object:os.system {}", "could not determine a constructor"),
    "a name twice": ("rate: 1\ntext: a\nrate: 2", "it has 'rate' 2 times, line 1; write it once"),
    "a long name": ("? " + "k" * 100_000 + "\n: 1", "kkkk"),
    "a long value": ("rate: " + "k" * 100_000, "rate in a.yaml is 'kkk"),
    "NUL": ("text: \0", "special characters are not allowed"),
    "no UTF-8": (b"text: \xff", "can't decode byte"),
    "a lone surrogate": ('text: "\\ud800"', "not UTF-8, line 1"),
    "two documents": ("rate: 1\n---\nrate: 2", "another document"),
    "a merge of no mapping": ("<<: 3", "expected a mapping"),
}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_no_run_has_are_a_short_sentence_at_once(case, tmp_path):
    text, sentence = REFUSED[case]
    path = tmp_path / "settings.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with limited(case), pytest.raises(ConfigurationError, match=sentence.replace("[", "\\[")) as error:
        tree = config.given(Settings())
        config.merge(tree, Settings, config.read_yaml(str(path)), lambda where: f"{where} in a.yaml")
        field_types.typed(tree, Settings, str, "")
    assert len(str(error.value)) < 1000


def test_aliases_and_merges_of_a_few_values_are_taken():
    made, _ = given(SETTINGS)
    assert made == Settings(1e-3, "some words", Part(3, ["some words", "b"]), {"a": 1, "b": 2}, (1, 2.5))


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("make", [make_fifo, make_directory, make_endless])
def test_a_config_file_that_is_no_file_is_refused_at_once(make, tmp_path):
    make(tmp_path / "settings.yaml")
    with limited(make.__name__), pytest.raises(ConfigurationError):
        config.read_yaml(str(tmp_path / "settings.yaml"))


def test_a_config_file_may_be_a_link(tmp_path):
    (tmp_path / "there.yaml").write_text("rate: 2")
    (tmp_path / "here.yaml").symlink_to(tmp_path / "there.yaml")
    assert config.read_yaml(str(tmp_path / "here.yaml")) == {"rate": 2}


def test_a_value_in_a_sentence_is_short_whatever_it_is():
    class Rude:
        def __repr__(self):
            raise RuntimeError

    nested = []
    nested.append(nested)
    for value in (
        10**5000,
        "x" * 10**6,
        [[[[1]] * 1000] * 1000] * 1000,
        nested,
        Rude(),
        {"\ud800": "\x1b"},
        {NUL: [1e999]},
    ):
        assert len(shown(value)) <= 200 and shown(value).isprintable()


# The command line of a real binary.

BAD_FLAGS = {
    "--max_time=1e300": "--max_time is '1e300'; expected seconds above 0 and up to 1e+09",
    f"--max_time={'9' * 300}": "expected seconds above 0 and up to 1e+09",
    f"--max_time={'9' * 400}d": "expected seconds above 0 and up to 1e+09",
    f"--train_steps={'9' * 400}": "expected a whole number from",
    f"--config.state_mb=0x{'f' * 5000}": "a number of|expected float",
    "--config.letter=!!timestamp foo": "",
    "--config_file={fifo}": "cannot be read",
    "--config_file={aliases}": "more than 50,000 values",
    "--model_dir={folder}/\udcff": "is not UTF-8",
}


@pytest.mark.slow
def test_bad_text_on_a_command_line_ends_in_a_sentence(nursery, tmp_path):
    make_fifo(tmp_path / "fifo")
    (tmp_path / "aliases").write_text(aliases(9))
    places = {"fifo": tmp_path / "fifo", "aliases": tmp_path / "aliases", "folder": tmp_path}
    lives = {}
    for number, flag in enumerate(BAD_FLAGS):
        lives[flag] = nursery.life(
            tmp_path / f"{number}", "--train_steps=1", "--eval_interval=1", flag.format(**places)
        )
    for flag, life in lives.items():
        code, output = life.code(), life.output()
        assert "Traceback" not in output, output[-3000:]
        if expected := BAD_FLAGS[flag]:
            last = output.splitlines()[-1]
            assert code == 1 and any(one in last for one in expected.split("|")), (flag[:50], output[-500:])
            assert len(last) < 1000
        else:
            assert code == 0, output[-500:]


@pytest.mark.slow
def test_jobs_of_a_run_whose_record_somebody_has_forged_end_well(nursery, tmp_path):
    flags = ["--train_steps=1", "--eval_interval=1", "--config.shows"]
    assert nursery.life(tmp_path / "run", *flags).code() == 0
    path = tmp_path / "run" / "run.json"
    forged = json.loads(path.read_text())
    forged |= {"config": {"data": SURROGATE, "letter": "x" * 10**6, "state_mb": 10**400, "\x1b[2J": {"a": [NUL]}}, "flags": 7,
               "seconds": "long", "metrics": {"train": 3}, "starts": [7, {"process": {"pid": "1"}}], "restarts": 1e999}  # fmt: skip
    path.write_text(json.dumps(forged))
    for job in (["--mode=eval"], [], ["--mode=export"]):
        life = nursery.life(tmp_path / "run", *flags, *job)
        assert life.code() == 0, life.output()[-3000:]
        output = life.output()
        assert "Traceback" not in output and "\x1b[2J" not in output and len(output) < 20_000
    report = json.loads(path.read_text())
    assert report["status"] == "done" and report["config"]["letter"] == "" and report["restarts"] == 1


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("value", [1e300, 10**400, float("inf"), float("nan"), "1e999", "9" * 400, True, [], 1e10])
def test_a_time_that_no_timer_can_wait_for_is_refused(value):
    with pytest.raises(SettingError, match=r"0.*1e\+09"):
        duration("--max_time", value)


def test_a_number_that_no_integer_of_tensorflow_holds_is_refused():
    with pytest.raises(SettingError, match="1.*9223372036854775807"):
        whole_number("steps", 10**400)


# Run records.

WRONG_REPORTS = {
    "step": {"step": "6"},
    "program": {"starts": [{"program": 7, "command": ["x"], "started": "now"}]},
    "arguments": {"starts": [{"program": {"arguments": 3, "directory": 4}, "command": 5, "started": 6}]},
    "NUL": {"starts": [{"program": {"arguments": [NUL], "directory": NUL}, "command": [NUL], "started": "now"}]},
    "starts": {"starts": {"a": 1}},
    "many starts": {"starts": [{"started": "now", "points": [{"step": 1}] * 50}] * 5000},
    "seconds": {"seconds": {"wall": "long", "train": 10**400}, "metrics": {"train": {"loss": "low"}, "eval": 3}},
    "changed": {"starts": [{"started": "now", "changed": {"seed": [1]}, "rollbacks": [{"step": []}, 3]}]},
    "verdict": {"verdict": "; what", "starts": [{"started": "now", "verdict": "; what", "points": [{"step": 1}]}]},
    "surrogates": {"error": SURROGATE, "verdict": SURROGATE, "flags": {SURROGATE: SURROGATE}, "status": "failed"},
    "escapes": {"error": "\x1b[2J", "flags": {"\x1b[2J": "\x1b[2J"}, "status": "failed", "versions": {"x": "\x1b[2J"}},
    "no object": 7,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG_REPORTS)
@pytest.mark.parametrize("name", ["run.json", "run_eval.json"])
def test_a_run_record_of_other_types_is_left_out_part_by_part(name, case, folder, run, capsys):
    report = json.loads((folder / name).read_text())
    wrong = WRONG_REPORTS[case]
    (folder / name).write_text(json.dumps(report | wrong if isinstance(wrong, dict) else wrong))
    ask(folder, run, capsys)
    if name == "run.json":
        assert hostile_test.train(folder, 7).global_step == 7
        report = json.loads((folder / name).read_text())
        assert report["status"] == "done" and 1 < len(report["starts"]) + (case in ("starts", "no object")) <= 200


def test_a_run_record_is_read_by_its_types(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(
        '{"step": 3, "final_step": "3", "seconds": {"a": 1, "b": 1e999}, "newer": [1], "program": null, "flags": 3}'
    )
    assert RunDir(tmp_path).report() == RunReport(step=3, seconds={"a": 1})
    for text in ("[" * 1000 + "]" * 1000, '{"a": ' + "9" * 5000 + "}", "[" * 10**6, '{"a": "\xff"', "NaN"):
        path.write_text(text, encoding="latin-1")
        assert RunDir(tmp_path).report() is None


@pytest.mark.slow
def test_a_start_takes_the_times_and_the_restarts_from_a_record_whose_old_starts_have_no_room(folder):
    report = json.loads((folder / "run.json").read_text())
    first = report["starts"][0]
    report |= {"starts": [first] * 500, "restarts": 499, "seconds": {"wall": 1000.0}}
    (folder / "run.json").write_text(json.dumps(report))
    hostile_test.train(folder, 7)
    now = json.loads((folder / "run.json").read_text())
    assert len(now["starts"]) == 200 and now["restarts"] == 500 and 1000 < now["seconds"]["wall"] < 1100
    assert now["starts"][0] == first and now["starts"][-1]["step"] == 7


@pytest.mark.slow
def test_a_commit_that_git_would_take_for_an_option_is_none(folder, tmp_path, capsys, monkeypatch):
    report, made = json.loads((folder / "run.json").read_text()), tmp_path / "made"
    program = report["starts"][0]["program"] | {"repository": str(ROOT),
                                                "arguments": [__file__], "commit": f"--output={made}", "changes": "x"}  # fmt: skip
    report["program"] = report["starts"][0]["program"] = program
    (folder / "run.json").write_text(json.dumps(report))
    assert cli(["rerun", str(folder), f"--to={tmp_path}/again"]) == 2  # the command of the test does nothing
    assert "was not recorded" in capsys.readouterr().out and not made.exists()


# Records of metrics and media.


def test_metrics_are_numbers_whatever_the_file_has(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1, "split": "train", "a": 1, "b": "text", "c": [1], "d": 1e999, "e": NaN, "f": null}',
             '{"step": 2, "split": "train", "a": ' + "9" * 400 + "}", '{"step": ' + "9" * 400 + ', "split": "train"}',
             '{"step": 3, "split": 3}', '{"step": true, "split": "train"}', "[]", "{", '{"step": ' + "9" * 5000 + "}"]  # fmt: skip
    path.write_text("\n".join([*lines, *["bad"] * 1000]))
    assert RunDir(tmp_path).records().by_key() == {
        (1, "train"): {"a": 1, "d": None, "e": None, "f": None},
        (2, "train"): {"a": None},
    }
    warnings = [record for record in caplog.records if "metrics.jsonl" in record.getMessage()]
    assert len(warnings) == 11 and "1006 lines are not records" in warnings[-1].getMessage()


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("content", [b"x" * 200_000, b"step,loss\n" + b"9" * 5000 + b",1\n", b'\xff\0\n"', b"", "FIFO"])
def test_a_table_of_somebody_else_is_taken_or_refused(content, tmp_path):
    (tmp_path / "csv").mkdir()
    if content == "FIFO":
        make_fifo(tmp_path / "csv" / "train.csv")
    else:
        (tmp_path / "csv" / "train.csv").write_bytes(content)
    with limited("table"), contextlib.suppress(UsageError):
        writer = CsvWriter(str(tmp_path))
        writer.resume(3, {})
        writer.write(4, "train", {"loss": 1.0})
        assert (tmp_path / "csv" / "train.csv").read_text().splitlines()[-1].startswith("4,")


def test_texts_that_are_not_utf8_are_shown_with_escapes(tmp_path):
    for decode, expected in ((lambda value: SURROGATE, "\\ud800"), (lambda value: NUL, NUL)):
        media = {"a": Media("text", (np.array([b"x"]),), decode)}
        (shown_text,) = as_shown(media).values()
        assert shown_text.texts == (expected,)
        for writer in (TensorBoardWriter(str(tmp_path)), MediaWriter(str(tmp_path))):
            writer.show(1, "train", {"a": shown_text})
            writer.close()


NAMES = [NUL, SURROGATE, "../x.png", "/etc/passwd", "", ".", "..", "a/b.png", "x" * 5000, 7, None, ["x.png"], "x.png\0"]


@pytest.mark.slow
def test_a_file_name_that_is_none_costs_its_image_alone(folder, run, capsys):
    record = {"step": 3, "split": "train", "name": "y", "kind": "image", "files": [*NAMES, "x.png"]}
    odd = {"step": 3, "split": SURROGATE, "name": NUL, "kind": "text", "texts": [SURROGATE, NUL, 7, "\x1b[2J"]}
    with open(folder / "media.jsonl", "a") as file:
        file.write(f"{json.dumps(record)}\n{json.dumps(odd)}\n")
    ask(folder, run, capsys)
    assert cli(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text().count("data:image/png;base64") == 2  # that of the run, and this one


def test_a_link_in_the_place_of_the_images_is_not_followed(folder, run, tmp_path, capsys):
    (folder / "media").rename(tmp_path / "media")
    (folder / "media").symlink_to(tmp_path / "media")
    ask(folder, run, capsys)
    assert cli(["report", str(folder)]) == 0 and "data:image/png;base64" not in (folder / "report.html").read_text()


LONG = 198_000_000
# What a start does, and what the tools do, with the peak of the memory before it and after it.
MEASURED = """
import sys
from looplib.__main__ import main
from looplib.report.writers.files import JsonlWriter
from looplib.report.writers.files import MediaWriter
from looplib.run.records import read_jsonl
from looplib.run.report import RunReport

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) >> 10

run, other = sys.argv[1:]
before = peak()
for path in (f"{run}/metrics.jsonl", f"{run}/media.jsonl"):
    assert read_jsonl(path)[-1]["step"] == 7
for question in (["status", run], ["report", run], ["report", run, other, f"--output={run}/x"]):
    assert main(question) == 0
JsonlWriter(f"{run}/metrics.jsonl").resume(6, {})
JsonlWriter(f"{run}/metrics.jsonl").write(7, "train", {"loss": 1.0})
MediaWriter(run).resume(6, {})
print(peak() - before)
"""


@pytest.mark.slow
def test_a_line_of_198_mb_takes_little_memory(folder, run, python):
    for name in ("metrics.jsonl", "media.jsonl"):
        with open(folder / name, "ab") as file:
            file.write(b'{"step": 7, "split": "train", "x": [' + b"[]," * (LONG // 3) + b"[]]}\n")
            file.write(b'{"step": 7, "split": "train", "loss": 0.5}\n')
    done = subprocess.run([python, "-c", MEASURED, folder, run], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 400  # MB
    assert [record["step"] for record in read_jsonl(str(folder / "metrics.jsonl"))][-2:] == [6, 7]


def test_a_file_of_records_that_no_memory_holds_is_refused(folder, run, capsys):
    os.truncate(folder / "metrics.jsonl", 60 << 30)  # sparse
    with limited("sparse"):
        assert cli(["report", str(folder)]) == 0 and cli(["status", str(folder)]) == 0
        capsys.readouterr()
        assert cli(["diff", str(folder), str(run)]) == 2
    assert "metrics.jsonl has more than 536,870,912 bytes" in capsys.readouterr().err


def test_records_share_the_names_of_their_metrics(run):
    one, other = list(RunDir(run).records().by_key().values())[:2]
    assert len(one) > 2 and {id(name) for name in one} == {id(name) for name in other}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("field", ["command", "program", "strategy", "status"])
def test_of_a_long_text_in_a_run_record_the_beginning_is_shown(field, folder, run, capsys):
    report, long = json.loads((folder / "run.json").read_text()), "MultiWorker" + "x\n" * 1_500_000
    if field == "command":
        report["starts"][-1]["command"].append(long)
    elif field == "program":
        report["program"] = {**(report.get("program") or {}), "arguments": ["-m", long], "commit": long}
        report["versions"] = {"looplib": long}
    else:
        report[field] = long
    (folder / "run.json").write_text(json.dumps(report))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "split": "train", "loss": 1e9}\n')
    for question in (["diff", folder, run], ["replay", folder, "--step=2"], ["rerun", folder], ["export", folder]):
        cli([str(word) for word in question])
        shown = capsys.readouterr()
        assert len(shown.out + shown.err) < 30_000 and "Traceback" not in shown.err, question


def test_json_has_bounds():
    for text in ("[" * 101 + "]" * 101, "[" * 10**5, "9" * 5000, b"\xff", ""):
        with pytest.raises(ValueError):
            parse_json(text)
    assert parse_json("[" * 100 + "]" * 100) and parse_json(b'{"a": [' + b"{}," * 200 + b"1]}")["a"][-1] == 1
