"""Signals, sent to this very process while it trains, evaluates, saves, traces or waits for its input."""

import contextlib
import faulthandler
import functools
import json
import os
import signal
import subprocess
import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy
from paths import PYTHONPATH

import looplib
from looplib.cluster import preemption
from looplib.cluster.preemption import Preempted, notice
from looplib.loop import device_loop
from looplib.run import commits

DEFAULT = make_strategy("default")


class Quiet(toy.Regression):
    """The regression without its ids; with a pause in each step, and in what `pause` names."""

    def __init__(self, seconds=0.0):
        super().__init__(optimizer="adam")
        self.seconds = seconds
        self.traced = 0

    def step_fn(self, inputs):
        self.traced += 1
        if self.seconds:
            inputs = (*inputs[:2], tf.numpy_function(self._sleep, [inputs[2]], tf.int64))
            inputs[2].set_shape([None])
        outputs = super().step_fn(inputs)
        del outputs["ids"]
        return outputs

    def _sleep(self, labels):
        time.sleep(self.seconds)
        return labels

    def loop_end(self, metrics):
        return metrics


@contextlib.contextmanager
def signal_when(condition, signum=signal.SIGTERM):
    """Sends a signal from another thread once a condition holds; yields a list that gets the time of it."""
    sent = []

    def send():
        while not condition():
            time.sleep(0.005)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    yield sent
    thread.join(10)


@functools.cache
def weights_of_an_uninterrupted_run(steps):
    trainer = Quiet()
    toy.controller(DEFAULT, trainer, steps_per_loop=4).train(steps)
    return trainer.weights()


def finish(tmp_path, steps=40, **settings):
    """Runs the same program again, to the end; checks that it comes out as if nothing had happened."""
    trainer = Quiet()
    settings = {"steps_per_loop": 4, "model_dir": tmp_path, **settings}
    with toy.controller(DEFAULT, trainer, **settings) as controller:
        controller.train(steps)
    for a, b in zip(trainer.weights(), weights_of_an_uninterrupted_run(steps)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow(keep=1)  # each other signal has a test below
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
@pytest.mark.parametrize("signum", preemption.SIGNALS)
def test_the_current_step_ends_and_is_saved_not_the_loop(signum, name, tmp_path):
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Quiet(0.1)
    controller = toy.controller(strategy, trainer, model_dir=tmp_path, steps_per_loop=10_000)
    with signal_when(lambda: controller.global_step >= 5, signum) as sent:
        with pytest.raises(Preempted, match=f"ended by {signal.Signals(signum).name} at step .*saved in") as error:
            controller.train(10_000)
        took = time.monotonic() - sent[0]
    assert error.value.code == 75
    assert took < 10, f"{took:.2f} s"  # the loop would take 1,000 s
    step = controller.global_step
    assert 5 <= step <= 8
    assert [done.step for done in commits.committed(str(tmp_path / "checkpoints"))] == [step]
    controller.close()
    if name == "default":
        finish(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_the_current_step_of_many_ops_ends_not_the_loop(ends, monkeypatch):
    monkeypatch.setattr(device_loop, "_MANY_OPS", 0)
    trainer = Quiet(0.1)
    if ends:
        trainer.dataset = lambda context: toy.Regression.dataset(trainer, context).take(10_000)
    controller = toy.controller(DEFAULT, trainer, steps_per_loop=10_000)
    with signal_when(lambda: controller.global_step >= 5):
        with pytest.raises(Preempted):
            controller.train(10_000)
    assert 5 <= controller.global_step <= 8


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["graph", "xla"])
def test_fast_steps_stop_within_a_fraction_of_a_second_too(loop):
    trainer = Quiet()
    controller = toy.controller(DEFAULT, trainer, steps_per_loop=100_000_000, loop=loop)
    controller.train(2_000)
    with signal_when(lambda: controller.global_step > 5_000) as sent:
        with pytest.raises(Preempted):
            controller.train(100_000_000)
        assert time.monotonic() - sent[0] < 5  # the loop would take hours


@pytest.mark.slow
def test_handlers_are_put_back_and_a_later_training_goes_on():
    before = [signal.getsignal(signum) for signum in preemption.SIGNALS]
    trainer = Quiet(0.05)
    controller = toy.controller(DEFAULT, trainer, steps_per_loop=1000)
    with signal_when(lambda: controller.global_step >= 2), pytest.raises(Preempted, match="without a model_dir"):
        controller.train(1000)
    assert [signal.getsignal(signum) for signum in preemption.SIGNALS] == before
    step = controller.global_step
    controller.train(step + 3)
    assert controller.global_step == step + 3


@pytest.mark.slow
def test_during_an_evaluation_it_is_left_out_and_done_again(tmp_path):
    class Slow(toy.RegressionEvaluator):
        def step_fn(self, inputs):
            slow = tf.numpy_function(lambda y: (time.sleep(0.3), y)[1], [inputs[1]], tf.int64)
            return super().step_fn((inputs[0], tf.ensure_shape(slow, [None])))

    records = []
    trainer = Quiet()
    controller = toy.controller(
        DEFAULT, trainer, Slow(trainer.model), model_dir=tmp_path, actions=[lambda e: records.append((e.split, e.step))]
    )
    with signal_when(lambda: controller._loops.progress()[1] >= 1):
        with pytest.raises(Preempted, match="at step 4, saved in"):
            controller.train_and_evaluate(8, eval_interval=4)
    assert ("eval", 4) not in records
    controller.close()
    trainer = Quiet()
    with toy.controller(
        DEFAULT, trainer, toy.RegressionEvaluator(trainer.model), model_dir=tmp_path,
        actions=[lambda e: records.append((e.split, e.step))],
    ) as controller:  # fmt: skip
        controller.train_and_evaluate(8, eval_interval=4)
    assert [record for record in records if record[0] == "eval"] == [("eval", 4), ("eval", 8)]
    for a, b in zip(trainer.weights(), weights_of_an_uninterrupted_run(8)):
        np.testing.assert_array_equal(a, b)


def test_during_a_save_the_save_is_finished_first(tmp_path, monkeypatch):
    write, writing = commits.commit, threading.Event()

    def slowly(*arguments):
        writing.set()
        time.sleep(0.5)
        return write(*arguments)

    monkeypatch.setattr(commits, "commit", slowly)
    trainer = Quiet(0.02)
    policy = looplib.CheckpointPolicy(every_steps=4)
    controller = toy.controller(DEFAULT, trainer, model_dir=tmp_path, steps_per_loop=4, checkpoints=policy)
    with signal_when(writing.is_set), pytest.raises(Preempted, match="saved in"):
        controller.train(1000)
    monkeypatch.undo()
    newest = commits.newest(str(tmp_path / "checkpoints"))
    assert newest.step == controller.global_step and not commits.verify(newest)
    controller.close()
    finish(tmp_path)


@pytest.mark.slow
def test_while_a_step_is_traced_the_process_ends_at_once(tmp_path):
    class SlowToTrace(Quiet):
        def step_fn(self, inputs):
            for _ in range(1000):
                self.tracing = True
                time.sleep(0.01)
            return super().step_fn(inputs)

    trainer = SlowToTrace()
    trainer.tracing = False
    with signal_when(lambda: trainer.tracing) as sent, notice.listening():
        with pytest.raises(Preempted, match="during start-up or while waiting; no progress is lost"):
            toy.controller(DEFAULT, trainer, model_dir=tmp_path)
    assert time.monotonic() - sent[0] < 5  # the trace would take 10 s
    finish(tmp_path)


STALLED = """
import sys, time
sys.path[:0] = {path!r}
import tensorflow as tf
import toy, looplib
from looplib.cluster import preemption
preemption.GRACE_SECONDS = {grace}

class Stalling(toy.Regression):
    def dataset(self, context):
        def slow(i):
            if {stalls} and i[0] == first_of_step_10:
                print("stalled", flush=True)
                time.sleep(1000)
            return i
        data = super().dataset(context)
        first_of_step_10 = next(iter(data.skip(9)))[0][0]
        return data.map(lambda i, x, y: (tf.ensure_shape(tf.numpy_function(slow, [i], tf.int64), [8]), x, y))

    def step_fn(self, inputs):
        outputs = super().step_fn(inputs)
        del outputs["ids"]
        return outputs

    def loop_end(self, metrics):
        return metrics

trainer = Stalling()
policy = looplib.CheckpointPolicy(every_steps=4)
controller = looplib.Controller(
    looplib.RunConfig(global_batch_size=8, steps_per_loop=1000),
    trainer=trainer,
    model_dir={folder!r},
    checkpoints=policy,
    guards=looplib.Guards(stall_limit={limit}),
    writers=[],
)
controller.train(20)
print("weights", [w.tolist() for w in trainer.weights()])
"""


def program(template, tmp_path, **values):
    """The text of a program that imports this folder's files, with a run directory of its own."""
    return template.format(path=PYTHONPATH.split(os.pathsep), folder=str(tmp_path / "run"), **values)


@contextlib.contextmanager
def start(python, tmp_path, stalls, limit=None, grace=2.0):
    text = program(STALLED, tmp_path, stalls=stalls, limit=limit, grace=grace)
    with subprocess.Popen([python, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # where it was to end by itself and has not


@pytest.mark.slow
def test_a_stalled_input_ends_within_the_bound_and_loses_no_example(python, tmp_path):
    """Nobody can save in the midst of a step; what was done since the last checkpoint is done again."""
    with start(python, tmp_path, True) as process:
        while process.stdout.readline() != "stalled\n":
            assert process.poll() is None, process.stderr.read()
        time.sleep(0.5)
        sent = time.monotonic()
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 75, errors
    assert time.monotonic() - sent < 10  # the test's process allows 2 s; the default is 15 s
    assert "the current step did not end in time" in errors
    assert commits.newest(str(tmp_path / "run" / "checkpoints")).step == 8
    with start(python, tmp_path, False) as process:
        output, errors = process.communicate(timeout=120)
    expected = [weight.tolist() for weight in whole_regression(20)]
    assert output.strip() == f"weights {expected}", errors


@functools.cache
def whole_regression(steps):
    trainer = toy.Regression()
    toy.controller(DEFAULT, trainer).train(steps)
    return trainer.weights()


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(python, tmp_path):
    with start(python, tmp_path, True, grace=30.0) as process:
        while process.stdout.readline() != "stalled\n":
            assert process.poll() is None, process.stderr.read()
        time.sleep(0.5)  # the input reads ahead of the step that will wait for it
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        sent = time.monotonic()
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM and time.monotonic() - sent < 15
    assert "received a second signal (SIGTERM): exiting without a save" in errors


INTERRUPTED = """
import os, pathlib, signal, sys, threading, time
sys.path[:0] = {path!r}
import tensorflow as tf
import toy, looplib
from looplib.cluster import preemption
preemption.GRACE_SECONDS = {grace}
sys.ps1 = {ps1!r}  # as a console and a notebook have it
if sys.ps1 is None:
    del sys.ps1

class Slow(toy.Regression):
    def step_fn(self, inputs):
        ids, x, y = inputs
        y = tf.ensure_shape(tf.numpy_function(self.sleep, [y, self.global_step], tf.int64), y.shape)
        outputs = super().step_fn((ids, x, y))
        del outputs["ids"]
        return outputs

    def loop_end(self, metrics):
        return metrics

    def sleep(self, y, step):
        if step == 5 and not again:
            pathlib.Path({folder!r} + ".pid").write_text(str(os.getpid()))
            print("in step 6", flush=True)
            time.sleep({step})
        return y

again = []
trainer = Slow()
controller = looplib.Controller(
    looplib.RunConfig(global_batch_size=8, steps_per_loop=1000), trainer=trainer, model_dir={folder!r}, writers=[]
)
if {first}:
    controller.train({first})  # what follows is traced and compiled
took = lambda: sum(map(controller.clock.of, ("train", "input", "suspended")))
before = took()
try:
    controller.train(20)
    seconds = took() - before
    print("left out:", seconds - (20 - {first}) * preemption.notice.step_seconds, file=sys.stderr)
except KeyboardInterrupt:
    print("KeyboardInterrupt at step", controller.global_step, flush=True)
again.append(True)
controller.train(20)
print("weights", [w.tolist() for w in trainer.weights()])
"""


def interrupted(python, tmp_path, signums, ps1=None, grace=1.0, step=3.0, ignored=(), first=0):
    """Sends signals in step 6 of a program with a controller of its own; returns (code, output, errors)."""

    def ignore():
        for signum in ignored:
            signal.signal(signum, signal.SIG_IGN)

    text = program(INTERRUPTED, tmp_path, ps1=ps1, grace=grace, step=step, first=first)
    command = [python, "-c", text]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=ignore
    ) as process:
        while process.stdout.readline() != "in step 6\n":
            assert process.poll() is None, process.stderr.read()
        for signum in signums:
            if signum in (signal.SIGSTOP, signal.SIGCONT):  # which what stands for Python cannot pass on
                os.kill(int((tmp_path / "run.pid").read_text()), signum)
            else:
                process.send_signal(signum)
            time.sleep(3.5 if signum == signal.SIGSTOP else 0.3)
        output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


@pytest.mark.slow
def test_a_second_interrupt_raises_in_a_session_once_the_op_has_ended_and_training_goes_on(python, tmp_path):
    code, output, errors = interrupted(python, tmp_path, [signal.SIGINT, signal.SIGINT], ps1=">>> ")
    assert code == 0, errors
    first, last = output.strip().splitlines()
    # Step 6 ends first, as Python cannot leave a TensorFlow op; a few of the fast ones may follow it.
    assert 6 <= int(first.removeprefix("KeyboardInterrupt at step ")) < 20
    assert last == f"weights {[weight.tolist() for weight in whole_regression(20)]}"
    assert "(a second one raises KeyboardInterrupt)" in errors
    assert "the current step has not ended yet" in errors  # at the end of the grace, which ends no session


@pytest.mark.slow
def test_a_second_sigterm_leaves_at_once_in_any_process(python, tmp_path):
    started = time.monotonic()
    code, _, errors = interrupted(python, tmp_path, [signal.SIGINT, signal.SIGTERM], ps1=">>> ")
    assert code == 128 + signal.SIGTERM, errors
    assert "received a second signal (SIGTERM): exiting without a save" in errors and time.monotonic() - started < 60


@pytest.mark.slow
def test_two_interrupts_of_a_program_in_a_step_that_does_not_end_leave_within_the_bound(python, tmp_path):
    code, output, errors = interrupted(python, tmp_path, [signal.SIGINT, signal.SIGINT])
    assert code == 75 and not output, errors
    assert "the current step did not end in time" in errors


REPEATED = [signal.SIGXCPU, signal.SIGUSR2, signal.SIGHUP, signal.SIGUSR1]


class Signalled(Quiet):
    """Sends a signal to this process, three times in one step, where one is to be sent."""

    signum = None

    def _sleep(self, labels):
        for _ in range(3 if self.signum else 0):
            os.kill(os.getpid(), self.signum)
            time.sleep(0.05)
        self.signum = None
        return super()._sleep(labels)


def test_each_hangup_or_notice_ends_a_training_and_changes_nothing_when_it_comes_again():
    trainer = Signalled(0.01)
    controller = toy.controller(DEFAULT, trainer, steps_per_loop=10_000)
    for count, signum in enumerate(REPEATED, 1):
        trainer.signum = signum
        with pytest.raises(Preempted, match=f"ended by {signum.name} at step"):
            controller.train(10_000)
        assert controller.global_step < 50 * count


@pytest.mark.slow
@pytest.mark.parametrize("signum", REPEATED)
def test_a_hangup_or_notice_that_comes_again_changes_nothing(signum, python, tmp_path):
    code, output, errors = interrupted(python, tmp_path, [signum] * 3, grace=30.0)
    assert code == 75 and not output, errors
    assert f"received {signum.name}: the run ends after the current step (a second one has no effect)" in errors
    assert commits.newest(str(tmp_path / "run" / "checkpoints")).step >= 6


@pytest.mark.slow
def test_a_signal_that_was_ignored_when_the_process_started_stays_ignored(python, tmp_path):
    code, output, errors = interrupted(python, tmp_path, REPEATED, ignored=REPEATED)
    assert code == 0, errors
    assert output == f"weights {[weight.tolist() for weight in whole_regression(20)]}\n"


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_handlers_of_the_program_for_the_signals_of_users_stay(when, tmp_path):
    """In Python, and in C, where only the operating system knows of it; in the training and after it."""
    taken, path = [], tmp_path / "stacks"

    def install():
        signal.signal(signal.SIGUSR2, lambda *_: taken.append("usr2"))
        faulthandler.register(signal.SIGUSR1, file)

    def act(event):
        if event.step == 1 and when == "meanwhile":
            install()
        if event.step == 2:
            send()
            time.sleep(0.5)  # the thread that listens would see it

    def send():
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), signum)

    with open(path, "w") as file, toy.controller(DEFAULT, Quiet(), actions=[act]) as controller:
        try:
            if when == "before":
                install()
            for steps in (4, 8):  # the second training finds them
                controller.train(steps)
                send()
                assert controller.global_step == steps
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert taken == ["usr2"] * 3 and path.read_text().count("(most recent call first)") >= 3


def test_more_than_two_intervals_between_two_looks_are_a_suspension(monkeypatch):
    now = 100.0
    monkeypatch.setattr(preemption, "time", types.SimpleNamespace(monotonic=lambda: now))
    running, ran = preemption.RunningTime(0.2), []
    for pause in (0.2, 0.3, 3.5, 0.2):
        now += pause
        ran.append(running.since_last())
    assert ran == pytest.approx([0.2, 0.3, 0.4, 0.2]) and running.suspended == pytest.approx(3.1)
    now += 1.0  # before the next look
    assert running.suspended == pytest.approx(3.7)


@pytest.mark.slow
def test_time_in_which_the_process_is_suspended_does_not_count_for_the_step(python, tmp_path):
    """The step ends after 1.5 s of running time; the grace of 3 s, by the wall, is over while it is suspended."""
    code, _, errors = interrupted(
        python, tmp_path, [signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT], grace=3.0, step=5.0
    )
    assert code == 75 and "did not end in time" not in errors, errors
    assert commits.newest(str(tmp_path / "run" / "checkpoints")).step >= 6
    seconds = json.loads((tmp_path / "run" / "run.json").read_text())[
        "seconds"
    ]  # by phase: 3.5 s, with looks each 0.2 s
    assert seconds["suspended"] >= 3 and sum(seconds.values()) == pytest.approx(2 * seconds["wall"], abs=0.01)


@pytest.mark.slow
def test_time_in_which_the_process_is_suspended_is_no_part_of_a_steps_time(python, tmp_path):
    """In the second call a step takes 5 s, in 3.5 s of which the process is suspended; looks come each 0.2 s."""
    code, _, errors = interrupted(python, tmp_path, [signal.SIGSTOP, signal.SIGCONT], step=5.0, first=5)
    assert code == 0, errors
    assert float(errors.rpartition("left out: ")[2].split()[0]) > 2.5, errors


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("first", preemption.SIGNALS)
def test_a_second_interrupt_while_python_runs_raises_too(first):
    def act(event):
        os.kill(os.getpid(), first)
        time.sleep(0.2)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        raised.append(True)

    raised, trainer = [], Quiet()
    with pytest.raises(Preempted), toy.controller(DEFAULT, trainer, actions=[act]) as controller:
        controller.train(4)
    assert raised == [True]


def test_the_watchdog_tells_where_every_thread_is_and_ends_the_process(python, tmp_path):
    with start(python, tmp_path, True, limit=3) as process:
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 76
    assert "in slow" in errors and "in train" in errors  # Python frames of the input's thread and of the main one
    last = errors.strip().splitlines()[-1]
    assert "no progress for" in last and "in the phase 'train' after " in last
    assert f"run the same command to resume from {tmp_path}/run/checkpoints/ckpt-8" in last
    assert commits.newest(str(tmp_path / "run" / "checkpoints")).step == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_signals_of_a_fork_are_its_own():
    """As of a pool of processes that an action uses, whose end sends them SIGTERM."""
    ended = []

    def act(event):
        if event.step == 2:
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(1)
            os.kill(child, signal.SIGTERM)
            ended.append(os.waitpid(child, 0)[1])
            time.sleep(0.3)  # the thread that listens would see it

    with toy.controller(DEFAULT, Quiet(), actions=[act]) as controller:
        controller.train(4)
        assert controller.global_step == 4 and ended == [signal.SIGTERM]
