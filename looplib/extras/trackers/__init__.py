"""Writers for trackers of experiments: CSV files, MLflow, Weights & Biases; and one that runs another in a thread.

Names that other rooms may use, by file:
    background: BackgroundWriter
    by_name: make
    csv_writer: CsvWriter
    mlflow_writer: MlflowWriter
    tracked: none
    wandb_writer: WandbWriter
"""
