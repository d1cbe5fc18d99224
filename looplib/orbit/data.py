"""The position in the data of trainers with their own loops."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.data.streams import BatchProperties, HostStream


def datasets_of(structure: Any) -> list[Any]:
    """Lists the data sets of a trainer or evaluator, also where another controller has replaced them before.

    Args:
      structure: data sets in lists and dicts, or None.
    """
    return [data.dataset if isinstance(data, _DatasetStandIn) else data for data in tf.nest.flatten(structure)]


class Data:
    """The position in the data of an Orbit `StandardTrainer`, whose `train_dataset` others may replace.

    The replacements make equal iterators, and know them. If the data is not made of plain `tf.data`
    pipelines, nothing is replaced and no position is known.

    Args:
      trainer: Orbit's trainer.
      datasets: its data sets, a list.
      strategy: `tf.distribute.Strategy`.
      who: the trainer's class name, for the log.
    """

    def __init__(self, trainer: Any, datasets: list[Any], strategy: tf.distribute.Strategy, who: str) -> None:
        self._trainer = trainer
        self._who = who
        self._sources = []
        swappable = getattr(getattr(type(trainer), "train_dataset", None), "fset", None)
        if swappable and datasets and all(isinstance(data, tf.data.Dataset) for data in datasets):
            self._structure = tf.nest.pack_sequence_as(trainer.train_dataset, datasets)
            self._sources = [_DatasetStandIn(data, strategy, who, alone=len(datasets) == 1) for data in datasets]
            self._put()

    def _put(self) -> None:
        # Orbit then forgets the iterator that it has. tf.Module takes no notice of what is there already.
        self._trainer.train_dataset = self._structure
        self._trainer.train_dataset = tf.nest.pack_sequence_as(self._structure, self._sources)

    @contextlib.contextmanager
    def put_aside(self) -> Iterator[None]:
        """In this `with` block the trainer finds data of the same kind and no length, and leaves its own untouched."""
        for source in self._sources:
            source.empty = True
        yield
        for source in self._sources:
            source.empty = False
        if self._sources:
            self._put()

    def position(self) -> bytes | None:
        """Returns the positions of all iterators as bytes for `begin`, or None."""
        if [id(data) for data in tf.nest.flatten(getattr(self._trainer, "train_dataset", None))] != [
            id(source) for source in self._sources
        ]:
            return None  # the trainer has replaced its data itself
        places = [source.place() for source in self._sources]
        if not places or None in places:
            return None
        return b"".join(len(place).to_bytes(8, "big") + place for place in places)

    def begin(self, step: int, position: bytes | None) -> None:
        """Makes the trainer's next iterators begin after `step` steps."""
        places = []
        while position:
            size = 8 + int.from_bytes(position[:8], "big")
            places.append(position[8:size])
            position = position[size:]
        if len(places) != len(self._sources):
            places = [None] * len(self._sources)
        known = [source.begin(step, place) for source, place in zip(self._sources, places)]
        if step and not any(known):
            logging.info(
                "the position in the data of %s is unknown; after step %d its data starts from the beginning",
                self._who,
                step,
            )
        if self._sources:
            self._put()


class _DatasetStandIn:
    """Stands for a data set and knows the iterator that a trainer makes by `iter()`; all else is the data set's own."""

    def __init__(self, dataset: tf.data.Dataset, strategy: tf.distribute.Strategy, who: str, alone: bool) -> None:
        self.empty = False
        self._alone = alone  # so that a step can be taken for a batch
        self.dataset = dataset
        self._iterator = self._place = None
        self._stream = HostStream(
            strategy=strategy,
            dataset=dataset,
            renew=lambda: dataset,
            properties=BatchProperties(who=who),
            context=lambda: None,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __iter__(self) -> tf.data.Iterator:
        if self.empty:
            return iter(self.dataset.take(0))  # which does not even start the data set's shuffles
        self._iterator, self._place = self._stream.iterate(self._place), None
        self._stream.start_step = self._stream.skipped = 0  # the next one starts at the beginning
        return self._iterator

    def place(self) -> bytes | None:
        return self._stream.position(self._iterator, 0) if self._iterator is not None else self._place

    def begin(self, step: int, place: bytes | None) -> bool:
        """Makes the next iterator begin at a position; returns whether it can."""
        self._iterator, self._place = None, place
        known = self._alone or place is not None
        self._stream.start_step, self._stream.skipped = step if known else 0, step if self._alone else 0
        return known
