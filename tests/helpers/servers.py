"""Servers of object stores on loopback, each a process, and what is in them, read without the code under test."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree

KEY, SECRET = "AKIDOFTHETESTS", "secretOfTheTests0123456789"
_SIGNED = f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
_SPACE = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}


def free_port():
    """Returns a port that nobody has at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _wait_for(port, process, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, "the server has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


class Served:
    """A server as a process; use it in a `with` block."""

    def __init__(self, command, environment=None):
        self.port = free_port()
        self._process = subprocess.Popen(
            [str(self.port) if part == "PORT" else part for part in command], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, **(environment or {})}, start_new_session=True,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        _wait_for(self.port, self._process)
        return self

    def __exit__(self, *_):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class S3(Served):
    """moto's server of S3."""

    def __init__(self):
        super().__init__([sys.executable, "-m", "moto.server", "-p", "PORT"])

    def make_bucket(self, name):
        _ask("PUT", f"{self.url}/{name}")

    def check_credentials(self, after):
        """Has the server refuse unknown keys after so many more requests."""
        _ask("POST", f"{self.url}/moto-api/reset-auth", str(after).encode())

    def make_key(self, user):
        """Makes a user who may do everything; returns the user's key and secret."""
        allowed = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}'
        self._order("CreateUser", UserName=user)
        self._order("PutUserPolicy", UserName=user, PolicyName="all", PolicyDocument=allowed)
        made = self._order("CreateAccessKey", UserName=user)
        return re.search("<AccessKeyId>(.*?)<", made)[1], re.search("<SecretAccessKey>(.*?)<", made)[1]

    def _order(self, action, **parameters):
        """Asks the service of users and keys."""
        form = urllib.parse.urlencode({"Action": action, "Version": "2010-05-08", **parameters})
        return _ask("POST", f"{self.url}/", form.encode(), "iam").decode()

    def names(self, bucket, prefix=""):
        """Returns {name: bytes} of what a bucket has below a prefix."""
        found, token = {}, ""
        while True:
            query = {"list-type": "2", "prefix": prefix, **({"continuation-token": token} if token else {})}
            tree = xml.etree.ElementTree.fromstring(_listing(f"{self.url}/{bucket}?{urllib.parse.urlencode(query)}"))
            for entry in tree.findall("s3:Contents", _SPACE):
                found[entry.findtext("s3:Key", None, _SPACE)] = int(entry.findtext("s3:Size", None, _SPACE))
            token = tree.findtext("s3:NextContinuationToken", "", _SPACE)
            if not token:
                return found

    def read(self, bucket, name):
        return _ask("GET", f"{self.url}/{bucket}/{urllib.parse.quote(name)}")

    def write(self, bucket, name, content):
        _ask("PUT", f"{self.url}/{bucket}/{urllib.parse.quote(name)}", content)

    def delete(self, bucket, name):
        _ask("DELETE", f"{self.url}/{bucket}/{urllib.parse.quote(name)}")

    def download(self, bucket, prefix, folder):
        """Copies what is below a prefix into a folder; returns the folder."""
        folder = pathlib.Path(folder)
        for name in self.names(bucket, f"{prefix}/"):
            path = folder / name.removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.read(bucket, name))
        return folder

    def steps(self, bucket, prefix):
        """Returns the steps of the checkpoints whose marker is there."""
        names = self.names(bucket, f"{prefix}/checkpoints/")
        return sorted(int(match[1]) for name in names if (match := re.search(r"/ckpt-(\d+)\.commit$", name)))


class Gcs(Served):
    """The emulator of Google Cloud Storage, with one bucket."""

    def __init__(self, bucket):
        super().__init__([
            sys.executable, "-c", "from gcp_storage_emulator.__main__ import main; main()", "start", "--port", "PORT",
            "--in-memory", f"--default-bucket={bucket}",
        ])  # fmt: skip


def _listing(url):
    """Asks for a list of objects, again if it fails: moto loses track of the objects that are written meanwhile."""
    for _ in range(5):
        with contextlib.suppress(urllib.error.HTTPError):
            return _ask("GET", url)
    return _ask("GET", url)


def _ask(method, url, content=None, service="s3"):
    kind = "octet-stream" if service == "s3" else "x-www-form-urlencoded"
    headers = {"Authorization": _SIGNED.replace("/s3/", f"/{service}/"), "Content-Type": f"application/{kind}"}
    request = urllib.request.Request(url, data=content, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()
