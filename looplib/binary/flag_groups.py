"""The groups of flags that looplib adds to every binary."""

import importlib.util
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from looplib.actions.notices import SOURCES, NoticeListener
from looplib.actions.profile import Profile
from looplib.actions.replica_agreement import DEFAULT_EVERY, ReplicaAgreement
from looplib.actions.timed_saves import TimedSaves
from looplib.base.messages import duration, gist
from looplib.binary.alert_flag import AlertFlags
from looplib.binary.command_line import TRAINING_MODES, FlagPlugin
from looplib.binary.ordered import Ordered
from looplib.binary.trial import trial_flags
from looplib.config.formats import check_export
from looplib.config.settings import Flag
from looplib.errors import FlagError, PluginError, WriterError
from looplib.report import reporter
from looplib.report.writers.contract import DEFAULT_WRITERS, Writer
from looplib.report.writers.telemetry import ALL_ADDRESSES, PrometheusWriter
from looplib.task.actions import Action


class ExportFlags(FlagPlugin):
    """The flags --export_formats and --export_license."""

    flags = (
        Flag("export_formats", list, None, "Exports these too: safetensors, weights.h5, onnx, tflite, int8."),
        Flag("export_license", str, "unknown", "The license of the model, for its card, such as apache-2.0."),
    )

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a format that is not known or lacks its packages, or a license that is no name."""
        if values["mode"] == "export":
            check_export(values["export_formats"], values["export_license"])


class IntegrityFlags(FlagPlugin):
    """The flag --check_replicas."""

    flags = (
        Flag("check_replicas", int, None, "Steps between comparisons of the variables of all replicas; 0: never; "
             f"none: {DEFAULT_EVERY:,}, or steps_per_loop if that is higher.", least=0),
    )  # fmt: skip

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a job that does not train, or comparisons that are more frequent than reports."""
        every, per_loop = values["check_replicas"] or 0, values["steps_per_loop"] or 0
        if every and values["mode"] not in TRAINING_MODES:
            raise FlagError(
                f"--check_replicas is for trainings, and --mode={values['mode']} does not train; leave it out"
            )
        if 0 < every < per_loop:
            raise FlagError(
                f"--check_replicas is {every}, and --steps_per_loop is {per_loop}; expected at least as many steps, "
                "because the replicas are compared at reports"
            )

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the action that compares."""
        every = values["check_replicas"]
        return [] if every == 0 else [ReplicaAgreement(every)]


class LearningWarningsFlag(FlagPlugin):
    """The flag --learning_warnings."""

    flags = (
        Flag("learning_warnings", bool, True, "Warns of constant predictions, weights that no longer change, "
             "and exploding norms."),
    )  # fmt: skip

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the action that warns."""
        if not values["learning_warnings"] or values["dry_run"] or values["estimate"]:
            return ()
        from looplib.actions.learning_warnings import LearningWarnings  # here, as no other start needs it

        return (LearningWarnings(),)


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


class NoticesFlag(FlagPlugin):
    """The flag --notices."""

    flags = (
        Flag("notices", tuple, None, f"Ends a training, saved, when {', '.join(SOURCES[:-1])} or {SOURCES[-1]} says "
             "that the machine goes; may be given several times."),
    )  # fmt: skip

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a name that is not known, a job that does not train, or a variable of no address."""
        for name in values["notices"] or ():
            if name not in SOURCES:
                raise FlagError(f"--notices is {name!a:.100}; expected one of {', '.join(SOURCES)}")
        if values["notices"] and values["mode"] not in TRAINING_MODES:
            raise FlagError(f"--notices is for trainings, and --mode={values['mode']} does not train; leave it out")
        NoticeListener(values["notices"] or ())

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the action that listens."""
        if not values["notices"] or values["dry_run"]:
            return ()
        return (NoticeListener(values["notices"]),)


class ProfileFlag(FlagPlugin):
    """The flag --profile."""

    flags = (Flag("profile", str, None, "START:STEPS: profiles so many steps after step START; none: no profile."),)

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a value of another form, a job that does not train, or steps after its end."""
        for profile in self.actions(values):
            if values["mode"] not in TRAINING_MODES:
                mode = values["mode"]
                raise FlagError(f"--profile records training steps, and --mode={mode} does not train; leave it out")
            profile.check_end(values["train_steps"])

    def actions(self, values: Mapping[str, Any]) -> Sequence[Profile]:
        """Returns the profile that the flag asks for."""
        if not (text := values["profile"]):
            return ()
        if not (found := re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)) or not int(found[2]):
            raise FlagError(
                f"--profile is {text!r}; expected START:STEPS, such as 200:20 for the 20 steps after step 200"
            )
        return (Profile(int(found[1]), int(found[2])),)


class TimedSavesFlags(FlagPlugin):
    """The flags --checkpoint_every and --checkpoint_budget."""

    flags = (
        Flag("checkpoint_every", str, None, "Also saves after this time: 90 (seconds), 10m, 1h30m."),
        Flag("checkpoint_budget", str, None, "Also saves as often as this share of the time allows, such as 1%."),
    )

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a value of another form, or a job that does not train."""
        for name in ("checkpoint_every", "checkpoint_budget"):
            if values[name] and values["mode"] not in TRAINING_MODES:
                raise FlagError(f"--{name} saves a training, and --mode={values['mode']} does not train; leave it out")
        self.actions(values)

    def actions(self, values: Mapping[str, Any]) -> Sequence[TimedSaves]:
        """Returns the action that saves."""
        every, budget = values["checkpoint_every"], values["checkpoint_budget"]
        if every and budget:
            raise FlagError("--checkpoint_every and --checkpoint_budget both say when to save; give one of them")
        if every:
            return (TimedSaves(every=duration("--checkpoint_every", every)),)
        if not budget:
            return ()
        found = re.fullmatch(r"(\d{1,2}(?:\.\d{1,6})?)%", budget)
        if not found or not float(found[1]):
            raise FlagError(f"--checkpoint_budget is {budget!r:.100}; expected a share of the time such as 1% or 0.5%")
        return (TimedSaves(budget=float(found[1]) / 100),)


class TrackersFlag(FlagPlugin):
    """The flag --trackers, which names writers besides the default ones."""

    flags = (Flag("trackers", list, None, "Further writers of metrics: csv, mlflow, opentelemetry, wandb, or others."),)

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `UsageError` for a name that is not known."""
        known = [name for name in reporter.names() if name not in DEFAULT_WRITERS]
        for name in values["trackers"] or ():
            if name not in known:
                raise WriterError(f"--trackers has {name!r}; expected names among {', '.join(known)}")

    def writers(self, values: Mapping[str, Any]) -> Sequence[Writer]:
        """Returns the writers; `UsageError` if a package is missing."""
        return [reporter.named(name)(values["model_dir"]) for name in dict.fromkeys(values["trackers"] or ())]


OWN = (
    AlertFlags,
    Ordered,
    TimedSavesFlags,
    ExportFlags,
    IntegrityFlags,
    LearningWarningsFlag,
    MetricsPortFlag,
    NoticesFlag,
    ProfileFlag,
    TrackersFlag,
    trial_flags,
)
