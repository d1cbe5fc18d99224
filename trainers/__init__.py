"""Ready trainers, each an absl binary: `python -m trainers.<name> --help`."""
