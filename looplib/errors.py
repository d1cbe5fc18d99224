"""The errors that looplib raises, and the exit codes of its programs.

Each kind of error that a user can fix is a class, whose name ends the last line of a binary and which docs/ explains.
"""

from looplib.masks import masked_text

EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_STALLED = 0, 1, 75, 76
EXIT_CODES = {  # of a binary
    EXIT_DONE: "Done.",
    EXIT_FAILED: "Failed; the last line says what to do.",
    EXIT_PREEMPTED: "Ended by a signal, notice or `--max_time`, after a save. Run the same command again to continue.",
    EXIT_STALLED: "Ended by the watchdog, because nothing made progress.",
}
EXIT_DIFFERENT, EXIT_UNKNOWN, EXIT_INTERRUPTED = 1, 2, 130
TOOL_EXIT_CODES = {
    EXIT_DONE: "Done; what was compared is equal.",
    EXIT_DIFFERENT: "Two runs differ, or something is wrong.",
    EXIT_UNKNOWN: "The tool could not find out, or was used wrongly.",
    EXIT_INTERRUPTED: "Ended by Ctrl-C.",
}


class UsageError(ValueError):
    """Something that the user can fix; the base of the errors that have a name.

    Binaries print it as one last line, without a stack trace, and exit with `EXIT_FAILED`. Its text has secrets masked.
    """

    def __str__(self) -> str:
        return masked_text(super().__str__())

    @property
    def line(self) -> str:
        """The message, and in parentheses the class of this file by which docs/ explains it."""
        kind = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return f"{self} ({kind.__name__})" if kind is not UsageError else f"{self}"


class SettingError(UsageError):
    """A setting or an argument has a value of the wrong kind, or out of its range. Use one that the message names."""


class FlagError(UsageError):
    """A flag is unknown, has a value that it does not take, or does not fit the other flags; `--help` lists them."""


class ConfigurationError(UsageError):
    """A file of settings, or a `--config` flag, has an unknown name or a value of the wrong type."""


class CommandError(UsageError):
    """A command of `python -m looplib` was used wrongly, or the program that it was given cannot be started."""


class PluginError(UsageError, AttributeError):  # so that `hasattr(looplib, name)` is False for a part that is missing
    """A part of looplib, or a package that it needs, is not installed. Install the package that the message names."""


class VersionError(UsageError):
    """TensorFlow, Keras or tf_keras is missing, or in a version that does not fit. Install what the message names."""


class MissingPartError(UsageError):
    """A call needs a trainer, an evaluator or a run directory that this controller does not have."""


class ClosedError(UsageError):
    """A call was made to a controller that is closed, or after one of its steps failed. Build a new one."""


class BusyError(UsageError):
    """A call is not possible while a run trains. Wait until the training ends, and call it then."""


class TaskError(UsageError):
    """The trainer, an evaluator, or what `build` returned is of the wrong kind."""


class ModelError(UsageError):
    """The model is of the wrong kind or has no variables, or a pattern for its variables matches nothing."""


class OptimizerError(UsageError):
    """The optimizer is of the wrong kind, is held where looplib cannot find it, or cannot work on several replicas."""


class VariableError(UsageError):
    """Variables are made too late, or outside of the strategy's scope. Build models in `build`, and call them once."""


class KerasFamilyError(UsageError):
    """Objects of Keras 3 and tf_keras are mixed, or Keras 3 runs on another backend than TensorFlow."""


class StepError(UsageError):
    """The step does something that cannot run on a device, or on several replicas."""


class StaleTraceError(UsageError):
    """Something has changed after the step was traced, which would not see the change."""


class LossError(UsageError):
    """The loss is not one value per example, or cannot be averaged over replicas."""


class MetricError(UsageError):
    """A metric has a name, type or shape that cannot be reported, or a setting names a metric that is not reported."""


class ActionError(UsageError):
    """An action or a hook is of the wrong kind, or cannot work with this run."""


class CallbackError(UsageError):
    """A Keras callback needs what looplib does not do. The message names the setting or action in its place."""


class OrbitError(UsageError):
    """An Orbit trainer does not do what its interface promises, or cannot run with this setting."""


class EngineError(UsageError):
    """The engine (`--loop`) or XLA (`jit_compile`) cannot run this step. `--loop=graph` runs every step."""


class DatasetError(UsageError):
    """`dataset` returned something else than batches that this run can read."""


class EmptyDataError(UsageError):
    """A data set has no batch, or not one for each replica. Check where the data is read from."""


class EndlessDataError(UsageError):
    """A training or an evaluation to the end of its data would never end. Give a number of steps."""


class BatchSizeError(UsageError):
    """A batch size does not divide over the replicas, or batches have another size than the run expects."""


class ShardingError(UsageError):
    """All workers would read the same data. Use `context.indices`, or shard by `context.pipeline_index`."""


class OrderError(UsageError):
    """A selection or an order of examples, such as a mixture or packed rows, cannot be made."""


class RecordsError(UsageError):
    """Files of records cannot be found, opened or read, or are damaged."""


class DataError(UsageError):
    """Data could not be read or used while a run was under way. Mend the data, and resume the run."""


class NoCheckpointError(UsageError):
    """There is no checkpoint where one is needed. Train first, or name another place."""


class CheckpointError(UsageError):
    """A checkpoint is damaged, or in a form that this version does not read. Use another one."""


class MismatchError(UsageError):
    """A checkpoint is of another model, optimizer or program than the one that is to continue from it."""


class WarmStartError(UsageError):
    """Weights cannot be taken from another checkpoint, or a run cannot continue from it."""


class StateError(UsageError):
    """The trainer or an action has state that a checkpoint cannot hold."""


class SaveError(UsageError):
    """A checkpoint could not be written. Earlier ones are intact: free space, and run the same command again."""


class RunDirectoryError(UsageError):
    """A run directory, or a file or link in it, is not what looplib writes, or cannot be used."""


class LockedError(UsageError):
    """Another process writes to the run directory, or its lock was removed."""


class FileError(UsageError):
    """A file or directory cannot be read or written."""


class StoreError(UsageError):
    """An object store cannot be used, or does not answer. Check the address, the credentials and the network."""


class StrategyError(UsageError):
    """A strategy cannot run this program, or not with these settings."""


class DeviceError(UsageError):
    """TensorFlow cannot start, or its devices cannot be set up as the settings ask."""


class ClusterError(UsageError):
    """The environment (`TF_CONFIG`, Slurm, Kubernetes) does not describe a cluster with this process in it."""


class WorkerError(UsageError):
    """A worker, a data worker or a parameter server did not join, or was lost."""


class ParameterServerError(UsageError):
    """The program cannot train with parameter servers, or these cannot be reached."""


class TpuError(UsageError):
    """A TPU cannot be reached, was lost, or cannot be divided as the settings ask."""


class DivergenceError(UsageError):
    """A loss, gradient or weight was not finite, or the loss jumped, and the policy was to halt, or was exhausted."""


class CorruptionError(DivergenceError):
    """A device changed numbers: replicas came to differ. Test that device."""


class WriterError(UsageError):
    """A writer is of the wrong kind, or unknown."""


class ExportError(UsageError):
    """The model cannot be exported, or not to that place."""


class PredictionError(UsageError):
    """Predictions cannot be made or written, or the finished ones are of another run."""


class ReplayError(UsageError):
    """A recorded run cannot be repeated, replayed or compared."""


class CheckError(UsageError):
    """A check of a program could not be done."""


class SweepError(UsageError):
    """A sweep was started wrongly, or its files do not fit."""


class _Ended(SystemExit):
    """An end that is no failure of this process."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Preempted(_Ended):
    """A signal or a time limit ended the run, which saved its state; uncaught, the process exits with `EXIT_PREEMPTED`.

    Attributes:
      message: what the error says.
      alone: whether the other workers of the run do not know of the signal yet.
    """

    def __init__(self, message: str, alone: bool = False) -> None:
        super().__init__(EXIT_PREEMPTED, message)
        self.alone = alone


class CoordinatorGone(_Ended):
    """The coordinator that this process served has ended; uncaught, the process exits with `EXIT_DONE`."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_DONE, message)
