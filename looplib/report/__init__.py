"""What a run says of itself: where its time went, its metrics in files and on the screen, and `run.json`.

Names that other rooms may use, by file:
    clock: Clock
    console_writer: ConsoleWriter
    event_files: none
    jsonl_writer: JsonlWriter
    outcome: Outcome, broken, done, failed, is_quit, preempted, served
    ownership: none
    page: Page
    pieces: KINDS, Record, check_kind, rows_of
    prediction_folder: PredictionFolder, Source
    records: Record, each_record, read_jsonl
    program: DIFF, diff, git, this_program
    run_json: RunReport, Standing, as_dict, changed_settings, path_of, read
    tensorboard_writer: TensorBoardWriter
    writer: Writer
    writers: Writers, make_writers
"""
