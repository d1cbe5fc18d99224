"""Steps on the device: the step, the inner loops that run many of it, and the reduction of its metrics.

Names that other rooms may use, by file:
    auto: none
    backend: Backend, backend_of, Decorator
    base: InnerLoop, Loop, LoopResult, Metrics, Request, Specification, StepAddition, TrainingLoop
    device_loop: none
    host_loop: as_shown
    loops: Loops
    packing: batch_size, Packer
    reducer: Accumulator, Reducer, State, UnknownOutputsError
    schedule: Schedule
    step: now, raise_refusal, Step, StepFn, timed
    step_additions: none
    step_checks: TracedValues
    task_loop: as_numbers, check_evaluation, TaskLoop
    trial: none
    window: Window
    xla: none
"""
