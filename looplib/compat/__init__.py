"""What looplib uses of Keras and TensorFlow that they do not publish, each with what happens where it is missing.

Names that other rooms may use, by file:
    autograph: converted
    keras: adapts, averaged, changes_when_called, check_one_family, computes_in, family, finalizes, given_constants,
        GLOBAL_SEED, imported, inner_metrics, input_specs, is_a, is_layer, is_metric, is_metrics, is_model,
        is_optimizer, is_own_class, is_variable, loss_scale, make_outside, make_sums_outside, mask_of, optimizers,
        parts, rate_or_schedule, scales_loss, sublayers, tf_variable, UNSEEDED, untracked_variables, value_now,
        variable_path, when_imported, with_inner, with_mask, without_vocabularies
    methods: alone, Collectives, collectives, recompute
    models: callbacks_of, check_stateful_batch, compiled_metrics, fixed_batch, float_type, has_own_statistics,
        has_own_step, is_batch_normalization, preprocessing, refuse_limits, served, unlisted_metrics, unpacked
    normalization: synchronize
    optimizers: accumulating, counts_while_traced, fused_update, is_summed, leave_out_sum, num_replicas, own_method,
        Replacement, summed, updates_conditionally, variables_of
    pipelines: leaves_no_trace
    places: is_installed, is_of_keras, is_ours, line_of, place_of, place_of_function, place_of_start
    tensorflow: concatenated, depends_on_inputs, depends_on_values, functions_in, graphs_called_by, growing_array,
        identity_of, is_across_replicas, is_by_element, is_late_variable, is_merge_in_branch, is_merge_of_some,
        is_of_the_input, is_variable_key, keys_of_iterator_state, lacking_in_xla, lengths_of_a_wrong_epoch,
        log_errors_only, log_once, log_warnings_only, lost_server, message_without_op, name_of, name_of_variable,
        nodes_in, object_graph, OBJECT_GRAPH_KEY, parse_profile, python_state_key, RANDOM_OPS, repeated_seeds,
        ReplicaLocal, stages_of_iterator_state, started, stateful_ops_of_maps, updated_by, variable_key,
        why_restored_wrongly, worker_devices
    traced_ops: called, graphs_called, needed, Ops
"""
