"""Files of weights from somebody else: what is wrong is one sentence, nothing is executed, and memory stays bounded."""

import io
import json
import os
import pathlib
import pickle
import resource
import struct
import zipfile

import h5py
import keras
import numpy as np
import pytest
from written import by_path, filled, write_safetensors, write_shards

import looplib
from looplib.errors import UsageError, WarmStartError
from looplib.weights import hdf5

GIGABYTE = 1 << 30


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def model():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, name="encoder"), keras.layers.Dense(3, name="head")]
    )


def raw(path, header, numbers=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + numbers)


def told(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


KERNEL, BIAS = 4 * 6 * 4, 6 * 4
SAFETENSORS = {
    "empty": lambda path: path.write_bytes(b""),
    "a header of 100 GB": lambda path: path.write_bytes(struct.pack("<Q", 100 * GIGABYTE) + b"{}"),
    "a long header": lambda path: raw(path, b"{" + b" " * (1 << 24) + b"}"),
    "no JSON": lambda path: raw(path, b"{'a': 1"),
    "not UTF-8": lambda path: raw(path, b'{"\xff": 1}'),
    "nested JSON": lambda path: raw(path, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a list": lambda path: raw(path, b"[1]       "),
    "a number for a tensor": lambda path: raw(path, {"encoder/kernel": 5}),
    "no place": lambda path: raw(path, {"encoder/kernel": {"dtype": "F32", "shape": [4, 6]}}),
    "another type": lambda path: raw(path, {"encoder/kernel": told([4, 6], 0, KERNEL, "O")}, bytes(KERNEL)),
    "a shape of 100 GB": lambda path: raw(path, {"encoder/kernel": told([25 * GIGABYTE], 0, 100 * GIGABYTE)}, bytes(8)),
    "a shape that is not its bytes": lambda path: raw(path, {"encoder/kernel": told([4, 60], 0, KERNEL)}, bytes(KERNEL)),
    "a negative size": lambda path: raw(path, {"encoder/kernel": told([-4, -6], 0, KERNEL)}, bytes(KERNEL)),
    "a size of 10000 digits": lambda path: raw(
        path, b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,4]}}', bytes(4)
    ),
    "a fraction": lambda path: raw(path, {"encoder/kernel": told([4, 6.0], 0, KERNEL)}, bytes(KERNEL)),
    "true for a size": lambda path: raw(path, {"encoder/bias": told([True], 0, 4)}, bytes(4)),
    "40 dimensions": lambda path: raw(path, {"encoder/bias": told([1] * 40, 0, 4)}, bytes(4)),
    "two tensors at one place": lambda path: raw(
        path, {"encoder/bias": told([6], 0, BIAS), "head/bias": told([6], 0, BIAS)}, bytes(BIAS)
    ),
    "a gap": lambda path: raw(path, {"encoder/bias": told([6], 8, 8 + BIAS)}, bytes(8 + BIAS)),
    "more than it tells of": lambda path: raw(path, {"encoder/bias": told([6], 0, BIAS)}, bytes(BIAS + 4)),
    "truncated": lambda path: raw(path, {"encoder/bias": told([6], 0, BIAS)}, bytes(BIAS - 4)),
}  # fmt: skip


def refused(path, pattern=""):
    """Asserts that a path is refused in one sentence, the model is as it was, and little memory was needed."""
    target = filled(model())
    before, peak = target.get_weights(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError, match=pattern) as caught:
        looplib.warm_start({"model": target}, str(path))
    assert isinstance(caught.value, WarmStartError) and "\n" not in str(caught.value) and len(str(caught.value)) < 700
    for ours, theirs in zip(target.get_weights(), before):
        np.testing.assert_array_equal(ours, theirs)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000  # kB


@pytest.mark.slow
@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_wrong_file_of_safetensors_is_refused(case, tmp_path):
    SAFETENSORS[case](tmp_path / "w.safetensors")
    refused(tmp_path / "w.safetensors", "w.safetensors")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("name", ["w.safetensors", "w.weights.h5", "w.keras"])
def test_a_truncated_file_is_refused(name, part, tmp_path):
    path, source = tmp_path / name, filled(model())
    if name.endswith("tensors"):
        write_safetensors(path, by_path(source))
    else:
        (source.save if name.endswith("keras") else source.save_weights)(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    refused(path, name)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..", "secret.bin", 5, "a\0.safetensors"],
)
def test_an_index_names_only_files_beside_it(name, tmp_path):
    write_safetensors(tmp_path / "secret.safetensors", by_path(filled(model())))
    folder = tmp_path / "folder"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"encoder/kernel": name}}))
    refused(index, "expected the plain name")


def test_a_link_in_place_of_a_shard_is_not_followed(tmp_path):
    index = write_shards(tmp_path, by_path(filled(model())))
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    refused(index, "symbolic link")


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "w.safetensors")
    refused(tmp_path / "w.safetensors", "not a file")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": "b.safetensors"}}',
        "[" * 200_000,
        "\0",
        '{"weight_map": 5}',
    ],
)
def test_a_wrong_index_is_refused(text, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    refused(path)


def test_a_shard_without_its_tensor_is_refused(tmp_path):
    index = write_shards(tmp_path, by_path(filled(model())))
    told = json.loads(pathlib.Path(index).read_text())
    told["weight_map"] |= {"another": told["weight_map"]["head/bias"]}
    pathlib.Path(index).write_text(json.dumps(told))
    refused(index, "another")


@pytest.mark.parametrize("name", ["w.bin", "w.pt", "w.safetensors", "w.keras", "w.weights.h5", "w"])
def test_a_pickle_is_refused_and_not_run(name, tmp_path):
    (tmp_path / name).write_bytes(pickle.dumps({"encoder/kernel": Bomb(tmp_path / "ran")}, protocol=2))
    refused(tmp_path / name, "pickle|header")
    with zipfile.ZipFile(tmp_path / "zipped.bin", "w") as archive:  # as newer versions of PyTorch write it
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(tmp_path / "ran")))
    refused(tmp_path / "zipped.bin", "pickle")
    assert not (tmp_path / "ran").exists()


def test_the_pickled_code_of_a_lambda_is_refused_and_not_run(tmp_path):
    flag = str(tmp_path / "ran")
    source = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: (open(flag, "w"), x)[1])])
    pathlib.Path(flag).unlink(missing_ok=True)
    source.save(tmp_path / "w.keras")
    pathlib.Path(flag).unlink(missing_ok=True)
    refused(tmp_path / "w.keras", "lambda")
    assert not os.path.exists(flag)


def weights():
    """The bytes of a `.weights.h5`, and of a `.keras`'s configuration."""
    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        file["layers/dense/vars/0"] = np.ones((4, 6), np.float32)
    return held.getvalue()


def zipped(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


ZIPS = {
    "no weights": lambda path: zipped(path, {"config.json": "{}"}),
    "weights in numpy's own format": lambda path: zipped(path, {"model.weights.npz": b"PK"}),
    "a path out of the folder": lambda path: zipped(path, {"model.weights.h5": weights(), "../../x": b""}),
    "an absolute path": lambda path: zipped(path, {"model.weights.h5": weights(), "/x": b""}),
    "a bomb": lambda path: zipped(path, {"model.weights.h5": bytes(GIGABYTE // 8)}, zipfile.ZIP_DEFLATED),
    "a bomb of a configuration": lambda path: zipped(
        path, {"model.weights.h5": weights(), "config.json": bytes(GIGABYTE // 8)}, zipfile.ZIP_DEFLATED
    ),
    "no configuration of JSON": lambda path: zipped(path, {"model.weights.h5": weights(), "config.json": b"\xff"}),
    "something else for weights": lambda path: zipped(path, {"model.weights.h5": b"something else"}),
    "weights that claim 100 GB": lambda path: claim(path),
    "a list of members of 100 MB": lambda path: listed(path),
    "two of one name": lambda path: twice(path),
}


def claim(path):
    zipped(path, {"model.weights.h5": weights()})
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\1\2")
    content[at + 20 : at + 28] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
    path.write_bytes(bytes(content))


def listed(path):
    zipped(path, {"model.weights.h5": weights()})
    content = bytearray(path.read_bytes())
    content[-10:-6] = struct.pack("<I", 100_000_000)
    path.write_bytes(bytes(content))


def twice(path):
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", weights())
        archive.writestr("model.weights.h5", weights())


@pytest.mark.parametrize("case", ZIPS)
def test_a_wrong_keras_file_is_refused(case, tmp_path):
    ZIPS[case](tmp_path / "w.keras")
    refused(tmp_path / "w.keras", "w.keras")


def kernel(file, **settings):
    file.create_dataset("layers/dense/vars/0", **settings)


def virtual(file):
    source = h5py.VirtualSource(file.filename.replace("w.weights", "secret"), "secret", shape=(4, 6))
    layout = h5py.VirtualLayout(shape=(4, 6), dtype="f4")
    layout[:] = source
    file.create_group("layers/dense/vars").create_virtual_dataset("0", layout)


def deep(file):
    group = file
    for _ in range(100):
        group = group.create_group("a")
    group["vars/0"] = 1.0


def circle(file):
    group = file.create_group("a")
    group["a"] = group


def link(to):
    def make(file):
        file["layers/other/vars/0"] = np.ones((4, 6), np.float32)
        file["layers/dense/vars/0"] = to(file)

    return make


HDF5 = {
    "a link out of the file": link(lambda file: h5py.ExternalLink(file.filename.replace("w.weights", "secret"), "/secret")),
    "a link inside of it": link(lambda file: h5py.SoftLink("/layers/other/vars/0")),
    "numbers in another file": lambda file: kernel(
        file, shape=(4, 6), dtype="f4", external=[(file.filename.replace("w.weights", "secret"), 0, h5py.h5f.UNLIMITED)]
    ),
    "a virtual data set": virtual,
    "100 GB without numbers": lambda file: kernel(file, shape=(25 * GIGABYTE,), dtype="f4"),
    "100 GB compressed": lambda file: kernel(file, shape=(25 * GIGABYTE,), dtype="f4", chunks=(1 << 20,), compression="gzip"),
    "100 GB in chunks": lambda file: kernel(file, shape=(25 * GIGABYTE,), dtype="f4", chunks=(1 << 20,)),
    "a circle": circle,
    "groups in groups": deep,
    "nothing": lambda file: file.create_group("layers"),
    "something outside of a layer": lambda file: file.create_dataset("layers/dense/0", data=[1.0]),
    "no shape": lambda file: file.create_dataset("layers/dense/vars/0", data=h5py.Empty("f4")),
}  # fmt: skip


@pytest.mark.slow(spread=6)
@pytest.mark.parametrize("case", HDF5)
def test_a_wrong_file_of_hdf5_is_refused(case, tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["secret"] = np.ones((4, 6), np.float32)
    with h5py.File(tmp_path / "w.weights.h5", "w") as file:
        HDF5[case](file)
    refused(tmp_path / "w.weights.h5", "is a link" if "a link" in case else "w.weights.h5")


@pytest.mark.slow
def test_random_changes_of_a_file_are_a_sentence_or_other_numbers(monkeypatch, tmp_path):
    """Some of them hang HDF5's library, or crash it."""
    monkeypatch.setattr(hdf5, "SECONDS", 3)
    random, source = np.random.default_rng(0), filled(model())
    write_safetensors(tmp_path / "w.safetensors", by_path(source))
    source.save_weights(tmp_path / "w.weights.h5")
    source.save(tmp_path / "w.keras")
    for name in ("w.safetensors", "w.weights.h5", "w.keras"):
        content = (tmp_path / name).read_bytes()
        for _ in range(60):
            changed = bytearray(content)
            for place in random.integers(0, min(len(content), 3000), 4):
                changed[place] = random.integers(0, 256)
            (tmp_path / name).write_bytes(bytes(changed))
            try:
                looplib.warm_start({"model": model()}, str(tmp_path / name))
            except UsageError as error:
                assert "\n" not in str(error)
