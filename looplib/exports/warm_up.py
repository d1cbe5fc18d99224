"""Requests that TensorFlow Serving answers while it loads a model, before it serves it."""

import os

import tensorflow as tf

from looplib.base import folders
from looplib.exports.samples import ModelInputs

MOST_EXAMPLES = 32


def write_requests(folder: str, samples: ModelInputs, signature: str) -> None:
    """Writes requests beside a SavedModel: one example, and several of them as a batch.

    They are `tensorflow.serving.PredictionLog`s, whose `predict_log` (6) has a `request` (1), a `PredictRequest`. That
    has a `model_spec` (1) with a `signature_name` (3), and a map `inputs` (2) from names (1) to `TensorProto`s (2).
    """
    place = folders.make_folder(folder, "assets.extra")
    with tf.io.TFRecordWriter(os.path.join(place, "tf_serving_warmup_requests")) as writer:
        for batch in (*samples.first(1).batches, *samples.batches[:1]):
            request = _field(1, _field(3, signature.encode()))
            for name, value in batch.items():
                tensor = tf.make_tensor_proto(value).SerializeToString()
                request += _field(2, _field(1, name.encode()) + _field(2, tensor))
            writer.write(_field(6, _field(1, request)))


def _field(number: int, content: bytes) -> bytes:
    """Returns a field of a protocol buffer: its number and type, its size in groups of seven bits, its content."""
    size, sizes = len(content), []
    while size > 127:
        sizes.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *sizes, size]) + content
