/* Tests of tt_open, tt_param_*, tt_compile and runs: context, parameters, budget, optimizers and misuse. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

#ifndef _WIN32
#include <sys/wait.h>
#endif

#include "program/model.h"
#include "program/host.h"
#include "program/functions.h"
#include "program/contexts.h"
#include "program/parameters.h"
#include "program/memory.h"
#include "program/compile.h"
#include "program/ema.h"
#include "program/custom.h"

static const test_case tests[] = {
    TEST_CASE(context_options), TEST_CASE(measured_peak_is_plausible), TEST_CASE(costs_of_this_machine),
    TEST_CASE(pool_runs_each_task_once),
    TEST_CASE(functions_of_every_system),
    TEST_CASE(contexts_in_parallel), TEST_CASE(threads_leave_signals_to_the_host),
    TEST_CASE(callers_float_mode_changes_no_bit), TEST_CASE(the_cpu_described),
    TEST_CASE(quotas_of_control_groups), TEST_CASE(memory_of_control_groups),
    TEST_CASE(plans_above_the_memory_are_refused), TEST_CASE(every_allocation_may_fail),
    TEST_CASE(closing_with_things_left_warns), TEST_CASE(nothing_is_printed_but_by_the_logger),
    TEST_CASE(initial_values), TEST_CASE(initial_values_too_large_for_f16),
    TEST_CASE(parameters_are_made_found_set_and_read), TEST_CASE(a_failed_source_can_be_tried_again),
    TEST_CASE(frozen_parameters_cost_nothing), TEST_CASE(frozen_parameters_keep_their_bits),
    TEST_CASE(logits_of_a_large_vocabulary), TEST_CASE(inputs_overwritten_by_another_program),
    TEST_CASE(inputs_overwritten_by_an_update), TEST_CASE(outputs_overwritten_by_another_programs_update),
    TEST_CASE(options_are_the_callers_again),
    TEST_CASE(sharing_an_allocated_arena), TEST_CASE(budget_of_a_shared_arena),
    TEST_CASE(plans_count_what_their_arena_holds), TEST_CASE(parameters_held_as_another_dtype),
    TEST_CASE(builds_are_pure), TEST_CASE(options_are_checked_together), TEST_CASE(names_of_devices),
    TEST_CASE(memory_budget), TEST_CASE(misuse_of_runs), TEST_CASE(misuse_of_compile),
    TEST_CASE(values_of_other_tapes), TEST_CASE(axes_of_one_name), TEST_CASE(first_reasons_are_kept),
    TEST_CASE(odd_roots_and_unread_inputs), TEST_CASE(parameters_of_a_freed_program),
    TEST_CASE(numbers_that_are_not_finite), TEST_CASE(numbers_that_are_not_finite_in_an_early_update),
    TEST_CASE(early_updates_that_are_refused), TEST_CASE(options_are_named_as_the_caller_says),
    TEST_CASE(words_of_options),
    TEST_CASE(moving_averages),
    TEST_CASE(ops_of_the_caller), TEST_CASE(ops_of_the_caller_refuse),
    TEST_CASE(an_optimizer_of_the_caller),
};

int main(int argc, char **argv)
{
    tt__limit_pieces_from = 1; /* small tensors, too, can be kept in the host's memory */
    return test_main(argc, argv, tests, TEST_COUNT(tests));
}
