"""Small data sets in the formats that Model Garden reads, made of files that any machine with looplib has.

    python -m trainers.small_data --dir=build/small_data

writes, without a download, and bit by bit alike with equal versions of the packages:

- `digits/`: scikit-learn's digits as JPEG images of 32x32 pixels, for the experiments of image classification;
- `text/`: sentences of the documentation in Python files, each with the package that it comes from, for
  bert/sentence_prediction; `vocab.txt` is the vocabulary of word pieces;
- `masked_lm/`: pairs of such sentences with words masked, for bert/pretraining and electra/pretraining.

Each has `train.tfrecord` and `validation.tfrecord`. The files in `trainers/configs` expect them in `build/small_data`.
"""

import ast
import collections
import importlib.util
import os
import pathlib
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf
from absl import app, flags

from looplib import UsageError
from looplib.base.files import resolve
from trainers import image_data, needed

if TYPE_CHECKING:
    import numpy as np
    from official.nlp.tools.tokenization import FullTokenizer

Features = dict[str, tf.train.Feature]
# The class of a sentence is the package that it comes from; labels are in this order.
PACKAGES = ("python", "numpy", "sklearn", "tf_keras")
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_SENTENCES_PER_PACKAGE = 2400
_VALIDATION_SHARE = 0.15
_VOCAB_SIZE = 2000
_SEQ_LENGTH = 32
_PREDICTIONS = 5
_MASKED_COPIES = 4
_IMAGE_SIZE = 32
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
# Prose: no code, no markup, nothing within brackets.
_SENTENCE = re.compile(r"(?:^|(?<=[.:] ))[A-Z][A-Za-z ,;'-]{30,200}\.(?= |$)")


def int64_feature(values: Iterable[int]) -> tf.train.Feature:
    """Makes a `tf.train.Feature` of whole numbers."""
    return tf.train.Feature(int64_list=tf.train.Int64List(value=list(values)))


def float_feature(values: Iterable[float]) -> tf.train.Feature:
    """Makes a `tf.train.Feature` of floats."""
    return tf.train.Feature(float_list=tf.train.FloatList(value=list(values)))


def bytes_feature(value: str | bytes) -> tf.train.Feature:
    """Makes a `tf.train.Feature` of one string or bytes."""
    value = value.encode() if isinstance(value, str) else value
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def write_records(path: str | os.PathLike[str], examples: Iterable[Features]) -> int:
    """Writes a TFRecord file of `tf.train.Example`s, and makes the folder that it is in.

    Args:
      path: the file.
      examples: the features of each example, by name.

    Returns:
      The number of examples.
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    count = 0
    with tf.io.TFRecordWriter(str(path)) as writer:
        for features in examples:
            writer.write(
                tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(deterministic=True)
            )
            count += 1
    return count


def digit_examples(images: "np.ndarray", labels: "np.ndarray", size: int = _IMAGE_SIZE) -> Iterator[Features]:
    """Makes examples of image classification: `image/encoded`, a JPEG of three channels, and `image/class/label`.

    Args:
      images: float `[n, height, width]` in [0, 1].
      labels: whole numbers `[n]`.
      size: height and width that the images are enlarged to.

    Yields:
      The features of each example.
    """
    for image, label in zip(images, labels):
        enlarged = tf.image.resize(image[..., None] * 255, (size, size), method="bicubic")
        pixels = tf.image.grayscale_to_rgb(tf.saturate_cast(tf.round(enlarged), tf.uint8))
        yield {
            "image/encoded": bytes_feature(tf.io.encode_jpeg(pixels, quality=95).numpy()),
            "image/class/label": int64_feature([label]),
        }


def read_documents(package: str, num_sentences: int | None = None, seed: int = 0) -> list[list[str]]:
    """Reads the sentences in the docstrings of a package, without importing it.

    Args:
      package: its name; "python" is Python's standard library.
      num_sentences: reads files, in a random order, until there are that many; None reads all.
      seed: of the order.

    Returns:
      One document for each file: its sentences in order. No sentence comes twice.
    """
    if package == "python":
        root = pathlib.Path(sysconfig.get_path("stdlib"))
    else:
        root = pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    files = [path for path in files if not _LEFT_OUT & set(path.parts)]
    random.Random(seed).shuffle(files)

    documents, seen = [], set()
    for path in files:
        if num_sentences is not None and len(seen) >= num_sentences:
            break
        document = []
        for sentence in _sentences(root / path):
            if sentence not in seen:
                seen.add(sentence)
                document.append(sentence)
        if document:
            documents.append(document)
    return documents


def _sentences(path: pathlib.Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # some packages carry templates, and files that are wrong on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                yield from _SENTENCE.findall(" ".join(paragraph.split()))


def write_vocab(path: str | os.PathLike[str], sentences: Iterable[str], size: int) -> "FullTokenizer":
    """Learns word pieces from sentences and writes them, one a line, after the special tokens.

    Args:
      path: the file.
      sentences: the sentences.
      size: about how many word pieces; the learner comes close.

    Returns:
      The tokenizer of that file, which converts text to lower case.
    """
    with needed.extra("models", "the text data"):
        from official.nlp.tools import tokenization
        from tensorflow_text.tools.wordpiece_vocab import wordpiece_tokenizer_learner_lib as learner

    words = collections.Counter()
    basic = tokenization.BasicTokenizer(do_lower_case=True)
    for sentence in sentences:
        words.update(basic.tokenize(sentence))
    # Sorted, because the learner breaks ties by order.
    counts = sorted(words.items(), key=lambda item: (-item[1], item[0]))
    pieces = learner.learn(counts, vocab_size=size, reserved_tokens=list(SPECIAL_TOKENS))
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    pathlib.Path(path).write_text("\n".join(pieces) + "\n")
    return tokenization.FullTokenizer(vocab_file=str(path), do_lower_case=True)


def sentence_examples(
    labelled: Iterable[tuple[str, int]], tokenizer: "FullTokenizer", seq_length: int
) -> Iterator[Features]:
    """Makes examples of sentence prediction: `input_ids`, `input_mask`, `segment_ids` and `label_ids`.

    Args:
      labelled: sentences with their labels.
      tokenizer: see `write_vocab`.
      seq_length: sentences are cut and padded to it.

    Yields:
      The features of each example.
    """
    for sentence, label in labelled:
        tokens = ["[CLS]", *tokenizer.tokenize(sentence)[: seq_length - 2], "[SEP]"]
        features = _token_features(tokenizer.convert_tokens_to_ids(tokens), [0] * len(tokens), seq_length)
        yield {**features, "label_ids": int64_feature([label])}


def masked_lm_examples(
    documents: Iterable[Sequence[str]],
    tokenizer: "FullTokenizer",
    buckets: Sequence[tuple[int, int]],
    copies: int = 1,
    seed: int = 0,
) -> Iterator[Features]:
    """Makes examples of BERT's pretraining: a sentence and the next or a random one, with some of their words masked.

    Args:
      documents: lists of sentences.
      tokenizer: see `write_vocab`.
      buckets: (length, predictions) pairs, short to long. An example is padded to the shortest length that holds it,
        or cut to the last, and has that many places for masked words.
      copies: how often each sentence comes, with other words masked each time.
      seed: of the masks and of the random sentences.

    Yields:
      The features of each example.
    """
    draw = random.Random(seed)
    pieces = list(tokenizer.vocab)
    tokenized = [[tokenizer.tokenize(sentence) for sentence in document] for document in documents]
    everything = [tokens for document in tokenized for tokens in document]
    for document in tokenized * copies:
        for first, second in zip(document, document[1:]):
            is_random = draw.random() < 0.5
            first, second = list(first), list(draw.choice(everything) if is_random else second)
            while len(first) + len(second) > buckets[-1][0] - 3:
                max(first, second, key=len).pop()
            tokens = ["[CLS]", *first, "[SEP]", *second, "[SEP]"]
            length, places = next(bucket for bucket in buckets if len(tokens) <= bucket[0])
            candidates = [i for i, token in enumerate(tokens) if token not in SPECIAL_TOKENS]
            positions = sorted(draw.sample(candidates, min(places, max(1, round(0.15 * len(candidates))))))
            targets = [tokens[i] for i in positions]
            for i in positions:
                chance = draw.random()
                tokens[i] = "[MASK]" if chance < 0.8 else tokens[i] if chance < 0.9 else draw.choice(pieces)
            segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
            padding = [0] * (places - len(positions))
            yield {
                **_token_features(tokenizer.convert_tokens_to_ids(tokens), segments, length),
                "masked_lm_positions": int64_feature(positions + padding),
                "masked_lm_ids": int64_feature(tokenizer.convert_tokens_to_ids(targets) + padding),
                "masked_lm_weights": float_feature([1.0] * len(positions) + padding),
                "next_sentence_labels": int64_feature([int(is_random)]),
            }


def _token_features(ids: list[int], segments: list[int], length: int) -> Features:
    padding = [0] * (length - len(ids))
    return {
        "input_ids": int64_feature(ids + padding),
        "input_mask": int64_feature([1] * len(ids) + padding),
        "segment_ids": int64_feature(segments + padding),
    }


def write_digits(directory: str | os.PathLike[str]) -> dict[str, int]:
    """Writes the folder `digits` into a directory; returns the number of examples of each file, by its path."""
    train, test = image_data.digits_arrays()
    return _write_splits(pathlib.Path(directory, "digits"), digit_examples(*train), digit_examples(*test))


def write_text(directory: str | os.PathLike[str]) -> dict[str, int]:
    """Writes the folders `text` and `masked_lm` into a directory; returns the number of examples of each file."""
    directory = pathlib.Path(directory)
    train, validation = [], []
    for label, package in enumerate(PACKAGES):
        documents = read_documents(package, _SENTENCES_PER_PACKAGE)
        # Whole files, because sentences of one file resemble each other.
        num_train = round((1 - _VALIDATION_SHARE) * len(documents))
        train += [(document, label) for document in documents[:num_train]]
        validation += [(document, label) for document in documents[num_train:]]
    sentences = [sentence for document, _ in train for sentence in document]
    tokenizer = write_vocab(directory / "text" / "vocab.txt", sentences, _VOCAB_SIZE)

    counts = {}
    labelled = [
        [(sentence, label) for document, label in split for sentence in document] for split in (train, validation)
    ]
    random.Random(0).shuffle(labelled[0])
    counts.update(
        _write_splits(directory / "text", *(sentence_examples(split, tokenizer, _SEQ_LENGTH) for split in labelled))
    )
    masked = []
    for split, copies in ((train, _MASKED_COPIES), (validation, 1)):
        documents = [document for document, _ in split]
        masked.append(list(masked_lm_examples(documents, tokenizer, [(_SEQ_LENGTH, _PREDICTIONS)], copies)))
    random.Random(0).shuffle(masked[0])
    counts.update(_write_splits(directory / "masked_lm", *masked))
    return counts


def _write_splits(folder: pathlib.Path, train: Iterable[Features], validation: Iterable[Features]) -> dict[str, int]:
    return {
        str(folder / f"{name}.tfrecord"): write_records(folder / f"{name}.tfrecord", examples)
        for name, examples in (("train", train), ("validation", validation))
    }


def main(argv: Sequence[str]) -> None:
    """Writes all files, and prints their paths."""
    del argv
    for write in (write_digits, write_text):
        try:
            written = write(resolve(flags.FLAGS.dir, "--dir"))
        except UsageError as error:
            sys.exit(f"looplib: error: {error}")
        for path, count in written.items():
            print(f"{path}: {count} examples")


if __name__ == "__main__":
    flags.DEFINE_string("dir", "build/small_data", "Where to write the files.")
    app.run(main)
