"""Launching a binary: `main`, exit codes, `run.json`.

A binary describes its experiment in one function and passes it on:

    def build(config):  # called under strategy.scope()
        trainer = MyTrainer(config)
        return trainer, MyEvaluator(trainer.model)
    launch.run(build, Config(learning_rate=0.1), train_steps=1000)
"""

import dataclasses
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from looplib.base import console, files, orders
from looplib.binary import command_line
from looplib.binary.command_line import FETCHED, PRINT_FLAG, SETUP_FLAGS, TRAINING_MODES, FlagPlugin
from looplib.binary.outcome import Session, failed
from looplib.binary.trial import TRIALS
from looplib.buckets.local import local_path
from looplib.checkpoint.directory import resolve
from looplib.cluster import runtime
from looplib.cluster.collectives import Workers
from looplib.cluster.preemption import notice
from looplib.compat import tensorflow as _tf
from looplib.config.run_config import RunConfig
from looplib.config.settings import from_flags
from looplib.controller import Controller
from looplib.errors import EXIT_DONE, MissingPartError, NoCheckpointError, TaskError, UsageError
from looplib.guards.guards import Guards
from looplib.masks import mask_tracebacks, masked
from looplib.replay import player, preflight
from looplib.report.writers.contract import DEFAULT_WRITERS
from looplib.run.code_version import this_program
from looplib.run.directory import RunDir
from looplib.run.report import as_dict, read_report
from looplib.task.actions import Action, Event
from looplib.task.trainer import Evaluator, Trainer

Build = Callable[[Any], tuple[Trainer | None, Evaluator | Mapping[str, Evaluator] | None]]
Settings = Callable[[], tuple[Any, dict[str, Any]]]
Read = Callable[[], tuple[Any, dict[str, Any], str]]  # also the YAML of the configuration, "" for a foreign one
Started = Callable[[Any, Controller], object]
Act = Callable[[Event], object]
Mode = Callable[[Any, Controller], object]


def run(
    build: Build,
    config: Any = None,
    argv: Sequence[str] | None = None,
    settings: Settings | None = None,
    started: Started | None = None,
    actions: Sequence[Act] | None = None,
    modes: Mapping[str, Mode] | None = None,
    experiments: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> NoReturn:
    """Defines the flags, parses the command line, runs the experiment and exits the process.

    For exit codes see `looplib.errors.EXIT_CODES`. A failure's last line on standard error says what to do.

    Args:
      build: function of the parsed config, called under the strategy's scope; returns `(trainer, evaluator)`, where
        evaluator is an `Evaluator`, a dict from name to `Evaluator`, or None, without which --mode is train by default.
      config: a dataclass instance with the experiment's own settings, each a flag `--config.<field>=<value>` and a name
        in the files of --config_file; default None for none, with which `build` is called then.
      argv: the command line; default `sys.argv`.
      settings: in place of `config`, a function without arguments that is called once the command line is parsed, for a
        binary whose settings come from elsewhere; returns `(config, values)`: the argument of `build`, with an
        `as_dict` for `run.json`, and a dict of values for the flags that the command line leaves out.
      started: function of `(config, controller)`, called before the first step, when the run directory is known to be
        this run's and its checkpoint to fit.
      actions: callables that take an `Event`, see `Controller`.
      modes: dict from name to function of `(config, controller)`, further values of `--mode`. The controller has the
        evaluator, but no trainer, and has restored the checkpoint that --checkpoint names.
      experiments: variants of `config` by name, of its class; --experiment=NAME takes one in its place.
      **defaults: other default values for flags, such as `train_steps=2000`.
    """
    if settings is None and config is not None and (isinstance(config, type) or not dataclasses.is_dataclass(config)):
        what = f"the class {config.__name__}" if isinstance(config, type) else f"a {type(config).__name__}"
        raise TypeError(f"config is {what}; expected an instance of a dataclass, such as Config()")
    masked(argv or sys.argv)  # so that no text has its secrets from now on
    if experiments and (settings or config is None):
        raise TypeError("launch.run got experiments without a config, of which they are variants")
    shared = command_line.all_flags()
    for flag in shared:
        flag.make(defaults.pop(flag.name, flag.default), modes or {} if flag.name == "mode" else ())
    if defaults:
        raise TypeError(f"launch.run got defaults for flags that do not exist: {', '.join(sorted(defaults))}")
    try:
        configuration = None if settings or config is None else _configuration()
    except UsageError as error:
        Session().end(failed(str(error), error.line))
    own = configuration.FLAGS if configuration else (PRINT_FLAG,)
    for flag in own:
        flag.make(flag.default)
    others = settings or (lambda: (None, {}))
    read = _define_config(config, experiments or {}, argv) if configuration else lambda: (*others(), "")
    for flag in (*shared, *own):  # so that --help shows them
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag.name])
    console.guarded()  # to the end of the process
    mask_tracebacks()
    gc.freeze()  # imported modules stay, so the collector need not go through them, least of all at the process's end
    binary = _Binary(build, config, read, started, actions or (), modes or {})
    app.run(lambda argv: _main(binary, argv), argv=argv, flags_parser=_parse)


@dataclasses.dataclass(frozen=True)
class _Binary:
    """The arguments of `run` that are needed once the command line is parsed."""

    build: Build
    config: Any
    read: Read
    started: Started | None
    actions: Sequence[Act]
    modes: Mapping[str, Mode]


def _define_config(config: Any, experiments: Mapping[str, Any], argv: Sequence[str] | None) -> Read:
    """Makes a flag of each field; returns the function that reads them."""
    try:
        return _configuration().define(config, experiments, sys.argv if argv is None else argv)
    except UsageError as error:
        Session().end(failed(str(error), error.line))
    except flags.Error:
        app.parse_flags_with_usage(sys.argv if argv is None else argv)  # prints it, and ends
        raise


def _configuration() -> Any:
    """Returns the module for typed configurations, which a binary without one does not need."""
    from looplib.binary import config

    return config


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return command_line.parse(argv)
    except UsageError as error:
        Session().end(failed(str(error), error.line))


def _main(binary: _Binary, argv: Sequence[str]) -> None:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.INFO)
        _tf.log_warnings_only()
    _tf.log_once()
    session = Session({name: flags.FLAGS[name].value for name, *_ in command_line.all_flags()})
    with notice.listening(to_the_end=True), session:
        _run_experiment(session, binary, argv)


def _run_experiment(session: Session, binary: _Binary, argv: Sequence[str]) -> None:
    values = session.values
    if redirected := TRIALS.redirect(values):
        session.temporary = redirected["model_dir"]
        values.update(redirected)
    config, others, text = binary.read()
    if flags.FLAGS["print_config"].value:
        print(text or _configuration().dump(masked(as_dict(config))), end="")
        sys.exit(EXIT_DONE)
    values.update({name: value for name, value in others.items() if not flags.FLAGS[name].present})
    values.update(preflight.settings())
    if values["deterministic"] and values["loop"] == "auto":  # which chooses by time
        values["loop"] = "graph"
    values["model_dir"] = values["model_dir"] and resolve(values["model_dir"], values["local_dir"])
    for name in command_line.PATHS:
        values[name] = values[name] and (local_path if name in FETCHED else files.resolve)(values[name], f"--{name}")
    command_line.check(values, argv)
    trains = values["mode"] in TRAINING_MODES
    session.earlier = read_report(session.report_path)
    session.strategy = runtime.setup(**{name: values[name] for name in SETUP_FLAGS})
    if not Workers(session.strategy).is_chief and not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # one line of progress is enough
    session.controller = controller = _make_controller(binary, config, session)
    order = orders.current()
    if order.preflight:
        preflight.answer(order.preflight, controller)
        sys.exit(EXIT_DONE)
    controller.clock.add_start()
    if trains and text and controller.is_chief:
        _configuration().write(values["model_dir"], text)
    if config is not None and not trains and controller.is_chief:
        _configuration().warn_of_other_settings(values["model_dir"], config)
    if binary.started:
        binary.started(config, controller)
    if order.replay:
        every = values["eval_interval"] if values["mode"] == "train_and_eval" else None
        player.answer(order.replay, controller, every)
        sys.exit(EXIT_DONE)
    if session.temporary:
        session.tried = TRIALS.try_out(controller, binary.actions)
    elif values["mode"] in binary.modes:
        _refuse_untrained(controller)
        binary.modes[values["mode"]](config, controller)
    else:
        _run_mode(controller, values)
    controller.close()  # here, because a save that fails is a failure of the run
    controller.report.write("done")
    controller.close()


def _make_controller(binary: _Binary, config: Any, session: Session) -> Controller:
    values, strategy = session.values, session.strategy
    asked = command_line.flag_plugins() if values["mode"] in TRAINING_MODES else ()
    writers = [writer for plugin in asked if not session.temporary for writer in plugin.writers(values)]
    with strategy.scope():
        built = binary.build(config)
    if not isinstance(built, tuple) or len(built) != 2:
        raise TaskError(f"build returned a {type(built).__name__}; expected (trainer, evaluator), or (trainer, None)")
    trainer, evaluator = built
    if evaluator is None and (session.temporary or not flags.FLAGS["mode"].present):
        values["mode"] = "train"
    mode = values["mode"]
    if mode not in ("train", "export") and evaluator is None:
        raise MissingPartError(f"--mode={mode} needs an evaluator, but this binary has none; use --mode=train")
    controller = Controller(
        from_flags(RunConfig, values),
        trainer=trainer if mode in TRAINING_MODES or evaluator is None else None,
        evaluator=None if mode == "train" else evaluator,
        strategy=strategy,
        model_dir=values["model_dir"],
        checkpoints=command_line.policy(values),
        guards=from_flags(Guards, values),
        start=command_line.start(values),
        actions=[*binary.actions, *_of_flags(asked, values, {type(action) for action in binary.actions})],
        writers=[*DEFAULT_WRITERS, *writers],
        config=config,
    )
    phases = {name: value for name, value in controller.report.facts.flags.items() if name == "phases"}
    controller.report.facts.flags = values | phases
    if controller.report.path:  # a controller with a trainer may only export
        controller.report.path = RunDir(values["model_dir"]).report_path(mode in TRAINING_MODES)
    records_program = controller.is_chief and not session.temporary  # which is removed
    controller.report.program, controller.report.diff = this_program() if records_program else (None, "")
    controller.report.facts.defaults = {
        "flags": {name: flags.FLAGS[name].default for name, *_ in command_line.all_flags()},
        "config": as_dict(binary.config),
    }
    return controller


def _of_flags(asked: Sequence[FlagPlugin], values: dict[str, Any], own: Collection[type]) -> Iterator[Action]:
    """Yields the actions of flags; a flag that is not given adds none of a class that the program has of its own."""
    for plugin in asked:
        given = any(flags.FLAGS[flag.name].present for flag in plugin.flags)
        yield from (action for action in plugin.actions(values) if given or type(action) not in own)


def _run_mode(controller: Controller, values: dict[str, Any]) -> None:
    """Trains, evaluates, predicts or exports by --mode."""
    mode, train_steps, eval_steps = values["mode"], values["train_steps"], values["eval_steps"]
    if mode == "train_and_eval":
        controller.train_and_evaluate(train_steps, values["eval_interval"], eval_steps)
    elif mode == "continuous_eval":
        until = train_steps if train_steps > 0 else None
        controller.evaluate_continuously(eval_steps, until_step=until, timeout=values["eval_timeout"])
    elif mode == "predict":
        controller.predict(
            values["predictions"], format=values["predictions_format"], piece=values["predictions_piece"]
        )
    elif mode == "export":
        _refuse_untrained(controller)
        settings = {name: values[f"export_{name}"] for name in ("averages", "formats", "license")}
        controller.export(values["export"], **settings)
    if mode in ("train", "train_and_post_eval"):
        controller.train(train_steps)
    if mode in ("eval", "train_and_post_eval"):
        controller.evaluate(eval_steps)


def _refuse_untrained(controller: Controller) -> None:
    if controller.restored_from is None:
        raise NoCheckpointError(
            f"there is no checkpoint in {controller.model_dir}; train first, or name the directory of a training"
        )
