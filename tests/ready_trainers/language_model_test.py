"""The language model: each byte counts once, masks and caches change nothing, and it learns."""

import collections
import dataclasses
import hashlib
import json
import lzma
import math
import os
import pathlib
import shutil
import subprocess

import flat_config
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, repetitions

import looplib
from looplib.commands.compare import compare
from looplib.run.records import read_jsonl
from trainers import language_model, text_data, text_mixture, transformer
from trainers.language_model import Config

ROOT = pathlib.Path(__file__).parents[2]
START = 256
SMALL = dict(
    width=32,
    layers=1,
    heads=2,
    sequence_length=32,
    sample_tokens=24,
    prompt="import os\n\n\ndef ",
    decay_steps=200,
    learning_rate=0.02,
    warmup_steps=2,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of 300 different texts and 100 copies of one of them."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(400):
        line = "import os\n\n\ndef function_{0}(x):\n    return x + {0}\n\n\nprint(function_{0}({0}))\n"
        (folder / f"{number}.py").write_text(line.format(min(number, 300)))
    return f"{folder}/*.py"


def config(files, **changes):
    return Config(**{**SMALL, "text_files": files, **changes})


def decoder(tokens=START + 2, seed=1):
    """A model whose weights are all random, so that each of its parts matters."""
    model = transformer.Decoder(tokens, tokens - 2, transformer.Size(16, 2, 2))
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(size=weight.shape) * 0.3 for weight in model.get_weights()])
    return model


def log_probabilities(model, tokens):
    """Of each next token, `[length, tokens]`, of one document as a batch of its own."""
    logits = model(tf.constant(np.asarray(tokens)[None], tf.int32))[0].numpy().astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_packing_gives_each_token_once_with_the_tokens_before_it():
    documents = [np.arange(n, dtype=np.int32) + 10 * n for n in (5, 1, 0, 17, 3)]
    for length, step in ((8, 8), (8, 4), (64, 32), (2, 1)):
        rows = text_data.pack(documents, START, length, step)
        stream, found = [t for document in documents for t in (START, *document, START + 1)], []
        for number, (tokens, first) in enumerate(zip(rows.tokens, rows.first)):
            expected = stream[number * step : number * step + length + 1]
            assert list(tokens) == expected + [START] * (length + 1 - len(expected))
            found += [token for token in tokens[1 + first :] if token != START]
            assert number == 0 or first == length - step  # so that each has the context that there is
        assert found == [token for token in stream if token != START]
        assert rows.targets(START) == len(found)


def test_a_file_stays_in_its_part_and_comes_once(files, tmp_path):
    documents = text_data.read_documents(files, 1 << 20)
    texts = documents.train + documents.held_out
    assert len(texts) == len(set(texts)) == 301
    key = lambda text: int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % 64
    assert documents.held_out and {key(text) for text in documents.held_out} == {0}
    assert 0 not in {key(text) for text in documents.train}
    fewer = text_data.read_documents(files, 20_000)
    assert sum(map(len, fewer.train + fewer.held_out)) in range(20_000, 20_100)
    assert set(fewer.train) <= set(documents.train) and set(fewer.held_out) <= set(documents.held_out)
    with pytest.raises(looplib.UsageError, match="0"):
        text_data.read_documents(f"{tmp_path}/*", 1000)


@pytest.mark.slow
def test_the_text_of_this_machine_is_its_sources_without_tests():
    found = text_data.machine_files()
    assert os.path.samefile(found["json/decoder.py"], __import__("json").decoder.__file__)
    assert os.path.samefile(found["absl/app.py"], __import__("absl.app").app.__file__)
    assert not any("/tests/" in name for name in found)


def test_a_document_in_a_row_is_predicted_as_by_itself():
    model, random = decoder(), np.random.default_rng(0)
    documents = [np.concatenate([[START], random.integers(0, 256, size=n)]) for n in (7, 1, 12)]
    logits = model(tf.constant(np.concatenate(documents)[None], tf.int32))[0]
    alone = [model(tf.constant(document[None], tf.int32))[0] for document in documents]
    np.testing.assert_allclose(logits, np.concatenate(alone), rtol=1e-4, atol=1e-4)
    changed = documents[2].copy()
    changed[-1] += 1  # nothing before it may see it
    again = model(tf.constant(changed[None], tf.int32))[0]
    np.testing.assert_array_equal(again[:-1], alone[2][:-1])
    assert np.abs(again[-1] - alone[2][-1]).max() > 1e-3


def test_rotary_positions_tell_the_order():
    model = decoder()
    one, other = (log_probabilities(model, [START, *b"abcdef"[::step], 7])[-1] for step in (1, -1))
    assert np.abs(one - other).max() > 1e-3


def vocabulary_files(folder):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["import os", "def function_1(x): return x + 23"] * 50), model_prefix=f"{folder}/pieces",
        vocab_size=300, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=False, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    pieces = ["[PAD]", "[UNK]", *map(chr, range(33, 127)), *(f"##{chr(c)}" for c in range(33, 127)), "import", "return"]
    (folder / "pieces.txt").write_text("\n".join(pieces) + "\n")
    return {"": "", "sentence": f"{folder}/pieces.model", "word": f"{folder}/pieces.txt"}


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    return vocabulary_files(tmp_path_factory.mktemp("vocabularies"))


def test_vocabularies_encode_and_decode(vocabularies):
    text = "import os\n\n\ndef function_1(x):\n    return x + 1  # ümläut\n".encode()
    for kind in ("", "sentence"):
        vocabulary = text_data.load_vocabulary(vocabularies[kind])
        tokens = vocabulary.encode([text, b"os", text])
        assert [vocabulary.decode(each) for each in tokens] == [text, b"os", text]
        assert all(0 <= each.min() and each.max() < vocabulary.size for each in tokens)
    assert len(tokens[1]) <= 2
    words = text_data.load_vocabulary(vocabularies["word"])
    pieces = pathlib.Path(vocabularies["word"]).read_text().splitlines()
    [tokens] = words.encode([b"import os"])
    assert [pieces[token] for token in tokens] == ["import", "o", "##s"] and words.decode(tokens) == b"import os"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "sentence", "word"])
def test_bits_per_byte_are_those_of_each_byte_predicted_once(files, vocabularies, kind):
    settings = config(files, vocabulary=vocabularies[kind], sequence_length=1024, text_bytes=20_000)
    data = text_data.load(files, 20_000, vocabularies[kind], 1024)
    model = decoder(data.vocabulary.size + 2)
    evaluator = language_model.LanguageModelEvaluator(model, data, settings)
    texts = text_data.read_documents(files, 20_000).held_out
    nats = 0.0
    for tokens in data.vocabulary.encode(texts):  # each is shorter than half a row, so it sees all of itself
        whole = np.concatenate([[data.start], tokens, [data.start + 1]])
        nats -= log_probabilities(model, whole[:-1])[np.arange(len(whole) - 1), whole[1:]].sum()
    controller = looplib.Controller(looplib.RunConfig(global_batch_size=2), evaluator=evaluator, writers=[])
    metrics = controller.evaluate()["eval"]
    size = len(b"".join(texts))
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    compressed = lzma.compress(b"".join(texts), preset=9)
    assert metrics["xz_bits_per_byte"] == pytest.approx(8 * len(compressed) / size)


@pytest.mark.slow
def test_a_cache_changes_no_token():
    model, scalar = decoder(), tf.constant
    known = np.array([[START, *text] for text in (b"de", b"cl", b"\n\n")], np.int32)
    tokens = np.pad(known, ((0, 0), (0, 17)))
    made = model.generate(scalar(tokens), scalar(3), scalar(0.0), scalar(1.0), scalar(0)).numpy()
    expected = known
    while expected.shape[1] < 20:
        following = model(scalar(expected))[:, -1].numpy().argmax(axis=1)
        expected = np.concatenate([expected, following[:, None].astype(np.int32)], axis=1)
    np.testing.assert_array_equal(made, expected)
    assert len(set(made[:, 3:].ravel())) > 4  # not one token again and again, which a wrong cache may give too


def test_drawn_tokens_have_the_probabilities_of_the_nucleus():
    logits, temperature = np.log([0.1, 0.5, 0.15, 0.25]), 0.5
    expected = np.array([0.1, 0.5, 0.15, 0.25]) ** (1 / temperature)
    expected /= expected.sum()
    expected[[0, 2]] = 0  # 0.725 and 0.181 reach 0.8
    expected /= expected.sum()
    rows = tf.constant(np.tile(logits, (4000, 1)), tf.float32)
    drawn = transformer._drawn(rows, tf.constant(temperature), tf.constant(0.8), tf.constant([1, 2])).numpy()
    counts = collections.Counter(drawn.tolist())
    assert set(counts) == {1, 3}
    assert counts[1] / 4000 == pytest.approx(expected[1], abs=0.03)
    assert set(transformer._drawn(rows, tf.constant(0.0), tf.constant(1.0), tf.constant([1, 2])).numpy()) == {1}


def test_the_operations_are_those_of_the_products_of_matrices():
    model, width, length = decoder(), 16, 64
    token = 2 * (width * 3 * width + width * width + 2 * width * 4 * width) * 2  # of two blocks
    token += 2 * 2 * width * length * 2 + 2 * width * (START + 2)  # scores and sums of values, then logits
    assert transformer.training_flops(model, length) == pytest.approx(3 * token, rel=0.02)  # and backward twice as many


def run(settings, strategy="default", steps=60, interval=None, **others):
    keras.utils.set_random_seed(0)
    with make_strategy(strategy).scope():
        trainer, evaluator = language_model.build(settings)
    controller = flat_config.controller(
        trainer=trainer, evaluator=evaluator, strategy=make_strategy(strategy), global_batch_size=8, steps_per_loop=20,
        **{"writers": [], **others},
    )  # fmt: skip
    return controller, controller.train_and_evaluate(steps, interval or steps)["eval"]


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A short run on one replica and one on two: of each the run directory and the last evaluation."""
    runs = {"two": ("mirrored_x2", repetitions(20, 60), "graph"), **repetitions({}, {"one": ("default", 20, "graph")})}
    results = {}
    for name, (strategy, steps, loop) in runs.items():
        folder = str(tmp_path_factory.mktemp(name))
        settings = dict(model_dir=folder, writers=None, loop=loop)
        controller, metrics = run(config(files), strategy, steps, 20, **settings)
        controller.report.write("done")
        controller.close()
        results[name] = folder, metrics
    return results


@pytest.mark.slow
def test_it_learns_on_any_number_of_replicas(files, trained):
    one, two = (trained[name][1] for name in ("one", "two"))
    text = b"".join(text_data.read_documents(files, 1 << 20).held_out)
    shares = np.array(list(collections.Counter(text).values())) / len(text)
    assert two["bits_per_byte"] < -(shares * np.log2(shares)).sum() - 0.5  # so it uses what comes before a byte
    first = next(record for record in read_jsonl(f"{trained['two'][0]}/metrics.jsonl") if record["split"] == "eval")
    assert first["step"] == 20 and first["tokens"] == one["tokens"]
    assert first["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=0.01)


@pytest.mark.slow
def test_an_evaluation_job_finds_all_weights(files, trained):
    folder, metrics = trained["one"]
    _, evaluator = language_model.build(config(files))
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=8), evaluator=evaluator, model_dir=folder, writers=[]
    ) as job:
        assert job.evaluate()["eval"] == pytest.approx(metrics, rel=1e-5)


@pytest.mark.slow
def test_reports_have_the_speed_which_comparisons_leave_out(trained, tmp_path):
    one = trained["two"][0]
    reports = [record for record in read_jsonl(f"{one}/metrics.jsonl") if record["split"] == "train"]
    assert [report["step"] for report in reports] == [20, 40, 60]
    for report in reports:
        assert report["tokens_per_second"] == pytest.approx(report["steps_per_second"] * 8 * 32, rel=0.02)
        assert 0 < report["share_of_peak"] < 1
    other = shutil.copytree(one, tmp_path / "other")
    lines = [record | {"tokens_per_second": 1.0, "share_of_peak": 0.5} for record in read_jsonl(f"{one}/metrics.jsonl")]
    (other / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert not compare(one, other).differences


@pytest.mark.slow
def test_bfloat16_computes_its_products_in_bfloat16(files):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        controller, metrics = run(config(files, optimizer="adamw"), steps=20)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    evaluator = controller.loops["eval"].task
    assert evaluator.model.compute_dtype == "bfloat16" and evaluator.model.table.dtype == "float32"
    assert 0 < metrics["bits_per_byte"] < 8 and evaluator.sample(0).startswith("import os\n\n\ndef ")


def program(python, *arguments):
    return subprocess.run(
        [python, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def command(settings):
    flags = [f"--config.{name}={value}" for name, value in vars(settings).items()]
    run_flags = ("--train_steps=24", "--eval_interval=12", "--steps_per_loop=6", "--checkpoint_interval=6")
    return ["-m", "trainers.language_model", *flags, *run_flags, "--global_batch_size=4"]


@pytest.mark.slow
def test_text_is_generated_in_evaluations_and_by_its_mode(files, python, tmp_path):
    small = ("--train_steps=4", "--eval_interval=2", "--steps_per_loop=2", "--checkpoint_interval=2")
    arguments = [*command(config(files, temperature=0.0)), *small, f"--model_dir={tmp_path}/run"]
    early = program(python, *arguments, "--mode=generate")
    assert early.returncode == 1 and "there is no checkpoint" in early.stderr.splitlines()[-1]
    trained = program(python, *arguments)
    assert trained.returncode == 0, trained.stderr
    shown = read_jsonl(f"{tmp_path}/run/media.jsonl")
    assert [(line["step"], line["split"], line["name"]) for line in shown] == [(s, "eval", "sample") for s in (2, 4)]
    texts = [text for line in shown for text in line["texts"]]
    assert all(text.startswith("import os\n\n\ndef ") for text in texts)
    assert tf.io.decode_png(tf.io.read_file(f"{tmp_path}/run/bits_per_byte.png")).shape[:2] == (280, 480)
    generated = program(python, *arguments, "--mode=generate")
    assert generated.returncode == 0, generated.stderr
    assert texts[1] in generated.stdout
    assert len([r for r in read_jsonl(f"{tmp_path}/run/metrics.jsonl") if r["split"] == "eval"]) == 2


def test_its_page_has_every_setting():
    page = (ROOT / "docs/trainers/language_model.md").read_text()
    names = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `--config.")]
    assert names == [f"--config.{field.name}" for field in dataclasses.fields(Config)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Lines of two sources, lower and upper case, of 1 to 80 letters."""
    folder, random = tmp_path_factory.mktemp("mixture"), np.random.default_rng(0)
    for name, first in (("a", 97), ("b", 65)):
        lines = [bytes(random.integers(first, first + 26, random.integers(1, 81), np.uint8)) for _ in range(150)]
        (folder / f"{name}.txt").write_bytes(b"\n".join(lines))
    return f"{folder}/a.txt=0.75,{folder}/b.txt=0.25"


@pytest.mark.slow
def test_a_mixture_of_files_has_its_shares_and_each_token_once(mixture):
    rows = text_mixture.TextMixture(mixture, text_data.Bytes(), START, 32)
    make = lambda training: looplib.InputContext(
        global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=training, start_step=0
    )  # fmt: skip
    tokens, first = next(iter(rows.dataset(make(True)).take(20).rebatch(160)))
    is_upper = [((65 <= row) & (row < 97)).any() for row in tokens.numpy()]
    assert sum(is_upper) == 40 and not first.numpy().any() and tokens.shape == (160, 33)
    predicted = np.concatenate([batch[0].numpy()[:, 1:].ravel() for batch in rows.dataset(make(False))])
    lines = [
        line for one in mixture.split(",") for line in pathlib.Path(one.partition("=")[0]).read_bytes().split(b"\n")
    ]
    expected = collections.Counter(b"".join(lines)) + collections.Counter({START + 1: 300})
    assert collections.Counter(predicted[predicted != START].tolist()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_mixture", [False, True])
@pytest.mark.parametrize("check", [["resume", "--kills=1"], ["replicas", "--counts=1,2"]])
def test_a_killed_run_and_one_on_two_replicas_are_equal(files, mixture, python, tmp_path, check, is_mixture):
    flags = command(config(files, learning_rate=1e-3, mixture=mixture if is_mixture else ""))
    result = program(python, "-m", "looplib", "check", *check, f"--dir={tmp_path}/check", "--", python, *flags)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(width=18), r"2.*\*"),
        (dict(layers=0), "expected positive numbers"),
        (dict(optimizer="sgd"), "--config.optimizer.*'sgd'"),
        (dict(warmup_steps=200), "more steps to the end of the decay"),
        (dict(sample_tokens=33), "--config.sequence_length.*32"),
        (dict(sample_tokens=10), "17"),
        (dict(top_p=0.0), "--config.top_p.*0.0"),
        (dict(vocabulary="words.json"), "SentencePiece"),
        (dict(vocabulary="/nowhere/words.txt"), "--config.vocabulary=/nowhere/words.txt"),
        (dict(mixture="/a.txt"), "--config.mixture.*'/a.txt'.*PATTERN=WEIGHT"),
        (dict(text_files="/nowhere/*"), r"/nowhere/\*.*0"),
    ],
)
def test_bad_settings_are_sentences(files, changes, message):
    with pytest.raises(looplib.UsageError, match=message):
        language_model.build(config(**{"files": files, **changes}))
