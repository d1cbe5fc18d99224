"""What a run says of itself: where its time went, its metrics in files and on the screen, and `run.json`.

Names that other rooms may use, by file:
    clock: Clock, Pace
    outcome: Outcome, broken, done, failed, is_quit, preempted, served
    page: Page
    program: DIFF, diff, git, this_program
    progress: Progress, format_number, format_seconds, headline
    records: Record, RecordFile, cut_short, each_record, key, read_jsonl, read_newest
    run_json: Report, RunReport, Standing, Start, as_dict, changed_settings, path_of, read, settings_of
    shown: Histogram, Images, Shown, Texts
    writers: DEFAULT_WRITERS, JsonlWriter, Setting, Writer, Writers, make_writers, named_writers
"""
