"""The data: `train.csv` and `test.csv` in `config.data_dir`. Their last column is the class: 0, 1, 2, ...

To train on your own data, put files of this form in their place, or have `read` return your own arrays. For data that
does not fit in memory, let `dataset` in trainer.py and evaluator.py return `context.records(files).map(parse)`.
"""

import pathlib

import numpy as np

from my_project.settings import Config


def read(config: Config, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the features [n, columns] and the classes [n] of "train" or "test"."""
    path = pathlib.Path(config.data_dir, f"{split}.csv")
    rows = np.loadtxt(path, np.float32, delimiter=",", skiprows=1, ndmin=2)
    return rows[:, :-1], rows[:, -1].astype(np.int32)
