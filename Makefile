# tinytrain. GNU make and a C99 compiler are enough. The caller may set CC and CFLAGS (make test CC=clang
# CFLAGS='-O1 -fsanitize=address') and B, the folder for built files. `make help` prints the lines that begin
# with #>. The rules for tests, the emulator of CUDA, fuzzing and benchmarks are in the folders of their
# sources, in files that are included below.

CFLAGS ?= -O2
PREFIX ?= /usr/local
B      ?= build
VENV   ?= build/venv
# Python for the checks and the peers: the virtual environment of `make bench-peers` if it exists.
PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
# The emulator of CUDA, for tests only, needs the C++ compiler that goes with CC.
ifeq ($(origin CXX),default)
CXX := $(patsubst cc,c++,$(patsubst %gcc,%g++,$(patsubst %clang,%clang++,$(CC))))
endif
# MPICC compiles like CC, and adds the options that MPI needs.
MPICC ?= mpicc
ifneq ($(MPI),)
export OMPI_CC := $(CC)
export MPICH_CC := $(CC)
override CC := $(MPICC)
override CPPFLAGS += -DTINYTRAIN_MPI
endif

# make WINDOWS=1 builds programs for Windows with MinGW-w64 (Debian: gcc-mingw-w64-x86-64-posix) and runs the
# tests by Wine (Debian: wine64). TINYTRAIN_UNALIGNED_MOVES: see src/cpu/variants.h.
ifneq ($(WINDOWS),)
ifeq ($(origin CC),default)
CC := x86_64-w64-mingw32-gcc-posix
endif
override CPPFLAGS += -DTINYTRAIN_UNALIGNED_MOVES -Wa,-muse-unaligned-vector-move
override LDFLAGS += -static
RUN ?= /usr/lib/wine/wine64
# Windows has no fork; test_cuda and test_peers need a GPU or the emulator of CUDA.
TESTS ?= $(filter-out $(patsubst %,tests/test_%.c,faults cuda peers),$(wildcard tests/test_*.c))
CHECKS ?=
endif

# Runs as many jobs as there are processors, unless the caller gives a number.
ifeq ($(MAKELEVEL)$(filter -j% --jobs% --jobserver%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
endif
MAKEFLAGS += --no-builtin-rules

# The two files that users copy are joined from src/. With Python, compilers read copies of the two files that
# have #line, so that messages name the files of src/. With PRODUCTS=1, as in CI, compilers read the two files
# themselves.
JOINED   := tinytrain.h tinytrain_cuda.cu
PRODUCTS ?= $(shell $(PYTHON) -c '' 2> /dev/null || echo 1)
JOINED_IN := $(if $(PRODUCTS),.,$(B)/lines)

# Tests and benchmarks call private functions. So that each does not compile the library anew, join.py writes
# the header in two parts: PARTS/tinytrain.h, which is compiled once, and PARTS/declared/tinytrain.h, which
# the programs include. On Darwin the programs include PARTS/tinytrain.h (see KERNELS below).
PARTS    := $(B)/parts

# Beside each object, compilers write a file *.d with the headers of this repository that the object needs.
LIBS    := -lm -lpthread
STRICT  := -std=c99 -Wall -Wextra -Wpedantic
DEPENDS := -MMD -MP
source   = $(addprefix $(JOINED_IN)/,$(filter $(JOINED),$<))$(filter-out $(JOINED),$<)
compile  = $(CC) $(CPPFLAGS) $(STRICT) $(1) $(DEPENDS) -I$(JOINED_IN) -I. -c $(source) -o $@
link     = $(CC) $(CFLAGS) $(filter %.o,$^) -o $@ $(LINKED) $(LDFLAGS) $(LIBS)$(if $(WINDOWS), && mv $@.exe $@)
EXAMPLES := $(patsubst examples/%.c,$(B)/%,$(wildcard examples/*.c))

#> make demo         build examples/distilbert_imdb.c and train a small model on the reviews in examples/data
#> make gpt          build examples/gpt.c and train a small language model on a novel
#> make examples     build the examples, as B/NAME
#> make examples WINDOWS=1 B=build/windows
#>                   build them for Windows with MinGW-w64; make test WINDOWS=1 runs tests by Wine
#> make examples MPI=1 B=build/mpi
#>                   build them for several processes: mpirun -n 4 build/mpi/NAME; MPICC (mpicc)
help:
	@sed -n 's/^#> //p' $(filter-out %.d,$(MAKEFILE_LIST))

$(JOINED): $(B)/joined
	@:
# Runs each time, to report edits of tinytrain.h and tinytrain_cuda.cu, which are products of src/.
$(B)/joined: FORCE
	@mkdir -p $(B)/lines
	@if $(PYTHON) -c '' 2> /dev/null; then \
	    $(PYTHON) tools/join.py && $(PYTHON) tools/join.py --lines --out $(B)/lines && \
	    $(PYTHON) tools/join.py --parts $(PARTS) $(if $(PRODUCTS),,--lines); \
	elif [ -e $@ ] && [ -z "$$(find $(JOINED) -newer $@)" ] && [ -n "$$(find src -type f -newer $@)" ]; then \
	    echo 'src/ has changed, but $(PYTHON) is not there: $(JOINED) are as they were' >&2; fi
	@[ -e $@ ] && [ -z "$$(find $(JOINED) $(B)/lines -type f -newer $@)" ] || touch $@

demo: $(B)/distilbert_imdb
	rm -rf '$(B)/demo'
	$(B)/distilbert_imdb --out '$(B)/demo'

gpt: $(B)/gpt
	rm -rf '$(B)/gpt_run'
	$(B)/gpt --out '$(B)/gpt_run'

examples: $(EXAMPLES)

# B/flags changes when the compiler or the flags change, so that everything is built again.
FLAGS = $(JOINED_IN) $(CC) $(CXX) $(CPPFLAGS) $(STRICT) $(CFLAGS) $(KERNELS_CFLAGS) $(PART_CFLAGS) \
        $(LDFLAGS) $(WHOLE)
$(B)/flags: FORCE
	@mkdir -p $(B)/cuda_emu $(B)/cuda
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@

# The CPU's kernels, most of a compiler's work, are compiled once for all programs (see TT__KERNELS_ONLY in
# tinytrain.h). Apple's linker cannot take the first of two definitions; there, each program is built from one
# file. KERNELS_CFLAGS follow CFLAGS: without optimisation the other code compiles in a third of the time.
ifneq ($(shell uname -s),Darwin)
SHARED   := -DTT__KERNELS_ELSEWHERE
DECLARED := -I$(PARTS)/declared $(SHARED)
KERNELS  := $(B)/kernels.o
PART     := $(B)/part.o
MULDEFS  := -Wl,--allow-multiple-definition
LINKED    = $(if $(filter %/kernels.o %/part.o,$^),$(MULDEFS))
else
DECLARED := -I$(PARTS)
endif
$(B)/kernels.o: tinytrain.h $(B)/flags
	$(call compile,$(CFLAGS) $(KERNELS_CFLAGS) -DTINYTRAIN_IMPLEMENTATION -DTT__KERNELS_ONLY -x c)

# The library for programs that include PARTS/declared/tinytrain.h. kernels.o follows, since the linker takes
# the first of two definitions. PART_CFLAGS follow CFLAGS.
$(B)/part.o: tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(STRICT) $(CFLAGS) $(PART_CFLAGS) $(SHARED) -Wno-unused-function \
	    -DTINYTRAIN_IMPLEMENTATION $(DEPENDS) -x c -c $(PARTS)/tinytrain.h -o $@
# The examples use only the public API, so tinytrain.h is compiled once for all of them. -Wno-unused-function:
# clang does not treat the file that it compiles as a header, and warns of unused inline functions.
$(B)/tinytrain.o: tinytrain.h $(B)/flags
	$(call compile,$(CFLAGS) -Wno-unused-function $(SHARED) -DTINYTRAIN_IMPLEMENTATION -x c)
# Holds the path of stb_image.h, or none. Programs that lack the header are built again once it is found.
$(B)/stb: FORCE
	@mkdir -p $(B)
	@{ echo '#include <stb/stb_image.h>' | $(CC) $(CPPFLAGS) $(CFLAGS) -M -x c - 2> /dev/null | \
	    grep -o '[^ ]*stb_image.h' || echo none; } > $@.now
	@cmp -s $@.now $@ || cp $@.now $@
$(B)/vit_l16.o $(B)/mpi_vit_l16.o $(B)/cuda/vit_l16.c.o: $(B)/stb
$(EXAMPLES:%=%.o): $(B)/%.o: examples/%.c tinytrain.h $(B)/flags
	$(call compile,$(CFLAGS) -DTT__ELSEWHERE)
$(EXAMPLES): $(B)/%: $(B)/%.o $(B)/tinytrain.o $(KERNELS)
	$(link)

#> make install      copy header, .cu, pkg-config and CMake files, below PREFIX (/usr/local) and DESTDIR
VERSION = $(shell sed -n 's/^\#define TT_VERSION "\(.*\)"/\1/p' tinytrain.h)
CONFIGS := tinytrain-config.cmake tinytrain-config-version.cmake
install:
	@! $(PYTHON) -c '' 2> /dev/null || $(PYTHON) tools/join.py --check
	install -d $(addprefix '$(DESTDIR)$(PREFIX)'/,include share/pkgconfig share/cmake/tinytrain)
	install -m 644 tinytrain.h tinytrain_cuda.cu '$(DESTDIR)$(PREFIX)/include/'
	for f in $(CONFIGS); do \
	    sed -n "/^# >>$$f/,/^# <</{/^# [<>]/!p;}" CMakeLists.txt \
	        > '$(DESTDIR)$(PREFIX)/share/cmake/tinytrain/'$$f || exit 1; done
	printf '%s\n' 'prefix=$(PREFIX)' 'cuda_source=$${prefix}/include/tinytrain_cuda.cu' 'Name: tinytrain' \
	    'Description: trains transformers from C' 'Version: $(VERSION)' \
	    'Cflags: -I$${prefix}/include' 'Libs: $(LIBS)' \
	    > '$(DESTDIR)$(PREFIX)/share/pkgconfig/tinytrain.pc'

#> make clean        remove B (build)
clean:
	rm -rf '$(B)'

#> make cuda         build examples, tests and the benchmark of steps for NVIDIA GPUs, as B/cuda/NAME
#>                   (CUDA_HOME, NVCC, CUDA_ARCHS); TINYTRAIN_CUDA=1 make test runs these tests too
# CUDA_CODE compiles code for the GPUs of CUDA_ARCHS, and PTX for later GPUs.
CUDA_HOME   ?= /usr/local/cuda
CUDA_WERROR ?= -Werror all-warnings
NVCC        ?= $(CUDA_HOME)/bin/nvcc
CUDA_ARCHS  ?= 80 90a 100
CUDA_CODE   ?= $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
               -gencode arch=compute_90,code=compute_90
CUDA_LIBS   := -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcublasLt -lcudart -lstdc++
nvcc         = $(NVCC) -O3 -std=c++17 $(CUDA_WERROR) $(1) $(CUDA_CODE) -I. -c $< -o $@
vpath %.c examples tests bench

cuda: $(EXAMPLES:$(B)/%=$(B)/cuda/%)

$(B)/cuda/tinytrain_cuda.o: tinytrain_cuda.cu tinytrain.h $(B)/flags
	$(call nvcc,-Xptxas -v) 2> $@.txt || { cat $@.txt >&2; exit 1; }
	@! grep -B 1 -E '[1-9][0-9]* bytes spill' $@.txt || { echo 'registers are spilled' >&2; rm $@; exit 1; }
$(B)/cuda/%.c.o: %.c tinytrain.h $(B)/flags
	$(call compile,$(CFLAGS) -DTINYTRAIN_CUDA)
$(B)/cuda/test_%.c.o: tests/test_%.c tinytrain.h $(B)/flags
	$(call compile,$(CFLAGS) -DTINYTRAIN_CUDA $(if $(filter test_$*,$(OWN)),,$(DECLARED)))
$(B)/cuda/part.o: tinytrain.h $(B)/flags
	$(CC) $(CPPFLAGS) $(STRICT) $(CFLAGS) -Wno-unused-function -DTINYTRAIN_IMPLEMENTATION -DTINYTRAIN_CUDA \
	    $(DEPENDS) -x c -c $(PARTS)/tinytrain.h -o $@
$(B)/cuda/%: $(B)/cuda/%.c.o $(B)/cuda/tinytrain_cuda.o
	$(CC) $(CFLAGS) $(filter %.o,$^) -o $@ $(LINKED) $(LDFLAGS) $(CUDA_LIBS) $(LIBS)

include tests/cuda_emu/emu.mk tests/tests.mk tests/fuzz/fuzz.mk bench/bench.mk
-include $(wildcard $(B)/*.d $(B)/cuda_emu/*.d $(B)/cuda/*.d)

FORCE:
.DELETE_ON_ERROR:
.PRECIOUS: $(B)/cuda/%.c.o $(B)/cuda_emu/%.o
.PHONY: help demo gpt examples install clean cuda FORCE
