"""Writers: where metrics go, and in which form.

Names that other rooms may use, by file:
    console_writer: none
    contract: none
    csv_writer: none
    jsonl_writer: none
    media_writer: none
    mlflow_models: none
    mlflow_writer: none
    opentelemetry_writer: none
    prometheus_writer: none
    registered: none
    shown: none
    tensorboard_writer: none
    tracked: none
    wandb_writer: none
"""
