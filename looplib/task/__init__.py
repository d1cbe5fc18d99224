"""What a user subclasses, what a step returns, and the state and settings of both.

Names that other rooms may use, by file:
    actions: Action, ActionStates, Event, attending, tell_saves
    checks: build_optimizers, check_kinds, check_tasks, check_together, collect_state
    evaluator: Evaluator
    input_context: InputContext
    learning_rates: LearningRates
    model_table: note
    monitored: mode_of
    own_loop: OwnLoop
    perturbation: VARIABLE, nudge, requested
    plateau: EarlyStopping, ReduceOnPlateau
    record: EngineChoice, RunRecord, RunState, RunningTotals
    reductions: Reduction, each, last, mean, total
    state: InputState, ReplicaState, SlotOptimizer, differing_variables, state_of, variables_below, variables_of
    trainer: Trainer
"""
