"""A binary of a `GradientTrainer` with several of its options, for runs on several workers."""

from gradient_trainer_test import Tagger

from looplib import launch

OPTIONS = {"micro_batches": 2, "clip_global_norm": 0.1, "average_decay": 0.9}


def build(_):
    return Tagger(**OPTIONS), None


if __name__ == "__main__":
    launch.run(build, global_batch_size=32, train_steps=4)
