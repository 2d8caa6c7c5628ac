"""TRAPS.md by the tests that would notice: each of them is there."""

from __future__ import annotations

import pathlib

TABLE: dict[str, str] = {
    # nnx.capture and perturb
    "inherited __call__, super() chains": "interception::a_super_chain_is_one_call_of_one_site",
    "_private methods, static methods, properties, class methods": (
        "interception::static_class_and_private_methods_and_properties_pass_by"
    ),
    "generators": "interception::a_generator_method_still_generates",
    "a string or function returned under jit": (
        "traps::texts_and_functions_that_a_module_returns_under_jit"
    ),
    "same class outside the tree": "traps::a_module_outside_of_the_tree_has_no_path_and_is_told",
    "module made during the forward pass": (
        "interception::a_module_made_during_the_forward_pass_has_no_path"
    ),
    "ToLinen": "linen::tolinen_is_seen_in_init_and_apply",
    "exception in the forward pass": (
        "interception::an_exception_in_the_forward_pass_is_the_users_and_leaves_nothing "
        "interception_properties::an_exception_of_the_forward_pass_is_the_users_and_leaves_nothing"
    ),
    "two threads with nnx.capture": (
        "interception_threads::two_threads_with_nnx_capture_of_their_own_models"
    ),
    "nested capture": "capturing::capture_inside_capture",
    "jax.jit closure": "interception::a_function_closed_over_the_model_honours_the_hooks",
    "cached_partial": "interception::a_cached_partial_made_before_is_not_attributed_and_works",
    "jit_partial": "traps::a_jit_partial_made_before_is_not_taken_for_the_model",
    "model not the first argument": "traps::the_model_need_not_be_the_first_argument",
    "vmap(in_axes=None)": "traps::vmap_with_the_model_unmapped",
    "while, fori, RNN": (
        "capturing::a_while_loop_adds_up "
        "capturing::fori_loop_counts_what_ran_and_not_what_was_traced "
        "interception::paths_are_known_inside_every_transform"
    ),
    "cond with unlike branches": "traps::branches_that_are_not_alike",
    "perturb called twice with different shapes": (
        "traps::a_site_called_with_two_shapes_has_the_gradient_of_each"
    ),
    "raw jax.vmap, checkpoint, scan, jit inside": ("capturing::raw_jax_transforms_inside_are_seen"),
    "nnx.tabulate, in either order": (
        "interception::tabulate_works_while_hooked_and_hooks_work_after_it "
        "interception::hooks_inside_tabulate_after_capture_of_ours_do_not_recurse "
        "traps::sow_is_seen_once_where_tabulate_has_copied_it_onto_the_class"
    ),
    # dispatch and paths
    "decorated methods": "interception::decorated_methods_are_intercepted_outside_their_transform",
    "methods stored in __init__": "interception::a_method_stored_in_init_is_called_as_ever",
    "method references taken before": (
        "interception::a_method_reference_taken_before_the_hooks_is_hooked"
    ),
    "frozen dataclasses, sealed metaclasses, List, Dict, Sequential": (
        "interception::every_kind_of_class_is_intercepted_and_gives_the_same_result "
        "interception_properties::every_kind_of_layer_is_seen_as_it_is_called"
    ),
    "__slots__": "traps::slots_are_refused_by_nnx_with_hooks_as_without",
    "submodule added or deleted later": "traps::a_submodule_added_or_deleted_while_hooked",
    "older graphdefs": (
        "interception::calls_of_an_older_graphdef_are_not_attributed "
        "traps::calls_of_an_older_graphdef_are_told "
        "traps::nothing_is_told_where_everything_was_seen"
    ),
    "AOT executables": (
        "traps::an_executable_compiled_before_is_told "
        "traps::an_executable_compiled_inside_is_no_cause_for_a_warning"
    ),
    "teacher and student": (
        "interception::teacher_and_student_of_equal_structure_in_one_jit_are_told_apart "
        "watching::teacher_and_student_of_equal_structure_are_never_mixed_up"
    ),
    "EMA, clones before, during, after": (
        "traps::training_with_donation_an_average_and_an_optimizer_is_the_plain_one "
        "interception::a_tree_map_with_an_older_clone_works_while_hooked "
        "interception::a_clone_made_while_hooked_is_equal_to_one_made_before "
        "interception::a_clone_made_while_hooked_is_not_the_model"
    ),
    "pickle, deepcopy, checkpoints": (
        "interception::a_model_pickled_while_hooked_is_as_any_other "
        "traps::checkpoints_and_copies_made_while_hooked_are_like_any_others"
    ),
    "hooks inside a capture region": "interception::the_users_method_outputs_work",
    "two inspectors on one model": (
        "inspector::two_inspectors_on_one_model "
        "interception_threads::two_threads_watch_one_model_each_seeing_its_own_passes"
    ),
    "an inspector dropped without close": (
        "inspector::close_frees_both_widgets_and_a_dropped_inspector_is_freed"
    ),
    "8 threads on one class": (
        "interception_threads::random_sequences_in_eight_threads_do_not_cross"
    ),
    "set_global": "traps::nothing_global_is_set_so_that_other_threads_keep_their_programs",
    "fresh ids grow caches": (
        "traps::fifty_equal_regions_grow_no_cache "
        "interception_properties::equal_hooks_that_come_and_go_trace_nothing_anew"
    ),
    "cond traces both branches, fori_loop twice, a cached inner jit not at all": (
        "traps::both_branches_are_traced_and_an_interceptor_says_so_while_a_record_does_not "
        "capturing::a_cached_inner_jit_is_seen_every_time"
    ),
    "eager lax.cond and while_loop": "traps::an_eager_call_compiles_nothing_the_second_time",
    # callbacks
    "remat fires twice": "watching::layers_of_a_scan_are_each_seen_once_also_under_remat",
    "per example under vmap": "watching::a_vmapped_pass_is_summarised_as_one_batch",
    "sharded": "traps_watched::sharded_passes_are_summarised_once",
    "loop-invariant callbacks": (
        "traps_watched::a_value_that_no_turn_of_a_loop_changes_counts_once_a_turn"
    ),
    "an exception in a callback": (
        "traps_watched::what_is_raised_while_receiving_never_reaches_the_step "
        "watching::an_error_while_receiving_is_counted_and_never_reaches_the_step"
    ),
    "one host read an outermost call": "watching::flips_from_another_thread_during_donated_steps",
    "a callback that consumes one reduction": "summarize_in_trace::a_callback_may_consume_it",
    "jax.export": "traps_watched::a_function_can_be_exported_beside_the_hooks",
    # met while reviewing the design
    "a cached inner jit in two outer traces": (
        "interception::a_module_level_jit_works_inside_two_outer_traces_with_equal_hooks "
        "capturing::a_module_level_jit_works_in_two_traces_of_ours"
    ),
    "a closed-over custom_vjp": (
        "capturing::a_custom_vjp_functions_inside_is_unseen_and_not_an_error"
    ),
    "behind stop_gradient, integers, while": (
        "capturing::behind_stop_gradient_the_output_is_exact_and_the_gradient_none "
        "capturing::an_integer_output_has_no_gradient "
        "capturing::within_a_while_loop_there_is_no_gradient"
    ),
    "jaxpr parameters move": "private::scan_parts_are_constants_carry_and_rows",
    "knobs read twice under jax.checkpoint": (
        "traps_watched::a_knob_turned_between_a_forward_pass_and_its_recomputation "
        "traps_watched::flips_during_a_jitted_step_with_remat_act_on_whole_steps"
    ),
    "a tag left makes nnx.jit retrace": "interception::entering_again_and_leaving_traces_nothing",
    "two calls of one site in the sink": (
        "traps_watched::the_extremes_of_two_calls_of_one_site_are_those_of_both"
    ),
    # gradients
    "jvp and hessian": "capturing::jvp_through_capture capturing::hessian_through_value_and_grad",
    "outputs within 1e-6": (
        "interception_properties::hooks_change_nothing_see_every_call_and_leave_nothing"
    ),
    # numbers
    "NaN, Inf, extremes, subnormals, keys": (
        "summarize::every_dtype_and_class taps::keys_are_not_observed"
    ),
    "counters that stop at 2^24": "summary::counts_beyond_32_bits_on_the_host",
}
"""What TRAPS.md warns of, by the tests that would notice: `file::name` without their `test_`."""


def test_every_trap_has_a_test():
    here = pathlib.Path(__file__).parent
    missing = []
    for trap, names in TABLE.items():
        for file, _, name in (one.partition("::") for one in names.split()):
            path = here / f"test_{file}.py"
            if not path.exists() or f"def test_{name}(" not in path.read_text():
                missing.append((trap, f"{path.name}::test_{name}"))
    assert missing == []
