"""Steps on the device: the step, the inner loops that run many of it, and the reduction of its metrics.

Names that other rooms may use, by file:
    batch_sizes: none
    engines: ENGINES
    example_checksum: METRIC, VARIABLE
    fused_optimizers: none
    inner_loops: Ran, timed
    optimizers: TrainingOptimizers
    packing: none
    reducer: Reducer
    schedule: none
    step: none
    task_loop: as_numbers, check_evaluation, make_loop
"""
