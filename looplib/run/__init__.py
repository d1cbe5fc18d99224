"""The run directory: its lock, its commits, run.json, metrics.jsonl, its status; all of it without TensorFlow.

Names that other rooms may use, by file:
    choice: BEST, best, check, choose, divided, FINAL, final, LATEST
    code_version: diff, git, this_program
    commits: add_scores, begin, checkpoint_folder, Commit, commit, committed, FileChecksum, latest_checkpoint,
        list_is_foreign, listing, newest, newest_intact, path_of, position_path, positions_of, read_marker, remove,
        set_aside, SET_ASIDE, set_aside_before, set_foreign_aside, UNFINISHED, verify
    goodput: as_report, goodput, restored_step
    lock: acquire, holder, LockKind, RunLock
    machine: machine_of, NOTE, this_machine
    metric_names: BATCH_SIZES, best_first, check, check_finished, CHECKSUM, gain, mode_of, refuse_in
    mirror: Mirror
    newest: read_newest
    notice: iso_time, Notice, notices_of
    phases: spans, TimeSpan
    policy: CheckpointPolicy, KeepBest, KeepEvery, KeepLast, KeepRule, Start
    program: DIFF, Program, this_process
    records: cut_short, each_record, key, parse_line, Record, RecordFile
    run_json: as_dict, changed_settings, CONFIG, flattened, kept, PAGE, path_of, read_report, Report, StartRecord,
        strict, TRAINING_REPORT
    run_status: ENDED_EARLY, last_written, read_status, RunStatus
    slow_workers: Straggler, stragglers_of
    standing: Standing
    values: durations, flat, get, items, mapping, metrics, number, numbers, shown, text, utc, whole
"""
