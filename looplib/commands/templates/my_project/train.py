"""The command: `python -m my_project.train --help` lists its flags."""

import looplib

from my_project.evaluator import Evaluation
from my_project.settings import Config
from my_project.trainer import make_trainer


def build(config: Config) -> tuple[looplib.Trainer, looplib.Evaluator]:
    """Returns the trainer and the evaluator. looplib calls it where variables belong: under the strategy's scope."""
    trainer = make_trainer(config)
    return trainer, Evaluation(trainer.model, config)


if __name__ == "__main__":
    looplib.launch.run(build, Config(), train_steps=1000, eval_interval=200)
