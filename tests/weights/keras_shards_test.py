"""Weights that Keras 3 has written to several files, `save_weights(..., max_shard_size=...)`, and wrong indexes of them."""

import json

import keras
import pytest
from written import filled, same

import looplib
from looplib.errors import WarmStartError

KB = 1 / 1024**2  # in the GB of max_shard_size


def fresh():
    """Returns a model whose layers have the numbers of a new process."""
    keras.backend.clear_session()
    layers = [keras.layers.Dense(8, name="encoder"), keras.layers.Dense(8), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2, name="head")])


def written(folder, size=0.27 * KB):
    """Returns a model, and the index of its files."""
    model, index = filled(fresh()), folder / "model.weights.json"
    model.save_weights(str(index), max_shard_size=size)
    return model, index


def test_weights_in_several_files_come_back_bit_by_bit_also_of_a_layer_in_two(tmp_path):
    model, index = written(tmp_path)
    places = json.loads(index.read_text())["weight_map"]
    assert any(isinstance(names, list) and len(names) > 1 for names in places.values())
    assert len(list(tmp_path.glob("*.weights.h5"))) > 2
    for path in (index, tmp_path):  # a folder that has nothing else
        other = fresh()
        looplib.warm_start({"model": other}, str(path))
        same(other, model)


def changed(index, change):
    told = json.loads(index.read_text())
    change(told["weight_map"])
    index.write_text(json.dumps(told))


def linked(index):
    shard = sorted(index.parent.glob("*.weights.h5"))[0]
    shard.rename(index.parent / "elsewhere")
    shard.symlink_to(index.parent / "elsewhere")


def cut(index):
    shard = sorted(index.parent.glob("*.weights.h5"))[-1]
    shard.write_bytes(shard.read_bytes()[:-600])


WRONG = {
    "a path": (lambda index: changed(index, lambda places: places.update(a="../x.weights.h5")), "plain name"),
    "a path in a list": (lambda index: changed(index, lambda places: places.update(a=["/x.weights.h5"])), "plain name"),
    "another file": (lambda index: changed(index, lambda places: places.update(a="x.bin")), "plain name"),
    "no name": (lambda index: changed(index, lambda places: places.update(a=[{}])), "plain name"),
    "no file": (lambda index: changed(index, lambda places: places.update(a=[])), "0 files"),
    "not there": (lambda index: changed(index, lambda places: places.update(a="x.weights.h5")), "not beside it"),
    "no such layer": (lambda index: changed(index, lambda p: p.update({"/a/vars": next(iter(p.values()))})), "/a/vars"),
    "a link": (linked, "symbolic link"),
    "truncated": (cut, ""),
    "no index": (lambda index: index.write_text("[]"), "weight_map"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(WRONG)[::-1])
def test_a_wrong_index_or_file_is_refused(case, tmp_path):
    _, index = written(tmp_path)
    damage, said = WRONG[case]
    damage(index)
    with pytest.raises(WarmStartError, match=said):
        looplib.warm_start({"model": fresh()}, str(index))
