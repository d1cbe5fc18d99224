"""The settings. Each is a flag of the command, such as `--config.width=64`."""

import dataclasses


@dataclasses.dataclass
class Config:
    """Add a setting here, with its type and default, and use it as `config.<name>`."""

    data_dir: str = "data"
    width: int = 32
    learning_rate: float = 0.01
