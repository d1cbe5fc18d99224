"""Notices by `--notices`: a cloud or Slurm says that the machine goes, and the run ends saved; nothing else ends it."""

import contextlib
import dataclasses
import datetime
import http.client
import io
import itertools
import json
import logging
import re
import signal
import socket
import subprocess
import time

import metadata_servers
import pytest
import toy
from conftest import make_strategy
from lives import ROOT
from metadata_servers import Metadata

import looplib
from looplib.__main__ import main as cli
from looplib.actions import notices
from looplib.actions.notices import Announcement, AwsNotices, GcpNotices, NoticeListener
from looplib.binary.flag_groups import NoticesFlag
from looplib.cluster.preemption import notice as preemption
from looplib.commands.compare import compare
from looplib.errors import FlagError
from looplib.run.report import TerminationNotice

SMALL = ("--config.state_mb=0.01", "--checkpoint_interval=1000000", "--mode=train", "--steps_per_loop=5")
SLOW = "--config.slow_step=0.05"
DEAD_PROXIES = {name: "http://127.0.0.1:9" for name in ("http_proxy", "HTTP_PROXY", "all_proxy")}  # nobody is there
SOON = datetime.datetime(2031, 5, 6, 7, 8, 9, tzinfo=datetime.timezone.utc)
ISO = "2031-05-06T07:08:09+00:00"


@pytest.fixture
def server(monkeypatch):
    with Metadata() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def steps_of(folder):
    with contextlib.suppress(OSError):
        return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return []


def preempted_by(server, source):
    """Lets the server of a cloud say that the machine goes; returns the kind and the deadline that it names."""
    if source == "gcp":
        server.gcp["preempted"] = "TRUE"
        return "preempted", None
    server.aws["spot/instance-action"] = json.dumps({"action": "terminate", "time": "2031-05-06T07:08:09Z"})
    return "terminate", ISO


def test_a_notice_ends_a_run_saved_and_the_run_and_its_status_tell_of_it(nursery, server, tmp_path, capsys):
    run = tmp_path / "run"
    life = nursery.life(run, *SMALL, SLOW, "--train_steps=100000", "--loop=eager", "--config.noisy=False",
                        "--notices=gcp", environment={**server.environment, **DEAD_PROXIES})  # fmt: skip
    until(lambda: steps_of(run)[-1:] >= [5] or life.ended())
    said = time.time()
    preempted_by(server, "gcp")
    assert life.code() == 75, life.output()
    assert "Traceback" not in life.output()
    last = life.output().strip().splitlines()[-1]
    found = re.fullmatch(r"looplib: ended by (the notice of gcp \(preempted, .*\)) at step (\d+), saved in .*", last)
    assert found, last
    report = json.loads((run / "run.json").read_text())
    (told,) = report["starts"][-1]["notices"]
    seen, deadline = (datetime.datetime.fromisoformat(told.pop(name)).timestamp() for name in ("time", "deadline"))
    assert told == {"source": "gcp", "kind": "preempted", "host": socket.gethostname()}
    assert said - 1 <= seen <= said + 10 and seen + 29 <= deadline <= seen + 31
    assert report["status"] == "preempted" and report["step"] == int(found[2])
    assert cli(["status", str(run)]) == 0
    assert found[1] in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("source", ["gcp", "aws", "slurm"])
def test_a_run_that_notices_end_again_and_again_ends_as_one_without_any(source, nursery, server, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    life = nursery.life(whole, *SMALL, "--train_steps=200")
    assert life.code() == 0, life.output()
    environment = {
        **server.environment,
        **DEAD_PROXIES,
        "SLURM_JOB_ID": "47",
        "SLURM_JOB_END_TIME": f"{SOON.timestamp():.0f}",
    }
    for goal in (5, 60):
        life = nursery.life(run, *SMALL, SLOW, "--train_steps=200", f"--notices={source}", environment=environment)
        until(lambda goal=goal: steps_of(run)[-1:] >= [goal] or life.ended())
        if source == "slurm":
            kind, deadline = "SIGUSR1", ISO
            life.kill(signal.SIGUSR1)
        else:
            kind, deadline = preempted_by(server, source)
        assert life.code() == 75, life.output()
        server.gcp["preempted"] = "FALSE"
        server.aws.clear()
        (told,) = json.loads((run / "run.json").read_text())["starts"][-1]["notices"]
        assert (told["source"], told["kind"]) == (source, kind) and deadline in (None, told["deadline"])
        assert f"ended by the notice of {source} ({kind}, seen " in life.output().strip().splitlines()[-1]
    assert steps_of(run)[-1] < 200
    life = nursery.life(run, *SMALL, "--train_steps=200", f"--notices={source}", environment=environment)
    assert life.code() == 0, life.output()
    result = compare(whole, run)
    assert result.differences == [] and result.examples and result.records == 40
    assert json.loads((run / "run.json").read_text())["restarts"] == 2


@pytest.mark.slow
def test_a_server_that_drips_and_cuts_its_answers_delays_a_notice_and_no_step(nursery, server, tmp_path):
    run = tmp_path / "run"
    server.misbehave = metadata_servers.drip
    flags = [*SMALL, SLOW, "--train_steps=100000", "--notices=gcp", "--notices=aws"]
    life = nursery.life(run, *flags, environment=server.environment)
    until(lambda: steps_of(run)[-1:] >= [20] or life.ended())
    server.misbehave = metadata_servers.cut
    until(
        lambda: server.asked.count("/latest/api/token") >= 2 or life.ended(), 30
    )  # the first answer is given up after 10 s
    assert not life.ended(), life.output()
    server.misbehave = None
    preempted_by(server, "aws")
    assert life.code() == 75, life.output()
    assert "ended by the notice of aws (terminate, seen " in life.output()
    assert [life.output().count(f"--notices={name}: ") for name in ("gcp", "aws")] == [1, 1]


@pytest.mark.slow
def test_a_notice_to_one_worker_ends_all_and_the_chief_tells_of_it(nursery, server, tmp_path):
    """The notice comes to the machine of worker 1 only, whose server is another one than the chief's."""
    run = tmp_path / "run"
    with Metadata() as other:
        flags = [*SMALL, SLOW, "--train_steps=100000", "--notices=gcp"]
        lives = nursery.workers(2, run, *flags, environments=[other.environment, server.environment])
        until(lambda: steps_of(run)[-1:] >= [5] or lives[0].ended())
        preempted_by(server, "gcp")
        assert [life.code() for life in lives] == [75, 75], lives[0].output() + lives[1].output()
    assert "ended by a signal, notice or time limit of another worker" in lives[0].output()
    assert "ended by the notice of gcp (preempted, " in lives[1].output()
    start = json.loads((run / "run.json").read_text())["starts"][-1]
    assert "notices" in start, lives[0].output() + lives[1].output()
    assert [(told["source"], told["kind"]) for told in start["notices"]] == [("gcp", "preempted")]


@pytest.mark.slow
def test_the_script_of_the_page_passes_on_a_signal_that_only_the_shell_gets(nursery, tmp_path):
    """Slurm's `--signal=B:USR1`; in place of `srun` is the program that it would start."""
    script = re.search(r"```sh\n(trap .*?)```", (ROOT / "docs" / "notices.md").read_text(), re.DOTALL)[1]
    command = "srun python train.py --strategy=multi_worker --model_dir=/shared/run"
    run, flags = tmp_path / "run", " ".join((*SMALL, SLOW, "--train_steps=100000"))
    assert command in script
    script = script.replace(command, f"{nursery.python} -m faulty --model_dir={run} {flags}")
    shell = subprocess.Popen(
        ["bash", "-c", script], cwd=ROOT, env={**nursery.environment, "SLURM_JOB_ID": "47"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        until(lambda: steps_of(run)[-1:] >= [5] or shell.poll() is not None)
        shell.send_signal(signal.SIGUSR1)
        output = shell.communicate(timeout=60)[0]
    finally:
        shell.kill()
    assert shell.returncode == 75 and "ended by the notice of slurm (SIGUSR1, seen " in output, output


def listened(server, names, act, steps=12, seconds=0.0):
    """Trains in this process with notices; returns the step that it reached, and whether a notice has ended it."""
    trainer = toy.Regression()
    with toy.controller(
        make_strategy("default"), trainer, steps_per_loop=2, actions=[NoticeListener(names), act]
    ) as controller:
        try:
            controller.train(steps)
        except looplib.Preempted:
            return controller.global_step, True
        return controller.global_step, False


@pytest.mark.slow(spread=7)
@pytest.mark.parametrize("misbehave", ["cut", "hang_up", "redirect", "rubbish", "endless", "deep", "drip"])
@pytest.mark.parametrize("kind", [GcpNotices, AwsNotices])
def test_an_answer_that_is_none_is_an_error_and_no_notice_and_the_next_one_counts(kind, misbehave, server, monkeypatch):
    monkeypatch.setattr(notices, "_SECONDS", 0.3)
    source = kind()
    assert list(source.look()) == []
    server.misbehave = getattr(metadata_servers, misbehave)
    for _ in range(2):
        with pytest.raises((OSError, http.client.HTTPException, ValueError)):
            list(source.look())
    server.misbehave = None
    wanted, deadline = preempted_by(server, source.name)
    (found,) = source.look()
    assert (found.kind, found.ends) == (wanted, True) and deadline in (None, found.deadline)


def test_a_token_of_aws_that_is_too_old_is_renewed(server):
    source = AwsNotices()
    assert list(source.look()) == [] and server.asked[:2] == [
        "/latest/api/token",
        "/latest/meta-data/spot/instance-action",
    ]
    server.tokens.clear()
    server.aws["spot/instance-action"] = '{"action": "stop", "time": "2031-05-06T07:08:09Z"}'
    server.aws["events/recommendations/rebalance"] = '{"noticeTime": "2031-05-06T07:00:00Z"}'
    assert list(source.look()) == [
        Announcement("stop", ISO, True), Announcement("rebalance recommendation", None, False),
    ]  # fmt: skip
    assert server.asked.count("/latest/api/token") == 2


@pytest.mark.parametrize("time", ["", "soon", None, 5, "9" * 90, "2031-13-06T07:08:09Z"])
def test_a_deadline_that_cannot_be_read_hides_no_notice(time, server):
    server.aws["spot/instance-action"] = json.dumps({"action": "terminate", "time": time})
    assert list(AwsNotices().look()) == [Announcement("terminate", None, True)]


def test_maintenance_of_gcp_ends_a_run_only_if_the_machine_is_not_moved(server):
    server.gcp["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert list(GcpNotices().look()) == [Announcement("MIGRATE_ON_HOST_MAINTENANCE", None, False)]
    server.gcp["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert [(found.kind, found.ends) for found in GcpNotices().look()] == [("TERMINATE_ON_HOST_MAINTENANCE", True)]


@pytest.mark.slow
def test_servers_that_are_not_there_or_hang_or_announce_other_things_are_one_line_each_and_end_nothing(
    server, monkeypatch, caplog
):
    for kind in (GcpNotices, AwsNotices):
        monkeypatch.setattr(kind, "seconds", 0.01)
    server.aws["events/recommendations/rebalance"] = "{}"

    def wait(event):
        time.sleep(0.05)

    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.socket() as closed,
        caplog.at_level(logging.WARNING),
    ):
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{silent.getsockname()[1]}")
        assert listened(server, ["gcp"], wait) == (12, False) and not caplog.records
        closed.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{closed.getsockname()[1]}")
        assert listened(server, ["gcp", "aws"], wait) == (12, False)
    lines = [record.getMessage() for record in caplog.records if re.search("gcp|aws", record.getMessage())]
    assert len(lines) == 2 and sorted(line.split(":")[0] for line in lines) == ["--notices=gcp", "aws announces"]
    assert server.asked.count("/latest/meta-data/events/recommendations/rebalance") > 5


@pytest.mark.slow
def test_a_notice_that_is_there_before_the_training_ends_it_and_the_next_training_is_free(server, monkeypatch):
    monkeypatch.setattr(GcpNotices, "seconds", 0.01)
    server.gcp["preempted"] = "TRUE"
    step, ended = listened(server, ["gcp"], lambda event: time.sleep(0.2))
    assert ended and step < 12
    server.gcp["preempted"] = "FALSE"
    assert listened(server, ["gcp"], lambda event: None) == (12, False)
    assert preemption.describe("SIGTERM") == "SIGTERM"


def test_a_signal_after_a_notice_names_both(server):
    listener, report = NoticeListener(["slurm"]), io.StringIO()

    class Controller:  # what an action sees of one
        report = type("Report", (), {"note": lambda self, what: report.write(json.dumps(dataclasses.asdict(what)))})()

    listener.on_start(Controller)
    try:
        text = preemption.describe("SIGUSR1")
        assert re.fullmatch(r"the notice of slurm \(SIGUSR1, seen [0-9T:+-]+\)", text) and text == preemption.describe(
            "SIGUSR1"
        )
        assert preemption.describe("SIGHUP") == f"SIGHUP, after {text}"
    finally:
        listener.on_end(Controller)
    assert str(TerminationNotice(**json.loads(report.getvalue()))) == text


def values(*names, **more):
    return {"notices": list(names), "mode": "train", "dry_run": False, **more}


def test_flags_are_read_or_refused(monkeypatch):
    plugin = NoticesFlag()
    assert plugin.actions({**values(), "notices": None}) == () == plugin.actions(values("gcp", dry_run=True))
    plugin.check(values("gcp", "aws", "slurm"))
    assert isinstance(plugin.actions(values("gcp", "gcp"))[0], NoticeListener)
    with pytest.raises(FlagError, match="--notices is 'azure'; expected one of gcp, aws, slurm"):
        plugin.check(values("azure"))
    with pytest.raises(FlagError, match="--mode=eval does not train"):
        plugin.check(values("gcp", mode="eval"))
    names = {"gcp": "GCE_METADATA_HOST", "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT"}
    wrong = ("https://h", "http://", "h:port", "http://h/path", "http://u:p@h", "h:99999")
    for (name, variable), address in itertools.product(names.items(), wrong):
        monkeypatch.setenv(variable, address)
        with pytest.raises(FlagError, match=f"{variable} is .*expected an address"):
            plugin.check(values(name))
        monkeypatch.setenv(variable, "http://[fd00:ec2::254]:80")
        plugin.check(values(name))
