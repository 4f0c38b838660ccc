# CUDA code is tested on an emulator, in three builds (cuda_emu.h). B/cuda_emu/NAME.BUILD is built from
# NAME.cu of this folder, or from tests/NAME.c of CUDA_TESTS with tinytrain_cuda.cu.

# EMU_BUILDS has all builds, unless TESTS= names some of the tests.
ifeq ($(origin EMU_BUILDS)$(origin TESTS),undefinedundefined)
EMU_BUILDS := plain asan trace
TEST_TIME  := $(if $(T),,, about 25 minutes on two cores; make check, without the emulator of CUDA, 10)
endif
EMU       := $(B)/cuda_emu
EMU_TESTS ?= $(wildcard tests/cuda_emu/*.cu)
# The programs tests/NAME.c that run with TINYTRAIN_DEVICE=cuda on the emulator and on a GPU, and the tests
# that each program runs there.
CUDA_TESTS         ?= test_ops test_models test_heads test_lm test_cuda test_peers test_tensor test_pipeline
CUDA_T_test_ops    := reference_cuda gradient_cuda attention_by_warpgroups stochastic_rounding_of_each_isa \
                      pieces_are_updated_as_the_whole states_of_8_bits_of_each_isa cuda_epilogues \
                      cuda_tensors_share_launches \
                      cuda_rows_in_flight cuda_kernels_of_each_dtype cuda_column_sums_of_attention \
                      cuda_dropout_kept_for_keys cuda_dropout_with_norms \
                      cuda_programs_with_dropout_and_norms \
                      cuda_backward_by_warpgroups biases_of_attention_cuda cuda_products_of_one_x \
                      matmul_in_tf32 quantize history_of_fp8_scales matmul_in_fp8 \
                      training_in_fp8 parameters_begin_on_the_device device_described_cuda \
                      matmul_ignores_columns_beyond several_losses sigmoid_cross_entropy_counts
CUDA_T_test_tensor := gradients_of_ranks_cuda
CUDA_T_test_pipeline := stages_on_cuda stages_that_are_apart_are_refused
CUDA_T_test_lm     := golden_lm greedy_tokens
CUDA_T_test_models := golden_distilbert golden_vit golden_albert golden_bf16_true recompute_policies
CUDA_T_test_heads  := heads_as_in_transformers embeddings_as_in_sentence_transformers
# Whole models, and programs that run once for each call of CUDA, run in the fastest build alone.
EMU_LONG_asan      := test_models test_heads test_lm test_cuda test_tensor
EMU_LONG_trace     := $(EMU_LONG_asan)
# Tests that the builds asan and trace leave out, since each takes a quarter of a minute or more there. The
# build plain runs these tests, and gradient_cuda runs the kernels.
EMU_LEFT_asan      := cuda_dropout_kept_for_keys cuda_column_sums_of_attention cuda_epilogues \
                      cuda_dropout_with_norms
EMU_LEFT_trace     := cuda_dropout_kept_for_keys

# ---- what `make test` runs
HAVE_CXX := $(if $(EMU_BUILDS),$(shell command -v $(firstword $(CXX))))
HAVE_EMU := $(and $(HAVE_CXX),$(filter plain,$(EMU_BUILDS)))
ifneq ($(HAVE_CXX),)
EMU_RAN  := $(foreach b,$(EMU_BUILDS),$(patsubst %,$(EMU)/%.$b,$(filter-out $(EMU_LONG_$b),$(CUDA_TESTS))))
EMU_LOGS := $(foreach b,$(EMU_BUILDS),$(patsubst %.cu,$(EMU)/%.$b.log,$(notdir $(EMU_TESTS)))) \
            $(EMU_RAN:%=%.log)
# If all tests of ops run, adds the test that each kernel has run.
ifeq ($(T)$(RUN)$(filter $(EMU)/test_ops.plain,$(EMU_RAN)),$(EMU)/test_ops.plain)
EMU_LOGS += $(EMU)/all_kernels.log
endif
else ifneq ($(EMU_BUILDS),)
EMU_LOGS := $(EMU).log
endif

# ---- compilers' options. The runtime is never compiled with -fsanitize=thread: in the trace build the
# runtime defines the functions that instrumented code calls. g++ needs -Wno-subobject-linkage: g++ warns
# about headers whose structs have members of unnamed namespaces, and #line makes the .cu look like headers.
EMU_STRICT        := -std=c++17 -g1 -Wall -Wextra -Wpedantic -Werror \
                     $(if $(findstring clang,$(CXX)),,-Wno-subobject-linkage)
# Leaves out checks that take most of the compiler's time; AddressSanitizer finds the same mistakes when
# memory is used.
EMU_SANITIZE      := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
                     -fno-sanitize=null,object-size,pointer-overflow,vptr
EMU_PATTERN        = $(shell $(CXX) -ftrivial-auto-var-init=pattern -E -x c++ /dev/null > /dev/null 2>&1 && \
                       echo -ftrivial-auto-var-init=pattern)
# Makes fmaf an instruction if this CPU has one. The instruction gives the bits of the library's function,
# whose calls take a third of the kernels' time.
EMU_FMA            = $(shell grep -qsw fma /proc/cpuinfo && \
                       $(CXX) -mfma -E -x c++ /dev/null > /dev/null 2>&1 && echo -mfma -ffp-contract=off)
EMU_FLAGS_plain    = -O2 $(EMU_PATTERN) $(EMU_FMA)
EMU_FLAGS_asan     = $(EMU_SANITIZE) $(EMU_FMA)
EMU_FLAGS_trace    = -O1 -fsanitize=thread $(EMU_FMA)
EMU_RUNTIME_plain := -O3
EMU_RUNTIME_asan  := -O2 -fno-omit-frame-pointer -fsanitize=address
EMU_RUNTIME_trace := -O3 -DEMU_TRACE
EMU_LINK_asan     := $(EMU_SANITIZE)
# Flags of the C code of a program. The trace build does not watch C code, so the trace build uses the plain
# build's objects. Tests on an emulated device need only the portable kernels of the CPU, without sanitizers,
# which the CPU's own tests have. So all builds link the same kernels.o. It is compiled with TT__LOSS_CHUNK=5,
# as test_ops.c is, so that a loss of few rows has several chunks.
EMU_C_FLAGS_plain := -O0 -g1
EMU_C_FLAGS_asan  := $(EMU_SANITIZE) -O0 -g1
# The emulator gets less resident workspace than a GPU, since its time grows with the memory that is touched.
# The emulator also gets fewer tensors a launch, and fewer blocks, each of which does more.
EMU_DEFINES       := -DTT__CUDA_RESIDENT=0x7f000 -DTT__TENSORS=5 -DTT__PEERS=64 -DTT__SORT_TILES=2 \
                     -DTT__RANKED=512 -DTT__LOSS_BLOCKS=3 -DTT__LOSS_CACHE=20992 -DTT__PROBE_BYTES=8192 \
                     -DTT__CUDA_LOSS_CHUNK=5 -Itests/cuda_emu -I.
EMU_C             := -DTINYTRAIN_CUDA -DTT_EMULATE -DTINYTRAIN_NO_AVX2 $(EMU_DEFINES)

# ---- rules, whose stem is NAME.BUILD
vpath %.cu tests/cuda_emu bench
.SECONDEXPANSION:
name     = $(basename $*)
build    = $(subst .,,$(suffix $*))
emu_cxx  = $(CXX) $(EMU_STRICT) $(1) $(DEPENDS) -I$(JOINED_IN) -c $(source) -o $@
emu_link = $(CXX) $(EMU_LINK_$(build)) $(filter %.o,$^) -o $@ $(LINKED) $(LIBS)

$(EMU)/%.o: tests/cuda_emu/$$(name).cpp $(B)/flags
	$(call emu_cxx,$(EMU_RUNTIME_$(build)))
$(EMU)/%.o: $$(name).cu tinytrain.h $(B)/flags
	$(call emu_cxx,$(EMU_FLAGS_$(build)) $(EMU_DEFINES) -x c++)
$(EMU)/%.c.o: $$(name).c tinytrain.h $(B)/flags
	$(call compile,-Werror $(if $(filter $(OWN),$(name)),,$(DECLARED)) $(EMU_C) $(SHARED) \
	    $(EMU_C_FLAGS_$(build)))
$(EMU)/part.%.c.o: tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(STRICT) $(EMU_C) $(SHARED) $(EMU_C_FLAGS_$*) -Wno-unused-function \
	    -DTINYTRAIN_IMPLEMENTATION $(DEPENDS) -x c -c $(PARTS)/tinytrain.h -o $@
$(EMU)/kernels.o: tinytrain.h $(B)/flags
	$(call compile,$(EMU_C) -O1 -g1 -DTT__LOSS_CHUNK=5 -DTINYTRAIN_IMPLEMENTATION -DTT__KERNELS_ONLY -x c)

# Programs of .cu files, C programs with tinytrain_cuda.cu, and the objects from which both are linked.
emu_of     = $(foreach b,plain asan trace,$(patsubst %,$(EMU)/%.$b,$(1)))
emu_parts  = cuda_emu cuda_emu_blas $(patsubst %,cuda_emu_%,$(filter trace,$(1)))
emu_with   = $(patsubst %,$(EMU)/%.$(2).o,$(1) $(call emu_parts,$(2)))
EMU_OF_CU  := $(call emu_of,$(basename $(notdir $(EMU_TESTS))))
EMU_OF_C   := $(call emu_of,$(CUDA_TESTS)) $(EMU)/step.plain
EMU_SHARED := $(KERNELS:$(B)/%=$(EMU)/%)
$(EMU_OF_CU): $(EMU)/%: $$(call emu_with,$$(name),$$(build))
	$(emu_link)
$(EMU_OF_C): $(EMU)/%: $(EMU)/$$(name).$$(build:trace=plain).c.o \
                       $$(if $$(filter $$(OWN),$$(name)),, \
                           $(PART:$(B)/%.o=$(EMU)/%.$$(build:trace=plain).c.o)) \
                       $$(call emu_with,tinytrain_cuda,$$(build)) $(EMU_SHARED)
	$(emu_link)
$(EMU)/step.plain: $(EMU)/gpu.plain.o

$(EMU)/%.log: $(EMU)/% FORCE
	@rm -f $<.kernels
	@sh tests/run.sh run $@ env TINYTRAIN_DEVICE=cuda EMU_KERNELS=$<.kernels $(RUN) $< \
	    $(call patterns,$(or $(T),$(filter-out $(EMU_LEFT_$(build)),$(CUDA_T_$(name)))))
$(EMU)/all_kernels.log: $(EMU_RAN:%=%.log) FORCE
	@$(call checked,tests/cuda_emu/kernels.py tinytrain_cuda.cu $(EMU_RAN:%=%.kernels))
$(EMU).log: FORCE
	@sh tests/run.sh skip $@ '$(CXX) is not there'

# Builds the tests of the emulator, which also run on a GPU.
$(B)/cuda/test_emu: tests/cuda_emu/test_emu.cu tests/cuda_emu/sample.cu tinytrain_cuda.cu $(B)/flags
	$(NVCC) -std=c++17 $(CUDA_WERROR) $(CUDA_CODE) -I. -c $< -o $@.o
	$(CXX) $@.o -o $@ $(CUDA_LIBS) -lcublas $(LIBS)
