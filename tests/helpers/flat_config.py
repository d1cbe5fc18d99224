"""A controller of settings that a test gives together."""

import dataclasses

import looplib

_FIELDS = [field.name for field in dataclasses.fields(looplib.RunConfig)]


def controller(**settings):
    """Returns a controller.

    Args:
      **settings: fields of `RunConfig` and arguments of `Controller`.
    """
    config = {name: settings.pop(name) for name in _FIELDS if name in settings}
    return looplib.Controller(looplib.RunConfig(**config), **settings)
