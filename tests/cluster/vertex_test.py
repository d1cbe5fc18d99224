"""The environment of Vertex AI, as its documentation describes it, and the files of docs/cluster for it.

One test needs `pip install google-cloud-aiplatform`; it was last run with 2.7.0.
"""

import json
import os
import pathlib
import signal
import subprocess
import time

import pytest
import yaml

from looplib.cluster.environment import resolve
from looplib.commands.compare import compare
from looplib.processes.group import hold_ports
from looplib.run import commits

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "cluster"
JOB = yaml.safe_load((DOCS / "vertex_job.yaml").read_text())


def environment(chief, workers, kind, index, base):
    """The environment that Vertex AI sets in a container of a job with two worker pools."""
    pools = {"workerpool0": [chief], "workerpool1": workers}
    common = {"environment": "cloud", "job": json.dumps(JOB)}
    task = {"type": kind, "index": index, "cloud": "b1f2"}
    pool = {"chief": "workerpool0", "worker": "workerpool1"}[kind]
    return {
        "TF_CONFIG": json.dumps({"cluster": {"chief": [chief], "worker": workers}, "task": task, **common}),
        "CLUSTER_SPEC": json.dumps({"cluster": pools, "task": {"type": pool, "index": index, "trial": ""}, **common}),
        "AIP_MODEL_DIR": f"{base}/model/", "AIP_CHECKPOINT_DIR": f"{base}/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": f"{base}/logs/", "CLOUD_ML_JOB_ID": "4711",
    }  # fmt: skip


def test_each_container_has_its_place_by_the_tf_config_of_vertex_ai():
    chief, *workers = [f"cmle-training-workerpool{i > 0:d}-ab-{max(0, i - 1)}:2222" for i in range(4)]
    places = [("chief", 0), *(("worker", i) for i in range(3))]
    for index, (kind, number) in enumerate(places):
        cluster = resolve(environment(chief, workers, kind, number, "gs://bucket/digits"))
        assert (cluster.workers, cluster.index, cluster.is_chief) == ((chief, *workers), index, index == 0)
    assert sum(pool["replicaCount"] for pool in JOB["workerPoolSpecs"]) == 4


def test_the_job_is_what_the_client_of_vertex_ai_takes():
    types = pytest.importorskip("google.cloud.aiplatform_v1.types", reason="pip install google-cloud-aiplatform")
    spec = types.CustomJobSpec.from_json(json.dumps(JOB), ignore_unknown_fields=False)
    assert [pool.replica_count for pool in spec.worker_pool_specs] == [1, 3]
    assert spec.scheduling.restart_job_on_worker_restart and spec.scheduling.timeout.days == 7
    with pytest.raises(Exception, match="no field named"):
        types.CustomJobSpec.from_json(json.dumps({**JOB, "pools": 1}), ignore_unknown_fields=False)


ARGUMENTS = [
    "--mode=train", "--config.slow_step=0.01", "--train_steps=60", "--config.state_mb=0.01", "--verbosity=0",
    "--strategy=multi_worker",
]  # fmt: skip


class Container:
    """A container of the job (a stand-in: a process here), which runs docs/cluster/vertex_worker.sh."""

    def __init__(self, nursery, variables, log):
        self._log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                ["sh", DOCS / "vertex_worker.sh", nursery.python, "-m", "faulty", *ARGUMENTS],
                env={**nursery.environment, **variables, "RESTART_PAUSE": "0"}, stdout=file, stderr=file,
            )  # fmt: skip

    def worker(self):
        """The process id of the command."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        end = time.monotonic() + 30
        while not (found := children.read_text().split()):
            assert time.monotonic() < end and self.process.poll() is None, self.output()
            time.sleep(0.01)
        return int(found[0])

    def output(self):
        return self._log.read_text()


def wait_for_step(run, step, containers):
    end = time.monotonic() + 120
    while (done := commits.newest(run / "checkpoints")) is None or done.step < step:
        assert time.monotonic() < end, "\n".join(container.output() for container in containers)
        time.sleep(0.01)
    return done.step


@pytest.mark.slow
def test_two_containers_of_vertex_ai_train_and_outlive_a_kill_and_a_machine_that_goes(nursery, tmp_path):
    whole = nursery.workers(2, tmp_path / "whole", *ARGUMENTS)
    assert [worker.code(300) for worker in whole] == [0, 0]
    run = tmp_path / "digits" / "checkpoints"
    with hold_ports(2) as ports:
        chief, worker = (f"127.0.0.1:{port}" for port in ports)
        environments = [
            environment(chief, [worker], kind, 0, tmp_path / "digits") for kind in ("chief", "worker")
        ]  # fmt: skip
        containers = [
            Container(nursery, variables, tmp_path / f"log{i}") for i, variables in enumerate(environments)
        ]  # fmt: skip
        try:
            step = wait_for_step(run, 10, containers)
            os.kill(containers[1].worker(), signal.SIGKILL)
            step = wait_for_step(run, step + 10, containers)
            containers[1].process.terminate()  # as Kubernetes does, to the first process of the container
            assert containers[1].process.wait(60) == 134  # for which Vertex AI starts it again
            assert "the worker ended with code 137" in containers[1].output()
            containers[1] = Container(nursery, environments[1], tmp_path / "log1")
            assert [container.process.wait(120) for container in containers] == [0, 0]
        finally:
            for container in containers:
                container.process.kill()
    text = containers[0].output()
    assert "the worker ended with code 1\n" in text and "the worker ended with code 75\n" in text
    result = compare(tmp_path / "whole", run)
    assert result.differences == [] and result.examples
