/* Tests of the CUDA backend as a whole: training like the CPU's, waits of the host, calls of CUDA that fail.
   Runs on a GPU (TINYTRAIN_CUDA=1 make test) or on the emulator; some tests need the emulator. */
#ifndef TINYTRAIN_CUDA
#include <stdio.h>

int main(void) /* does not include the header, whose code takes a minute to compile */
{
    return puts("skip test_cuda: this build is without TINYTRAIN_CUDA\n0 checks, 1 skipped: 0 passed, 0 "
                "failed") < 0;
}

#else
#define TT__PIECES_FROM 8 /* small tensors are offloaded, too */
#define TT__FP8_FROM 0 /* small products are in fp8, too */
static long loss_chunk = 256, loss_whole = 16 << 20;
#define TT__LOSS_CHUNK loss_chunk
#define TT__LOSS_WHOLE loss_whole
#define TINYTRAIN_IMPLEMENTATION
#ifdef TT_EMULATE
#define TT__BLOCK ((size_t)4096) /* bytes of a block of managed memory */
#endif
#include "tinytrain.h"
#include "test.h"
#ifdef TT_EMULATE
#include "emu_control.h"
#endif

#include "cuda/nets.h"
#include "cuda/training.h"
#include "cuda/memory.h"
#include "cuda/fp8.h"
#include "cuda/steps.h"
#include "cuda/tuning.h"
#include "cuda/faults.h"

static const test_case tests[] = {
    TEST_CASE(indices_behind_a_view_are_checked), TEST_CASE(bias_of_very_many_columns),
    TEST_CASE(costs_of_a_gpu), TEST_CASE(largest_batch_of_what_is_free), TEST_CASE(sizes_that_kernels_refuse),
    TEST_CASE(trains_distilbert_as_the_cpu_does),
    TEST_CASE(trains_vit_as_the_cpu_does), TEST_CASE(trains_with_updates_in_the_hosts_memory),
    TEST_CASE(values_in_the_hosts_memory),
    TEST_CASE(a_step_waits_once_for_its_results), TEST_CASE(programs_on_two_devices),
    TEST_CASE(micro_steps_that_do_not_wait_keep_their_inputs), TEST_CASE(steps_are_read_one_later),
    TEST_CASE(errors_are_read_one_later), TEST_CASE(fit_counts_each_step),
    TEST_CASE(lengths_that_are_met_again_are_replayed), TEST_CASE(steps_go_on_without_graphs),
    TEST_CASE(results_are_there_before_the_update),
    TEST_CASE(products_that_cublaslt_refuses), TEST_CASE(algorithms_are_chosen_once),
    TEST_CASE(no_product_of_a_model_needs_that_kernel), TEST_CASE(gelu_is_as_exact_as_said),
    TEST_CASE(a_lost_device_says_so), TEST_CASE(an_op_that_fails_is_named), TEST_CASE(any_call_may_fail_once),
    TEST_CASE(any_call_may_fail_for_ever), TEST_CASE(any_call_may_fail_while_saving),
    TEST_CASE(pinned_memory_is_what_was_planned), TEST_CASE(fp8_asks_its_own_device),
    TEST_CASE(training_in_fp8_keeps_its_bits), TEST_CASE(overflows_in_fp8_are_skipped),
    TEST_CASE(managed_memory_gives_the_same_bits), TEST_CASE(managed_memory_that_does_not_fit_is_refused),
    TEST_CASE(managed_memory_that_is_not_there), TEST_CASE(managed_memory_whose_calls_fail),
    TEST_CASE(the_device_that_is_described), TEST_CASE(a_launch_that_fails_in_a_capture_is_named),
    TEST_CASE(the_fastest_algorithm_is_taken),
    TEST_CASE(epilogues_are_taken_where_they_pay),
    TEST_CASE(resumed_runs_keep_their_algorithms),
    TEST_CASE(a_file_keeps_what_was_timed),
    TEST_CASE(a_file_that_is_damaged_is_refused),
    TEST_CASE(tuned_algorithms_that_are_refused_give_way),
    TEST_CASE(tuning_without_memory_does_without),
    TEST_CASE(ranks_share_what_was_timed),
    TEST_CASE(any_call_may_fail_while_tuning),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }

#endif
