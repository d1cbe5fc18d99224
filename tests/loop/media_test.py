"""Images, texts and histograms of reported steps, in files and in TensorBoard, each once."""

import json
import urllib.parse
import urllib.request

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more
from tensorboard import program

import looplib
from looplib.errors import EngineError
from looplib.run.records import read_jsonl

_MOST = 3


class Showing(toy.Regression):
    """Shows the ids of its examples as images and texts, and their features as a histogram; counts what it computes."""

    text = staticmethod(lambda ids: looplib.text(tf.strings.as_string(ids), most=_MOST))

    def __init__(self):
        super().__init__()
        self.computed = [0]

    def step_fn(self, inputs):
        ids, x, _ = inputs
        images = tf.cast(ids, tf.uint8)[:, None, None, None] * tf.ones([1, 2, 4, 1], tf.uint8)
        return {
            **super().step_fn(inputs),
            "an/image ../<b>": looplib.image(images, most=_MOST),
            "text": self.text(ids),
            "histogram": looplib.histogram(x, bins=5),
        }


class Decoding(Showing):
    """Shows its ids as texts that are made on the host."""

    text = staticmethod(lambda ids: looplib.text(ids[:, None], most=_MOST, decode=lambda row: str(row[0])))


class Counting(Showing):
    """Counts how often its text is computed."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def text(self, ids):
        def count(ids):
            self.times += 1
            return ids

        return looplib.text(tf.strings.as_string(tf.numpy_function(count, [ids], tf.int64, stateful=False)[:2]))


class Evaluating(toy.RegressionEvaluator):
    """Shows its first examples as images."""

    def step_fn(self, inputs):
        return {**super().step_fn(inputs), "seen": looplib.image(tf.nn.sigmoid(inputs[0])[:, :, None, None])}


class Collecting(Evaluating):
    """Shows its first examples, and collects all labels."""

    def __init__(self, model):
        super().__init__(model)
        self.labels = []

    def step_fn(self, inputs):
        return {**super().step_fn(inputs), "labels": looplib.each(inputs[1])}

    def collect(self, outputs):
        self.labels += [label for output in outputs for label in output["labels"].numpy()]


@pytest.fixture(scope="module")
def order():
    """The global batches of six steps, from a run of one step a loop."""
    trainer = toy.Regression()
    with toy.controller(None, trainer) as controller:
        controller.train(6)
    return np.array(trainer.order)


def make(kind, strategy=None, **settings):
    with (strategy or tf.distribute.get_strategy()).scope():
        trainer = kind()
        evaluator = Evaluating(trainer.model)
    return toy.controller(strategy, trainer, evaluator, **{"steps_per_loop": 2, "writers": None, **settings})


def lines(directory, name="media.jsonl"):
    return {(r["step"], r["split"], r["name"]): r for r in read_jsonl(str(directory / name))}


def pixels(directory, record):
    return [tf.io.decode_png((directory / "media" / name).read_bytes()).numpy() for name in record["files"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, strategy, engine",
    [
        (Showing, "default", "graph"),
        (Decoding, "default", "xla"),
        (Decoding, "mirrored_x2", "eager"),
        *more(
            [
                (Showing, "mirrored_x2", "graph"),
                (Showing, "default", "auto"),
                (Showing, "default", "eager"),
                (Showing, "one_device", "graph"),
            ]
        ),
    ],
)
def test_reported_steps_show_the_first_examples_of_the_first_replica(kind, strategy, engine, order, tmp_path):
    with make(kind, make_strategy(strategy), model_dir=tmp_path, loop=engine) as controller:
        controller.train_and_evaluate(5, 5)
    found = lines(tmp_path)
    names = ("an/image ../<b>", "text", "histogram")
    assert found.keys() == {(s, "train", n) for s in (2, 4, 5) for n in names} | {(5, "eval", "seen")}
    for step in (2, 4, 5):
        ids = order[step - 1][:_MOST]
        image, text, histogram = (found[step, "train", name] for name in names)
        assert text == {"step": step, "split": "train", "name": "text", "kind": "text", "texts": [str(i) for i in ids]}
        for i, picture in zip(ids, pixels(tmp_path, image), strict=True):
            np.testing.assert_array_equal(picture, np.full((2, 4, 1), i))
        own = toy.X[order[step - 1][: 8 // controller.loops["train"].data.stream.strategy.num_replicas_in_sync]]
        counts, edges = np.histogram(own, 5)
        assert histogram["counts"] == counts.tolist()
        np.testing.assert_allclose(histogram["edges"], edges, atol=1e-6)
    seen = pixels(tmp_path, found[5, "eval", "seen"])
    for row, picture in zip(toy.X[:4], seen, strict=True):
        np.testing.assert_allclose(picture[:, 0, 0], 255 / (1 + np.exp(-row)), atol=0.51)
    assert all("/" not in name and " " not in name and "<" not in name for name in image["files"])


@pytest.mark.slow
def test_an_evaluation_that_collects_each_step_shows_its_first(tmp_path):
    trainer, evaluators = toy.Regression(), {}
    for name, kind in (("plain", Evaluating), ("collecting", Collecting)):
        evaluators[name] = kind(trainer.model)
    with toy.controller(None, trainer, evaluators, model_dir=tmp_path, writers=None) as controller:
        controller.evaluate()
    np.testing.assert_array_equal(evaluators["collecting"].labels, toy.Y)
    plain, collecting = (pixels(tmp_path, lines(tmp_path)[0, name, "seen"]) for name in evaluators)
    np.testing.assert_array_equal(plain, collecting)


@pytest.mark.slow
def test_media_that_cannot_be_written_are_one_warning(tmp_path, caplog):
    with make(Showing, model_dir=tmp_path) as controller:
        (tmp_path / "media").write_text("not a folder")
        controller.train(6)
    assert sum("media cannot be written" in record.getMessage() for record in caplog.records) == 1
    assert {step for step, *_ in lines(tmp_path)} == {2, 4, 6}  # histograms and texts need no folder


@pytest.mark.slow
@pytest.mark.parametrize("strategy, non_finite", [("default", "halt"), ("mirrored_x2", "skip")])
def test_a_step_that_is_not_reported_computes_nothing_to_show(strategy, non_finite):
    with make(
        Counting, make_strategy(strategy), steps_per_loop=5, writers=[], guards=looplib.Guards(non_finite=non_finite)
    ) as controller:
        trainer = controller.loops["train"].task
        controller.train(15)
        assert trainer.times == 3 * make_strategy(strategy).num_replicas_in_sync


class _KilledError(Exception):
    pass


def kill(event):
    if event.step == 8:
        raise _KilledError


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a whole run and one that was killed at step 8 and resumed from step 5."""
    folder, policy = tmp_path_factory.mktemp("runs"), looplib.CheckpointPolicy(every_steps=5)
    with make(Showing, model_dir=folder / "whole", config={"rate": 0.1}) as controller:
        controller.train_and_evaluate(10, 10)
    with (
        pytest.raises(_KilledError),
        make(Showing, model_dir=folder / "killed", checkpoints=policy, actions=[kill]) as c,
    ):
        c.train_and_evaluate(10, 10)
    with make(Showing, model_dir=folder / "killed", checkpoints=policy, config={"rate": 0.2}) as controller:
        assert controller.global_step == 5
        controller.train_and_evaluate(10, 10)
    return folder


@pytest.mark.slow
def test_a_run_that_is_killed_shows_each_step_once_and_the_same(runs):
    whole, killed = lines(runs / "whole"), lines(runs / "killed")
    assert len(whole) == 3 * 5 + 1 and whole == killed
    assert len((runs / "killed" / "media.jsonl").read_text().splitlines()) == len(whole)
    assert {step for step, *_ in lines(runs / "killed", "media.voided.jsonl")} == {6}


@pytest.fixture(scope="module")
def ask(runs):
    """A function that asks a TensorBoard server for the data of the runs."""
    board = program.TensorBoard()
    board.configure(logdir=str(runs), port=0, load_fast="false", window_title="", reload_interval=0)
    address = board.launch()

    def answer(route, body=None, **query):
        url = f"{address}data/plugin/{route}?{urllib.parse.urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60
        ) as reply:
            return reply.read()

    return answer


@pytest.mark.slow
@pytest.mark.parametrize("run", ["whole", "killed"])
def test_tensorboard_shows_each_step_once(run, runs, ask):
    found, of = lines(runs / run), {"run": f"{run}/train"}
    name = "an/image ../<b>"
    images = json.loads(ask("images/images", tag=name, sample=1, **of))
    assert [image["step"] for image in images] == [2, 4, 6, 8, 10]
    for image in images:
        png = ask("images/individualImage", **dict(urllib.parse.parse_qsl(image["query"])))
        assert png == (runs / run / "media" / found[image["step"], "train", name]["files"][1]).read_bytes()
    texts = json.loads(ask("text/text", tag="text", **of))
    assert [text["step"] for text in texts] == [2, 4, 6, 8, 10]
    assert all(each in texts[0]["text"] for each in found[2, "train", "text"]["texts"])
    histograms = json.loads(ask("histograms/histograms", tag="histogram", **of))
    assert [step for _, step, _ in histograms] == [2, 4, 6, 8, 10]
    for _, step, bins in histograms:
        assert [count for *_, count in bins] == found[step, "train", "histogram"]["counts"]


@pytest.mark.slow
def test_tensorboard_has_the_settings_of_each_run_once(ask):
    body = {"startIndex": 0, "sliceSize": 9, "allowedStatuses": ["STATUS_UNKNOWN"], "colParams": []}
    groups = json.loads(ask("hparams/session_groups", body))["sessionGroups"]
    assert {group["sessions"][0]["name"]: group["hparams"]["config.rate"] for group in groups} == {
        "whole": 0.1,
        "killed": 0.2,
    }
    assert all(group["hparams"]["global_batch_size"] == 8 and len(group["sessions"]) == 1 for group in groups)
    for group in groups:
        assert {f"{m['name']['group']}/{m['name']['tag']}" for m in group["metricValues"]} >= {
            "train/loss",
            "eval/accuracy",
        }


def test_an_action_shows_at_the_current_step(tmp_path):
    def show(event):
        event.controller.show({"weights": looplib.histogram(event.controller.loops["train"].task.model.weights[0])})

    with make(toy.Regression, model_dir=tmp_path, actions=[show]) as controller:
        controller.train(4)
    found = lines(tmp_path)
    assert {(step, name) for step, split, name in found if split == "train"} == {(2, "weights"), (4, "weights")}
    assert sum(found[4, "train", "weights"]["counts"]) == toy.KERNEL.size


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "values",
    [[0.0, 1.0, 1.0, 4.0], [3.0, 3.0], [-1e30, 1e30, 0.0], [2.0, np.nan, np.inf, -np.inf, 5.0], [], [True, False]],
)
def test_a_histogram_counts_as_numpy_does(values):
    low_high, counts = looplib.histogram(tf.constant(values), bins=4).tensors
    finite = np.array([value for value in values if np.isfinite(value)], np.float32)
    expected, edges = np.histogram(finite, 4) if len(finite) else (np.zeros(4), [-0.5, 0.5])
    np.testing.assert_array_equal(counts, expected)
    np.testing.assert_allclose(low_high, [edges[0], edges[-1]], rtol=1e-6)


def test_images_of_floats_are_clipped():
    values = np.array([0, 0.5, 1, 2, -1, np.nan, np.inf], np.float32)
    (images,) = looplib.image(values[:, None, None, None], most=9).tensors
    np.testing.assert_array_equal(images[:, 0, 0, 0], [0, 128, 255, 255, 0, 0, 255])


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "show, sentence",
    [
        (
            lambda: looplib.image(tf.zeros([4, 28, 28])),
            r"\(4.*28.*28\).*\[batch.*channels\]",
        ),
        (lambda: looplib.image(tf.zeros([4, 28, 28, 5])), "1.*4"),
        (lambda: looplib.image(tf.zeros([4, 2, 2, 1], tf.int32)), "int32"),
        (lambda: looplib.image(tf.zeros([4, 2, 2, 1]), most=0), "most.*0"),
        (lambda: looplib.text(tf.zeros([4], tf.int32)), "decode=<function>"),
        (lambda: looplib.text(tf.constant([["a"]])), r"\(1.*1\)"),
        (lambda: looplib.text(tf.constant(["a"]), decode=str), "expected integers"),
        (lambda: looplib.histogram(tf.constant(["a"])), "got string; expected real numbers"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_sentence(show, sentence):
    with pytest.raises(looplib.UsageError, match=sentence):
        show()


def test_strings_are_refused_in_xla():
    with pytest.raises(EngineError, match="XLA.*decode=<function>"):
        make(Showing, loop="xla")
