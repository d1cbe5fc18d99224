"""TFRecord files as the decoders of Model Garden read them, drawn from scikit-learn's digits.

Each function writes `train.tfrecord` and `validation.tfrecord` into a directory, the same bytes each time, and returns
their paths as `train` and `validation` with the number of examples as `num_train` and `num_validation`. No number of
validation examples divides by 2 or 4: a last batch is a partial one.
"""

import functools
import json
import os

import numpy as np
import tensorflow as tf
from pycocotools import mask as coco_masks
from sklearn import datasets

NUM_DIGITS = 10
# Scenes show the digits 0 to 2 alone, as classes 1 to 3: detectors trace their suppression of boxes once for each class.
# Class 0 is the background.
NUM_SCENE_CLASSES = 4
IGNORED = 255

_SCENE_SIZE = (48, 64)
_FRAME_SIZE = (40, 40)


@functools.cache
def _load_digits():
    """Returns the digits' images [n, 8, 8], uint8 with the full range, and their labels, in an order drawn once."""
    digits = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return (digits.images[order] * (255 / 16)).astype(np.uint8), digits.target[order]


def _enlarge(image, factor):
    return np.kron(image, np.ones((factor, factor), np.uint8))


def _encode_jpeg(image):
    """Encodes a gray image [height, width] as one of three equal channels."""
    return tf.io.encode_jpeg(np.repeat(image[..., None], 3, axis=-1), quality=95).numpy()


def _encode_png(values):
    return tf.io.encode_png(values[..., None].astype(np.uint8)).numpy()


def _feature(values):
    """Returns the feature of some bytes, of a list of bytes, or of numbers."""
    values = [values] if isinstance(values, bytes) else values
    if isinstance(values, list):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    numbers = np.atleast_1d(values)
    if np.issubdtype(numbers.dtype, np.floating):
        return tf.train.Feature(float_list=tf.train.FloatList(value=numbers))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=numbers))


def _features(values):
    return tf.train.Features(feature={key: _feature(value) for key, value in values.items()})


def _write(directory, num_train, num_validation, make):
    """Writes `make(i)` for each example i, those of the validation after those of the training."""
    os.makedirs(directory, exist_ok=True)
    paths = {}
    for split, ids in [("train", range(num_train)), ("validation", range(num_train, num_train + num_validation))]:
        paths[split] = os.path.join(directory, f"{split}.tfrecord")
        with tf.io.TFRecordWriter(paths[split]) as writer:
            for i in ids:
                writer.write(make(i).SerializeToString())
    return {**paths, "num_train": num_train, "num_validation": num_validation}


def write_images(directory, num_train=32, num_validation=11):
    """Writes images of one digit each, 40 pixels square, for image classification."""
    images, labels = _load_digits()

    def make(i):
        encoded = _encode_jpeg(_enlarge(images[i], 5))
        return tf.train.Example(features=_features({"image/encoded": encoded, "image/class/label": labels[i]}))

    return _write(directory, num_train, num_validation, make)


def write_videos(directory, num_train=8, num_validation=5, num_frames=8):
    """Writes clips of one digit each that moves along a line, for video classification."""
    images, labels = _load_digits()

    def make(i):
        rng = np.random.default_rng(i)
        start, end = rng.integers(0, _FRAME_SIZE[0] - 24, size=[2, 2], endpoint=True)
        frames = []
        for position in np.linspace(start, end, num_frames).round().astype(int):
            frame = np.zeros(_FRAME_SIZE, np.uint8)
            frame[position[0] : position[0] + 24, position[1] : position[1] + 24] = _enlarge(images[i], 3)
            frames.append(_feature(_encode_jpeg(frame)))
        return tf.train.SequenceExample(
            context=_features({"clip/label/index": labels[i]}),
            feature_lists=tf.train.FeatureLists(
                feature_list={"image/encoded": tf.train.FeatureList(feature=frames)},
            ),
        )

    return _write(directory, num_train, num_validation, make)


def _draw_scene(i):
    """Returns an image, its digits' classes, their boxes (y, x, height, width) and their masks [n, height, width]."""
    images, labels = _load_digits()
    candidates = np.flatnonzero(labels < NUM_SCENE_CLASSES - 1)
    rng = np.random.default_rng(i)
    canvas, classes, boxes, masks = np.zeros(_SCENE_SIZE, np.uint8), [], [], []
    # Side by side, so that none hides another.
    for column in range(rng.integers(1, 2, endpoint=True)):
        digit = rng.choice(candidates)
        image = _enlarge(images[digit], 3)
        y = rng.integers(0, _SCENE_SIZE[0] - 24, endpoint=True)
        x = column * 32 + rng.integers(0, 8, endpoint=True)
        canvas[y : y + 24, x : x + 24] = image
        mask = np.zeros(_SCENE_SIZE, np.uint8)
        mask[y : y + 24, x : x + 24] = image > 64
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        boxes.append((rows[0], columns[0], rows[-1] + 1 - rows[0], columns[-1] + 1 - columns[0]))
        classes.append(labels[digit] + 1)
        masks.append(mask)
    return canvas, np.array(classes), np.array(boxes), np.array(masks)


def _make_scene(i):
    canvas, classes, boxes, masks = _draw_scene(i)
    height, width = _SCENE_SIZE
    y, x, box_heights, box_widths = boxes.T
    pixel_classes = (masks * classes[:, None, None]).sum(0)
    pixel_classes[:, -2:] = IGNORED
    return tf.train.Example(
        features=_features(
            {
                "image/encoded": _encode_jpeg(canvas),
                "image/height": height,
                "image/width": width,
                "image/source_id": str(i).encode(),
                "image/object/bbox/ymin": y / height,
                "image/object/bbox/xmin": x / width,
                "image/object/bbox/ymax": (y + box_heights) / height,
                "image/object/bbox/xmax": (x + box_widths) / width,
                "image/object/class/label": classes,
                "image/object/area": masks.sum((1, 2)).astype(float),
                "image/object/is_crowd": np.zeros_like(classes),
                "image/object/mask": [_encode_png(mask) for mask in masks],
                "image/segmentation/class/encoded": _encode_png(pixel_classes),
            }
        )
    )


def _annotate(ids):
    """Returns the annotations of some scenes as COCO's evaluation reads them."""
    images, annotations = [], []
    for i in ids:
        _, classes, boxes, masks = _draw_scene(i)
        images.append({"id": i, "height": _SCENE_SIZE[0], "width": _SCENE_SIZE[1]})
        for label, (y, x, height, width), mask in zip(classes.tolist(), boxes.tolist(), masks):
            runs = coco_masks.encode(np.asfortranarray(mask))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": i,
                    "category_id": label,
                    "bbox": [x, y, width, height],
                    "area": int(mask.sum()),
                    "iscrowd": 0,
                    "segmentation": {"size": runs["size"], "counts": runs["counts"].decode()},
                }
            )
    categories = [{"id": label, "name": str(label - 1)} for label in range(1, NUM_SCENE_CLASSES)]
    return {"images": images, "categories": categories, "annotations": annotations}


def write_scenes(directory, num_train=8, num_validation=5):
    """Writes images of one or two digits, with boxes, instance masks and classes of pixels.

    They serve detection, instance segmentation and semantic segmentation alike. Returns also the path of the
    validation's annotations, as `annotations`.
    """
    written = _write(directory, num_train, num_validation, _make_scene)
    annotations = os.path.join(directory, "annotations.json")
    with open(annotations, "w") as file:
        json.dump(_annotate(range(num_train, num_train + num_validation)), file)
    return {**written, "annotations": annotations}
