"""What a run says of itself: where its time went, its metrics in files and on the screen, and `run.json`.

Names that other rooms may use, by file:
    clock: Clock, observers
    jsonl_writer: JsonlWriter
    page: Page, WrittenPage
    program: DIFF, Program
    progress: format_seconds, format_share, Progress
    records: cut_short, each_record, key, parse_line, read_jsonl, Record, RecordFile
    reporter: Metrics, Reporter
    run_json: as_dict, changed_settings, CONFIG, PAGE, path_of, read_report, Report, StartRecord
    run_report: Computation, RunProgress, RunReport, RunSettings, settings_of
    shown: Histogram, Images, Shown, Texts
    writers: DEFAULT_WRITERS, GROUP, Setting, Writer
"""
