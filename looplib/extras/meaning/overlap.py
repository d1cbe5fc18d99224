"""Whether an evaluation has examples that the training has too: by the files of records, and by content."""

import math
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.compat import tensorflow as _tf
from looplib.extras.meaning import samples
from looplib.extras.meaning.budget import Budget
from looplib.extras.meaning.finding import LearningFinding, is_new
from looplib.extras.meaning.record_overlap import ReadRecords
from looplib.extras.tools import example_checksum
from looplib.loop.base import Loop
from looplib.messages import gist

OVERLAP = "overlap"
_EVALUATED, _TRAINED = 1000, 5000  # examples that are looked at
_FEWEST, _SHARE = (
    3,
    0.01,
)  # examples in common; and their part of the evaluation, where all of the training was looked at
_NATURAL = 5.0  # how many times as many as the training has by itself: text repeats licenses, and pictures are blank
_ALIKE = 0.05  # share of an evaluation's examples that equal another one of it, above which content identifies none
_LEAST_BYTES = 8  # of an example's largest part: fewer do not identify it
_FIRST_SECONDS = 0.05  # that a piece may take whose time is not known
_Signature = tuple[Any, tuple[int | None, ...]]  # the type of a part of an example, and its shape


class OverlapChecks:
    """Compares some examples of each evaluation with some of the training, in small pieces.

    Records of files are compared by file and number, and by their bytes; other examples by the content of their largest
    part, as the pipelines give them. Pipelines with a state that a second reading would change are not read.
    """

    def __init__(self) -> None:
        self._work: Iterator[LearningFinding | None] | None = None
        self._seconds = _FIRST_SECONDS  # of the last piece

    def begin(self, loops: Mapping[str, Loop], known: Collection[str]) -> None:
        """Takes the loops of a training, by name, and the keys of earlier findings."""
        self._work, self._seconds = _of_all(loops, known), _FIRST_SECONDS

    def advance(self, budget: Budget) -> list[LearningFinding]:
        """Reads on as long as a budget allows it; returns what was found."""
        found = []
        while self._work is not None and budget.allows(self._seconds):
            started = time.perf_counter()
            with budget.spending():
                try:
                    found += filter(None, [next(self._work)])
                except StopIteration:
                    self._work = None
            self._seconds = time.perf_counter() - started
        return found


def _of_all(loops: Mapping[str, Loop], known: Collection[str]) -> Iterator[LearningFinding | None]:
    """Yields a finding for each evaluation that has one, and None after each piece of work."""
    for name, loop in loops.items():
        if name == "train" or "train" in name.lower() or not is_new(OVERLAP, name, known):
            continue  # one that is called so evaluates on the training data on purpose
        try:
            trained, evaluated = _reads(loops["train"]), _reads(loop)
            if trained is not None and evaluated is not None:
                yield from _of_records(name, trained, evaluated)
            elif not _has_reader(loops["train"]):
                yield from _of_examples(name, loops["train"], loop)
        except Exception as error:  # what the training does not read may be damaged
            logging.info("the examples of %s are not compared with those of the training: %s", name, gist(error))


def _reads(loop: Loop) -> ReadRecords | None:
    """Returns the records that a loop reads by one call of `context.records`; None for other data."""
    stream = samples.stream_of(loop)
    context = stream.context() if stream is not None else None
    if context is None or context.asked.reader is None or len(context.asked.reader.reads) != 1:
        return None
    made = [call.batches for call in context.asked.calls]
    # Any other stage, such as a take or a filter, may leave out records.
    return ReadRecords(context.asked.reader.reads[0]) if _tf.is_by_element(stream.dataset, made) else None


def _has_reader(loop: Loop) -> bool:
    """Returns whether a loop reads records: reading more of them would count as reading of the training."""
    stream = samples.stream_of(loop)
    context = stream.context() if stream is not None else None
    return context is not None and context.asked.reader is not None


def _of_records(name: str, trained: ReadRecords, evaluated: ReadRecords) -> Iterator[LearningFinding | None]:
    chosen = evaluated.spread(_EVALUATED)
    places = [evaluated.place(number) for number in chosen]
    common = [place for place in places if trained.has(place)]
    if len(common) >= min(_FEWEST, len(places)):
        path, row = common[0]
        yield _finding(
            name,
            f"{len(common):,} of {len(places):,} evaluation records of {name!r} that were looked at are among the "
            f"{len(trained):,} training records, such as record {row} of {path}",
        )
        return
    yield None
    if not trained.may_be_read or not evaluated.may_be_read:
        return
    of_training: list[bytes] = []
    for part in trained.hashes(trained.spread(_TRAINED)):
        of_training += part
        yield None
    of_evaluation: list[bytes] = []
    for part in evaluated.hashes(chosen):
        of_evaluation += part
        yield None
    yield _compared(name, "records", of_evaluation, [of_training], len(trained))


def _of_examples(name: str, training: Loop, evaluation: Loop) -> Iterator[LearningFinding | None]:
    trained, evaluated = samples.batches(training), samples.batches(evaluation)
    first = next(evaluated, None) if trained is not None and evaluated is not None else None
    beginning = next(trained, None) if first is not None else None
    signature = _common_part(first, beginning)
    if signature is None:
        return
    yield None
    of_evaluation: list[int] = []
    for batch in _and_then(first, evaluated):
        of_evaluation += _hashes(batch, signature)
        if len(of_evaluation) >= _EVALUATED:
            break
        yield None
    of_evaluation = of_evaluation[:_EVALUATED]
    examples, left = _left_of_epoch(training)
    most = min(_TRAINED, examples or _TRAINED)
    of_training: list[int] = []
    for batch in _and_then(beginning, trained):
        found = _hashes(batch, signature)
        of_training += found
        if len(of_training) >= most or not found:
            break
        yield None
    parts = [of_training[: min(left, most)], of_training[left:most]]
    yield _compared(name, "examples", of_evaluation, parts, examples)


def _left_of_epoch(training: Loop) -> tuple[int | None, int]:
    """Returns the examples of the training, and after how many in this pipeline they come again; None if not known."""
    stream = samples.stream_of(training)
    examples, context = stream.properties.examples, stream.context()
    if not examples or context is None:
        return examples, _TRAINED
    return examples, (examples - stream.start_step * context.global_batch_size % examples) // context.num_pipelines


def _and_then(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from others


def _compared(
    name: str, what: str, evaluated: list[Any], parts: list[list[Any]], of: int | None
) -> LearningFinding | None:
    """Returns the finding about hashes of an evaluation and of a training, if there is one.

    Args:
      name: of the evaluator.
      what: "records" or "examples".
      evaluated: of the evaluation.
      parts: of the training, of which each part has an example once.
      of: how many the training has; None if that is not known.
    """
    trained, looked_at = set().union(*parts), sum(map(len, parts))
    if not evaluated or not looked_at or len(set(evaluated)) < (1 - _ALIKE) * len(evaluated):
        return None
    common = sum(one in trained for one in evaluated)
    # Pairs of different examples with one content: as many among the training, in proportion to the pairs.
    natural = 2 * sum(len(part) - len(set(part)) for part in parts) * len(evaluated) / looked_at
    sampled = min(1.0, looked_at / of) if of else 1.0
    if common < max(_FEWEST + _NATURAL * natural, _SHARE * sampled * len(evaluated)):
        return None
    whole = f" of {of:,}" if of and of > looked_at else ""
    return _finding(
        name,
        f"{common:,} of {len(evaluated):,} evaluation {what} of {name!r} that were looked at were among the "
        f"{looked_at:,} training {what} looked at{whole}",
    )


def _finding(name: str, text: str) -> LearningFinding:
    return LearningFinding(
        OVERLAP,
        (name,),
        0,
        text,
        f"its metrics do not tell how the model does on new data; divide the data so that {name!r} has examples of its "
        "own, or call the evaluator something with 'train' if that is intended",
    )


def _common_part(one: Any, other: Any) -> _Signature | None:
    """Returns the signature of the largest part that examples of two batches have in common; None for none."""
    if one is None or other is None:
        return None
    common = _parts(one).keys() & _parts(other).keys()
    sizes = {signature: _bytes(signature) for signature in common}
    best = max(sorted(sizes, key=repr), key=sizes.__getitem__, default=None)
    return best if best is not None and sizes[best] >= _LEAST_BYTES else None


def _parts(batch: Any) -> dict[_Signature, Any]:
    """Returns the first part of a batch of each signature."""
    found: dict[_Signature, Any] = {}
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, (tf.Tensor, tf.RaggedTensor)) and leaf.shape.rank:
            shape = leaf.shape.as_list()[1:]
            found.setdefault((leaf.dtype, tuple(shape)), leaf)
    return found


def _bytes(signature: _Signature) -> float:
    dtype, shape = signature
    return math.inf if dtype == tf.string or None in shape else float(math.prod(shape)) * dtype.size


def _hashes(batch: Any, signature: _Signature) -> list[int]:
    """Returns hashes of that part of each example of a batch; none if the batch has no such part."""
    part = _parts(batch).get(signature)
    found = None if part is None else example_checksum.hash_of_each(part)
    return [] if found is None else np.asarray(found).tolist()
