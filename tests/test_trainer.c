/* Tests of src/train/: steps of micro-batches, evaluation, prediction, the state of a run and its faults. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

#ifndef _WIN32
#include <sys/wait.h>
#endif

#include "trainer/setup.h"
#include "trainer/steps.h"
#include "trainer/evaluation.h"
#include "trainer/resume.h"
#include "trainer/fit.h"
#include "trainer/metrics.h"
#include "trainer/steered.h"
#include "trainer/own.h"
#include "trainer/embed.h"
#include "trainer/predictions.h"
#include "trainer/by_hand.h"
#include "trainer/ranks.h"
#include "trainer/features.h"
#include "trainer/teacher.h"
#include "trainer/hidden.h"
#include "trainer/masked.h"
#include "trainer/preferences.h"

static const test_case tests[] = {
    TEST_CASE(teacher_as_in_loops_of_doubles), TEST_CASE(teacher_as_in_pytorch),
    TEST_CASE(teacher_of_a_head_by_features), TEST_CASE(teachers_that_are_refused),
    TEST_CASE(hidden_states_as_in_loops_of_doubles), TEST_CASE(hidden_states_that_are_refused),
    TEST_CASE(hidden_states_resume), TEST_CASE(hidden_states_computed_once),
    TEST_CASE(preferences_as_in_loops_of_doubles), TEST_CASE(preferences_are_learned),
    TEST_CASE(preferences_with_adapters), TEST_CASE(references_that_are_refused),
    TEST_CASE(states_of_another_reference), TEST_CASE(teachers_of_other_tokens),
   
    TEST_CASE(references_without_memory), TEST_CASE(logits_of_answers_are_not_stored),
    TEST_CASE(masked_words_are_learned), TEST_CASE(room_for_masked_words),
    TEST_CASE(loss_falls), TEST_CASE(schedule_and_steps), TEST_CASE(options_refused_together),
    TEST_CASE(micro_batches_equal_one_batch), TEST_CASE(max_tokens_splits_steps),
    TEST_CASE(loaders_that_do_not_fit), TEST_CASE(names_and_room_from_the_data),
    TEST_CASE(steps_of_several_micro_batches_need_accumulate), TEST_CASE(batches_that_do_not_fit),
    TEST_CASE(same_bits_for_any_number_of_threads), TEST_CASE(evaluation_changes_nothing),
    TEST_CASE(weights_and_smoothing_as_pytorchs), TEST_CASE(class_weights_of_texts),
    TEST_CASE(evaluation_does_not_depend_on_the_batches), TEST_CASE(probabilities),
    TEST_CASE(predictions_of_each_class),
    TEST_CASE(f1_as_in_scikit_learn), TEST_CASE(correlations_as_in_scipy), TEST_CASE(correlations_of_pairs),
    TEST_CASE(entities_as_in_seqeval),
    TEST_CASE(predictions_in_the_order_of_the_source), TEST_CASE(fit_by_metrics_of_predictions),
    TEST_CASE(planned_bytes_are_allocated_bytes), TEST_CASE(largest_micro_batches),
    TEST_CASE(planned_for_another_device),
    TEST_CASE(allocation_failures), TEST_CASE(resume_in_every_precision_with_every_optimizer),
    TEST_CASE(resume_with_loss_scaling), TEST_CASE(resume_at_the_end_of_an_epoch_and_elsewhere),
    TEST_CASE(resume_with_micro_batches_and_other_threads), TEST_CASE(resume_without_new_context),
    TEST_CASE(resume_with_frozen_parameters), TEST_CASE(states_of_other_runs),
    TEST_CASE(resume_warns_of_other_options), TEST_CASE(resume_warns_of_other_pixel_means),
    TEST_CASE(damaged_states), TEST_CASE(files_that_fail), TEST_CASE(predictions_without_labels_and_of_nan),
    TEST_CASE(nan_in_a_step_loses_nothing), TEST_CASE(a_gradient_that_is_not_finite_is_named),
    TEST_CASE(an_untrained_trainer_saves_and_loads), TEST_CASE(fit_in_a_line),
    TEST_CASE(fit_stopped_and_resumed), TEST_CASE(fit_without_folder_or_validation), TEST_CASE(fit_refuses),
    TEST_CASE(fit_resumes_on_the_same_data), TEST_CASE(fit_that_blows_up_keeps_the_last_good_state),
    TEST_CASE(fit_goes_on_behind_steps_without_a_target),
    TEST_CASE(fit_refuses_a_folder_that_another_run_uses), TEST_CASE(fit_looks_for_room_on_the_disk),
    TEST_CASE(fit_goes_on_behind_a_bad_last_step),
    TEST_CASE(fit_keeps_the_state_from_before_the_loss_diverged),
    TEST_CASE(fit_goes_on_from_the_newer_of_two_states),
    TEST_CASE(fit_of_bad_weights_names_no_learning_rate),
    TEST_CASE(fit_refuses_classes_of_another_order),
    TEST_CASE(fit_ties_of_accuracy_go_to_the_lower_loss), TEST_CASE(fit_keeps_again_where_keep_failed),
    TEST_CASE(fit_killed_in_its_first_keep_goes_on), TEST_CASE(fit_takes_no_unreadable_file_for_absent),
    TEST_CASE(a_folder_that_breaks_off_is_not_listed), TEST_CASE(fit_says_from_where_a_resumed_run_goes_on),
    TEST_CASE(fit_validates_within_epochs), TEST_CASE(fit_keeps_states),
    TEST_CASE(fit_validates_on_its_own_source),
    TEST_CASE(contrastive_loss_by_loops), TEST_CASE(pairs_with_scores), TEST_CASE(step_negatives_resume),
    TEST_CASE(step_negatives_refuse),
    TEST_CASE(step_negatives_out_of_memory),
    TEST_CASE(step_negatives_have_the_gradients_of_one_micro_batch),
    TEST_CASE(fit_ends_early), TEST_CASE(fit_validates_moving_averages),
    TEST_CASE(fit_writes_metrics), TEST_CASE(fit_refuses_metrics_with_other_columns),
    TEST_CASE(fit_goes_on_with_metrics_that_lack_columns),
    TEST_CASE(pictures_of_a_training), TEST_CASE(lines_of_metrics),
    TEST_CASE(fit_of_a_trainer_that_only_evaluates), TEST_CASE(names_that_a_state_cannot_have),
    TEST_CASE(fit_of_models_of_ones_own), TEST_CASE(best_by_metric_or_loss),
    TEST_CASE(fit_of_ones_own_refuses), TEST_CASE(fit_of_sources_that_break_their_promise),
    TEST_CASE(fit_refuses_sources_and_folders_before_it_trains),
    TEST_CASE(fit_tells_of_validations_that_are_not_finite),
    TEST_CASE(a_program_by_hand_is_saved_and_goes_on),
    TEST_CASE(states_of_programs_that_train_one_parameter), TEST_CASE(states_that_a_program_refuses),
    TEST_CASE(a_trainers_state_in_a_program), TEST_CASE(runs_on_any_number_of_ranks_are_the_same),
    TEST_CASE(resume_on_another_number_of_ranks), TEST_CASE(micro_batches_wait_for_their_round),
    TEST_CASE(a_step_of_one_round), TEST_CASE(evaluation_on_any_number_of_ranks_is_the_same),
    TEST_CASE(fit_tells_of_ranks_without_work),
    TEST_CASE(features_once_train_the_head_of_a_frozen_encoder),
    TEST_CASE(features_once_of_the_first_layers_and_on_ranks), TEST_CASE(features_once_resumed),
    TEST_CASE(features_once_of_images), TEST_CASE(features_once_without_output),
    TEST_CASE(features_once_refuses),
    TEST_CASE(features_once_without_memory),
};

int main(int argc, char **argv)
{
    tt__limit_state_small = 60; /* the matrices of small models may have 8-bit states */
    return test_main(argc, argv, tests, TEST_COUNT(tests));
}
