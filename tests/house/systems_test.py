"""Systems: Linux, macOS and WSL; a second way for each call that Linux alone has, tried with the first taken away."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from paths import PYTHONPATH

ROOT = pathlib.Path(__file__).parents[2]
LIKE_MACOS = ROOT / "tests" / "programs" / "like_macos.py"
# What a process finds out about itself, a child, a lock and a file without the kernel's files.
SECOND_WAYS = """
import os, signal, sys, time
from looplib.base import files
from looplib.buckets import lease
from looplib.processes.child import Child, CommandLine
from looplib.report import clock, run_report
from looplib.run import lock, report

path = sys.argv[1]
with open(path, "w") as file:
    assert files.is_open_here(path)
assert not files.is_open_here(path)
held = os.stat(path)
with Child(CommandLine(["sleep", "100"])) as child:
    assert child._watcher is not None and not child.is_stopped and lock._is_locked(held, child.pid)
    child.send(signal.SIGSTOP)
    end = time.monotonic() + 30
    while not child.is_stopped:
        assert time.monotonic() < end
    child.kill()
assert not child.is_stopped and not lock._is_locked(held, child.pid)
failed = Child(CommandLine(["sh", "-c", "sleep 1000 & echo $! > " + path + "; exit 3"]))
assert failed.wait(30) == 3
left = int(open(path).read())
end = time.monotonic() + 30
while os.system(f"ps -o state= -p {left} | grep -qv Z") == 0:
    assert time.monotonic() < end
assert 0 < clock._process_seconds() < 600 and abs(report._began(os.getpid()) - time.time()) < 600
assert lease._boot() == ""
assert report.this_machine().cores == os.cpu_count() and report.this_machine().cpu
block = bytearray(os.urandom(1 << 20)) * 64
most = run_report._host_bytes()
sys.platform = "linux"  # whose kernel, which counts kilobytes, has given the number
assert most == run_report.peak_bytes() // 1024 > 64 << 10
print("all found")
"""


def run(*command, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_windows_is_refused_in_a_sentence():
    code = "import sys; sys.platform = 'win32'\ntry: import looplib\nexcept ImportError as error: print(error)"
    assert run("-c", code) == (
        "looplib is for Linux, macOS and WSL, not for Windows itself; install WSL 2, and run Python in it\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")
def test_each_call_of_linux_has_a_second_way(tmp_path):
    (tmp_path / "ways.py").write_text(SECOND_WAYS)
    assert run(LIKE_MACOS, tmp_path / "ways.py", tmp_path / "file") == "all found\n"


@pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")
def test_the_readmes_program_trains_and_resumes_without_what_linux_alone_has(tmp_path):
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    text = text.replace("/tmp/first", f"{tmp_path}/first")
    for steps, told in {500: ["100", "200", "300", "400", "500"], 600: ["600"]}.items():
        (tmp_path / "program.py").write_text(text.replace("steps=500", f"steps={steps}"))
        printed = run(LIKE_MACOS, tmp_path / "program.py")
        assert [line.split()[1] for line in printed.splitlines() if line.startswith("step ")] == told, printed
