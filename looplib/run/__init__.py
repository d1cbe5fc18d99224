"""The run directory: its lock, its commits, run.json, metrics.jsonl, its status; all of it without TensorFlow.

Names that other rooms may use, by file:
    choice: BEST, best, check, choose, divided, FINAL, final, LATEST, rule_of
    code_version: diff, git, this_program
    commits: add_scores, begin, checkpoint_folder, Commit, commit, committed, FileChecksum, latest_checkpoint,
        list_is_foreign, listing, newest, newest_intact, path_of, position_path, positions_of, read_marker, remove,
        SET_ASIDE, set_aside, set_aside_before, set_foreign_aside, UNFINISHED, verify
    directory: check_inside, CONFIG, CONTENTS, DIFF, EVAL_JSON, LOCK, MEDIA, METRICS, PAGE, RECORDS, REPORTS, RUN_JSON,
        RunDir
    goodput: as_report, goodput, spans, TimeSpan
    lock: acquire, holder, LockKind, LockNote, RunLock
    metric_names: BATCH_SIZES, best_first, check, check_finished, CHECKSUM, gain, known_mode, Mode, mode_of, refuse_in
    mirror: Mirror
    policy: CheckpointPolicy, KeepBest, KeepEvery, KeepLast, KeepRule, Start
    records: aside_of, cut_short, MOST_BYTES, Record, RecordLog, RecordWriter
    report: as_dict, as_text, changed_settings, flattened, kept, MeasuredSpeed, Model, Note, Point, Program,
        read_report, REJECTED, ReplicaChecks, Rollback, RunReport, RunWarning, shown, StartEntry, Straggler,
        strict_json, TerminationNotice, this_machine, this_process, Variable
    started: check_replay, command_of, has_checksums, Recorded, refuse_several_processes, report_of, start_of
    status: ENDED_EARLY, read_status, RunStatus, Standing
    sweep_results: is_sweep, is_trial, RESULTS, SHARED, SweepResults, TrialResult, TRIALS
"""
