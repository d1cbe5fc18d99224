"""The kind of machine that a start ran on: what may decide the last bits of its results, as noted in `run.json`."""

import dataclasses
import hashlib
import os
import platform

from looplib.base import files
from looplib.run.run_json import StartRecord

NOTE = "machine"  # the name of the list in a start
_VARIABLES = ("OMP_NUM_THREADS", "TF_ENABLE_ONEDNN_OPTS", "XLA_FLAGS")  # of the environment, that change kernels
_MOST_BYTES = 1 << 14  # of /proc/cpuinfo, which has a part for each core


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of machine.

    Attributes:
      cpu: the name of the CPU, and a checksum of what it says that it can do.
      cores: how many of its cores the process may use.
      devices: the names of GPUs and TPUs.
      variables: those of the environment that change how TensorFlow computes, with their values.
    """

    cpu: str
    cores: int
    devices: list[str]
    variables: dict[str, str]

    def differences(self, now: "Machine") -> list[str]:
        """Returns what is another one on a second machine, as clauses."""
        found = [
            f"{what} {before or 'none'} then, and {after or 'none'} now"
            for what, before, after in (
                ("its CPU was", self.cpu, now.cpu),
                ("it had the cores", str(self.cores), str(now.cores)),
                ("it had the devices", ", ".join(self.devices), ", ".join(now.devices)),
            )
            if before != after
        ]
        names = sorted(self.variables.keys() | now.variables.keys())
        pairs = [(name, self.variables.get(name), now.variables.get(name)) for name in names]
        return found + [
            f"{name} was {before!a:.100}, and is {after!a:.100}" for name, before, after in pairs if before != after
        ]


def this_machine() -> Machine:
    """Returns the kind of this machine."""
    import tensorflow as tf  # here, because every start of a binary imports this file

    devices = []
    for kind in ("GPU", "TPU"):
        for device in tf.config.list_physical_devices(kind):
            details = tf.config.experimental.get_device_details(device) if kind == "GPU" else {}
            devices.append(str(details.get("device_name", kind)))
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return Machine(_cpu(), cores, devices, variables)


def machine_of(start: StartRecord) -> Machine | None:
    """Returns the kind of machine that a start has noted; None if it has not."""
    noted = start.get(NOTE)
    try:
        return files.typed(noted[-1], Machine)
    except (files.MisfitError, TypeError, LookupError):
        return None


def _cpu() -> str:
    """Returns the name of the CPU, with a checksum of its features: a virtual machine may hide some of them."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.partition(":") for line in file.read(_MOST_BYTES).splitlines()]
    except OSError:
        return platform.processor() or platform.machine()
    first: dict[str, str] = {}
    for name, _, value in lines:
        first.setdefault(name.strip(), value.strip())
    name = first.get("model name") or f"{platform.machine()} {first.get('CPU part', '')}".strip()
    features = first.get("flags") or first.get("Features", "")
    return f"{name} ({hashlib.sha256(features.encode()).hexdigest()[:8]})"
