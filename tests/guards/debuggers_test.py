"""A debugger's prompt, a console and a suspended process are no stall; a step that hangs is one, also with --loop=eager."""

import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from paths import PYTHONPATH

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 2.0
PROGRAM = """
import dataclasses, sys, time
sys.path[:0] = {path!r}
import toy
from looplib import launch

@dataclasses.dataclass
class Config:
    pass

class Stops(toy.Regression):
    steps = 0

    def step_fn(self, inputs):
        outputs = super().step_fn(inputs)
        del outputs["ids"]
        self.steps += 1
        if self.steps == 6:
            {what}
        return outputs

    def loop_end(self, metrics):
        return metrics

launch.run(lambda config: (Stops(), None), Config(), mode="train", loop="eager", global_batch_size=8, steps_per_loop=1,
           train_steps=9, stall_limit={limit})
"""


def start(what, folder, python=sys.executable, **streams):
    program = folder / "program.py"
    program.write_text(PROGRAM.format(path=PYTHONPATH.split(os.pathsep), what=what, limit=LIMIT))
    return subprocess.Popen([python, program, f"--model_dir={folder}/run"], start_new_session=True, **streams)


class Terminal:
    """A program on a terminal of its own, and the person in front of it."""

    def __init__(self, what, folder, python):
        self._end, theirs = pty.openpty()
        self.process = start(what, folder, python, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.text = ""

    def read_until(self, prompt, seconds=60.0):
        """Reads until the text ends with a prompt; fails if the program ends before it."""
        deadline = time.monotonic() + seconds
        while not self.text.rstrip().endswith(prompt):
            assert time.monotonic() < deadline, self.text
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._end, 65536).decode(errors="replace")
                except OSError:  # the program has ended
                    raise AssertionError(self.text) from None

    def type(self, line):
        os.write(self._end, line.encode() + b"\n")

    def code(self):
        """Reads to the end of the program; returns its exit code."""
        try:
            self.read_until("\0", 60)
        except AssertionError:
            pass
        return self.process.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, prompt, leave",
    [
        pytest.param("breakpoint()", "(Pdb)", "continue", id="pdb"),
        pytest.param("import code; code.interact()", ">>>", "\x04", id="code.interact", marks=pytest.mark.slow),
    ],  # \x04: the end of the input
)
def test_a_prompt_in_a_step_may_wait_as_long_as_it_likes(what, prompt, leave, python, tmp_path):
    terminal = Terminal(what, tmp_path, python)
    terminal.read_until(prompt)
    time.sleep(3 * LIMIT)
    assert terminal.process.poll() is None, terminal.text
    if prompt == "(Pdb)":
        terminal.type("p self.steps")
        terminal.read_until("6\r\n(Pdb)")
        time.sleep(2 * LIMIT)
        terminal.type("n")
        terminal.read_until("(Pdb)")
        assert terminal.process.poll() is None, terminal.text
    terminal.type(leave)
    assert terminal.code() == 0, terminal.text
    assert "done at step 9" in terminal.text


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_does_not_end_the_process_after_the_grace(python, tmp_path):
    terminal = Terminal(
        "from looplib.cluster import preemption; preemption.GRACE_SECONDS = 1.0; breakpoint()", tmp_path, python
    )
    terminal.read_until("(Pdb)")
    terminal.process.send_signal(signal.SIGINT)
    terminal.read_until("ends the process at once", 10)
    time.sleep(2)
    assert terminal.process.poll() is None, terminal.text
    terminal.type("continue")
    assert terminal.code() == 75, terminal.text
    assert "ended by SIGINT at step 6, saved in" in terminal.text


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_in_the_eager_engine_too(python, tmp_path):
    with start(
        "time.sleep(1000)", tmp_path, python, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 76, errors
    assert "in step_fn" in errors and "no progress for" in errors.splitlines()[-1]


@pytest.mark.slow
def test_a_second_interrupt_of_a_binary_leaves_at_once(python, tmp_path):
    what = "print('here', flush=True); time.sleep(1000)"
    with start(what, tmp_path, python, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        text = ""
        while "here" not in text:
            text += process.stdout.readline()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        text += process.communicate(timeout=60)[0]
    assert process.returncode == 130, text
    assert text.splitlines()[-1] == "looplib: received a second signal (SIGINT): exiting without a save"


@pytest.mark.slow
def test_a_process_that_was_suspended_continues(tmp_path):
    slow = f"print('here', flush=True); time.sleep({LIMIT / 3})"
    with start(slow, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        text = ""
        while "here" not in text:
            text += process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(4 * LIMIT)
        process.send_signal(signal.SIGCONT)
        text += process.communicate(timeout=60)[0]
    assert process.returncode == 0, text


# With all garbage collected at once, the call of Python 3.11 that gives the frames of threads waits for itself.
COLLECTING = """
import gc, threading
from looplib.cluster import preemption

for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
gc.set_threshold(1)
for _ in range(500):
    local = threading.local()
    local.number = [1]
    ring = [local]
    ring.append(ring)
    del local, ring
    assert not preemption.debugger_holds_a_thread()
print("garbage is collected:", gc.isenabled())
"""


def test_a_look_at_the_threads_ends_whatever_garbage_there_is(python):
    done = subprocess.run([python, "-c", COLLECTING], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "garbage is collected: True\n", done.stderr
