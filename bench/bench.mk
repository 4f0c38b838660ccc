#> make bench        build the benchmarks, as B/NAME, and run those that need no data; with A=--json they
#>                   print an object a line
#> make bench-peers  make the virtual environment build/venv with PyTorch and transformers from PyPI, and
#>                   build programs to compare with; LLMC=dir: also llm.c's, from a checkout; TORCH=...:
#>                   what pip installs as PyTorch (torch)
#> make bench-programs  build the C programs of these comparisons, without the environment
BENCHES  := $(patsubst bench/%.c,$(B)/%,$(wildcard bench/*.c))
MEASURED := $(addprefix $(B)/,gemm attention rows step ranks compile tokenize images)
# The requirement and options with which make bench-peers calls pip to install PyTorch. PyPI's torch for Linux
# includes CUDA (5.6 GB); PyTorch's own index of CPU builds does not: TORCH='torch --index-url URL'.
TORCH ?= torch
# With LLMC, a checkout of github.com/karpathy/llm.c, make also builds llm.c's CPU program.
LLMC_FLAGS ?= -Ofast -march=native -fopenmp -DOMP

bench: $(BENCHES)
	@for b in $(MEASURED); do echo "== $$b" >&2; $$b $(A) || exit 1; done

$(BENCHES:%=%.o): $(B)/%.o: bench/%.c tinytrain.h $(B)/flags
	$(call compile,$(CFLAGS) $(DECLARED))
$(B)/gpt2_step.o: bench/peers/gpt2_step.c tinytrain.h $(B)/flags
	$(call compile,$(CFLAGS) $(DECLARED))
$(BENCHES) $(B)/gpt2_step: $(B)/%: $(B)/%.o $(PART) $(KERNELS)
	$(link)

# Programs that need no library but tinytrain. gemm_openblas also needs OpenBLAS, and gemm_onednn oneDNN.
PEER_PROGRAMS ?= $(BENCHES) $(B)/gpt2_step $(B)/distilbert_imdb
bench-programs: $(PEER_PROGRAMS) $(B)/gemm_openblas $(B)/gemm_onednn

# make bench-peers continues if a peer cannot be installed. At the end, make lists each peer that was left
# out, with the reason.
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

# Flags of the programs that measure matrix products of other libraries. The compiler looks for oneDNN in
# build/venv first, and then, as for OpenBLAS, in its usual folders.
GEMM_openblas      := -DPEER_OPENBLAS -lopenblas
GEMM_onednn        := -isystem $(VENV)/include -L$(VENV)/lib -Wl,-rpath,'$(abspath $(VENV))/lib' -ldnnl
GEMM_NEED_openblas := OpenBLAS (Debian: libopenblas-dev)
GEMM_NEED_onednn   := oneDNN 3 (PyPI: onednn-devel-cpu-gomp, which make bench-peers installs; \
                      Debian: libdnnl-dev, where it is 3)
# The smallest program that compiles and links only if the right library is installed. A header without the
# library, or a cblas.h of another library, makes the program fail.
GEMM_TRY_openblas  := '\#include <cblas.h>' 'int main(void) { return !openblas_get_config(); }'
GEMM_TRY_onednn    := '\#include <dnnl.h>' '\#if DNNL_VERSION_MAJOR < 3' '\#error it is older' '\#endif' \
                      'int main(void) { return !dnnl_version(); }'
$(B)/gemm_openblas $(B)/gemm_onednn: $(B)/gemm_%: bench/peers/gemm.c $(B)/flags
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

# For a GPU: the benchmark of whole steps, linked with gpu.cu, which measures the best rates of the GPU.
cuda: $(B)/cuda/step
$(B)/cuda/step: $(B)/cuda/gpu.o
$(B)/cuda/gpu.o: bench/gpu.cu $(B)/flags
	$(nvcc)

.PHONY: bench bench-programs bench-peers
