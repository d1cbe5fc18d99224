"""Images and labels to classify: scikit-learn's digits, numpy files, TFRecord files, tensorflow_datasets."""

import dataclasses
import functools
import os
import re
import socket
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from looplib import InputContext, UsageError, open_records
from looplib.base.files import resolve
from looplib.base.messages import gist, join_names, parse_error
from trainers import needed

# Data sets of at most this size are read into memory, where a run enters their order at any position at once.
_IN_MEMORY_BYTES = 1 << 30
_DIGITS_TEST = 360


@dataclasses.dataclass(frozen=True)
class ImageData:
    """A training and a test set of one image shape.

    Attributes:
      name: what it is called in messages.
      image_shape: (height, width, channels).
      num_classes: labels are 0 to num_classes - 1.
      train: makes batches of training examples for an `InputContext`.
      test: makes batches of test examples, each of which comes once.

    Batches are (float32 `[batch, height, width, channels]` in [0, 1], int64 `[batch]`).
    """

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int
    train: Callable[[InputContext], tf.data.Dataset]
    test: Callable[[InputContext], tf.data.Dataset]


class Config(Protocol):
    """The settings that name a data set; see `image_classification.Config`."""

    dataset: str
    data_path: str
    train_files: str
    test_files: str
    image_size: int
    channels: int
    num_classes: int
    classes: str


def load(config: Config) -> ImageData:
    """Loads the data set that a config names.

    Raises:
      UsageError: if it is not available; says what to do.
    """
    path = resolve(config.data_path, "--config.data_path") if config.data_path else ""
    if config.dataset == "digits":
        return digits(config.classes)
    if config.dataset == "numpy":
        return numpy_file(path, config.classes)
    if config.dataset == "tfrecord":
        _refuse_classes(config.classes, "TFRecord files")
        return tfrecords(
            config.train_files, config.test_files, (config.image_size, config.image_size, config.channels),
            config.num_classes
        )  # fmt: skip
    return from_tfds(config.dataset, path, config.image_size, config.classes)


def in_memory(name: str, train: tuple[Any, Any], test: tuple[Any, Any], classes: str = "") -> ImageData:
    """Makes a data set of arrays in memory, in the order of `InputContext.indices`, a keyed permutation.

    Args:
      name: for messages.
      train: pair of arrays: images `[n, height, width]` or `[n, height, width, channels]`, uint8 (0 to 255) or float
        (0 to 1), and integer labels `[n]` or `[n, 1]`.
      test: such a pair for the test set.
      classes: labels to keep, such as "0-4" or "0,2,7-9", which become 0, 1, ... in ascending order; "" keeps all.

    Raises:
      UsageError: for arrays that do not fit together, or classes that they do not have.
    """
    splits = []
    for split, (images, labels) in (("train", train), ("test", test)):
        images, labels = np.asarray(images), np.asarray(labels)
        labels = labels.reshape(-1) if labels.shape[1:] == (1,) else labels
        images = images[..., None] if images.ndim == 3 else images
        if images.ndim != 4 or labels.shape != images.shape[:1] or not len(labels):
            raise UsageError(
                f"the {split} split of {name} has images of shape {list(images.shape)} and labels of shape "
                f"{list(labels.shape)}; expected [n, height, width] or [n, height, width, channels], and [n], n > 0"
            )
        if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
            raise UsageError(f"the labels of {name} ({split}) are {labels.dtype}; expected whole numbers from 0 up")
        if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
            raise UsageError(f"the images of {name} ({split}) are {images.dtype}; expected uint8, or float in [0, 1]")
        splits.append(_of_classes(name, split, images, labels.astype(np.int64), classes))
    if splits[0][0].shape[1:] != splits[1][0].shape[1:]:
        raise UsageError(
            f"{name} trains on images of shape {list(splits[0][0].shape[1:])} and tests on "
            f"{list(splits[1][0].shape[1:])}; expected one shape"
        )

    def source(images: np.ndarray, labels: np.ndarray) -> Callable[[InputContext], tf.data.Dataset]:
        # Made once, outside the data set's functions, so that every pipeline shares one copy.
        images, labels = tf.constant(images), tf.constant(labels)

        @tf.autograph.experimental.do_not_convert
        def rows(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return _to_float(tf.gather(images, ids)), tf.gather(labels, ids)

        return lambda context: context.indices(len(labels)).map(rows, num_parallel_calls=tf.data.AUTOTUNE)

    num_classes = int(max(labels.max() for _, labels in splits)) + 1
    return ImageData(name, splits[0][0].shape[1:], num_classes, source(*splits[0]), source(*splits[1]))


def _of_classes(
    name: str, split: str, images: np.ndarray, labels: np.ndarray, classes: str
) -> tuple[np.ndarray, np.ndarray]:
    """Keeps the images of some classes, and numbers these from 0."""
    if not classes:
        return images, labels
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", classes):
        raise UsageError(f"--config.classes is {classes!r}; expected numbers and ranges, such as 0-4 or 0,2,7-9")
    present = set(labels.tolist())
    bounds = [[int(number) for number in part.split("-")] for part in classes.split(",")]
    known = all(pair[0] <= pair[-1] and {pair[0], pair[-1]} <= present for pair in bounds)
    kept = sorted({number for pair in bounds for number in range(pair[0], pair[-1] + 1)}) if known else []
    if not kept or not present.issuperset(kept):
        raise UsageError(
            f"--config.classes is {classes!r}; expected some of the classes of the {split} split of {name}, which are "
            f"{join_names([str(number) for number in sorted(present)])}"
        )
    chosen = np.isin(labels, kept)
    return images[chosen], np.searchsorted(kept, labels[chosen])


def _refuse_classes(classes: str, what: str) -> None:
    if classes:
        raise UsageError(
            f"--config.classes={classes} chooses among data in memory, and {what} are read from disk; write files of "
            "these classes only"
        )


def digits_arrays() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Loads scikit-learn's 1,797 digits of 8x8 pixels, which come with it: 1,437 to train on and 360 to test on.

    The split is random with a fixed seed, and each digit has an equal share of both parts.

    Returns:
      ((images, labels) to train on, (images, labels) to test on); images are float32 `[n, 8, 8]` in [0, 1].
    """
    with needed.extra("trainers", "the data set of digits"):
        import sklearn.datasets
        import sklearn.model_selection

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    train_x, test_x, train_y, test_y = sklearn.model_selection.train_test_split(
        images, labels, test_size=_DIGITS_TEST, random_state=0, stratify=labels
    )
    return (train_x, train_y), (test_x, test_y)


def digits(classes: str = "") -> ImageData:
    """Makes a data set of `digits_arrays`, with some of the classes; see `in_memory`."""
    return in_memory("digits", *digits_arrays(), classes)


def numpy_file(path: str, classes: str = "") -> ImageData:
    """Reads a .npz file with the arrays x_train, y_train, x_test and y_test.

    Args:
      path: the file.
      classes: see `in_memory`.

    Raises:
      UsageError: if the file or an array is missing.
    """
    if not path:
        raise UsageError("--config.dataset=numpy needs --config.data_path=FILE.npz")
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        if not os.path.isfile(path):  # a FIFO would be waited for
            raise OSError("it is not there, or no regular file")
        with np.load(path) as file:
            missing = [name for name in names if name not in file.files]
            if missing:
                raise UsageError(
                    f"{path} has no {', '.join(missing)}; expected a .npz file with the arrays {', '.join(names)}, as "
                    "numpy.savez writes it"
                )
            x_train, y_train, x_test, y_test = (file[name] for name in names)
    except UsageError:
        raise
    except Exception as error:  # of numpy, zipfile and zlib, which have many types
        raise UsageError(
            f"--config.data_path={path} cannot be read as a .npz file ({gist(error)}); expected one with the arrays "
            f"{', '.join(names)}"
        ) from error
    return in_memory(path, (x_train, y_train), (x_test, y_test), classes)


def tfrecords(train_files: str, test_files: str, image_shape: tuple[int, int, int], num_classes: int) -> ImageData:
    """Reads TFRecord files of `tf.train.Example`s with `image/encoded` (JPEG or PNG) and `image/class/label` (int64).

    Args:
      train_files: pattern of the training files.
      test_files: pattern of the test files.
      image_shape: (height, width, channels); images are resized to it.
      num_classes: labels are 0 to num_classes - 1.

    Raises:
      UsageError: if a pattern matches no file, or the first example cannot be read.
    """
    if min(*image_shape, num_classes) < 1 or image_shape[2] not in (1, 3):
        raise UsageError(
            f"--config.image_size is {image_shape[0]}, --config.channels {image_shape[2]} and --config.num_classes "
            f"{num_classes}; expected a positive size, 1 or 3 channels and at least 1 class"
        )
    splits = []
    for flag, pattern in (("train_files", train_files), ("test_files", test_files)):
        files = sorted(tf.io.gfile.glob(pattern)) if pattern else []
        if not files:
            raise UsageError(
                f"--config.{flag}={pattern!r} matches no file; give a pattern such as /data/{flag[:-6]}-*.tfrecord"
            )
        splits.append(files)
    height, width, channels = image_shape

    def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = tf.io.parse_single_example(
            record,
            {
                "image/encoded": tf.io.FixedLenFeature([], tf.string),
                "image/class/label": tf.io.FixedLenFeature([], tf.int64),
            },
        )
        image = tf.io.decode_image(example["image/encoded"], channels=channels, expand_animations=False)
        label = example["image/class/label"]
        message = f"a label is not in 0 to {num_classes - 1}; set --config.num_classes"
        with tf.control_dependencies([tf.debugging.Assert((label >= 0) & (label < num_classes), [message, label])]):
            return _resized(image, (height, width)), tf.identity(label)

    sources = []
    for files in splits:
        source = open_records(files, "tfrecord")
        try:
            decode(tf.constant(source[0]))
        except (tf.errors.OpError, IndexError) as error:
            raise UsageError(
                f"the first example of {files[0]} cannot be read ({gist(error)}); expected TFRecord files of "
                "tf.train.Examples with image/encoded (JPEG or PNG) and image/class/label (int64 from 0)"
            ) from error
        sources.append(source)
    train, test = (functools.partial(_pipeline, source=source, decode=decode) for source in sources)
    return ImageData("the TFRecord files", image_shape, num_classes, train, test)


def from_tfds(name: str, data_dir: str, image_size: int, classes: str = "") -> ImageData:
    """Loads an image classification data set of tensorflow_datasets, such as "mnist", with `train` and `test` splits.

    Args:
      name: its name there.
      data_dir: where it is prepared or is to be downloaded to; empty for the package's own place.
      image_size: height and width to resize to where its images differ in size.
      classes: see `in_memory`; only for a data set that fits into memory.

    Raises:
      UsageError: if it does not exist, cannot be downloaded, or is not an image classification data set.
    """
    with needed.extra("trainers", f"--config.dataset={name}"):
        import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=data_dir or None, try_gcs=False)
    except (tfds.core.registered.DatasetNotFoundError, ValueError, ImportError, OSError) as error:
        raise UsageError(
            f"--config.dataset={name} is not known ({type(error).__name__}); expected digits, numpy, tfrecord or the "
            "name of a tensorflow_datasets data set, such as mnist"
        ) from error
    if not builder.is_prepared():
        _download(builder, name)
    features, splits = builder.info.features, builder.info.splits
    test_split = next((split for split in ("test", "validation") if split in splits), None)
    if "image" not in features or "label" not in features or "train" not in splits or test_split is None:
        raise UsageError(
            f"--config.dataset={name} has the features {sorted(features)} and the splits {sorted(splits)}; expected "
            "image and label, with a train and a test or validation split"
        )
    shape, num_classes = features["image"].shape, features["label"].num_classes
    size = sum(splits[split].num_examples for split in ("train", test_split)) * np.prod(
        [side or 1 << 20 for side in shape]
    )
    if size <= _IN_MEMORY_BYTES:
        train, test = (
            tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1, as_supervised=False, shuffle_files=False))
            for split in ("train", test_split)
        )
        data = in_memory(name, (train["image"], train["label"]), (test["image"], test["label"]), classes)
        return data if classes else dataclasses.replace(data, num_classes=num_classes)
    _refuse_classes(classes, f"the images of {name}")
    target = (shape[0] or image_size, shape[1] or image_size)

    def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = features.deserialize_example(record)
        return _resized(example["image"], target), example["label"]

    kind = builder.info.file_format.value
    train, test = (
        functools.partial(_pipeline, source=open_records(splits[split].filepaths, kind), decode=decode)
        for split in ("train", test_split)
    )
    return ImageData(name, (*target, shape[2] or 3), num_classes, train, test)


def _download(builder: Any, name: str) -> None:
    """Downloads and prepares a data set; without a network it fails at once, without minutes of retries."""
    advice = (
        f"prepare it where there is a network (`tfds build {name} --data_dir DIR`), copy DIR here and give "
        "--config.data_path=DIR; or train on --config.dataset=digits, which needs no download"
    )
    try:
        if not urllib.request.getproxies():
            socket.getaddrinfo("www.tensorflow.org", 443)
    except OSError as error:
        raise UsageError(
            f"--config.dataset={name} is not in {builder.data_dir}, and there is no network to download it "
            f"({error}); {advice}"
        ) from error
    try:
        builder.download_and_prepare()
    except Exception as error:  # whatever a downloader of any data set raises
        raise UsageError(
            f"--config.dataset={name} is not in {builder.data_dir} and could not be downloaded "
            f"({parse_error(error)}); {advice}"
        ) from error


def _pipeline(
    context: InputContext, source: Any, decode: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
) -> tf.data.Dataset:
    """Reads records in the order of the run, and decodes each."""
    like = tf.function(decode).get_concrete_function(tf.TensorSpec([], tf.string)).structured_outputs
    signature = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), like)
    batches = context.records(source).map(
        lambda records: tf.map_fn(decode, records, fn_output_signature=signature), tf.data.AUTOTUNE
    )
    return batches.prefetch(tf.data.AUTOTUNE)


def _resized(image: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    image = _to_float(image)
    image.set_shape([None, None, image.shape[-1]])
    return tf.ensure_shape(tf.image.resize(image, size), [*size, image.shape[-1]])


def _to_float(images: tf.Tensor) -> tf.Tensor:
    return tf.cast(images, tf.float32) / 255 if images.dtype == tf.uint8 else tf.cast(images, tf.float32)
