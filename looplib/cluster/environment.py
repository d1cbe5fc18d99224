"""The processes of a run, read from TF_CONFIG or from a cluster manager. Imports no TensorFlow."""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Mapping

from looplib.base.decoding import parse_json
from looplib.errors import ClusterError

# For messages, where a cluster is needed and `resolve` returned None.
EXPECTED = (
    "expected TF_CONFIG, or a step started by srun, or an Indexed Job or JobSet with LOOPLIB_NUM_WORKERS and the other "
    "variables of docs/cluster.md; on one machine, `python -m looplib launch --workers=2 -- COMMAND` sets TF_CONFIG"
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run, and which of them this one is.

    Without parameter servers all `workers` train in step. The first is the chief, and `task_type` is "worker" (or
    "evaluator", which is not one of them). With parameter servers the chief coordinates, and is not among `workers`.

    Attributes:
      workers: their addresses, "host:port".
      parameter_servers: their addresses.
      chief: the coordinator's address, with parameter servers only.
      task_type: "worker", "chief", "ps" or "evaluator".
      task_index: the index among the tasks of this type.
      source: where this was read, such as "TF_CONFIG".
      job_id: distinguishes two starts on the same addresses, if the environment does.
    """

    workers: tuple[str, ...]
    parameter_servers: tuple[str, ...] = ()
    chief: str | None = None
    task_type: str = "worker"
    task_index: int = 0
    source: str = ""
    job_id: str = ""

    def __post_init__(self) -> None:
        """Checks the addresses and the task, and raises `UsageError` if they cannot be right."""
        tasks = {**self.spec, "evaluator": ()}
        addresses = list(itertools.chain(*tasks.values()))
        for address in addresses:
            _check_address(address, self.source)
        twice = sorted({address for address in addresses if addresses.count(address) > 1})
        if twice:
            raise ClusterError(
                f"{self.source} lists the address {twice[0]} twice; expected a unique address for each task"
            )
        if not self.workers:
            raise ClusterError(f"{self.source} lists no worker; expected at least one")
        if self.task_type not in tasks:
            raise ClusterError(
                f"{self.source} declares this process as a {self.task_type!r}; expected one of {', '.join(tasks)}"
            )
        count = len(tasks[self.task_type])
        if self.task_index < 0 or (self.task_type != "evaluator" and self.task_index >= count):
            raise ClusterError(
                f"{self.source} declares this process as {self.task_type} {self.task_index}, but lists only {count}; "
                f"expected an index from 0 to {count - 1}"
            )

    @property
    def index(self) -> int | None:
        """The index of this process among the workers that train in step; None for any other process."""
        return self.task_index if self.task_type == "worker" and not self.parameter_servers else None

    @property
    def is_chief(self) -> bool:
        """Returns whether this process reports, writes and, with parameter servers, coordinates."""
        return self.task_type == "chief" or self.index == 0

    @property
    def spec(self) -> dict[str, list[str]]:
        """The addresses by task type, for `tf.train.ClusterSpec`."""
        groups = {"chief": [self.chief] if self.chief else [], "worker": self.workers, "ps": self.parameter_servers}
        return {name: list(addresses) for name, addresses in groups.items() if addresses}

    @property
    def tf_config(self) -> str:
        """The value of the environment variable TF_CONFIG for this process."""
        return json.dumps({"cluster": self.spec, "task": {"type": self.task_type, "index": self.task_index}})


def resolve(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """Reads the cluster from the environment: from the first of TF_CONFIG, Slurm, JobSet and Indexed Job that is set.

    None if the environment describes none; `UsageError` if its variables cannot be right.
    """
    return _tf_config(environ) or _slurm(environ) or _kubernetes(environ)


def _tf_config(environ: Mapping[str, str]) -> Cluster | None:
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        config = parse_json(text)
    except ValueError as error:
        raise ClusterError(f"TF_CONFIG is not JSON ({error}); expected {_EXAMPLE}") from error
    if not isinstance(config, dict):
        raise ClusterError(f"TF_CONFIG is a JSON {type(config).__name__}; expected an object, such as {_EXAMPLE}")
    if not config.get("cluster"):
        return None  # platforms set it so for a process that is alone
    cluster, task = config["cluster"], config.get("task")
    if not isinstance(cluster, dict) or not all(
        isinstance(group, list) and all(isinstance(address, str) for address in group) for group in cluster.values()
    ):
        raise ClusterError(f'TF_CONFIG\'s "cluster" is {cluster!r}; expected lists of addresses, such as {_EXAMPLE}')
    unknown = sorted(set(cluster) - {"chief", "worker", "ps", "evaluator"})
    if unknown:
        raise ClusterError(f'TF_CONFIG\'s "cluster" has {unknown[0]!r}; expected chief, worker, ps and evaluator only')
    if not isinstance(task, dict) or "type" not in task or not str(task.get("index", "")).isdecimal():
        raise ClusterError(f'TF_CONFIG\'s "task" is {task!r}; expected a type and an index, such as {_EXAMPLE}')
    chiefs, workers, servers = (cluster.get(name, []) for name in ("chief", "worker", "ps"))
    kind, index = task["type"], int(task["index"])
    if len(chiefs) > 1 or (servers and not chiefs):
        raise ClusterError(
            f"TF_CONFIG lists {len(chiefs)} chiefs; expected one, which coordinates where there are parameter servers "
            "(ps), and is the first worker where there are none"
        )
    if kind == "chief" and not chiefs or kind == "ps" and not servers:
        raise ClusterError(f'TF_CONFIG declares this process as a {kind}, but its "cluster" lists none')
    if not servers:  # then every process counts a chief as the first of the workers
        if kind == "worker" and index >= len(workers):
            raise ClusterError(
                f"TF_CONFIG declares this process as worker {index}, but lists only {len(workers)}; expected an "
                f"index from 0 to {len(workers) - 1}"
            )
        index += kind == "worker" and len(chiefs)
        kind = "worker" if kind == "chief" else kind
        workers, chiefs = chiefs + workers, []
    return Cluster(
        tuple(workers), tuple(servers), chiefs[0] if chiefs else None, kind, index, "TF_CONFIG",
        environ.get("LOOPLIB_JOB_ID", ""),
    )  # fmt: skip


_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def _check_address(address: str, source: str) -> None:
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.%]+\]", host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ClusterError(f"{source} has the address {address!r}; expected host:port, such as worker-0.train:2222")


PORT = 2222  # where an environment names hosts only; LOOPLIB_PORT changes it


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
