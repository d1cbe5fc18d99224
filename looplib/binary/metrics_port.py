"""MetricsPortFlag: --metrics_port, where Prometheus finds the newest metrics of a training."""

import importlib.util
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from looplib.base.messages import gist
from looplib.binary.command_line import TRAINING_MODES, FlagPlugin
from looplib.config.settings import Flag
from looplib.errors import FlagError, PluginError
from looplib.report.writers.contract import Writer
from looplib.report.writers.prometheus_writer import ALL_ADDRESSES, PrometheusWriter

_HIGHEST = 65_535


class MetricsPortFlag(FlagPlugin):
    """The flag --metrics_port."""

    flags = (
        Flag("metrics_port", str, None, "PORT or HOST:PORT that serves metrics to Prometheus; none: no server."),
    )  # fmt: skip

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for what is no port, an unknown host, a job that does not train, or a missing package."""
        if not (text := values["metrics_port"]):
            return
        host, _ = _parse(text)
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:  # a name that can be none is the latter
            raise FlagError(
                f"--metrics_port names the host {host:.100}, which is not known here ({gist(error)}); name an address "
                "of this machine, or the port alone"
            ) from error
        if values["mode"] not in TRAINING_MODES:
            mode = values["mode"]
            raise FlagError(f"--metrics_port is for trainings, and --mode={mode} does not train; leave it out")
        if importlib.util.find_spec("prometheus_client") is None:
            raise PluginError("--metrics_port needs the package prometheus-client: pip install 'looplib[prometheus]'")

    def writers(self, values: Mapping[str, Any]) -> Sequence[Writer]:
        """Returns the writer with the server."""
        if not (text := values["metrics_port"]):
            return ()
        host, port = _parse(text)
        return (PrometheusWriter(values["model_dir"], port, host),)


def _parse(text: str) -> tuple[str, int]:
    """Returns the address, by default all, and the port."""
    found = re.fullmatch(r"(?:(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):)?(\d{1,5})", text)
    if not found or not 1 <= int(found[2]) <= _HIGHEST:
        raise FlagError(f"--metrics_port is {text!r:.100}; expected PORT or HOST:PORT, such as 9100 or 127.0.0.1:9100")
    return (found[1] or ALL_ADDRESSES).strip("[]"), int(found[2])
