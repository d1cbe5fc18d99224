"""A loader in use: its passes and states, by the protocol that it has, and how the passes of an epoch get its order."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from looplib.data.order import derived_seed
from looplib.errors import DatasetError


@runtime_checkable
class _OfEpochs(Protocol):
    """Data with another order in each epoch, whose number it is given; samplers of PyTorch and loaders of others."""

    def set_epoch(self, epoch: int) -> None:
        """Takes the number of the epoch that begins."""


@runtime_checkable
class _Sampled(Protocol):
    sampler: Any


class _Generator(Protocol):
    """A generator of random numbers, as PyTorch has them."""

    def initial_seed(self) -> int:
        """Returns the seed that it was given."""

    def manual_seed(self, seed: int) -> Any:
        """Begins again with a seed."""


@runtime_checkable
class _Random(Protocol):
    generator: _Generator | None  # None is one of the process


@runtime_checkable
class _StateDict(Protocol):
    """A loader with a state, such as a `StatefulDataLoader`, or an `IterableDataset` of Hugging Face."""

    def state_dict(self) -> Any:
        """Returns the state behind the last batch."""

    def load_state_dict(self, state: Any) -> None:
        """Takes a state, for the pass that begins next."""


@runtime_checkable
class _GetState(Protocol):
    """An iterator with a state, as those of Grain."""

    def get_state(self) -> Any:
        """Returns the state behind the last batch."""

    def set_state(self, state: Any) -> None:
        """Takes a state."""


@runtime_checkable
class ByNumber(Protocol):
    """Data that gives its items by number, such as a map-style data set."""

    def __len__(self) -> int:
        """Returns the number of items."""

    def __getitem__(self, number: int) -> Any:
        """Returns an item."""


@runtime_checkable
class _Waits(Protocol):
    """A loader of a stream, whose next batch may not be there yet."""

    def wait(self, seconds: float) -> bool:
        """Returns whether `next` has a batch at once; waits at most so many seconds for it."""


@runtime_checkable
class _Closed(Protocol):
    def close(self) -> None:
        """Ends threads and processes."""


_SHORT = 0.2  # seconds that a loader waits at a time, so that a signal ends a wait soon

_iterators: "weakref.WeakSet[Iterator]" = weakref.WeakSet()  # that loops have read


class OpenLoader:
    """A loader in use: the pass that is read, and its state, in the form that the loader has for it.

    Args:
      make: makes the loader.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._in_use = threading.Lock()  # held while the loader waits, and while it is closed
        self._iterator: Iterator[Any] | None = None
        self._renew()

    def _renew(self) -> None:
        loader = self._make()
        if isinstance(loader, Iterator):
            with contextlib.suppress(TypeError):  # not all can be referred to weakly
                if loader in _iterators:
                    raise DatasetError(
                        f"the function that context.loader got returned one {type(loader).__name__} twice, which "
                        "begins only once; make a new one in each call"
                    )
                _iterators.add(loader)
        if isinstance(loader, tf.data.Dataset) or not isinstance(loader, Iterable):
            what = "a tf.data.Dataset, which dataset() returns as it is" if isinstance(loader, tf.data.Dataset) else ""
            raise DatasetError(
                f"the function that context.loader got returned {what or f'a {type(loader).__name__}'}; expected a "
                "loader of batches: an object with __iter__, such as a DataLoader"
            )
        self.loader, self._restored = loader, False  # whether it has taken a state
        # The generators of the loader, and the seeds that they were given.
        found = {id(part.generator): part.generator for part in self._parts if isinstance(part, _Random)}
        self._seeds = [(one, one.initial_seed()) for one in found.values() if one is not None]

    @property
    def length(self) -> int | None:
        """The batches of a pass, if the loader says it."""
        with contextlib.suppress(TypeError):  # it has none, or its data set has none
            return len(self.loader)
        return None

    @functools.cached_property
    def skips_at_once(self) -> bool:
        """Whether a pass can be entered at any batch."""
        return isinstance(self.loader, ByNumber) and not isinstance(iter(self.loader), _GetState)

    @property
    def shares_its_state(self) -> bool:
        """Whether two readers of the loader would disturb each other."""
        return isinstance(self.loader, (_StateDict, Iterator))

    @functools.cached_property
    def waits(self) -> bool:
        """Whether the loader says that it has nothing yet."""
        return isinstance(self.loader, _Waits)

    def wait(self) -> bool:
        """Returns whether the next batch can be read, after a short time at most."""
        with self._in_use:
            return not self.waits or self._iterator is None or self.loader.wait(_SHORT)

    def begin(self, epoch: int, index: int = 0) -> None:
        """Begins a pass, at the batch `index` if `skips_at_once`."""
        of_epochs = isinstance(self.loader, _OfEpochs)
        if self._iterator is not None and (isinstance(self.loader, Iterator) or (of_epochs and self._restored)):
            self._renew()  # an iterator ends; a state may stay behind its pass
        self._take_epoch(epoch)
        rest = range(index, len(self.loader)) if index else ()
        self._iterator = map(self.loader.__getitem__, rest) if index else iter(self.loader)

    def _take_epoch(self, epoch: int) -> None:
        """Makes the order of a pass depend on its number, and not on how many were read before in this process."""
        for part in self._parts:
            if isinstance(part, _OfEpochs):
                part.set_epoch(epoch)
        for generator, seed in self._seeds:
            generator.manual_seed(derived_seed(seed, epoch))

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.loader, self.loader.sampler if isinstance(self.loader, _Sampled) else None

    @property
    def is_read_again(self) -> bool:
        """Whether a resume begins its pass again, and reads up to the batch."""
        return not (isinstance(self.loader, Iterator) or self.skips_at_once) and self.state() is None

    @property
    def is_random(self) -> bool:
        """Whether its order comes from a generator of the process, whose state no checkpoint has."""
        return isinstance(self._parts[1], _Random) and not self._seeds

    def next(self) -> Any:
        """Returns the next batch of the pass; raises `StopIteration` at its end."""
        return next(self._iterator)

    def state(self) -> Any:
        """Returns the state behind the last batch; None for a loader without a state."""
        if isinstance(self.loader, _StateDict):
            return self.loader.state_dict()
        if isinstance(self._iterator, _GetState):
            return self._iterator.get_state()
        return self._iterator.state_dict() if isinstance(self._iterator, _StateDict) else None

    def restore(self, epoch: int, state: Any) -> None:
        """Begins a pass behind a state."""
        self._take_epoch(epoch)
        if isinstance(self.loader, _StateDict):
            self.loader.load_state_dict(state)
            self._iterator, self._restored = iter(self.loader), True
            return
        self._iterator = iter(self.loader)
        if isinstance(self._iterator, _GetState):
            self._iterator.set_state(state)
        else:
            self._iterator.load_state_dict(state)

    def close(self) -> None:
        """Ends the threads and processes of the loader."""
        with self._in_use:
            iterator, self._iterator = self._iterator, None
            if isinstance(iterator, _Closed):
                iterator.close()
