# tinytrain. `make help` lists what can be made; GNU make, a C99 compiler, nothing else.
# CC and CFLAGS are the caller's (make test CC=clang CFLAGS='-O1 -fsanitize=address'); what is built lies below B.

CFLAGS ?= -O2
PREFIX ?= /usr/local
GCOV   ?= gcov
B      ?= build
# Python for the checks and the peers: the virtual environment of `make bench-peers` once it is there.
PYTHON ?= $(if $(wildcard build/venv/bin/python),build/venv/bin/python,python3)

STRICT := -std=c99 -Wall -Wextra -Wpedantic
LIBS   := -lm -lpthread

TESTS    ?= $(wildcard tests/test_*.c)
CHECKS   ?= $(wildcard tests/check_*.py)
EXAMPLES := $(patsubst examples/%.c,$(B)/%,$(wildcard examples/*.c))
BENCHES  := $(patsubst bench/%.c,$(B)/%,$(wildcard bench/*.c))
MEASURED := $(addprefix $(B)/,gemm attention rows step tokenize images)
# make bench-peers LLMC=dir, a checkout of github.com/karpathy/llm.c: its CPU program too, with the flags of its Makefile.
LLMC_FLAGS ?= -Ofast -march=native -fopenmp -DOMP
PROGRAMS := $(patsubst tests/%.c,$(B)/%,$(TESTS))
LOGS     := $(addsuffix .log,$(PROGRAMS)) $(if $(T),,$(CHECKS:tests/%.py=$(B)/%.log))

# As many jobs as processors, unless the caller says how many.
ifeq ($(MAKELEVEL)$(filter -j% --jobs% --jobserver%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
endif
MAKEFLAGS += --no-builtin-rules

help:
	@echo 'make demo         build examples/distilbert_imdb.c and train a small model on the reviews beside it'
	@echo 'make examples     build the examples, as $(B)/NAME'
	@echo "make test         build and run all tests; T='name*' runs those, TESTS=tests/test_x.c that program"
	@echo 'make coverage     lines of tinytrain.h that the tests run; fails below 90% (GCOV, gcc)'
	@echo 'make bench        build the benchmarks, as $(B)/NAME, and run those that need no data; A=--json prints one object a line'
	@echo 'make bench-peers  virtual environment build/venv with PyTorch and transformers from PyPI, and programs to compare with;'
	@echo '                  LLMC=dir: also those of llm.c, from a checkout'
	@echo 'make bench-programs  build what those comparisons run here, without the environment'
	@echo 'make install      header and pkg-config file, below PREFIX ($(PREFIX)) and DESTDIR'
	@echo 'make clean        remove $(B)'
	@echo "Variables: CC ($(CC)), CFLAGS ($(CFLAGS)), B, PYTHON, RUN='qemu-aarch64 -L /usr/aarch64-linux-gnu' before each test program"

demo: $(B)/distilbert_imdb
	rm -rf '$(B)/demo'
	$(B)/distilbert_imdb --out '$(B)/demo'

examples: $(EXAMPLES)

# Rebuilds all when compiler or flags change.
$(B)/flags: FORCE
	@mkdir -p $(B)
	@echo '$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS)' | cmp -s - $@ || echo '$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS)' > $@

$(EXAMPLES): $(B)/%: examples/%.c tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(CFLAGS) $(STRICT) -I. $< -o $@ $(LDFLAGS) $(LIBS)

$(BENCHES): $(B)/%: bench/%.c bench/bench.h tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(CFLAGS) $(STRICT) -I. $< -o $@ $(LDFLAGS) $(LIBS)

$(B)/gpt2_step: bench/peers/gpt2_step.c bench/bench.h tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(CFLAGS) $(STRICT) -I. $< -o $@ $(LDFLAGS) $(LIBS)

$(B)/llmc: bench/peers/llmc.c $(or $(wildcard $(LLMC)/train_gpt2.c),FORCE) $(B)/flags
	@[ -f '$(LLMC)/train_gpt2.c' ] || { echo "LLMC='$(LLMC)': there is no train_gpt2.c; LLMC=dir names a checkout of github.com/karpathy/llm.c" >&2; exit 1; }
	$(CC) $(STRICT) $(LLMC_FLAGS) -isystem '$(LLMC)' $< -o $@ $(LIBS)

$(PROGRAMS): $(B)/%: tests/%.c tests/test.h tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(CFLAGS) $(STRICT) -Werror -I. $< -o $@ $(LDFLAGS) $(LIBS)

# RUN stands before a test program's name: an emulator, for what another machine's compiler built.
# tests/run.sh shows each program's output when it has ended, and at last one line: N passed, N failed
$(addsuffix .log,$(PROGRAMS)): $(B)/%.log: $(B)/% FORCE
	@sh tests/run.sh run $@ $(RUN) $< $(foreach t,$(T),'$(t)')

# Checks that need Python: the README's against the built examples, and whatever else tests/check_*.py holds.
$(B)/check_%.log: tests/check_%.py $(EXAMPLES) FORCE
	@if $(PYTHON) -c '' 2>/dev/null; then B=$(B) CC='$(CC)' sh tests/run.sh run $@ $(PYTHON) $<; \
	else echo 'skip $(<:tests/%.py=%): $(PYTHON) is not there' > $@; echo '0 passed, 0 failed' >> $@; cat $@ | sed '$$d'; fi

test: $(LOGS)
	@sh tests/run.sh total $(LOGS)

# gcc's line counts of all programs added up; a line that one instruction set ran counts as run.
coverage: FORCE
	@rm -f $(B)/coverage/*.gcda
	@$(MAKE) test B=$(B)/coverage CC='$(if $(filter default,$(origin CC)),gcc,$(CC))' CFLAGS='-O1 --coverage $(COVERAGE_FLAGS)'
	@for f in $(B)/coverage/*.gcda; do $(GCOV) -t -o $(B)/coverage $$f; done | sh tests/run.sh coverage tinytrain.h 90 $(B)/coverage/not_run.txt

bench: $(BENCHES)
	@for b in $(MEASURED); do echo "== $$b" >&2; $$b $(A) || exit 1; done

bench-programs: $(BENCHES) $(B)/gpt2_step $(B)/distilbert_imdb

bench-peers: bench-programs $(if $(LLMC),$(B)/llmc)
	python3 -m venv build/venv
	build/venv/bin/pip install --quiet torch transformers safetensors numpy
	build/venv/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'

VERSION = $(shell sed -n 's/^\#define TT_VERSION "\(.*\)"/\1/p' tinytrain.h)
install:
	install -d '$(DESTDIR)$(PREFIX)/include' '$(DESTDIR)$(PREFIX)/share/pkgconfig'
	install -m 644 tinytrain.h '$(DESTDIR)$(PREFIX)/include/'
	printf '%s\n' 'prefix=$(PREFIX)' 'Name: tinytrain' 'Description: trains transformers from C' 'Version: $(VERSION)' \
	    'Cflags: -I$${prefix}/include' 'Libs: $(LIBS)' > '$(DESTDIR)$(PREFIX)/share/pkgconfig/tinytrain.pc'

clean:
	rm -rf '$(B)'

FORCE:
.DELETE_ON_ERROR:
.PHONY: help demo examples test coverage bench bench-programs bench-peers install clean FORCE
