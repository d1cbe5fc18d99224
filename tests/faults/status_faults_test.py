"""`python -m looplib status` on trees that are hostile, or change while they are read: bounded, and never a traceback."""

import json
import os
import pathlib
import shutil
import subprocess
import threading
import time

import pytest

from looplib.__main__ import main
from looplib.commands import status

DONE = json.dumps({"status": "done", "step": 7})


def a_run(folder: pathlib.Path) -> pathlib.Path:
    """Makes a run directory."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(DONE)
    return folder


def states(text: str) -> dict[str, str]:
    """{run: state} of a table."""
    return {line.split()[0]: line.split()[1] for line in text.splitlines()[1:] if line}


def test_loops_of_links_deep_folders_fifos_and_devices_cost_little(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    a_run(tmp_path / "good")
    (tmp_path / "good" / "again").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    for name in ("run.json", "metrics.jsonl", "lock"):
        (tmp_path / f"fifo_{name}").mkdir()
        os.mkfifo(tmp_path / f"fifo_{name}" / name)
        (tmp_path / f"folder_{name}").mkdir()
        (tmp_path / f"folder_{name}" / name).mkdir()
        (tmp_path / f"loop_{name}").mkdir()
        (tmp_path / f"loop_{name}" / name).symlink_to(name)
    (tmp_path / "null").mkdir()
    (tmp_path / "null" / "run.json").symlink_to("/dev/zero")
    here = os.open(tmp_path, os.O_RDONLY)
    deep = here
    try:
        for number in range(2000):  # deeper than a path may be long
            os.mkdir(f"deep{number}", dir_fd=deep)
            below = os.open(f"deep{number}", os.O_RDONLY, dir_fd=deep)
            if deep != here:
                os.close(deep)
            deep = below
        started = time.monotonic()
        assert main(["status", str(tmp_path)]) == 0
        assert time.monotonic() - started < 20
        assert states(capsys.readouterr().out) == {"good": "done"}
    finally:
        os.close(deep)
        os.close(here)
        subprocess.run(["rm", "-rf", tmp_path / "deep0"], check=True)  # Python's own way is not deep enough


def test_what_is_left_out_of_a_large_tree_is_said(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "many").mkdir()
    a_run(tmp_path / "run")
    for number in range(300):
        (tmp_path / "many" / str(number)).touch()
    for name, value in (("entries", 100), ("folders", 1), ("end", 0.0)):
        monkeypatch.setattr(
            status, "_Limits", lambda name=name, value=value, limits=status._Limits: limits(**{name: value})
        )
        main(["status", str(tmp_path / "many"), str(tmp_path / "run")])
        assert "not all folders were looked at" in capsys.readouterr().out
        monkeypatch.undo()
    assert main(["status", str(tmp_path)]) == 0
    assert "not all" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_hundred_thousand_files_take_seconds(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    a_run(tmp_path / "a")
    (tmp_path / "z").mkdir()
    for number in range(110_000):
        os.mknod(tmp_path / "z" / str(number))
    started = time.monotonic()
    main(["status", str(tmp_path)])
    assert time.monotonic() - started < 50 and "not all folders were looked at" in capsys.readouterr().out


def test_a_tree_that_changes_while_it_is_watched_ends_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs come, go and become files while the tables are made; Ctrl-C then ends with code 0."""
    top = tmp_path / "top"
    a_run(top / "stays")
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            for number in range(5):
                folder = a_run(top / f"run{number}" / "inner")
                (folder / "lock").write_text("{" * number)
                (folder / "run.json").unlink()
                (folder / "run.json").mkdir()
                shutil.rmtree(folder.parent)
                folder.parent.touch()
                folder.parent.unlink()

    tables = iter(range(200))

    def wait(seconds: float) -> None:
        if next(tables, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", wait)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert main(["status", str(top), "--watch"]) == 0
    finally:
        ended.set()
        thread.join()
    assert capsys.readouterr().out.count("stays") == 201


def test_a_folder_that_goes_while_it_is_watched_leaves_a_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path / "top" / "run")
    left = [shutil.rmtree, os.mkfifo, lambda path: path.unlink()]

    def change(seconds: float) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop(0)(tmp_path / "top")

    monkeypatch.setattr(status.time, "sleep", change)
    assert main(["status", str(tmp_path / "top"), "--watch"]) == 0
    assert capsys.readouterr().out.count("there is no run in") == 3


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("interval", ["nan", "inf", "-1", "0", "1e300"])
def test_an_interval_that_is_no_time_is_refused(
    interval: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["status", str(tmp_path), "--watch", f"--interval={interval}"]) == 2
    assert "expected seconds above 0" in capsys.readouterr().err
