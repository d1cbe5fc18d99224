"""One process, four virtual CPU devices, and every strategy on them."""

import collections
import contextlib
import gc
import importlib.util
import itertools
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["LOOPLIB_CACHE"] = os.devnull  # no directory: no test depends on what an earlier one has left

import pytest

TURNS = 25  # of CI: a slow case comes in each fifth, and one of a test with more than `_MANY` of them once in 25
_MANY = 20
COLLECTED = pytest.StashKey()  # all cases of the files that this run names
EVERY = ("default", "one_device", "mirrored_x2", "mirrored_x4")
_REPLICAS = dict(zip(EVERY, (1, 1, 2, 4)))
# With several processes, each takes the next file when it is done with one: the longest go first.
_LONGEST = (
    "elastic_workers", "generative", "docs", "endings", "stragglers", "language_model", "shared_sweep", "rounding",
    "controller", "model_garden", "exports", "gradient_trainer", "faults", "foreign", "peers", "engines",
    "preemption", "workers", "checks", "replay", "kill", "guards", "predictions", "inputs", "metrics",
    "lifecycle", "report_page", "local_workers", "writers", "records", "parameter_server", "hostile",
    "fine_tune", "names", "keras_trainer", "preflight", "launch", "sweep_faults", "store", "sources", "constants", "binary",
    "tpu", "plateau", "records_faults", "disk", "sweep", "lock", "resident", "files", "loops", "environment",
)  # fmt: skip
_CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
# Other tests run without Model Garden too. Whole files that need it say so by `pytest.importorskip`.
needs_models = pytest.mark.skipif(
    importlib.util.find_spec("official") is None, reason="needs Model Garden: pip install 'looplib[models]'"
)
_made = {}
_all = False
_collected = 0.0  # when garbage was collected last
_LONG = 3.0  # seconds of a test after which the end of an iterator may take long
_references = 0  # to the class of controllers, when a test looked last


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the slow cases too")
    parser.addoption("--turn", type=int, choices=range(TURNS), help="the slow cases of this turn, and no other ones")


def pytest_configure(config):
    for number in (signal.SIGINT, signal.SIGHUP):  # a shell starts commands in the background with these ignored
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    global _all
    _all = config.getoption("all") or config.getoption("turn") is not None
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        _share_fork_server(config)
        return  # the process that hands out the tests runs none
    import looplib  # noqa: F401, I001  (it imports TensorFlow at less cost)
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)


def _share_fork_server(config):
    """Has the processes of tests share the server that the first of them starts; it ends with this process's run."""
    import lives

    folder = pathlib.Path(tempfile.mkdtemp(prefix="fork-server-"))
    os.environ[lives.SHARED] = str(folder)

    def end():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # no test has needed one, or it has ended
            os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)
        shutil.rmtree(folder)

    config.add_cleanup(end)


def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = list(items)
    chosen = chosen_cases(items, config.getoption("all"), config.getoption("turn"))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    longest = {name: number for number, name in enumerate(_LONGEST)}
    items[:] = [item for item in items if item in chosen]
    items.sort(key=lambda item: longest.get(item.path.stem.removesuffix("_test"), len(longest)))


def chosen_cases(items, everything=False, turn=None):
    """Returns the cases to run: all, or the slow ones of a turn, or those that are not slow.

    Their names decide about the turn, so a new case moves no other one.
    """
    slow = set() if everything else _slow(items)
    if turn is None:
        return set(items) - slow
    number = collections.Counter((item.path, item.originalname) for item in slow)

    def is_due(item):
        turns = TURNS if number[item.path, item.originalname] > _MANY else TURNS // 5
        return (zlib.crc32(item.nodeid.encode()) - turn) % turns == 0

    return {item for item in slow if is_due(item)}


def _slow(items):
    """Returns the cases that `make test` leaves out."""
    slow = {item for item in items if any(not mark.kwargs for mark in item.iter_markers("slow"))}
    for kind, choose in (("pairs", _pairs), ("keep", _last), ("spread", _spread)):
        groups = collections.defaultdict(list)
        for item in items:
            if item not in slow and any(kind in mark.kwargs for mark in item.iter_markers("slow")):
                groups[item.path, item.originalname].append(item)
        for group in groups.values():
            (value,) = (mark.kwargs[kind] for mark in group[0].iter_markers("slow") if kind in mark.kwargs)
            slow.update(set(group) - choose(group, value))
    return slow


def _last(group, count):
    """Chooses the last cases: lists of cases go from the simple to the hard."""
    return set(group[-count:])


def _spread(group, count):
    """Chooses cases in which as many values as possible occur; other tests begin with other values."""
    chosen, seen = [], set()
    rest = sorted(group, key=lambda item: zlib.crc32(item.nodeid.encode()))
    while rest and len(chosen) < count:
        best = max(rest, key=lambda item: len(_values(item) - seen))
        chosen.append(best)
        rest.remove(best)
        seen |= _values(best)
    return set(chosen)


def _values(item):
    return {(key, repr(value)) for key, value in item.callspec.params.items()} if hasattr(item, "callspec") else set()


def _pairs(group, possible):
    """Chooses cases of a product of conditions so that each pair that is possible occurs at least once."""
    of = {
        item: set(itertools.combinations([(key, repr(value)) for key, value in sorted(item.callspec.params.items())], 2))
        for item in group if possible is True or possible(item.callspec.params)
    }  # fmt: skip
    chosen, uncovered = set(), set().union(*of.values())
    while uncovered:
        best = max(of, key=lambda item: len(of[item] & uncovered))  # the first of the best, so always the same
        chosen.add(best)
        uncovered -= of[best]
    return chosen


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()  # TensorFlow's half a million objects: to go through them takes 0.3 s each time
    # Tracing makes so many objects that 7% of the suite were collections; old objects are collected by `_collect` alone.
    gc.set_threshold(20_000, 10, 100_000)


def pytest_runtest_teardown(item, nextitem):
    if (
        nextitem is not None and nextitem.path != item.path
    ):  # what is left of a file's tests stays: caches, traced functions
        _collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def base_folder(tmp_path_factory):
    """Makes the base of all temporary folders, which pytest cannot make for two threads of a fixture at once."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(autouse=True)
def close_controllers():
    """Closes the controllers that a test leaves open, which have threads, locks and iterators."""
    yield
    _close(gc.get_objects(0) + gc.get_objects(1))  # before they are collected, which deletes iterators
    global _collected
    if time.monotonic() - _collected > _LONG:
        _collect()
    else:
        gc.collect(1)
    _close_controllers()
    _collected = time.monotonic()


def _collect():
    """Collects garbage, and ends the iterators in it without Python's lock, as `HostStream.end` does.

    To delete an iterator takes up to 60 s, as long as the thread that tunes its pipeline sleeps, which is at most as
    long as the iterator has been there.
    """
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    garbage = gc.garbage[:]
    gc.garbage.clear()
    if tf := sys.modules.get("tensorflow"):
        for iterator in [each for each in garbage if issubclass(type(each), tf.data.Iterator)]:
            threading.Thread(target=_end, args=(iterator,), daemon=True).start()
    garbage.clear()
    gc.collect()


def _end(iterator):
    import tensorflow as tf

    from looplib.data import iterator_state

    def nothing(spec):
        return tf.zeros([size or 0 for size in spec.shape], spec.dtype)

    with contextlib.suppress(Exception):  # of another kind of element, or already ended: it is deleted as it is
        empty = tf.data.Dataset.from_tensors(tf.nest.map_structure(nothing, iterator.element_spec)).take(0)
        with tf.device("/cpu:0"):
            tf.raw_ops.MakeIterator(
                dataset=tf.data.experimental.to_variant(empty), iterator=iterator_state.handle(iterator)
            )


def _close_controllers():
    global _references
    if loaded := sys.modules.get("looplib.controller"):  # nobody has made one before it is loaded
        kind = loaded.Controller
        if sys.getrefcount(kind) == _references:
            return  # each controller refers to its class, so there is no new one; to go through all objects takes 0.1 s
        _close(gc.get_objects())
        _references = sys.getrefcount(kind)


def _close(objects):
    if loaded := sys.modules.get("looplib.controller"):
        for controller in [each for each in objects if type(each) is loaded.Controller]:
            with contextlib.suppress(Exception):  # what its test has made of it, or has it raise
                controller.close()


@pytest.fixture(autouse=True)
def random_numbers_of_tf_keras():
    """Leaves to the next test the random numbers that tf_keras has by default, which a test may change."""
    yield
    if tf_keras := sys.modules.get("tf_keras"):
        tf_keras.backend.experimental.disable_tf_random_generator()


def more(values):
    """Marks values of a parameter, or tuples of the values of several, as slow."""
    values = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


def repetitions(few, many):
    """Returns how often something is to be done: the second with --all."""
    return many if _all else few


def make_strategy(name):
    """Returns the strategy of that name, the same object each time."""
    import tensorflow as tf

    if name not in _made:
        if name == "default":
            _made[name] = tf.distribute.get_strategy()
        elif name == "one_device":
            _made[name] = tf.distribute.OneDeviceStrategy("/cpu:0")
        else:
            # Two strategies with collective ops cannot share a process: TensorFlow gives both groups the same key.
            reduction = tf.distribute.ReductionToOneDevice() if name == "mirrored_x2" else None
            devices = [f"/cpu:{i}" for i in range(_REPLICAS[name])]
            _made[name] = tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)
    return _made[name]


@pytest.fixture(params=["default", "mirrored_x2", *more(["one_device", "mirrored_x4"])])
def strategy(request):
    """One replica and two; tests that try every strategy are parametrized by `EVERY`."""
    return make_strategy(request.param)


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    """Keras 3 or tf_keras."""
    return pytest.importorskip(request.param)


@pytest.fixture(scope="module")
def cases(request):
    """A function that returns the values of an argument with which tests of this module are going to run."""

    def chosen(argument):
        own = [item for item in request.session.items if item.path == request.path]
        return list(dict.fromkeys(item.callspec.params[argument] for item in own if hasattr(item, "callspec")
                                  and argument in item.callspec.params))  # fmt: skip

    return chosen


@pytest.fixture(scope="session")
def nursery():
    """A process that forks lives of the binary `faulty`; one for all tests, as its imports take seconds."""
    import lives

    with lives.Nursery() as nursery:
        yield nursery


@pytest.fixture(scope="session")
def python(nursery):
    """Stands for `python` on a command line, with TensorFlow imported; where the import itself is tried, use Python."""
    return nursery.python


@pytest.fixture(scope="session")
def s3():
    """moto's server of S3, with one bucket."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from clouds import BUCKET, S3

    with S3() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def cloud(s3, nursery, tmp_path):
    """A store, and machines that run there: `tests/helpers/clouds.py`."""
    from clouds import Cloud, Proxy

    with Proxy("127.0.0.1", s3.port) as proxy:
        yield Cloud(s3, proxy, nursery, tmp_path, tmp_path.name)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no Chromium; on Debian, apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=_CHROMIUM_FLAGS)
        yield chromium
        chromium.close()
