"""The groups of flags that looplib adds to every binary."""

from looplib.binary.alert_flag import AlertFlags
from looplib.binary.audit_flag import AuditFlag
from looplib.binary.batch_report import BatchReport
from looplib.binary.export_flags import ExportFlags
from looplib.binary.integrity_flags import IntegrityFlags
from looplib.binary.learning_warnings_flag import LearningWarningsFlag
from looplib.binary.metrics_port import MetricsPortFlag
from looplib.binary.notices_flag import NoticesFlag
from looplib.binary.profile_flag import ProfileFlag
from looplib.binary.timed_saves_flags import TimedSavesFlags
from looplib.binary.trackers_flag import TrackersFlag
from looplib.binary.trial import trial_flags

OWN = (
    AlertFlags,
    AuditFlag,
    BatchReport,
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
