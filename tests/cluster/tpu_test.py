"""TPUs: resolved, divided, lost and found again. No TPU is at hand: what stands in for one is named so."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tpu_stand_in
from conftest import make_strategy
from paths import PYTHONPATH

import looplib
from looplib.cluster import runtime, tpu
from looplib.errors import SettingError, StrategyError, TpuError
from looplib.run.records import read_jsonl

ROOT = pathlib.Path(__file__).parents[2]


class StandInResolver:
    """Stands in for TPUClusterResolver: notes what it is given."""

    given = None

    def __init__(self, **given):
        StandInResolver.given = given


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "name, given",
    [
        ("mine", {"tpu": "mine"}),
        ("10.0.0.2:8470", {"tpu": "grpc://10.0.0.2:8470"}),
        ("10.0.0.2:8470,10.0.0.3:8470", {"tpu": "grpc://10.0.0.2:8470,10.0.0.3:8470"}),
        ("grpc://10.0.0.2:8470", {"tpu": "grpc://10.0.0.2:8470"}),
        ("local", {"tpu": "local"}),
        ("projects/p/locations/us-central1-b/nodes/n", {"tpu": "n", "project": "p", "zone": "us-central1-b"}),
    ],
)
def test_a_tpu_is_resolved_by_name_address_or_environment(name, given, monkeypatch):
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", StandInResolver)
    tpu.resolver_of(name)
    assert StandInResolver.given == given
    for variable in ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, name)
            assert runtime._tpu_is_here()
            tpu.resolver_of()
        assert StandInResolver.given == given
    assert not runtime._tpu_is_here()


def test_the_real_resolver_takes_an_address_and_tells_the_cluster():
    resolver = tpu.resolver_of("10.0.0.2:8470,10.0.0.3:8471")
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8471"]}
    assert resolver.master() == "grpc://10.0.0.2:8470"


def run(python, program, **environment):
    return subprocess.run(
        [python, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
    )  # fmt: skip


def test_a_worker_without_a_tpu_is_a_sentence(python):
    """Connects for real, to a TensorFlow server of this machine."""
    result = run(
        python,
        """
import tensorflow as tf
from looplib.cluster import runtime; from looplib import UsageError
server = tf.distribute.Server({"worker": ["localhost:0"]}, job_name="worker", protocol="grpc")
try:
    runtime.setup("tpu", tpu=server.target.removeprefix("grpc://"))
except UsageError as error:
    print("SENTENCE", error, flush=True)
import os
os._exit(0)
""",
    )
    sentence = next((line for line in result.stdout.splitlines() if line.startswith("SENTENCE")), result.stderr)
    assert "SENTENCE the TPU localhost:" in sentence and "cannot be reached" in sentence
    assert sentence.endswith("check its name and state, or use --strategy=one_device")


def test_an_address_where_nobody_listens_is_a_sentence():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))  # and does not listen
        address = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(TpuError, match=f"TPU.*{address}.*.*refused.*"):
            runtime.setup("tpu", tpu=address)


def test_without_a_tpu_auto_takes_what_is_there_and_tpu_is_an_error():
    assert not isinstance(runtime.setup("auto"), tf.distribute.TPUStrategy)
    with pytest.raises(TpuError, match="TPU.*TPU"):
        runtime.setup("tpu")


def topology(x=2, y=2, cores=2):
    """The topology of a TPU of x times y chips; 2 x 2 with two cores each is a v2-8 or v3-8."""
    chips = [[[i, j, 0, core] for j in range(y) for i in range(x) for core in range(cores)]]
    return tf.tpu.experimental.Topology(mesh_shape=[x, y, 1, cores], device_coordinates=chips)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("cores, replicas", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_each_replica_has_a_compact_block_of_cores_of_its_own(cores, replicas):
    found = tpu.device_assignment(topology(), cores).core_assignment
    assert found.shape == (replicas, cores, 4)
    assert len({tuple(core) for core in found.reshape(-1, 4)}) == 8
    for block in found:
        assert np.prod(block.max(0) - block.min(0) + 1) == cores


def test_the_references_assignment_is_found():
    """Of the documentation of tf.distribute.TPUStrategy: two logical devices, one replica."""
    by_hand = tf.tpu.experimental.DeviceAssignment.build(topology(), computation_shape=[1, 1, 1, 2], num_replicas=1)
    ours = tpu.device_assignment(topology(), 2, replicas=1)
    assert ours.core_assignment.tolist() == by_hand.core_assignment.tolist()


def test_the_references_assignment_is_reached_by_setup(monkeypatch):
    """With stand-ins for the resolver, the connection and the strategy, which notes its arguments."""
    given = {}
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", tpu_stand_in.Resolver)
    monkeypatch.setattr(tpu_stand_in, "note", lambda line: None)
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", lambda resolver: None)
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", lambda resolver: topology())
    monkeypatch.setattr(
        tf.distribute, "TPUStrategy", lambda resolver, **values: given.update(values) or tf.distribute.get_strategy()
    )
    by_hand = tf.tpu.experimental.DeviceAssignment.build(topology(), computation_shape=[1, 1, 1, 2], num_replicas=1)
    runtime.setup("tpu", tpu="mine", tpu_cores_per_replica=2, tpu_replicas=1)
    assert given["experimental_device_assignment"].core_assignment.tolist() == by_hand.core_assignment.tolist()
    assert given["experimental_spmd_xla_partitioning"] is False
    runtime.setup("tpu", tpu="mine", tpu_replicas=3)
    assert given["experimental_device_assignment"].core_assignment.shape == (3, 1, 4)
    with pytest.raises(TpuError, match="5.*replica.s..*2.*TPU.*8"):
        runtime.setup("tpu", tpu="mine", tpu_cores_per_replica=2, tpu_replicas=5)
    with pytest.raises(SettingError, match="tpu_replicas.*0.*1"):
        runtime.setup("tpu", tpu="mine", tpu_replicas=0)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("cores, replicas", [(3, None), (16, None), (2, 5)])
def test_what_does_not_fit_is_a_sentence(cores, replicas):
    with pytest.raises(TpuError, match=f"{cores}.*TPU.*8.*.2.*2.*1.*2..*1.*2.*4"):
        tpu.device_assignment(topology(), cores, replicas)


def test_spmd_needs_cores_and_float16_is_refused():
    with pytest.raises(TpuError, match="tpu_spmd"):
        runtime.setup("tpu", tpu_spmd=True)
    with pytest.raises(StrategyError, match="mixed_float16.*TPU.*mixed_bfloat16"):
        runtime.setup("tpu", mixed_precision="mixed_float16")


def tpu_strategy(cores_per_replica=2, spmd=False):
    """A real TPUStrategy whose resolver stands in for that of a TPU; it can trace, and not run."""
    devices = [
        tf.compat.v1.DeviceSpec(job="worker", replica=0, task=0, device_type="TPU", device_index=i) for i in range(8)
    ]

    class Device:
        def __init__(self, name):
            self.name = name

    class Metadata:
        num_cores, num_hosts, num_of_cores_per_host = 8, 1, 8

    Metadata.devices = [Device(device.to_string()) for device in devices]

    class Resolver:
        def get_tpu_system_metadata(self):
            return Metadata

    assignment = tpu.device_assignment(topology(), cores_per_replica)
    return tf.distribute.TPUStrategy(
        Resolver(), experimental_device_assignment=assignment, experimental_spmd_xla_partitioning=spmd
    )


def test_tensors_are_divided_over_the_cores_of_a_replica_on_a_tpu_and_left_alone_elsewhere():
    strategy = tpu_strategy(spmd=True)
    assert runtime.describe(strategy) == "TPUStrategy, 4 replicas"

    def shardings(function):
        with tf.Graph().as_default() as graph, strategy.scope():
            function(tf.zeros([4, 6]))
        return [op.get_attr("sharding") for op in graph.get_operations() if op.type == "XlaSharding"]

    assert len(set(shardings(lambda x: tpu.split_over_cores(x, [2, 1])) + shardings(tpu.replicate_over_cores))) == 2
    strategy = tpu_strategy()
    assert len(shardings(lambda x: tpu.assign_to_core(x, 1))) == 1
    x = tf.zeros([4, 6])
    assert tpu.split_over_cores(x, [2, 1]) is tpu.replicate_over_cores(x) is tpu.assign_to_core(x, 1) is x
    for parts in ([2], [4, 4]):
        with pytest.raises(TpuError):
            tpu.split_over_cores(x, parts)


def test_the_eager_loop_is_refused_on_a_tpu():
    import toy

    with pytest.raises(StrategyError, match="TPU"):
        looplib.Controller(
            looplib.RunConfig(global_batch_size=8, loop="eager"), trainer=toy.Regression(), strategy=tpu_strategy()
        )


def test_only_a_tpus_loss_is_one():
    gone = tf.errors.UnavailableError(None, None, "Socket closed")
    assert tpu.is_lost(tpu_strategy(), gone)
    assert not tpu.is_lost(make_strategy("mirrored_x2"), gone)
    assert not tpu.is_lost(tpu_strategy(), tf.errors.InvalidArgumentError(None, None, "no"))


def train(folder, *arguments, module="tpu_stand_in", python=sys.executable):
    log = folder / "calls"
    result = subprocess.run(
        [python, "-m", module, "--strategy=tpu", "--tpu=mine", f"--model_dir={folder}/run", *arguments],
        capture_output=True, text=True, timeout=240, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "TPU_STAND_IN_LOG": str(log)},
    )  # fmt: skip
    return result, log.read_text().splitlines()


@pytest.mark.slow
def test_a_run_whose_tpu_is_lost_waits_for_it_and_continues_as_if_it_had_not_been(python, tmp_path):
    """With a stand-in for the TPU; the processes, the new start and the checkpoint are real.

    Only the new start imports TensorFlow, with --all the first one too.
    """
    lost, whole = tmp_path / "lost", tmp_path / "whole"
    lost.mkdir()
    whole.mkdir()
    (whole / "calls").write_text("lost\nbefore\n")  # so that it is not lost again
    result, calls = train(lost, python=sys.executable)
    assert result.returncode == 0, result.stderr
    assert calls == ["resolve mine", "initialize", "lost"] + ["resolve mine", "initialize"] * 2
    assert "the TPU was lost: restarting (1) to resume from step 20" in result.stderr
    assert "the TPU mine is not back yet (failed to connect to all addresses)" in result.stderr
    uninterrupted, _ = train(whole, python=python)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    curves = [
        [(record["step"], record["loss"]) for record in read_jsonl(str(folder / "run" / "metrics.jsonl"))]
        for folder in (lost, whole)
    ]
    assert curves[0] == curves[1] and [step for step, _ in curves[0]] == [10, 20, 30, 40, 50, 60]
    report = json.loads((lost / "run" / "run.json").read_text())
    assert report["status"] == "done" and report["restarts"] == 1


@pytest.mark.slow
def test_a_tpu_that_is_lost_again_and_again_ends_the_run(tmp_path):
    result, calls = train(tmp_path, "--config.always")
    assert result.returncode == 1 and calls.count("lost") == 3
    assert result.stderr.splitlines()[-1].startswith(
        "looplib: error: the TPU was lost 3 times without a new checkpoint between; check the TPU"
    )
