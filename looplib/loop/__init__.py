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
    engines: ENGINES
    evaluation: none
    example_checksum: hash_of_each, METRIC, VARIABLE
    flops: of_training, SHORT_TRAINING, with_share
    global_share: none
    graph: none
    lending: none
    loops: Loops, LoopSettings
    media: as_shown
    metric_sums: none
    one_program: none
    packing: batch_size
    recorded: RecordedParts
    reducer: Accumulator, Reducer, State
    schedule: Boundary, Schedule
    showing: none
    step: raise_refusal, Step, StepFn
    stepwise: none
    task_loop: as_numbers, check_evaluation, TaskLoop
    timing: timed
    traced: none
    window: Window
"""
