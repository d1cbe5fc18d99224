"""What a run says of itself: where its time went, its metrics in files and on the screen, and `run.json`.

Names that other rooms may use, by file:
    clock: Clock
    console_writer: ConsoleWriter
    event_files: none
    formats: format_number, format_seconds
    hparams: none
    jsonl_writer: JsonlWriter
    media_writer: none
    outcome: broken, done, failed, is_quit, Outcome, preempted, served
    ownership: none
    page: none
    points: none
    program: DIFF, diff, git, this_program
    progress: headline
    record_file: none
    records: cut_short, each_record, key, read_jsonl, read_newest, Record
    reporter: Metrics, Reporter
    run_file: path_of, read, Report, saved_step, Start
    run_json: as_dict, changed_settings, Standing
    shown: Histogram, Images, Shown, Texts
    speed: Speed
    tensorboard_writer: TensorBoardWriter
    threaded_writer: none
    writer: Setting, Writer
    writers: none
"""
