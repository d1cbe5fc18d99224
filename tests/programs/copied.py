"""A run without a model: commits checkpoints of random bytes to a URL, as a training does, in a process of its own.

`python -m copied URL --steps=9 --pause=0.1`; prints a line of JSON for each step, and for an error its class. What is in
a checkpoint and in metrics.jsonl is a function of the step and of --seed alone.
"""

import argparse
import hashlib
import json
import os
import random
import sys
import time

from looplib.base import files, folders
from looplib.base.messages import cure_of, with_cure
from looplib.buckets.mirror import open_mirror
from looplib.errors import UsageError
from looplib.run import commits, lock
from looplib.run.mirror import Mirror


def content(step, seed, size):
    """The bytes of a checkpoint's file."""
    return random.Random(step * 1000 + seed).randbytes(size)


def line(step, seed):
    """The line of metrics.jsonl."""
    return json.dumps({"step": step, "split": "train", "loss": step + seed / 10}) + "\n"


def save(directory, step, seed=0, size=1000):
    """Commits a checkpoint, and reports."""
    place = folders.make_folder(directory, "checkpoints")
    path = commits.path_of(place, step)
    commits.begin(path)
    listed = {}
    for name in (f"ckpt-{step}.index", f"ckpt-{step}.data-00000-of-00001"):
        data = content(step, seed, size)
        with open(os.path.join(place, name), "wb") as file:
            file.write(data)
        listed[name] = {"bytes": size, "sha256": hashlib.sha256(data).hexdigest()}
    commits.write_marker(commits.Commit(path, step, time.time(), listed, {}, {"looplib": "0"}))
    folders.remove(place, f"ckpt-{step}.unfinished")


def report(directory, step, seed=0):
    """Adds the line of a step to metrics.jsonl, in place of lines that a start has found for it and later ones."""
    path = os.path.join(directory, "metrics.jsonl")
    lines = open(path).read().splitlines(True) if os.path.exists(path) else []
    before = [one for one in lines if json.loads(one)["step"] < step]
    files.write_whole(path, "".join([*before, line(step, seed)]))


def prune(place, keep, every):
    """Keeps the newest checkpoints, and those of each so many steps."""
    for done in commits.committed(place)[keep:]:
        if not every or done.step % every:
            commits.remove(done)


def opened(url, local_dir):
    """The mirror of a run in a store, or what stands for it in a local directory."""
    if files.is_remote(url):
        return open_mirror(url, local_dir)
    local = Mirror()
    local.directory = folders.make_folder(url)
    return local


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?", default=argparse.SUPPRESS)
    parser.add_argument("--model_dir", dest="url")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--every", type=int, help="keeps the checkpoints of each so many steps, too")
    parser.add_argument("--local_dir")
    options = parser.parse_args()

    def tell(**what):
        print(json.dumps({"time": time.monotonic(), **what}), flush=True)

    try:
        mirror = opened(options.url, options.local_dir)
        held = lock.acquire(mirror.directory, lambda: None)
        mirror.begin(True)
        place = os.path.join(mirror.directory, "checkpoints")
        start = commits.newest_intact(place, tidy=True) if os.path.isdir(place) else None
        tell(start=start.step if start else 0)
        for step in range(start.step + 1 if start else 1, options.steps + 1):
            report(mirror.directory, step, options.seed)
            mirror.check()
            save(mirror.directory, step, options.seed, options.size)
            prune(place, options.keep, options.every)
            tell(step=step)
            time.sleep(options.pause)
        mirror.fetch_older()
        prune(place, options.keep, options.every)
        mirror.end()
        held.release()
        tell(done=options.steps)
    except UsageError as error:
        tell(error=type(error).__name__, text=str(error))
        print(f"looplib: error: {error.line}")  # as a binary ends
        sys.exit(1)
    except OSError as error:
        if not cure_of(error):
            raise
        tell(error=type(error).__name__, text=with_cure(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
