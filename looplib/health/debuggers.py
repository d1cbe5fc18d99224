"""Debuggers: whether one holds the process, so that what stands still is no stall."""

import sys

# Packages with a frame on the stack of a thread that a debugger holds; and those of consoles, which a step may open.
_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"}
_CONSOLES = {"code", "IPython"}
_AROUND_STEPS = "looplib.controller"


def hold_a_thread() -> bool:
    """Whether a debugger, or a console inside of a step, holds one of this process's threads.

    Recognized are `pdb` and whatever is built on `bdb`, debugpy and PyCharm's debugger (pydevd), `code.interact` and
    `IPython.embed`. A plain `input()` leaves no frame, and is not.
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
