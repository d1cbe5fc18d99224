"""Text to model: files of this machine or of a pattern, as rows of tokens of one length."""

import dataclasses
import glob
import hashlib
import lzma
import os
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf
from absl import logging

from looplib import InputContext, UsageError
from looplib.base.files import resolve
from looplib.base.messages import gist

_ENDINGS = (".py", ".md", ".rst", ".txt")
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "testing"}  # tests repeat themselves
_FILE_BYTES = range(64, 1 << 16)  # the sizes of files that are read: one file must not be a great part of the text
_HELD_OUT = 64  # one file of so many
_TEXTS_AT_ONCE = 256


class Vocabulary(Protocol):
    """Divides text into tokens, whole numbers from 0 to `size` - 1.

    Attributes:
      size: the number of different tokens.
    """

    size: int

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the tokens of each text, int32 `[n]`."""

    def decode(self, tokens: np.ndarray) -> bytes:
        """Returns the text of tokens, int `[n]`."""


class Bytes:
    """The vocabulary whose tokens are the 256 bytes."""

    size = 256

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """See `Vocabulary`."""
        return [np.frombuffer(text, np.uint8).astype(np.int32) for text in texts]

    def decode(self, tokens: np.ndarray) -> bytes:
        """See `Vocabulary`."""
        return bytes(np.asarray(tokens, np.uint8))


class SentencePiece:
    """A vocabulary of a SentencePiece model (Kudo and Richardson, 2018), by tensorflow-text.

    Args:
      path: the file of the model.
    """

    def __init__(self, path: str) -> None:
        import tensorflow_text

        with open(path, "rb") as file:
            self._tokenizer = tensorflow_text.SentencepieceTokenizer(model=file.read())
        self.size = int(self._tokenizer.vocab_size())

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """See `Vocabulary`."""
        return _rows(self._tokenizer.tokenize(list(texts)))

    def decode(self, tokens: np.ndarray) -> bytes:
        """See `Vocabulary`."""
        return self._tokenizer.detokenize(tf.constant(tokens, tf.int32)).numpy()


class WordPiece:
    """A vocabulary of word pieces (Wu et al., 2016), cased, by tensorflow-text.

    Args:
      path: the file, with one piece a line, [UNK] among them.
    """

    def __init__(self, path: str) -> None:
        import tensorflow_text

        with open(path, encoding="utf-8") as file:
            pieces = file.read().splitlines()
        self._tokenizer = tensorflow_text.FastBertTokenizer(
            pieces, token_out_type=tf.int32, lower_case_nfd_strip_accents=False, support_detokenization=True
        )
        self.size = len(pieces)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """See `Vocabulary`."""
        return _rows(self._tokenizer.tokenize(list(texts)))

    def decode(self, tokens: np.ndarray) -> bytes:
        """See `Vocabulary`."""
        return self._tokenizer.detokenize(tf.constant(tokens, tf.int32)[None])[0].numpy()


def _rows(tokens: tf.RaggedTensor) -> list[np.ndarray]:
    return np.split(tokens.flat_values.numpy(), tokens.row_splits.numpy()[1:-1])


def load_vocabulary(path: str) -> Vocabulary:
    """Loads the vocabulary of a file.

    Args:
      path: a SentencePiece model, `*.model`; or word pieces, one a line, `*.txt`; or "" for bytes.

    Raises:
      UsageError: if the file cannot be read.
    """
    if not path:
        return Bytes()
    kinds = {".model": SentencePiece, ".txt": WordPiece}
    kind = kinds.get(os.path.splitext(path)[1])
    if kind is None:
        raise UsageError(
            f"--config.vocabulary is {path!r}; expected a SentencePiece model (*.model), a list of word pieces "
            "(*.txt), or nothing for bytes"
        )
    try:
        return kind(resolve(path, "the vocabulary"))
    except UsageError:
        raise
    except (OSError, ValueError, RuntimeError, tf.errors.OpError) as error:
        raise UsageError(
            f"--config.vocabulary={path} cannot be read ({gist(error)}); expected a SentencePiece model (*.model) or a "
            "list of word pieces, one a line, with [UNK] (*.txt)"
        ) from error


def machine_files() -> dict[str, str]:
    """Finds the sources and documentation of Python's standard library and of the installed packages, without tests.

    Returns:
      dict from the path below its root, which names a file on all machines, to the path.
    """
    found = {}
    for root in sorted({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}):
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in _LEFT_OUT]
            paths = [os.path.join(folder, name) for name in names if name.endswith(_ENDINGS)]
            found.update({os.path.relpath(path, root): path for path in paths})
    return found


@dataclasses.dataclass(frozen=True)
class Documents:
    """The contents of files, no two of which are equal.

    Attributes:
      train: the files to train on.
      held_out: the files to evaluate on.
    """

    train: list[bytes]
    held_out: list[bytes]


def read_documents(pattern: str, most_bytes: int) -> Documents:
    """Reads files in the order of the hashes of their names, until there are enough.

    A file whose content was there before is left out. The hash of its content decides whether a file is held out: one
    of 64 is, on every machine and whatever other files there are.

    Args:
      pattern: of the files' names, with ** for folders; "" for `machine_files`.
      most_bytes: the sum of the sizes at which reading ends.

    Raises:
      UsageError: if there are not enough files for both parts.
    """
    pattern = resolve(pattern, "--config.text_files") if pattern.startswith("~") else pattern
    files = {path: path for path in glob.glob(pattern, recursive=True)} if pattern else machine_files()
    documents, seen, total = Documents([], []), set(), 0
    for name in sorted(files, key=lambda name: (_hash(name.encode()), name)):
        if total >= most_bytes:
            break
        if not os.path.isfile(files[name]) or os.path.getsize(files[name]) not in _FILE_BYTES:
            continue
        with open(files[name], "rb") as file:
            text = file.read()
        key = _hash(text)
        if key not in seen:
            seen.add(key)
            total += len(text)
            (documents.train if key % _HELD_OUT else documents.held_out).append(text)
    if not documents.train or not documents.held_out:
        raise UsageError(
            f"{pattern or 'this machine'} has {len(seen)} different files of {_FILE_BYTES.start} to "
            f"{_FILE_BYTES.stop - 1} bytes, {len(documents.held_out)} of them to evaluate on, which are one of "
            f"{_HELD_OUT}; expected some of both: set --config.text_files and --config.text_bytes for more files"
        )
    return documents


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def xz_bits_per_byte(texts: Sequence[bytes]) -> float:
    """Returns the bits that `xz -9` needs for a byte of the texts, compressed as one stream."""
    stream = b"".join(texts)
    return 8 * len(lzma.compress(stream, preset=9)) / len(stream)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Documents one after the other, cut into rows of one length.

    In a document, the tokens of the text stand between `start` and `end`. A row has one token more than the model
    reads, because each token is the target of the one before it. A target counts from position `first` of its row, and
    if it is not `start`, which also pads the last row. So each token of the text, and each `end`, counts once.

    Attributes:
      tokens: int32 `[n, length + 1]`.
      first: int32 `[n]`.
    """

    tokens: np.ndarray
    first: np.ndarray

    def targets(self, start: int) -> int:
        """Returns how many targets count, where `start` is the token before a document."""
        places = np.arange(self.tokens.shape[1] - 1)
        return int(((self.tokens[:, 1:] != start) & (places >= self.first[:, None])).sum())

    def dataset(self, context: InputContext) -> tf.data.Dataset:
        """Makes batches of (tokens `[b, length + 1]`, first `[b]`), in the order of `InputContext.indices`."""
        tokens, first = tf.constant(self.tokens), tf.constant(self.first)

        @tf.autograph.experimental.do_not_convert
        def rows(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return tf.gather(tokens, ids), tf.gather(first, ids)

        return context.indices(len(self.first)).map(rows, num_parallel_calls=tf.data.AUTOTUNE)


def pack(documents: Sequence[np.ndarray], start: int, length: int, step: int) -> Rows:
    """Packs documents into rows.

    Args:
      documents: the tokens of each, int32 `[n]`.
      start: the token before a document; the one after it is start + 1.
      length: tokens that the model reads of a row.
      step: targets that a row adds, at most `length`. The other targets of a row are those of the row before it, and
        are context only.
    """
    stream = np.concatenate([np.concatenate([[start], document, [start + 1]]) for document in documents])
    count = max(1, -(-(len(stream) - 1 - length) // step) + 1)
    stream = np.pad(stream, (0, (count - 1) * step + length + 1 - len(stream)), constant_values=start)
    tokens = np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::step].astype(np.int32)
    first = np.full(count, length - step, np.int32)
    first[0] = 0
    return Rows(tokens, first)


@dataclasses.dataclass(frozen=True)
class TextData:
    """Text to train and evaluate a language model on.

    Attributes:
      vocabulary: what its tokens mean.
      start: the token before a document, the first after those of the vocabulary; start + 1 ends a document.
      train: the rows to train on.
      held_out: the rows to evaluate on; each row after the first has half a row of context.
      held_out_bytes: the size of the text to evaluate on.
      xz: bits per byte of `xz -9` for that text.
    """

    vocabulary: Vocabulary
    start: int
    train: Rows
    held_out: Rows
    held_out_bytes: int
    xz: float


def load(pattern: str, most_bytes: int, vocabulary_path: str, length: int) -> TextData:
    """Loads text; see `read_documents` and `load_vocabulary`.

    Raises:
      UsageError: for too few files, or a vocabulary that cannot be read.
    """
    vocabulary = load_vocabulary(vocabulary_path)
    documents = read_documents(pattern, most_bytes)
    encoded = {name: list(_encode(vocabulary, texts)) for name, texts in vars(documents).items()}
    lossy = sum(vocabulary.decode(tokens) != text for tokens, text in zip(encoded["held_out"], documents.held_out))
    if lossy:
        logging.warning(
            "the vocabulary loses a part of %d of the %d texts to evaluate on, such as spaces: bits per byte are "
            "too low to be compared", lossy, len(documents.held_out)
        )  # fmt: skip
    return TextData(
        vocabulary,
        vocabulary.size,
        pack(encoded["train"], vocabulary.size, length, length),
        pack(encoded["held_out"], vocabulary.size, length, max(1, length // 2)),
        sum(map(len, documents.held_out)),
        xz_bits_per_byte(documents.held_out),
    )


def _encode(vocabulary: Vocabulary, texts: Sequence[bytes]) -> Iterator[np.ndarray]:
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        yield from vocabulary.encode(texts[first : first + _TEXTS_AT_ONCE])
