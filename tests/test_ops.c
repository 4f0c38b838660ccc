/* Generic tests of the ops, their gradients, and the programs made of them.

   Each line of the table CASES is a small program. Each function that the line calls (linear(), gelu(), ...)
   records an op on a tape and notes a plain float64 loop that computes the same result. Two tests then run
   every case at every size in every precision and instruction set: `reference` compares results with the
   loops, `gradient` compares gradients with central differences of the loops. A new op needs a loop in ops/,
   in the file of its family, and a line in the table in ops/cases.h.

   Tolerances of results: for each op of the longest path, 2e-6 in f32, 2^-8 in bf16 and 2^-11 in f16,
   relative to the largest sum of the absolute terms of a result. bf16 keeps 8 bits of mantissa, so a rounding
   errs by at most 2^-9; operands and result are rounded, hence 2^-8. f16 keeps 11 bits.

   Tolerances of gradients: 2e-5 in f32, and in bf16 and f16 again 2^-8 and 2^-11 for each op of the path to
   the loss. The tolerances are relative to the sum of three numbers: the largest element of the parameter's
   gradient; a tenth (in bf16 and f16, half) of the largest element of all gradients, because sums may cancel;
   and the largest gradient that enters the case from the loss. */
#define TINYTRAIN_IMPLEMENTATION
/* linear_cross_entropy replaces every linear layer before a cross-entropy, and runs in several chunks. */
#define TT__LOSS_CHUNK 5
#define TT__LOSS_WHOLE 0
#define TT__FP8_FROM 0
#define TT__STATE_SMALL 1000 /* matrices of small programs may have optimizer states of 8 bits */
#include "tinytrain.h"
#include "test.h"
#ifdef TT_EMULATE
#include "emu_control.h"
#endif
#undef I /* some <cblas.h> include complex.h, which defines I */

#include "ops/net.h"
#include "ops/linear.h"
#include "ops/rows.h"
#include "ops/norm.h"
#include "ops/elementwise.h"
#include "ops/attention.h"
#include "ops/losses.h"
#include "ops/cases.h"
#include "ops/reference.h"
#include "ops/gradient.h"
#include "ops/training.h"
#include "ops/optimizers.h"
#include "ops/numbers.h"
#include "ops/attention_ways.h"
#include "ops/refused.h"
#include "ops/stored.h"
#include "ops/several_losses.h"
#include "ops/cuda_products.h"
#include "ops/cuda_launches.h"
#include "ops/cuda_dropout.h"
#include "ops/cuda_attention.h"
#include "ops/fp8.h"

static const test_case tests[] = {
    TEST_CASE_IN_PARTS(reference_portable), TEST_CASE_IN_PARTS(reference_avx2),
    TEST_CASE_IN_PARTS(reference_avx512), TEST_CASE_IN_PARTS(reference_avx512_dot),
    TEST_CASE_IN_PARTS(reference_avx512_tiles), TEST_CASE_IN_PARTS(reference_neon),
    TEST_CASE_IN_PARTS(reference_neon_dot), TEST_CASE_IN_PARTS(reference_cuda),
    TEST_CASE_IN_PARTS(gradient_portable), TEST_CASE_IN_PARTS(gradient_avx2),
    TEST_CASE_IN_PARTS(gradient_avx512), TEST_CASE_IN_PARTS(gradient_avx512_dot),
    TEST_CASE_IN_PARTS(gradient_avx512_tiles), TEST_CASE_IN_PARTS(gradient_neon),
    TEST_CASE_IN_PARTS(gradient_neon_dot), TEST_CASE_IN_PARTS(gradient_cuda),
    TEST_CASE_IN_PARTS(attention_by_warpgroups), TEST_CASE(every_op_has_a_case),
    TEST_CASE(activations_far_from_zero), TEST_CASE(matmul_ignores_columns_beyond), TEST_CASE(several_losses),
    TEST_CASE(sigmoid_cross_entropy_counts),
    TEST_CASE(rotary_scaling),
    TEST_CASE(dropout_masks), TEST_CASE(same_bits_for_any_number_of_threads),
    TEST_CASE(precisions_train_alike), TEST_CASE(stochastic_rounding_is_unbiased),
    TEST_CASE(stochastic_rounding_of_each_isa), TEST_CASE(pieces_are_updated_as_the_whole),
    TEST_CASE(maps_of_8_bits_are_those_of_bitsandbytes), TEST_CASE(states_of_8_bits_of_each_isa),
    TEST_CASE(weights_narrowed_while_read),
    TEST_CASE(products_exact), TEST_CASE(attention_window_flops),
    TEST_CASE(attention_blocks_flops),
    TEST_CASE(attention_window_plan), TEST_CASE(swiglu_keeps_less),
    TEST_CASE(attention_by_dot), TEST_CASE(attention_by_tiles),
    TEST_CASE(mixed_precision_without_copies), TEST_CASE(f16_conversions), TEST_CASE(residual_stream_in_f32),
    TEST_CASE(micro_batches_equal_a_batch), TEST_CASE(ops_refuse_wrong_operands),
    TEST_CASE(rows_of_other_widths_are_not_mapped), TEST_CASE(formats_of_stored_weights),
    TEST_CASE(stored_products_equal_widened), TEST_CASE(stored_weights_refused),
    TEST_CASE(stored_weights_are_counted),
    TEST_CASE(bad_batches_change_nothing), TEST_CASE(numbers_that_are_not_finite),
    TEST_CASE(failed_micro_batch_ends_the_step), TEST_CASE(unused_inputs), TEST_CASE(cuda_epilogues),
    TEST_CASE(cuda_products_of_one_x), TEST_CASE(cuda_tensors_share_launches),
    TEST_CASE(cuda_rows_in_flight), TEST_CASE(cuda_kernels_of_each_dtype),
    TEST_CASE(cuda_column_sums_of_attention), TEST_CASE(cuda_dropout_kept_for_keys),
    TEST_CASE(cuda_dropout_with_norms), TEST_CASE(cuda_programs_with_dropout_and_norms),
    TEST_CASE(cuda_backward_by_warpgroups),
    TEST_CASE(biases_of_attention_cuda), TEST_CASE(matmul_in_tf32), TEST_CASE(quantize),
    TEST_CASE(history_of_fp8_scales), TEST_CASE(matmul_in_fp8), TEST_CASE(training_in_fp8),
    TEST_CASE(parameters_begin_on_the_device), TEST_CASE(device_described_cuda),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
