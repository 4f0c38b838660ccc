/* Tests of vision transformers: checkpoints in both namings, sizes found from shapes, interpolated positions,
   images in the trainer, and the memory ladder that bench/memory_ladder prints. tests/test_models.c has the
   golden runs of ViT. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"

static tt_vit_config tiny(void) /* returns the sizes of the golden model */
{
    tt_vit_config c = tt_vit_config_default("Ti/16");
    c.image_size = 12;
    c.patch_size = 4;
    c.hidden_size = 36;
    c.heads = 3;
    c.layers = 2;
    c.intermediate_size = 52;
    c.classes = 3;
    return c;
}

static bool same_config(const tt_vit *a, const tt_vit *b)
{
    tt_vit_config x = a->config, y = b->config;
    return CHECK(x.image_size == y.image_size && x.patch_size == y.patch_size && x.channels == y.channels &&
                 x.hidden_size == y.hidden_size) &&
           CHECK(x.layers == y.layers && x.heads == y.heads && x.intermediate_size == y.intermediate_size &&
                 x.classes == y.classes && x.qkv_bias == y.qkv_bias) &&
           CHECK(strcmp(x.activation, y.activation) == 0 && x.layer_norm_eps == y.layer_norm_eps &&
                 x.initializer_range == y.initializer_range) &&
           CHECK(x.dropout == y.dropout && x.attention_dropout == y.attention_dropout) &&
           CHECK(memcmp(x.mean, y.mean, sizeof(float) * (size_t)x.channels) == 0 &&
                 memcmp(x.std, y.std, sizeof(float) * (size_t)x.channels) == 0);
}

static void same_parameters(const tt_context *a, const tt_context *b)
{
    if (!CHECK(a->n_params == b->n_params)) return;
    for (int k = 0; k < a->n_params; k++) {
        const tt_param *p = a->params[k], *q = b->params[k];
        if (!CHECK(strcmp(p->name, q->name) == 0 && p->size == q->size && p->ndim == q->ndim)) continue;
        float *x = test_values(p), *y = test_values(q);
        CHECK(memcmp(x, y, sizeof *x * (size_t)p->size) == 0);
        free(x);
        free(y);
    }
}

/* -------------------------------------------------------------------------------------------- checkpoints */

TEST(save_and_reload_in_both_spellings)
{
    for (int torchvision = 0; torchvision < 2; torchvision++) {
        test_allocator a, b;
        test_log log;
        tt_vit m, again;
        char folder[1024], path[1100];
        snprintf(folder, sizeof folder, "%s", test_path(test_folder(), "new"));
        snprintf(path, sizeof path, "%s/model.safetensors", folder);
        tt_context *ctx = test_open_logged(&a, &log), *other;
        CHECK(tt_vit_load(ctx, &m, TEST_GOLDEN("vit"), 0, 0) == TT_OK && !m.torchvision &&
              log.infos + log.warnings == 0);
        m.torchvision = torchvision;
        m.config.dropout = 0.1f;
        m.config.attention_dropout = 0.123456789f;
        m.config.mean[1] = 0.456f;
        m.config.std[2] = 0.225f;
        snprintf(m.class_names[1], sizeof m.class_names[1], "a \"cat\"");
        CHECK(tt_vit_save(&m, folder) == TT_OK && tt_vit_save(&m, folder) == TT_OK);

        other = test_open_logged(&b, &log);
        CHECK(tt_vit_load(other, &again, folder, 0, 0) == TT_OK && again.torchvision == torchvision &&
              log.infos + log.warnings == 0);
        same_config(&m, &again);
        CHECK(strcmp(again.class_names[1], "a \"cat\"") == 0 && strcmp(again.class_names[2], "LABEL_2") == 0);
        same_parameters(ctx, other);

        /* Each tensor equals that of the file of transformers or of torchvision. */
        tt_safetensors *saved = tt_safetensors_open(ctx, path),
                       *reference = tt_safetensors_open(ctx, TEST_GOLDEN(torchvision
                                                                             ? "vit/torchvision.safetensors"
                                                                             : "vit/model.safetensors"));
        if (CHECK(saved && reference && tt_safetensors_count(saved) == tt_safetensors_count(reference))) {
            for (int k = 0; k < tt_safetensors_count(saved); k++) {
                const tt_tensor_info *x = tt_safetensors_info(saved, k);
                int at = tt_safetensors_find(reference, x->name);
                if (!CHECK(at >= 0)) continue;
                const tt_tensor_info *y = tt_safetensors_info(reference, at);
                CHECK(x->ndim == y->ndim &&
                      memcmp(x->dims, y->dims, sizeof *x->dims * (size_t)x->ndim) == 0 &&
                      strcmp(x->dtype, y->dtype) == 0);
                char *mine = test_tensor(saved, k), *theirs = test_tensor(reference, at);
                CHECK(memcmp(mine, theirs, x->bytes) == 0);
                free(mine);
                free(theirs);
            }
        }
        tt_safetensors_close(saved);
        tt_safetensors_close(reference);
        tt_vit_free(&again);
        TEST_CLOSE(other, &b);
        tt_vit_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(sizes_told_by_shapes) /* reads a file without config.json, in both namings */
{
    for (int torchvision = 0; torchvision < 2; torchvision++) {
        test_allocator a, b;
        tt_vit m, again;
        tt_vit_config c = tiny();
        char folder[1024], path[1100];
        snprintf(folder, sizeof folder, "%s", test_folder());
        c.hidden_size = 128;
        c.heads = 2;
        c.layers = 3;
        c.channels = 1;
        c.classes = 7;
        c.layer_norm_eps = torchvision ? 1e-6f : 1e-12f;
        if (torchvision) { c.mean[0] = 0.485f; c.std[0] = 0.229f; }
        tt_context *ctx = test_open(&a), *other = test_open(&b);
        CHECK(tt_vit_new(ctx, &m, &c) == TT_OK);
        m.torchvision = torchvision;
        CHECK(tt_vit_save(&m, folder) == TT_OK);
        snprintf(path, sizeof path, "%s/config.json", folder);
        CHECK(remove(path) == 0);
        snprintf(path, sizeof path, "%s/preprocessor_config.json", folder);
        CHECK(remove(path) == 0);
        snprintf(path, sizeof path, "%s/model.safetensors", folder);
        CHECK(tt_vit_load(other, &again, path, 0, 0) == TT_OK && again.torchvision == torchvision);
        same_config(&m, &again);
        same_parameters(ctx, other);
        tt_vit_free(&again);
        TEST_CLOSE(other, &b);
        tt_vit_free(&m);
        TEST_CLOSE(ctx, &a);
    }
}

TEST(positions_of_another_image_size)
{
    test_allocator a;
    test_log log;
    tt_vit m;
    tt_context *ctx = test_open_logged(&a, &log);
    CHECK(tt_vit_load(ctx, &m, TEST_GOLDEN("vit"), 20, 0) == TT_OK && m.config.image_size == 20);
    CHECK(log.warnings == 0 &&
          strstr(log.text, "positions of 3 x 3 patches are interpolated to 5 x 5") != NULL);
    CHECK(tt_param_dims(m.position)[0] == 26 && tt_param_dims(m.position)[1] == 36);
    tt_safetensors *golden = tt_safetensors_open(ctx, TEST_GOLDEN("vit/golden.safetensors"));
    float *now = test_values(m.position), reference[26 * 36];
    CHECK(golden && tt_safetensors_read_f32(golden, tt_safetensors_find(golden, "positions.20"), 0, 26 * 36,
                                            reference) == TT_OK);
    for (int k = 0; k < 26 * 36; k++) CHECK_NEAR(now[k], reference[k], 1e-6);
    free(now);
    tt_safetensors_close(golden);
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* Writes every third tensor of a file, from tensor `first` on, into a new file. */
static void write_shard(const tt_safetensors *s, int first, const char *path)
{
    tt_tensor_info infos[64];
    int n = 0;
    for (int k = first; k < tt_safetensors_count(s); k += 3) infos[n++] = *tt_safetensors_info(s, k);
    tt_safetensors_writer *w = tt_safetensors_begin(s->ctx, path, infos, n, NULL);
    REQUIRE(w);
    for (int k = first; k < tt_safetensors_count(s); k += 3) {
        char *bytes = test_tensor(s, k);
        CHECK(tt_safetensors_write(w, bytes, tt_safetensors_info(s, k)->bytes) == TT_OK);
        free(bytes);
    }
    CHECK(tt_safetensors_end(w) == TT_OK);
}

TEST(checkpoint_in_shards) /* includes interpolated positions, and no config.json */
{
    for (int torchvision = 0; torchvision < 2; torchvision++) {
        test_allocator a, b;
        tt_vit m, again;
        tt_vit_config c = tiny();
        char folder[1024], path[1100], index[512] = "{\"weight_map\": {";
        snprintf(folder, sizeof folder, "%s", test_folder());
        c.hidden_size = 64;
        c.heads = 1;
        c.layer_norm_eps = torchvision ? 1e-6f : 1e-12f;
        tt_context *ctx = test_open(&a), *other = test_open(&b);
        CHECK(tt_vit_new(ctx, &m, &c) == TT_OK);
        m.torchvision = torchvision;
        CHECK(tt_vit_save(&m, folder) == TT_OK);
        tt_vit_free(&m);
        TEST_CLOSE(ctx, &a);
        snprintf(path, sizeof path, "%s/model.safetensors", folder);
        tt_safetensors *s = tt_safetensors_open(other, path);
        REQUIRE(s);
        for (int k = 0; k < 3; k++) {
            snprintf(path, sizeof path, "%s/part-%d.safetensors", folder, k);
            write_shard(s, k, path);
            snprintf(index + strlen(index), sizeof index - strlen(index),
                     "%s\"%s\": \"part-%d.safetensors\"", k ? ", " : "", tt_safetensors_info(s, k)->name, k);
        }
        tt_safetensors_close(s);
        strcat(index, "}}");
        for (int sized = 0; sized < 2; sized++) {
            const int size = sized ? 20 : 0;
            ctx = test_open(&a);
            snprintf(path, sizeof path, "%s/model.safetensors", folder);
            CHECK(tt_vit_load(ctx, &m, path, size, 0) == TT_OK);
            CHECK(rename(path, test_path(folder, "whole")) == 0);
            test_write(test_path(folder, "model.safetensors.index.json"), index, strlen(index));
            CHECK(tt_vit_load(other, &again, folder, size, 0) == TT_OK && again.torchvision == torchvision);
            same_config(&m, &again);
            same_parameters(ctx, other);
            CHECK(rename(test_path(folder, "whole"), path) == 0);
            CHECK(remove(test_path(folder, "config.json")) == 0 || sized);
            tt_vit_free(&m);
            tt_vit_free(&again);
            TEST_CLOSE(ctx, &a);
            TEST_CLOSE(other, &b);
            other = test_open(&b);
        }
        TEST_CLOSE(other, &b);
    }
}

TEST(another_head)
{
    test_allocator a;
    test_log log;
    tt_vit m;
    tt_context *ctx = test_open_logged(&a, &log);
    CHECK(tt_vit_load(ctx, &m, TEST_GOLDEN("vit"), 0, 10) == TT_OK && m.config.classes == 10 &&
          tt_param_dims(m.classifier_w)[0] == 10);
    CHECK(log.warnings == 1 && m.new_head);
    CHECK(strstr(log.text, "has 3 classes, but 10 are requested: 'classifier.weight', 'classifier.bias' "
                 "start with new values") != NULL);
    CHECK(m.token->read != NULL && m.classifier_w->read == NULL);
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
    ctx = test_open_logged(&a, &log);
    CHECK(tt_vit_load(ctx, &m, TEST_GOLDEN("vit/torchvision.safetensors"), 0, 10) == TT_OK &&
          log.warnings == 1 && m.new_head);
    CHECK(strstr(log.text,
                 "10 are requested: 'heads.head.weight', 'heads.head.bias' start with new values") != NULL);
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
}

TEST(classes_keep_their_numbers)
{
    static const char *const names[] = {"LABEL_2", "LABEL_0", "LABEL_1"};
    const tt_text texts[] = {{.text = "a", .bytes = 1}, {.text = "b", .bytes = 1, .label = 1},
                             {.text = "c", .bytes = 1, .label = 2}};
    test_allocator a;
    test_log log;
    tt_vit m;
    tt_context *ctx = test_open_logged(&a, &log);
    tt_dataset *d = tt_dataset_texts(ctx, TT_TASK_CLASS, texts, 3, names, 3);
    CHECK(tt_vit_load(ctx, &m, TEST_GOLDEN("vit"), 0, 3) == TT_OK && !m.new_head);
    CHECK(tt_vit_name_classes(&m, d) == TT_OK && log.warnings == 0);
    for (int c = 0; c < 3; c++)
        CHECK(tt_dataset_label(d, c) == (c + 2) % 3 &&
              strcmp(tt_dataset_class_name(d, c), m.class_names[c]) == 0);
    CHECK(strcmp(m.class_names[0], "LABEL_0") == 0);
    tt_dataset_free(d);
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* Copies the golden folder with `old` in `file` replaced by `now`, or without `file` if `now` is NULL.
   Returns the copy. */
static const char *edited(const char *file, const char *old, const char *now)
{
    static const char *const files[] = {"config.json", "model.safetensors"};
    static char folder[1024];
    char path[1100], golden[64];
    snprintf(folder, sizeof folder, "%s", test_folder());
    for (int k = 0; k < TEST_COUNT(files); k++) {
        size_t n;
        snprintf(golden, sizeof golden, "vit/%s", files[k]);
        char *bytes = test_read(TEST_GOLDEN(golden), &n), *at = NULL;
        snprintf(path, sizeof path, "%s/%s", folder, files[k]);
        if (strcmp(file, files[k]) != 0) { test_write(path, bytes, n); free(bytes); continue; }
        for (size_t i = 0; i + strlen(old) <= n && !at; i++)
            if (memcmp(bytes + i, old, strlen(old)) == 0) at = bytes + i;
        if (CHECK(at != NULL) && now) {
            char *text = (char *)malloc(n + strlen(now) + 1);
            size_t before = (size_t)(at - bytes), after = n - before - strlen(old);
            memcpy(text, bytes, before);
            memcpy(text + before, now, strlen(now));
            memcpy(text + before + strlen(now), at + strlen(old), after);
            test_write(path, text, before + strlen(now) + after);
            free(text);
        }
        free(bytes);
    }
    return folder;
}

/* Copies the golden folder and adds a preprocessor_config.json of n bytes. Returns the copy. */
static const char *preprocessed(const char *json, size_t n)
{
    const char *folder = edited("config.json", "{", "{");
    test_write(test_path(folder, "preprocessor_config.json"), json, n);
    return folder;
}

static void refused(const char *path, int image_size, int classes, tt_status status, const char *part,
                    const char *part_too)
{
    test_allocator a;
    test_log log;
    tt_vit m;
    tt_context *ctx = test_open_logged(&a, &log);
    memset(&m, 0xA5, sizeof m);
    CHECK(tt_vit_load(ctx, &m, path, image_size, classes) == status);
    CHECK_ERROR(ctx, status, part);
    CHECK_ERROR(ctx, status, part_too);
    CHECK(m.ctx == NULL && m.layer == NULL && ctx->n_params == 0);
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* Names that two classes share are saved; values that no config can hold are refused. */
TEST(names_and_numbers_that_are_saved)
{
    test_allocator a;
    tt_vit m;
    char folder[1024], path[1100];
    size_t n;
    snprintf(folder, sizeof folder, "%s", test_folder());
    snprintf(path, sizeof path, "%s/new/config.json", folder);
    strcat(folder, "/new");
    tt_context *ctx = test_open(&a);
    REQUIRE(tt_vit_load(ctx, &m, TEST_GOLDEN("vit"), 0, 0) == TT_OK);
    m.config.std[1] = INFINITY;
    CHECK(tt_vit_save(&m, folder) == TT_ERR_ARGUMENT && access(folder, F_OK) != 0);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "std is inf for channel 1");
    m.config.std[1] = 1e-40f; /* no preprocessor_config.json may hold such a number */
    CHECK(tt_vit_save(&m, folder) == TT_ERR_ARGUMENT && access(folder, F_OK) != 0);
    m.config.std[1] = 0.5f;
    strcpy(m.class_names[2], "\xFF");
    CHECK(tt_vit_save(&m, folder) == TT_ERR_ARGUMENT && access(folder, F_OK) != 0);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "class_names[2] must be a string");
    strcpy(m.class_names[2], "crane");
    strcpy(m.class_names[0], "crane");
    CHECK(tt_vit_save(&m, folder) == TT_OK);
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
    char *text = test_read(path, &n);
    CHECK(text && strstr(text, "\"label2id\": {\"LABEL_1\": 1, \"crane\": 2}"));
    free(text);
    ctx = test_open(&a);
    REQUIRE(tt_vit_load(ctx, &m, folder, 0, 0) == TT_OK);
    CHECK(strcmp(m.class_names[0], "crane") == 0 && strcmp(m.class_names[2], "crane") == 0);
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
}

TEST(broken_checkpoints)
{
    char path[1100];
    refused(edited("config.json", "\"model_type\": \"vit\"", "\"model_type\": \"bert\""), 0, 0,
            TT_ERR_UNSUPPORTED, "model_type is 'bert'; this loader reads 'vit'", "config.json");
    refused(edited("config.json", "\"hidden_size\": 36", "\"hidden_size\": 39"), 0, 0, TT_ERR_SHAPE,
            "cls_token' has shape (1, 1, 36), expected (1, 1, 39)", "model.safetensors");
    refused(edited("config.json", "\"num_attention_heads\": 3", "\"num_attention_heads\": 5"), 0, 0,
            TT_ERR_ARGUMENT, "hidden_size is 36, but must be a multiple of heads, 5", "ViT config");
    refused(edited("config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"), 0, 0,
            TT_ERR_FORMAT, "has no tensor 'vit.encoder.layer.2.layernorm_before.weight'",
            "config.json says 3");
    refused(edited("config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4000"), 0, 0,
            TT_ERR_FORMAT, "has no tensor 'vit.encoder.layer.2.layernorm_before.weight': it has 2 layers, "
            "but config.json says 4000", "model.safetensors'");
    refused(edited("config.json", "\"image_size\": 12", "\"image_size\": 16384"), 0, 0, TT_ERR_SHAPE,
            "position_embeddings' has shape (1, 10, 36), expected (1, 16777217, 36)", "model.safetensors'");
    refused(edited("config.json", "\"image_size\": 12", "\"image_size\": 16384"), 12, 0, TT_ERR_SHAPE,
            "expected (1, 16777217, 36)", "for parameter '");
    refused(edited("config.json", "\"patch_size\": 4", "\"patch_size\": 5"), 0, 0, TT_ERR_ARGUMENT,
            "image_size is 12, but must be a multiple of patch_size, 5", "ViT config");
    refused(edited("config.json", "\"layer_norm_eps\": 1e-12", "\"layer_norm_eps\": 1e300"), 0, 0,
            TT_ERR_FORMAT,
            "\"layer_norm_eps\" is 1e+300; expected a number that a float holds, of at least 0",
                "config.json");
    refused(edited("config.json", "\"initializer_range\": 0.02", "\"initializer_range\": -3"), 0, 0,
            TT_ERR_FORMAT,
            "\"initializer_range\" is -3; expected", "config.json");
    refused(edited("config.json", "\"hidden_dropout_prob\": 0.0", "\"hidden_dropout_prob\": 1"), 0, 0,
            TT_ERR_FORMAT,
            "\"hidden_dropout_prob\" is 1; expected", "config.json");
    refused(edited("config.json", "\"attention_probs_dropout_prob\": 0.0",
                   "\"attention_probs_dropout_prob\": -1"), 0, 0,
            TT_ERR_FORMAT, "\"attention_probs_dropout_prob\" is -1; expected", "config.json");
    refused(edited("config.json", "\"image_size\": 12", "\"image_size\": \"12\""), 0, 0, TT_ERR_FORMAT,
            "\"image_size\" is a string; expected an integer", "config.json");
    refused(edited("model.safetensors", "vit.embeddings.cls_token", "vit.embeddings.cls_tokem"), 0, 0,
            TT_ERR_FORMAT, "has no tensor 'vit.embeddings.cls_token'", "config.json");
    refused(TEST_GOLDEN("vit"), 14, 0, TT_ERR_ARGUMENT,
            "image_size is 14, but must be a multiple of patch_size, 4",
            "ViT config");
    refused(TEST_GOLDEN("vit"), 0, 100001, TT_ERR_ARGUMENT,
            "classes is 100001, but at most 100000 are supported", "ViT config");
    refused(TEST_GOLDEN("vit"), -4, 0, TT_ERR_ARGUMENT, "image_size is -4", "ViT config");
    refused(TEST_GOLDEN("nothing"), 0, 0, TT_ERR_FILE, "cannot list the folder '", "nothing': No such file");
    refused(TEST_GOLDEN("nothing.safetensors"), 0, 0, TT_ERR_FILE, "cannot open '",
            "nothing.safetensors': No such file");
    snprintf(path, sizeof path, "%s/model.safetensors", edited("config.json", "{", NULL));
    refused(path, 0, 0, TT_ERR_FORMAT,
            "the number of heads cannot be derived from the width 36: put a config.json beside the file",
            "model.safetensors");
    size_t n;
    char *bert = test_read(TEST_GOLDEN("bert/model.safetensors"), &n);
    test_write(path, bert, n);
    free(bert);
    refused(path, 0, 0, TT_ERR_FORMAT, "is not a ViT: 'vit.embeddings.position_embeddings'", "first layer");
    const char *folder = edited("config.json", "{", "{");
    snprintf(path, sizeof path, "%s/preprocessor_config.json", folder);
    test_write(path, "{\"image_mean\": [0.1, 0.2]}", 26);
    refused(folder, 0, 0, TT_ERR_FORMAT, "'image_mean' must be a list of 3 numbers",
            "preprocessor_config.json");
    test_write(path, "{\"image_mean\": [0.1, 0.2, 0.3], \"image_std\": [0.1, 0, 0.3]}", 59);
    refused(folder, 0, 0, TT_ERR_FORMAT, "\"image_std\" is 0; expected a number", "preprocessor_config.json");
    static const struct { const char *text, *error; } numbers[] = {
        {"{\"image_mean\": [0.1, 1e39, 0.3]}", "\"image_mean\" is 1e+39; expected a number that a float "
         "holds"},
        {"{\"image_mean\": [0.1, -1e300, 0.3]}", "\"image_mean\" is -1e+300; expected"},
        {"{\"image_std\": [0.1, 0.2, 1e60]}", "\"image_std\" is 1e+60; expected"},
        {"{\"image_std\": [0.1, 0.2, -0.5]}", "\"image_std\" is -0.5; expected"},
        {"{\"image_std\": [1e-60, 0.2, 0.5]}", "\"image_std\" is 1e-60; expected"},
    };
    for (int k = 0; k < TEST_COUNT(numbers); k++) {
        test_write(path, numbers[k].text, strlen(numbers[k].text));
        refused(folder, 0, 0, TT_ERR_FORMAT, numbers[k].error, "preprocessor_config.json");
    }
    test_write(path, "{\"image_std\": [0.1, \"x\", 0.3]}", 30);
    refused(folder, 0, 0, TT_ERR_FORMAT, "\"image_std\" is a string; expected a number",
            "preprocessor_config.json");
    /* More channels than the config has room for. */
    folder = edited("config.json", "\"num_channels\": 3", "\"num_channels\": 500");
    test_write(test_path(folder, "preprocessor_config.json"), "{\"do_normalize\": false}", 23);
    refused(folder, 0, 0, TT_ERR_ARGUMENT, "channels is 500, but must be at most 4", "ViT config");
}

/* A model's preprocessor_config.json, as read and as saved again, gives the pixels of transformers'
   processors bit for bit. */
TEST(preprocessor_golden)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_safetensors *s = tt_safetensors_open(ctx, TEST_GOLDEN("preprocess.safetensors"));
    char folder[1024];
    int images = 0;
    REQUIRE(s);
    for (int i = 0; i < tt_safetensors_count(s); i++) {
        const tt_tensor_info *json = tt_safetensors_info(s, i);
        if (!tt__match("*.json", json->name)) continue;
        char *text = test_tensor(s, i);
        snprintf(folder, sizeof folder, "%s", preprocessed(text, json->bytes));
        for (int saved = 0; saved < 2; saved++) {
            test_allocator b;
            tt_context *own = test_open(&b);
            tt_vit m;
            uint8_t have[12 * 12 * 3];
            char name[64];
            REQUIRE(tt_vit_load(own, &m, folder, 0, 0) == TT_OK);
            const tt_image_options o = tt_vit_image_options(&m);
            for (int k = 0, at; k < 10; k++) {
                snprintf(name, sizeof name, "%.2s.%d.from", json->name, k);
                if ((at = tt_safetensors_find(s, name)) < 0) break;
                const tt_tensor_info *from = tt_safetensors_info(s, at);
                uint8_t *pixels = (uint8_t *)test_tensor(s, at);
                tt_image image = {pixels, (int)from->dims[0], (int)from->dims[1], (int)from->dims[2]};
                snprintf(name, sizeof name, "%.2s.%d.to", json->name, k);
                uint8_t *want = (uint8_t *)test_tensor(s, tt_safetensors_find(s, name));
                CHECK(tt_image_prepare(own, &image, &o, have) == TT_OK);
                if (!CHECK(memcmp(have, want, sizeof have) == 0))
                    printf("%.*s: image %d\n", (int)json->bytes, text, k);
                free(want);
                free(pixels);
                images++;
            }
            CHECK(tt_vit_save(&m, folder) == TT_OK);
            tt_vit_free(&m);
            TEST_CLOSE(own, &b);
        }
        free(text);
    }
    CHECK(images >= 100);
    tt_safetensors_close(s);
    TEST_CLOSE(ctx, &a);
}

TEST(preprocessors_refused)
{
    static const struct { const char *json; tt_status status; const char *error; } bad[] = {
        {"{\"image_processor_type\": \"CLIPImageProcessor\"}", TT_ERR_UNSUPPORTED,
         "the image processor is 'CLIPImageProcessor'"},
        {"{\"resample\": 4}", TT_ERR_FORMAT, "\"resample\" is 4; expected an integer from 0 to 3"},
        {"{\"do_pad\": true}", TT_ERR_UNSUPPORTED, "\"do_pad\""},
        {"{\"size\": 13}", TT_ERR_FORMAT,
         "resized to 13 x 13 pixels, but \"image_size\" of config.json is 12"},
        {"{\"size\": {\"height\": 12, \"width\": 13}}", TT_ERR_UNSUPPORTED, "\"size\" has neither"},
        {"{\"size\": {\"shortest_edge\": 12, \"longest_edge\": 20}, \"do_center_crop\": true}",
         TT_ERR_UNSUPPORTED, "\"size\" has neither"},
        {"{\"size\": {\"max_height\": 12, \"max_width\": 12}}", TT_ERR_UNSUPPORTED, "\"size\" has neither"},
        {"{\"size\": {\"shortest_edge\": 12}}", TT_ERR_UNSUPPORTED, "without \"do_center_crop\""},
        {"{\"size\": 16, \"do_center_crop\": true, \"crop_size\": {\"shortest_edge\": 12}}",
         TT_ERR_UNSUPPORTED, "\"crop_size\" has neither"},
        {"{\"size\": 16, \"do_center_crop\": true, \"crop_size\": 14}", TT_ERR_FORMAT, "resized to 14 x 14"},
        {"{\"size\": 0}", TT_ERR_FORMAT, "\"size\" is 0"},
        {"{\"do_resize\": 1}", TT_ERR_FORMAT, "\"do_resize\" is a number"},
    };
    for (int k = 0; k < TEST_COUNT(bad); k++)
        refused(preprocessed(bad[k].json, strlen(bad[k].json)), 0, 0, bad[k].status, bad[k].error,
                "preprocessor_config.json'");
}

TEST(preprocessor_of_another_image_size) /* the cropped share of an image stays equal */
{
    static const char json[] = "{\"size\": 15, \"do_center_crop\": true, \"crop_size\": 12, \"resample\": 3}";
    test_allocator a;
    tt_vit m;
    tt_context *ctx = test_open(&a);
    CHECK(tt_vit_load(ctx, &m, preprocessed(json, sizeof json - 1), 20, 0) == TT_OK);
    CHECK(m.config.image_size == 20 && m.config.resize == 25 && m.config.resample == TT_BICUBIC);
    m.config.resize = 65536;
    CHECK(tt_vit_save(&m, test_folder()) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "resize is 65536, but must be -1 to 65535");
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
}

TEST(configs)
{
    /* Numbers of parameters with 1000 classes, as published. */
    static const struct { const char *size; int64_t parameters; } rows[] = {
        {"Ti/16", 5717416}, {"S/16", 22050664}, {"B/16", 86567656}, {"B/32", 88224232}, {"L/16", 304326632},
        {"H/14", 632045800}};
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        test_allocator a;
        tt_vit m;
        tt_vit_config c = tt_vit_config_default(rows[k].size);
        int64_t n = 0;
        tt_context *ctx = test_open(&a);
        CHECK(tt_vit_new(ctx, &m, &c) == TT_OK);
        for (int p = 0; p < ctx->n_params; p++) n += tt_param_size(ctx->params[p]);
        CHECK(n == rows[k].parameters);
        tt_vit_free(&m);
        CHECK(tt_vit_new(ctx, &m, &c) == TT_ERR_ARGUMENT); /* parameters of these names exist */
        TEST_CLOSE(ctx, &a);
    }
    test_allocator a;
    tt_vit m;
    tt_context *ctx = test_open(&a);
    tt_vit_config c = tt_vit_config_default("XL/16");
    CHECK(tt_vit_new(ctx, &m, &c) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "patch_size is 0, but must be at least 1; hidden_size is 0, but must "
                "be at least 1; layers is 0, but must be at least 1");
    c = tiny();
    c.channels = 5;
    c.dropout = 1;
    c.std[0] = 0;
    c.activation = "sine";
    CHECK(tt_vit_new(ctx, &m, &c) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "channels is 5, but must be at most 4; mean is 0.5 and std is 0 for "
                "channel 0, but both must be finite and std above 0; dropout is 1, but must be in [0, 1); "
                "activation 'sine' is unknown");
    c = tiny();
    c.qkv_bias = false;
    CHECK(tt_vit_new(ctx, &m, &c) == TT_OK && m.layer[0].q_b == NULL);
    m.torchvision = true;
    CHECK(tt_vit_save(&m, test_folder()) == TT_ERR_UNSUPPORTED);
    CHECK_ERROR(ctx, TT_ERR_UNSUPPORTED, "torchvision's ViT needs them: set torchvision to false");
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
}

/* -------------------------------------------------------------------------------------------- the trainer */

enum { SIDE = 12, IMAGES = 6, IMAGE = SIDE * SIDE * 3 };

/* Draws images; images of class c have a bright channel c. */
static void draw(uint8_t pixels[IMAGES * IMAGE], int32_t labels[IMAGES])
{
    uint64_t random = 5;
    for (int k = 0; k < IMAGES; k++) {
        labels[k] = k % 3;
        for (int p = 0; p < IMAGE; p++)
            pixels[k * IMAGE + p] = (uint8_t)(test_random(&random) % 128 + (p % 3 == labels[k] ? 127 : 0));
    }
}

static tt_batch batch_of(const uint8_t *pixels, const int32_t *labels, int from, int n, bool last)
{
    tt_batch b;
    memset(&b, 0, sizeof b);
    b.seqs = n;
    b.pixels = pixels + from * IMAGE;
    b.image_bytes = IMAGE;
    b.labels = labels + from;
    b.last_of_step = last;
    return b;
}

static tt_trainer *trainer_of(tt_context *ctx, tt_vit *m, const char *recompute, float dropout, int max_seqs,
                              bool accumulate)
{
    tt_vit_config c = tiny();
    tt_train_options o = tt_train_options_default();
    c.dropout = c.attention_dropout = dropout;
    c.layers = 3;
    o.schedule.kind = TT_CONSTANT;
    o.schedule.lr = 3e-3f;
    o.compile.recompute = recompute;
    o.max_seqs = max_seqs;
    o.compile.accumulate = accumulate;
    if (!CHECK(tt_vit_new(ctx, m, &c) == TT_OK)) return NULL;
    tt_model model = tt_vit_classifier(m);
    CHECK(model.max_length == 10 && model.same_length);
    tt_trainer *r = tt_trainer_new(ctx, &model, &o);
    if (!r) CHECK_ERROR(ctx, TT_OK, "a trainer");
    return r;
}

/* A file that cannot be opened, or a folder that cannot be listed, is an error: the default config would give
   another model. */
TEST(unreadable_files_are_not_absent)
{
    static const char kinds[] = {'o', 'l'};
    test_allocator a;
    test_log log;
    tt_context *ctx = test_open_logged(&a, &log);
    tt_vit m;
    char *folder = test_folder();
    tt_vit_config config = tiny();
    REQUIRE(tt_vit_new(ctx, &m, &config) == TT_OK && tt_vit_save(&m, folder) == TT_OK);
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
    for (int kind = 0; kind < TEST_COUNT(kinds); kind++) {
        int failures = 0;
        for (bool all_read = false; !all_read; failures += !all_read) {
            test_files files;
            tt_context_options o = test_options(&a);
            o.files = test_failing_files(&files, kinds[kind], failures + 1);
            ctx = tt_open(&o);
            tt_status status = tt_vit_load(ctx, &m, folder, 0, 0);
            all_read = files.calls < files.at;
            CHECK(status == (all_read ? TT_OK : TT_ERR_FILE));
            if (status == TT_OK) CHECK(m.config.heads == 3);
            else
                CHECK_ERROR(ctx, TT_ERR_FILE,
                            kinds[kind] == 'o' ? "cannot open '" : "cannot list the folder '");
            if (status == TT_OK) tt_vit_free(&m);
            TEST_CLOSE(ctx, &a);
        }
        /* The load failed once for config.json, once for preprocessor_config.json and, with 'o', once for the
           checkpoint. */
        CHECK(failures >= 2);
    }
}

TEST(learns_and_predicts)
{
    uint8_t pixels[IMAGES * IMAGE];
    int32_t labels[IMAGES];
    float p[IMAGES * 3];
    test_allocator a;
    tt_vit m;
    tt_stats s;
    tt_context *ctx = test_open(&a);
    tt_trainer *r = trainer_of(ctx, &m, NULL, 0, IMAGES, false);
    draw(pixels, labels);
    tt_batch b = batch_of(pixels, labels, 0, IMAGES, true);
    for (int k = 0; k < 30; k++) CHECK(tt_train_batch(r, &b, &s, NULL) == TT_OK);
    CHECK(s.correct == IMAGES && s.loss < 0.2);
    CHECK(tt_predict(r, &b, p) == TT_OK);
    for (int k = 0; k < IMAGES; k++)
        CHECK(p[3 * k + labels[k]] > 0.7f && p[3 * k] + p[3 * k + 1] + p[3 * k + 2] > 0.999f);
    float one[3];
    for (int k = 0; k < IMAGES; k++) { /* an image alone gets the probabilities that it got among the
                                          others */
        b = batch_of(pixels, labels, k, 1, true);
        CHECK(tt_predict(r, &b, one) == TT_OK);
        for (int c = 0; c < 3; c++) CHECK_NEAR(one[c], p[3 * k + c], 1e-5);
    }
    tt_trainer_free(r);
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
}

TEST(same_bits_when_recomputed)
{
    static const char *const policies[] = {"none", "cheap", "attention", "blocks"};
    uint8_t pixels[IMAGES * IMAGE];
    int32_t labels[IMAGES];
    double loss[4][5];
    tt_plan plan[4];
    draw(pixels, labels);
    for (int k = 0; k < 4; k++) {
        test_allocator a;
        tt_vit m;
        tt_stats s;
        tt_context *ctx = test_open(&a);
        tt_trainer *r = trainer_of(ctx, &m, policies[k], 0.2f, IMAGES, false);
        tt_batch b = batch_of(pixels, labels, 0, IMAGES, true);
        r->train->poison = true;
        for (int step = 0; step < 5; step++) {
            if (!CHECK(tt_train_batch(r, &b, &s, NULL) == TT_OK)) fprintf(stderr, "%s\n", tt_error(ctx));
            loss[k][step] = s.loss;
        }
        plan[k] = tt_program_plan(tt_trainer_program(r));
        CHECK(memcmp(loss[k], loss[0], sizeof loss[0]) == 0);
        tt_trainer_free(r);
        tt_vit_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(plan[1].extra_flops == 0 && plan[2].extra_flops > 0 && plan[3].extra_flops > 0);
}

TEST(micro_batches_of_images)
{
    uint8_t pixels[IMAGES * IMAGE];
    int32_t labels[IMAGES];
    double loss[2] = {0, 0}, norm[2] = {0, 0};
    draw(pixels, labels);
    for (int k = 0; k < 2; k++) {
        test_allocator a;
        tt_vit m;
        tt_stats s;
        bool updated = false;
        tt_context *ctx = test_open(&a);
        tt_trainer *r = trainer_of(ctx, &m, NULL, 0, IMAGES, true);
        tt_batch all = batch_of(pixels, labels, 0, IMAGES, true),
                 first = batch_of(pixels, labels, 0, 4, false), second = batch_of(pixels, labels, 4, 2, true);
        if (!k) CHECK(tt_train_batch(r, &all, &s, &updated) == TT_OK && updated);
        else CHECK(tt_train_batch(r, &first, &s, &updated) == TT_OK && !updated &&
                   tt_train_batch(r, &second, &s, &updated) == TT_OK && updated);
        loss[k] = s.loss;
        norm[k] = s.grad_norm;
        tt_trainer_free(r);
        tt_vit_free(&m);
        TEST_CLOSE(ctx, &a);
    }
    CHECK_NEAR(loss[1], loss[0], 1e-6);
    CHECK_NEAR(norm[1], norm[0], 1e-5 * norm[0]);
}

TEST(misuse)
{
    uint8_t pixels[IMAGES * IMAGE];
    int32_t labels[IMAGES], ids[4] = {1, 2, 3, 4}, start[2] = {0, 4};
    test_allocator a;
    tt_vit m;
    tt_bert text;
    tt_stats s;
    float p[8];
    tt_context *ctx = test_open(&a);
    tt_trainer *r = trainer_of(ctx, &m, NULL, 0, 4, false);
    draw(pixels, labels);
    tt_batch b = batch_of(pixels, labels, 0, 5, true);
    CHECK(tt_train_batch(r, &b, &s, NULL) == TT_ERR_SHAPE);
    CHECK_ERROR(ctx, TT_ERR_SHAPE,
                "the batch has 5 images, but max_seqs is 4: make the trainer for more, or the batch smaller");
    b.seqs = 0;
    CHECK(tt_train_batch(r, &b, &s, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the batch is empty");
    b.seqs = 2;
    labels[1] = 3;
    CHECK(tt_train_batch(r, &b, &s, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "has 3 in row 1");
    b.pixels = NULL;
    b.ids = ids;
    CHECK(tt_train_batch(r, &b, &s, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the model reads images, but the batch has text");
    labels[1] = 1;
    b = batch_of(pixels, labels, 1, 3, true);
    b.image_bytes = 32 * 32 * 3;
    CHECK(tt_train_batch(r, &b, &s, NULL) == TT_ERR_SHAPE);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "the images of the batch have 3072 bytes (height * width * channels), but "
                "the model reads images of 432");
    b.image_bytes = IMAGE;
    /* the waiting micro-batches were not lost */
    CHECK(tt_train_batch(r, &b, &s, NULL) == TT_OK && s.targets == 3);
    tt_trainer_free(r);

    tt_bert_config c = tt_bert_config_default(TT_DISTILBERT);
    tt_train_options o = tt_train_options_default();
    c.vocab_size = 10;
    c.hidden_size = 8;
    c.heads = 2;
    c.layers = 1;
    c.intermediate_size = 8;
    c.max_positions = 4;
    o.compile.train = false;
    o.max_seqs = 4;
    o.max_tokens = 16;
    CHECK(tt_bert_new(ctx, &text, &c) != TT_OK); /* ViT's classifier exists */
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "parameter 'classifier.weight' exists already");
    tt_vit_free(&m);
    TEST_CLOSE(ctx, &a);
    ctx = test_open(&a);
    CHECK(tt_bert_new(ctx, &text, &c) == TT_OK);
    tt_model model = tt_bert_model(&text);
    r = tt_trainer_new(ctx, &model, &o);
    CHECK(r != NULL && tt_predict(r, &b, p) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the batch is empty (3 sequences, 0 tokens)");
    b.rows = start[1];
    b.seq_start = start;
    CHECK(tt_predict(r, &b, p) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the model reads text, but the batch has images");
    tt_trainer_free(r);
    tt_bert_free(&text);
    TEST_CLOSE(ctx, &a);
}

TEST(misuse_of_patches)
{
    static const struct { int height, width, channels, patch; const char *message; } rows[] = {
        {8, 8, 3, 3, "images of 8 x 8 pixels and 3 channels cannot be cut into patches of 3 x 3"},
        {8, 8, 5, 4, "5 channels cannot be cut"}, {0, 8, 3, 4, "images of 8 x 0 pixels"},
        {8, 8, 3, 0, "patches of 0 x 0"},
        {8, 12, 3, 4,
         "operand 0 is 'pixels' u8 (2, 192), expected u8 of width 288 (height * width * channels)"},};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        tt_tape *t = tt_tape_new(ctx);
        tt_value pixels = tt_input(t, "pixels", TT_U8, 2, 192),
                 positions = tt_input(t, "positions", TT_I32, 10, 1);
        tt_patch_options o = tt_patch_options_default(rows[k].height, rows[k].width, rows[k].channels,
                                                      rows[k].patch);
        tt_patches(t, pixels, positions, tt_seq_start(t, "starts", 2), &o);
        CHECK(tt_tape_status(t) != TT_OK);
        CHECK_ERROR(ctx, tt_tape_status(t), rows[k].message);
        tt_tape_free(t);
    }
    tt_tape *t = tt_tape_new(ctx);
    tt_value pixels = tt_input(t, "pixels", TT_U8, 2, 192),
             positions = tt_input(t, "positions", TT_I32, 10, 1);
    tt_patch_options o = tt_patch_options_default(8, 8, 3, 4);
    tt_patches(t, pixels, positions, tt_seq_start(t, "starts", 3), &o);
    CHECK_ERROR(ctx, TT_ERR_SHAPE, "expected one row more than there are images");
    tt_tape_free(t);

    t = tt_tape_new(ctx); /* the run finds a position beyond the last patch */
    uint8_t image[2 * 192] = {0};
    int32_t position[10] = {0, 1, 2, 3, 4, 0, 1, 2, 3, 5}, start[3] = {0, 5, 10};
    tt_compile_options c = tt_compile_options_default();
    pixels = tt_input(t, "pixels", TT_U8, 2, 192);
    positions = tt_input(t, "positions", TT_I32, 10, 1);
    tt_value starts = tt_seq_start(t, "starts", 2), patches = tt_patches(t, pixels, positions, starts, &o);
    c.train = false;
    tt_program *p = tt_compile(t, patches, &c);
    CHECK(p && tt_set(p, pixels, image, 2) == TT_OK && tt_set(p, positions, position, 10) == TT_OK &&
          tt_set(p, starts, start, 3) == TT_OK);
    CHECK(tt_run(p, NULL) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "patches: 'positions' has 5 in row 9, but must have 0 to 4");
    tt_program_free(p);
    tt_tape_free(t);
    TEST_CLOSE(ctx, &a);
}

static const test_case tests[] = {
    TEST_CASE(save_and_reload_in_both_spellings), TEST_CASE(sizes_told_by_shapes),
    TEST_CASE(positions_of_another_image_size), TEST_CASE(another_head),
    TEST_CASE(checkpoint_in_shards), TEST_CASE(classes_keep_their_numbers),
    TEST_CASE(names_and_numbers_that_are_saved), TEST_CASE(broken_checkpoints), TEST_CASE(configs),
    TEST_CASE(preprocessor_golden), TEST_CASE(preprocessors_refused),
    TEST_CASE(preprocessor_of_another_image_size),
    TEST_CASE(learns_and_predicts), TEST_CASE(same_bits_when_recomputed), TEST_CASE(micro_batches_of_images),
    TEST_CASE(misuse), TEST_CASE(misuse_of_patches), TEST_CASE(unreadable_files_are_not_absent),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
