"""Commands that take a run directory take a URL; a folder of many runs costs a bounded number of requests."""

import json

import pytest
from clouds import wait_for
from conftest import more

SMALL = ("--train_steps=20", "--global_batch_size=4", "--eval_interval=10", "--steps_per_loop=5", "--loop=eager")
REPORT = {"status": "done", "step": 3, "final_step": 3, "started": "2026-01-01 00:00:00", "flags": {"train_steps": 3}}


def put_runs(cloud, count):
    """Puts runs as small as can be below a folder, without the code under test."""
    for number in range(count):
        for key, content in {
            "run.json": json.dumps(REPORT), "metrics.jsonl": json.dumps({"step": 3, "split": "train", "loss": 0.5}) + "\n",
            "checkpoints/ckpt-3.commit": "{}", ".lease/00000001": json.dumps({"token": "x", "released": True}),
        }.items():  # fmt: skip
            cloud.write(f"{number:04d}/{key}", content.encode(), name="sweep")


@pytest.mark.slow
def test_status_of_many_runs_costs_a_bounded_number_of_requests(cloud):
    count = 1000
    put_runs(cloud, count)
    life = cloud.tool("status", cloud.url("sweep"))
    assert life.code() == 0, life.output()
    assert life.output().count(" done ") == count
    first = len(cloud.proxy.requests)
    assert first <= 3 * count + count * 4 // 1000 + 3  # two reports and the lease of each, and the listing
    life = cloud.tool("status", cloud.url("sweep"))
    assert life.code() == 0 and life.output().count(" done ") == count
    again = len(cloud.proxy.requests) - first
    assert again <= count * 4 // 1000 + 3  # what has not changed is not asked for again
    print(f"status of {count} runs: {first} requests, and {again} the second time")


@pytest.mark.slow
def test_reports_of_a_run_come_without_its_checkpoints(cloud):
    life = cloud.copied("--steps=3", machine="other")
    assert life.code() == 0, life.output()
    cloud.write("run.json", json.dumps(REPORT).encode())
    page = cloud.folder / "page.html"
    before = len(cloud.proxy.requests)
    for arguments in (("status", cloud.url()), ("report", cloud.url(), f"--output={page}")):
        assert (life := cloud.tool(*arguments)).code() == 0, life.output()
    assert page.exists()
    assert not [one for one in cloud.proxy.requests[before:] if one.method == "GET" and "/ckpt-" in one.path]
    life = cloud.tool("inspect", cloud.url())
    assert life.code() == 0, life.output()
    assert [one for one in cloud.proxy.requests[before:] if one.method == "GET" and "/ckpt-3." in one.path]


def test_tools_that_look_at_a_run_for_the_first_time_at_once_all_see_it(cloud):
    life = cloud.copied("--steps=3", machine="other")
    assert life.code() == 0, life.output()
    for life in [cloud.tool("inspect", *flags, cloud.url()) for flags in ([], ["--verify"]) * 3]:
        assert life.code() == 0, life.output()
    assert not list((cloud.folder / "m").glob("unchecked-*"))


def test_verify_reads_what_is_in_the_store_and_not_the_copy(cloud):
    life = cloud.copied("--steps=3")
    assert life.code() == 0, life.output()
    assert (life := cloud.tool("inspect", "--verify", cloud.url(), machine="two")).code() == 0, life.output()
    assert life.output().count(" intact") == 3
    name = "checkpoints/ckpt-2.data-00000-of-00001"
    content = cloud.read(name)
    cloud.write(name, bytes([content[0] ^ 1]) + content[1:])
    for machine in ("m", "two", "three"):
        life = cloud.tool("inspect", "--verify", cloud.url(), machine=machine)
        assert life.code() == 1, life.output()
        assert life.output().count(" intact") == 2 and life.output().count(" damaged: ") == 1
    cloud.write(name, content)
    cloud.write("checkpoints/ckpt-3.commit", cloud.read("checkpoints/ckpt-3.commit")[:50])
    life = cloud.tool("inspect", "--verify", cloud.url(), machine="two")
    assert life.code() == 1 and life.output().count(" invalid: ") == 1, life.output()


@pytest.mark.parametrize("command", ["status", *more(["inspect", "report"])])
def test_a_url_with_nothing_is_told_in_a_sentence(cloud, command):
    life = cloud.tool(command, cloud.url("nothing"))
    assert life.code() in (1, 2), life.output()
    assert cloud.url("nothing") in life.output() and "Traceback" not in life.output()


@pytest.mark.slow
def test_tools_and_starts_that_read_a_run_take_its_url(cloud):
    """diff, replay, rerun, predict, warm_start and config_file, on a machine that has nothing of it."""

    def binary(name, *arguments, machine):
        variables = cloud.environment(machine)
        return cloud.nursery.life_of(
            "swept", f"--model_dir={cloud.url(name)}", *SMALL, *arguments, environment=variables
        )

    def ends(life, *codes):
        assert life.code() in (codes or (0,)), life.output()
        return life.output()

    ends(binary("run", machine="one"))
    ends(binary("twin", machine="one"))
    ends(cloud.tool("diff", cloud.url(), cloud.url("twin"), machine="two"))
    ends(cloud.tool("replay", cloud.url(), "--step=12", machine="two"))
    ends(cloud.tool("rerun", cloud.url(), f"--to={cloud.folder / 'again'}", machine="two"))
    ends(cloud.tool("diff", cloud.url(), cloud.folder / "again", machine="two"))
    ends(cloud.run("--train_steps=4", "--mode=train", name="base", machine="one"))
    ends(cloud.run("--train_steps=4", f"--warm_start={cloud.url('base')}", name="warm", machine="two"))
    ends(binary("typed", f"--config_file={cloud.url()}/config.yaml", machine="two"))
    assert ends(binary("run", "--mode=eval", machine="three"))


@pytest.mark.slow
def test_a_reader_sees_what_a_run_on_another_machine_writes(cloud):
    life = cloud.copied("--steps=1000", "--pause=0.1", machine="one")
    wait_for(lambda: max(cloud.steps(), default=0) > 2)
    first = cloud.tool("inspect", cloud.url(), machine="two")
    assert first.code() == 0, first.output()
    known = max(cloud.steps())
    wait_for(lambda: max(cloud.steps()) > known)
    second = cloud.tool("inspect", cloud.url(), machine="two")
    assert second.code() == 0 and second.output() != first.output()
    life.end()
