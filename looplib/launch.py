"""Launching a binary: flags, `main`, exit codes, `run.json`.

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

import dataclasses
import gc
import math
import os
import sys
import time
import traceback

import tensorflow as tf
from absl import app, flags, logging
from ml_collections import config_flags

from looplib import console, runtime, source_locations
from looplib.checkpoint.policy import CheckpointPolicy, KeepBest, KeepEvery, KeepLast
from looplib.cluster import peers, tpu
from looplib.cluster.collectives import Workers
from looplib.controller import Controller
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, CoordinatorGone, Preempted, UsageError, read
from looplib.health import guards
from looplib.health.guards import Guards
from looplib.health.preemption import notice
from looplib.loop.engines import ENGINES
from looplib.report import run_json

# Where an op fails for want of another worker, it does so with one of these, and up to 10 s before the news that the
# other one is frozen.
_THEIRS = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError, tf.errors.InternalError,
           tf.errors.CancelledError)  # fmt: skip
_THEIRS_SECONDS, _OURS_SECONDS = 30.0, 3.0
_IMPORTED = time.perf_counter()
MODES = ("train", "eval", "train_and_eval", "train_and_post_eval", "continuous_eval")

# The flags of every binary: (name, define, default, help). README.md's table is checked against it.
FLAGS = (
    ("model_dir", flags.DEFINE_string, None, "The run directory: checkpoints, metrics, run.json, TensorBoard events."),
    ("mode", flags.DEFINE_enum, "train_and_eval", "What to do.", MODES),
    ("train_steps", flags.DEFINE_integer, 1000, "The global step to train to; -1 trains to the end of the data."),
    ("global_batch_size", flags.DEFINE_integer, 64, "Examples of one step over all replicas."),
    ("strategy", flags.DEFINE_enum, "auto", "Devices; auto: a TPU, else all GPUs, else the CPU.", runtime.STRATEGIES),
    ("tpu", flags.DEFINE_string, None, "Name or address of a TPU."),
    ("tpu_cores_per_replica", flags.DEFINE_integer, 1, "Cores of a TPU that one replica has for itself."),
    ("tpu_spmd", flags.DEFINE_boolean, False, "Divides a replica over its TPU cores by the shardings of its tensors."),
    ("join_limit", flags.DEFINE_float, 60.0, "Seconds that a worker waits for the others to start."),
    ("num_virtual_devices", flags.DEFINE_integer, 1, "Replicas to make on one CPU."),
    ("steps_per_loop", flags.DEFINE_integer, 100, "Steps of one call into the device, and of one report."),
    ("loop", flags.DEFINE_enum, "graph", "The loop's engine; auto finds the fastest; eager is for debugging.", ENGINES),
    ("eval_interval", flags.DEFINE_integer, 1000, "Steps between evaluations."),
    ("eval_steps", flags.DEFINE_integer, -1, "Steps of each evaluation; -1 evaluates all data."),
    ("eval_timeout", flags.DEFINE_float, None, "Seconds that continuous_eval waits for a checkpoint; none waits on."),
    ("checkpoint_interval", flags.DEFINE_integer, 1000, "Steps between checkpoints."),
    ("keep_last", flags.DEFINE_integer, 5, "How many of the newest checkpoints to keep."),
    ("keep_best", flags.DEFINE_string, None, "Keeps the best checkpoint too: max:eval/score, or eval/loss."),
    ("keep_every", flags.DEFINE_integer, None, "Keeps the checkpoints at multiples of this many steps too."),
    ("warm_start", flags.DEFINE_string, None, "Checkpoint or SavedModel that a new run takes its weights from."),
    ("continue_from", flags.DEFINE_string, None, "Checkpoint of Orbit or Model Garden that a new run goes on from."),
    ("start_anew", flags.DEFINE_boolean, False, "Lets a run whose checkpoints are all damaged or gone start over."),
    ("partial_restore", flags.DEFINE_boolean, False, "Resumes with what a checkpoint and the model have in common."),
    ("non_finite", flags.DEFINE_enum, "halt", "What a NaN or infinite loss, gradient or weight does.", guards.POLICIES),
    ("spike_score", flags.DEFINE_float, 0.0, "Robust z-score of the loss that leads to a rollback; 0 looks at none."),
    ("loss_limit", flags.DEFINE_float, None, "A reported loss above this leads to on_spike; none looks at none."),
    ("loss_limit_from", flags.DEFINE_integer, 0, "The first step whose report loss_limit holds for."),
    ("on_spike", flags.DEFINE_enum, "rollback", "What a jump, or a loss above loss_limit, does.", ("halt", "rollback")),
    ("rollbacks", flags.DEFINE_integer, 3, "How often a run may go back to a checkpoint."),
    ("stall_limit", flags.DEFINE_float, None, "Seconds without progress that end the run; 0 never, none learns them."),
    ("seed", flags.DEFINE_integer, 0, "Seeds initial weights, data order and everything else."),
    ("deterministic", flags.DEFINE_boolean, False, "Makes every op deterministic, at a cost; --loop=auto is graph."),
    ("mixed_precision", flags.DEFINE_enum, "float32", "The Keras precision policy.", runtime.PRECISIONS),
)  # fmt: skip


def run(build, config=None, argv=None, settings=None, started=None, actions=(), **defaults):
    """Defines the flags, parses the command line, runs the experiment and exits the process.

    Exit codes: 0 done; 1 failed; 75 ended by SIGTERM, SIGINT, SIGHUP or SIGXCPU and saved, to be run again; 76 ended by
    the watchdog. A failure's last line on standard error says what to do.

    Args:
      build: function of the parsed config, called under the strategy's scope; returns `(trainer, evaluator)`, where
        evaluator is an `Evaluator`, a dict from name to `Evaluator`, or None.
      config: a dataclass instance with the experiment's own settings, each a flag `--config.<field>=<value>`; default
        None for none, with which `build` is called then.
      argv: the command line; default `sys.argv`.
      settings: in place of `config`, a function without arguments that is called once the command line is parsed, for a
        binary whose settings come from elsewhere; returns `(config, values)`: what `build` is given, with an `as_dict`
        for `run.json`, and a dict of values for the flags that the command line leaves out.
      started: function of `(config, controller)`, called before the first step of a run that may start, as its
        directory is its own and its checkpoint fits.
      actions: callables that take an `Event`, see `Controller`.
      **defaults: other default values for flags, such as `train_steps=2000`.
    """
    if settings is None and config is not None and not dataclasses.is_dataclass(config):
        raise TypeError(f"config is a {type(config).__name__}; expected an instance of a dataclass")
    for name, define, default, help_text, *values in FLAGS:
        arguments = [values[0]] if values else []
        define(name, defaults.pop(name, default), *arguments, help=help_text)
    if defaults:
        raise TypeError(f"launch.run got defaults for flags that do not exist: {', '.join(sorted(defaults))}")
    if settings is None:
        settings = _define_config(config, argv) if config is not None else lambda: (None, {})
    for name, *_ in FLAGS:  # so that --help shows them
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    console.guard()  # to the end of the process
    gc.freeze()  # what is imported stays: the collector need not go through it, least of all as the process ends
    app.run(lambda argv: _main(build, settings, started, actions, argv), argv=argv)


def _define_config(config, argv):
    """Makes a flag of each field; returns a `settings` function."""
    try:
        parsed = config_flags.DEFINE_config_dataclass("config", config, sys_argv=argv)  # reads the command line already
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        fields = ", ".join(field.name for field in dataclasses.fields(config))
        _fail(
            f"a --config flag is wrong: {error.args[0] if error.args else error}; expected one of the fields {fields}"
        )
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS["config"])
    return lambda: (parsed.value, {})


def _main(build, settings, started, actions, argv):
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.INFO)
        # TensorFlow's own notes are left out; its warnings and errors stay.
        tf.get_logger().setLevel("WARNING")
        logging.get_absl_handler().addFilter(
            lambda record: (
                record.levelno >= logging.converter.ABSL_TO_STANDARD[logging.WARNING]
                or os.path.dirname(tf.__file__) not in record.pathname
            )
        )
    with notice.listening(to_the_end=True):
        _run_experiment(build, settings, started, actions, argv)


def _run_experiment(build, settings, started, actions, argv):
    from looplib.extras.tools import preflight

    controller = strategy = None
    values = {name: flags.FLAGS[name].value for name, *_ in FLAGS}
    try:
        config, others = settings()
        values.update({name: value for name, value in others.items() if not flags.FLAGS[name].present})
        values.update(preflight.settings())
        values["loop"] = _engine(values)
        _check(values, argv)
        report_path = run_json.path_of(values["model_dir"], "train" in values["mode"])
        earlier = run_json.read(report_path)
        strategy = runtime.setup(
            values["strategy"],
            tpu=values["tpu"],
            num_virtual_devices=values["num_virtual_devices"],
            seed=values["seed"],
            deterministic=values["deterministic"],
            mixed_precision=values["mixed_precision"],
            tpu_cores_per_replica=values["tpu_cores_per_replica"],
            tpu_spmd=values["tpu_spmd"],
            join_limit=values["join_limit"],
        )
        if not Workers(strategy).is_chief and not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # one line of progress is enough
        controller = _make_controller(build, config, values, strategy, actions)
        if preflight.requested():
            preflight.answer(controller)
            sys.exit(EXIT_DONE)
        controller.clock.add("start", max(0.0, _process_seconds() - controller.clock.seconds()["wall"]))
        if started:
            started(config, controller)
        _run_mode(controller, values)
        controller.close()
        controller.report.write("done")
        if controller.is_chief:
            print(*controller.clock.summary(), sep="\n")
            print(f"done at step {controller.global_step}; the run directory is {values['model_dir']}", flush=True)
    except CoordinatorGone as gone:
        _end_server(gone, earlier, run_json.read(report_path))
    except Preempted as preempted:
        if controller:
            controller.close()
            controller.report.write("preempted")
            if controller.is_chief:
                print(*controller.clock.summary(), sep="\n")
        print(f"looplib: {preempted}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if preempted.alone:
            peers.current.last_words(EXIT_PREEMPTED, str(preempted))
        else:
            peers.current.leave()
        os._exit(EXIT_PREEMPTED)  # all is saved and closed, and Python's own end would wait for an input that stalls
    except UsageError as error:
        logging.debug("where it was raised:", exc_info=True)
        _fail(str(error), controller)
    except Exception as error:  # the boundary of the process: whatever went wrong, the last line says what to do
        # Ends the process in here if the error is one that another worker's end has led to.
        peers.current.first_cause(_THEIRS_SECONDS if isinstance(error, _THEIRS) else _OURS_SECONDS)
        kept = controller and controller.latest_checkpoint
        advice = f"the same command goes on from {kept}" if kept else "nothing was saved before it"
        if read(error).kind == "BdbQuit":
            sentence = f"the debugger was quit, which ends the run and is no error of the program; {advice}"
            _fail(sentence, controller)
        traceback.print_exc()
        if tpu.is_lost(strategy, error):
            _start_again(kept, controller)
        _fail(f"{_what_and_where(error, controller)}, and {advice}", controller)
    peers.current.leave()
    _exit(EXIT_DONE)


def _make_controller(build, config, values, strategy, actions):
    with strategy.scope():
        built = build(config)
    if not isinstance(built, tuple) or len(built) != 2:
        raise UsageError(
            f"build returned a {type(built).__name__}; expected (trainer, evaluator), with None in place of an "
            "evaluator if there is none"
        )
    trainer, evaluator = built
    mode = values["mode"]
    if mode != "train" and evaluator is None:
        raise UsageError(f"--mode={mode} needs an evaluator, and this binary has none; use --mode=train")
    controller = Controller(
        trainer=trainer if "train" in mode else None,
        evaluator=evaluator if "eval" in mode else None,
        strategy=strategy,
        global_batch_size=values["global_batch_size"],
        model_dir=values["model_dir"],
        steps_per_loop=values["steps_per_loop"],
        loop=values["loop"],
        seed=values["seed"],
        checkpoints=_policy(values),
        actions=actions,
        config=config,
    )
    controller.report.flags = values
    return controller


def _what_and_where(error: Exception, controller: Controller | None) -> str:
    """What an error says and the user's line that it comes from, with what to do."""
    found = read(error)
    because = f" (because of {read(error.__cause__)})" if error.__cause__ else ""
    loops = controller.loops.values() if controller else ()
    place = source_locations.place_of(error) or next((place for loop in loops if (place := loop.place_of(error))), "")
    return f"{found}{because}; mend {place or 'what the trace above names'}"


def _finish(controller, status, sentence=""):
    if controller is None:
        return
    for finish in (controller.close, lambda: controller.report.write(status, sentence)):
        try:
            finish()
        except Exception as error:  # the disk may be full, and the sentence must come out all the same
            logging.error("%s", error)


def _start_again(kept, controller):
    """After the loss of a TPU; what is on it cannot be saved any more."""
    _finish(controller, "restarted")
    try:
        tpu.start_again(int(kept.rsplit("-", 1)[1]) if kept else 0)
    except UsageError as error:
        _fail(str(error))


def _fail(sentence, controller=None):
    _finish(controller, "failed", sentence)
    tf.get_logger().setLevel("ERROR")  # its warnings as objects are deleted would come after the last line
    sys.stdout.flush()
    peers.current.last_words(EXIT_FAILED, sentence)  # and if another worker failed first, the line is about that one
    print(f"looplib: error: {sentence}", file=sys.stderr, flush=True)
    _exit(EXIT_FAILED)


def _exit(code):
    """Ends the process, at once where TensorFlow would go on to wait for other processes, or complain of those gone."""
    from looplib.extras.parameter_server import processes

    if processes.connected() or peers.current.joined:
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _end_server(gone, earlier, report):
    """Ends a worker or parameter server as its run has ended, going by the run's report if there is a new one."""
    status = report.get("status") if report != earlier else "not known"
    status = "killed" if status == "running" else status
    code = {"done": EXIT_DONE, "preempted": EXIT_PREEMPTED}.get(status, EXIT_FAILED)
    advice = "" if code == EXIT_DONE else "; start all processes again to go on"
    print(f"looplib: {gone}; how the run ended: {status}{advice}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)  # a server has no end of its own


def _engine(values):
    """The engine of --loop; a choice by time is no choice for a run that is to do the same each time."""
    return "graph" if values["deterministic"] and values["loop"] == "auto" else values["loop"]


def _process_seconds():
    """Seconds since the process started; where the system does not say, since this module was imported."""
    try:
        with open("/proc/self/stat") as file:
            started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED


def _policy(values):
    keep = [KeepLast(values["keep_last"])]
    if values["keep_best"]:
        mode, colon, metric = values["keep_best"].partition(":")
        keep.append(KeepBest(metric, mode) if colon else KeepBest(mode))
    if values["keep_every"] is not None:
        keep.append(KeepEvery(values["keep_every"]))
    return CheckpointPolicy(
        every_steps=values["checkpoint_interval"],
        keep=tuple(keep),
        partial=values["partial_restore"],
        warm_start=values["warm_start"] or "",
        continue_from=values["continue_from"] or "",
        start_anew=values["start_anew"],
        guards=Guards(
            non_finite=values["non_finite"],
            spike_score=values["spike_score"],
            loss_limit=math.inf if values["loss_limit"] is None else values["loss_limit"],
            loss_limit_from=values["loss_limit_from"],
            on_spike=values["on_spike"],
            rollbacks=values["rollbacks"],
            stall_limit=values["stall_limit"],
        ),
    )


def _check(values, argv):
    if len(argv) > 1:
        raise UsageError(f"unexpected argument {argv[1]!r}; every setting is a flag, --name=value (see --help)")
    if not values["model_dir"]:
        raise UsageError("--model_dir is missing; name the directory for this run's checkpoints and metrics")
    for name in ("eval_interval", "checkpoint_interval", "steps_per_loop", "num_virtual_devices", "global_batch_size"):
        if values[name] < 1:
            raise UsageError(f"--{name} is {values[name]}; expected at least 1")
    for name in ("train_steps", "eval_steps"):
        if values[name] < 1 and values[name] != -1:
            raise UsageError(f"--{name} is {values[name]}; expected at least 1, or -1 for all data")


def _run_mode(controller, values):
    """Does what --mode asks for."""
    mode, train_steps, eval_steps = values["mode"], values["train_steps"], values["eval_steps"]
    if mode == "train_and_eval":
        controller.train_and_evaluate(train_steps, values["eval_interval"], eval_steps)
    elif mode == "continuous_eval":
        until = train_steps if train_steps > 0 else None
        controller.evaluate_continuously(eval_steps, until_step=until, timeout=values["eval_timeout"])
    if mode in ("train", "train_and_post_eval"):
        controller.train(train_steps)
    if mode in ("eval", "train_and_post_eval"):
        controller.evaluate(eval_steps)
