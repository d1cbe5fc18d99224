"""Steps on the device: the step, the inner loops that run many of it, and the reduction of its metrics.

Names that other rooms may use, by file:
    auto: none
    backend: Backend, Decorator
    base: InnerLoop, Loop, Metrics, Ran, Request, Specification, TrainingLoop
    batch_sizes: none
    calls: none
    choices: none
    chunks: none
    eager: none
    engines: none
    evaluation: none
    example_checksum: METRIC, VARIABLE, hash_of_each
    flops: SHORT_TRAINING, of_training, with_share
    fused_optimizers: none
    global_share: none
    graph: none
    lending: none
    loops: Loops
    media: as_shown
    metric_sums: none
    one_program: none
    optimizers: Replacement, TrainingOptimizers, refuse_others
    packing: batch_size
    recorded: RecordedParts
    reducer: Accumulator, Reducer, State
    schedule: Boundary, Schedule
    showing: none
    step: Step, StepFn, raise_refusal
    stepwise: none
    task_loop: TaskLoop, as_numbers, check_evaluation
    timing: timed
    traced: none
    window: Window
"""
