"""Steps on the device: the step, the inner loops that run many of it, and the reduction of its metrics.

Names that other rooms may use, by file:
    batch_sizes: none
    engines: ENGINES
    example_checksum: METRIC, VARIABLE
    fused_optimizers: none
    inner_loops: Ran, timed
    loops: LoopSettings, Loops
    optimizers: TrainingOptimizers
    packing: none
    recorded: RecordedParts
    reducer: Reducer
    schedule: Boundary, Schedule
    step: none
    task_loop: TaskLoop, as_numbers, check_evaluation
    window: Window
"""
