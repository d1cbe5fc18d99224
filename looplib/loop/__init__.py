"""Steps on the device: the step, the inner loops that run many of it, and the reduction of its metrics.

Names that other rooms may use, by file:
    auto: none
    backend: Backend, Decorator
    base: InnerLoop, Loop, LoopResult, Metrics, Request, Specification, TrainingLoop
    batch_sizes: none
    device_loop: none
    example_checksum: hash_of_each, METRIC, VARIABLE
    global_share: none
    host_loop: as_shown
    lending: none
    loops: Loops
    metric_sums: none
    packing: batch_size
    reducer: Accumulator, Reducer, State
    schedule: Schedule
    step: raise_refusal, Step, StepFn, timed
    task_loop: as_numbers, check_evaluation, TaskLoop
    traced: none
    window: Window
    xla: none
"""
