"""Writers besides `metrics.jsonl`: the screen, TensorBoard, media, CSV, MLflow, Weights & Biases; one in a thread.

Names that other rooms may use, by file:
    background: BackgroundWriter
    console_writer: ConsoleWriter
    csv_writer: CsvWriter
    flag: TrackersFlag
    media: histogram, image, text
    media_writer: none
    metrics_port: MetricsPortFlag
    mlflow_models: none
    mlflow_writer: MlflowWriter
    newest: none
    numbers: none
    opentelemetry_writer: none
    prometheus_writer: none
    registered: console, csv, media, mlflow, opentelemetry, tensorboard, wandb
    tensorboard_writer: TensorBoardWriter
    tracked: none
    wandb_writer: WandbWriter
"""
