"""Unpublished parts of Keras and TensorFlow that looplib uses, each with what happens where it is missing.

Names that other rooms may use, by file:
    keras: adapts, averaged, changes_when_called, check_one_family, check_stateful_batch, compiled_metrics, computes_in,
        family, family_of_class, finalizes, fixed_batch, given_constants, GLOBAL_SEED, has_own_statistics, has_own_step,
        imported, inner_metrics, input_specs, is_a, is_batch_normalization, is_layer, is_metric, is_metrics, is_model,
        is_optimizer, is_own_class, is_variable, loss_scale, make_outside, make_sums_outside, makes_sums_late, mask_of,
        module_of, optimizers, parts, preprocessing, rate_or_schedule, refuse_limits, scales_loss, served, sublayers,
        tf_variable, unlisted_metrics, unpacked, UNSEEDED, untracked_variables, value_now, variable_path, when_imported,
        with_inner, with_mask, without_vocabularies
    optimizers: accumulating, counts_while_traced, fused_update, handle_of, is_summed, leave_out_sum, num_replicas,
        own_method, Replacement, summed, updates_conditionally, variables_of
    patches: alone, Collectives, collectives, may_join, recompute, synchronize, weighs_collectives
    places: called, graphs_called, is_installed, is_of_keras, is_ours, line_of, needed, Ops, place_of,
        place_of_function, place_of_start
    row_updates: add_table, any_tables, changes_owners, check, CHECK, emptied, held, is_divided, is_held, is_table,
        keep_slots_with_tables, knows_owners, RowOwners, shape_of, update, without_copy
    tensorflow: changed_since, concatenated, converted, DatasetLike, depends_on_inputs, depends_on_values, functions_in,
        graphs_called_by, growing_array, identity_of, is_across_replicas, is_by_element, is_late_variable,
        is_merge_in_branch, is_merge_of_some, is_of_the_input, is_variable_key, keys_of_iterator_state, lacking_in_xla,
        leaves_no_trace, lengths_of_a_wrong_epoch, log_errors_only, log_once, log_warnings_only, lost_server,
        message_without_op, name_of, name_of_variable, nodes_in, not_converted, object_graph, OBJECT_GRAPH_KEY, outside,
        python_state_key, RANDOM_OPS, repeated_seeds, ReplicaLocal, stages_of_iterator_state, started,
        stateful_ops_of_maps, TensorLike, updated_by, variable_key, why_restored_wrongly, worker_devices
    versions: none
"""
