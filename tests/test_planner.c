/* Tests of tape, verifier, passes, planner and replay: damaged tapes, random networks, plans compared with
   brute force, and storage that is overwritten as soon as it is dead. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"
#include "test_streams.h"

#include "planner/nets.h"
#include "planner/networks.h"
#include "planner/verifier.h"
#include "planner/placement.h"
#include "planner/models.h"
#include "planner/products.h"
#include "planner/offload.h"
#include "planner/costs.h"
#include "planner/reports.h"
#include "planner/budget.h"

static const test_case tests[] = {
    TEST_CASE(verifier_finds_damage), TEST_CASE(verifier_finds_bad_places),
    TEST_CASE(budgets_against_brute_force), TEST_CASE(seconds_within_a_budget_against_brute_force),
    TEST_CASE(budgets_near_the_smallest), TEST_CASE(the_smallest_possible_is_the_smallest),
    TEST_CASE(what_is_refused_names_what_fits),
    TEST_CASE(groups_that_fit_a_budget), TEST_CASE(candidates_against_all_sets),
    TEST_CASE(budgets_of_a_deep_network), TEST_CASE(no_fixed_options_beat_a_budget),
    TEST_CASE(what_a_large_model_reaches_is_named),
    TEST_CASE(choices_count_micro_batches), TEST_CASE(budgets_of_block_sparse_attention),
    TEST_CASE(marks_of_values),
    TEST_CASE(random_networks_replay_bit_for_bit), TEST_CASE(random_networks_have_true_gradients),
    TEST_CASE(verifier_finds_what_is_not_waited_for), TEST_CASE(verifier_finds_bad_groups),
    TEST_CASE(lifetimes_and_places_of_each_space), TEST_CASE(values_in_the_hosts_memory),
    TEST_CASE(work_of_other_streams_ends_at_its_wait),
    TEST_CASE(instructions_that_run_together), TEST_CASE(placement_against_brute_force),
    TEST_CASE(verified_places_against_all_pairs), TEST_CASE(placement_of_merged_and_empty),
    TEST_CASE(plans_of_real_architectures), TEST_CASE(products_of_models_suit_cublaslt),
    TEST_CASE(products_of_one_x), TEST_CASE(products_that_meet), TEST_CASE(launches_that_become_one),
    TEST_CASE(products_of_programs_that_share),
    TEST_CASE(products_that_do_not_join), TEST_CASE(products_among_others),
    TEST_CASE(gradients_updated_in_the_backward),
    TEST_CASE(elementwise_chains_work_in_place),
    TEST_CASE(in_place_spares_what_is_needed), TEST_CASE(arena_is_the_plan), TEST_CASE(sizes_beyond_64_bits),
    TEST_CASE(plans_for_another_device), TEST_CASE(a_plan_has_a_budget_too),
    TEST_CASE(budgets_on_the_hosts_device),
    TEST_CASE(seconds_of_a_plan_by_costs), TEST_CASE(largest_batch_against_brute_force),
    TEST_CASE(reports),
    TEST_CASE(reports_of_a_deep_network), TEST_CASE(names_of_what_works_in_place),
    TEST_CASE(updates_in_the_hosts_memory_are_advised),
    TEST_CASE(updates_in_the_hosts_memory), TEST_CASE(plans_of_updates_in_the_hosts_memory),
    TEST_CASE(numbers_in_names), TEST_CASE(marked_values_go_to_the_hosts_memory),
    TEST_CASE(vit_l16_with_the_host), TEST_CASE(copies_out_are_waited_for_in_their_order),
    TEST_CASE(allocation_failures),
};

int main(int argc, char **argv)
{
    tt__limit_pieces_from = 1;
    tt__limit_offload_together = 4096;
    tt__limit_estimates = 400000;
    return test_main(argc, argv, tests, TEST_COUNT(tests));
}
