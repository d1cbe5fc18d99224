"""The configuration of a binary, from code, YAML files and flags."""

import json
import pathlib

import pytest
import yaml
from nested import Colour, Config, Model

from looplib.binary import config
from looplib.config import field_types
from looplib.errors import ConfigurationError

SMALL = ("--train_steps=2", "--eval_interval=2", "--steps_per_loop=2", "--loop=eager")
EVERYTHING = """
rate: 1e-3
shuffle: true
model: {width: 8, dropout: 1}
teacher: {width: 3}
sizes: [4, 5, 6]
pair: [7, b]
weights: [1, 1e-4, .inf]
kind: y
colour: BLUE
name: "12"
limits: {upper: 3}
"""


def overridden(text):
    tree = config.given(Config())
    config.merge(tree, Config, field_types.load(text), lambda where: f"{where} in a.yaml")
    return field_types.typed(tree, Config, str, "")


def test_a_file_gives_every_field_a_value_of_the_fields_type():
    assert overridden(EVERYTHING) == Config(
        0.001, True, Model(8, 1.0), Model(3), (4, 5, 6), (7, "b"), [1.0, 1e-4, float("inf")], "y", Colour.BLUE, "12", {"upper": 3}
    )  # fmt: skip


@pytest.mark.parametrize("original", [Config(), overridden(EVERYTHING)], ids=["default", "changed"])
def test_what_is_dumped_gives_the_configuration_again(original):
    assert overridden(config.text_of(original, config.given(original))) == original


def test_a_part_that_a_file_leaves_out_stays():
    changed = overridden("model: {dropout: 0.5}")
    assert changed == Config(model=Model(4, 0.5)) and Config() == Config(model=Model(4, None))


WRONG = {
    "model: {widht: 3}": "model.widht in a.yaml is not a setting of Model; did you mean width?",
    "zzz: 3": "zzz in a.yaml is not a setting of Config; expected one of rate, shuffle",
    "3: 3": "3 in a.yaml is not a setting of Config",
    "rate: true": "rate in a.yaml is True; expected float",
    "rate: fast": "rate in a.yaml is 'fast'; expected float",
    "rate:": "rate in a.yaml is None; expected float",
    "shuffle: 1": "shuffle in a.yaml is 1; expected bool",
    "model: 3": "model in a.yaml is 3; expected Model",
    "model: {width: 2.5}": "model.width in a.yaml is 2.5; expected int",
    "model: {width: true}": "model.width in a.yaml is True; expected int",
    "model: {dropout: much}": "model.dropout in a.yaml is 'much'; expected float",
    "teacher: {depth: 1}": "teacher.depth in a.yaml is not a setting of Model",
    "sizes: 3": "sizes in a.yaml is 3; expected tuple[int, ...]",
    "sizes: [1, a]": "sizes[1] in a.yaml is 'a'; expected int",
    "pair: [1]": "pair in a.yaml is [1]; expected tuple[int, str]",
    "kind: z": "kind in a.yaml is 'z'; expected Literal['x', 'y']",
    "colour: GREEN": "colour in a.yaml is 'GREEN'; expected one of RED, BLUE",
    "name: 12": "name in a.yaml is 12; expected str",
}


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_name_or_type_in_a_file_is_a_sentence(text):
    with pytest.raises(ConfigurationError) as error:
        overridden(text)
    assert str(error.value).startswith(WRONG[text])


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "text, sentence", [("- 1", "holds a list"), ("a: [", r"cannot be read: "), (None, "No such file")]
)
def test_a_file_that_holds_no_settings_is_a_sentence(text, sentence, tmp_path):
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=f"--config_file={path}.*{sentence}"):
        config.read_yaml(str(path))


def printed(nursery, *arguments):
    """Returns what --print_config prints, as a dict."""
    life = nursery.life_of("nested", *map(str, arguments), "--print_config")
    assert life.code() == 0, life.output()
    lines = life.output().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("rate:"))
    return yaml.safe_load("\n".join(lines[start:]))


@pytest.mark.slow
def test_later_files_win_over_earlier_ones_and_flags_over_files(nursery, tmp_path):
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("rate: 1\nmodel: {width: 1, dropout: 0.25}\nname: first")
    second.write_text("model: {width: 2}\nname: second")
    files = [f"--config_file={first}", "--config_file", second]
    found = printed(nursery, "--config.name=flag", *files)
    assert found["rate"] == 1.0 and found["model"] == {"width": 2, "dropout": 0.25} and found["name"] == "flag"
    found = printed(
        nursery, *reversed([files[0], f"--config_file={second}"]), "--experiment", "small", "--config.shuffle"
    )
    assert found["model"]["width"] == 1 and found["name"] == "first" and found["shuffle"] is True
    assert printed(nursery, "--experiment=small")["rate"] == 3.0 and printed(nursery)["rate"] == 0.1


BAD = {
    "--config.model.widht=3": "--config.model.widht is not a setting of Model; did you mean width? expected one of width, dropout",
    "--noconfig.shuffel": "--config.shuffel is not a setting of Config; did you mean shuffle?",
    "--config.model.width=wide": "--config.model.width is 'wide'; expected int",
    "--config.model.dropout=high": "--config.model.dropout is 'high'; expected float | None",
    "--config.colour=green": "--config.colour is 'green'; expected one of RED, BLUE",
    "--config.kind=z": "--config.kind is 'z'; expected Literal['x', 'y']",
    "--config.weights=1,x": "--config.weights[1] is 'x'; expected float",
    "--config.limits.x=1": "--config.limits.x is not a setting, because x would be in a value of the type dict",
    "--config.rate.x=1": "--config.rate.x is not a setting, because x would be in a value of the type float",
    "--config.shuffle=maybe": "flag --config.shuffle=maybe: ('Non-boolean argument to boolean flag', 'maybe')",
    "--fast": "Unknown command line flag 'fast'; --help lists the flags",
    "--shufle": "Unknown command line flag 'shufle'; did you mean the setting --config.shuffle? --help lists the flags",
    "--batch_size=32": "Unknown command line flag 'batch_size'; did you mean --global_batch_size? --help lists the flags",
    "--width=3": "Unknown command line flag 'width'; did you mean the setting --config.model.width?",
    "--experiment=smal": "--experiment=smal is not a named variant; did you mean small? expected one of small",
    "--config_file=/nowhere.yaml": "--config_file=/nowhere.yaml cannot be read",
}


@pytest.mark.slow
@pytest.mark.parametrize("argument", BAD)
def test_a_wrong_flag_is_a_sentence(argument, nursery):
    life = nursery.life_of("nested", argument)
    assert life.code() == 1
    assert life.output().splitlines()[-1].startswith(f"looplib: error: {BAD[argument]}")


def test_a_variant_of_another_class_is_an_error():
    with pytest.raises(TypeError, match="experiment 'model' is a Model; expected a Config"):
        config.define(Config(), {"model": Model()}, ["program"])


def test_the_run_directory_has_the_configuration_which_can_be_given_back(nursery, tmp_path):
    path = tmp_path / "1.yaml"
    path.write_text("learning_rate: 2e-3")
    one, other = tmp_path / "one", tmp_path / "other"
    binary = "trainers.image_classification"
    first = ["--experiment=mlp", f"--config_file={path}", "--config.decay_steps=7"]
    for folder, arguments in ((one, first), (other, [f"--config_file={one}/config.yaml"])):
        life = nursery.life_of(binary, f"--model_dir={folder}", *SMALL, *arguments)
        assert life.code() == 0, life.output()
    texts = [pathlib.Path(folder, "config.yaml").read_text() for folder in (one, other)]
    assert texts[0] == texts[1]
    values = yaml.safe_load(texts[0])
    assert (values["model"], values["learning_rate"], values["decay_steps"]) == ("mlp", 0.002, 7)
    configs = [json.loads((folder / "run.json").read_text())["config"] for folder in (one, other)]
    assert configs[0] == configs[1] == values
    evaluation = [binary, f"--model_dir={one}", "--mode=eval", "--loop=eager"]
    other = nursery.life_of(*evaluation, "--experiment=mlp", "--config.decay_steps=7")
    assert other.code() == 0
    assert "settings differ from those of the training: config.learning_rate=0.001 (the training has 0.002);" in (
        other.output()
    )
    equal = nursery.life_of(*evaluation, f"--config_file={one}/config.yaml")
    assert equal.code() == 0 and "settings " not in equal.output()  # differ neither from the training nor from that job
