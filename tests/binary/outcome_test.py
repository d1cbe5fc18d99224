"""How runs end: exit code, status and last line by what ended them."""

import bdb

import pytest

from looplib.binary import outcome
from looplib.errors import CoordinatorGone, Preempted


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("alone", (False, True))
def test_a_signal_is_code_75_at_once_and_the_others_learn_of_it(alone):
    found = outcome.preempted(Preempted("ended by SIGTERM at step 3", alone=alone))
    assert (found.code, found.status, found.line) == (75, "preempted", "looplib: ended by SIGTERM at step 3")
    assert found.at_once and found.alone == alone and not found.is_news


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "status, code, ending",
    [
        ("done", 0, "status of the run: done"),
        ("preempted", 75, "status of the run: preempted; restart all processes to resume"),
        ("running", 1, "status of the run: killed; restart all processes to resume"),
        ("failed", 1, "status of the run: failed; restart all processes to resume"),
        ("not known", 1, "status of the run: not known; restart all processes to resume"),
    ],
)
def test_a_server_ends_as_its_run_did(status, code, ending):
    found = outcome.served(CoordinatorGone("ps 0 served"), status)
    assert found.code == code and found.line == f"looplib: ps 0 served; {ending}" and found.at_once


def test_an_error_of_the_program_is_code_1_with_its_line_its_cause_and_where_to_continue():
    error = ValueError("the printer is on fire")
    error.__cause__ = KeyError("tray")
    found = outcome.broken(error, "model.py:3: x = 1", "no checkpoint was saved")
    sentence = "ValueError: the printer is on fire (because of KeyError 'tray'); fix model.py:3: x = 1; no checkpoint was saved"
    assert (found.code, found.status, found.sentence) == (1, "failed", sentence)
    assert found.line == f"looplib: error: {sentence}" and found.alone
    assert (
        "; fix the line that the trace above names; " in outcome.broken(error, "", "no checkpoint was saved").sentence
    )


def test_a_debugger_that_is_quit_is_no_error_of_the_program():
    assert outcome.is_quit(bdb.BdbQuit()) and not outcome.is_quit(ValueError("BdbQuit"))
    found = outcome.broken(bdb.BdbQuit(), "model.py:3: x = 1", "no checkpoint was saved")
    assert found.sentence.startswith("the run was ended by quitting the debugger") and "model.py" not in found.sentence


def test_what_is_done_is_news_on_standard_output():
    found = outcome.done("done at step 3")
    assert (found.code, found.status, found.line) == (0, "done", "done at step 3") and found.is_news
