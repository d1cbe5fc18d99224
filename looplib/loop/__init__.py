"""Steps on the device: the step, the inner loops that run many of it, and the reduction of its metrics.

Names that other rooms may use, by file:
    auto: none
    backend: Backend, Decorator
    base: InnerLoop, Loop, LoopResult, Metrics, Request, Specification, TrainingLoop
    device_loop: none
    example_checksum: METRIC, VARIABLE, hash_of_each
    fused_optimizers: none
    host_loop: as_shown
    loops: Loops
    optimizers: Replacement, TrainingOptimizers, refuse_others
    packing: batch_size
    recorded: RecordedParts
    reducer: Accumulator, Reducer, State
    schedule: Boundary, Schedule
    step: Step, StepFn, raise_refusal, timed
    step_additions: none
    step_checks: none
    task_loop: TaskLoop, as_numbers, check_evaluation
    window: Window
    xla: none
"""
