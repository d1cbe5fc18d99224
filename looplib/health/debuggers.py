"""Debuggers: a process that one holds makes no progress, and has not stalled."""

import sys

# Packages with a frame on the stack of a thread that a debugger holds; and those of consoles, which a step may open.
_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"}
_CONSOLES = {"code", "IPython"}
_AROUND_STEPS = "looplib.controller"


def hold_a_thread() -> bool:
    """Returns whether a debugger, or a console inside of a step, holds one of this process's threads.

    This recognizes `pdb` and other debuggers built on `bdb`, debugpy and PyCharm's debugger (pydevd), `code.interact`
    and `IPython.embed`. It does not recognize a plain `input()`, which leaves no frame.
    """
    for frame in sys._current_frames().values():
        console = False
        while frame is not None:
            module = frame.f_globals.get("__name__") or ""
            root = module.partition(".")[0]
            console = console or root in _CONSOLES
            # The console that a run was started in is further out on the stack than the run, and holds nothing.
            if root in _DEBUGGERS or (console and module == _AROUND_STEPS):
                return True
            frame = frame.f_back
    return False
