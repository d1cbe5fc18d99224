"""Actions: callables that a user attaches to the outer loop."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from absl import logging

from looplib.base import console
from looplib.base.messages import gist
from looplib.errors import ActionError, CheckpointError, StateError
from looplib.run.policy import KeepRule
from looplib.task.plain import as_json


@dataclasses.dataclass(frozen=True)
class Event:
    """The argument of an action, which is called after every reported loop and every evaluation.

    An action is any callable that takes one `Event`. What it raises ends the run. Where several workers train, each
    calls its actions, so that all stop or save together; what writes something does it where
    `event.controller.is_chief`. An action that remembers something from one event to the next is an `Action`.

    Attributes:
      step: the global step.
      split: "train", or the evaluator's name ("eval" for the only one).
      metrics: dict from metric name to number, as reported.
      controller: the `Controller`; call `controller.stop()` to end the training after this event, or
        `controller.save_checkpoint()`.
      evaluation_due: whether an evaluation of the reported step follows.
      ending: whether the reported step is the last of this training.

    Example:
        ```python
        def stop_when_good(event):
            if event.split == "eval" and event.metrics["accuracy"] > 0.99:
                event.controller.stop()

        looplib.Controller(..., actions=[stop_when_good])
        ```
    """

    step: int
    split: str
    metrics: dict
    controller: Any
    evaluation_due: bool = False
    ending: bool = False


class Action:
    """An action whose memory is part of the checkpoints, so that a resumed run continues with it.

    Its hooks are called around a training. Where several workers train, all call the hooks, except `on_save`, which
    only the chief calls. No scope of a strategy is entered for a hook or an action: make variables with a copy for each
    replica in `with strategy.scope():`. All methods do nothing by default; an action with a memory defines both `state`
    and `load`.

    The memory in a checkpoint belongs to the action of its class and `name`. An action that can watch different things
    has the name of its metric, so that it does not take the memory of another.

    Attributes:
      name: a text that distinguishes it from other actions of its class; default "".
      watched: the mode and the metric of an evaluation by which it finds the best value, such as "max:eval/accuracy".
        That of the first action is the run's, if no `KeepBest` is; default "".
      keeps: a rule of checkpoints to keep beside those of `CheckpointPolicy.keep`; default None.

    Example:
        ```python
        class StopLate(looplib.Action):
            def __init__(self, metric="loss", patience=3):
                self.name = self.metric = metric
                self.patience, self.best, self.waited = patience, float("inf"), 0

            def __call__(self, event):
                if event.split != "eval":
                    return
                value = event.metrics[self.metric]
                self.best, self.waited = min(self.best, value), 0 if value < self.best else self.waited + 1
                if self.waited >= self.patience:
                    event.controller.stop()

            def state(self):
                return [self.best, self.waited]

            def load(self, state):
                self.best, self.waited = state
        ```
    """

    name: str = ""
    watched: str = ""
    keeps: KeepRule | None = None

    def __call__(self, event: Event) -> None:
        """Takes an event."""

    def state(self) -> Any:
        """Returns what the action remembers: numbers, strings, and lists and dicts of these.

        Scalars and arrays of numpy and TensorFlow are kept as numbers and lists.
        """
        return None

    def load(self, state: Any) -> None:
        """Takes what `state` returned when the checkpoint was saved, as `json.loads` returns it."""

    def stops(self) -> Sequence[int]:
        """Returns the global steps at which the training returns from the device for `on_reaching` and `on_leaving`.

        Reports, saves and evaluations are not made at these steps because of it.
        """
        return ()

    def on_reaching(self, step: int, controller: Any) -> None:
        """Takes one of the `stops`, right after this step, before its report, save and evaluation."""

    def on_leaving(self, step: int, controller: Any) -> None:
        """Takes one of the `stops`, right before the step that follows it; also where a training starts there."""

    def on_start(self, controller: Any) -> None:
        """Takes the `Controller` when a training starts, before its first step; it may call `controller.stop()`."""

    def on_save(self, path: str, controller: Any) -> None:
        """Takes the path of each checkpoint that a training has committed.

        It is called in the training's thread, at the next report, save or evaluation after the commit.
        """

    def on_exception(self, error: BaseException, controller: Any) -> None:
        """Takes the exception that ended a training early, such as `looplib.Preempted` for a signal.

        It is called once the state is saved, if it could be. What it raises is only logged.
        """

    def on_end(self, controller: Any) -> None:
        """Takes the `Controller` when a training has ended as planned, or was stopped by an action."""


class Actions(Sequence[Callable[[Event], object]]):
    """All actions of a controller: what is called when, and the states of those that have `state` and `load`.

    States have the names of the actions' classes and their own.

    Attributes:
      stops: dict from the steps at which actions want to be called to these actions.
      watched: what the first action that watches a metric of an evaluation does, see `Action`; None for none.
      keeps: the rules of checkpoints to keep that actions have.

    Raises:
      UsageError: if JSON cannot hold a state, an action has only one of `state` and `load`, or two have one name.
    """

    def __init__(self, actions: Sequence[Callable[[Event], object]]) -> None:
        self._all = list(actions)
        self._hooked = [action for action in actions if isinstance(action, Action)]
        self.stops: dict[int, list[Action]] = {}
        self._stateful: dict[str, Action] = {}
        for action in self._hooked:
            for step in action.stops():
                self.stops.setdefault(step, []).append(action)
            if (key := _name_of_state(action)) in self._stateful:
                raise ActionError(
                    f"two actions are {key}, and a checkpoint could not tell which of them a memory belongs to; give "
                    "each a name of its own, by the argument or the attribute `name`"
                )
            if key:
                self._stateful[key] = action
        self.watched = next((action.watched for action in self._hooked if action.watched), None)
        self.keeps = [action.keeps for action in self._hooked if isinstance(action.keeps, KeepRule)]
        self._initial = self.save()

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: Any) -> Any:
        return self._all[number]

    def reported(self, event: Event) -> None:
        """Gives all actions an event."""
        for action in self._all:
            action(event)

    def saved(self, paths: Sequence[str], controller: Any) -> None:
        """Calls `on_save` for some checkpoints."""
        for path in paths:
            for action in self._hooked:
                action.on_save(path, controller)

    @contextlib.contextmanager
    def around_training(self, take_saves: Callable[[], list[str]], controller: Any) -> Iterator[None]:
        """Calls the hooks of a start and an end around a training, the `with` block.

        `take_saves` returns the committed paths for which `on_save` was not called yet.
        """
        for action in self._hooked:
            action.on_start(controller)
        try:
            yield
        except BaseException as error:
            calls = [lambda: self.saved(take_saves(), controller)]
            calls += [functools.partial(action.on_exception, error, controller) for action in self._hooked]
            for call in calls:
                try:
                    call()
                except Exception:  # the first error is the one to know of
                    logging.exception("a hook of an action failed after the training did")
            raise
        self.saved(take_saves(), controller)
        for action in self._hooked:
            action.on_end(controller)

    def save(self) -> dict[str, Any]:
        """Returns the states of all actions, as a dict that JSON can hold; `UsageError` for one that it cannot."""
        states = {}
        for key, action in self._stateful.items():
            state = action.state()
            try:
                states[key] = json.loads(json.dumps(state, default=as_json))
            except (TypeError, ValueError) as error:
                raise StateError(
                    f"{type(action).__name__}.state returned {state!r:.200}, which JSON cannot hold ({error}); return "
                    "numbers, strings, lists and dicts of them"
                ) from error
        return states

    def load(self, states: dict[str, Any]) -> None:
        """Gives each action its state of a checkpoint, or its first one where the checkpoint has none."""
        for key, action in self._stateful.items():
            state = states.get(key, self._initial[key])
            try:
                action.load(state)
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                raise CheckpointError(
                    f"{key} cannot load its memory from the checkpoint, which is {state!r:.200} ({gist(error)}); name "
                    "another checkpoint, or give the action another name to start without this memory"
                ) from error
        warn_of_unused_memories("actions", self._stateful.keys() - states.keys(), states.keys() - self._stateful.keys())


def _name_of_state(action: Action) -> str:
    """Returns the name of an action's state in checkpoints; "" if it has none."""
    kind = type(action).__name__
    saves, loads = type(action).state is not Action.state, type(action).load is not Action.load
    if saves != loads:
        names = ("state", "load") if saves else ("load", "state")
        raise ActionError(f"{kind} has a {names[0]} and no {names[1]}; define both, or neither")
    if saves and not isinstance(action.name, str):
        raise ActionError(f"{kind}.name is {action.name!r:.100}; expected a text that says what the action watches")
    return f"{kind}({action.name})" if saves else ""


def warn_of_unused_memories(owners: str, without: Iterable[str], left: Iterable[str]) -> None:
    """Logs in one line which memories of a checkpoint do not fit the actions of this start.

    Args:
      owners: what has the memories, as a plural noun.
      without: the names of owners whose memory the checkpoint lacks.
      left: the names in the checkpoint that no owner of this start has.
    """
    parts = [f"without a memory in it, these start with a fresh one: {', '.join(sorted(without))}"] if without else []
    parts += [f"memories in it that are not used: {console.printable(', '.join(sorted(left)))}"] if left else []
    if parts:
        logging.warning("the %s differ from those of the checkpoint; %s", owners, "; ".join(parts))
