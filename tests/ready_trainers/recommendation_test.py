"""Recommendation: what users like, the loss over all replicas, and metrics beside numpy, on parameter servers too."""

import dataclasses
import json
import subprocess

import flat_config
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy
from paths import ROOT

import looplib
from trainers import recommendation
from trainers.recommendation import Config

# 150 pairs to evaluate on: no whole number of batches of 32, nor of halves of them.
SMALL = Config(users=75, items=60, likes=10, held_out=2, negatives=7, dim=5, shards=3)
FLAGS = [
    f"--config.{name}={value}"
    for name, value in dataclasses.asdict(SMALL).items()
    if value != getattr(Config(), name)
]  # fmt: skip


def build(config, strategy, **settings):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        trainer, evaluator = recommendation.build(config)
    settings = {"global_batch_size": 32, "writers": [], "loop": "graph", **settings}
    return trainer, flat_config.controller(trainer=trainer, evaluator=evaluator, strategy=strategy, **settings)


def metrics_of_tables(folder, step):
    """Computes (AUC, recall at 10) from the tables of a checkpoint, pair by pair."""
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{step}"))
    name = "{}/rows_{}/.ATTRIBUTES/VARIABLE_VALUE"
    users, items = (
        np.concatenate([reader.get_tensor(name.format(table, part)) for part in range(SMALL.shards)])
        for table in ("users", "items")
    )
    likes, areas, recalled = recommendation.make_likes(SMALL), [], []
    for user, item in likes.test:
        scores = items @ users[user]
        areas.append(np.mean([scores[item] > scores[other] for other in likes.negatives[user]]))
        recalled.append(item in np.argsort(-scores)[:10])
    return np.mean(areas), np.mean(recalled)


def test_each_user_likes_items_of_a_taste_and_no_negative_is_liked():
    likes, again = recommendation.make_likes(SMALL), recommendation.make_likes(SMALL)
    pairs = np.concatenate([likes.train, likes.test]).tolist()
    assert len(set(map(tuple, pairs))) == len(pairs) == SMALL.users * SMALL.likes
    assert np.bincount(likes.test[:, 0]).tolist() == [SMALL.held_out] * SMALL.users
    for user, others in enumerate(likes.negatives):
        assert len(set(others)) == SMALL.negatives and not any([user, item] in pairs for item in others)
    np.testing.assert_array_equal(likes.train, again.train)
    np.testing.assert_array_equal(likes.negatives, again.negatives)
    other = recommendation.make_likes(dataclasses.replace(SMALL, data_seed=1))
    assert (other.train != likes.train).any()


def test_the_loss_is_that_of_a_plain_loop_over_the_items_of_the_batch():
    trainer, _ = build(SMALL, make_strategy("default"))
    likes = recommendation.make_likes(SMALL)
    users, items = np.array([3, 5, 8, 3]), likes.train[[0, 9, 0, 17], 1]  # an item comes twice
    wanting, offered = (vectors.numpy() for vectors in trainer.model([users, items]))
    losses, _ = trainer.loss_fn((tf.constant(users), tf.constant(items)))
    share = {item: np.mean(likes.train[:, 1] == item) for item in items}
    for row in range(4):
        columns = [row, *(column for column in range(4) if items[column] != items[row])]
        logits = [wanting[row] @ offered[column] - np.log(share[items[column]]) for column in columns]
        assert losses[row].numpy() == pytest.approx(np.log(np.sum(np.exp(logits))) - logits[0], rel=1e-5)


def test_two_replicas_train_on_the_loss_of_one_and_metrics_are_those_of_numpy(tmp_path):
    losses = {}
    for name in ("default", "mirrored_x2"):
        history = losses[name] = []
        action = lambda event, history=history: event.split == "train" and history.append(event.metrics["loss"])
        settings = {"steps_per_loop": 1, "actions": [action], "model_dir": tmp_path / name}
        _, controller = build(SMALL, make_strategy(name), **settings)
        found = controller.train_and_evaluate(60, 60)["eval"]
        auc, recall = metrics_of_tables(tmp_path / name, 60)
        assert found == {"auc": pytest.approx(auc), "recall_at_10": pytest.approx(recall), "examples": 150}
        assert 0.6 < auc < 1 and 10 / 60 < recall < 1
    assert len(losses["default"]) == 60 and losses["default"][-1] < losses["default"][0]
    np.testing.assert_allclose(losses["mirrored_x2"], losses["default"], rtol=1e-5)


def test_equal_scores_are_no_recall():
    trainer, controller = build(SMALL, make_strategy("default"))
    for weights in trainer.model.trainable_variables:
        weights.assign(tf.zeros_like(weights))
    assert controller.evaluate()["eval"] == {"auc": 0.5, "recall_at_10": 0.0, "examples": 150}


@pytest.mark.slow
@pytest.mark.parametrize("servers, strategy", [(1, "parameter_server"), (0, "multi_worker")])
def test_workers_train_the_tables_and_metrics_are_those_of_numpy(servers, strategy, tmp_path, python):
    command = [
        *(python, "-m", "looplib", "launch", "--workers=2", f"--parameter_servers={servers}", "--"),
        *(python, "-m", "trainers.recommendation", f"--strategy={strategy}", f"--model_dir={tmp_path}"),
        *("--train_steps=60", "--eval_interval=60", "--global_batch_size=32", *FLAGS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (found,) = [record for record in records if record["split"] == "eval"]
    auc, recall = metrics_of_tables(tmp_path, 60)
    assert found["auc"] == pytest.approx(auc) and found["recall_at_10"] == pytest.approx(recall)
    assert found["examples"] == 150 and 0.6 < auc < 1 and 10 / 60 < recall < 1


@pytest.mark.slow
def test_an_export_recommends_the_best_items(tmp_path):
    trainer, controller = build(SMALL, make_strategy("default"))
    loaded = tf.saved_model.load(f"{controller.export(tmp_path / 'export')}/saved_model")
    served = loaded.serve(tf.constant([7, 0], tf.int64))
    users, items = trainer.model([np.arange(75), np.arange(60)])
    expected = np.argsort(-(users.numpy() @ items.numpy().T)[[7, 0]], axis=1)[:, :10]
    np.testing.assert_array_equal(served["items"], expected)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(dim=0), "--config.dim.*0"),
        (dict(held_out=10), "--config.held_out is 10.*likes, 10"),
        (dict(items=16), "--config.items is 16.*at least 17"),
    ],
)
def test_bad_settings_are_sentences(changes, message):
    with pytest.raises(looplib.UsageError, match=message):
        recommendation.build(dataclasses.replace(SMALL, **changes))
