"""Registers exported models in MLflow's registry, where the environment names one."""

import contextlib
import os
import secrets
from collections.abc import Iterator

from absl import logging

from looplib.base.messages import gist
from looplib.report.writers import tracked
from looplib.report.writers.mlflow_writer import TRACKER, open_client

_ADDRESS = "MLFLOW_TRACKING_URI"
VARIABLE = "MLFLOW_REGISTERED_MODEL"  # of the environment: the name in the registry; none registers nothing


def register(directory: str, export: str, step: int) -> None:
    """Copies an export into the tracked run of its training, and registers it as a new version of the model.

    Each version has a folder of its own, as two exports of a step may have other weights and files. What fails is a
    warning, because the export itself is complete.

    Args:
      directory: the run directory, which has the id of the tracked run.
      export: the directory of the export.
      step: the global step.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    try:
        run = tracked.read_id(directory, TRACKER)
        if run is None:
            logging.warning(
                "%s is not registered in MLflow as %s: the training was not tracked; train with --trackers=mlflow",
                export, name,
            )  # fmt: skip
            return
        client, place = open_client(directory, os.environ.get(_ADDRESS)), f"export/step-{step}-{secrets.token_hex(4)}"
        with _everywhere(client.tracking_uri):
            client.log_artifacts(run, export, place)
            if not client.search_registered_models(f"name = '{name}'"):
                client.create_registered_model(name)
            source = f"{client.get_run(run).info.artifact_uri}/{place}"
            version = client.create_model_version(name, source, run, tags={"step": str(step)})
        logging.info("registered %s in MLflow as version %s of %s", export, version.version, name)
    except Exception as error:  # of a library and a server that are somebody else's
        logging.warning("%s is not registered in MLflow as %s: %s", export, name, gist(error))


@contextlib.contextmanager
def _everywhere(uri: str) -> Iterator[None]:
    """Makes an address the default meanwhile: MLflow's registry of files asks that too, and would make a database."""
    before = os.environ.get(_ADDRESS)
    os.environ[_ADDRESS] = uri
    try:
        yield
    finally:
        del os.environ[_ADDRESS]
        if before is not None:
            os.environ[_ADDRESS] = before
