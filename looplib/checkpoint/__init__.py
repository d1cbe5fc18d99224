"""A run directory's checkpoints: when to save, what to keep, what proves them, and how a run starts from one.

Names that other rooms may use, by file:
    checkpointer: Checkpointer
    choice: best, check, choose, divided, FINAL, final, LATEST
    commits: begin, checkpoint_folder, Commit, commit, committed, latest_checkpoint, list_checkpoints, listing, newest,
        path_of, read_marker, SET_ASIDE, UNFINISHED, verify
    directory: CONTENTS, resolve, RunDirectory
    lock: acquire, LockHolder, holder, LockKind, RunLock
    mirror: Mirror
    names: groups, in_order, NamedVariable, LiveVariables, NameNormalizer, SavedVariables
    policy: CheckpointPolicy, KeepBest, KeepEvery, KeepLast, KeepRule, Start
    recorded: RecordedParts
    restoring: check_contents, contents_of, describe_differences, objects_of, peek
    saving: none
"""
