"""Who the processes of a run are, read from the environments of TensorFlow, Vertex AI, Slurm and Kubernetes."""

import json
import os

import pytest

from looplib.cluster.environment import Cluster, expand_hostlist, resolve
from looplib.errors import ClusterError


def tf_config(cluster, kind="worker", index=0):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_an_environment_without_a_cluster_is_none():
    for environ in ({}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}, {"TF_CONFIG": '{"task": {"type": "master", "index": 0}}'},
                    {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script's own shell
                    {"JOB_COMPLETION_INDEX": "3"}, {"MASTER_ADDR": "a", "RANK": "0", "WORLD_SIZE": "2"}):  # fmt: skip
        assert resolve(environ) is None


def test_workers_only():
    cluster = resolve(tf_config({"worker": ["a:1", "b:2", "c:3"]}, index=1))
    assert cluster.workers == ("a:1", "b:2", "c:3")
    assert (cluster.index, cluster.is_chief, cluster.source) == (1, False, "TF_CONFIG")
    assert cluster.spec == {"worker": ["a:1", "b:2", "c:3"]}
    assert resolve(tf_config({"worker": ["a:1", "b:2"]})).is_chief


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("kind,index,expected", [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_a_chief_is_the_first_worker_where_there_are_no_parameter_servers(kind, index, expected):
    cluster = resolve(tf_config({"worker": ["a:1", "b:2"], "chief": ["c:3"]}, kind, index))
    assert cluster.workers == ("c:3", "a:1", "b:2")
    assert (cluster.index, cluster.is_chief, cluster.chief) == (expected, expected == 0, None)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("kind,index", [("chief", 0), ("worker", 1), ("ps", 0)])
def test_with_parameter_servers_the_chief_stands_apart(kind, index):
    layout = {"chief": ["c:3"], "worker": ["a:1", "b:2"], "ps": ["p:4"]}
    cluster = resolve(tf_config(layout, kind, index))
    assert (cluster.chief, cluster.workers, cluster.parameter_servers) == ("c:3", ("a:1", "b:2"), ("p:4",))
    assert (cluster.task_type, cluster.task_index, cluster.index) == (kind, index, None)
    assert cluster.is_chief == (kind == "chief")
    assert cluster.spec == layout


@pytest.mark.parametrize("layout", [{"worker": ["a:1"]}, {"chief": ["c:3"], "worker": ["a:1"], "ps": ["p:4"]}])
def test_an_evaluator_stands_beside_the_others(layout):
    cluster = resolve(tf_config(layout, "evaluator"))
    assert (cluster.task_type, cluster.index, cluster.is_chief) == ("evaluator", None, False)
    assert resolve(tf_config({**layout, "evaluator": ["e:9"]}, "evaluator")).spec == cluster.spec


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("kind,index", [("worker", 1), ("chief", 0), ("ps", 1), ("evaluator", 0)])
def test_tf_config_says_the_same_again(kind, index):
    layout = {"chief": ["c:3"], "worker": ["a:1", "b:2"], "ps": ["p:4", "p:5"]}
    cluster = resolve(tf_config(layout, kind, index))
    assert resolve({"TF_CONFIG": cluster.tf_config}) == cluster


def test_tensorflow_reads_the_same_from_it():
    import tensorflow as tf

    cluster = Cluster(("a:1", "b:2"), ("p:4",), "c:3", "worker", 1)
    os.environ["TF_CONFIG"] = cluster.tf_config
    try:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        assert resolver.cluster_spec().as_dict() == cluster.spec
        assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    finally:
        del os.environ["TF_CONFIG"]


WORKERS = {"worker": ["a:1", "b:2"]}


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "environ,words",
    [
        ({"TF_CONFIG": "{'cluster'"}, "TF_CONFIG is not JSON"),
        ({"TF_CONFIG": "[1]"}, "a JSON list; expected an object"),
        ({"TF_CONFIG": '{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}'}, "expected lists of addresses"),
        ({"TF_CONFIG": '{"cluster": {"worker": {"0": "a:1"}}, "task": {}}'}, "expected lists of addresses"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "expected a type and an index"),
        (tf_config(WORKERS, index=-1), "expected a type and an index"),
        (tf_config(WORKERS, index="x"), "expected a type and an index"),
        (tf_config(WORKERS, index=2), "worker 2, but lists only 2; expected an index from 0 to 1"),
        (tf_config({**WORKERS, "chief": ["c:3"]}, index=2), "worker 2, but lists only 2; expected an index from 0"),
        (tf_config(WORKERS, "chief"), "a chief, but its \"cluster\" lists none"),
        (tf_config(WORKERS, "ps"), "a ps, but its \"cluster\" lists none"),
        (tf_config(WORKERS, "master"), "a 'master'; expected one of"),
        (tf_config({"worker": ["a:1"], "master": ["m:1"]}), "has 'master'; expected chief, worker, ps and evaluator"),
        (tf_config({"worker": ["a:1", "a:1"]}), "lists the address a:1 twice"),
        (tf_config({"worker": ["a:1"], "chief": ["a:1"]}), "lists the address a:1 twice"),
        (tf_config({"worker": ["a:1"], "chief": ["c:1", "d:1"]}), "lists 2 chiefs; expected one"),
        (tf_config({"worker": ["a:1"], "ps": ["p:1"]}), "lists 0 chiefs; expected one"),
        (tf_config({"worker": [], "chief": ["c:1"], "ps": ["p:1"]}, "chief"), "lists no worker"),
        (tf_config({"worker": ["a"]}), "the address 'a'; expected host:port"),
        (tf_config({"worker": ["grpc://a:1"]}), "expected host:port"),
        (tf_config({"worker": ["a:0"]}), "expected host:port"),
        (tf_config({"worker": ["a:70000"]}), "expected host:port"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_in_one_sentence(environ, words):
    with pytest.raises(ClusterError) as error:
        resolve(environ)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_ipv6_addresses_are_taken():
    assert resolve(tf_config({"worker": ["[fd00::1]:2222", "[fd00::2]:2222"]})).workers[1] == "[fd00::2]:2222"


# Slurm.


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "text,hosts",
    [
        ("login", ["login"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("rack[1-2]-n[01-02]", ["rack1-n01", "rack1-n02", "rack2-n01", "rack2-n02"]),
        ("a[1-2].cluster.local", ["a1.cluster.local", "a2.cluster.local"]),
        ("[8-9]", ["8", "9"]),
    ],
)
def test_slurms_host_lists_are_expanded(text, hosts):
    assert expand_hostlist(text) == hosts


def test_host_lists_are_expanded_as_tensorflow_does():
    from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver

    for text in ("n[1-2],m5,o[3-4,6,7-9]", "gnode[10,20,25,37]", "node[001-012]", "a,b,c"):
        assert expand_hostlist(text) == slurm_cluster_resolver.expand_hostlist(text)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("text", ["", "node[1-", "node[a-b]", "a,,b", "node[1-3]]", "a b", "node[]"])
def test_other_host_lists_are_refused(text):
    with pytest.raises(ClusterError):
        expand_hostlist(text)


def slurm(nodes, tasks_per_node, count, rank, **more):
    return {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": nodes, "SLURM_PROCID": str(rank),
            "SLURM_STEP_TASKS_PER_NODE": tasks_per_node, "SLURM_STEP_NUM_TASKS": str(count), **more}  # fmt: skip


def test_a_slurm_step_in_the_order_of_its_nodes():
    cluster = resolve(slurm("node[9-11]", "1(x3)", 3, 2, SLURMD_NODENAME="node11"))
    assert cluster.workers == ("node9:2222", "node10:2222", "node11:2222")
    assert (cluster.index, cluster.source) == (2, "the Slurm step")


def test_several_tasks_on_a_node_have_a_port_each():
    cluster = resolve(slurm("a,b", "2,1", 3, 1, LOOPLIB_PORT="5000", SLURMD_NODENAME="a"))
    assert cluster.workers == ("a:5000", "a:5001", "b:5000")
    cyclic = slurm("a,b", "2,1", 3, 1, SLURM_DISTRIBUTION="cyclic", SLURMD_NODENAME="b")
    assert resolve(cyclic).workers == ("a:2222", "b:2222", "a:2223")


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "environ,words",
    [
        (slurm("a,b", "1(x3)", 3, 0), "Slurm's variables disagree"),
        (slurm("a,b", "1(x2)", 3, 0), "Slurm's variables disagree"),
        (slurm("a,b", "1x2", 2, 0), "expected a form such as 2(x3),1"),
        (slurm("a,b", "1(x2)", 2, 5), "worker 5, but lists only 2"),
        (slurm("a,b", "1(x2)", 2, 1, SLURMD_NODENAME="a", SLURM_DISTRIBUTION="arbitrary"), "use srun --distribution=block"),
        (slurm("a,b", "1(x2)", 2, "one"), "SLURM_PROCID is 'one'; expected a whole number"),
    ],
)  # fmt: skip
def test_a_slurm_step_that_cannot_be_right_is_refused(environ, words):
    with pytest.raises(ClusterError) as error:
        resolve(environ)
    assert words in str(error.value)


# Kubernetes.


INDEXED = {"JOB_COMPLETION_INDEX": "1", "LOOPLIB_NUM_WORKERS": "4", "LOOPLIB_SERVICE": "s", "JOB_NAME": "j"}
JOBSET = {"JOB_COMPLETION_INDEX": "1", "LOOPLIB_NUM_WORKERS": "4", "JOBSET_NAME": "t", "REPLICATED_JOB_NAME": "w"}


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "environ,words",
    [
        ({**INDEXED, "LOOPLIB_SERVICE": ""}, "LOOPLIB_SERVICE is missing"),
        ({**INDEXED, "JOB_COMPLETION_INDEX": "4"}, "worker 4, but lists only 4"),
        ({**INDEXED, "LOOPLIB_NUM_WORKERS": "four"}, "LOOPLIB_NUM_WORKERS is 'four'; expected a whole number"),
        ({**INDEXED, "LOOPLIB_NUM_WORKERS": "0"}, "lists no worker"),
        ({**JOBSET, "REPLICATED_JOB_NAME": ""}, "REPLICATED_JOB_NAME is missing"),
        ({**JOBSET, "LOOPLIB_NUM_JOBS": "3"}, "expected a multiple of the 3 jobs"),
        ({**JOBSET, "LOOPLIB_NUM_JOBS": "2", "JOB_INDEX": "2"}, "expected less than 2 and 2"),
    ],
)
def test_a_pod_that_cannot_be_right_is_refused(environ, words):
    with pytest.raises(ClusterError) as error:
        resolve(environ)
    assert words in str(error.value)


def test_tf_config_goes_before_the_rest():
    environ = {**INDEXED, **slurm("a,b", "1(x2)", 2, 0), **tf_config({"worker": ["x:1"]})}
    assert resolve(environ).source == "TF_CONFIG"
