"""What a user subclasses, what a step returns, and the state and settings of both.

Names that other rooms may use, by file:
    actions: Action, ActionStates, Event, attending, stops_of, tell_saves, warn_of_other_memories
    averages: WeightAverages
    checks: build_optimizers, check_kinds, check_tasks, check_together, collect_state
    derived: Constants, starting
    evaluator: Evaluator
    exported: Exported
    gradient_checks: none
    gradient_trainer: GradientTrainer
    gradients: none
    learning_rates: LearningRates, constant_rate, learning_rate, updating
    loss_scale: none
    media: Media, histogram, image, text
    micro_batches: none
    model_table: note, variables
    monitored: mode_of
    own_loop: OwnLoop
    own_names: BATCH_SIZES, CHECKSUM, check, check_finished, refuse_in
    parts: none
    perturbation: VARIABLE, nudge, requested
    plain: as_array, as_bytes, as_json, as_number, is_number
    record: Contents, EngineChoice, RunRecord, RunState, RunningTotals, VariableNames
    reductions: Reduction, all_gather, each, global_positions, last, mean, total, weighted_sum
    state: InputState, ReplicaState, SlotOptimizer, differing_variables, no_weights, state_of, tables_of, unheld,
        variables_of
    trainer: Trainer
"""
