"""Rules map the names and axes of other libraries, and whatever they name has to fit."""

import math
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from written import by_path, filled, same, write_safetensors

import looplib
from looplib.errors import SettingError, WarmStartError
from looplib.weights import rules, taking

HIDDEN, LAYERS, WORDS, PLACES, INNER, HEADS = 8, 2, 11, 6, 16, 2


def bert():
    """The names of BERT-base's parameters, in few layers, with small shapes."""
    random, shapes = np.random.default_rng(0), {}
    start = "bert.embeddings"
    shapes[f"{start}.word_embeddings.weight"] = (WORDS, HIDDEN)
    shapes[f"{start}.position_embeddings.weight"] = (PLACES, HIDDEN)
    shapes[f"{start}.token_type_embeddings.weight"] = (2, HIDDEN)
    shapes[f"{start}.LayerNorm.weight"] = shapes[f"{start}.LayerNorm.bias"] = (HIDDEN,)
    for number in range(LAYERS):
        layer = f"bert.encoder.layer.{number}"
        parts = {
            "attention.self.query": (HIDDEN, HIDDEN), "attention.self.key": (HIDDEN, HIDDEN),
            "attention.self.value": (HIDDEN, HIDDEN), "attention.output.dense": (HIDDEN, HIDDEN),
            "attention.output.LayerNorm": (HIDDEN,), "intermediate.dense": (INNER, HIDDEN),
            "output.dense": (HIDDEN, INNER), "output.LayerNorm": (HIDDEN,),
        }  # fmt: skip
        for name, shape in parts.items():
            shapes[f"{layer}.{name}.weight"], shapes[f"{layer}.{name}.bias"] = shape, shape[:1]
    shapes |= {"bert.pooler.dense.weight": (HIDDEN, HIDDEN), "bert.pooler.dense.bias": (HIDDEN,)}
    shapes |= {"cls.predictions.bias": (WORDS,)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


class Places(keras.layers.Layer):
    """Adds what each place and the first of two sentences mean."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.places = keras.layers.Embedding(PLACES, HIDDEN, name="position_embeddings")
        self.sentences = keras.layers.Embedding(2, HIDDEN, name="token_type_embeddings")

    def call(self, x):
        return x + self.places(tf.range(PLACES)) + self.sentences(tf.zeros(PLACES, tf.int32))


def encoder():
    layers = keras.layers
    words = keras.Input((PLACES,), dtype="int32")
    x = Places(name="embeddings")(layers.Embedding(WORDS, HIDDEN, name="word_embeddings")(words))
    x = layers.LayerNormalization(epsilon=1e-12, name="embeddings_norm")(x)
    for layer in (f"layer_{number}" for number in range(LAYERS)):
        seen = layers.MultiHeadAttention(HEADS, HIDDEN // HEADS, name=f"{layer}_attention")(x, x)
        x = layers.LayerNormalization(epsilon=1e-12, name=f"{layer}_attention_norm")(layers.Add()([x, seen]))
        wide = layers.Dense(INNER, "gelu", name=f"{layer}_intermediate")(x)
        out = layers.Dense(HIDDEN, name=f"{layer}_output")(wide)
        x = layers.LayerNormalization(epsilon=1e-12, name=f"{layer}_output_norm")(layers.Add()([x, out]))
    return keras.Model(words, x)


def computed(tensors, words):
    """Computes BERT in numpy."""

    def normed(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def heads(x):
        return x.reshape(len(words), PLACES, HEADS, -1).transpose(0, 2, 1, 3)

    start = "bert.embeddings"
    x = tensors[f"{start}.word_embeddings.weight"][words] + tensors[f"{start}.position_embeddings.weight"]
    x = normed(x + tensors[f"{start}.token_type_embeddings.weight"][0], f"{start}.LayerNorm")
    for layer in (f"bert.encoder.layer.{number}" for number in range(LAYERS)):
        query, key, value = (heads(linear(x, f"{layer}.attention.self.{n}")) for n in ("query", "key", "value"))
        scores = np.exp(query @ key.transpose(0, 1, 3, 2) / math.sqrt(HIDDEN // HEADS))
        seen = (scores / scores.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3).reshape(x.shape)
        x = normed(x + linear(seen, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        wide = linear(x, f"{layer}.intermediate.dense")
        wide = wide * (1 + np.vectorize(math.erf)(wide / math.sqrt(2))) / 2
        x = normed(x + linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return x


RULES = r"""
path: bert.safetensors
rules:
  '^cls\.|^bert\.pooler\.': null
  '^bert\.embeddings\.word_embeddings\.weight$': word_embeddings/embeddings
  '^bert\.embeddings\.(position|token_type)_embeddings\.weight$': embeddings/\1_embeddings/embeddings
  '^bert\.embeddings\.LayerNorm\.': embeddings_norm/
  '^bert\.encoder\.layer\.(\d+)\.': layer_\1_
  'attention\.self\.(query|key|value)\.weight$': {to: attention/\1/kernel, transpose: [1, 0], reshape: true}
  'attention\.self\.(query|key|value)\.bias$': {to: attention/\1/bias, reshape: true}
  'attention\.output\.dense\.weight$': {to: attention/attention_output/kernel, transpose: [1, 0], reshape: true}
  'attention\.output\.dense\.bias$': attention/attention_output/bias
  'attention\.output\.LayerNorm\.': attention_norm/
  'output\.LayerNorm\.': output_norm/
  '(intermediate|output)\.dense\.weight$': {to: \1/kernel, transpose: [1, 0]}
  '(intermediate|output)\.dense\.bias$': \1/bias
  'norm/weight$': norm/gamma
  'norm/bias$': norm/beta
"""


def test_bert_by_its_public_names_computes_what_numpy_does(tmp_path):
    tensors = bert()
    write_safetensors(tmp_path / "bert.safetensors", tensors)
    (tmp_path / "bert.yaml").write_text(RULES)
    model = encoder()
    looplib.warm_start({"model": model}, str(tmp_path / "bert.yaml"))
    words = np.random.default_rng(1).integers(0, WORDS, (3, PLACES))
    expected = computed({name: value.astype(np.float64) for name, value in tensors.items()}, words)
    np.testing.assert_allclose(model(words), expected, atol=1e-5)
    taken = [value for value in tensors.values()]
    assert (
        sum(value.size for value in model.get_weights())
        == sum(value.size for name, value in tensors.items() if not name.startswith(("cls", "bert.pooler")))
        and len(taken) == 40
    )


def test_kernels_of_pytorchs_convolutions_are_transposed(tmp_path):
    """As numpy computes them with PyTorch's layout (out, in, height, width)."""
    random = np.random.default_rng(0)
    kernel, bias = random.normal(size=(5, 3, 2, 2)).astype("float32"), random.normal(size=5).astype("float32")
    path = write_safetensors(tmp_path / "conv.safetensors", {"conv.weight": kernel, "conv.bias": bias})
    model = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Conv2D(5, 2, name="conv")])
    rules = {r"^conv\.weight$": looplib.WeightRule("conv/kernel", (2, 3, 1, 0)), r"\.": "/"}
    looplib.warm_start({"model": model}, looplib.WarmStart(path, rules))
    x = random.normal(size=(4, 2, 2, 3)).astype("float32")
    expected = np.einsum("nhwi,oihw->no", x, kernel) + bias
    np.testing.assert_allclose(model(x)[:, 0, 0], expected, rtol=1e-5)


def small(names=("encoder", "head")):
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, name=names[0]), keras.layers.Dense(3, name=names[1])]
    )


SHAPES = {"encoder/kernel": (4, 6), "encoder/bias": (6,), "head/kernel": (6, 3), "head/bias": (3,)}


def saved(folder, **others):
    """A file with the weights of `small`, and others by name and shape; __ stands for a slash."""
    shapes = SHAPES | {name.replace("__", "/"): shape for name, shape in others.items()}
    return write_safetensors(
        folder / "w.safetensors", {name: np.ones(s, np.float32) for name, s in shapes.items() if s}
    )


WRONG = {
    "matches nothing": ({"^decoder/": "encoder/"}, {}, r"'\^decoder/'"),
    "nothing has the name": ({"^encoder/": "backbone/"}, {}, "backbone/kernel of encoder/kernel"),
    "two names for one": ({"^old/": "head/"}, {"old__kernel": (6, 3)}, "old/kernel and head/kernel.*head/kernel"),
    "two ruled names for one": (
        {"^(old|head)/kernel": "head/kernel"}, {"old__kernel": (6, 3)}, "old/kernel and head/kernel|head/kernel and old/"
    ),
    "another shape": ({"^old/": "head/"}, {"old__kernel": (3, 6), "head__kernel": None}, r"transpose it by \[1, 0\]"),
    "other axes": (
        {"^old/": looplib.WeightRule("head/", (2, 1, 0))}, {"old__kernel": (3, 6), "head__kernel": None}, "old/kernel"
    ),
    "other numbers": ({"^old/": looplib.WeightRule("head/", reshape=True)}, {"old__kernel": (7, 3)}, "old/kernel"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_rules_name_has_to_fit(case, tmp_path):
    rules, others, pattern = WRONG[case]
    model = filled(small())
    before = model.get_weights()
    with pytest.raises(WarmStartError, match=pattern) as caught:
        looplib.warm_start({"model": model}, looplib.WarmStart(saved(tmp_path, **others), rules))
    assert "\n" not in str(caught.value)
    for ours, theirs in zip(model.get_weights(), before):  # nothing was taken
        np.testing.assert_array_equal(ours, theirs)


def test_names_that_no_rule_touches_are_taken_if_equal_and_named_else(tmp_path, caplog):
    model = filled(small())
    head = model.get_layer("head").get_weights()
    path = saved(tmp_path, head__kernel=(6, 9), head__bias=None, backbone__bias=(6,), other=(1,), encoder__bias=None)
    looplib.warm_start({"model": model}, looplib.WarmStart(path, {"^backbone/": "encoder/"}))
    assert all((value == 1).all() for value in model.get_layer("encoder").get_weights())
    for ours, theirs in zip(model.get_layer("head").get_weights(), head):
        np.testing.assert_array_equal(ours, theirs)
    (warned,) = [one.getMessage() for one in caplog.records if "not taken" in one.getMessage()]
    for part in ("only here: ", "head/bias; only there: other; of another shape: head/kernel"):
        assert part in warned


def test_rules_apply_in_their_order_to_what_is_left_of_a_name(tmp_path):
    model = filled(small())
    tensors = {f"net.{name.replace('/', '.')}": value for name, value in by_path(filled(small(), seed=3)).items()}
    path = write_safetensors(tmp_path / "w.safetensors", tensors)
    looplib.warm_start({"model": model}, looplib.WarmStart(path, {r"^net\.": "", r"\.": "/"}))
    for name, value in by_path(model).items():
        np.testing.assert_array_equal(value, tensors[f"net.{name.replace('/', '.')}"])


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("write", ["run", "weights", "saved_model"])
def test_rules_rename_in_every_format(write, tmp_path):
    source, target = filled(small()), filled(small(("backbone", "classifier")), seed=1)
    rules = {"^encoder/(.*)": r"backbone/\1", "^head/": "classifier/"}
    if write == "weights":
        source.save_weights(path := tmp_path / "model.weights.h5")
    elif write == "saved_model":
        tf.saved_model.save(source, path := str(tmp_path / "saved"))
    else:

        class Trainer(looplib.GradientTrainer):
            def __init__(self):
                super().__init__(source, keras.optimizers.Adam(0.0))

            def dataset(self, context):
                return context.resident((np.ones((4, 4), np.float32),))

            def loss_fn(self, inputs):
                return tf.reduce_sum(self.model(inputs[0]), 1)

        path = tmp_path / "run"
        config = looplib.RunConfig(global_batch_size=4)
        with looplib.Controller(config, trainer=Trainer(), model_dir=path) as controller:
            controller.train(1)
    looplib.warm_start({"model": target}, looplib.WarmStart(path, rules))
    same(source, target)


@pytest.mark.parametrize(
    "text",
    ["", "rules: {a: b}", "path: 5", "path: w\nrules: [a]", "path: w\nother: 1", "path: w\nrules: {a: [1]}",
     "path: w\nrules: {a: {transpose: [1, 0]}}", "path: w\nrules: {a: {to: b, axes: 1}}",
     "path: w\nrules: {a: {to: b, transpose: [0, 0]}}", "path: w\nrules: {'(': b}", "path: w\nrules: {a: '\\1'}",
     "path: w\nrules: !!python/object/apply:os.system ['true']", "path: &a [*a]", "\0"],
)  # fmt: skip
def test_a_file_of_rules_with_something_else_is_a_sentence(text, tmp_path):
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(SettingError, match="rule") as caught:
        looplib.warm_start({"model": small()}, str(tmp_path / "rules.yaml"))
    assert "\n" not in str(caught.value)


def test_wrong_rules_in_a_program_are_a_sentence():
    for make in (
        lambda: looplib.WarmStart("w", {"a": 5}),
        lambda: looplib.WarmStart("w", {"(": "a"}),
        lambda: looplib.WarmStart("w", ["a"]),
        lambda: looplib.WarmStart(5),
        lambda: looplib.WeightRule(None),
        lambda: looplib.WeightRule("a", (1, 2)),
        lambda: looplib.WeightRule("a", transpose="10"),
    ):
        with pytest.raises(SettingError):
            make()


@pytest.mark.parametrize("value", [1e6, 1e300])
def test_a_number_that_is_too_large_for_its_variable_is_refused(value):
    wide = np.full([3, 1 << 20] if value == 1e6 else [3], value, np.float64)
    variable = tf.Variable(np.zeros(wide.shape, np.float16 if value == 1e6 else np.float32), name="kernel")
    with pytest.raises(WarmStartError, match="kernel"):
        taking.assign(variable, wide)
    wide[...] = [np.inf] if wide.ndim == 1 else np.inf  # as the file has it
    taking.assign(variable, wide)
    assert np.isinf(variable.numpy()).all()


def test_a_pattern_that_never_ends_is_a_sentence_and_the_next_alarm_is_the_callers(monkeypatch):
    monkeypatch.setattr(rules, "_LEAST_SECONDS", 0.3)
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        with pytest.raises(
            WarmStartError, match=r"the rule '\^\(a\+\)\+\$' for weights takes too long for 'aaa.*of w.h5"
        ):
            rules.apply({"b": "c", "^(a+)+$": "x"}, ["b", "a" * 40 + "!"], "w.h5")
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert rules.apply({"b": "c"}, ["b"], "w.h5") == {"b": rules.RuledName("c")}
        time.sleep(0.5)
        assert rung == [1]
    finally:
        signal.signal(signal.SIGALRM, before)
