"""Every source of images, made small and real: files on disk, a prepared tensorflow_datasets data set."""

import dataclasses

import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf
import tensorflow_datasets as tfds

import looplib
from trainers import image_data
from trainers.image_classification import Config

IMAGES, LABELS = sklearn.datasets.load_digits(return_X_y=True)
IMAGES = (IMAGES * 255 / 16).astype(np.uint8).reshape(-1, 8, 8)


def context(training, batch=10):
    return looplib.InputContext(
        global_batch_size=batch,
        num_replicas=1,
        pipeline_index=0,
        num_pipelines=1,
        seed=0,
        training=training,
        start_step=0,
    )


def config(**changes):
    return dataclasses.replace(Config(), **changes)


def all_of(dataset):
    images, labels = zip(*dataset.as_numpy_iterator())
    return np.concatenate(images), np.concatenate(labels)


def test_digits_split_is_fixed_disjoint_and_whole():
    data = image_data.load(config())
    assert data.image_shape == (8, 8, 1) and data.num_classes == 10
    test_x, test_y = all_of(data.test(context(False)))
    train_x, train_y = all_of(data.train(context(True, 1437)).take(1))
    assert (len(train_y), len(test_y)) == (1437, 360)
    assert np.bincount(test_y).min() >= 34  # each digit's share
    everything = np.concatenate([train_x, test_x]).reshape(1797, 64)
    original = (IMAGES.astype(np.float64) / 255).reshape(1797, 64)
    as_rows = lambda images: sorted(map(tuple, np.round(images * 16).astype(int)))
    assert as_rows(everything) == as_rows(original)
    again, _ = all_of(image_data.digits().test(context(False)))
    np.testing.assert_array_equal(again, test_x)


def test_a_numpy_file_with_and_without_channels(tmp_path):
    for images in (IMAGES[:60], IMAGES[:60, ..., None], IMAGES[:60] / np.float32(255)):
        path = tmp_path / "data.npz"
        np.savez(path, x_train=images[:40], y_train=LABELS[:40], x_test=images[40:], y_test=LABELS[40:60, None])
        data = image_data.load(config(dataset="numpy", data_path=str(path)))
        x, y = all_of(data.test(context(False)))
        np.testing.assert_allclose(x[..., 0], IMAGES[40:60] / 255, atol=1e-6)
        np.testing.assert_array_equal(y, LABELS[40:60])


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    for name, start, encode in (
        ("train-0", 0, tf.io.encode_png),
        ("train-1", 20, tf.io.encode_jpeg),
        ("test-0", 40, tf.io.encode_png),
    ):
        with tf.io.TFRecordWriter(str(folder / f"{name}.tfrecord")) as writer:
            for image, label in zip(IMAGES[start : start + 20], LABELS[start : start + 20]):
                feature = {
                    "image/encoded": tf.train.Feature(
                        bytes_list=tf.train.BytesList(value=[encode(image[..., None]).numpy()])
                    ),
                    "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return folder


@pytest.mark.slow
def test_tfrecord_files_by_pattern(records):
    files = dict(train_files=f"{records}/train-*.tfrecord", test_files=f"{records}/test-*.tfrecord")
    data = image_data.load(config(dataset="tfrecord", image_size=8, channels=1, **files))
    x, y = all_of(data.test(context(False, 7)))
    np.testing.assert_allclose(x[..., 0], IMAGES[40:60] / 255, atol=1e-6)
    np.testing.assert_array_equal(y, LABELS[40:60])
    _, y = all_of(data.train(context(True)).take(4))
    assert sorted(y) == sorted(LABELS[:40])
    larger = image_data.load(config(dataset="tfrecord", image_size=16, channels=3, **files))
    x, _ = next(iter(larger.train(context(True))))
    assert x.shape == (10, 16, 16, 3) and 0 <= x.numpy().min() <= x.numpy().max() <= 1


def prepare(folder, name, version, images):
    """Writes a real, prepared tensorflow_datasets data set: 50 examples to train on and 23 to test on."""

    def split(start, stop):
        dataset = tf.data.Dataset.from_tensor_slices((images[start:stop], LABELS[start:stop].astype(np.int64)))
        return dataset.map(lambda image, label: {"image": image, "label": label})

    features = {"image": tfds.features.Image(shape=images.shape[1:]), "label": tfds.features.ClassLabel(num_classes=10)}
    tfds.dataset_builders.store_as_tfds_dataset(
        name=name, version=version, data_dir=folder, features=tfds.features.FeaturesDict(features),
        split_datasets={"train": split(0, 50), "test": split(50, 73)},
    )  # fmt: skip
    return folder


def test_tfrecord_files_of_another_kind_are_a_sentence(records, tmp_path):
    (tmp_path / "text.tfrecord").write_text("no records at all")
    good = f"{records}/test-*.tfrecord"
    for changes, message in (
        (dict(train_files=str(tmp_path / "*.tfrecord")), "record 0 of .* has a damaged length"),
        (dict(num_classes=2, train_files=good), "a label is not in 0 to 1; set --config.num_classes"),
        (dict(channels=2, train_files=good), "1 or 3 channels"),
        (dict(image_size=0, train_files=good), "expected a positive size"),
    ):
        settings = {"image_size": 8, "channels": 1, "test_files": good, **changes}
        with pytest.raises(looplib.UsageError, match=message):
            image_data.load(config(dataset="tfrecord", **settings))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("tfds"), "my_digits", "1.0.0", IMAGES[..., None])


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_prepared_tensorflow_data_set(prepared, in_memory, monkeypatch):
    if not in_memory:
        monkeypatch.setattr(image_data, "_IN_MEMORY_BYTES", 0)
    data = image_data.load(config(dataset="my_digits", data_path=str(prepared)))
    assert data.image_shape == (8, 8, 1) and data.num_classes == 10
    x, y = all_of(data.test(context(False)))
    assert len(y) == 23
    rows = lambda images, labels: sorted(
        (*np.round(i.reshape(-1) * 255).astype(int), label) for i, label in zip(images, labels)
    )
    assert rows(x, y) == rows(IMAGES[50:73] / 255, LABELS[50:73])
    _, y = all_of(data.train(context(True)).take(5))
    assert sorted(y) == sorted(LABELS[:50])


def test_mnist_by_name(tmp_path):
    """The files of MNIST cannot be had without a network: its own builder reads the digits, enlarged, in their place."""
    enlarged = np.pad(IMAGES.repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2)))[..., None]
    folder = prepare(tmp_path, "mnist", str(tfds.builder("mnist").version), enlarged)
    data = image_data.load(config(dataset="mnist", data_path=str(folder)))
    x, y = all_of(data.test(context(False)))
    assert x.shape == (23, 28, 28, 1) and data.num_classes == 10
    assert sorted(y) == sorted(LABELS[50:73])


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("classes, kept", [("5-9", [5, 6, 7, 8, 9]), ("7,0-2", [0, 1, 2, 7]), ("3", [3])])
def test_classes_are_chosen_and_numbered_from_0(classes, kept, tmp_path):
    np.savez(
        tmp_path / "data.npz", x_train=IMAGES[:300], y_train=LABELS[:300], x_test=IMAGES[300:], y_test=LABELS[300:]
    )
    for dataset in ("digits", "numpy"):
        data = image_data.load(config(dataset=dataset, data_path=str(tmp_path / "data.npz"), classes=classes))
        assert data.num_classes == len(kept)
    x, y = all_of(data.test(context(False)))
    expected = [(image, kept.index(label)) for image, label in zip(IMAGES[300:], LABELS[300:]) if label in kept]
    np.testing.assert_array_equal(y, [label for _, label in expected])
    np.testing.assert_allclose(x[..., 0], np.stack([image for image, _ in expected]) / 255, atol=1e-6)


BAD = {
    "no number": (dict(classes="a-b"), "--config.classes is 'a-b'; expected numbers and ranges, such as 0-4"),
    "no such class": (dict(classes="5-99999999999"), "expected some of the classes of the train split of digits"),
    "a range backwards": (dict(classes="4-0"), "expected some of the classes"),
    "classes of files": (dict(dataset="tfrecord", classes="1"), "chooses among data in memory, and TFRecord files are"),
    "no file": (dict(dataset="numpy"), "needs --config.data_path"),
    "a missing file": (dict(dataset="numpy", data_path="/nowhere.npz"), "cannot be read as a .npz file"),
    "a file of another kind": (dict(dataset="numpy", data_path=__file__), "cannot be read as a .npz file"),
    "no pattern": (dict(dataset="tfrecord"), "--config.train_files='' matches no file; give a pattern such as"),
    "no match": (dict(dataset="tfrecord", train_files="/nowhere/*"), "'/nowhere/.' matches no file"),
}


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("case", BAD)
def test_data_that_cannot_be_had_is_a_sentence(case):
    changes, message = BAD[case]
    with pytest.raises(looplib.UsageError, match=message):
        image_data.load(config(**changes))


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "arrays, message",
    [
        (dict(x_train=IMAGES[:4]), "y_train.*x_test.*y_test"),
        (dict(x_train=IMAGES[:4], y_train=LABELS[:3], x_test=IMAGES[:2], y_test=LABELS[:2]), "the train split"),
        (
            dict(x_train=IMAGES[:4], y_train=LABELS[:4] * 0.5, x_test=IMAGES[:2], y_test=LABELS[:2]),
            "expected whole numbers",
        ),
        (dict(x_train=IMAGES[:4], y_train=LABELS[:4], x_test=IMAGES[:2, :4], y_test=LABELS[:2]), "expected one shape"),
        (
            dict(x_train=IMAGES[:4].astype(int), y_train=LABELS[:4], x_test=IMAGES[:2], y_test=LABELS[:2]),
            "uint8",
        ),
        (dict(x_train=IMAGES[:0], y_train=LABELS[:0], x_test=IMAGES[:2], y_test=LABELS[:2]), ">.*0"),
    ],
)
def test_arrays_that_do_not_fit_are_a_sentence(arrays, message, tmp_path):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(looplib.UsageError, match=message):
        image_data.load(config(dataset="numpy", data_path=str(tmp_path / "bad.npz")))
