"""Steps on the device: the step, the inner loops that run many of it, and the reduction of its metrics.

Names that other rooms may use, by file:
    additions: none
    auto: none
    backend: none
    base: Loop, LoopResult, Request, Specification, StepAddition, TrainingLoop
    batch_sizes: none
    causes: Causes
    coordinator: none
    device_loop: none
    example_checksum: ExampleChecksum, hash_of_each, METRIC, VARIABLE
    host_loop: as_shown
    loops: Loops
    packing: batch_size
    phased_loop: PhasedLoop
    plugin: none
    processes: none
    reducer: Accumulator, State, UnknownOutputsError
    remote_stream: none
    results: none
    schedule: Schedule
    speed: none
    step: now, raise_refusal, Step, StepFn
    step_additions: none
    step_checks: none
    task_loop: as_numbers, check_evaluation, TaskLoop
    trial: none
    window: Window
    xla: none
"""
