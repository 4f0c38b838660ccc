# Tests. Each test program and each check writes a log, B/NAME.log (see run.sh).

# test_cuda and test_peers need a GPU or the emulator of CUDA.
TESTS    ?= $(filter-out tests/test_cuda.c tests/test_peers.c,$(wildcard tests/test_*.c))
CHECKS   ?= $(wildcard tests/check_*.py)
PROGRAMS := $(TESTS:tests/%.c=$(B)/%)
# Test programs call private functions of part.o, but for OWN, which change constants of the library, so that
# each compiles a library of its own. Unless the caller gives CFLAGS, tests themselves are not optimised, and
# part.o is. WHOLE, which tests the kernels, is built from one file, as users build their programs.
OWN          := test_ops test_cuda test_peers
WHOLE        ?= test_ops
TEST_CFLAGS  := $(if $(filter file,$(origin CFLAGS)),-O0,$(CFLAGS)) $(SHARED)
OWN_PROGRAMS := $(filter $(OWN:%=$(B)/%),$(PROGRAMS))
$(OWN_PROGRAMS:%=%.o): $(B)/%.o: tests/%.c tinytrain.h $(B)/flags
	$(call compile,$(if $(filter $(WHOLE),$*),$(CFLAGS),$(TEST_CFLAGS)) -Werror)
$(patsubst %,%.o,$(filter-out $(OWN_PROGRAMS),$(PROGRAMS))): $(B)/%.o: tests/%.c tinytrain.h $(B)/flags
	$(call compile,$(DECLARED) $(TEST_CFLAGS) -Werror)
$(PROGRAMS): $(B)/%: $(B)/%.o
	$(link)
$(filter-out $(OWN_PROGRAMS),$(PROGRAMS)): $(PART)
$(filter-out $(WHOLE:%=$(B)/%),$(PROGRAMS)): $(KERNELS)
$(patsubst %,$(B)/cuda/%,$(filter-out $(OWN),$(CUDA_TESTS))): $(PART:$(B)/%=$(B)/cuda/%)

# The programs that check_mpi.py starts in several processes, if MPI is installed.
HAVE_MPI := $(if $(MPI),,$(if $(filter %check_mpi.py,$(CHECKS)),$(shell command -v $(MPICC))))
mpicc     = OMPI_CC='$(1)' MPICH_CC='$(1)' $(MPICC)
mpi       = $(call mpicc,$(CC)) $(CPPFLAGS) $(STRICT) -DTINYTRAIN_MPI $(CFLAGS) $(SHARED)
mpi_link  = $(call mpicc,$(1)) $(filter %.o,$^) -o $@ $(LINKED) $(LDFLAGS) $(LIBS)
# Most collectives need several messages of 1,000 bytes.
MPI_PART := -DTT__NET_MESSAGE='((size_t)1000)' -DTINYTRAIN_IMPLEMENTATION -Wno-unused-function
$(B)/mpi_part.o: tinytrain.h $(B)/flags
	$(mpi) $(MPI_PART) $(DEPENDS) -x c -c $(PARTS)/tinytrain.h -o $@
$(B)/mpi_ranks.o: tests/mpi.c tinytrain.h $(B)/flags
	$(mpi) $(DECLARED) -Wno-unused-variable $(DEPENDS) -I. -c $< -o $@
$(B)/mpi_ranks: $(B)/mpi_ranks.o $(PART:$(B)/%=$(B)/mpi_%) $(KERNELS)
	$(call mpi_link,$(CC))
$(B)/mpi_tinytrain.o: tinytrain.h $(B)/flags
	$(mpi) -Wno-unused-function -DTINYTRAIN_IMPLEMENTATION $(DEPENDS) -x c -c $(source) -o $@
$(B)/mpi_vit_l16.o $(B)/mpi_gpt.o: $(B)/mpi_%.o: examples/%.c tinytrain.h $(B)/flags
	$(mpi) -DTT__ELSEWHERE $(DEPENDS) -I$(JOINED_IN) -c $< -o $@
$(B)/mpi_vit_l16 $(B)/mpi_gpt: %: %.o $(B)/mpi_tinytrain.o $(KERNELS)
	$(call mpi_link,$(CC))
$(EMU)/mpi_part.o: tinytrain.h $(B)/flags
	$(mpi) $(MPI_PART) $(EMU_C) $(DEPENDS) -x c -c $(PARTS)/tinytrain.h -o $@
$(EMU)/mpi_ranks.o: tests/mpi.c tinytrain.h $(B)/flags
	$(mpi) $(DECLARED) -Wno-unused-variable $(EMU_C) $(DEPENDS) -c $< -o $@
$(EMU)/mpi_ranks: $(EMU)/mpi_ranks.o $(PART:$(B)/%=$(EMU)/mpi_%) $(call emu_with,tinytrain_cuda,plain) \
                  $(EMU_SHARED)
	$(call mpi_link,$(CXX))
ifneq ($(HAVE_MPI),)
$(B)/check_mpi.log: $(B)/mpi_ranks $(B)/mpi_vit_l16 $(B)/mpi_gpt $(if $(HAVE_EMU),$(EMU)/mpi_ranks)
endif
$(B)/check_bench.log: $(if $(HAVE_EMU),$(EMU)/step.plain)

# RUN precedes a test program's name, for example an emulator for programs of a cross-compiler. run.sh shows
# each program's output when the program has ended, and finally one line: N passed, N failed
patterns = $(foreach t,$(1),'$(t)')
checked  = if $(PYTHON) -c '' 2>/dev/null; then B=$(B) CC='$(CC)' sh tests/run.sh run $@ $(PYTHON) $(1); \
           else sh tests/run.sh skip $@ '$(PYTHON) is not there'; fi
$(PROGRAMS:%=%.log): $(B)/%.log: $(B)/% FORCE
	@sh tests/run.sh run $@ $(RUN) $< $(call patterns,$(T))
$(B)/check_%.log: tests/check_%.py $(EXAMPLES) FORCE
	@$(call checked,$<)

# Tests on a GPU. Most of a test's time goes to the expected results, which the CPU computes. So as many
# processes as there are processors share the tests of ops.
GPU_PARTS_test_ops ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
GPU_LOGS := $(if $(TINYTRAIN_CUDA),$(CUDA_TESTS:%=$(B)/cuda/%.log))
cuda: $(CUDA_TESTS:%=$(B)/cuda/%)
$(B)/cuda/%.log: $(B)/cuda/% FORCE
	@TEST_PARTS=$(GPU_PARTS_$*) sh tests/run.sh run $@ env TINYTRAIN_DEVICE=cuda $< \
	    $(call patterns,$(or $(T),$(CUDA_T_$*)))

#> make check        run the tests, but not on the emulator of CUDA: about 10 minutes instead of 25, on two
#>                   cores
#> make test         build and run all tests; T='name*' runs the tests of these names,
#>                   TESTS=tests/test_x.c the tests of that program;
#>                   RUN='qemu-aarch64 -L /usr/aarch64-linux-gnu' is put before each test program
# The longest tests start first, so that at the end no processor waits for one of them.
ALL_LOGS := $(PROGRAMS:%=%.log) $(EMU_LOGS) $(GPU_LOGS) $(if $(T),,$(CHECKS:tests/%.py=$(B)/%.log))
LONGEST  := $(foreach t,check_mpi test_ops test_planner test_cuda test_peers test_parallel test_trainer, \
            $(filter $(EMU)/$t.%.log $(B)/$t.log,$(ALL_LOGS)))
LOGS     := $(LONGEST) $(filter-out $(LONGEST),$(ALL_LOGS))
check:
	@$(MAKE) --no-print-directory test EMU_BUILDS= TEST_TIME=', about 10 minutes on two cores'
test: start $(LOGS)
	@sh tests/run.sh total $(LOGS)
export TEST_PROGRESS := $(B)/progress
$(LOGS): | start
start:
	@$(PYTHON) -c '' || { echo 'the tests need Python 3' >&2; exit 1; }
	@mkdir -p $(B)
	@sh tests/run.sh start $(TEST_PROGRESS) $(words $(LOGS)) '$(TEST_TIME)'

#> make case C='attention*'  run the cases of tests/test_ops.c of these names, on the CPU and the emulator
C ?= linear
case: $(B)/test_ops $(EMU)/test_ops.plain
	TT_TEST_CASE='$(C)' $(B)/test_ops 'reference_*' 'gradient_*'
	TT_TEST_CASE='$(C)' TINYTRAIN_DEVICE=cuda $(EMU)/test_ops.plain reference_cuda gradient_cuda

#> make coverage     count the lines of tinytrain.h that the tests run; fails below 90% (GCOV, gcc)
# With -O1, gcc counts no run of a line whose code it has merged with other code. Adds up the counts of all
# programs; a line that one variant for an instruction set ran counts as run.
# covered: counts the lines of tests that ran in B, with --coverage in CFLAGS.
GCOV ?= gcov
coverage:
	@rm -f $(B)/coverage/*.gcda
	@$(MAKE) --no-print-directory test PRODUCTS=1 B=$(B)/coverage \
	    CC='$(if $(filter default,$(origin CC)),gcc,$(CC))' CFLAGS='-O0 --coverage $(COVERAGE_FLAGS)' \
	    KERNELS_CFLAGS=-O1 EMU_BUILDS=
	@$(MAKE) --no-print-directory covered B=$(B)/coverage
covered:
	@for f in $(B)/*.gcda; do $(GCOV) -t -o $(B) $$f; done | \
	    sh tests/run.sh coverage tinytrain.h 90 $(B)/not_run.txt

#> make bits         train tiny models with this version and with that of BASE (a commit): bits must be the
#>                   same, and no plan larger
# Compares the bits of losses, parameters and optimizer state.
BASE ?= 703a5d8
BITS := $(B)/bits/$(BASE)
bits: FORCE
	@mkdir -p '$(BITS)'
	@[ -f '$(BITS)/tinytrain.h' ] || git archive '$(BASE)' . ':!tests/golden' | tar -x -C '$(BITS)'
	@B='$(B)' CC='$(CC)' CXX='$(CXX)' CFLAGS='$(CFLAGS)' sh tests/bits.sh '$(BITS)' . $(call patterns,$(T))

.PHONY: check test start case coverage covered bits
