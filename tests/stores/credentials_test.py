"""Credentials that expire while a run trains: no step waits, and new ones are used without a restart."""

import dataclasses
import time

import pytest
from clouds import said, wait_for
from copied import line
from proxy import Proxy
from servers import SECRET, Gcs

from looplib.errors import EXIT_FAILED

OLD, NEW = "AKIDTHATEXPIRES", "AKIDTHATISRENEWED"
EXPIRED = {"TokenRefreshRequired": 400, "InvalidToken": 400, "RequestTimeTooSkewed": 403, "ExpiredToken": 400}


@dataclasses.dataclass
class File:
    """The shared credentials file of AWS, in place of variables."""

    path: object

    def write(self, key, secret=SECRET, more="aws_session_token = of a session\n"):
        self.path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n{more}")

    @property
    def environment(self):
        return {
            "AWS_SHARED_CREDENTIALS_FILE": str(self.path), "AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None,
        }  # fmt: skip


@pytest.fixture
def credentials(tmp_path):
    file = File(tmp_path / "credentials")
    file.write(OLD)
    return file


def expire(proxy, code):
    """Has the proxy refuse what is signed with the old key, as S3 does it."""
    proxy.faults.share, proxy.faults.status, proxy.faults.code = 1.0, EXPIRED[code], code
    proxy.faults.only = lambda request: request.key == OLD


def whole(cloud, steps):
    """Asserts that the store has the newest checkpoints of a run of `copied`, and its metrics."""
    assert cloud.steps()[-3:] == list(range(steps - 2, steps + 1))
    assert cloud.read("metrics.jsonl").decode() == "".join(line(step, 0) for step in range(1, steps + 1))


@pytest.mark.slow
@pytest.mark.parametrize("code", list(EXPIRED))
def test_a_token_that_expires_stops_no_step_and_the_copy_catches_up_once_the_file_is_rewritten(
    cloud, credentials, code
):
    life = cloud.copied("--steps=130", "--pause=0.05", environment=credentials.environment)
    wait_for(lambda: cloud.steps())
    expire(cloud.proxy, code)
    begun = time.monotonic()
    wait_for(lambda: "have expired or are not valid" in life.output())
    time.sleep(5.0)
    kept, renewed = cloud.steps()[-1], time.monotonic()
    credentials.write(NEW)
    wait_for(lambda: cloud.steps()[-1] > kept)
    assert not life.ended()  # it was the running one that caught up
    assert life.code(60) == 0, life.output()
    during = [one["time"] for one in said(life) if "step" in one and begun < one["time"] < renewed]
    assert len(during) > 4 * (renewed - begun)
    assert life.output().count("have expired") == 1 and "Traceback" not in life.output()
    assert SECRET not in life.output() and OLD not in life.output()
    assert {request.key for request in cloud.proxy.requests} == {OLD, NEW}
    whole(cloud, 130)


def test_a_start_whose_token_has_expired_ends_soon_with_a_sentence(cloud, credentials):
    expire(cloud.proxy, "ExpiredToken")
    begun = time.monotonic()
    life = cloud.copied(environment=credentials.environment)
    assert life.code() == EXIT_FAILED, life.output()
    assert time.monotonic() - begun < 15.0
    (error,) = said(life)
    assert error["error"] == "StoreError" and "have expired or are not valid" in error["text"]
    assert cloud.url() in error["text"] and "Traceback" not in life.output()


@pytest.mark.slow
def test_the_end_of_a_run_waits_for_credentials_that_have_expired(cloud, credentials):
    life = cloud.copied("--steps=40", "--pause=0.05", environment=credentials.environment)
    wait_for(lambda: said(life)[-1:] and said(life)[-1].get("step") == 37)
    expire(cloud.proxy, "ExpiredToken")
    assert not life.ended(5.0)
    assert said(life)[-1]["step"] == 40
    credentials.write(NEW)
    assert life.code(60) == 0, life.output()
    whole(cloud, 40)


@pytest.mark.slow
def test_a_key_that_was_replaced_is_read_anew_as_the_server_checks_it(cloud, s3, credentials):
    """moto knows the keys of its users alone, and computes their signatures."""
    key, secret = s3.make_key("trainer")
    life = cloud.copied("--steps=130", "--pause=0.05", environment=credentials.environment)
    wait_for(lambda: cloud.steps())
    s3.check_credentials(0)
    try:
        wait_for(lambda: "have expired or are not valid" in life.output())
        credentials.write(key, secret, more="")
        wait_for(lambda: any(request.key == key and request.status == 200 for request in cloud.proxy.requests))
        assert life.code(60) == 0, life.output()
    finally:
        s3.check_credentials(10**9)
    assert secret not in life.output() and "Traceback" not in life.output()
    whole(cloud, 130)


@pytest.mark.slow
def test_a_token_of_google_that_expires_stops_no_step(cloud, nursery, tmp_path):
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    with Gcs("bucket") as server, Proxy("127.0.0.1", server.port) as proxy:
        variables = cloud.environment(STORAGE_EMULATOR_HOST=proxy.url, GOOGLE_CLOUD_PROJECT="tests")
        life = nursery.life_of("copied", "gs://bucket/run", "--steps=200", "--pause=0.05", environment=variables)
        wait_for(lambda: len(said(life)) > 20)
        proxy.faults.share, proxy.faults.status = 1.0, 401
        begun = time.monotonic()
        wait_for(lambda: "have expired or are not valid" in life.output())
        time.sleep(2.0)
        proxy.clear()
        ended = time.monotonic()
        assert life.code(60) == 0, life.output()
        assert life.output().count("have expired") == 1 and "Traceback" not in life.output()
        during = [one["time"] for one in said(life) if "step" in one and begun < one["time"] < ended]
        assert len(during) > 4 * (ended - begun)
        elsewhere = {**variables, "LOOPLIB_CACHE": str(tmp_path / "elsewhere")}
        again = nursery.life_of("copied", "gs://bucket/run", "--steps=201", environment=elsewhere)
        assert again.code() == 0 and said(again)[0]["start"] == 200, again.output()
