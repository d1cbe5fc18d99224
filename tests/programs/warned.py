"""A binary that trains as `faulty` does, with `LearningWarnings` of its own."""

import faulty

import looplib
from looplib import launch


def build(config):
    del config
    return faulty.build(faulty.Config())


if __name__ == "__main__":
    launch.run(build, None, actions=[looplib.LearningWarnings(every=50)], **faulty.DEFAULTS)
