"""What a run says of itself: where its time went, its metrics in files and on the screen, and `run.json`.

Names that other rooms may use, by file:
    clock: Clock
    console_writer: ConsoleWriter
    event_files: none
    formats: format_number, format_seconds
    hparams: none
    jsonl_writer: JsonlWriter
    media_writer: none
    outcome: Outcome, broken, done, failed, is_quit, preempted, served
    ownership: none
    page: Page
    points: none
    progress: Pace, headline
    record_file: none
    records: Record, cut_short, each_record, key, read_jsonl, read_newest
    program: DIFF, diff, git, this_program
    run_file: Report, Start, path_of, read
    run_json: RunReport, Standing, as_dict, changed_settings, settings_of
    shown: Histogram, Images, Shown, Texts
    tensorboard_writer: TensorBoardWriter
    threaded_writer: none
    writer: Setting, Writer
    writers: Writers, make_writers
"""
