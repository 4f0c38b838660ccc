/* Tests of src/files/, src/text/ and src/data/: JSON, safetensors, tokenizer, datasets, loader. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"
#include "readers.h"

#include "formats/json.h"
#include "formats/safetensors.h"
#include "formats/tokenizers.h"
#include "formats/tables.h"
#include "formats/loader.h"
#include "formats/tasks.h"
#include "formats/masks.h"
#include "formats/faults.h"

static const test_case tests[] = {
    TEST_CASE(json_values), TEST_CASE(json_strings), TEST_CASE(json_errors), TEST_CASE(json_many_keys),
    TEST_CASE(safetensors_round_trip), TEST_CASE(safetensors_numbers), TEST_CASE(safetensors_hostile),
    TEST_CASE(safetensors_truncated), TEST_CASE(safetensors_cut_off_while_read), TEST_CASE(a_pipe_is_refused),
    TEST_CASE(safetensors_writer_errors), TEST_CASE(safetensors_write_faults), TEST_CASE(safetensors_many),
    TEST_CASE(tokenizer_golden_bpe), TEST_CASE(split_at_spaces_that_are_gone),
    TEST_CASE(text_of_ids_that_come), TEST_CASE(tokenizer_bpe_damaged),
    TEST_CASE(tokenizer_files_are_kept), TEST_CASE(tokenizer_classes_of_transformers),
    TEST_CASE(tokenizer_normalizers_in_turn),
    TEST_CASE(tokenizer_unigram_refused), TEST_CASE(wordpiece_of_a_tokenizer_json),
    TEST_CASE(tokenizer_golden_uncased), TEST_CASE(tokenizer_golden_cased),
    TEST_CASE(tokenizer_nasty_strings), TEST_CASE(tokenizer_code_points), TEST_CASE(tokenizer_special_tokens),
    TEST_CASE(tokenizer_vocabulary_line_ends), TEST_CASE(tokenizer_vocabulary),
    TEST_CASE(tokenizer_large_vocabulary), TEST_CASE(tokenizer_folder), TEST_CASE(dataset_table),
    TEST_CASE(texts_of_other_encodings_are_refused), TEST_CASE(tables_of_other_programs),
    TEST_CASE(imdb_encodings), TEST_CASE(safetensors_null_metadata),
    TEST_CASE(labels_that_are_numbers),
    TEST_CASE(table_with_validation_rows), TEST_CASE(table_options),
    TEST_CASE(table_without_split_is_divided), TEST_CASE(dataset_imdb), TEST_CASE(imdb_faults),
    TEST_CASE(dataset_texts), TEST_CASE(loader_batches), TEST_CASE(loader_mixes_texts_of_the_same_length),
    TEST_CASE(loader_micro_batches),
    TEST_CASE(loader_deals_out_to_groups),
    TEST_CASE(pairs_of_texts), TEST_CASE(templates_without_pairs), TEST_CASE(tables_of_tasks),
    TEST_CASE(tables_of_tasks_refused), TEST_CASE(tables_of_pairs_and_triplets),
    TEST_CASE(datasets_of_tasks), TEST_CASE(loader_of_tasks),
    TEST_CASE(spans_of_tokens), TEST_CASE(spans_of_any_bytes), TEST_CASE(loader_of_tags),
    TEST_CASE(loader_capacity_is_that_of_the_texts), TEST_CASE(allocation_failures), TEST_CASE(fuzz),
    TEST_CASE(loader_masks_tokens), TEST_CASE(loader_masks_whole_words), TEST_CASE(texts_to_mask_are_read),
    TEST_CASE(masks_that_are_refused), TEST_CASE(masks_without_memory),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
