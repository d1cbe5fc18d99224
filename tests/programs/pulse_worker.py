"""A worker that only joins its peers, and then does what it reads from standard input."""

import io
import os
import pathlib
import sys
import time

import without_tensorflow  # noqa: F401

from looplib.cluster import environment, rendezvous
from looplib.cluster.peers import WatchedPeers
from looplib.errors import UsageError


class _Stuck(io.RawIOBase):
    def writable(self):
        return True

    def write(self, data):
        time.sleep(1000)


def main(join_limit, silence_limit):
    me = environment.resolve()
    try:
        peers = WatchedPeers(me, join_limit, silence_limit=silence_limit)
    except UsageError as error:
        sys.exit(f"looplib: error: {error}")
    print("joined", "tensorflow" in sys.modules, flush=True)
    server = rendezvous.listen(me.workers[me.index])  # as TensorFlow does then
    for line in sys.stdin:
        order, _, rest = line.strip().partition(" ")
        if order == "fail":
            peers.exit_with_first_cause(float(rest or 0))
            peers.announce_exit(1, "ValueError: a bad shape")
            sys.exit("looplib: error: ValueError: a bad shape")
        elif order == "preempted":
            peers.announce_exit(75, "SIGTERM came")
            print("saved", flush=True)
            sys.exit(75)
        elif order == "leave":
            peers.leave(*([float(rest)] if rest else []))
            print("left", flush=True)
            sys.exit(0)
        elif order == "leave-and-stay":
            peers.leave(0.2)
            time.sleep(float(rest))
            sys.exit(0)
        elif order == "fork":  # a child that outlives this process, as a loader's may
            if os.fork() == 0:
                time.sleep(float(rest))
                os._exit(0)
            print("forked", flush=True)
        elif order == "note":  # in a file, or for ever
            peers.report_exit_by(
                lambda *end: pathlib.Path(rest).write_text(" | ".join(end)) if rest else time.sleep(1000)
            )
            print("notes", flush=True)
        elif order == "hang":  # for ever in a write, which holds the lock of standard output
            print("hangs", flush=True)
            sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Stuck()))
            print("never written", flush=True)
    server.close()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:3]))
