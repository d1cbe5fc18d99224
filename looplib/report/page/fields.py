"""The fields of `run.json`, in words."""

# What a report holds; docs/reference/run_directory.md is made of it.
FIELDS = {
    "status": "`running`, `done`, `failed`, `preempted` or `restarted`; of an earlier start also `killed`.",
    "step, end": "The step that the run has reached, and the one that it trains to.",
    "saved_step, final_step": "The steps of the newest checkpoint, and of the one that `EarlyStopping` has restored.",
    "metrics": "The last metrics of each split.",
    "verdict": "What limits the speed.",
    "seconds": "The seconds of each phase, over all starts.",
    "speed": "The floating-point operations of a step, and the measured peak of the device.",
    "model": "The number of parameters, and the variables.",
    "command, program, versions": "The command; its directory and git commit; the versions of Python and packages.",
    "flags, config, not_default": "The settings; and those that differ from their defaults, as (default, value).",
    "strategy, num_replicas": "The devices.",
    "loop, engines": "The value of `--loop`, and what `auto` has chosen.",
    "started, restarts, rollbacks": "When the first start was, and how many restarts and rollbacks there were.",
    "restored_from": "The checkpoint that the newest start began with.",
    "starts": "Each start, with these fields; `changed` has the settings that differ from the start before, `note` "
    "what the launcher says (how many workers, and why), `rollbacks`, `notices`, `warnings`, `stragglers` (slow "
    "workers), `replica_checks` what happened in it, `machine` the kind of machine.",
    "goodput": "What share of the time since the first start became kept steps, and the seconds by cause.",
    "error, traceback": "Of a start that failed.",
    "console": "Why something that was printed is lost.",
}
