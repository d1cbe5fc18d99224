"""The entry points of the project, as setup.cfg names them."""

import configparser
import pathlib

_FOLDER = pathlib.Path(__file__).absolute().parent


def plug_ins(group):
    """Returns where the plug-ins of a group are, by name, such as {"records": "data.records.reader.RecordReader"}."""
    setup = configparser.ConfigParser()
    setup.read(_FOLDER.parent / "setup.cfg")
    lines = setup["options.entry_points"][group].split("\n")
    found = dict(line.replace(" ", "").replace(":", ".").split("=") for line in lines if line)
    return {name: place.removeprefix("looplib.") for name, place in found.items()}
