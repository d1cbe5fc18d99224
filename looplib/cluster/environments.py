"""The processes of a run, read from the environment variables of Slurm and Kubernetes. Imports no TensorFlow.

TensorFlow's own `SlurmClusterResolver` is not used: it fails on nodes without NVIDIA GPUs, and sorts the hosts by name,
so that on node[9-10] rank 0, which runs on node9, is given the address of node10.
"""

import itertools
import re
from collections.abc import Mapping

from looplib.cluster.environment import Cluster
from looplib.errors import ClusterError

PORT = 2222  # where an environment names hosts only; LOOPLIB_PORT changes it


def read_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """Reads the cluster of a step of Slurm, a JobSet or an Indexed Job; None if the process is in none of them.

    Args:
      environ: the environment's variables.

    Raises:
      UsageError: if the variables cannot be right.
    """
    return _slurm(environ) or _kubernetes(environ)


def expand_hostlist(text: str) -> list[str]:
    """Expands Slurm's short form of hosts, in its order: "a[1-2,7],b" is a1, a2, a7, b; "n[01-03]" keeps the zeros.

    Raises:
      UsageError: for text of another form.
    """
    if not re.fullmatch(rf"{_HOST}(,{_HOST})*", text):
        raise ClusterError(f"the Slurm host list {text!r} cannot be read; expected a form such as node[01-03,7],login")
    hosts = []
    for part in re.findall(_HOST, text):
        pieces = re.split(r"\[(.*?)\]", part)  # literal, ranges, literal, ranges, ..., literal
        choices = [_expand_ranges(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        hosts += map("".join, itertools.product(*choices))
    return hosts


_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOST = rf"(?:[\w.-]|{_RANGES})+"


def _expand_ranges(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    # Only a process that srun started has these; the shell of a batch script is alone.
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_STEP_NODELIST" not in environ:
        return None
    hosts = expand_hostlist(environ["SLURM_STEP_NODELIST"])
    count, rank = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_PROCID")
    sizes = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", f"1(x{len(hosts)})").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ClusterError(f"SLURM_STEP_TASKS_PER_NODE has {part!r}; expected a form such as 2(x3),1")
        sizes += [int(match[1])] * int(match[2] or 1)
    if len(sizes) != len(hosts) or sum(sizes) != count:
        raise ClusterError(
            f"Slurm's variables disagree: SLURM_STEP_NODELIST has {len(hosts)} hosts, SLURM_STEP_TASKS_PER_NODE "
            f"{len(sizes)} with {sum(sizes)} tasks, SLURM_STEP_NUM_TASKS says {count}; start the program "
            "by srun, and change none of them"
        )
    places = [(local, node) for node, size in enumerate(sizes) for local in range(size)]  # by rank: node after node
    if environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        places.sort()  # one task to each node in turn
    port = _number(environ, "LOOPLIB_PORT", PORT)
    workers = tuple(f"{hosts[node]}:{port + local}" for local, node in places)
    here = environ.get("SLURMD_NODENAME", "")
    if here and rank < count and hosts[places[rank][1]] != here:
        raise ClusterError(
            f"this process, rank {rank}, runs on {here}, where srun's distribution "
            f"{environ.get('SLURM_DISTRIBUTION', 'block')!r} would put it on {hosts[places[rank][1]]}; use "
            "srun --distribution=block, or one task a node"
        )
    job = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    return Cluster(workers, task_index=rank, source="the Slurm step", job_id=".".join(job))


def _kubernetes(environ: Mapping[str, str]) -> Cluster | None:
    """Reads an Indexed Job, alone or in a JobSet; docs/cluster has the manifests that set the variables."""
    if "LOOPLIB_NUM_WORKERS" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None  # any Indexed Job has an index, also one whose pods do not work together
    count, index = _number(environ, "LOOPLIB_NUM_WORKERS"), _number(environ, "JOB_COMPLETION_INDEX")
    port = _number(environ, "LOOPLIB_PORT", PORT)
    jobset = environ.get("JOBSET_NAME")
    if jobset:  # the pods of each of its jobs, one job after the other
        source, service = "the JobSet", environ.get("LOOPLIB_SERVICE", jobset)
        jobs, job = _number(environ, "LOOPLIB_NUM_JOBS", 1), _number(environ, "JOB_INDEX", 0)
        if jobs < 1 or count % jobs:
            raise ClusterError(
                f"LOOPLIB_NUM_WORKERS is {count}; expected a multiple of the {jobs} jobs of LOOPLIB_NUM_JOBS"
            )
        name = f"{jobset}-{_text(environ, 'REPLICATED_JOB_NAME')}"
        pods = count // jobs
        hosts = [f"{name}-{i}-{j}" for i in range(jobs) for j in range(pods)]
        if job >= jobs or index >= pods:
            raise ClusterError(
                f"this pod has JOB_INDEX={job} and JOB_COMPLETION_INDEX={index}; with {jobs} jobs and {count} workers "
                f"expected less than {jobs} and {pods}"
            )
        index += job * pods
    else:
        source, service, name = "the Indexed Job", _text(environ, "LOOPLIB_SERVICE"), _text(environ, "JOB_NAME")
        hosts = [f"{name}-{i}" for i in range(count)]
    workers = tuple(f"{host}.{service}:{port}" for host in hosts)
    return Cluster(workers, task_index=index, source=source, job_id=environ.get("LOOPLIB_JOB_ID", ""))


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ClusterError(f"{name} is missing in the pod's environment; docs/cluster.md has manifests that set it")
    return environ[name]


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ClusterError(f"{name} is {text!r}; expected a whole number, 0 or more")
    return int(text)
