"""Models of KerasHub and KerasRS with small random weights, and Keras's own ways to tune and distil them; rows of the matrix.

Their packages are imported by the rows, so that the others need none.
"""

import numpy as np
from fit_models import STATISTICS
from fit_rows import labels, noise, rows_of, sparse_loss

WORDS = ("the", "film", "was", "a", "good", "bad", "long", "short", "idea")
LENGTH = 8
THREE = ("keras",)


def texts(seed=0):
    """Returns made sentences of two to seven words."""
    random = np.random.default_rng(seed)
    return np.asarray([" ".join(random.choice(WORDS, size)) for size in random.integers(2, 8, 24)])


def bert(keras, **arguments):
    """Returns a classifier of sentences with its preprocessor."""
    import keras_hub

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=vocabulary)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=LENGTH)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(vocabulary),
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    model = keras_hub.models.BertTextClassifier(backbone, 2, preprocessor, dropout=0.0, **arguments)
    model.compile(keras.optimizers.SGD(0.1), sparse_loss(keras), metrics=["accuracy"])
    return model


def gpt2(keras):
    """Returns a causal language model with its preprocessor, of letters as tokens."""
    import keras_hub

    letters = sorted(set("".join(WORDS)))
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", "\u0120", *letters, "th"])}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=["t h"])
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=2 * LENGTH)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(vocabulary),
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=2 * LENGTH,
        dropout=0.0,
    )
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor)


def hub_texts(keras):
    """A KerasHub classifier of texts (BERT), whose preprocessor gets strings"""
    return bert(keras), dict(x=texts(), y=labels(2))


def hub_texts_tokenized(keras):
    """The same without its preprocessor, of tokens"""
    model = bert(keras)
    tokens = {name: np.asarray(part) for name, part in model.preprocessor(texts()).items()}
    model.preprocessor = None
    return model, dict(x=tokens, y=labels(2))


def hub_language(keras):
    """A KerasHub language model (GPT-2), whose preprocessor makes targets and weights of strings"""
    model = gpt2(keras)
    model.compile(keras.optimizers.SGD(0.1), sparse_loss(keras), weighted_metrics=["accuracy"])
    return model, dict(x=texts())


def hub_images(keras):
    """A KerasHub classifier of images (ViT)"""
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )
    model = keras_hub.models.ViTImageClassifier(backbone, 3)
    model.compile(keras.optimizers.SGD(0.1), sparse_loss(keras), metrics=["accuracy"])
    return model, dict(x=noise(8, 8, 3), y=labels(3))


def hub_resnet(keras):
    """A KerasHub classifier of images (ResNet), with batch normalization"""
    import keras_hub

    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(8, 8, 3),
    )
    model = keras_hub.models.ResNetImageClassifier(backbone, 3)
    model.compile(keras.optimizers.SGD(0.1), sparse_loss(keras), metrics=["accuracy"])
    return model, dict(x=noise(8, 8, 3), y=labels(3))


def hub_lora(keras):
    """BERT with `backbone.enable_lora(2)`: its adapters and the head are trained"""
    model = bert(keras)
    model.backbone.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.1), sparse_loss(keras), metrics=["accuracy"])
    return model, dict(x=texts(), y=labels(2))


def hub_int8(keras):
    """BERT after `backbone.quantize("int8")`: the kernels are whole numbers, and what is left is trained"""
    model = bert(keras)
    model.backbone.quantize("int8")
    model.compile(keras.optimizers.SGD(0.1), sparse_loss(keras), metrics=["accuracy"])
    return model, dict(x=texts(), y=labels(2))


def hub_int8_lora(keras):
    """BERT after `backbone.quantize("int8")` and `enable_lora(2)`"""
    model = bert(keras)
    model.backbone.quantize("int8")
    model.backbone.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.1), sparse_loss(keras), metrics=["accuracy"])
    return model, dict(x=texts(), y=labels(2))


def keras_distiller(keras):
    """A `keras.distillation.Distiller`: a small network learns from the logits of a larger one"""
    layers, distillation = keras.layers, keras.distillation

    def network(width):
        return keras.Sequential([keras.Input((5,)), layers.Dense(width, "tanh"), layers.Dense(3)])

    model = distillation.Distiller(network(16), network(4), distillation.LogitsDistillation(temperature=2.0))
    model.compile(keras.optimizers.SGD(0.1), sparse_loss(keras), metrics=["accuracy"])
    return model, dict(x=noise(5), y=labels(3))


def rs_ranking(keras):
    """A ranking of KerasRS as in DLRM: `EmbedReduce` of several ids, `FeatureCross` and `DotInteraction`"""
    import keras_rs

    layers = keras.layers
    ids, numbers = keras.Input((3,), dtype="int32", name="ids"), keras.Input((4,), name="numbers")
    embedded = keras_rs.layers.EmbedReduce(9, 4, combiner="mean")(ids)
    crossed = keras_rs.layers.FeatureCross(projection_dim=2)(numbers)
    dots = keras_rs.layers.DotInteraction()([embedded, crossed, layers.Dense(4)(numbers)])
    model = keras.Model({"ids": ids, "numbers": numbers}, layers.Dense(1)(layers.Concatenate()([dots, crossed])))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["AUC"])
    return model, dict(x={"ids": labels(9, 3), "numbers": noise(4)}, y=labels(2, 1).astype("float32"))


def rs_retrieval(keras):
    """Two towers whose loss takes the other examples of the batch as wrong answers, with KerasRS's `BruteForceRetrieval`"""
    import keras_rs

    class Towers(keras.Model):
        def __init__(self):
            super().__init__()
            self.user, self.item = keras.layers.Embedding(9, 4), keras.layers.Embedding(12, 4)
            self.retrieval = keras_rs.layers.BruteForceRetrieval(k=3, return_scores=False)

        def build(self, input_shape):
            self.user.build(input_shape), self.item.build(input_shape)
            self.retrieval.candidate_embeddings = self.item.embeddings
            self.retrieval.build((None, 4))
            super().build(input_shape)

        def call(self, ids):
            users = self.user(ids)
            return {"user": users, "found": self.retrieval(users)}

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            scores = keras.ops.matmul(y_pred["user"], keras.ops.transpose(self.item(y)))
            return keras.losses.CategoricalCrossentropy(from_logits=True)(keras.ops.eye(keras.ops.shape(y)[0]), scores)

    model = Towers()
    model.compile(keras.optimizers.SGD(0.1))
    return model, dict(x=labels(9), y=labels(12))


_HUB, _RS = dict(families=THREE, needs=("keras_hub",)), dict(families=THREE, needs=("keras_rs",))
BUILD = {build.__name__: build for build in (hub_texts, hub_language, hub_images, hub_lora, hub_int8_lora)}
ROWS = rows_of(
    (hub_texts, _HUB), (hub_texts_tokenized, _HUB), (hub_language, _HUB), (hub_images, _HUB), (hub_resnet, {**_HUB, "said": {"replicas": STATISTICS}}),
    (hub_lora, _HUB), (hub_int8, _HUB), (hub_int8_lora, _HUB), (keras_distiller, dict(families=THREE)), (rs_ranking, _RS),
    (rs_retrieval, _RS),
)  # fmt: skip
