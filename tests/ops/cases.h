/* The table of cases: each is run at all sizes, in all precisions, on all instruction sets and on the
   emulator of CUDA. */
#pragma once

/* -------------------------------------------------------------------------------------------------- cases */

/* X(name, tested op, body). R: number of rows. D: number of heads times head size. O: another width. C:
   number of classes. S: a scale of scores. V(): a value operand. W(): a parameter of two dimensions. B(): a
   parameter of one dimension. I(): an index. */
#define CASES(X) \
    X(linear, LINEAR, return linear(V(ROWS, D), W(O, D), B(O));) \
    X(linear_no_bias, LINEAR, return linear(V(ROWS, D), W(O, D), 0);) \
    X(linear_gelu, LINEAR, return gelu(linear(V(ROWS, D), W(O, D), B(O)));) \
    X(linear_gelu_tanh, LINEAR, return gelu_tanh(linear(V(ROWS, D), W(O, D), B(O)));) \
    X(linear_gelu_tanh_linear, LINEAR, int x = gelu(V(ROWS, D)); \
        return gelu(linear(gelu_tanh(linear(x, W(O, D), B(O))), W(D, O), B(D)));) \
    X(linear_relu, LINEAR, return relu(linear(V(ROWS, D), W(O, D), B(O)));) \
    X(linear_tanh, LINEAR, return tanh_(linear(V(ROWS, D), W(O, D), B(O)));) \
    X(linear_silu_no_bias, LINEAR, return silu(linear(V(ROWS, D), W(O, D), 0));) \
    X(linear_residual, LINEAR, return add(linear(V(ROWS, D), W(O, D), B(O)), V(ROWS, O));) \
    X(linear_residual_first, LINEAR, return add(V(ROWS, O), linear(V(ROWS, D), W(O, D), 0));) \
    X(linear_residual_of_input, LINEAR, int x = V(ROWS, D); return add(linear(x, W(D, D), B(D)), x);) \
    X(linear_plus_linear, LINEAR, int x = V(ROWS, D); \
        return add(linear(x, W(O, D), B(O)), linear(x, W(O, D), B(O)));) \
    X(linear_same_weight, LINEAR, int w = W(D, D); int b = B(D); \
        return linear(linear(V(ROWS, D), w, b), w, b);) \
    X(linear_bias_is_weight, LINEAR, int w = W(1, 1); return linear(V(ROWS, 1), w, w);) \
    X(linear_gelu_residual, LINEAR, int x = V(ROWS, D); return add(gelu(linear(x, W(D, D), B(D))), x);) \
    X(linear_used_twice, LINEAR, int h = linear(V(ROWS, D), W(D, D), B(D)); return add(gelu(h), h);) \
    X(linear_weight_as_value, LINEAR, int w = W(D, D); \
        return add(linear(V(ROWS, D), w, 0), gather_rows(param_value(w), I(ROWS, D)));) \
    X(matmul, MATMUL, return matmul(V(ROWS, D), V(SEQS, D));) \
    X(matmul_wide, MATMUL, return matmul(V(SEQS, D), gelu(V(ROWS, D)));) \
    X(matmul_fixed, MATMUL, return matmul(gelu(V(ROWS, D)), V(CONSTANT, D));) \
    X(matmul_self, MATMUL, int x = tanh_(V(ROWS, D)); return matmul(x, x);) \
    X(matmul_scaled, MATMUL, \
        return matmul_of(tanh_(V(PICKED, D)), V(ROWS, D), false, -0.3f, 0.5f);) \
    X(matmul_weight, MATMUL, int w = W(O, D); \
        return add(matmul(V(ROWS, D), param_value(w)), linear(V(ROWS, D), w, 0));) \
    X(matmul_slices, MATMUL, int x = linear(V(ROWS, D), W(2 * O, D), B(2 * O)); \
        return matmul(slice(x, 0, O), slice(x, O, O));) \
    X(matmul_of_rows, MATMUL, int x = gelu(V(ROWS, D)); \
        return gather_rows(matmul(tanh_(x), x), I(PICKED, R));) \
    X(matmul_untransposed, MATMUL, int w = W(D, O); \
        return matmul_of(gelu(V(ROWS, D)), param_value(w), true, 1, 0);) \
    X(matmul_attends, MATMUL, int x = gelu(V(ROWS, D)); int y = tanh_(V(SEQS, D)); \
        return matmul_of(softmax(matmul_of(x, y, false, 0.5f, -16384)), y, true, 1, 0);) \
    X(matmul_negatives, MATMUL, int x = normalize(linear(V(ROWS, D), W(O, D), B(O)), 1e-1f); \
        int y = normalize(linear(V(SEQS, D), W(O, D), B(O)), 1e-1f); \
        return cross_entropy(matmul_of(x, y, false, 4, -16384), true, 0, true);) \
    X(embedding, EMBEDDING, return embedding(I(ROWS, C), W(C, D));) \
    X(embedding_offset, EMBEDDING, int w = W(C + 3, D); \
        return add(embedding_offset(I(ROWS, C + 1), w, 2), embedding(I(ROWS, 2), w));) \
    X(embedding_tied, EMBEDDING, int w = W(C, D); return linear(embedding(I(ROWS, C), w), w, 0);) \
    X(embedding_two, EMBEDDING, int w = W(C, D); \
        return add(embedding(I(ROWS, C), w), embedding(I(ROWS, C), w));) \
    X(embedding_sum, EMBEDDING, \
        return layernorm(add(embedding(I(ROWS, C), W(C, D)), embedding(I(ROWS, 2), W(2, D))), \
                         B(D), B(D), 1e-2f);) \
    X(layernorm, LAYERNORM, return layernorm(V(ROWS, D), B(D), B(D), 1e-3f);) \
    X(layernorm_no_bias, LAYERNORM, return layernorm(V(ROWS, D), B(D), 0, 1e-3f);) \
    X(layernorm_of_sum, LAYERNORM, int x = add(V(ROWS, D), V(ROWS, D)); \
        return add(x, layernorm(x, B(D), B(D), 1e-2f));) \
    X(layernorm_same_parameters, LAYERNORM, int w = B(D); int b = B(D); \
        return layernorm(layernorm(V(ROWS, D), w, b, 1e-1f), w, b, 1e-1f);) \
    X(layernorm_weight_is_bias, LAYERNORM, int w = B(D); return layernorm(V(ROWS, D), w, w, 1e-3f);) \
    X(rmsnorm, RMSNORM, return rmsnorm(V(ROWS, D), B(D), 1e-3f);) \
    X(rmsnorm_of_sum, RMSNORM, int x = add(V(ROWS, D), V(ROWS, D)); return add(x, rmsnorm(x, B(D), 1e-2f));) \
    X(rmsnorm_same_parameters, RMSNORM, int w = B(D); \
        return rmsnorm(linear(rmsnorm(V(ROWS, D), w, 1e-1f), W(D, D), 0), w, 1e-1f);) \
    X(rmsnorm_slice, RMSNORM, return rmsnorm(slice(gelu(V(ROWS, D + 2)), 1, D), B(D), 1e-2f);) \
    X(rmsnorm_of_rows, RMSNORM, int x = gelu(V(ROWS, D)); \
        return gather_rows(rmsnorm(x, B(D), 1e-2f), I(PICKED, R));) \
    X(gelu, ACTIVATION, return gelu(V(ROWS, D));) \
    X(gelu_tanh, ACTIVATION, return gelu_tanh(V(ROWS, D));) \
    X(relu, ACTIVATION, return relu(V(ROWS, D));) \
    X(tanh, ACTIVATION, return tanh_(V(ROWS, D));) \
    X(silu, ACTIVATION, return silu(V(ROWS, D));) \
    X(sigmoid, ACTIVATION, return sigmoid(V(ROWS, D));) \
    X(sigmoid_far, ACTIVATION, return sigmoid(scale(V(ROWS, D), 60));) \
    X(linear_sigmoid, LINEAR, return sigmoid(linear(V(ROWS, D), W(O, D), B(O)));) \
    X(softmax, SOFTMAX, return softmax(V(ROWS, D));) \
    X(softmax_of_value, SOFTMAX, int x = gelu(V(ROWS, D)); return mul(x, softmax(x));) \
    X(softmax_far, SOFTMAX, return softmax(scale(V(ROWS, D), 16));) \
    X(softmax_slice, SOFTMAX, return softmax(slice(gelu(V(ROWS, D + 2)), 1, D));) \
    X(softmax_layer, SOFTMAX, return linear(softmax(linear(V(ROWS, D), W(O, D), B(O))), W(D, O), B(D));) \
    X(softmax_of_rows, SOFTMAX, int x = gelu(V(ROWS, D)); return gather_rows(softmax(x), I(PICKED, R));) \
    X(normalize, NORMALIZE, return normalize(V(ROWS, D), 1e-12f);) \
    X(normalize_small, NORMALIZE, return normalize(scale(gelu(V(ROWS, D)), 0.01f), 1);) \
    X(normalize_of_value, NORMALIZE, int x = tanh_(V(ROWS, D)); return add(x, normalize(x, 1e-6f));) \
    X(normalize_slice, NORMALIZE, return normalize(slice(tanh_(V(ROWS, D + 2)), 1, D), 1e-12f);) \
    X(normalize_layer, NORMALIZE, \
        return linear(normalize(linear(V(ROWS, D), W(O, D), B(O)), 0.1f), W(D, O), B(D));) \
    X(normalize_of_rows, NORMALIZE, int x = tanh_(V(ROWS, D)); \
        return gather_rows(normalize(x, 1e-12f), I(PICKED, R));) \
    X(gelu_far, ACTIVATION, return gelu(scale(V(ROWS, D), 30));) \
    X(gelu_tanh_far, ACTIVATION, return gelu_tanh(scale(V(ROWS, D), 30));) \
    X(gelu_tanh_very_far, ACTIVATION, return scale(gelu_tanh(scale(V(ROWS, D), 1e25f)), 1e-25f);) \
    X(tanh_far, ACTIVATION, return tanh_(scale(V(ROWS, D), 30));) \
    X(silu_far, ACTIVATION, return silu(scale(V(ROWS, D), 60));) \
    X(activation_chain, ACTIVATION, return silu(tanh_(gelu(V(ROWS, D))));) \
    X(add, ADD, return add(V(ROWS, D), V(ROWS, D));) \
    X(add_self, ADD, int x = V(ROWS, D); return add(x, x);) \
    X(add_self_computed, ADD, int x = gelu(V(ROWS, D)); return add(x, x);) \
    X(add_chain, ADD, int x = V(ROWS, D); int y = add(gelu(x), x); int z = add(y, tanh_(y)); \
        return add(add(z, y), x);) \
    X(add_shared, ADD, int x = gelu(V(ROWS, D)); int y = gelu(V(ROWS, D)); \
        return add(add(x, y), add(gelu(x), gelu(y)));) \
    X(mul, MUL, return mul(V(ROWS, D), V(ROWS, D));) \
    X(mul_self, MUL, int x = V(ROWS, D); return mul(x, x);) \
    X(mul_gated, MUL, int x = V(ROWS, D); return mul(silu(linear(x, W(O, D), 0)), linear(x, W(O, D), 0));) \
    X(mul_slices, MUL, int x = gelu(V(ROWS, 2 * D)); return mul(slice(x, 0, D), slice(x, D, D));) \
    X(mul_row, MUL_BROADCAST, return mul(V(ROWS, D), gelu(V(CONSTANT, D)));) \
    X(mul_column, MUL_BROADCAST, return mul(V(ROWS, D), sigmoid(V(ROWS, 1)));) \
    X(mul_number, MUL_BROADCAST, return mul(gelu(V(ROWS, D)), V(CONSTANT, 1));) \
    X(mul_parameter, MUL_BROADCAST, int w = W(1, D); int x = gelu(V(ROWS, D)); \
        return mul(add(x, mul(x, param_value(w))), param_value(w));) \
    X(mul_gates, MUL_BROADCAST, int x = linear(V(ROWS, D), W(O + 1, D), B(O + 1)); \
        return linear(mul(slice(x, 1, O), slice(x, 0, 1)), W(D, O), 0);) \
    X(mul_column_of_rows, MUL_BROADCAST, int x = gelu(V(ROWS, D)); \
        return gather_rows(mul(x, tanh_(V(ROWS, 1))), I(PICKED, R));) \
    X(add_row, ADD_ROW, return add_row(V(ROWS, D), gelu(V(CONSTANT, D)));) \
    X(add_row_of_value, ADD_ROW, int x = gelu(V(ROWS, D)); return mul(x, add_row(x, gelu(V(CONSTANT, D))));) \
    X(add_row_layer, ADD_ROW, int row = linear(V(CONSTANT, D), W(O, D), 0); \
        return linear(add_row(linear(V(ROWS, D), W(O, D), 0), row), W(D, O), B(D));) \
    X(add_row_of_rows, ADD_ROW, int x = gelu(V(ROWS, D)); \
        return gather_rows(add_row(tanh_(x), V(CONSTANT, D)), I(PICKED, R));) \
    X(swiglu, SWIGLU, return swiglu(V(ROWS, D), V(ROWS, D));) \
    X(swiglu_self, SWIGLU, int x = V(ROWS, D); return swiglu(x, x);) \
    X(swiglu_far, SWIGLU, return swiglu(scale(V(ROWS, D), 20), V(ROWS, D));) \
    X(swiglu_layer, SWIGLU, int x = V(ROWS, D); \
        return linear(swiglu(linear(x, W(O, D), 0), linear(x, W(O, D), B(O))), W(D, O), 0);) \
    X(swiglu_slices, SWIGLU, int x = linear(V(ROWS, D), W(2 * O, D), 0); \
        return swiglu(slice(x, 0, O), slice(x, O, O));) \
    X(swiglu_up_of_input, SWIGLU, return swiglu(linear(V(ROWS, D), W(O, D), 0), V(ROWS, O));) \
    X(swiglu_gate_of_input, SWIGLU, return swiglu(V(ROWS, O), linear(V(ROWS, D), W(O, D), 0));) \
    X(swiglu_of_rows, SWIGLU, int x = gelu(V(ROWS, D)); \
        return gather_rows(swiglu(x, tanh_(x)), I(PICKED, R));) \
    X(mul_of_rows, MUL, int x = gelu(V(ROWS, D)); return gather_rows(mul(x, tanh_(x)), I(PICKED, R));) \
    X(rotary, ROTARY, return rotary(V(ROWS, 2 * D), 0, false);) \
    X(rotary_of_value, ROTARY, int x = gelu(V(ROWS, 2 * D)); return add(x, rotary(x, 0, false));) \
    X(rotary_neighbours, ROTARY, return rotary(gelu(V(ROWS, 2 * D)), 0, true);) \
    X(rotary_some_columns, ROTARY, return rotary(gelu(V(ROWS, 2 * D)), 2, false);) \
    X(rotary_odd, ROTARY, return rotary(gelu(V(ROWS, 2 * D)), 3, false);) \
    X(rotary_some_neighbours, ROTARY, int x = V(ROWS, 2 * D); \
        return add(rotary(x, 4, true), rotary(x, 4, true));) \
    X(rotary_slice, ROTARY, return rotary(slice(linear(V(ROWS, D), W(3 * D, D), 0), D, 2 * D), 0, false);) \
    X(scale, SCALE, return scale(V(ROWS, D), 0.37f);) \
    X(scale_negative, SCALE, return scale(gelu(V(ROWS, D)), -3);) \
    X(scale_loss, SCALE, int x = V(ROWS, D); \
        return scale(squared_error(gelu(x), input(ROWS, R, D, 1), false), 2.5f);) \
    X(dropout, DROPOUT, return dropout(V(ROWS, D), 0.3f);) \
    X(dropout_none, DROPOUT, return add(dropout(V(ROWS, D), 0), dropout(gelu(V(ROWS, D)), 0));) \
    X(dropout_residual, DROPOUT, return add(dropout(V(ROWS, D), 0.3f), V(ROWS, D));) \
    X(dropout_residual_first, DROPOUT, return add(V(ROWS, D), dropout(gelu(V(ROWS, D)), 0.5f));) \
    X(dropout_residual_of_input, DROPOUT, int x = gelu(V(ROWS, D)); return add(dropout(x, 0.1f), x);) \
    X(dropout_linear_residual, DROPOUT, int x = V(ROWS, D); \
        return add(dropout(linear(gelu(x), W(D, D), B(D)), 0.25f), x);) \
    X(dropout_twice, DROPOUT, int x = V(ROWS, D); return add(dropout(x, 0.4f), dropout(x, 0.4f));) \
    X(attention, ATTENTION, return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0);) \
    X(attention_causal, ATTENTION, return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), true, 0, 0);) \
    X(attention_dropout, ATTENTION, return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0.3f);) \
    X(attention_dropout_of_few, ATTENTION, \
        return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 1e-6f);) \
    X(attention_dropout_of_most, ATTENTION, \
        return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0.9f);) \
    X(attention_causal_dropout, ATTENTION, \
        return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), true, S, 0.5f);) \
    X(attention_scaled, ATTENTION, return attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, -S, 0);) \
    X(attention_same, ATTENTION, int x = V(ROWS, D); return attention(x, x, x, false, S, 0);) \
    X(attention_same_computed, ATTENTION, int x = gelu(V(ROWS, D)); \
        return add(attention(x, x, x, true, S, 0.2f), x);) \
    X(attention_same_keys_values, ATTENTION, int x = gelu(V(ROWS, D)); \
        return attention(V(ROWS, D), x, x, true, 0, 0);) \
    X(attention_grouped, ATTENTION, return attention(V(ROWS, 3 * D), V(ROWS, D), V(ROWS, D), false, S, 0);) \
    X(attention_grouped_causal, ATTENTION, int x = linear(V(ROWS, D), W(4 * D, D), B(4 * D)); \
        return attention(slice(x, 0, 2 * D), slice(x, 2 * D, D), slice(x, 3 * D, D), true, S, 0.2f);) \
    X(attention_window, ATTENTION, \
        return attention_with(V(ROWS, D), V(ROWS, D), V(ROWS, D), true, S, 0.1f, 5, 0);) \
    X(attention_window_both_sides, ATTENTION, \
        return attention_with(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0, 40, 0);) \
    X(attention_window_of_one, ATTENTION, int x = V(ROWS, D); \
        return attention_with(x, x, x, false, 0, 0, 1, 0);) \
    X(attention_alibi, ATTENTION, \
        return attention_with(V(ROWS, 3 * D), V(ROWS, D), V(ROWS, D), true, -S, 0, 0, 1);) \
    X(attention_alibi_both_sides, ATTENTION, \
        return attention_with(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0.1f, 0, 0.25f);) \
    X(attention_alibi_rounded, ATTENTION, tt_attention_options o = tt_attention_options_default(1); \
        o.causal = o.alibi_rounded = true; o.alibi = 1.5f; \
        return attention_of(V(ROWS, 3 * D), V(ROWS, D), V(ROWS, D), -S, 0.1f, &o);) \
    X(attention_window_alibi, ATTENTION, int x = linear(V(ROWS, D), W(4 * D, D), B(4 * D)); \
        return attention_with(slice(x, 0, 2 * D), slice(x, 2 * D, D), slice(x, 3 * D, D), true, 0, 0.2f, \
                              70, 0.7f);) \
    X(attention_multi_query, ATTENTION, int h = g->size->head_size; int x = gelu(V(ROWS, 2 * h)); \
        return attention(V(ROWS, D), slice(x, h, h), slice(x, 0, h), true, 0, 0);) \
    X(attention_one_key_value, ATTENTION, int x = gelu(V(ROWS, g->size->head_size)); \
        return attention(V(ROWS, 2 * D), x, x, false, S, 0.1f);) \
    X(rows_of_attention_grouped, ATTENTION, int i = I(PICKED, R); \
        return gather_rows(attention(V(ROWS, 2 * D), V(ROWS, D), V(ROWS, D), true, S, 0.1f), i);) \
    X(attention_blocks, ATTENTION, \
        return attention_by_blocks(V(ROWS, D), V(ROWS, D), V(ROWS, D), 0, 0, 3, 6, 0);) \
    X(attention_blocks_listed, ATTENTION, int x = linear(V(ROWS, D), W(4 * D, D), B(4 * D)); \
        return attention_by_blocks(slice(x, 0, 2 * D), slice(x, 2 * D, D), slice(x, 3 * D, D), S, 0.1f, 2, \
                                   0, 3);) \
    X(attention_blocks_of_64, ATTENTION, \
        return attention_by_blocks(V(ROWS, D), V(ROWS, D), V(ROWS, D), -S, 0, 64, 0, 1);) \
    X(attention_blocks_of_20, ATTENTION, int x = gelu(V(ROWS, D)); \
        return attention_by_blocks(V(ROWS, D), x, x, 0, 0.3f, 20, 60, 2);) \
    X(rows_of_attention_blocks, ATTENTION, int i = I(PICKED, R); \
        return gather_rows(attention_by_blocks(V(ROWS, 2 * D), V(ROWS, D), V(ROWS, D), S, 0.1f, 3, 5, 3), \
                           i);) \
    X(attention_packed, ATTENTION, int x = linear(V(ROWS, D), W(3 * D, D), B(3 * D)); \
        return attention(slice(x, 0, D), slice(x, D, D), slice(x, 2 * D, D), false, 0, 0.1f);) \
    X(attention_packed_values, ATTENTION, int x = V(ROWS, 3 * D); \
        return add(attention(slice(x, 2 * D, D), slice(x, D, D), slice(x, 0, D), true, 0, 0), \
                   slice(x, D, D));) \
    X(gather_rows, GATHER_ROWS, return gather_rows(V(ROWS, D), I(PICKED, R));) \
    X(gather_rows_computed, GATHER_ROWS, int x = gelu(V(ROWS, D)); \
        return add(gather_rows(x, I(PICKED, R)), gather_rows(x, I(PICKED, R)));) \
    X(gather_rows_slice, GATHER_ROWS, return gather_rows(slice(V(ROWS, D + 3), 2, D), I(PICKED, R));) \
    X(rows_of_linear, LINEAR, int i = I(PICKED, R); int x = V(ROWS, D); \
        return gather_rows(tanh_(add(linear(x, W(D, D), B(D)), x)), i);) \
    X(rows_of_dropout, DROPOUT, int i = I(PICKED, R); int x = gelu(V(ROWS, D)); \
        return gather_rows(add(dropout(scale(x, 2), 0.3f), x), i);) \
    X(rows_of_layernorm, LAYERNORM, int i = I(PICKED, R); int x = linear(V(ROWS, D), W(D, D), B(D)); \
        int y = layernorm(add(gelu(x), x), B(D), B(D), 1e-1f); \
        return gather_rows(add(silu(linear(y, W(D, D), 0)), dropout(y, 0.2f)), i);) \
    X(rows_of_same, ADD, int i = I(PICKED, R); int x = gelu(V(ROWS, D)); int y = tanh_(x); \
        return gather_rows(add(add(y, y), add(x, y)), i);) \
    X(rows_twice, ACTIVATION, int x = gelu(V(ROWS, D)); int i = I(PICKED, R); \
        return add(gather_rows(tanh_(x), i), \
                   add(gather_rows(silu(x), i), gather_rows(gelu(x), I(PICKED, R))));) \
    X(rows_of_slice, LINEAR, int i = I(PICKED, R); int x = gelu(V(ROWS, D + O)); \
        return gather_rows(add(linear(slice(x, 0, D), W(O, D), B(O)), gelu(slice(x, D, O))), i);) \
    X(rows_of_attention, ATTENTION, int i = I(PICKED, R); \
        return gather_rows(attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, S, 0.2f), i);) \
    X(rows_of_attention_window, ATTENTION, int i = I(PICKED, R); \
        return gather_rows(attention_with(V(ROWS, 2 * D), V(ROWS, D), V(ROWS, D), true, S, 0.1f, 6, 0.5f), \
                           i);) \
    X(rows_of_attention_window_both_sides, ATTENTION, int i = I(PICKED, R); \
        return gather_rows(attention_with(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, 0, 0, 4, 0), i);) \
    X(rows_of_attention_first, ATTENTION, int i = I(PICKED, g->size->length[0]); \
        return gather_rows(attention(V(ROWS, D), V(ROWS, D), V(ROWS, D), false, S, 0), i);) \
    X(rows_of_attention_same, ATTENTION, int i = I(PICKED, R); int x = gelu(V(ROWS, D)); \
        return gather_rows(add(attention(linear(x, W(D, D), B(D)), x, x, false, S, 0), x), i);) \
    X(rows_of_attention_packed, ATTENTION, int i = I(PICKED, R); \
        int x = linear(V(ROWS, D), W(3 * D, D), B(3 * D)); \
        return gather_rows(attention(slice(x, 0, D), slice(x, D, D), slice(x, 2 * D, D), true, S, 0.1f), \
                           i);) \
    X(rows_of_block, ATTENTION, int i = I(PICKED, R); int x = V(ROWS, D); \
        int h = layernorm(x, B(D), B(D), 1e-1f); \
        h = attention(linear(h, W(D, D), B(D)), linear(h, W(D, D), B(D)), linear(h, W(D, D), B(D)), \
                      true, S, 0.1f); \
        x = add(x, dropout(linear(h, W(D, D), B(D)), 0.1f)); h = layernorm(x, B(D), B(D), 1e-1f); \
        x = add(x, linear(gelu(linear(h, W(O, D), B(O))), W(D, O), B(D))); \
        return linear(gather_rows(x, i), W(O, D), B(O));) \
    X(mean_pool, MEAN_POOL, return mean_pool(V(ROWS, D));) \
    X(mean_pool_computed, MEAN_POOL, int x = gelu(V(ROWS, D)); \
        return add(mean_pool(x), tanh_(mean_pool(x)));) \
    X(mean_pool_slice, MEAN_POOL, int x = V(ROWS, 2 * D); return gelu(mean_pool(slice(x, D, D)));) \
    X(set_rows, SET_ROWS, return set_rows(V(ROWS, D), I(PICKED, R), B(D));) \
    X(set_rows_computed, SET_ROWS, int x = gelu(V(ROWS, D)); \
        return set_rows(linear(x, W(D, D), B(D)), I(PICKED, R), B(D));) \
    X(set_rows_of_shared, SET_ROWS, int x = gelu(V(ROWS, D)); \
        return add(set_rows(tanh_(x), I(PICKED, R), B(D)), set_rows(x, I(PICKED, R), B(D)));) \
    X(set_rows_again, SET_ROWS, int row = B(D); \
        return add(set_rows(set_rows(silu(V(ROWS, D)), I(PICKED, R), row), I(SEQS, R), row), V(ROWS, D));) \
    X(set_rows_of_frozen, SET_ROWS, return set_rows(input(ROWS, R, D, 1), I(PICKED, R), B(D));) \
    X(patches, PATCHES, return linear(patches(2, 4), W(O, 16), B(O));) \
    X(patches_of_a_pixel, PATCHES, \
        return linear(set_rows(add(linear(patches(1, 3), W(D, 3), B(D)), V(ROWS, D)), I(SEQS, R), B(D)), \
        W(O, D), 0);) \
    X(patches_used_twice, PATCHES, int x = patches(3, 2); \
        return add(linear(x, W(O, 18), B(O)), tanh_(linear(x, W(O, 18), 0)));) \
    X(cross_entropy, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), false, 0, false);) \
    X(cross_entropy_ignored, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), true, 0, false);) \
    X(cross_entropy_smoothed, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), false, 0.1f, false);) \
    X(cross_entropy_weighted, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), false, 0, true);) \
    X(cross_entropy_all, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), true, 0.25f, true);) \
    X(cross_entropy_classes, CROSS_ENTROPY, return cross_entropy(V(ROWS, C), true, 0, BY_CLASS);) \
    X(cross_entropy_classes_slice, CROSS_ENTROPY, \
        return cross_entropy(slice(V(ROWS, C + 5), 3, C), true, 0.25f, BY_CLASS);) \
    X(cross_entropy_classes_linear, CROSS_ENTROPY, \
        return cross_entropy(linear(V(ROWS, D), W(O, D), B(O)), false, 0.1f, BY_CLASS);) \
    X(cross_entropy_linear, CROSS_ENTROPY, \
        return cross_entropy(linear(V(ROWS, D), W(O, D), B(O)), true, 0.1f, true);) \
    X(cross_entropy_linear_no_bias, CROSS_ENTROPY, \
        return cross_entropy(linear(gelu(V(ROWS, D)), W(C, D), 0), false, 0, false);) \
    X(cross_entropy_linear_all, CROSS_ENTROPY, int x = gelu(V(ROWS, D)); \
        return cross_entropy(linear(add(x, tanh_(x)), W(C, D), B(C)), true, 0.2f, true);) \
    X(cross_entropy_linear_tied, CROSS_ENTROPY, int w = W(C, D); \
        return cross_entropy(linear(silu(add(V(ROWS, D), embedding(I(ROWS, C), w))), w, 0), true, 0, true);) \
    X(cross_entropy_linear_of_input, CROSS_ENTROPY, \
        return cross_entropy(linear(input(ROWS, R, D, 1), W(C, D), B(C)), false, 0.1f, false);) \
    X(cross_entropy_slice, CROSS_ENTROPY, \
        return cross_entropy(slice(V(ROWS, C + 5), 3, C), true, 0.1f, false);) \
    X(soft_cross_entropy, SOFT_CROSS_ENTROPY, return soft_cross_entropy(V(ROWS, C), false);) \
    X(soft_cross_entropy_weighted, SOFT_CROSS_ENTROPY, return soft_cross_entropy(V(ROWS, C), true);) \
    X(soft_cross_entropy_linear, SOFT_CROSS_ENTROPY, \
        return scale(soft_cross_entropy(linear(gelu(V(ROWS, D)), W(C, D), B(C)), true), 2.5f);) \
    X(soft_cross_entropy_slice, SOFT_CROSS_ENTROPY, \
        return soft_cross_entropy(slice(gelu(V(ROWS, 2 * C)), C, C), false);) \
    X(sigmoid_cross_entropy, SIGMOID_CROSS_ENTROPY, \
        return sigmoid_cross_entropy(V(ROWS, C), false, false);) \
    X(sigmoid_cross_entropy_weighted, SIGMOID_CROSS_ENTROPY, \
        return sigmoid_cross_entropy(V(ROWS, C), true, false);) \
    X(sigmoid_cross_entropy_positive, SIGMOID_CROSS_ENTROPY, \
        return sigmoid_cross_entropy(scale(V(ROWS, C), 10), false, true);) \
    X(sigmoid_cross_entropy_linear, SIGMOID_CROSS_ENTROPY, \
        return scale(sigmoid_cross_entropy(linear(gelu(V(ROWS, D)), W(C, D), B(C)), true, true), 2.5f);) \
    X(sigmoid_cross_entropy_slice, SIGMOID_CROSS_ENTROPY, \
        return sigmoid_cross_entropy(slice(gelu(V(ROWS, 2 * C)), C, C), true, true);) \
    X(squared_error, MEAN_SQUARED_ERROR, return squared_error(V(ROWS, D), input(ROWS, R, D, 1), false);) \
    X(squared_error_weighted, MEAN_SQUARED_ERROR, \
        return squared_error(V(ROWS, D), input(ROWS, R, D, 1), true);) \
    X(squared_error_both, MEAN_SQUARED_ERROR, int x = gelu(V(ROWS, D)); \
        return squared_error(x, add(gelu(x), V(ROWS, D)), true);) \
    X(squared_error_slices, MEAN_SQUARED_ERROR, int x = V(ROWS, 2 * D); \
        return squared_error(slice(x, 0, D), slice(x, D, D), false);) \
    X(slice_activation, ACTIVATION, return gelu(slice(V(ROWS, D + 5), 3, D));) \
    X(slice_overlapping, ADD, int x = V(ROWS, D + 1); return add(slice(x, 0, D), gelu(slice(x, 1, D)));) \
    X(slice_of_slice, LINEAR, return linear(slice(slice(V(ROWS, D + 9), 4, D + 4), 1, D), W(O, D), B(O));) \
    X(slice_residual, LINEAR, int x = gelu(V(ROWS, D + O)); \
        return add(linear(slice(x, 0, D), W(O, D), B(O)), slice(x, D, O));) \
    X(slice_layernorm, LAYERNORM, return layernorm(slice(V(ROWS, D + 2), 1, D), B(D), B(D), 1e-2f);) \
    X(slice_dropout, DROPOUT, int x = gelu(V(ROWS, 2 * D)); \
        return add(dropout(slice(x, D, D), 0.2f), slice(x, 0, D));) \
    X(slice_of_linear, LINEAR, int x = linear(V(ROWS, D), W(2 * O, D), B(2 * O)); \
        return add(slice(x, O, O), tanh_(slice(x, 0, O)));) \
    X(slice_of_parameter, SCALE, int w = W(R, D + 4); \
        return add(scale(slice(param_value(w), 1, D), 3), gelu(slice(param_value(w), 4, D)));) \
    X(reshape_value, ACTIVATION, return gelu(reshape(V(ROWS, D), D, R));) \
    X(reshape_computed, LINEAR, int x = tanh_(V(ROWS, D)); \
        return linear(reshape(x, R * D, 1), W(O, g->axes ? D : 1), B(O));) \
    X(reshape_and_slice, ADD, int x = reshape(gelu(V(ROWS, 2 * D)), R, 2 * D); \
        return add(slice(x, 0, D), slice(x, D, D));) \
    X(reshape_parameter, ADD, int w = W(2, 3 * D); \
        return add(reshape(param_value(w), 6, D), gelu(reshape(param_value(w), 6, D)));) \
    X(residual_before_act, LINEAR, int h = linear(V(ROWS, D), W(D, D), B(D)); \
        return add(linear(gelu(h), W(D, D), B(D)), h);) \
    X(slice_of_act_used_again, LINEAR, int h = gelu(linear(V(ROWS, D), W(D, D), B(D))); \
        return add(scale(linear(h, W(D, D), B(D)), 0.5f), linear(slice(h, 0, D), W(D, D), B(D)));) \
    X(cast, CAST, return gelu(cast(gelu(V(ROWS, D))));) \
    X(block, ATTENTION, int x = V(ROWS, D); int h = layernorm(x, B(D), B(D), 1e-1f); \
        int qkv = linear(h, W(3 * D, D), B(3 * D)); \
        h = attention(slice(qkv, 0, D), slice(qkv, D, D), slice(qkv, 2 * D, D), true, S, 0.1f); \
        x = add(x, dropout(linear(h, W(D, D), B(D)), 0.1f)); h = layernorm(x, B(D), B(D), 1e-1f); \
        x = add(x, linear(gelu(linear(h, W(O, D), B(O))), W(D, O), B(D))); \
        return linear(mean_pool(x), W(O, D), B(O));) \
    X(rmsnorm_offset, RMSNORM, return rmsnorm_offset(V(ROWS, D), B(D), 1, 1e-3f);) \
    X(rmsnorm_heads, RMSNORM, return rmsnorm(V(ROWS, 3 * D), B(D), 1e-3f);) \
    X(rmsnorm_heads_of_linear, RMSNORM, int x = linear(V(ROWS, D), W(2 * D, D), B(2 * D)); \
        return add(rmsnorm_offset(x, B(D), 1, 1e-2f), x);) \
    X(rmsnorm_heads_slice, RMSNORM, int x = slice(gelu(V(ROWS, 2 * D + 2)), 1, 2 * D); \
        return rmsnorm_offset(x, B(D), 0.5f, 1e-2f);) \
    X(rmsnorm_heads_of_dropout, RMSNORM, int x = dropout(V(ROWS, 2 * D), 0.3f); \
        return add(x, dropout(rmsnorm(x, B(D), 1e-2f), 0.3f));) \
    X(sum_pool, MEAN_POOL, return sum_pool(gelu(V(ROWS, D)));) \
    X(token_losses, TOKEN_LOSSES, return token_losses(V(ROWS, C), true);) \
    X(token_losses_of_linear, TOKEN_LOSSES, \
        return mul(token_losses(linear(gelu(V(ROWS, D)), W(C, D), B(C)), true), input(ROWS, R, 1, 1));) \
    X(token_losses_of_pairs, TOKEN_LOSSES, int w = W(C, D); int x = linear(V(ROWS, D), W(D, D), 0); \
        return sum_pool(mul(token_losses(linear(x, w, 0), false), input(ROWS, R, 1, 1)));) \
    X(rounded_to_int8, ROUND, int w = rounded(W(O, D), TT_ROUND_INT8); return matmul(V(ROWS, D), w);) \
    X(rounded_to_ternary, ROUND, int w = rounded(W(O, D), TT_ROUND_TERNARY); return matmul(V(ROWS, D), w);) \
    X(rounded_to_binary, ROUND, int w = rounded(W(O, D), TT_ROUND_BINARY); return matmul(V(ROWS, D), w);) \
    X(linear_int8, LINEAR, return linear_stored(V(ROWS, D), O, B(O), "int8");) \
    X(linear_nf4, LINEAR, return linear_stored(V(ROWS, 128), O, 0, "nf4");) \
    X(linear_int4, LINEAR, return gelu(linear_stored(V(ROWS, 96), O, B(O), "int4"));) \
    X(linear_stored_with_residual, LINEAR, int x = V(ROWS, 64); \
        x = add(linear_stored(gelu(linear_stored(x, 64, 0, "int8")), 64, B(64), "int4"), x); \
        return linear_stored(x, O, 0, "nf4");)

#define CASE_FUNCTION(name, op, ...) \
    static int case_##name(void) \
    { \
        const int R = g->count[ROWS], D = g->d, O = g->size->out, C = g->size->vocab; \
        const float S = 1.0f / (float)g->size->head_size; \
        (void)R; (void)D; (void)O; (void)C; (void)S; \
        __VA_ARGS__ \
    }
CASES(CASE_FUNCTION)

typedef struct op_case { const char *name; int op; int (*build)(void); } op_case;

static const op_case cases[] = {
#define CASE_ROW(name, op, ...) {#name, TT__OP_##op, case_##name},
    CASES(CASE_ROW)
};

#define CASE_COUNT ((int)(sizeof cases / sizeof cases[0]))
