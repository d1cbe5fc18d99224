"""Trains a language model: `python -m trainers.language_model --model_dir=/tmp/language_model`.

By default a small decoder-only transformer on the bytes of the sources and documentation that this machine has.
`--mode=generate` continues a text. `--helpfull` lists all flags.
"""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import UsageError, launch
from trainers import pictures, text_data, text_mixture, transformer

_Pair = tuple[tf.Tensor, tf.Tensor]


@dataclasses.dataclass
class Config:
    """The settings of this experiment, each a flag `--config.<field>=<value>`.

    Attributes:
      text_files: pattern of the files to train and evaluate on, with ** for folders; empty for those of this machine.
      text_bytes: bytes of text to read.
      mixture: PATTERN=WEIGHT of each source, separated by commas, to train on records of files instead.
      vocabulary: a SentencePiece model (*.model) or a list of word pieces (*.txt); empty for bytes.
      sequence_length: tokens of a row, the longest text that the model sees.
      width: elements of a token's vector.
      layers: number of blocks.
      heads: attention heads of a block.
      optimizer: muon or adamw.
      learning_rate: the highest rate.
      warmup_steps: steps over which the rate rises from 0.
      decay_steps: the step at which the rate is 0 again, along half a cosine.
      weight_decay: share of the weights by which they shrink in a step at a rate of 1.
      prompt: the text that generation continues.
      sample_tokens: tokens of a generated text, with those of the prompt.
      temperature: divisor of logits; 0 generates the most probable token.
      top_p: generates one of the most probable tokens, whose probabilities sum to at least this.
    """

    text_files: str = ""
    text_bytes: int = 16 << 20
    mixture: str = ""
    vocabulary: str = ""
    sequence_length: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 2
    optimizer: str = "muon"
    learning_rate: float = 1e-2
    warmup_steps: int = 100
    decay_steps: int = 2000
    weight_decay: float = 0.1
    prompt: str = 'def read_file(path):\n    """'
    sample_tokens: int = 256
    temperature: float = 0.8
    top_p: float = 0.95


def losses_of(model: transformer.Decoder, start: int, inputs: _Pair) -> _Pair:
    """Returns cross entropies in nats and their weights, float32 `[b, length]`, of rows as in `text_data.Rows`."""
    tokens, first = inputs
    targets = tokens[:, 1:]
    counted = (targets != start) & (tf.range(tf.shape(targets)[1]) >= first[:, None])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, model(tokens[:, :-1]))
    return losses, tf.cast(counted, tf.float32)


class LanguageModelTrainer(looplib.Adapter, looplib.GradientTrainer):
    """Trains a decoder to predict each next token.

    Args:
      model: the decoder.
      optimizer: its optimizer.
      data: the text.
      length: tokens of a row.
      mixture: what to train on in place of the text.
    """

    def __init__(
        self, model: transformer.Decoder, optimizer: Any, data: text_data.TextData, length: int,
        mixture: text_mixture.TextMixture | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, clip_global_norm=1.0, no_decay="scale|table", report=("learning_rate",))
        self._data, self._length, self._rows = data, length, mixture or data.train
        self._peak = transformer.measured_peak(model.compute_dtype)

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """See `looplib.Trainer.dataset`."""
        return self._rows.dataset(context)

    def loss_fn(self, inputs: _Pair) -> Any:
        """Returns the cross entropy of the tokens."""
        return looplib.mean(*losses_of(self.model, self._data.start, inputs))

    @property
    def rates(self) -> Mapping[str, float]:
        """Tokens a second, and the share of the floating-point operations that a product of matrices reaches."""
        tokens = self.global_batch_size * self._length
        flops = tokens * transformer.training_flops(self.model, self._length)
        return {"tokens_per_second": tokens, "share_of_peak": flops / self._peak}


class LanguageModelEvaluator(looplib.Evaluator):
    """Evaluates a decoder in bits per byte of text; each byte counts once.

    Args:
      model: the trainer's model.
      data: the text.
      config: how to generate text.
    """

    def __init__(self, model: transformer.Decoder, data: text_data.TextData, config: Config) -> None:
        self.model, self._data, self._config = model, data, config

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """See `looplib.Evaluator.dataset`."""
        return self._data.held_out.dataset(context)

    def step_fn(self, inputs: _Pair) -> Mapping[str, Any]:
        """Reports the sum of the losses and their number."""
        losses, weights = losses_of(self.model, self._data.start, inputs)
        return {"nats": looplib.total(tf.reduce_sum(losses * weights)), "tokens": looplib.total(tf.reduce_sum(weights))}

    def loop_end(self, metrics: dict[str, Any]) -> Mapping[str, Any]:
        """Derives bits per byte; of a part of the text, an estimate for all of it."""
        share = metrics["tokens"] / self._data.held_out.targets(self._data.start)
        bits = metrics.pop("nats") / math.log(2) / (self._data.held_out_bytes * share)
        return {**metrics, "bits_per_byte": bits, "xz_bits_per_byte": self._data.xz}

    def export(self) -> looplib.Exported:
        """See `looplib.Evaluator.export`: the logits of the next tokens."""
        return looplib.Exported(self.model, tf.TensorSpec([None, None], tf.int32, name="tokens"), self.model)

    def sample(self, seed: int) -> str:
        """Returns the prompt and its continuation by the model; equal seeds give equal texts."""
        config, data = self._config, self._data
        prompt = _prompt(config, data)
        tokens = np.pad(prompt, (0, config.sample_tokens + 1 - len(prompt)))[None]
        made = self.model.generate(
            tf.constant(tokens, tf.int32), tf.constant(len(prompt)), tf.constant(config.temperature, tf.float32),
            tf.constant(config.top_p, tf.float32), tf.constant(seed % 2**31, tf.int32)
        )[0, 1:].numpy()  # fmt: skip
        ends = np.flatnonzero(made >= data.start)
        return data.vocabulary.decode(made[: ends[0]] if len(ends) else made).decode("utf-8", "replace")


def _prompt(config: Config, data: text_data.TextData) -> np.ndarray:
    """Returns the tokens of the prompt, after the one that starts a document."""
    prompt = np.concatenate([[data.start], data.vocabulary.encode([config.prompt.encode()])[0]])
    if not len(prompt) <= config.sample_tokens <= config.sequence_length:
        raise UsageError(
            f"--config.sample_tokens is {config.sample_tokens}; expected at least {len(prompt)}, one more than the "
            f"tokens of --config.prompt, and at most --config.sequence_length, {config.sequence_length}"
        )
    if config.temperature < 0 or not 0 < config.top_p <= 1:
        raise UsageError(
            f"--config.temperature is {config.temperature} and --config.top_p {config.top_p}; expected at least 0, and "
            "a number above 0 up to 1"
        )
    return prompt


def make_optimizer(config: Config) -> keras.optimizers.Optimizer:
    """Makes an optimizer whose rate rises linearly, then falls along half a cosine.

    Muon (Jordan et al., 2024) makes the update of each matrix orthogonal; in Keras it treats the table of tokens and
    the scales as Adam does.

    Raises:
      looplib.UsageError: for an unknown optimizer, a rate that is not positive, or a decay that ends within the warmup.
    """
    if not 0 < config.learning_rate < math.inf or not 0 <= config.warmup_steps < config.decay_steps:
        raise UsageError(
            f"--config.learning_rate is {config.learning_rate}, --config.warmup_steps {config.warmup_steps} and "
            f"--config.decay_steps {config.decay_steps}; expected a positive rate, and more steps to the end of the "
            "decay than of the warmup"
        )
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, config.decay_steps - config.warmup_steps, warmup_target=config.learning_rate,
        warmup_steps=config.warmup_steps,
    )  # fmt: skip
    decay = config.weight_decay
    if config.optimizer == "adamw":
        return keras.optimizers.AdamW(rate, weight_decay=decay, beta_2=0.95)
    if config.optimizer == "muon":
        return keras.optimizers.Muon(
            rate, weight_decay=decay, adam_weight_decay=decay, adam_beta_2=0.95, exclude_layers=["table"]
        )
    raise UsageError(f"--config.optimizer is {config.optimizer!r}; expected muon or adamw")


def build(config: Config) -> tuple[LanguageModelTrainer, LanguageModelEvaluator]:
    """Builds the experiment, under the strategy's scope.

    Args:
      config: the settings.

    Returns:
      The trainer and its evaluator.

    Raises:
      looplib.UsageError: for text that cannot be read, or settings that do not fit together.
    """
    size = transformer.Size(config.width, config.layers, config.heads)
    if min(config.width, config.layers, config.heads, config.text_bytes) < 1 or config.width % (2 * config.heads):
        raise UsageError(
            f"--config.width is {config.width}, --config.layers {config.layers}, --config.heads {config.heads} and "
            f"--config.text_bytes {config.text_bytes}; expected positive numbers, and a width that 2 * heads divides"
        )
    data = text_data.load(config.text_files, config.text_bytes, config.vocabulary, config.sequence_length)
    _prompt(config, data)
    model = transformer.Decoder(data.vocabulary.size + 2, data.start, size)
    length, mixture = config.sequence_length, None
    if config.mixture:
        mixture = text_mixture.TextMixture(config.mixture, data.vocabulary, data.start, length)
    trainer = LanguageModelTrainer(model, make_optimizer(config), data, length, mixture)
    return trainer, LanguageModelEvaluator(model, data, config)


def _generated(controller: looplib.Controller, seed: int) -> str:
    return controller.loops["eval"].task.sample(seed)


def show_sample(event: looplib.Event) -> None:
    """Shows a generated text after each evaluation, and draws the curve."""
    if event.split != "eval" or not event.controller.is_chief:
        return
    event.controller.show({"sample": looplib.text(_generated(event.controller, event.step))}, event.split)
    pictures.write_evaluations(event.controller.model_dir, "bits_per_byte", "xz_bits_per_byte")


def generate(config: Config, controller: looplib.Controller) -> None:
    """Prints a generated text: `--mode=generate`."""
    print(_generated(controller, seed=int(time.time())))


if __name__ == "__main__":
    launch.run(
        build, Config(), actions=[show_sample], modes={"generate": generate}, train_steps=2000, eval_interval=500,
        global_batch_size=8,
    )  # fmt: skip
