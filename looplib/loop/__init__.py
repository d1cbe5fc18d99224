"""Steps on the device: the step, the inner loops that run many of it, and the reduction of its metrics.

Names that other rooms may use, by file:
    additions: ExampleChecksum, hash_of_each, METRIC
    contracts: Loop, LoopResult, Metrics, Request, Schedule, Specification, StepAddition, TrainingLoop
    coordinator: none
    device_loop: none
    engines: none
    host_loop: as_shown
    loops: Loops, loops_of
    packing: batch_size, Packer
    phased_loop: PhasedLoop
    reducer: Accumulator, State, UnknownOutputsError
    speed: of_training, with_share
    step: now, raise_refusal, Step, StepFn
    step_checks: KEPT, kept_apart, shared_variables, TracedValues
    task_loop: as_numbers, check_evaluation, TaskLoop, Window
    xla: none
"""
