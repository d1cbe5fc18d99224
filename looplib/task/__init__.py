"""What a user subclasses, what a step returns, and the state and settings of both.

Names that other rooms may use, by file:
    actions: Action, ActionStates, announce_saves, Event, hooks_around, stops_of, warn_of_unused_memories
    adapter: Adapter, OwnLoop, rates_of
    averages: at_rest, refuse_in_use, WeightAverages
    checks: build_optimizers, check_kinds, check_settings, check_tasks, check_together, collect_state
    derived: Constants, starting
    evaluator: Evaluator
    exported: check_names, Exported, of_model
    fitting: none
    gradient_trainer: GradientTrainer
    gradients: DynamicLossScale
    learning_rates: constant_rate, learning_rate, LearningRates, updating
    media: Media
    media_reductions: histogram, image, text
    micro_batches: none
    model_table: note, variables
    own_losses: none
    parts: none
    phase: Phase
    phases: PhasedTraining
    plain: as_array, as_bytes, as_json, as_number, gaps, is_number
    record: Contents, EngineChoice, RunningTotals, RunRecord, RunState, VariableNames
    reductions: all_gather, each, global_positions, last, mean, Reduction, total, weighted_sum
    rematerialization: none
    state: differing_variables, held_by, InputState, no_weights, ReplicaState, SlotOptimizer, state_of, tables_of,
        unheld, variables_of
    trainer: Trainer
"""
