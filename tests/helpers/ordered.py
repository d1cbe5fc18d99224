"""Orders for programs of tests: `ordered(example_checksums=True)` is the environment variable that names one."""

import atexit
import itertools
import os
import shutil
import tempfile

from looplib.base.orders import VARIABLE, Order

_folder = tempfile.mkdtemp(prefix="ordered-")
os.chmod(_folder, 0o711)  # for programs of another user
atexit.register(lambda pid: shutil.rmtree(_folder, ignore_errors=True) if os.getpid() == pid else None, os.getpid())
_numbers = itertools.count()


def ordered(user=None, **what):
    """A dict of the variable that orders something, for a user's process; see `Order`."""
    path = os.path.join(_folder, f"{os.getpid()}-{next(_numbers)}.json")
    given = Order(**what).give(path)
    if user is not None:
        os.chown(path, user, user)
    return given


NOTHING = {VARIABLE: None}
