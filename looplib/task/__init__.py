"""Classes that a user subclasses, values that a step returns, and the state and settings of both.

Names that other rooms may use, by file:
    actions: Action, Actions, Event, warn_of_unused_memories
    averages: at_rest, refuse_in_use, WeightAverages
    checks: build_optimizers, check_kinds, check_rows, check_settings, check_tasks, check_together, collect_state
    dynamic_embedding: DynamicEmbedding
    gradient_trainer: DynamicLossScale, GradientTrainer
    learning_rates: constant_rate, learning_rate, LearningRates, updating
    micro_batches: none
    model_table: note, variables
    parts: none
    phases: Phase, PhasedTraining
    plain: as_array, as_bytes, as_json, as_number, checksum_of, gaps, is_number
    record: Contents, EngineChoice, RunningTotals, RunRecord, RunState, VariableNames
    reductions: all_gather, each, global_positions, histogram, image, input_means, INPUTS, last, mean, Media,
        Reduction, text, total, weighted_sum
    sharded_embedding: ShardedEmbedding
    state: Constants, differing_variables, held_by, InputState, no_weights, ReplicaState, SlotOptimizer, starting,
        state_kept, state_of, state_of_model, tables_of, unheld, values_kept, variables_of
    trainer: Adapter, Evaluator, Exported, of_model, OwnLoop, rates_of, Trainer
"""
