"""A run directory's checkpoints: when to save, what to keep, what proves them, and how a run starts from one.

Names that other rooms may use, by file:
    beginning: begin
    choice: BEST, FINAL, LATEST, best, check, choose, final
    commits: SET_ASIDE, begin, checkpoints, commit, committed, listing, path_of, place_of, verify
    contents: none
    lock: Holder, Kind, RunLock, acquire, holder
    manager: latest_checkpoint, peek
    matching: stable_names
    marker: Commit
    names: none
    policy: CheckpointPolicy, KeepBest, KeepEvery, KeepLast, KeepRule
    recovery: Recovery
    run_directory: RunDirectory, resolve
    snapshot: none
    store: Rollback, Store
    warm_start: warm_start
    worker_positions: none
"""
