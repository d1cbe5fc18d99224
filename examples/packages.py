"""Guesses the package that a text documents: `python -m examples.packages --processes=2 --model_dir=/tmp/packages`."""

import zlib

import grain
import keras
import numpy as np
from absl import flags

import looplib
from trainers.small_data import read_documents

PROCESSES = flags.DEFINE_integer("processes", 0, "Processes that read; 0 reads in that of the training.")
TEXTS = [(" ".join(lines), i) for i in range(3) for lines in read_documents(("python", "numpy", "sklearn")[i], 3000)]


def _count(example, random):  # which letters follow one another in a part of a text, in pure Python
    text = example[0][random.integers(max(1, len(example[0]) - 600)) :][:600]
    found = [zlib.crc32(text[i : i + size].encode()) % 4096 for i in range(len(text)) for size in (2, 3, 4, 5, 6)]
    return np.log1p(np.bincount(found, minlength=4096), dtype="float32"), example[1]


class Classifier(looplib.GradientTrainer):
    def __init__(self):
        layers = [keras.Input((4096,)), keras.layers.Dense(320, "relu"), keras.layers.Dense(3)]
        super().__init__(keras.Sequential(layers), keras.optimizers.Adam(0.001))

    def dataset(self, context):
        texts = grain.MapDataset.source(TEXTS).seed(context.seed).shuffle().repeat().random_map(_count)
        size, options = context.loader_batch_size, grain.MultiprocessingOptions(PROCESSES.value)
        return context.loader(lambda i, n: texts[i::n].batch(size).to_iter_dataset().mp_prefetch(options))

    def loss_fn(self, inputs):
        scores = self.model(inputs[0], training=True)
        return keras.losses.sparse_categorical_crossentropy(inputs[1], scores, from_logits=True)


if __name__ == "__main__":
    looplib.launch.run(lambda _: (Classifier(), None), train_steps=500)
