"""Where `run.json` is, and what it says; `RunReport` in `run_json.py` writes it."""

import os
from typing import Any

from looplib.files import failures, parse_json, read_text

OF_TRAINING = "run.json"


def path_of(model_dir: str, trains: bool) -> str:
    """Returns the path of the report of a training, or of an evaluation job, in a run directory."""
    return os.path.join(model_dir, OF_TRAINING if trains else "run_eval.json")


def read(path: str) -> dict[str, Any]:
    """Returns the content of a report; {} if none can be read."""
    try:
        return dict(parse_json(read_text(path)))
    except (*failures(path), ValueError, TypeError):
        return {}
