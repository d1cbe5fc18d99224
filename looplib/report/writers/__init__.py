"""Writers: where metrics go, and in which form.

Names that other rooms may use, by file:
    console_writer: ConsoleWriter
    contract: DEFAULT_WRITERS, Writer
    csv_writer: CsvWriter
    jsonl_writer: JsonlWriter
    media_writer: none
    mlflow_models: register
    mlflow_writer: MlflowWriter
    opentelemetry_writer: none
    prometheus_writer: ALL_ADDRESSES, PrometheusWriter
    registered: named, names
    shown: Histogram, Images, Shown, Texts
    tensorboard_writer: TensorBoardWriter
    tracked: none
    wandb_writer: WandbWriter
"""
