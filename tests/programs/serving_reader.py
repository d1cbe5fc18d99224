"""A server, without looplib: loads the newest version of a model again and again, answers, and prints the version.

`python serving_reader.py BASE`, where BASE is a folder, or a URL of S3. It ends with an error at a version that is torn or
smaller than the one before.
"""

import os
import re
import sys
import tempfile
import time

sys.modules["looplib"] = None  # an import of it fails

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

base = sys.argv[1]
store = None
if "://" in base:
    import fsspec

    store, base = fsspec.url_to_fs(base, use_listings_cache=False)


def newest():
    """The largest version, as TensorFlow Serving finds it; in a store, of those that have a model."""
    if store is None:
        names = os.listdir(base) if os.path.isdir(base) else []
    else:
        found = store.find(base)
        parts = [path.removeprefix(base).strip("/").split("/") for path in found]
        names = [part[0] for part in parts if part[1:] == ["saved_model.pb"]]
    return max((int(name) for name in names if re.fullmatch("[0-9]+", name)), default=None)


def answer(version):
    """Loads a version, and computes with it."""
    place = f"{base}/{version}"
    with tempfile.TemporaryDirectory() as folder:
        if store is not None:
            store.get(place, f"{folder}/model", recursive=True)
            place = f"{folder}/model"
        serve = tf.saved_model.load(place).signatures["serving_default"]
        (name,) = serve.structured_input_signature[1]
        size = serve.structured_input_signature[1][name].shape[1]
        for value in serve(**{name: tf.ones([2, size])}).values():
            assert np.isfinite(value.numpy()).all()


before = 0
while True:
    if (version := newest()) is None:
        time.sleep(0.05)
        continue
    assert version >= before, f"version {version} after {before}"
    try:
        answer(version)
    except Exception:
        if newest() == version:  # else it was old, and is gone
            raise
        continue
    if version != before:
        print(version, flush=True)
    before = version
