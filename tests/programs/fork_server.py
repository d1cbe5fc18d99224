"""A process that has imported TensorFlow, but not started it, and forks what takes the part of new Python processes.

TensorFlow's runtime starts with the first op or device; before that, a process may fork. To import TensorFlow takes
4 s of a core, to fork nothing. Each client connects to the server's socket and sends an order, a line of JSON, with its
standard streams. It is answered with two lines: the process id, and, once the process has ended, its status. A client
that goes away takes its process with it.

`python fork_server.py SOCKET MODULE...` imports the modules and listens on the socket.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pydoc
import random
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import types

_CLONE_NEWNET = 0x40000000
# What AutoGraph converts in many runs, which takes each new process a second: functions by their module or class. Of
# those with a star a tf.function is made. After a slash, the name of a function inside of the one before.
_CONVERTED = {
    "looplib.compat.tensorflow": "*_call",
    "looplib.loop.device_loop.DeviceLoop": "_repeat _repeat_to_the_end",
    "looplib.compat.optimizers.Replacement": "__call__",
    "looplib.data.order": "mix as_plan Plan.located Ids.endless Ids.once",
    "looplib.data.streams": "counted_from_0",
    "looplib.data.iterator_state": "*_pack.python_function",
    "looplib.data.pipelines.Pipelines": "build_on_worker",
    "looplib.data.context.InputContext": "indices positions_of _check order_seed located",
    "looplib.data.order.Positions": "training_batches evaluation_batches",
    "looplib.data.order.Batches": "full before _examples",
    "looplib.data.order.Epoch": "after",
    "looplib.loop.coordinator": "_numbered/numbered_step packed",
    "looplib.loop.coordinator.RemoteLoop": "*_run *_run_part *_draw_by_number _open_queues",
    "looplib.base.messages": "whole_number",
    "looplib.compat.keras": "tf_variable is_variable variable_path family is_a",
    "trainers.image_classification": "ImageClassifier.loss_fn ImageClassifierEvaluator.step_fn",
    "faulty.Faulty": "step_fn dataset/<lambda> _interleaved/<lambda> _failing/<lambda>",
    "faulty.FaultyEvaluator": "step_fn dataset/<lambda> predict_fn",
    "faulty.Notes": "note_in_graph",
    "toy.Regression": "step_fn dataset/<lambda> _in_global_batch",
    "toy.RegressionEvaluator": "step_fn dataset/<lambda>",
    "wrong.Wrong": "step_fn dataset/<lambda> go_wrong",
    "wrong.WrongEvaluator": "step_fn dataset/<lambda>",
    "divided.Divided": "step_fn dataset/<lambda>",
    "asynchronous.Regression": "step_fn dataset dataset/<lambda>",
    "asynchronous.Values": "step_fn dataset dataset/<lambda>",
    "asynchronous.KerasMetrics": "step_fn",
    "recorded": "augment parse",
    "recorded.Recorded": "loss_fn",
    "replayed": "batches/of_step batches/<lambda> losses_of",
    "replayed.ByLoss": "loss_fn",
    "replayed.ByStep": "step_fn",
    "unreliable.Unreliable": "step_fn global_mean dataset/<lambda>",
    "trainers.model_garden_tasks": "TaskTrainer.step_fn TaskEvaluator.step_fn _mean",
    "official.vision.dataloaders.classification_input": "Parser._parse_train_image Parser._parse_train_data Parser._parse_eval_image Parser._parse_eval_data Decoder.decode",
    "official.vision.ops.preprocess_ops": "center_crop_image_v2 random_crop_image_v2 normalize_image normalize_scaled_float_image",
    "official.vision.modeling.layers.nn_blocks": "ResidualBlock.call",
    "official.vision.tasks.image_classification.ImageClassificationTask": "train_step validation_step inference_step build_losses",
}


class Client:
    """A connection, and the process that was forked for it."""

    def __init__(self, connection):
        self.connection = connection
        self.streams = []
        self.text = b""
        self.pid = self.handle = None

    def read(self):
        """Reads what has come: returns the order once it is complete, else None; raises EOFError if the client is gone."""
        data, streams, _, _ = socket.recv_fds(self.connection, 65536, 3)
        if not data:
            raise EOFError
        self.streams += streams
        self.text += data
        return json.loads(self.text) if self.text.endswith(b"\n") else None

    def answer(self, number):
        """Sends a line to the client, which may be gone."""
        try:
            self.connection.sendall(b"%d\n" % number)
        except OSError:
            pass


def serve(address):
    """Serves clients, and returns in each forked process: (order, file descriptors of its streams)."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(100)
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            client = key.data
            if client is None:
                connection = listener.accept()[0]
                selector.register(connection, selectors.EVENT_READ, Client(connection))
            elif key.fileobj == client.handle:
                client.answer(os.waitpid(client.pid, 0)[1])
                selector.unregister(client.handle)
                os.close(client.handle)
                client.handle = None
            else:
                try:
                    order = client.read()
                except (EOFError, ConnectionError):
                    selector.unregister(client.connection)
                    client.connection.close()
                    if client.handle is not None:
                        signal.pidfd_send_signal(client.handle, signal.SIGKILL)
                    continue
                if order:
                    client.pid = os.fork()
                    if client.pid == 0:
                        _close_all(selector)
                        return order, client.streams
                    for stream in client.streams:
                        os.close(stream)
                    client.handle = os.pidfd_open(client.pid)
                    client.answer(client.pid)
                    selector.register(client.handle, selectors.EVENT_READ, client)


def _close_all(selector):
    """Closes what a fork has of the server's."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fileobj)
    selector.close()


def become(order, streams, own_paths):
    """Makes this fork what a new process of Python would be.

    Args:
      order: dict: `arguments`, what follows `python` on the command line, `folder`, its working directory, and
        `environment`, all of its variables; maybe `ignored`, signals that it ignores, `namespace`, of a network,
        `console`, a file to print to (of `streams`, 1 and 2), `closed`, to have no standard output, `no_input`, to have no
        standard input, `encoding`, of what it prints, `limits`, a dict from the name of a `resource`, such as "FSIZE", to
        its bound, `umask`, `user`, a number, `temporary`, the folder of temporary files, and `gone`, to remove the working
        directory.
      streams: file descriptors of standard input, output and error.
      own_paths: where Python looks for modules, without what the environment adds.

    The variable TESTED_CONSTANTS, a dict as JSON, gives constants of modules other values.
    """
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    for number in order.get("ignored", []):
        signal.signal(number, signal.SIG_IGN)
    if order.get("console"):
        console = os.open(order["console"], os.O_WRONLY)
        for target in order.get("streams", (1, 2)):
            os.dup2(console, target)
    if order.get("closed"):
        for target in (1, 2):
            os.close(target)
        sys.stdout = sys.stderr = None  # as Python has them where it was started so
    if "encoding" in order:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding=order["encoding"], errors="strict")
    if "PYTHONUNBUFFERED" in os.environ and sys.stdout:
        sys.stdout.reconfigure(write_through=True)
    if "namespace" in order:
        with open(f"/run/netns/{order['namespace']}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    for name, most in order.get("limits", {}).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    if "umask" in order:
        os.umask(order["umask"])
    if order.get("no_input"):
        os.close(0)
        sys.stdin = None
    if "temporary" in order:
        tempfile.tempdir = order["temporary"]
    if order.get("gone"):
        os.rmdir(order["folder"])
    if "user" in order:
        os.setgroups([])
        os.setresgid(*[order["user"]] * 3)
        os.setresuid(*[order["user"]] * 3)
        if not os.access(tempfile.gettempdir(), os.W_OK):
            tempfile.tempdir = None  # which is found again, as this user
    sys.path[:] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path] + own_paths
    for name, value in json.loads(os.environ.get("TESTED_CONSTANTS", "{}")).items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def functions(path):
    """Returns the functions of that path; those inside of another one without the values that they close over."""
    outer, *names = path.split("/")
    found = [pydoc.locate(outer)]
    for name in names:
        found = [
            types.FunctionType(code, function.__globals__, closure=tuple(types.CellType() for _ in code.co_freevars))
            for function in found
            for code in function.__code__.co_consts
            if isinstance(code, types.CodeType) and code.co_name == name
        ]
    assert all(found), f"{path} is no function"
    return found


def convert_ahead():
    """Has AutoGraph convert looplib's own functions, so that the forks find them converted."""
    from tensorflow.python.autograph.core import converter
    from tensorflow.python.autograph.impl import api

    for place, names in _CONVERTED.items():
        if place.startswith(("trainers.model_garden", "official")) and "official" not in sys.modules:
            continue
        for name in names.split():
            options = converter.ConversionOptions(
                recursive=True, user_requested=name.startswith("*"), optional_features=None
            )
            for function in functions(f"{place}.{name.removeprefix('*')}"):
                api._convert_actual(function, converter.ProgramContext(options))


def run(arguments):
    """Runs what follows `python` on a command line: `-m module`, `-c code` or a file, and its arguments."""
    first, *rest = arguments
    if first == "-m":
        sys.argv[1:] = rest[1:]
        with contextlib.suppress(FileNotFoundError):  # as Python does
            sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")


def run_and_exit(arguments):
    """Runs a command line and ends the process as Python does, but frees no objects, which takes 0.3 s of a processor.

    Python itself ends what fails and what cannot be printed.
    """
    try:
        run(arguments)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        code = end.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit(code & 0xFF)


def main():
    """Imports, serves, and goes on as each of the processes that are asked for."""
    own_paths = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    for module in sys.argv[2:]:
        importlib.import_module(module)
    convert_ahead()
    gc.collect()
    gc.freeze()  # so that no collection in a fork goes through, and copies, what was imported
    gc.set_threshold(10_000, 10, 10)  # as in tests/conftest.py
    order, streams = serve(sys.argv[1])
    become(order, streams, own_paths)
    if "TF_CONFIG" in os.environ:  # workers close their connections as Python frees them
        run(order["arguments"])
    else:
        run_and_exit(order["arguments"])


if __name__ == "__main__":
    main()
