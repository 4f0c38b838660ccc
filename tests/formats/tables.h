/* Tests of datasets: tables, IMDb, texts. */
#pragma once

/* ----------------------------------------------------------------------------------------------- datasets */

static tt_dataset *table(tt_context *ctx, const char *name, const char *text, size_t n, const char *split,
                         const char *const *classes, int n_classes)
{
    static char folder[600];
    if (!folder[0]) snprintf(folder, sizeof folder, "%s", test_folder());
    const char *path = test_write(test_path(folder, name), text, n);
    return tt_dataset_table(ctx, path, split, classes, n_classes, NULL);
}

static bool row_is(const tt_dataset *d, int64_t i, const char *text, int label)
{
    size_t n;
    const char *have = tt_dataset_text(d, i, &n);
    return have && n == strlen(text) && memcmp(have, text, n + 1) == 0 && tt_dataset_label(d, i) == label;
}

TEST(dataset_table)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static const char csv[] = "\xEF\xBB\xBFlabel,other,text,split\r\n\"pos\",1,\"a, "
                              "\"\"b\"\"\nc\",train\r\n\r\nneg,2,,test\r\nneg,\"3\",plain \"quoted\" "
                              "text,train\n\"\xC3\xA9\",4,\"\",train";
    tt_dataset *d = table(ctx, "a.csv", csv, sizeof csv - 1, NULL, NULL, 0);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 4 && tt_dataset_classes(d) == 3);
    CHECK(strcmp(tt_dataset_class_name(d, 0), "neg") == 0 &&
          strcmp(tt_dataset_class_name(d, 1), "pos") == 0 &&
          strcmp(tt_dataset_class_name(d, 2), "\xC3\xA9") == 0);
    CHECK(row_is(d, 0, "a, \"b\"\nc", 1) && row_is(d, 1, "", 0) && row_is(d, 2, "plain \"quoted\" text", 0) &&
          row_is(d, 3, "", 2));
    CHECK(!tt_dataset_text(d, 4, NULL) && !tt_dataset_text(d, -1, NULL) && tt_dataset_label(d, 4) == -1 &&
          !tt_dataset_class_name(d, 3));
    tt_dataset_free(d);
    static const char *const classes[] = {"pos", "neg", "\xC3\xA9", "unused"}, *const twice[] = {"a", "b",
                                                                                                 "a"};
    d = table(ctx, "a.csv", csv, sizeof csv - 1, "train", classes, 4);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 3 && tt_dataset_classes(d) == 4 && row_is(d, 0, "a, \"b\"\nc", 0) &&
          row_is(d, 1, "plain \"quoted\" text", 1) && row_is(d, 2, "", 2));
    tt_dataset_free(d);
    static const char tsv[] = "text\tlabel\na, b\t1\n\"tab\there\"\t0\n";
    d = table(ctx, "a.tsv", tsv, sizeof tsv - 1, NULL, NULL, 0);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 2 && row_is(d, 0, "a, b", 1) && row_is(d, 1, "tab\there", 0));
    tt_dataset_free(d);
    CHECK(!table(ctx, "a.tsv", tsv, sizeof tsv - 1, "extra", NULL, 0));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "no column 'split', so it has only the splits \"train\" and \"test\", not 'extra'");
    tt_dataset_free(NULL);

    static const struct { const char *text; size_t n; const char *split, *error; } bad[] = {
        {"", 0, NULL, "is empty"}, {"\n\n", 0, NULL, "is empty"},
        {"text\tlabel\n", 0, NULL, "a header but no rows"}, {"text\tlabel", 0, NULL, "no rows"},
        {"text\tlable\na\tb\n", 0, NULL,
         "line 1: none of the header's 2 columns, separated by tabs, is named 'label'"},
        {"text,label\na,b\n", 0, NULL, "is named 'text'; they are"},
        {"text\tlabel\ttext\na\tb\tc\n", 0, NULL, "two columns are named 'text'"},
        {"text\tlabel\na\tb\na\n", 0, NULL, "line 3: the row has 1 columns, but the header has 2"},
        {"text\tlabel\na\tb\tc\n", 0, NULL, "line 2: the row has 3 columns"},
        {"text\tlabel\n\"a\n\nb\"\tx\n\"c\nd\te\n", 0, NULL,
         "line 5: the quoted field that starts here is not closed"},
        {"text\tlabel\n\"a\nb\"x\tc\n", 0, NULL, "line 3: there is text after a closing quote"},
        {"text\tlabel\n\n\na\t\n", 0, NULL, "line 4: the label is empty"},
        {"text\tlabel\na\tb\n", 0, "train", "cannot be divided into"},
        {"text\tlabel\tsplit\na\tb\ttest\n", 0, "train", "no row whose split is 'train'"},
        {"text\tlabel\na\tb\0c\n", 17, NULL, "line 2: the label contains a NUL"},
        {"text\tlabel\na\t", 0, NULL, "the label is empty"},
        {"text\tlabel\na\tx\nb\tcaf\xE9 noir\n", 0, NULL, "line 3, byte 20: the byte 0xe9 is not valid "
         "UTF-8: if the file is text in Latin-1, convert it, for example with iconv -f LATIN1"},
        {"text\tlabel\n\xED\xA0\x80\tx\n", 0, NULL, "line 2, byte 11: the byte 0xed is not valid UTF-8"}};
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        CHECK(!table(ctx, "bad.tsv", bad[i].text, bad[i].n ? bad[i].n : strlen(bad[i].text), bad[i].split,
                     NULL, 0));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, bad[i].error);
    }
    CHECK(!table(ctx, "a.csv", csv, sizeof csv - 1, "train", classes, 2));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "line 7: the label '\xC3\xA9' is not one of the 2 given classes");
    CHECK(!table(ctx, "a.csv", csv, sizeof csv - 1, NULL, twice, 3));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the class 'a' is given twice");
    static const char *const latin1[] = {"neg", "caf\xE9"};
    CHECK(!table(ctx, "a.csv", csv, sizeof csv - 1, NULL, latin1, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "the name of class 1 of 2, 'caf', is followed by the byte 0xe9, which is not valid UTF-8");
    CHECK(!table(ctx, "a.csv", csv, sizeof csv - 1, NULL, NULL, 2) &&
          !table(ctx, "a.csv", csv, sizeof csv - 1, NULL, classes, 0));
    CHECK(!tt_dataset_table(ctx, "/nonexistent.csv", NULL, NULL, 0, NULL));
    CHECK_ERROR(ctx, TT_ERR_FILE, "/nonexistent.csv");
    TEST_CLOSE(ctx, &a);
}

/* Text files in other encodings than UTF-8 are refused before their text is used. */
TEST(texts_of_other_encodings_are_refused)
{
    static const struct { const char *text; size_t bytes; const char *error; } rows[] = {
        {"\xFF\xFEt\0e\0", 6, "begins with the byte order mark of UTF-16, but must be UTF-8: convert the "
         "file, for example with iconv -f UTF-16 -t UTF-8"},
        {"\xFE\xFF\0t\0e", 6, "the byte order mark of UTF-16"},
        {"\xFF\xFE\0\0t\0\0\0", 8, "the byte order mark of UTF-32"},
        {"\0\0\xFE\xFF\0\0\0t", 8, "iconv -f UTF-32 -t UTF-8"},
        {"t\0e\0x\0t\0", 8, "4 of the first 8 bytes are control characters, so the file is not text in "
         "UTF-8: if it is text in UTF-16, convert it, for example with iconv -f UTF-16LE"},
        {"\0t\0e\0x\0t", 8, "iconv -f UTF-16BE"},
        /* Cyrillic letters in UTF-16 have no NUL byte, so the first NUL byte is that of the first space. */
        {"?\4@\4\70\4\62\4\65\4B\4 \0<\4\70\4@\4", 20, "10 of the first 20 bytes are control characters, so "
         "the file is not text in UTF-8: if it is text in UTF-16, convert it, for example with iconv -f "
         "UTF-16LE"},
        {"\4?\4@\4\70\4\62\4\65\4B\0 \4<\4\70\4@", 20, "iconv -f UTF-16BE"},
        {"text\n\ncaf\xE9!", 11,
         "line 3, byte 9: the byte 0xe9 is not valid UTF-8: if the file is text in Latin-1, convert it"},
        {"\xEF\xBB\xBF\xEF", 4, "line 1, byte 3: the byte 0xef is not"}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600];
    size_t begin = 9;
    snprintf(folder, sizeof folder, "%s", test_folder());
    for (int k = 0; k < TEST_COUNT(rows); k++) {
        const char *path = test_write(test_path(folder, "a.txt"), rows[k].text, rows[k].bytes);
        CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, NULL));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, rows[k].error);
        CHECK(!tt_token_stream_read(ctx, path, NULL)); /* refused as a token stream of bytes, too */
        CHECK_ERROR(ctx, TT_ERR_FORMAT, rows[k].error);
        CHECK(!tt_token_stream_read(ctx, folder, NULL));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, "/a.txt'");
        CHECK(tt_text_begin(ctx, "x", rows[k].text, rows[k].bytes, &begin) == TT_ERR_FORMAT);
        CHECK_ERROR(ctx, TT_ERR_FORMAT, rows[k].error);
    }
    CHECK(tt_text_begin(ctx, "x", "\xEF\xBB\xBFx", 4, &begin) == TT_OK && begin == 3);
    CHECK(tt_text_begin(ctx, "x", "\xEF\xBB", 0, &begin) == TT_OK && begin == 0);
    CHECK(tt_text_begin(ctx, "x", "abcde\0f\xC3\xA9", 9, &begin) == TT_OK && begin == 0);
    TEST_CLOSE(ctx, &a);
}

/* Lines may end with CR, columns may have another separator, and quotes may be ordinary characters. */
TEST(tables_of_other_programs)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static const char mac[] = "text,label\r\"a\rb\",x\rc,y\r", mixed[] = "text,label\na\rb,x\n";
    tt_dataset *d = table(ctx, "mac.csv", mac, sizeof mac - 1, NULL, NULL, 0);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 2 && row_is(d, 0, "a\nb", 0) && row_is(d, 1, "c", 1));
    tt_dataset_free(d);
    d = table(ctx, "mixed.csv", mixed, sizeof mixed - 1, NULL, NULL, 0);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 1 && row_is(d, 0, "a\rb", 0));
    tt_dataset_free(d);
    static const struct { const char *name, *text, *error; } bad[] = {
        {"a.csv", "text;label\na;b\n", "is named 'text'; they are 'text;label'; if columns are separated by "
         "the character ';', set delimiter (--delimiter)"},
        {"a.tsv", "text,label\na,b\n", "'text,label'; if columns are separated by commas, set delimiter"},
        {"b.csv", "\"text\";\"label\"\na;b\n", "line 1: there is text after a closing quote; if columns are "
         "separated by the character ';', set delimiter"},
        {"b.tsv", "text\tlabel\n\"Good\" is the word\tpos\n", "line 2: there is text after a closing quote; "
         "write a quote within a quoted field twice, or, if quotes are ordinary characters, set unquoted "
         "(--quote none)"},
        {"c.tsv", "text\tlabel\n\"Good\tpos\n",
         "is not closed before the end of the file; if quotes are ordinary characters, set unquoted"}};
    for (int k = 0; k < TEST_COUNT(bad); k++) {
        CHECK(!table(ctx, bad[k].name, bad[k].text, strlen(bad[k].text), NULL, NULL, 0));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, bad[k].error);
    }
    static const char glue[] = "text\tlabel\n\"Good\" is the word\tpos\n\"open\t\"neg\"\n";
    tt_table_options o = tt_table_options_default();
    CHECK(!o.unquoted);
    o.unquoted = true;
    const char *path = test_write(test_path(test_folder(), "g.tsv"), glue, sizeof glue - 1);
    d = tt_dataset_table(ctx, path, NULL, NULL, 0, &o);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 2 && row_is(d, 0, "\"Good\" is the word", 1) && row_is(d, 1, "\"open", 0));
    CHECK(strcmp(tt_dataset_class_name(d, 0), "\"neg\"") == 0);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

/* Classes are numbered by value if all labels are numbers, otherwise in byte order. */
TEST(labels_that_are_numbers)
{
    static const struct { const char *rows, *names; } of[] = {
        {"a\t10\nb\t-1\nc\t2\nd\t0\ne\t1\nf\t10\n", "-1 0 1 2 10 "},
        {"a\t1.5\nb\t-10\nc\t+2\nd\t1.25\ne\t10.\nf\t10.\n", "-10 1.25 1.5 +2 10. "},
        {"a\t01\nb\t1\nc\t0\nd\t-0\n", "-0 0 01 1 "}, /* equal numbers are sorted by bytes */
        {"a\t10\nb\t9\nc\tx\n", "10 9 x "},
        {"a\t10\nb\t9\nc\t9a\n", "10 9 9a "},
        {"a\t10\nb\t9\nc\t-\n", "- 10 9 "},
        {"a\t10\nb\t9\nc\t1e1\n", "10 1e1 9 "},
        {"a\t10\nb\t9\nc\t.5\n", ".5 10 9 "}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    for (int k = 0; k < TEST_COUNT(of); k++) {
        char text[200], names[100] = "";
        int64_t counts[5], all = 0;
        snprintf(text, sizeof text, "text\tlabel\n%s", of[k].rows);
        tt_dataset *d = table(ctx, "numbers.tsv", text, strlen(text), NULL, NULL, 0);
        REQUIRE(d);
        for (int c = 0; c < tt_dataset_classes(d); c++)
            strcat(strcat(names, tt_dataset_class_name(d, c)), " ");
        if (strcmp(names, of[k].names) != 0) { printf("%s\n", names); CHECK(!"in this order"); }
        const char *sorted[5];
        const int classes = tt_dataset_classes(d);
        for (int c = 0; c < classes; c++) sorted[c] = tt_dataset_class_name(d, classes - 1 - c);
        tt_sort_class_names(sorted, classes);
        for (int c = 0; c < classes; c++) CHECK(sorted[c] == tt_dataset_class_name(d, c));
        for (int i = 0; i < tt_dataset_count(d); i++) { /* each text keeps its label */
            const char letter[] = {'\n', *tt_dataset_text(d, i, NULL), '\t', 0};
            const char *row = strstr(text, letter) + 3;
            const char *name = tt_dataset_class_name(d, tt_dataset_label(d, i));
            CHECK(strncmp(row, name, strlen(name)) == 0 && row[strlen(name)] == '\n');
        }
        tt_dataset_counts(d, counts);
        for (int c = 0; c < tt_dataset_classes(d); c++) all += counts[c];
        CHECK(all == tt_dataset_count(d) && counts[4 % tt_dataset_classes(d)] == (k < 2 ? 2 : 1));
        tt_dataset_free(d);
    }
    TEST_CLOSE(ctx, &a);
}

/* Rows of a table are for validation if their split has one of four names. An unknown split is an error. */
TEST(table_with_validation_rows)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static const char *const wanted[] = {"validation", "valid", "val", "dev"};
    static const char *const classes[] = {"x", "y"};
    static const char whole[] =
        "text,label,split\na,x,train\nb,y,validation\nc,y,train\nd,x,test\ne,x,dev\nf,y,val\ng,x,valid\n";
    static const char none[] = "text,label,split\na,x,train\nb,y,test\n";
    static const char plain[] = "text,label\na,x\nb,y\nc,x\n";
    static const char other[] = "text,label,split\na,x,train\nb,y,unsupervised\nc,x,Train\n";
    for (int k = 0; k < TEST_COUNT(wanted); k++) {
        tt_dataset *d = table(ctx, "w.csv", whole, sizeof whole - 1, wanted[k], classes, 2);
        REQUIRE(d);
        CHECK(tt_dataset_count(d) == 4 && tt_dataset_classes(d) == 2);
        CHECK(row_is(d, 0, "b", 1) && row_is(d, 1, "e", 0) && row_is(d, 2, "f", 1) && row_is(d, 3, "g", 0));
        tt_dataset_free(d);
        /* Without validation rows the dataset is empty, and no loader takes it. */
        for (int without = 0; without < 2; without++) {
            const char *text = without ? plain : none;
            d = table(ctx, "n.csv", text, strlen(text), wanted[k], k ? NULL : classes, k ? 0 : 2);
            REQUIRE(d);
            CHECK(tt_dataset_count(d) == 0 && !tt_dataset_text(d, 0, NULL) && tt_dataset_label(d, 0) == -1);
            tt_tokenizer *tokens = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
            CHECK(tokens && !tt_loader_new(ctx, d, tokens, NULL));
            CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the dataset is empty");
            CHECK(!tt_dataset_split(d, 1));
            tt_tokenizer_free(tokens);
            tt_dataset_free(d);
        }
    }
    static const char train_only[] = "text,label,split\na,x,train\n";
    tt_dataset *tests = table(ctx, "t.csv", train_only, sizeof train_only - 1, "test", NULL, 0);
    CHECK(tests && tt_dataset_count(tests) == 0);
    tt_dataset_free(tests);
    for (int part = 0; part < 3; part++) {
        static const char *const splits[] = {"train", "test", "dev"};
        CHECK(!table(ctx, "o.csv", other, sizeof other - 1, splits[part], NULL, 0));
        CHECK_ERROR(ctx, TT_ERR_FORMAT, "line 3: the split is 'unsupervised'; expected train, validation (or "
                    "valid, val, dev) or test");
    }
    /* The rows of a split with another name can be asked for by that name. */
    tt_dataset *d = table(ctx, "o.csv", other, sizeof other - 1, "unsupervised", NULL, 0);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 1 && row_is(d, 0, "b", 0));
    tt_dataset_free(d);
    CHECK(!table(ctx, "o.csv", other, sizeof other - 1, "unsuper", NULL, 0));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "no row whose split is 'unsuper'");
    TEST_CLOSE(ctx, &a);
}

TEST(table_options)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static const char text[] = "id;review;text;stars;part\n1;\"so; so\";no;3;train\n2;good, cheap;no;5;dev\n";
    const char *path = test_write(test_path(test_folder(), "a.csv"), text, sizeof text - 1);
    tt_table_options o = tt_table_options_default();
    CHECK(!o.text_column && !o.label_column && strcmp(o.pair_column, "text_pair") == 0);
    CHECK(strcmp(o.split_column, "split") == 0 && !o.delimiter && o.task == TT_TASK_CLASS);
    o.text_column = "review", o.label_column = "stars", o.split_column = "part", o.delimiter = ';';
    tt_dataset *d = tt_dataset_table(ctx, path, NULL, NULL, 0, &o);
    tt_dataset *e = tt_dataset_table(ctx, path, "val", NULL, 0, &o);
    REQUIRE(d && e);
    CHECK(tt_dataset_count(d) == 2 && row_is(d, 0, "so; so", 0) && row_is(d, 1, "good, cheap", 1));
    CHECK(strcmp(tt_dataset_class_name(d, 1), "5") == 0);
    CHECK(tt_dataset_count(e) == 1 && row_is(e, 0, "good, cheap", 0));
    tt_dataset_free(d);
    tt_dataset_free(e);
    o.label_column = "rating";
    CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, &o));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "none of the header's 5 columns, separated by the character ';', is "
                "named 'rating'; they are 'id', 'review', 'text', 'stars', 'part'");
    o.delimiter = 0;
    CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, &o));
    CHECK_ERROR(ctx, TT_ERR_FORMAT, "none of the header's 1 columns, separated by commas, is named 'review'; "
                "they are 'id;review;text;stars;part'");
    for (const char *bad = "\"\n\r\xE2"; *bad; bad++) {
        o.delimiter = *bad;
        CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, &o));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "table options: the delimiter is the byte");
    }
    o = tt_table_options_default();
    o.label_column = "text";
    CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, &o));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "'text', 'text', 'split' and 'text_pair'; expected different "
                "names");
    o.label_column = NULL, o.split_column = NULL;
    CHECK(!tt_dataset_table(ctx, path, NULL, NULL, 0, &o));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "'text', 'label', 'NULL' and 'text_pair'");
    TEST_CLOSE(ctx, &a);
}

/* Without a split column, "train" and "test" divide the rows: "test" has a tenth of each class, "train" all
   other rows. */
TEST(table_without_split_is_divided)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char csv[4096] = "text,label\n", row[32];
    int seen[60] = {0}, tests[2] = {0, 0};
    for (int i = 0; i < 60; i++) {
        snprintf(row, sizeof row, "text %d,%s\n", i, i % 3 ? "a" : "b");
        strcat(csv, row);
    }
    for (int part = 0; part < 2; part++)
        for (int again = 0; again < 2; again++) {
            tt_dataset *d = table(ctx, "whole.csv", csv, strlen(csv), part ? "test" : "train", NULL, 0);
            REQUIRE(d);
            CHECK(tt_dataset_count(d) == (part ? 6 : 54) && tt_dataset_classes(d) == 2);
            for (int64_t i = 0; i < tt_dataset_count(d); i++) {
                int k = atoi(tt_dataset_text(d, i, NULL) + 5), label = tt_dataset_label(d, i);
                CHECK(label == (k % 3 == 0));
                seen[k] += part ? 100 : 1;
                tests[label] += part;
            }
            tt_dataset_free(d);
        }
    for (int i = 0; i < 60; i++) CHECK(seen[i] == 2 || seen[i] == 200);
    CHECK(tests[0] == 8 && tests[1] == 4);
    TEST_CLOSE(ctx, &a);
}

static void make_imdb(char folder[600])
{
    char path[800], text[64];
    snprintf(folder, 600, "%.500s", test_folder());
    for (int s = 0; s < 2; s++) {
        snprintf(path, sizeof path, "%s/%s", folder, s ? "test" : "train");
        mkdir(path, 0777);
        for (int c = 0; c < 2; c++) {
            snprintf(path, sizeof path, "%s/%s/%s", folder, s ? "test" : "train", c ? "pos" : "neg");
            mkdir(path, 0777);
            for (int i = 0; i < 12; i++) {
                snprintf(path, sizeof path, "%s/%s/%s/%d_%d.txt", folder, s ? "test" : "train",
                         c ? "pos" : "neg", i, c ? 7 + i % 4 : 1 + i % 4);
                snprintf(text, sizeof text, "%s %s %d", s ? "test" : "train", c ? "good" : "bad", i);
                test_write(path, text, strlen(text));
            }
        }
    }
    snprintf(path, sizeof path, "%s/train/neg/.DS_Store", folder);
    test_write(path, "x", 1);
}

TEST(dataset_imdb)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600], path[800], why[DATASET_WHY] = "";
    make_imdb(folder);
    tt_dataset *d = imdb_open(ctx, folder, "train", 0, why);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 24 && tt_dataset_classes(d) == 2);
    CHECK(strcmp(tt_dataset_class_name(d, 0), "neg") == 0 && strcmp(tt_dataset_class_name(d, 1), "pos") == 0);
    /* Files are read in the order of their names: 0_, 10_, 11_, 1_. */
    CHECK(row_is(d, 0, "train bad 0", 0) && row_is(d, 1, "train bad 10", 0) &&
          row_is(d, 3, "train bad 1", 0) && row_is(d, 12, "train good 0", 1));
    tt_dataset_free(d);
    d = imdb_open(ctx, folder, "test", 8, why);
    tt_dataset *e = imdb_open(ctx, folder, "test", 8, why);
    REQUIRE(d && e);
    CHECK(tt_dataset_count(d) == 8);
    for (int i = 0; i < 8; i++) {
        CHECK(tt_dataset_label(d, i) == i / 4 &&
              strncmp(tt_dataset_text(d, i, NULL), i < 4 ? "test bad" : "test good", 8) == 0);
        CHECK(strcmp(tt_dataset_text(d, i, NULL), tt_dataset_text(e, i, NULL)) == 0);
        CHECK(i == 0 || strcmp(tt_dataset_text(d, i, NULL), tt_dataset_text(d, i - 1, NULL)) != 0);
    }
    tt_dataset_free(e);
    int differ = 0;
    for (uint64_t seed = 2; seed < 6; seed++) { /* the choice depends on the seed */
        test_allocator b;
        tt_context_options o = test_options(&b);
        o.seed = seed;
        tt_context *other = tt_open(&o);
        e = imdb_open(other, folder, "test", 8, why);
        for (int i = 0; e && i < 8; i++)
            differ += strcmp(tt_dataset_text(d, i, NULL), tt_dataset_text(e, i, NULL)) != 0;
        tt_dataset_free(e);
        TEST_CLOSE(other, &b);
    }
    CHECK(differ > 0);
    tt_dataset_free(d);
    CHECK_WHY(!imdb_open(ctx, folder, "train", 7, why), "use an even number");
    CHECK(!imdb_open(ctx, folder, "train", -2, why));
    CHECK_WHY(!imdb_open(ctx, folder, "train" , 26, why), "it holds only 12: use a limit of at most 24");
    CHECK_WHY(!imdb_open(ctx, folder, "unsup", 0, why), "no split 'unsup'");
    CHECK_WHY(!imdb_open(ctx, "/nonexistent", "train", 0, why),
              "cannot list the folder '/nonexistent/train/neg'");
    snprintf(path, sizeof path, "%s/train/pos/12_3.txt", folder);
    test_write(path, "x", 1);
    CHECK_WHY(!imdb_open(ctx, folder, "train", 0, why),
              "train/pos/12_3.txt' is not named NUMBER_RATING.txt with a rating from 7 to 10");
    remove(path);
    snprintf(path, sizeof path, "%s/train/pos/100_10.txt", folder);
    char *large = (char *)calloc(1, (1 << 20) + 1);
    CHECK_WHY(!imdb_open(ctx, test_write(path, large, (1 << 20) + 1) ? folder : "", "train", 0, why),
              "100_10.txt' has 1048577 bytes");
    free(large);
    remove(path);
    for (int i = 0; i < 12; i++) {
        snprintf(path, sizeof path, "%s/test/neg/%d_%d.txt", folder, i, 1 + i % 4);
        remove(path);
    }
    CHECK_WHY(!imdb_open(ctx, folder, "test", 0, why), "test/neg' holds no NUMBER_RATING.txt");
    TEST_CLOSE(ctx, &a);
}

/* Each call of the C library and each allocation fails once: the error names the file and the reason. */
TEST(imdb_faults)
{
    static const struct { char kind; const char *says; } faults[] = {
        {'m', "out of memory"}, {'o', "cannot open '"}, {'z', "cannot open '"}, {'r', "cannot read '"},
        {'c', "ends at byte 0, but was longer when it was opened"}, {'l', "cannot list the folder '"},
        {'n', "cannot list the folder '"}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600], why[DATASET_WHY];
    make_imdb(folder);
    size_t before = tt_allocated_bytes(ctx);
    for (int k = 0; k < TEST_COUNT(faults); k++) {
        bool done = false;
        for (long at = 1; !done && at < 200; at++) {
            memset(why, 0, sizeof why);
            reader_faults.fail = faults[k].kind, reader_faults.at = at, reader_faults.calls = 0;
            tt_dataset *d = imdb_open(ctx, folder, "train", 8, why);
            done = reader_faults.calls < at;
            reader_faults.fail = 0;
            CHECK(done == (d != NULL));
            if (!d) CHECK(strstr(why, faults[k].says) && (faults[k].kind == 'm' || strstr(why, folder)));
            if (!d && !strchr("mc", faults[k].kind)) CHECK(strstr(why, strerror(EIO)));
            tt_dataset_free(d);
            CHECK(tt_allocated_bytes(ctx) == before);
        }
        CHECK(done);
    }
    for (long n = 1, done = 0; !done; n++) { /* now allocations of the library fail */
        a.failed = false;
        a.fail_at = a.calls + n;
        tt_dataset *d = imdb_open(ctx, folder, "test", 8, why);
        CHECK((d != NULL) == !a.failed);
        if (!d) CHECK_WHY(tt_error_code(ctx) == TT_ERR_MEMORY, "memory");
        done = d != NULL;
        tt_dataset_free(d);
        CHECK(tt_allocated_bytes(ctx) == before && n < 100);
    }
    char path[800];
    /* Puts a folder in place of a review. */
    snprintf(path, sizeof path, "%s/train/pos/3_10.txt", folder);
    CHECK(remove(path) == 0 && mkdir(path, 0777) == 0);
    CHECK_WHY(!imdb_open(ctx, folder, "train", 0, why), "pos/3_10.txt' is not a regular file");
    TEST_CLOSE(ctx, &a);
}

TEST(imdb_encodings)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600], path[800], why[DATASET_WHY];
    make_imdb(folder);
    snprintf(path, sizeof path, "%s/train/neg/0_1.txt", folder);
    test_write(path, "\xEF\xBB\xBFgood", 7);
    tt_dataset *d = imdb_open(ctx, folder, "train", 0, why);
    REQUIRE(d);
    CHECK(row_is(d, 0, "good", 0));
    tt_dataset_free(d);
    test_write(path, "caf\xE9", 4);
    CHECK_WHY(!imdb_open(ctx, folder, "train", 0, why),
              "train/neg/0_1.txt', line 1, byte 3: the byte 0xe9 is not valid UTF-8");
    TEST_CLOSE(ctx, &a);
}

TEST(dataset_texts)
{
    static const char *const names[] = {"no", "yes"}, *const wrong[] = {"no", "\xff"};
    tt_text texts[] = {{.text = "a\0b", .bytes = 3, .label = 1}, {.text = NULL},
                       {.text = "longer", .bytes = 4, .label = 1}, {.text = "d", .bytes = 1}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    size_t bytes;
    tt_dataset *d = tt_dataset_texts(ctx, TT_TASK_CLASS, texts, 4, names, 2);
    REQUIRE(d);
    CHECK(tt_dataset_count(d) == 4 && tt_dataset_classes(d) == 2);
    CHECK(memcmp(tt_dataset_text(d, 0, &bytes), "a\0b", 4) == 0 && bytes == 3 && tt_dataset_label(d, 0) == 1);
    CHECK(strcmp(tt_dataset_text(d, 1, &bytes), "") == 0 && bytes == 0);
    CHECK(row_is(d, 2, "long", 1) && row_is(d, 3, "d", 0));
    CHECK(strcmp(tt_dataset_class_name(d, 1), "yes") == 0);
    tt_dataset *part = tt_dataset_split(d, 2); /* the split takes one text of each class */
    REQUIRE(part);
    CHECK(tt_dataset_label(part, 0) != tt_dataset_label(part, 1) && tt_dataset_count(d) == 2);
    tt_dataset_free(part);
    tt_dataset_free(d);
    CHECK(!tt_dataset_texts(ctx, TT_TASK_CLASS, texts, 0, names, 2) &&
          !tt_dataset_texts(ctx, TT_TASK_CLASS, texts, (int64_t)INT_MAX + 1, names, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: there are 2147483648 texts of 2 classes");
    CHECK(!tt_dataset_texts(ctx, TT_TASK_CLASS, NULL, 4, NULL, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "4 texts (NULL) of 2 classes (NULL)");
    CHECK(!tt_dataset_texts(ctx, TT_TASK_CLASS, texts, 4, names, 1));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "text 0 has label 1, but labels must be 0 to 0");
    CHECK(!tt_dataset_texts(ctx, TT_TASK_CLASS, texts, 4, wrong, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "is followed by the byte 0xff");
    texts[1].bytes = 1;
    CHECK(!tt_dataset_texts(ctx, TT_TASK_CLASS, texts, 4, names, 2));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "tt_dataset_texts: text 1 is NULL");
    TEST_CLOSE(ctx, &a);
}
