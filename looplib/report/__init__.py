"""What a run says of itself: where its time went, its metrics in files and on the screen, and `run.json`.

Names that other rooms may use, by file:
    clock: Clock
    run_json: RunReport, Standing, path_of, read
    writers: ConsoleWriter, JsonlWriter, TensorBoardWriter, Writer, make_writers, read_jsonl
"""
