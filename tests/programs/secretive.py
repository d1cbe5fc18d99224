"""A binary with secrets in its settings: it trains as `faulty` does, and says whether it has got them."""

import dataclasses

import faulty

from looplib import launch


@dataclasses.dataclass
class Database:
    url: str = ""
    password: str = ""


@dataclasses.dataclass
class Config:
    api_key: str = ""
    max_tokens: int = 3
    pad_token: str = "<pad>"
    database: Database = dataclasses.field(default_factory=Database)
    fails: bool = False


def build(config):
    print(f"got {len(config.api_key)} {len(config.database.password)} {len(config.database.url)} characters")
    if config.fails:
        raise RuntimeError(f"no access with {config!r}: {config.database.password} is wrong at {config.database.url}")
    return faulty.build(faulty.Config())


if __name__ == "__main__":
    launch.run(build, Config(), **faulty.DEFAULTS | {"train_steps": 10, "eval_interval": 10})
