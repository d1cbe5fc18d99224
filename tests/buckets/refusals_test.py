"""A URL that cannot be used: a sentence at once, and no secret anywhere."""

import importlib.util
import time

import pytest
from clouds import BUCKET, said
from servers import KEY, SECRET, free_port

from looplib.checkpoint import directory
from looplib.errors import FileError, PluginError, SettingError, StoreError
from looplib.stores.stores import Store

OTHER = "anotherSecretOfTheTests987"


def refused(cloud, *arguments, **environment):
    begun = time.monotonic()
    life = cloud.copied(*arguments, environment=environment)
    assert life.code() == 1, life.output()
    assert time.monotonic() - begun < 15.0
    text = said(life)[-1]
    assert text["error"] == "StoreError", life.output()
    assert SECRET not in life.output() and OTHER not in life.output() and "Traceback" not in life.output()
    return text["text"]


def test_a_bucket_that_does_not_exist_is_named(cloud, monkeypatch):
    monkeypatch.setattr(type(cloud), "url", lambda self, name: f"s3://nowhere/{name}")
    assert "s3://nowhere/run" in refused(cloud)


@pytest.mark.parametrize("url", ["s3://", "memory:///", f"s3://{KEY}:{OTHER}@{BUCKET}/run"])
def test_a_url_without_a_bucket_or_with_a_password_is_refused_without_a_request(url):
    with pytest.raises(StoreError) as refusal:
        Store(url)
    assert OTHER not in str(refusal.value)


@pytest.mark.parametrize("path", ["s3:/bucket/run", "simplecache::s3://bucket/run", "file:/run"])
def test_what_is_almost_a_url_is_no_local_directory(path):
    with pytest.raises(FileError, match="URL"):
        directory.resolve(path)


def test_a_local_directory_beside_a_local_run_is_refused(tmp_path):
    with pytest.raises(SettingError, match="--local_dir"):
        directory.resolve(tmp_path / "run", str(tmp_path / "local"))


@pytest.mark.parametrize("scheme", ["http", "hdfs"])
def test_a_store_that_a_run_cannot_be_in_is_refused_soon(cloud, scheme, monkeypatch):
    url = f"{cloud.proxy.url}/run" if scheme == "http" else "hdfs://host/run"
    monkeypatch.setattr(type(cloud), "url", lambda self, name: url)
    life = cloud.copied()
    assert life.code(15) == 1, life.output()
    assert said(life)[-1]["error"] in ("StoreError", "PluginError") and url in said(life)[-1]["text"]


@pytest.mark.parametrize("secret", ["wrong", "none"])
def test_credentials_that_do_not_work_are_told_at_once(cloud, s3, secret):
    if secret == "none":
        text = refused(cloud, AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None)
    else:
        s3.check_credentials(0)
        try:
            text = refused(cloud, AWS_SECRET_ACCESS_KEY=OTHER)
        finally:
            s3.check_credentials(10**9)
    assert cloud.url() in text and "credentials" in text


@pytest.mark.parametrize("scheme", ["nothing", "az"])
def test_a_store_without_a_driver_is_named(cloud, scheme, monkeypatch):
    monkeypatch.setattr(type(cloud), "url", lambda self, name: f"{scheme}://{BUCKET}/{name}")
    life = cloud.copied()
    assert life.code() == 1
    assert said(life)[-1]["error"] in ("StoreError", "PluginError") and f"{scheme}://" in said(life)[-1]["text"]


@pytest.mark.parametrize("status", [403, 500])
def test_a_folder_that_cannot_be_listed_is_no_empty_one(cloud, status, monkeypatch):
    for name, value in cloud.environment().items():
        monkeypatch.setenv(name, value)
    names = [f"{folder}/part-{number}" for folder in "ab" for number in range(2)]
    for name in names:
        cloud.write(name, b"x", name="data")
    store = Store(cloud.url("data"))
    assert [*store.matching("*/part-*")] == names
    cloud.proxy.faults.share, cloud.proxy.faults.status = 1.0, status
    cloud.proxy.faults.only = lambda request: "list-type=" in request.path and "data%2Fb" in request.path
    with pytest.raises(StoreError, match="cannot be reached to list"):
        store.matching("*/part-*", patience=0.0)


def test_a_driver_that_lists_folder_by_folder_takes_no_error_for_an_empty_store():
    with pytest.raises(StoreError, match="cannot be reached to list it.*Connection refused"):
        Store(f"webhdfs://127.0.0.1:{free_port()}/run").listed(patience=0.0)


def test_a_driver_whose_own_package_is_missing_names_that_one():
    if importlib.util.find_spec("paramiko"):
        pytest.skip("paramiko is installed")
    with pytest.raises(PluginError, match='requires "paramiko" to be installed.*; install what is missing'):
        Store("sftp://127.0.0.1/run")


@pytest.mark.slow
def test_no_credentials_are_in_any_file_or_output(cloud):
    life = cloud.run("--train_steps=8", "--mode=train")
    assert life.code() == 0, life.output()
    (page := cloud.tool("report", cloud.url(), f"--output={cloud.folder / 'page.html'}")).code()
    folder = cloud.download("found")
    paths = [path for path in cloud.folder.rglob("*") if path.is_file()]
    assert folder / "run.json" in paths and len(paths) > 20
    for text in (life.output().encode(), page.output().encode(), *(path.read_bytes() for path in paths)):
        assert SECRET.encode() not in text and KEY.encode() not in text
