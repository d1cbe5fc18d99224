"""Stands for `python` on a command line: has a fork server fork the process, and lives and ends as that one does."""

import json
import os
import signal
import socket
import sys

_FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
    signal.SIGABRT,
)  # fmt: skip


def connect(address, streams, /, **order):
    """Asks a server for a process; returns the lines of its answer, a file: the process id, and later its status."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(order).encode() + b"\n"], streams)
    return connection.makefile("r")


def main(address):
    """Runs the command line in a fork of the server's, whose streams, folder, variables and signals are this one's."""
    ignored = [number for number in _FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    answers = connect(
        address, [0, 1, 2], arguments=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ), ignored=ignored
    )
    pid = int(answers.readline())

    def forward(number, _):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has just ended

    for number in _FORWARDED:  # the process itself ignores those that this one was started to ignore
        signal.signal(number, forward)
    code = os.waitstatus_to_exitcode(int(answers.readline()))
    if code < 0:
        if -code != signal.SIGKILL:  # which has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
