"""Model Garden's configuration decides looplib's flags, and what is not honoured is named."""

import pathlib
import re

import pytest

pytest.importorskip("official", reason="needs Model Garden: pip install 'looplib[models]'")

from official.common import registry_imports  # noqa: F401
from official.core import exp_factory
from official.modeling import hyperparams

import looplib
from trainers import model_garden_config

ROOT = pathlib.Path(__file__).parents[2]


def configuration(**sections):
    params = exp_factory.get_exp_config("resnet_imagenet")
    params.override({"trainer": {"train_steps": 10}})
    params.override(sections)
    return params


def test_what_trainer_and_runtime_say_becomes_flags():
    values = model_garden_config.flag_values(
        configuration(
            trainer=dict(
                train_steps=7, steps_per_loop=3, checkpoint_interval=4, validation_interval=5, validation_steps=6,
                max_to_keep=2, continuous_eval_timeout=9, loss_upper_bound=50.0, recovery_begin_steps=8,
                recovery_max_trials=2,
            ),
            runtime=dict(
                distribution_strategy="tpu", tpu="local", mixed_precision_dtype="bfloat16", num_cores_per_replica=2
            ),
            task=dict(train_data=dict(global_batch_size=24)),
        )
    )  # fmt: skip
    assert values == dict(
        train_steps=7, steps_per_loop=3, checkpoint_interval=4, eval_interval=5, eval_steps=6, keep_last=2,
        eval_timeout=9, loss_limit=50.0, loss_limit_from=8, non_finite="rollback", on_spike="rollback", rollbacks=2,
        strategy="auto", tpu="local", tpu_cores_per_replica=2, mixed_precision="mixed_bfloat16", loop="graph",
        global_batch_size=24,
    )  # fmt: skip


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "name, strategy",
    [("off", "one_device"), ("one_device", "one_device"), ("mirrored", "auto"),
     ("multi_worker_mirrored", "multi_worker"), ("parameter_server", "parameter_server"), ("tpu", "tpu")],
)  # fmt: skip
def test_each_strategy_has_its_name(name, strategy):
    assert (
        model_garden_config.flag_values(configuration(runtime=dict(distribution_strategy=name)))["strategy"] == strategy
    )


def test_an_interval_of_evaluations_says_nothing_where_there_is_none():
    assert "eval_interval" not in model_garden_config.flag_values(
        configuration(trainer=dict(validation_interval=0)), "train"
    )


def test_the_command_line_replaces_fields():
    params = configuration()
    model_garden_config.replace(params, "trainer.train_steps", 70)
    model_garden_config.replace(params, "task.train_data.global_batch_size", 48)
    model_garden_config.replace(params, "task.no_such.global_batch_size", 48)
    values = model_garden_config.flag_values(params)
    assert values["train_steps"] == 70 and values["global_batch_size"] == 48
    for path in model_garden_config.FIELDS.values():
        model_garden_config.replace(params, path, 2)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "trials, expected",
    [
        (-1, dict(non_finite="off")),
        (0, dict(non_finite="halt", on_spike="halt", rollbacks=0)),
        (3, dict(non_finite="rollback", on_spike="rollback", rollbacks=3)),
    ],
)
def test_recovery_keeps_its_meaning(trials, expected):
    values = model_garden_config.flag_values(configuration(trainer=dict(recovery_max_trials=trials)))
    assert expected.items() <= values.items()
    assert ("loss_limit" in values) == (trials >= 0)


def test_what_is_not_honoured_is_named_and_only_that():
    assert model_garden_config.not_honoured(configuration(trainer=dict(summary_interval=1000))) == []
    sentences = model_garden_config.not_honoured(
        configuration(
            runtime=dict(all_reduce_alg="nccl", gpu_thread_mode="gpu_private"),
            trainer=dict(summary_interval=7000, allow_tpu_summary=True),
        )
    )
    for start in (
        "runtime.all_reduce_alg='nccl' (", "runtime.gpu_thread_mode='gpu_private' (", "trainer.summary_interval=7000 (",
        "trainer.allow_tpu_summary=True (",
    ):  # fmt: skip
        assert sum(sentence.startswith(start) for sentence in sentences) == 1, start
    assert len(sentences) == 4


def test_every_field_is_honoured_or_has_a_reason():
    params = configuration()
    for section, honoured in model_garden_config._HONOURED.items():
        for name in getattr(params, section).as_dict():
            assert name in honoured or f"{section}.{name}" in model_garden_config._WHY, f"{section}.{name}"


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "sections, message",
    [
        (
            dict(runtime=dict(distribution_strategy="mirroed")),
            "distribution_strategy.*'mirroed'",
        ),
        (dict(runtime=dict(mixed_precision_dtype="half")), "mixed_precision_dtype.*'half'"),
        (dict(runtime=dict(num_gpus=64)), "runtime.num_gpus.*64"),
        (
            dict(trainer=dict(validation_interval=0)),
            "trainer.validation_interval.*0.*1",
        ),
        (dict(trainer=dict(max_to_keep=0)), "trainer.max_to_keep.*0"),
        (dict(trainer=dict(train_steps="abc")), "trainer.train_steps.*'abc'.*-1"),
        (dict(trainer=dict(best_checkpoint_metric_comp="bigger")), "'bigger'"),
    ],
)
def test_what_no_run_can_have_is_a_sentence(sections, message):
    with pytest.raises(looplib.UsageError, match=message):
        model_garden_config.flag_values(configuration(**sections))


def test_the_ready_commands_of_the_documents_have_configurations_that_apply():
    found = set()
    for page in ("README.md", "docs/model_garden.md"):
        pattern = r"trainers\.model_garden --experiment=(\S+) --config_file=(trainers/\S+)"
        found |= set(re.findall(pattern, (ROOT / page).read_text()))
    assert {name for _, name in found} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "trainers" / "configs").iterdir()
    }
    for name, file in found:
        params = hyperparams.override_params_dict(exp_factory.get_exp_config(name), str(ROOT / file), is_strict=True)
        params.validate()
        assert model_garden_config.flag_values(params)["train_steps"] > 0
        assert model_garden_config.not_honoured(params) == []
