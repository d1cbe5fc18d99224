"""A store and machines that run there, for tests of runs in object stores; `conftest.py` has the fixture `cloud`."""

import dataclasses
import json
import pathlib
import shutil
import time

from paths import PYTHONPATH
from proxy import Proxy
from servers import KEY, S3, SECRET

BUCKET = "bucket"
LEASE = 3.0  # seconds


def lease_of(seconds):
    """The variable by which forks of a nursery have a lease of so many seconds, and copy reports each half second."""
    constants = {"looplib.buckets.lease.SECONDS": seconds, "looplib.buckets.upload.EVERY": 0.5}
    return {"TESTED_CONSTANTS": json.dumps(constants)}


@dataclasses.dataclass
class Cloud:
    """A store, and machines that run there; each test has a prefix of its own.

    Attributes:
      s3: the server.
      proxy: the `Proxy` before it.
      nursery: the `Nursery` of its runs.
      folder: for the machines' local files.
      prefix: of the test, in the bucket.
    """

    s3: S3
    proxy: Proxy
    nursery: object
    folder: pathlib.Path
    prefix: str

    def url(self, name="run"):
        return f"s3://{BUCKET}/{self.prefix}/{name}"

    def environment(self, machine="m", **more):
        """The variables of processes on a machine."""
        return {
            "AWS_ENDPOINT_URL": self.proxy.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            "LOOPLIB_CACHE": str(self.folder / machine), **lease_of(LEASE), "HOME": str(self.folder),
            "PYTHONPATH": PYTHONPATH, **more,
        }  # fmt: skip

    def run(self, *arguments, name="run", machine="m", environment=(), **order):
        """Starts `faulty` on a machine; returns its `Life`."""
        variables = self.environment(machine, **dict(environment))
        return self.nursery.life(self.url(name), *arguments, environment=variables, **order)

    def tool(self, *arguments, machine="m", environment=(), **order):
        """Starts a tool, `python -m looplib ...`; returns its `Life`."""
        variables = self.environment(machine, **dict(environment))
        return self.nursery.life_of("looplib", *map(str, arguments), environment=variables, **order)

    def copied(self, *arguments, name="run", machine="m", environment=(), **order):
        """Starts `copied`, a run without a model; returns its `Life`."""
        variables = self.environment(machine, **dict(environment))
        return self.nursery.life_of("copied", self.url(name), *arguments, environment=variables, **order)

    def lose(self, machine="m"):
        """Removes all local files of a machine."""
        shutil.rmtree(self.folder / machine, ignore_errors=True)

    def local(self, machine="m", name="run"):
        """The local directory of a run on a machine."""
        (found,) = (self.folder / machine / "runs").glob(f"*/{name}")
        return found

    def names(self, name="run"):
        """{name: bytes} of the run's objects."""
        start = f"{self.prefix}/{name}/"
        return {key.removeprefix(start): size for key, size in self.s3.names(BUCKET, start).items()}

    def steps(self, name="run"):
        return self.s3.steps(BUCKET, f"{self.prefix}/{name}")

    def read(self, key, name="run"):
        return self.s3.read(BUCKET, f"{self.prefix}/{name}/{key}")

    def write(self, key, content, name="run"):
        self.s3.write(BUCKET, f"{self.prefix}/{name}/{key}", content)

    def delete(self, key, name="run"):
        self.s3.delete(BUCKET, f"{self.prefix}/{name}/{key}")

    def download(self, to, name="run"):
        """Copies the run from the store, without the code under test; returns the folder."""
        return self.s3.download(BUCKET, f"{self.prefix}/{name}", self.folder / to)


def said(life):
    """Returns the lines that a life of `copied` has printed, as dicts."""
    return [json.loads(line) for line in life.output().splitlines() if line.startswith("{") and line.endswith("}")]


def wait_for(condition, seconds=30.0):
    """Waits until a condition is true; returns it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
    return found
