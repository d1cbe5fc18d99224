"""Runs a program without what Linux alone has: `python like_macos.py FILE ARGUMENT...`."""

import builtins
import os
import runpy
import sys
import time

import tensorflow as tf  # noqa: F401  (it is made for the system that it runs on)

REAL = builtins.open


def opened(file, *arguments, **options):
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return REAL(file, *arguments, **options)


if __name__ == "__main__":
    builtins.open = opened
    for name in ("waitid", "P_PID", "WNOWAIT", "WEXITED", "sched_getaffinity", "posix_fadvise"):
        delattr(os, name)
    del time.CLOCK_BOOTTIME
    sys.platform = "darwin"
    sys.argv[:] = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
