"""Files are written, moved and removed in `looplib/base/files.py` and `looplib/base/folders.py` alone, which check the names."""

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
CHECKED = {"looplib/base/files.py", "looplib/base/folders.py", "looplib/exports/new_folder.py"}
# Functions that change what is on a disk, by the end of their name in the source.
CHANGES = {
    *(f"os.{name}" for name in ("remove", "unlink", "rename", "replace", "mkdir", "makedirs", "rmdir", "removedirs",
                                "renames", "link", "symlink", "truncate", "chmod", "chown", "utime", "mkfifo", "open")),
    *(f"shutil.{name}" for name in ("rmtree", "move", "copy", "copy2", "copyfile", "copytree", "copyfileobj")),
    *(f"gfile.{name}" for name in ("remove", "rmtree", "rename", "makedirs", "mkdir", "copy")),
    "tempfile.mktemp", "io.TFRecordWriter", "create_file_writer",
}  # fmt: skip
METHODS = {"write_text", "write_bytes", "unlink", "rmdir", "mkdir", "rename", "touch", "symlink_to", "hardlink_to"}
OPENS = {"open", "gfile.GFile", "io.open"}
# (file, function) -> why it is right there.
ALLOWED = {
    ("looplib/__main__.py", "os.open"): "/dev/null",
    ("looplib/__main__.py", "open, to write"): "/dev/null",
    ("looplib/run/lock.py", "os.open"): "the lock itself, without following a link",
    ("looplib/run/lock.py", "open, to read"): "/proc/locks",
    ("looplib/base/console.py", "os.open"): "/dev/null",
    ("looplib/base/console.py", "open, to write"): "/dev/null",
    (
        "looplib/report/writers/tensorboard_writer.py",
        "io.TFRecordWriter",
    ): "a new name, below a folder that was checked",
    ("looplib/buckets/note.py", "os.open"): "the run directory, which was made or checked, to know it again",
    ("looplib/buckets/note.py", "os.rmdir"): "empty folders that a walk below the mirror's own has found",
    ("looplib/buckets/download.py", "os.utime"): "files of a copy, which this class has written",
    ("looplib/stores/ranges.py", "os.utime"): "blocks of the cache, by names that this class has made",
    ("looplib/run/report.py", "open, to read"): "/proc/cpuinfo and /proc/PID/stat",
    ("looplib/buckets/lease.py", "open, to read"): "/proc/sys/kernel/random/boot_id",
    ("looplib/processes/child.py", "open, to read"): "/proc/PID/stat",
    ("looplib/processes/child.py", "os.open"): "the lock, new or without following a link",
    ("looplib/base/orders.py", "os.open"): "the file of an order, which is new",
    ("looplib/commands/replay.py", "open, to write"): "names in a new temporary folder",
    ("looplib/commands/replay.py", "shutil.copyfileobj"): "a checkpoint, into a new temporary folder",
    ("looplib/data/records/files.py", "open, to read"): "the user's data",
    ("looplib/data/records/files.py", "os.open"): "the user's data, to read, without waiting for a FIFO",
    ("looplib/weights/taking.py", "open, to write"): "a name in the new folder of an export",
    ("looplib/exports/versions.py", "shutil.copytree"): "into a new temporary folder, with links as they are",
    ("looplib/exports/warm_up.py", "io.TFRecordWriter"): "a name in the new folder of an export",
    ("looplib/report/clock.py", "open, to read"): "/proc/self/stat",
    ("looplib/report/run_report.py", "open, to read"): "/proc/self/statm",
}


def name_of(node: ast.expr) -> str:
    """The name of what is called, as it stands in the source: "tf.io.gfile.remove"."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def writes(call: ast.Call) -> bool:
    """Whether a call of `open` may write: its mode is not a text that only reads."""
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return any(not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in modes)


def changes(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Yields (function, line) of the calls in a file that change what is on a disk, or open a file to read it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            last = ".".join(name.split(".")[-2:])
            if last in CHANGES:
                yield last, node.lineno
            elif last in OPENS:
                yield f"{last}, to {'write' if writes(node) else 'read'}", node.lineno
            elif name.split(".")[-1] in METHODS and name.split(".")[0] not in ("folders", "files"):
                yield f".{name.split('.')[-1]}", node.lineno


def found() -> dict[tuple[str, str], list[int]]:
    """The calls of looplib outside of the two files: (file, function) -> lines."""
    calls: dict[tuple[str, str], list[int]] = {}
    for path in sorted((ROOT / "looplib").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for function, line in changes(path) if name not in CHECKED else ():
            calls.setdefault((name, function), []).append(line)
    return calls


def test_no_path_is_used_without_the_functions_that_check_it():
    others = [
        f"{file}:{lines}: {function}" for (file, function), lines in found().items() if (file, function) not in ALLOWED
    ]
    assert not others, "use looplib/base/files.py or looplib/base/folders.py, or say in ALLOWED why not:\n" + "\n".join(
        others
    )


def test_each_exception_is_still_there():
    assert ALLOWED.keys() <= found().keys()


if __name__ == "__main__":
    for (file, function), lines in found().items():
        print(file, function, lines)
