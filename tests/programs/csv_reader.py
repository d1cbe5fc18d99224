"""A small binary that reads a CSV file by make_csv_dataset: `python -m csv_reader --model_dir=...`."""

import atexit
import dataclasses
import pathlib
import shutil
import tempfile

import tensorflow as tf
import toy

from looplib import launch

ROWS = 640


@dataclasses.dataclass
class Config:
    repeated: bool = True  # and shuffled; else one epoch in order


def write(path: pathlib.Path) -> None:
    """Writes `ROWS` lines of an example's id and one more number."""
    path.write_text("id,number\n" + "".join(f"{i % toy.NUM_EXAMPLES},{i}\n" for i in range(ROWS)))


class Reader(toy.Regression):
    def __init__(self, path, repeated):
        super().__init__()
        self.path, self.repeated = str(path), repeated

    def dataset(self, context):
        how = dict(shuffle_buffer_size=50, shuffle_seed=context.seed) if self.repeated else dict(shuffle=False)
        rows = tf.data.experimental.make_csv_dataset(
            self.path, context.per_replica_batch_size, num_epochs=None if self.repeated else 1, **how
        )
        ids = rows.map(lambda row: tf.cast(row["id"], tf.int64))
        return ids.map(lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i)))


def build(config):
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = pathlib.Path(folder) / "rows.csv"
    write(path)
    trainer = Reader(path, config.repeated)
    return trainer, toy.RegressionEvaluator(trainer.model)


if __name__ == "__main__":
    launch.run(
        build,
        Config(),
        global_batch_size=8,
        train_steps=200,
        steps_per_loop=20,
        eval_interval=100,
        checkpoint_interval=30,
    )
