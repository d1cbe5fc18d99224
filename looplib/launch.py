"""Launching a binary: `main`, exit codes, `run.json`.

A binary describes its experiment in one function and hands it over:

    @dataclasses.dataclass
    class Config:
        learning_rate: float = 0.1

    def build(config):  # called under strategy.scope()
        trainer = MyTrainer(config)
        return trainer, MyEvaluator(trainer.model)

    if __name__ == "__main__":
        launch.run(build, Config(), train_steps=1000)
"""

import contextlib
import dataclasses
import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from absl import app, flags, logging

from looplib import command_line, console, files, folders, plugins, runtime
from looplib.checkpoint.directory import resolve
from looplib.cluster import peers, remote
from looplib.cluster.collectives import OF_OTHERS, Workers
from looplib.command_line import CONFIG_FILE, FLAGS, OF_THE_MACHINE, PRINT_FLAG, TRAINING_MODES
from looplib.compat import tensorflow as _tf
from looplib.controller import Controller
from looplib.diagnosis import diagnosis
from looplib.errors import EXIT_DONE, EXIT_FAILED, CoordinatorGone, DataError, Preempted, UsageError, cure_of, shown
from looplib.health.guards import Guards
from looplib.health.preemption import notice
from looplib.masks import masked, masked_text
from looplib.report import outcome, run_json
from looplib.report.outcome import Outcome
from looplib.report.program import this_program
from looplib.report.writers import DEFAULT_WRITERS, Writer, named_writers
from looplib.run_config import RunConfig
from looplib.settings import from_flags
from looplib.task.actions import Event
from looplib.task.evaluator import Evaluator
from looplib.task.trainer import Trainer

Build = Callable[[Any], tuple[Trainer | None, Evaluator | Mapping[str, Evaluator] | None]]
Settings = Callable[[], tuple[Any, dict[str, Any]]]
Read = Callable[[], tuple[Any, dict[str, Any], str]]  # also the YAML of the configuration, "" for a foreign one
Started = Callable[[Any, Controller], object]
Act = Callable[[Event], object]
Mode = Callable[[Any, Controller], object]

_THEIRS_SECONDS, _OURS_SECONDS = 30.0, 3.0  # for the news of another worker, after an op failed for its lack or not
_MOST_NAMED = 8  # settings


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

    Exit codes: 0 done; 1 failed; 75 ended by SIGTERM, SIGINT, SIGHUP, SIGXCPU, SIGUSR1, SIGUSR2 or --max_time and
    saved, to be run again; 76 ended by the watchdog. A failure's last line on standard error says what to do.

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
    if experiments and (settings or config is None):
        raise TypeError("launch.run got experiments without a config, of which they are variants")
    for flag in FLAGS:
        flag.make(defaults.pop(flag.name, flag.default), modes or {} if flag.name == "mode" else ())
    if defaults:
        raise TypeError(f"launch.run got defaults for flags that do not exist: {', '.join(sorted(defaults))}")
    configuration = None if settings or config is None else _configuration()
    own = configuration.FLAGS if configuration else (PRINT_FLAG,)
    for flag in own:
        flag.make(flag.default)
    if configuration:
        read = _define_config(config, experiments or {}, argv)
    else:
        read = functools.partial(_read_others, settings)
    for flag in (*FLAGS, *own):  # so that --help shows them
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag.name])
    console.guarded()  # to the end of the process
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
        _end(_Session(), outcome.failed(str(error)))
    except flags.Error:
        app.parse_flags_with_usage(sys.argv if argv is None else argv)  # prints it, and ends
        raise


def _configuration() -> Any:
    """Returns the plug-in for typed configurations, which the settings of a binary without one do not need."""
    return plugins.load("looplib.parts", "configuration")


def _read_others(settings: Settings | None) -> tuple[Any, dict[str, Any], str]:
    return (*(settings() if settings else (None, {})), "")


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return command_line.parse(argv)
    except UsageError as error:
        _end(_Session(), outcome.failed(str(error)))


def _main(binary: _Binary, argv: Sequence[str]) -> None:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.INFO)
        _tf.log_warnings_only()
    _tf.log_once()
    session = _Session({name: flags.FLAGS[name].value for name, *_ in FLAGS})
    with notice.listening(to_the_end=True), session:
        _run_experiment(session, binary, argv)


@dataclasses.dataclass
class _Session:
    """A run of a binary, as a `with` block whose end is the end of the process, by the outcome that `_OUTCOMES` names.

    Attributes:
      values: the value of each flag, by name.
      strategy: None until it is made.
      controller: None until it is built.
      earlier: `run.json` as it was before this process.
      temporary: the run directory of a dry run, which is removed at the end.
      tried: the last line of a dry run that went well.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    strategy: tf.distribute.Strategy | None = None
    controller: Controller | None = None
    earlier: run_json.Report = dataclasses.field(default_factory=dict)
    temporary: str = ""
    tried: str = ""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for kinds, outcome_of in _OUTCOMES:
            if isinstance(error, kinds):
                _end(self, outcome_of(self, error))

    @property
    def report_path(self) -> str:
        """The path of the run's report."""
        return run_json.path_of(self.values["model_dir"], self.values["mode"] in TRAINING_MODES)

    @property
    def advice(self) -> str:
        """How to resume the run, as the end of a sentence."""
        kept = self.controller and self.controller.latest_checkpoint
        if kept:
            return f"run the same command to resume from {kept}"
        return "no checkpoint was saved" if self.controller else "then run the same command again"

    @property
    def page(self) -> str:
        """The path of the page that the run has written; "" if there is none."""
        return self.controller.report.page.path if self.controller else ""

    def place_of(self, error: Exception) -> str:
        """Returns the user's line that an error comes from, "" if it is not known."""
        loops = self.controller.loops.values() if self.controller else ()
        places = (diagnosis().place_of(error), *(loop.place_of(error) for loop in loops))
        return next(filter(None, places), "")

    def close(self, status: str, sentence: str = "") -> None:
        """Closes the controller and writes the report; an error is only logged."""
        if self.controller is None:
            return
        write = functools.partial(self.controller.report.write, status, sentence)
        for action in (write, self.controller.close, write):  # before too, because trackers read there how it ended
            try:
                action()
            except Exception as error:  # the disk may be full, and the last line must come out all the same
                logging.error("%s", error)


def _run_experiment(session: _Session, binary: _Binary, argv: Sequence[str]) -> None:
    dry_run, preflight, replayer = (
        plugins.find("looplib.parts", name) for name in ("dry_run", "preflight", "replayer")
    )
    values = session.values
    if values["dry_run"]:
        redirected = dry_run.redirect(values["strategy"], values["mode"])
        session.temporary = redirected["model_dir"]
        values.update(redirected)
    config, others, text = binary.read()
    if flags.FLAGS["print_config"].value:
        print(text or _configuration().dump(masked(run_json.as_dict(config))), end="")
        sys.exit(EXIT_DONE)
    values.update({name: value for name, value in others.items() if not flags.FLAGS[name].present})
    values.update(preflight.settings() if preflight else {})
    if values["deterministic"] and values["loop"] == "auto":  # which chooses by time
        values["loop"] = "graph"
    values["model_dir"] = values["model_dir"] and resolve(values["model_dir"])
    for name in command_line.PATHS:
        values[name] = values[name] and files.resolve(values[name], f"--{name}")
    command_line.check(values, argv)
    trains = values["mode"] in TRAINING_MODES
    tracked = trains and values["trackers"] and not values["dry_run"]
    trackers = named_writers(values["trackers"], values["model_dir"]) if tracked else []
    session.earlier = run_json.read(session.report_path)
    session.strategy = runtime.setup(**{name: values[name] for name in OF_THE_MACHINE})
    if not Workers(session.strategy).is_chief and not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # one line of progress is enough
    session.controller = controller = _make_controller(binary, config, values, session.strategy, trackers)
    if preflight and preflight.requested():
        preflight.answer(controller)
        sys.exit(EXIT_DONE)
    controller.clock.add_start()
    if trains and text and controller.is_chief:
        _configuration().write(values["model_dir"], text)
    if not trains and controller.is_chief:
        _warn_of_other_settings(values["model_dir"], config)
    if binary.started:
        binary.started(config, controller)
    if replayer and replayer.requested():
        replayer.answer(controller, values["eval_interval"] if values["mode"] == "train_and_eval" else None)
        sys.exit(EXIT_DONE)
    if values["dry_run"]:
        dry_run.keep_inside(binary.actions)
        session.tried = dry_run.try_out(controller)
    elif values["mode"] in binary.modes:
        _refuse_untrained(controller)
        binary.modes[values["mode"]](config, controller)
    else:
        _run_mode(controller, values)
    controller.close()  # here, because a save that fails is a failure of the run
    controller.report.write("done")


def _make_controller(
    binary: _Binary, config: Any, values: dict[str, Any], strategy: tf.distribute.Strategy, trackers: Sequence[Writer]
) -> Controller:
    with strategy.scope():
        built = binary.build(config)
    if not isinstance(built, tuple) or len(built) != 2:
        raise UsageError(f"build returned a {type(built).__name__}; expected (trainer, evaluator), or (trainer, None)")
    trainer, evaluator = built
    if evaluator is None and (values["dry_run"] or not flags.FLAGS["mode"].present):
        values["mode"] = "train"
    mode = values["mode"]
    if mode not in ("train", "export") and evaluator is None:
        raise UsageError(f"--mode={mode} needs an evaluator, but this binary has none; use --mode=train")
    controller = Controller(
        from_flags(RunConfig, values),
        trainer=trainer if mode in TRAINING_MODES or evaluator is None else None,
        evaluator=None if mode == "train" else evaluator,
        strategy=strategy,
        model_dir=values["model_dir"],
        checkpoints=command_line.policy(values),
        guards=from_flags(Guards, values),
        start=command_line.start(values),
        actions=[*binary.actions, *command_line.actions(values)],
        writers=[*DEFAULT_WRITERS, *trackers],
        config=config,
    )
    controller.report.flags = values
    if controller.report.path:  # a controller with a trainer may be that of an export
        controller.report.path = run_json.path_of(values["model_dir"], mode in TRAINING_MODES)
    records_program = controller.is_chief and not values["dry_run"]  # whose directory is removed
    controller.report.program = this_program() if records_program else None
    controller.report.defaults = {
        "flags": {name: flags.FLAGS[name].default for name, *_ in FLAGS},
        "config": run_json.as_dict(binary.config),
    }
    return controller


def _warn_of_other_settings(model_dir: str | None, config: Any) -> None:
    """Names the settings of a job that does not train that differ from those of the training."""
    trained = run_json.read(run_json.path_of(model_dir, trains=True)) if model_dir else {}
    now = {"flags": {}, "config": run_json.as_dict(config)}
    if changed := run_json.changed_settings({"config": trained.get("config")}, now):
        texts = [f"{name}={shown(new)} (the training has {shown(old)})" for name, (old, new) in sorted(changed.items())]
        kept = os.path.join(model_dir, CONFIG_FILE)  # Model Garden's experiments have none
        logging.warning(
            "settings differ from those of the training: %s; they are used as given%s",
            ", ".join(texts[:_MOST_NAMED]) + (f" and {len(texts) - _MOST_NAMED} more" * (len(texts) > _MOST_NAMED)),
            f". --config_file={kept} takes those of the training" if tf.io.gfile.exists(kept) else "",
        )


def _done(session: _Session, _: None) -> Outcome:
    if session.tried:
        return outcome.done(session.tried)
    line = f"done at step {_where(session.controller)}; the run directory is {session.values['model_dir']}"
    line += f", and its page {session.page}" * bool(session.page)
    return outcome.done(line if session.controller.is_chief else "")


def _where(controller: Controller) -> str:
    """Returns the step at which a run has ended, and which of its checkpoints other jobs take."""
    standing = controller.report.standing()
    rule = controller.policy.best if "train" in controller.loops else None
    path = controller.best_checkpoint if rule and standing.saved_step is not None else None
    best = int(path.rsplit("-", 1)[1]) if path else None
    if (final := standing.final_step) is not None:
        named = f", the best by {rule.metric}," if final == best else ","
        return (
            f"{standing.step}, and back at step {final}{named} which eval, predict, export and --warm_start take; a "
            f"longer training continues from step {standing.saved_step} (--checkpoint=latest)"
        )
    if best is None or best == standing.step:
        return f"{standing.step}"
    return f"{standing.step}; the best by {rule.metric} is step {best} (--checkpoint=best)"


def _served(session: _Session, gone: CoordinatorGone) -> Outcome:
    report = run_json.read(session.report_path)
    return outcome.served(gone, "not known" if report == session.earlier else report.get("status"))


def _refused(session: _Session, error: UsageError) -> Outcome:
    logging.debug("where it was raised:", exc_info=error)
    kept = isinstance(error, DataError) and session.controller and session.controller.latest_checkpoint
    return outcome.failed(f"{error}{f'; after that, the same command resumes from {kept}' if kept else ''}")


def _broken(session: _Session, error: Exception) -> Outcome:
    # Ends the process in here if the error is one that another worker's end has led to.
    peers.current.first_cause(_THEIRS_SECONDS if isinstance(error, OF_OTHERS) else _OURS_SECONDS)
    place = session.place_of(error)
    if cure_of(error) and not place:  # of a file that looplib reads or writes
        logging.debug("where it was raised:", exc_info=error)
    elif not outcome.is_quit(error):
        print(masked_text("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    on_tpu = isinstance(session.strategy, tf.distribute.TPUStrategy)
    if on_tpu and (tpu := plugins.load("looplib.parts", "tpu")).is_lost(session.strategy, error):
        kept = session.controller and session.controller.latest_checkpoint
        session.close("restarted")  # what is on the TPU cannot be saved any more
        try:
            tpu.start_again(int(kept.rsplit("-", 1)[1]) if kept else 0)
        except UsageError as refusal:
            return outcome.failed(str(refusal))
    return outcome.broken(error, place, session.advice)


# What ended a run -> how to find the outcome. Other ends, such as a `SystemExit` of the program's own, pass through.
_OUTCOMES = (
    (type(None), _done),
    (CoordinatorGone, _served),
    (Preempted, lambda session, error: outcome.preempted(error)),
    (UsageError, _refused),
    (Exception, _broken),
)


def _end(session: _Session, how: Outcome) -> NoReturn:
    """Closes and reports what is open, tells the other workers, prints the last line, and ends the process."""
    failed, controller = how.code == EXIT_FAILED, session.controller
    how = dataclasses.replace(how, line=masked_text(how.line), sentence=masked_text(how.sentence))
    if how.code != EXIT_DONE:
        session.close(how.status, how.sentence if failed else "")
    if session.temporary:
        with contextlib.suppress(OSError):
            folders.remove(*os.path.split(session.temporary))
    if controller and controller.is_chief and not failed:
        print(*controller.clock.summary(), *filter(None, [controller.report.speed]), sep="\n")
    sys.stdout.flush()
    if failed:
        _tf.log_errors_only()  # warnings as objects are deleted would come after the last line
        peers.current.last_words(how.code, how.sentence)  # ends here if another worker failed first
        if session.page:
            print(f"looplib: the page of the run is {session.page}", file=sys.stderr)
    if how.line:
        print(how.line, file=sys.stdout if how.is_news else sys.stderr, flush=True)
    if how.alone:
        peers.current.last_words(how.code, how.sentence)  # has no effect the second time
    peers.current.leave()  # has no effect after last words
    # TensorFlow would wait for other processes, or complain of those that have ended.
    if how.at_once or remote.connected() or peers.current.joined:
        sys.stdout.flush()
        os._exit(how.code)
    sys.exit(how.code)


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
        controller.export(values["export"], averages=values["export_averages"], tflite=values["export_tflite"])
    if mode in ("train", "train_and_post_eval"):
        controller.train(train_steps)
    if mode in ("eval", "train_and_post_eval"):
        controller.evaluate(eval_steps)


def _refuse_untrained(controller: Controller) -> None:
    if controller.restored_from is None:
        raise UsageError(
            f"there is no checkpoint in {controller.model_dir}; train first, or name the directory of a training"
        )
