"""A binary whose configuration has every kind of field."""

import dataclasses
import enum
from typing import Literal

from looplib import launch


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Model:
    width: int = 4
    dropout: float | None = None


@dataclasses.dataclass
class Config:
    rate: float = 0.1
    shuffle: bool = False
    model: Model = dataclasses.field(default_factory=Model)
    teacher: Model | None = None
    sizes: tuple[int, ...] = (1, 2)
    pair: tuple[int, str] = (1, "a")
    weights: list[float] = dataclasses.field(default_factory=list)
    kind: Literal["x", "y"] = "x"
    colour: Colour = Colour.RED
    name: str = "q"
    limits: dict = dataclasses.field(default_factory=dict)


if __name__ == "__main__":
    variants = {"small": Config(rate=3.0, model=Model(width=1))}
    launch.run(lambda config: (None, None), Config(), experiments=variants)
