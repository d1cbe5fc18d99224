"""Writers: where metrics go, and in which form.

Names that other rooms may use, by file:
    console_writer: ConsoleWriter
    contract: DEFAULT_WRITERS, Histogram, Images, Shown, Texts, Writer
    files: CsvWriter, JsonlWriter
    telemetry: ALL_ADDRESSES, PrometheusWriter
    tensorboard_writer: TensorBoardWriter
    trackers: MlflowWriter, register, WandbWriter
"""
