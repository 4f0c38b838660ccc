#> make fuzz         run libFuzzer for SECONDS=60 on each target of tests/fuzz/; FUZZ='table state' names
#>                   the targets
# libFuzzer mutates the files that the library reads (fuzz.h), under clang's sanitizers. The implementation is
# compiled once for all targets.
FUZZ       ?= $(patsubst tests/fuzz/%.dict,%,$(wildcard tests/fuzz/*.dict))
SECONDS    ?= 60
CLANG      ?= clang
FUZZ_LOGS  := $(FUZZ:%=$(B)/fuzz/%.log)
FUZZ_FLAGS := -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
    -fsanitize-ignorelist=tests/fuzz/not_instrumented.txt \
    -fsanitize-coverage-ignorelist=tests/fuzz/not_instrumented.txt \
    -fsanitize-coverage-ignorelist=tests/fuzz/not_traced.txt -DTINYTRAIN_NO_AVX2 -D_GNU_SOURCE \
    $(STRICT) -Werror
FUZZ_NONE  := int LLVMFuzzerTestOneInput(void); int LLVMFuzzerTestOneInput(void) { return 0; }
fuzz: FORCE
	@mkdir -p $(B)/fuzz
	@if echo '$(FUZZ_NONE)' | $(CLANG) -fsanitize=fuzzer,address -x c - -o $(B)/fuzz/none 2> /dev/null; \
	then sh tests/run.sh start $(TEST_PROGRESS) $(words $(FUZZ_LOGS)) ', $(SECONDS) s each'; \
	     $(MAKE) $(FUZZ_LOGS) && sh tests/run.sh total $(FUZZ_LOGS); \
	else echo 'skip fuzz: $(CLANG) has no libFuzzer (Debian: libclang-rt-dev or libclang-rt-14-dev)'; fi
$(B)/fuzz/tinytrain.o: tests/fuzz/fuzz.c $(wildcard tests/fuzz/not_*.txt) tinytrain.h
	$(CLANG) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link -I$(JOINED_IN) -I. -c $< -o $@
$(FUZZ:%=$(B)/fuzz/%): $(B)/fuzz/%: tests/fuzz/%.c $(wildcard tests/fuzz/*.h) $(B)/fuzz/tinytrain.o
	$(CLANG) $(FUZZ_FLAGS) -fsanitize=fuzzer -I$(JOINED_IN) -I. $< $(B)/fuzz/tinytrain.o -o $@ $(LIBS)
$(FUZZ_LOGS): $(B)/fuzz/%.log: $(B)/fuzz/% FORCE
	@TEST_SECONDS=$$(($(SECONDS) + 600)) sh tests/run.sh run $@ sh tests/fuzz/run.sh $< $(SECONDS)

.PHONY: fuzz
