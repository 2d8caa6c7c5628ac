"""The traps of TRAPS.md, each with the tests that guard against it."""

from __future__ import annotations

import pathlib

TABLE: dict[str, str] = {
    # nnx.capture and perturb
    "inherited __call__, super() chains": "hooks/intercept::a_super_chain_is_one_call_of_one_site",
    "_private methods, static methods, properties, class methods": (
        "hooks/intercept::static_class_and_private_methods_and_properties_pass_by"
    ),
    "generators": "hooks/intercept::a_generator_method_still_generates",
    "a string or function returned under jit": (
        "whole/traps::texts_and_functions_that_a_module_returns_under_jit"
    ),
    "same class outside the tree": (
        "whole/traps::a_module_outside_of_the_tree_has_no_path_and_is_told"
    ),
    "module made during the forward pass": (
        "hooks/intercept::a_module_made_during_the_forward_pass_has_no_path"
    ),
    "ToLinen": "hooks/linen::tolinen_is_seen_in_init_and_apply",
    "exception in the forward pass": (
        "hooks/intercept::an_exception_in_the_forward_pass_is_the_users_and_leaves_nothing "
        "hooks/interception_properties::an_exception_of_the_forward_pass_is_the_users_and_leaves_nothing"
    ),
    "two threads with nnx.capture": (
        "hooks/interception_threads::two_threads_with_nnx_capture_of_their_own_models"
    ),
    "nested capture": "records/capture::capture_inside_capture",
    "jax.jit closure": "hooks/intercept::a_function_closed_over_the_model_honours_the_hooks",
    "cached_partial": "hooks/intercept::a_cached_partial_made_before_is_not_attributed_and_works",
    "jit_partial": "whole/traps::a_jit_partial_made_before_is_not_taken_for_the_model",
    "model not the first argument": "whole/traps::the_model_need_not_be_the_first_argument",
    "vmap(in_axes=None)": "whole/traps::vmap_with_the_model_unmapped",
    "while, fori, RNN": (
        "records/capture_oracle::a_loop_whose_body_is_traced_more_than_once_counts_what_ran "
        "hooks/intercept::paths_are_known_inside_every_transform"
    ),
    "cond with unlike branches": "whole/traps::branches_that_are_not_alike",
    "perturb called twice with different shapes": (
        "whole/traps::a_site_called_with_two_shapes_has_the_gradient_of_each"
    ),
    "raw jax.vmap, checkpoint, scan, jit inside": (
        "records/capture_oracle::raw_jax_transforms_within_a_module"
    ),
    "nnx.tabulate, in either order": (
        "records/capture_oracle::tabulate_and_hooks_in_every_order "
        "whole/traps::sow_is_seen_once_where_tabulate_has_copied_it_onto_the_class"
    ),
    # dispatch and paths
    "decorated methods": (
        "hooks/intercept::decorated_methods_are_intercepted_outside_their_transform"
    ),
    "methods stored in __init__": "hooks/intercept::a_method_stored_in_init_is_called_as_ever",
    "method references taken before": (
        "hooks/intercept::a_method_reference_taken_before_the_hooks_is_hooked"
    ),
    "frozen dataclasses, sealed metaclasses, List, Dict, Sequential": (
        "hooks/intercept::every_kind_of_class_is_intercepted_and_gives_the_same_result "
        "hooks/interception_properties::every_kind_of_layer_is_seen_as_it_is_called"
    ),
    "__slots__": "whole/traps::slots_are_refused_by_nnx_with_hooks_as_without",
    "submodule added or deleted later": "whole/traps::a_submodule_added_or_deleted_while_hooked",
    "older graphdefs": (
        "hooks/intercept::calls_of_an_older_graphdef_are_not_attributed "
        "whole/traps::calls_of_an_older_graphdef_are_told "
        "whole/traps::nothing_is_told_where_everything_was_seen"
    ),
    "AOT executables": (
        "whole/traps::an_executable_compiled_before_is_told "
        "whole/traps::an_executable_compiled_inside_is_no_cause_for_a_warning"
    ),
    "teacher and student": (
        "hooks/intercept::teacher_and_student_of_equal_structure_in_one_jit_are_told_apart "
        "live/training_loops::a_watched_loop"
    ),
    "EMA, clones before, during, after": (
        "whole/traps::training_with_donation_an_average_and_an_optimizer_is_the_plain_one "
        "hooks/intercept::a_tree_map_with_an_older_clone_works_while_hooked "
        "hooks/intercept::a_clone_made_while_hooked_is_equal_to_one_made_before "
        "hooks/intercept::a_clone_made_while_hooked_is_not_the_model"
    ),
    "pickle, deepcopy, checkpoints": (
        "hooks/intercept::a_model_pickled_while_hooked_is_as_any_other "
        "whole/traps::checkpoints_and_copies_made_while_hooked_are_like_any_others"
    ),
    "hooks inside a capture region": "hooks/intercept::the_users_method_outputs_work",
    "two inspectors on one model": (
        "inspector/inspector::two_inspectors_on_one_model "
        "hooks/interception_threads::two_threads_watch_one_model_each_seeing_its_own_passes"
    ),
    "an inspector dropped without close": (
        "inspector/inspector::close_frees_both_widgets_and_a_dropped_inspector_is_freed"
    ),
    "8 threads on one class": (
        "hooks/interception_threads::random_sequences_in_eight_threads_do_not_cross"
    ),
    "set_global": "whole/traps::nothing_global_is_set_so_that_other_threads_keep_their_programs",
    "fresh ids grow caches": (
        "whole/traps::fifty_equal_regions_grow_no_cache "
        "hooks/interception_properties::equal_hooks_that_come_and_go_trace_nothing_anew"
    ),
    "cond traces both branches, fori_loop twice, a cached inner jit not at all": (
        "whole/traps::both_branches_are_traced_and_an_interceptor_says_so_while_a_record_does_not "
        "records/capture::a_cached_inner_jit_is_seen_every_time"
    ),
    "eager lax.cond and while_loop": "whole/traps::an_eager_call_compiles_nothing_the_second_time",
    # callbacks
    "remat fires twice": "live/session::layers_of_a_scan_are_each_seen_once_also_under_remat",
    "per example under vmap": "live/session::a_vmapped_pass_is_summarised_as_one_batch",
    "sharded": "live/robustness::sharded_passes_are_summarised_once",
    "loop-invariant callbacks": (
        "live/robustness::a_value_that_no_turn_of_a_loop_changes_counts_once"
    ),
    "an exception in a callback": (
        "live/session::an_error_while_receiving_is_counted_and_never_reaches_the_step"
    ),
    "one host read an outermost call": (
        "live/regions::flips_from_another_thread_during_500_donated_steps_act_on_whole_passes"
    ),
    "a callback that consumes one reduction": "stats/summarize_in_trace::a_callback_may_consume_it",
    "jax.export": "live/robustness::a_function_can_be_exported_beside_the_hooks",
    # met while reviewing the design
    "a cached inner jit in two outer traces": (
        "hooks/intercept::a_module_level_jit_works_inside_two_outer_traces_with_equal_hooks "
        "records/capture::a_module_level_jit_works_in_two_traces_of_ours"
    ),
    "a closed-over custom_vjp": (
        "records/capture::a_custom_vjp_functions_inside_is_unseen_and_not_an_error"
    ),
    "behind stop_gradient, integers, while": (
        "records/capture::behind_stop_gradient_the_output_is_exact_and_the_gradient_none "
        "records/capture::an_integer_output_has_no_gradient "
        "records/capture::within_a_while_loop_there_is_no_gradient"
    ),
    "jaxpr parameters move": "_compat/compat::scan_parts_are_constants_carry_and_rows",
    "knobs read twice under jax.checkpoint": (
        "live/robustness::a_knob_turned_between_a_forward_pass_and_its_recomputation "
        "live/robustness::flips_during_a_jitted_step_with_remat_act_on_whole_steps"
    ),
    "a tag left makes nnx.jit retrace": (
        "hooks/interception_properties::equal_hooks_that_come_and_go_trace_nothing_anew"
    ),
    "two calls of one site in the sink": (
        "live/robustness::the_extremes_of_two_calls_of_one_site_are_those_of_both"
    ),
    # gradients
    "jvp and hessian": (
        "records/gradient_oracle::jvp_gives_record_and_tangents_and_the_record_has_none "
        "records/gradient_oracle::the_hessian_over_reverse"
    ),
    "outputs within 1e-6": (
        "hooks/interception_properties::hooks_change_nothing_see_every_call_and_leave_nothing"
    ),
    # numbers
    "NaN, Inf, extremes, subnormals, keys": (
        "stats/summarize::every_dtype_and_class program/marks::what_is_observable"
    ),
    "counters that stop at 2^24": "stats/summary::counts_beyond_32_bits_on_the_host",
}
"""What TRAPS.md warns of, by the tests that would notice: `room/file::name`, without `test_`."""


def test_every_trap_has_a_test():
    tests = pathlib.Path(__file__).parents[1]
    missing = []
    for trap, names in TABLE.items():
        for file, _, name in (one.partition("::") for one in names.split()):
            path = tests / pathlib.PurePath(file).with_name(
                f"test_{pathlib.PurePath(file).name}.py"
            )
            if not path.exists() or f"def test_{name}(" not in path.read_text():
                missing.append((trap, f"{path.name}::test_{name}"))
    assert missing == []
