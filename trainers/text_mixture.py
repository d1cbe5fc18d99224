"""Text of several sources to train on: records of files, in exact shares, packed into rows."""

import numpy as np
import tensorflow as tf

import looplib
from looplib import InputContext, UsageError
from trainers.text_data import Vocabulary


class TextMixture:
    """Rows of packed documents, of which each source has its share. Each record of the files is a document.

    Between the tokens of a document stand a start and an end token, as in `text_data.Rows`. A document that is longer
    than a row is cut, and each piece has a start token of its own.

    Args:
      mixture: PATTERN=WEIGHT of each source, separated by commas.
      vocabulary: what tokens mean.
      start: the token before a document; the one after it is start + 1.
      length: tokens that the model reads of a row.

    Attributes:
      rows: the plan, a `looplib.Mixture` of `looplib.Packed`.

    Raises:
      UsageError: for no weights, files that cannot be read, or records that are no text.
    """

    def __init__(self, mixture: str, vocabulary: Vocabulary, start: int, length: int) -> None:
        weights = _weights(mixture)
        self._vocabulary, self._start = vocabulary, start
        self._sources = [looplib.open_records(pattern) for pattern in weights]
        self._firsts = np.cumsum([0, *map(len, self._sources)])  # documents are numbered through
        if any(len(source) and not isinstance(source[0], bytes) for source in self._sources):
            raise UsageError(f"--config.mixture is {mixture}; expected files whose records are text, such as lines")
        lengths = np.concatenate([looplib.measure(source, self._lengths) for source in self._sources])
        parts = [np.arange(first, last) for first, last in zip(self._firsts, self._firsts[1:])]
        rows = [looplib.Packed(lengths, length + 1, overlap=1, chosen=part) for part in parts]
        self.rows = looplib.Mixture(dict(zip(weights, rows)), weights)

    def dataset(self, context: InputContext) -> tf.data.Dataset:
        """Makes batches of (tokens `[b, length + 1]`, zeros `[b]`), as `text_data.Rows` does."""

        @tf.autograph.experimental.do_not_convert
        def filled(rows: looplib.PackedRows, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            # Padding is start tokens too, which do not count. In a later piece the start takes the place of the
            # overlap.
            tokens = tf.where(rows.positions == 0, self._start, rows.read(self._read))
            return tokens, tf.zeros_like(tokens[:, 0])

        return context.indices(self.rows).map(filled, num_parallel_calls=tf.data.AUTOTUNE)

    def _lengths(self, texts: tf.Tensor) -> tf.Tensor:
        counts = tf.numpy_function(lambda texts: np.array([len(one) for one in self._encode(texts)]), [texts], tf.int64)
        return tf.ensure_shape(counts, [None])

    def _read(self, ids: tf.Tensor) -> tf.RaggedTensor:
        tokens, lengths = tf.numpy_function(self._documents, [ids], [tf.int32, tf.int64])
        return tf.RaggedTensor.from_row_lengths(tf.ensure_shape(tokens, [None]), tf.ensure_shape(lengths, [None]))

    def _documents(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        of = np.searchsorted(self._firsts, ids, side="right") - 1
        found = self._encode([self._sources[i][number] for i, number in zip(of, ids - self._firsts[of])])
        return np.concatenate(found), np.array([len(one) for one in found])

    def _encode(self, texts: list[bytes]) -> list[np.ndarray]:
        found = self._vocabulary.encode(list(texts))
        return [np.concatenate([[self._start], one, [self._start + 1]]).astype(np.int32) for one in found]


def _weights(mixture: str) -> dict[str, float]:
    pairs = [part.strip().rpartition("=") for part in mixture.split(",")]
    try:
        weights = {pattern: float(weight) for pattern, _, weight in pairs if pattern}
    except ValueError:
        weights = {}
    if len(weights) < len(pairs):
        raise UsageError(
            f"--config.mixture is {mixture!r}; expected PATTERN=WEIGHT of each source, separated by commas, such as "
            "/data/web-*.jsonl=0.7,/data/code-*.jsonl=0.3"
        )
    return weights
