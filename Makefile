# tinytrain. `make help` lists what can be made; GNU make, a C99 compiler, nothing else. CC and CFLAGS are the
# caller's (make test CC=clang CFLAGS='-O1 -fsanitize=address'); what is built lies below B. The emulator of
# CUDA, for tests only, needs the C++ compiler that goes with CC.

CFLAGS ?= -O2
# Of tests, unless the caller gives CFLAGS: without optimisation what is not a kernel compiles in half of the
# time of -O1, which only these take to run. WHOLE, below, is built as users build theirs.
OPTIMIZED_test_planner := -O2
$(foreach t,lm parallel ranks tensor trainer,$(eval OPTIMIZED_test_$(t) := -O1))
TEST_CFLAGS = $(if $(filter file,$(origin CFLAGS)),$(or $(OPTIMIZED_$*),-O0),$(CFLAGS))
PREFIX ?= /usr/local
GCOV   ?= gcov
B      ?= build
# Python for the checks and the peers: the virtual environment of `make bench-peers` once it is there.
PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
VENV   ?= build/venv

# make MPI=1: several processes train together (mpirun). MPICC compiles as CC does, with what MPI needs.
MPICC ?= mpicc
ifneq ($(MPI),)
export OMPI_CC := $(CC)
export MPICH_CC := $(CC)
override CC := $(MPICC)
override CPPFLAGS += -DTINYTRAIN_MPI
endif

STRICT := -std=c99 -Wall -Wextra -Wpedantic
LIBS   := -lm -lpthread

# CUDA code is tested on an emulator, in three builds (tests/cuda_emu/cuda_emu.h), with all tests unless
# TESTS= names some.
ifeq ($(origin EMU_BUILDS)$(origin TESTS),undefinedundefined)
EMU_BUILDS := plain asan trace
TEST_TIME  := $(if $(T),,, about 5 minutes on two cores; make check, without the emulator of CUDA, 1.5)
endif
EMU_TESTS  ?= $(wildcard tests/cuda_emu/*.cu tests/test_*.cu)
ifeq ($(origin CXX),default)
CXX := $(patsubst cc,c++,$(patsubst %gcc,%g++,$(patsubst %clang,%clang++,$(CC))))
endif
# Of tests/NAME.c, those that run with tinytrain_cuda.cu on the emulator too, with TINYTRAIN_DEVICE=cuda.
CUDA_TESTS         ?= test_ops test_models test_lm test_cuda test_peers test_tensor test_pipeline
CUDA_T_test_ops    := reference_cuda gradient_cuda attention_by_warpgroups stochastic_rounding_of_each_isa \
                      pieces_are_updated_as_the_whole cuda_epilogues cuda_tensors_share_launches \
                      cuda_kernels_of_each_dtype cuda_column_sums_of_attention cuda_dropout_kept_for_keys \
                      cuda_dropout_with_norms cuda_programs_with_dropout_and_norms \
                      cuda_backward_by_warpgroups biases_of_attention_cuda cuda_products_of_one_x \
                      matmul_in_tf32 quantize \
                      history_of_fp8_scales matmul_in_fp8 training_in_fp8 parameters_begin_on_the_device \
                      device_described_cuda
CUDA_T_test_tensor := gradients_of_ranks_cuda
CUDA_T_test_pipeline := stages_on_cuda stages_that_are_apart_are_refused
CUDA_T_test_lm     := golden_lm greedy_tokens
CUDA_T_test_models := golden_distilbert golden_vit golden_bf16_true recompute_policies
# Whole models, and runs of a program for each call of CUDA: on a GPU, and in the fastest of the emulator's
# builds.
EMU_CUDA_plain := $(CUDA_TESTS)
EMU_CUDA_asan  := $(filter-out test_models test_lm test_cuda test_tensor,$(CUDA_TESTS))
EMU_CUDA_trace := $(EMU_CUDA_asan)
ifneq ($(EMU_BUILDS),)
HAVE_CXX := $(shell command -v $(firstword $(CXX)))
EMU_LOGS := $(if $(HAVE_CXX),$(foreach b,$(EMU_BUILDS), \
            $(patsubst %.cu,$(B)/cuda_emu/%.$(b).log,$(notdir $(EMU_TESTS))) \
            $(addprefix $(B)/cuda_emu/,$(EMU_CUDA_$(b):%=%.$(b).log))),$(B)/cuda_emu.log)
# Which kernels these ran, as a test of its own where all the tests of ops are among them.
EMU_RAN := $(if $(HAVE_CXX),$(foreach b,$(EMU_BUILDS),$(EMU_CUDA_$(b):%=$(B)/cuda_emu/%.$(b))))
ifeq ($(T)$(RUN)$(filter $(B)/cuda_emu/test_ops.plain,$(EMU_RAN)),$(B)/cuda_emu/test_ops.plain)
EMU_LOGS += $(B)/cuda_emu/all_kernels.log
endif
endif
TESTS    ?= $(wildcard tests/test_*.c)
CHECKS   ?= $(wildcard tests/check_*.py)
EXAMPLES := $(patsubst examples/%.c,$(B)/%,$(wildcard examples/*.c))
BENCHES  := $(patsubst bench/%.c,$(B)/%,$(wildcard bench/*.c))
MEASURED := $(addprefix $(B)/,gemm attention rows step ranks compile tokenize images)
# What make bench-peers has pip install for PyTorch: a requirement and options. PyPI's torch for Linux brings
# CUDA (5.6 GB); PyTorch's own index of CPU builds does not: TORCH='torch --index-url URL'.
TORCH  ?= torch
# make bench-peers LLMC=dir, a checkout of github.com/karpathy/llm.c: its CPU program too, with the flags of
# its Makefile.
LLMC_FLAGS ?= -Ofast -march=native -fopenmp -DOMP
PROGRAMS := $(patsubst tests/%.c,$(B)/%,$(TESTS))
# make cuda: for these GPUs, and PTX for later ones. TINYTRAIN_CUDA=1 make test also runs CUDA_TESTS on a GPU.
CUDA_HOME  ?= /usr/local/cuda
CUDA_WERROR ?= -Werror all-warnings
NVCC       ?= $(CUDA_HOME)/bin/nvcc
CUDA_ARCHS ?= 80 90a 100
CUDA_CODE  ?= $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
              -gencode arch=compute_90,code=compute_90
CUDA_LIBS  := -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcublasLt -lcudart -lstdc++
CUDA_PROGRAMS := $(patsubst examples/%.c,$(B)/cuda/%,$(wildcard examples/*.c)) $(CUDA_TESTS:%=$(B)/cuda/%) \
                 $(B)/cuda/step
# Beside a GPU most of a test's time is the CPU's, which computes what is expected: as many processes as there
# are processors share the tests of ops.
GPU_PARTS_test_ops ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
ifneq ($(TINYTRAIN_CUDA),)
GPU_LOGS := $(CUDA_TESTS:%=$(B)/cuda/%.log)
endif
ALL_LOGS := $(addsuffix .log,$(PROGRAMS)) $(EMU_LOGS) $(GPU_LOGS) $(if $(T),,$(CHECKS:tests/%.py=$(B)/%.log))
# The longest first, so that at the end no processor waits for one of them.
LONGEST  := $(foreach t,check_mpi test_ops test_planner test_cuda test_peers test_parallel test_trainer, \
            $(filter $(B)/cuda_emu/$(t).%.log $(B)/$(t).log,$(ALL_LOGS)))
LOGS     := $(LONGEST) $(filter-out $(LONGEST),$(ALL_LOGS))

# As many jobs as processors, unless the caller says how many.
ifeq ($(MAKELEVEL)$(filter -j% --jobs% --jobserver%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
endif
MAKEFLAGS += --no-builtin-rules

help:
	@echo 'make demo         build examples/distilbert_imdb.c and train a small model on the reviews beside it'
	@echo 'make gpt          build examples/gpt.c and train a small language model on a novel'
	@echo 'make examples     build the examples, as $(B)/NAME'
	@echo 'make check        tests, not on the emulator of CUDA: about 1.5 minutes instead of 5, on two cores'
	@echo "make test         build and run all tests; T='name*' runs those, TESTS=tests/test_x.c that program"
	@echo "make case C='attention*'  such cases of tests/test_ops.c alone, on the CPU and on the emulator"
	@echo 'make coverage     lines of tinytrain.h that the tests run; fails below 90% (GCOV, gcc)'
	@echo 'make bits         tiny models trained by this version and by that of BASE ($(BASE)): the same bits,'
	@echo '                  no larger plan'
	@echo "make fuzz         SECONDS=60 of libFuzzer for each of tests/fuzz/; FUZZ='table state' runs those"
	@echo 'make bench        build the benchmarks, as $(B)/NAME, and run those that need no data;'
	@echo '                  A=--json prints one object a line'
	@echo 'make bench-peers  virtual environment build/venv with PyTorch and transformers from PyPI, and'
	@echo '                  programs to compare with; LLMC=dir: also those of llm.c, from a checkout;'
	@echo '                  TORCH=...: what pip installs as PyTorch (torch)'
	@echo 'make bench-programs  build what those comparisons run here, without the environment'
	@echo 'make cuda         examples, tests and the benchmark of steps for NVIDIA GPUs, as $(B)/cuda/NAME'
	@echo '                  (CUDA_HOME, NVCC, CUDA_ARCHS); TINYTRAIN_CUDA=1 make test runs these tests too'
	@echo 'make examples MPI=1 B=build/mpi'
	@echo '                  for several processes: mpirun -n 4 build/mpi/NAME; MPICC ($(MPICC))'
	@echo 'make install      header, .cu, pkg-config and CMake files, below PREFIX ($(PREFIX)) and DESTDIR'
	@echo 'make clean        remove $(B)'
	@echo "Variables: CC ($(CC)), CFLAGS ($(CFLAGS)), B, PYTHON,"
	@echo "           RUN='qemu-aarch64 -L /usr/aarch64-linux-gnu' before each test program"

demo: $(B)/distilbert_imdb
	rm -rf '$(B)/demo'
	$(B)/distilbert_imdb --out '$(B)/demo'

gpt: $(B)/gpt
	rm -rf '$(B)/gpt_run'
	$(B)/gpt --out '$(B)/gpt_run'

examples: $(EXAMPLES)

# Rebuilds all when compiler or flags change.
$(B)/flags: FORCE
	@mkdir -p $(B)
	@echo '$(CC) $(CXX) $(CPPFLAGS) $(CFLAGS) $(KERNELS_CFLAGS) $(LDFLAGS) $(WHOLE)' | cmp -s - $@ || \
	    echo '$(CC) $(CXX) $(CPPFLAGS) $(CFLAGS) $(KERNELS_CFLAGS) $(LDFLAGS) $(WHOLE)' > $@

# The CPU's kernels, most of a compiler's work, once for all programs (see TT__KERNELS_ONLY in tinytrain.h).
# Only WHOLE, the program that tests them, has all in one file, as users have. Apple's linker does not take
# the first of two definitions: there all programs have all in one file. KERNELS_CFLAGS follow CFLAGS: without
# optimisation the other code compiles in a third of the time, which most tests do not take to run.
WHOLE ?= test_ops
ifneq ($(shell uname -s),Darwin)
SHARED  := -DTT__KERNELS_ELSEWHERE
KERNELS := $(B)/kernels.o
LINKED   = $(KERNELS) -Wl,-z,muldefs
endif
$(B)/kernels.o: tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(CFLAGS) $(KERNELS_CFLAGS) $(STRICT) -DTINYTRAIN_IMPLEMENTATION -DTT__KERNELS_ONLY -I. \
	    -x c -c $< -o $@

# The examples use nothing but the public API: all else is compiled once, too. clang warns of inline functions
# that are unused where they are not in a header, as which it does not take what it compiles.
$(B)/tinytrain.o: tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(CFLAGS) $(STRICT) -Wno-unused-function $(SHARED) -DTINYTRAIN_IMPLEMENTATION -I. \
	    -x c -c $< -o $@
# Where stb_image.h is found, or that it is not: what was built without it is built again once it is there.
$(B)/stb: FORCE
	@mkdir -p $(B)
	@{ echo '#include <stb/stb_image.h>' | $(CC) $(CPPFLAGS) $(CFLAGS) -M -x c - 2> /dev/null | \
	    grep -o '[^ ]*stb_image.h' || echo none; } > $@.now
	@cmp -s $@.now $@ || cp $@.now $@
$(B)/vit_l16.o $(B)/mpi_vit_l16 $(B)/cuda/vit_l16.c.o: $(B)/stb
$(EXAMPLES:%=%.o): $(B)/%.o: examples/%.c $(wildcard examples/*.h) tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(CFLAGS) $(STRICT) -DTT__ELSEWHERE -I. -c $< -o $@
$(EXAMPLES): $(B)/%: $(B)/%.o $(B)/tinytrain.o $(KERNELS)
	$(CC) $(CFLAGS) $< $(B)/tinytrain.o -o $@ $(LINKED) $(LDFLAGS) $(LIBS)

$(BENCHES:%=%.o): $(B)/%.o: bench/%.c bench/bench.h examples/datasets.h tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(CFLAGS) $(STRICT) $(SHARED) -I. -c $< -o $@

$(B)/gpt2_step.o: bench/peers/gpt2_step.c bench/bench.h tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(CFLAGS) $(STRICT) $(SHARED) -I. -c $< -o $@

$(BENCHES) $(B)/gpt2_step $(filter-out $(WHOLE:%=$(B)/%),$(PROGRAMS)): $(B)/%: $(B)/%.o $(KERNELS)
	$(CC) $(CFLAGS) $< -o $@ $(LINKED) $(LDFLAGS) $(LIBS)

# Other libraries' matrix products, where the library is: oneDNN below build/venv, or as OpenBLAS where
# compilers look.
GEMM_PEERS         := $(B)/gemm_openblas $(B)/gemm_onednn
GEMM_openblas      := -DPEER_OPENBLAS -lopenblas
GEMM_onednn        := -isystem $(VENV)/include -L$(VENV)/lib -Wl,-rpath,'$(abspath $(VENV))/lib' -ldnnl
GEMM_NEED_openblas := OpenBLAS (Debian: libopenblas-dev)
GEMM_NEED_onednn   := oneDNN 3 (PyPI: onednn-devel-cpu-gomp, which make bench-peers installs; \
                      Debian: libdnnl-dev, where it is 3)
# The smallest program that compiles and links where the library is: its header alone, or another's, is not
# enough.
GEMM_TRY_openblas  := '\#include <cblas.h>' 'int main(void) { return !openblas_get_config(); }'
GEMM_TRY_onednn    := '\#include <dnnl.h>' '\#if DNNL_VERSION_MAJOR < 3' '\#error it is older' '\#endif' \
                      'int main(void) { return !dnnl_version(); }'
$(GEMM_PEERS): $(B)/gemm_%: bench/peers/gemm.c $(B)/flags
	@printf '%s\n' $(GEMM_TRY_$*) > $@.try.c
	@if $(CC) $(CPPFLAGS) $(CFLAGS) -Werror=implicit-function-declaration $@.try.c -o $@.try \
	    $(LDFLAGS) $(GEMM_$*) > $@.txt 2>&1; then \
	    rm -f $@.left_out; set -x; \
	    $(CC) $(CPPFLAGS) $(CFLAGS) $(STRICT) $< -o $@ $(LDFLAGS) $(GEMM_$*) $(LIBS); \
	else \
	    echo "$@ needs $(GEMM_NEED_$*): $$(grep -m 1 -E 'error|cannot find|undefined' $@.txt)" > $@.left_out; \
	    sed 's/^/left out: /' $@.left_out; \
	fi

$(B)/llmc: bench/peers/llmc.c $(or $(wildcard $(LLMC)/train_gpt2.c),FORCE) $(B)/flags
	@[ -f '$(LLMC)/train_gpt2.c' ] || { \
	    echo "LLMC='$(LLMC)': there is no train_gpt2.c;" \
	        "LLMC=dir names a checkout of github.com/karpathy/llm.c" >&2; \
	    exit 1; \
	}
	$(CC) $(STRICT) $(LLMC_FLAGS) -isystem '$(LLMC)' $< -o $@ $(LIBS)

$(PROGRAMS:%=%.o): $(B)/%.o: tests/%.c $(wildcard tests/test*.h) examples/datasets.h tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(if $(filter $(WHOLE),$*),$(CFLAGS),$(TEST_CFLAGS) $(SHARED)) $(STRICT) -Werror -I. \
	    -c $< -o $@
$(filter $(WHOLE:%=$(B)/%),$(PROGRAMS)): $(B)/%: $(B)/%.o
	$(CC) $(CFLAGS) $< -o $@ $(LDFLAGS) $(LIBS)

# RUN stands before a test program's name: an emulator, for what another machine's compiler built.
# tests/run.sh shows each program's output when it has ended, and at last one line: N passed, N failed
$(addsuffix .log,$(PROGRAMS)): $(B)/%.log: $(B)/% FORCE
	@sh tests/run.sh run $@ $(RUN) $< $(foreach t,$(T),'$(t)')

# What tests/check_mpi.py starts in several processes, where there is an MPI.
HAVE_MPI := $(if $(MPI),,$(if $(filter check_mpi,$(notdir $(CHECKS:.py=))),$(shell command -v $(MPICC))))
$(B)/mpi_ranks: tests/mpi.c tests/test_parallel.c $(wildcard tests/test*.h) tinytrain.h $(KERNELS) $(B)/flags
	OMPI_CC='$(CC)' MPICH_CC='$(CC)' $(MPICC) $(CPPFLAGS) $(TEST_CFLAGS) $(STRICT) $(SHARED) -I. $< -o $@ \
	    $(LINKED) $(LDFLAGS) $(LIBS)
$(B)/mpi_vit_l16 $(B)/mpi_gpt: $(B)/mpi_%: examples/%.c $(wildcard examples/*.h) tinytrain.h $(KERNELS) \
                               $(B)/flags
	OMPI_CC='$(CC)' MPICH_CC='$(CC)' $(MPICC) $(CPPFLAGS) -DTINYTRAIN_MPI $(TEST_CFLAGS) $(STRICT) $(SHARED) \
	    -I. $< -o $@ $(LINKED) $(LDFLAGS) $(LIBS)
ifneq ($(HAVE_MPI),)
$(B)/check_mpi.log: $(B)/mpi_ranks $(B)/mpi_vit_l16 $(B)/mpi_gpt
ifneq ($(and $(HAVE_CXX),$(filter plain,$(EMU_BUILDS))),)
$(B)/check_mpi.log: $(B)/cuda_emu/mpi_ranks
endif
endif

# Checks that need Python: the README's against the built examples, and whatever else tests/check_*.py holds.
$(B)/check_%.log: tests/check_%.py $(EXAMPLES) FORCE
	@if $(PYTHON) -c '' 2>/dev/null; then B=$(B) CC='$(CC)' sh tests/run.sh run $@ $(PYTHON) $<; \
	else sh tests/run.sh skip $@ '$(PYTHON) is not there'; fi

# ---- the emulator. Its runtime is never compiled with -fsanitize=thread: in the trace build it is what that
# option calls.
EMU_STRICT        := -std=c++17 -g1 -Wall -Wextra -Wpedantic -Werror
# Without what takes most of the compiler's time and whose mistakes AddressSanitizer sees when memory is used.
EMU_SANITIZE      := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
                     -fno-sanitize=null,object-size,pointer-overflow,vptr
EMU_PATTERN        = $(shell $(CXX) -ftrivial-auto-var-init=pattern -E -x c++ /dev/null > /dev/null 2>&1 && \
                       echo -ftrivial-auto-var-init=pattern)
# fmaf as an instruction where this CPU has it, with the same bits as the library's function, of which the
# calls take a third of the kernels' time.
EMU_FMA            = $(shell grep -qsw fma /proc/cpuinfo && \
                       $(CXX) -mfma -E -x c++ /dev/null > /dev/null 2>&1 && echo -mfma -ffp-contract=off)
EMU_FLAGS_plain    = -O2 $(EMU_PATTERN) $(EMU_FMA)
EMU_FLAGS_asan     = $(EMU_SANITIZE) $(EMU_FMA)
EMU_FLAGS_trace    = -O1 -fsanitize=thread $(EMU_FMA)
EMU_RUNTIME_plain := -O3
EMU_RUNTIME_asan  := -O2 -fno-omit-frame-pointer -fsanitize=address
EMU_RUNTIME_trace := -O3 -DEMU_TRACE
EMU_LINK_asan     := $(EMU_SANITIZE)
# The C side of a program: the trace build does not watch it, so it has that of the plain one. Of the CPU's
# kernels, the portable ones are enough beside a device's, one object for all builds, with the chunks
# that test_ops makes small: sanitizers see them where the CPU's own tests run.
EMU_C_FLAGS_plain := -O0 -g1
EMU_C_FLAGS_asan  := $(EMU_SANITIZE) -O0 -g1
EMU_C_plain       := plain
EMU_C_asan        := asan
EMU_C_trace       := plain
# Less resident workspace than on a GPU, since the emulator's time goes with the memory that is touched; fewer
# tensors a launch, and fewer blocks, each of which does more.
EMU_DEFINES       := -DTT__CUDA_RESIDENT=0x7f000 -DTT__TENSORS=5 -DTT__PEERS=64 -DTT__SORT_TILES=2 \
                     -DTT__RANKED=512 -DTT__LOSS_BLOCKS=3 -DTT__LOSS_CACHE=20992 -DTT__PROBE_BYTES=8192 \
                     -DTT__CUDA_LOSS_CHUNK=5 -Itests/cuda_emu -I.
EMU_PARTS         := cuda_emu cuda_emu_blas
EMU_PARTS_trace   := cuda_emu_trace
EMU_SOURCES       := $(wildcard tests/cuda_emu/*.h) tests/test_main.h tests/cuda_emu/sample.cu \
                     tinytrain_cuda.cu

ifneq ($(KERNELS),)
EMU_SHARED      := $(B)/cuda_emu/kernels.o
EMU_SHARED_LINK := -Wl,-z,muldefs
endif

define emu_rules
EMU_OBJECTS_$(1) := $(patsubst %,$(B)/cuda_emu/%.$(1).o,$(EMU_PARTS) $(EMU_PARTS_$(1)))
$$(EMU_OBJECTS_$(1)): $(B)/cuda_emu/%.$(1).o: tests/cuda_emu/%.cpp $(wildcard tests/cuda_emu/*.h) $(B)/flags
	@mkdir -p $$(@D)
	$$(CXX) $$(EMU_STRICT) $$(EMU_RUNTIME_$(1)) -c $$< -o $$@
$(B)/cuda_emu/%.$(1): tests/cuda_emu/%.cu $$(EMU_SOURCES) $$(EMU_OBJECTS_$(1)) $(B)/flags
	$$(CXX) $$(EMU_STRICT) $$(EMU_FLAGS_$(1)) -Itests/cuda_emu -I. -x c++ -c $$< -o $$@.o
	$$(CXX) $$(EMU_LINK_$(1)) $$@.o $$(EMU_OBJECTS_$(1)) -o $$@ $$(LIBS)
$(B)/cuda_emu/%.$(1): tests/%.cu tinytrain.h $$(EMU_SOURCES) $$(EMU_OBJECTS_$(1)) $(B)/flags
	$$(CXX) $$(EMU_STRICT) $$(EMU_FLAGS_$(1)) -Itests/cuda_emu -I. -x c++ -c $$< -o $$@.o
	$$(CXX) $$(EMU_LINK_$(1)) $$@.o $$(EMU_OBJECTS_$(1)) -o $$@ $$(LIBS)
$(B)/cuda_emu/%.$(1).log: $(B)/cuda_emu/%.$(1) FORCE
	@sh tests/run.sh run $$@ $$(RUN) $$< $$(foreach t,$$(T),'$$(t)')
$(B)/cuda_emu/tinytrain_cuda.$(1).o: tinytrain_cuda.cu tinytrain.h $(wildcard tests/cuda_emu/*.h) $(B)/flags
	@mkdir -p $$(@D)
	$$(CXX) $$(EMU_STRICT) $$(EMU_FLAGS_$(1)) $$(EMU_DEFINES) -x c++ -c $$< -o $$@
EMU_CUDA_OBJECTS_$(1) := $(B)/cuda_emu/tinytrain_cuda.$(1).o $$(EMU_OBJECTS_$(1))
$(CUDA_TESTS:%=$(B)/cuda_emu/%.$(1)): $(B)/cuda_emu/%.$(1): $(B)/cuda_emu/%.$(EMU_C_$(1)).c.o \
        $$(EMU_CUDA_OBJECTS_$(1)) $$(EMU_SHARED)
	$$(CXX) $$(EMU_LINK_$(1)) $$^ -o $$@ $$(EMU_SHARED_LINK) $$(LIBS)
$(CUDA_TESTS:%=$(B)/cuda_emu/%.$(1).log): $(B)/cuda_emu/%.$(1).log: $(B)/cuda_emu/%.$(1) FORCE
	@rm -f $$<.kernels
	@sh tests/run.sh run $$@ env TINYTRAIN_DEVICE=cuda EMU_KERNELS=$$<.kernels $$(RUN) $$< \
	    $$(foreach t,$$(or $$(T),$$(CUDA_T_$$*)),'$$(t)')
endef
$(foreach b,plain asan trace,$(eval $(call emu_rules,$(b))))
EMU_C := -DTINYTRAIN_CUDA -DTT_EMULATE -DTINYTRAIN_NO_AVX2 $(EMU_DEFINES)
$(B)/cuda_emu/kernels.o: tinytrain.h $(B)/flags
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(STRICT) $(EMU_C) -O1 -g1 -DTT__LOSS_CHUNK=5 -DTINYTRAIN_IMPLEMENTATION \
	    -DTT__KERNELS_ONLY -x c -c $< -o $@
define emu_c_rules
$(CUDA_TESTS:%=$(B)/cuda_emu/%.$(1).c.o): $(B)/cuda_emu/%.$(1).c.o: tests/%.c tinytrain.h \
        $(wildcard tests/test*.h tests/cuda_emu/*.h) $(B)/flags
	@mkdir -p $$(@D)
	$$(CC) $$(CPPFLAGS) $$(STRICT) -Werror $$(EMU_C) $$(SHARED) $$(EMU_C_FLAGS_$(1)) -c $$< -o $$@
endef
$(foreach b,plain asan,$(eval $(call emu_c_rules,$(b))))
$(B)/cuda_emu/step.plain: bench/step.c bench/bench.h bench/gpu.cu tinytrain.h \
        $(B)/cuda_emu/tinytrain_cuda.plain.o $(EMU_OBJECTS_plain) $(EMU_SHARED) $(B)/flags
	$(CXX) $(EMU_STRICT) -O1 $(EMU_DEFINES) -x c++ -c bench/gpu.cu -o $@.gpu.o
	$(CC) $(CPPFLAGS) $(STRICT) -Werror $(EMU_C) $(SHARED) -O0 -c $< -o $@.o
	$(CXX) $@.o $@.gpu.o $(B)/cuda_emu/tinytrain_cuda.plain.o $(EMU_OBJECTS_plain) $(EMU_SHARED) -o $@ \
	    $(EMU_SHARED_LINK) $(LIBS)
$(B)/cuda_emu/mpi_ranks: tests/mpi.c tests/test_parallel.c $(wildcard tests/test*.h) tinytrain.h \
        $(B)/cuda_emu/tinytrain_cuda.plain.o $(EMU_OBJECTS_plain) $(EMU_SHARED) $(B)/flags
	OMPI_CC='$(CC)' MPICH_CC='$(CC)' $(MPICC) $(CPPFLAGS) $(STRICT) $(EMU_C) $(SHARED) -O0 -g1 -c $< -o $@.o
	OMPI_CC='$(CXX)' MPICH_CC='$(CXX)' $(MPICC) $@.o $(B)/cuda_emu/tinytrain_cuda.plain.o \
	    $(EMU_OBJECTS_plain) $(EMU_SHARED) -o $@ $(EMU_SHARED_LINK) $(LIBS)
.PRECIOUS: $(B)/cuda_emu/%.plain $(B)/cuda_emu/%.asan $(B)/cuda_emu/%.trace

ifneq ($(and $(HAVE_CXX),$(filter plain,$(EMU_BUILDS))),)
$(B)/check_bench.log: $(B)/cuda_emu/step.plain
endif
$(B)/cuda_emu/all_kernels.log: $(addsuffix .log,$(EMU_RAN)) FORCE
	@if $(PYTHON) -c '' 2>/dev/null; then \
	    sh tests/run.sh run $@ $(PYTHON) tests/cuda_emu/kernels.py tinytrain_cuda.cu \
	        $(addsuffix .kernels,$(EMU_RAN)); \
	else sh tests/run.sh skip $@ '$(PYTHON) is not there'; fi

$(B)/cuda_emu.log: FORCE
	@sh tests/run.sh skip $@ '$(CXX) is not there'

# ---- NVIDIA GPUs
cuda: $(CUDA_PROGRAMS)

$(B)/cuda/tinytrain_cuda.o: tinytrain_cuda.cu tinytrain.h $(B)/flags
	@mkdir -p $(@D)
	$(NVCC) -O3 -std=c++17 $(CUDA_WERROR) -Xptxas -v $(CUDA_CODE) -I. -c $< -o $@ 2> $@.txt || \
	    { cat $@.txt >&2; exit 1; }
	@! grep -B 1 -E '[1-9][0-9]* bytes spill' $@.txt || { echo 'registers are spilled' >&2; rm $@; exit 1; }

# In two steps, so that nothing waits for nvcc.
define cuda_compile
@mkdir -p $(@D)
$(CC) $(CPPFLAGS) $(CFLAGS) $(STRICT) -DTINYTRAIN_CUDA -I. -c $< -o $@
endef
$(B)/cuda/%.c.o: examples/%.c $(wildcard examples/*.h) tinytrain.h $(B)/flags
	$(cuda_compile)
$(B)/cuda/%.c.o: tests/%.c $(wildcard tests/test*.h) tinytrain.h $(B)/flags
	$(cuda_compile)
$(B)/cuda/%.c.o: bench/%.c bench/bench.h tinytrain.h $(B)/flags
	$(cuda_compile)
$(B)/cuda/%: $(B)/cuda/%.c.o $(B)/cuda/tinytrain_cuda.o
	$(CC) $(CFLAGS) $^ -o $@ $(LDFLAGS) $(CUDA_LIBS) $(LIBS)
.PRECIOUS: $(B)/cuda/%.c.o

# The benchmark of whole steps, and what a GPU can do, for comparison.
$(B)/cuda/gpu.o: bench/gpu.cu $(B)/flags
	@mkdir -p $(@D)
	$(NVCC) -O3 -std=c++17 $(CUDA_WERROR) $(CUDA_CODE) -c $< -o $@
$(B)/cuda/step: $(B)/cuda/gpu.o
# The emulator's own tests of what they and a GPU both have.
$(B)/cuda/test_emu: tests/cuda_emu/test_emu.cu tests/cuda_emu/sample.cu tinytrain_cuda.cu $(B)/flags
	@mkdir -p $(@D)
	$(NVCC) -std=c++17 $(CUDA_WERROR) $(CUDA_CODE) -I. -c $< -o $@.o
	$(CXX) $@.o -o $@ $(CUDA_LIBS) -lcublas $(LIBS)
$(B)/cuda/%.log: $(B)/cuda/% FORCE
	@TEST_PARTS=$(GPU_PARTS_$*) sh tests/run.sh run $@ env TINYTRAIN_DEVICE=cuda $< \
	    $(foreach t,$(or $(T),$(CUDA_T_$*)),'$(t)')

test: start $(LOGS)
	@sh tests/run.sh total $(LOGS)

export TEST_PROGRESS := $(B)/progress
$(LOGS): | start
start:
	@mkdir -p $(B)
	@sh tests/run.sh start $(TEST_PROGRESS) $(words $(LOGS)) '$(TEST_TIME)'

# One case of the tests of ops, in both: on the CPU and on the emulator of CUDA.
C ?= linear
case: $(B)/test_ops $(B)/cuda_emu/test_ops.plain
	TT_TEST_CASE='$(C)' $(B)/test_ops 'reference_*' 'gradient_*'
	TT_TEST_CASE='$(C)' TINYTRAIN_DEVICE=cuda $(B)/cuda_emu/test_ops.plain reference_cuda gradient_cuda

check:
	@$(MAKE) --no-print-directory test EMU_BUILDS= TEST_TIME=', about a minute and a half on two cores'

# gcc's line counts of all programs added up; a line that one instruction set ran counts as run.
coverage:
	@rm -f $(B)/coverage/*.gcda
	@$(MAKE) --no-print-directory test B=$(B)/coverage CC='$(if $(filter default,$(origin CC)),gcc,$(CC))' \
	    CFLAGS='-O1 --coverage $(COVERAGE_FLAGS)' EMU_BUILDS=
	@$(MAKE) --no-print-directory covered B=$(B)/coverage

# The same bits as at another commit: losses, parameters and optimizer state of tiny models; plans, none
# larger.
BASE ?= 703a5d8
BITS := $(B)/bits/$(BASE)
bits: FORCE
	@mkdir -p '$(BITS)'
	@[ -f '$(BITS)/tinytrain.h' ] || \
	    git archive '$(BASE)' tinytrain.h tinytrain_cuda.cu Makefile tests/cuda_emu | tar -x -C '$(BITS)'
	@B='$(B)' CC='$(CC)' CXX='$(CXX)' CFLAGS='$(CFLAGS)' sh tests/bits.sh '$(BITS)' . $(foreach t,$(T),'$(t)')

# The same of tests that ran in B, where CFLAGS had --coverage.
covered:
	@for f in $(B)/*.gcda; do $(GCOV) -t -o $(B) $$f; done | \
	    sh tests/run.sh coverage tinytrain.h 90 $(B)/not_run.txt

# libFuzzer's mutations of the files that the library reads (tests/fuzz/fuzz.h), under clang's sanitizers. The
# implementation is compiled once for all targets.
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
	$(CLANG) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link -I. -c $< -o $@
$(FUZZ:%=$(B)/fuzz/%): $(B)/fuzz/%: tests/fuzz/%.c $(wildcard tests/fuzz/*.h) $(B)/fuzz/tinytrain.o
	$(CLANG) $(FUZZ_FLAGS) -fsanitize=fuzzer -I. $< $(B)/fuzz/tinytrain.o -o $@ $(LIBS)
$(FUZZ_LOGS): $(B)/fuzz/%.log: $(B)/fuzz/% FORCE
	@TEST_SECONDS=$$(($(SECONDS) + 600)) sh tests/run.sh run $@ sh tests/fuzz/run.sh $< $(SECONDS)

bench: $(BENCHES)
	@for b in $(MEASURED); do echo "== $$b" >&2; $$b $(A) || exit 1; done

# The programs that need no library but this one, and those that do.
PEER_PROGRAMS ?= $(BENCHES) $(B)/gpt2_step $(B)/distilbert_imdb
bench-programs: $(PEER_PROGRAMS) $(GEMM_PEERS)

# Goes on where a peer is not to be had, and lists at the end what was left out and why.
bench-peers: bench-programs
	@B='$(B)' VENV='$(VENV)' TORCH='$(TORCH)' sh bench/peers/install.sh
	@$(MAKE) $(B)/gemm_onednn
	@rm -f $(B)/llmc.left_out
ifneq ($(LLMC),)
	@$(MAKE) $(B)/llmc > $(B)/llmc.txt 2>&1 || \
	    echo "$(B)/llmc: $$(grep -v '^make' $(B)/llmc.txt | tail -n 1)" > $(B)/llmc.left_out
endif
	@cat $(B)/*.left_out > $(B)/left_out.txt 2> /dev/null || :
	@if [ -s $(B)/left_out.txt ]; then echo 'left out:'; sed 's/^/  /' $(B)/left_out.txt; \
	else echo 'nothing was left out'; fi

VERSION = $(shell sed -n 's/^\#define TT_VERSION "\(.*\)"/\1/p' tinytrain.h)
CONFIGS := tinytrain-config.cmake tinytrain-config-version.cmake
install:
	install -d $(addprefix '$(DESTDIR)$(PREFIX)'/,include share/pkgconfig share/cmake/tinytrain)
	install -m 644 tinytrain.h tinytrain_cuda.cu '$(DESTDIR)$(PREFIX)/include/'
	for f in $(CONFIGS); do \
	    sed -n "/^# >>$$f/,/^# <</{/^# [<>]/!p;}" CMakeLists.txt \
	        > '$(DESTDIR)$(PREFIX)/share/cmake/tinytrain/'$$f || exit 1; done
	printf '%s\n' 'prefix=$(PREFIX)' 'cuda_source=$${prefix}/include/tinytrain_cuda.cu' 'Name: tinytrain' \
	    'Description: trains transformers from C' 'Version: $(VERSION)' \
	    'Cflags: -I$${prefix}/include' 'Libs: $(LIBS)' \
	    > '$(DESTDIR)$(PREFIX)/share/pkgconfig/tinytrain.pc'

clean:
	rm -rf '$(B)'

FORCE:
.DELETE_ON_ERROR:
.PHONY: help cuda demo gpt examples check test coverage fuzz bench bench-programs bench-peers install clean
.PHONY: bits case start covered FORCE
