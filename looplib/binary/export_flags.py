"""ExportFlags: what --mode=export writes beside the SavedModel and the Keras file."""

from collections.abc import Mapping
from typing import Any

from looplib.binary.command_line import FlagPlugin
from looplib.config.formats import check_export
from looplib.config.settings import Flag


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
