"""What the tests of runs in object stores share: a server of S3, a proxy before it, and runs of the binary `faulty`."""

import dataclasses
import pathlib
import shutil
import sys

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from proxy import Proxy
from servers import KEY, S3, SECRET

BUCKET = "bucket"
LEASE = 3.0  # seconds


@pytest.fixture(scope="session")
def s3():
    """moto's server of S3, with one bucket."""
    with S3() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def proxy(s3):
    """A proxy before the server."""
    with Proxy("127.0.0.1", s3.port) as proxy:
        yield proxy


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
            "LOOPLIB_CACHE": str(self.folder / machine), "LOOPLIB_LEASE_SECONDS": str(LEASE),
            "LOOPLIB_UPLOAD_SECONDS": "1", "HOME": str(self.folder), **more,
        }  # fmt: skip

    def run(self, *arguments, name="run", machine="m", environment=(), **order):
        """Starts `faulty` on a machine; returns its `Life`."""
        variables = self.environment(machine, **dict(environment))
        return self.nursery.life(self.url(name), *arguments, environment=variables, **order)

    def tool(self, *arguments, machine="m", environment=(), **order):
        """Starts a tool, `python -m looplib ...`; returns its `Life`."""
        variables = self.environment(machine, **dict(environment))
        return self.nursery.life_of("looplib", *map(str, arguments), environment=variables, **order)

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


@pytest.fixture
def cloud(s3, proxy, nursery, tmp_path):
    return Cloud(s3, proxy, nursery, tmp_path, tmp_path.name)
