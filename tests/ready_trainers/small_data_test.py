"""Model Garden's loaders read what `python -m trainers.small_data` writes, which is the same each time."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from conftest import needs_models

from trainers import small_data

SENTENCES = ["The cat sat on the mat.", "The dog sat on the cat.", "A mat is where the dog sat."]


@pytest.fixture
def tokenizer(tmp_path):
    return small_data.write_vocab(tmp_path / "vocab.txt", SENTENCES, 60)


def _values(features, name):
    feature = features[name]
    return list(feature.int64_list.value or feature.float_list.value)


def test_digits_decode_to_themselves():
    image = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 8, 8)
    (features,) = small_data.digit_examples(image, [7], size=8)
    decoded = tf.io.decode_jpeg(features["image/encoded"].bytes_list.value[0]).numpy()
    assert decoded.shape == (8, 8, 3)
    # JPEG loses a little.
    np.testing.assert_allclose(decoded[..., 0] / 255, image[0], atol=0.05)
    assert _values(features, "image/class/label") == [7]


def test_documents_are_prose_without_repetition_and_the_same_each_time():
    documents = small_data.read_documents("email")
    assert documents == small_data.read_documents("email")
    sentences = [sentence for document in documents for sentence in document]
    assert len(sentences) > 200
    assert max(collections.Counter(sentences).values()) == 1
    assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in sentences)


def test_the_number_of_sentences_is_where_reading_stops():
    documents = small_data.read_documents("email", num_sentences=50)
    assert sum(map(len, documents[:-1])) < 50 <= sum(map(len, documents))


@needs_models
def test_a_sentence_is_cut_and_padded(tokenizer):
    short, long = small_data.sentence_examples([("the cat", 1), (" ".join(SENTENCES), 0)], tokenizer, 8)
    pieces = ["[CLS]", *tokenizer.tokenize("the cat"), "[SEP]"]
    expected = tokenizer.convert_tokens_to_ids(pieces)
    assert _values(short, "input_ids") == expected + [0] * (8 - len(expected))
    assert _values(short, "input_mask") == [1] * len(expected) + [0] * (8 - len(expected))
    assert _values(short, "label_ids") == [1]
    assert len(_values(long, "input_ids")) == 8
    assert _values(long, "input_ids")[-1] == tokenizer.vocab["[SEP]"]


@needs_models
def test_masked_words_are_where_the_positions_say(tokenizer):
    documents = [SENTENCES, SENTENCES[::-1]]
    originals = {tuple(tokenizer.convert_tokens_to_ids(tokenizer.tokenize(sentence))) for sentence in SENTENCES}
    examples = list(small_data.masked_lm_examples(documents, tokenizer, [(48, 4)], copies=5))
    assert len(examples) == 5 * 4
    for features in examples:
        ids, mask = np.array(_values(features, "input_ids")), np.array(_values(features, "input_mask"))
        positions, targets = _values(features, "masked_lm_positions"), _values(features, "masked_lm_ids")
        weights = _values(features, "masked_lm_weights")
        assert len(positions) == len(targets) == len(weights) == 4
        restored = ids.copy()
        for position, target, weight in zip(positions, targets, weights):
            if weight:
                assert mask[position] == 1
                restored[position] = target
        # With the targets put back, both halves are sentences again.
        separators = np.flatnonzero(restored == tokenizer.vocab["[SEP]"])
        assert tuple(restored[1 : separators[0]]) in originals
        assert tuple(restored[separators[0] + 1 : separators[1]]) in originals
        assert _values(features, "segment_ids")[separators[0] : separators[0] + 2] == [0, 1]


@needs_models
def test_a_pair_is_padded_to_the_shortest_bucket_that_holds_it(tokenizer):
    shapes = set()
    for features in small_data.masked_lm_examples([["a cat.", "a mat.", *SENTENCES]], tokenizer, [(16, 2), (40, 4)]):
        length = sum(_values(features, "input_mask"))
        assert len(_values(features, "input_ids")) == (16 if length <= 16 else 40)
        shapes.add((len(_values(features, "input_ids")), len(_values(features, "masked_lm_ids"))))
    assert shapes == {(16, 2), (40, 4)}


@needs_models
def test_files_are_the_same_each_time(tmp_path):
    written = []
    for name in ("first", "second"):
        tokenizer = small_data.write_vocab(tmp_path / name / "vocab.txt", SENTENCES, 60)
        examples = small_data.masked_lm_examples([SENTENCES], tokenizer, [(32, 4)], copies=3)
        assert small_data.write_records(tmp_path / name / "train.tfrecord", examples) == 6
        written.append([(tmp_path / name / file).read_bytes() for file in ("vocab.txt", "train.tfrecord")])
    assert written[0] == written[1]
