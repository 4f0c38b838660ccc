# Tests. Each test program and each check writes a log, B/NAME.log (see run.sh).

TESTS    ?= $(wildcard tests/test_*.c)
CHECKS   ?= $(wildcard tests/check_*.py)
PROGRAMS := $(TESTS:tests/%.c=$(B)/%)
# Programs are optimised as follows, unless the caller gives CFLAGS. Without optimisation, code other than
# kernels compiles in half of the time of -O1. Only the tests named here run so long that optimising them
# pays. WHOLE, which tests the kernels, is built from one file, as users build their programs.
WHOLE        ?= test_ops
OPTIMIZED_O2 := test_planner
OPTIMIZED_O1 := test_lm test_parallel test_ranks test_tensor test_trainer
optimized    = $(if $(filter $(OPTIMIZED_O2),$*),-O2,$(if $(filter $(OPTIMIZED_O1),$*),-O1,-O0))
TEST_CFLAGS  = $(if $(filter file,$(origin CFLAGS)),$(optimized),$(CFLAGS)) $(SHARED)
$(PROGRAMS:%=%.o): $(B)/%.o: tests/%.c tinytrain.h $(B)/flags
	$(call compile,$(if $(filter $(WHOLE),$*),$(CFLAGS),$(TEST_CFLAGS)) -Werror)
$(PROGRAMS): $(B)/%: $(B)/%.o
	$(link)
$(filter-out $(WHOLE:%=$(B)/%),$(PROGRAMS)): $(KERNELS)

# The programs that check_mpi.py starts in several processes, if MPI is installed.
HAVE_MPI := $(if $(MPI),,$(if $(filter %check_mpi.py,$(CHECKS)),$(shell command -v $(MPICC))))
mpicc     = OMPI_CC='$(1)' MPICH_CC='$(1)' $(MPICC)
mpi_program = $(call mpicc,$(CC)) $(CPPFLAGS) $(STRICT) $(1) $(TEST_CFLAGS) -I$(JOINED_IN) -I. $< \
              $(filter %.o,$^) -o $@ $(LINKED) $(LDFLAGS) $(LIBS)
MPI_NEEDS := $(wildcard examples/*.h tests/test*.h) tests/test_parallel.c tests/trainer/embedder.h tinytrain.h $(B)/flags
$(B)/mpi_ranks: tests/mpi.c $(MPI_NEEDS) $(KERNELS)
	$(mpi_program)
$(B)/mpi_vit_l16 $(B)/mpi_gpt: $(B)/mpi_%: examples/%.c $(MPI_NEEDS) $(KERNELS)
	$(call mpi_program,-DTINYTRAIN_MPI)
$(EMU)/mpi_ranks: tests/mpi.c $(MPI_NEEDS) $(call emu_with,tinytrain_cuda,plain) $(EMU_SHARED)
	$(call mpicc,$(CC)) $(CPPFLAGS) $(STRICT) -I$(JOINED_IN) $(EMU_C) $(SHARED) -O0 -g1 -c $< -o $@.o
	$(call mpicc,$(CXX)) $@.o $(filter %.o,$^) -o $@ $(LINKED) $(LIBS)
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

#> make check        run the tests, but not on the emulator of CUDA: about 1.5 minutes instead of 5, on two
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
	@$(MAKE) --no-print-directory test EMU_BUILDS= TEST_TIME=', about a minute and a half on two cores'
test: start $(LOGS)
	@sh tests/run.sh total $(LOGS)
export TEST_PROGRESS := $(B)/progress
$(LOGS): | start
start:
	@mkdir -p $(B)
	@sh tests/run.sh start $(TEST_PROGRESS) $(words $(LOGS)) '$(TEST_TIME)'

#> make case C='attention*'  run the cases of tests/test_ops.c of these names, on the CPU and the emulator
C ?= linear
case: $(B)/test_ops $(EMU)/test_ops.plain
	TT_TEST_CASE='$(C)' $(B)/test_ops 'reference_*' 'gradient_*'
	TT_TEST_CASE='$(C)' TINYTRAIN_DEVICE=cuda $(EMU)/test_ops.plain reference_cuda gradient_cuda

#> make coverage     count the lines of tinytrain.h that the tests run; fails below 90% (GCOV, gcc)
# Adds up gcc's line counts of all programs; a line that one variant for an instruction set ran counts as run.
# covered: counts the lines of tests that ran in B, with --coverage in CFLAGS.
GCOV ?= gcov
coverage:
	@rm -f $(B)/coverage/*.gcda
	@$(MAKE) --no-print-directory test PRODUCTS=1 B=$(B)/coverage \
	    CC='$(if $(filter default,$(origin CC)),gcc,$(CC))' CFLAGS='-O1 --coverage $(COVERAGE_FLAGS)' EMU_BUILDS=
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
