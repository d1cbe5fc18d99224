"""A binary of a `GradientTrainer` with several of its options, for runs on several workers."""

import dataclasses

from task.gradient_trainer_test import Tagger

from looplib import launch

OPTIONS = {"micro_batches": 2, "clip_global_norm": 0.1, "average_decay": 0.9}


@dataclasses.dataclass
class Config:
    """Whether XLA compiles the gradients."""

    jit_compile: bool = False


def build(config):
    return Tagger(**OPTIONS, jit_compile=config.jit_compile), None


if __name__ == "__main__":
    launch.run(build, Config(), global_batch_size=32, train_steps=4)
