"""Local copies of what is at a URL, for tools and for weights from elsewhere."""

import atexit
import concurrent.futures
import os
import re
import tempfile
from collections.abc import Mapping

from absl import logging

from looplib.base import folders
from looplib.base.messages import gist
from looplib.buckets.mirror import StoreMirror
from looplib.buckets.outputs import FOLDER
from looplib.errors import RunDirectoryError, StoreError
from looplib.stores import stores
from looplib.stores.shards import files_of, kind_of
from looplib.stores.stores import Store, StoredFile

_OF_A_RUN = re.compile(r"(?:(.*)/)?(?:run\.json|metrics\.jsonl|\.lease/\d+)")
_INSIDE_A_RUN = re.compile(r"(.*?)((?:/checkpoints(?:/ckpt-\d+)?)?(?:@[^/@]*)?)")
_WEIGHTS = re.compile(  # files of weights in a folder, checkpoints and a SavedModel; what is below the latter is a part
    r"(?:checkpoints/)?(?:checkpoint|[^/]+\.(?:index|commit|data-\d+-of-\d+))|(?:saved_model|fingerprint)\.pb"
    r"|[^/]+\.(?:safetensors|h5|keras|safetensors\.index\.json|weights\.json)|(?P<part>(?:variables|assets)/.*)"
)
_TOGETHER = 16  # runs that are asked for at the same time
_NO_RUN = (IsADirectoryError, NotADirectoryError, FileExistsError, RunDirectoryError)  # names that no run directory has
_DEEPEST = 3  # folders between a URL and the runs below it


def fetched(url: str, checkpoints: bool = True, unchecked: bool = False) -> str:
    """Fetches a run, a folder of runs, a checkpoint of a run, a model or a file; returns the local path.

    Args:
      url: such as "s3://bucket/run", "s3://bucket/run@best", "s3://bucket/sweep" or "s3://bucket/weights.h5".
      checkpoints: whether the checkpoints of runs are wanted too.
      unchecked: whether all files are fetched again, and as they are, also those of damaged checkpoints.

    Raises:
      StoreError: if there is nothing, neither runs nor weights, or the store cannot be used.
    """
    place, inside = _INSIDE_A_RUN.fullmatch(url.rstrip("/")).groups()
    store = Store(place)
    place, there = store.url, store.listed()
    runs = _runs_among(there)
    if "" in runs and not unchecked:
        local = stores.cache("runs", place)
        StoreMirror(store, local).update(there, checkpoints)
        return local + inside
    wanted = there if "" in runs else _weights_among(there) if checkpoints else {}
    if there and not wanted and (unchecked or not runs):  # somebody's data, which may be large
        what = "is neither a run nor weights" if checkpoints else f"holds no run, up to {_DEEPEST} folders deep"
        raise StoreError(f"{url} {what}; name a run directory, as --model_dir does")
    local = stores.cache("copies", place)
    if unchecked:
        local = tempfile.mkdtemp(prefix="unchecked-", dir=folders.make_folder(stores.cache_directory()))
        atexit.register(folders.remove, *os.path.split(local))
    if runs and not unchecked:
        _fetch_runs(store, there, local, checkpoints)
        return local
    if not there:  # an object, and no folder
        *_, name = place.split("/")
        path = os.path.join(folders.make_folder(local), name)
        try:
            Store(place[: -len(name) - 1]).fetch(name, path)
        except FileNotFoundError:
            raise StoreError(f"there is nothing at {url}; check the bucket and the path") from None
        if kind := kind_of(name):
            _fetch_shards(place[: -len(name) - 1], path, kind)
        return path
    for name in wanted:
        *below, last = name.split("/")
        try:
            store.fetch(name, os.path.join(folders.make_folder(local, *below), last))
        except FileNotFoundError:  # a run that trains deletes checkpoints
            if not unchecked:
                raise StoreError(f"{url}/{name} was deleted just now; run the command again") from None
    return local + inside


def _weights_among(names: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
    """Returns those of the objects in a folder that a model may be loaded from; {} if there is nothing but parts."""
    found = {name: match for name in names if (match := _WEIGHTS.fullmatch(name))}
    return {name: names[name] for name in found} if any(match["part"] is None for match in found.values()) else {}


def _runs_among(names: Mapping[str, StoredFile]) -> set[str]:
    """Returns the folders of names that are run directories; "" for what all of them are in."""
    found = {match[1] or "" for match in map(_OF_A_RUN.fullmatch, names) if match}
    return {run for run in found if run.count("/") < _DEEPEST and FOLDER not in run.split("/")}


def _fetch_runs(store: Store, there: Mapping[str, StoredFile], local: str, checkpoints: bool) -> None:
    """Fetches the runs below a folder into folders below a local one; warns of one that no directory can hold.

    Args:
      store: the folder.
      there: what it has, by name.
      local: the local one.
      checkpoints: whether those are wanted too.
    """
    objects: dict[str, dict[str, StoredFile]] = {run: {} for run in sorted(_runs_among(there))}
    for name, file in there.items():
        parts = name.split("/")
        for depth in range(1, min(_DEEPEST + 1, len(parts))):
            if (run := "/".join(parts[:depth])) in objects:
                objects[run]["/".join(parts[depth:])] = file

    def update(run: str) -> None:
        try:
            StoreMirror(store.below(run), os.path.join(local, *run.split("/"))).update(objects[run], checkpoints)
        except _NO_RUN as error:
            logging.warning("%s/%s is left out: %s", store.url, run, gist(error))

    with concurrent.futures.ThreadPoolExecutor(_TOGETHER) as pool:
        list(pool.map(update, objects))


def _fetch_shards(folder: str, index: str, kind: str) -> None:
    """Fetches the files that an index of weights names, beside it."""
    store = Store(folder)
    for name in files_of(index, kind):
        try:
            store.fetch(name, folders.inside(os.path.dirname(index), name))
        except FileNotFoundError:
            raise StoreError(
                f"there is nothing at {folder}/{name}, which the index beside it names; copy all its files"
            ) from None
