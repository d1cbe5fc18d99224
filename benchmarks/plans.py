"""Plans of a training: how full packed rows are, and how fast examples are planned: `python -m benchmarks.plans`.

Rows are those of `looplib.Packed`, plain first-fit in a random order, and one document a row, on log-normal lengths.
"""

import time

import numpy as np

import looplib

_DOCUMENTS, _MANY = 100_000, 1_000_000
_ROW_LENGTHS = (512, 2048, 8192)
_LATE, _SECONDS = 100_000_000, 2.0


def first_fit(lengths: np.ndarray, row_length: int) -> int:
    """Packs each document into the first row that has room, with a tree of the room in rows.

    Args:
      lengths: of the documents, int `[n]`, at most `row_length`.
      row_length: tokens of a row.

    Returns:
      The number of rows.
    """
    leaves = 1 << (len(lengths) - 1).bit_length()
    room = [row_length] * (2 * leaves)  # the most of the rows below; rows are the leaves
    rows = 0
    for length in lengths.tolist():
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        rows = max(rows, node - leaves + 1)
        room[node] -= length
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


def fullness(random: np.random.Generator) -> None:
    """Prints how full rows are, as a table."""
    lengths = np.maximum(random.lognormal(5, 1.2, _DOCUMENTS).astype(np.int64), 1)
    print(f"{_DOCUMENTS:,} documents, median {np.median(lengths):.0f}, mean {lengths.mean():.0f} tokens")
    print("| row length | rows of Packed | full | rows of first-fit | full | one piece a row: full |")
    for row_length in _ROW_LENGTHS:
        packed = looplib.Packed(lengths, row_length)
        pieces = np.concatenate([np.full((lengths // row_length).sum(), row_length), lengths % row_length])
        pieces = pieces[pieces > 0]
        others = (first_fit(random.permutation(pieces), row_length), len(pieces))
        full = [f"{packed.tokens / rows / row_length:.2%}" for rows in (packed.size, *others)]
        print(f"| {row_length:,} | {packed.size:,} | {full[0]} | {others[0]:,} | {full[1]} | {full[2]} |")


def rates(random: np.random.Generator) -> None:
    """Prints the examples a second of plans of a million examples, and the seconds to a first batch, late in a run."""
    lengths = np.maximum(random.lognormal(5, 1.2, _MANY).astype(np.int64), 1)
    started = time.perf_counter()
    packed = looplib.Packed(lengths, 512)
    print(f"Packed of {_MANY:,} documents: made in {time.perf_counter() - started:.2f} s")
    plans = {
        "indices": _MANY,
        "Kept": looplib.Kept(np.arange(_MANY) % 3 > 0),
        "Mixture of three": looplib.Mixture({"a": _MANY, "b": 50_000, "c": 1000}, {"a": 0.7, "b": 0.2, "c": 0.1}),
        "Buckets, six": looplib.Buckets(lengths, [64, 128, 256, 512, 1024, 10**6]),
        "Packed, rows of 512": packed,
    }
    for name, plan in plans.items():
        context = looplib.InputContext(
            global_batch_size=256, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True,
            start_step=_LATE,
        )  # fmt: skip
        started = time.perf_counter()
        batches = iter(context.indices(plan).prefetch(2))
        next(batches)
        first, count, started = time.perf_counter() - started, 0, time.perf_counter()
        while time.perf_counter() - started < _SECONDS:
            next(batches)
            count += 256
        rate = count / (time.perf_counter() - started)
        print(f"{name}: {rate:,.0f} examples a second, the first batch at step {_LATE:,} after {first:.1f} s")


if __name__ == "__main__":
    fullness(np.random.default_rng(0))
    rates(np.random.default_rng(0))
