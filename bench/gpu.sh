#!/bin/sh
# Everything that is to be known of tinytrain on a GPU, in one command: builds for the GPU that is there,
# measures training steps beside PyTorch's, in one process each, one after another, then runs the tests on it
# and small shares of them under compute-sanitizer.
#
#   PYTHON=python3 bench/gpu.sh      all of it; needs an NVIDIA GPU, the CUDA toolkit, and for the peers torch
#                                    and transformers
#   bench/gpu.sh --build --test      these parts only (--build --measure --test --sanitize), so that several
#                                    calls share the work
#
# Where a GPU is at hand for minutes only: bench/gpu.sh --build --arch 90a on another machine, and there first
# --prebuilt --measure, then --prebuilt --test --sanitize, each with --out and --revision.
#
#   bench/gpu.sh --dry-run           the same without a GPU: small shapes on the CPU; what needs a GPU is
#                                    skipped
#
#   --out DIR       for NAME.json, NAME.md and NAME.log, where NAME is gpu_, the GPU and the date
#                   (bench/results)
#   --limit N       seconds for all of this call; what no longer fits is skipped (560)
#   --revision TEXT of the sources, where there is no git (what git says)
#   --imdb DIR, --vocab DIR   real reviews, and the folder of their vocab.txt, instead of lengths drawn as
#                             IMDb's are
#   --only LIST     of vit, fixed, imdb and gpt2, what to measure: ViT-L/16, DistilBERT on 12 x 512 tokens and
#                   on texts of IMDb's lengths, GPT-2 on 16 x 1,024 ('vit fixed imdb gpt2')
#   --build --arch A   on a machine without a GPU: builds for that architecture (90a: H100, H200)
#   --prebuilt      $B was so built from these sources, on another machine, and is not built again
#   --no-peers      tinytrain alone
#   environment: B (build), CUDA_HOME (/usr/local/cuda), NVCC, CC, PYTHON (python3)
#
# A stage that fails or runs out of time is reported and the others go on; the status is 1 if one failed. What
# the stages print is in NAME.log.
set -u
cd "$(dirname "$0")/.." || exit 1
B=${B:-build} CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} PYTHON=${PYTHON:-python3} began=$(date +%s)
NVCC=${NVCC:-$CUDA_HOME/bin/nvcc}
command="bench/gpu.sh $*" parts='' out=bench/results limit=560 dry='' peers=yes imdb=''
only='vit fixed imdb gpt2' prebuilt='' arch=''
revision=$(git rev-parse --short HEAD 2> /dev/null || echo unknown)
die() { echo "gpu.sh: $*" >&2; exit 1; }
while [ $# -gt 0 ]; do
    case $1 in
    --build | --test | --sanitize | --measure) parts="$parts ${1#--}" ;;
    --dry-run) dry=yes ;;
    --no-peers) peers= ;;
    --prebuilt) prebuilt=yes ;;
    --out | --limit | --only | --imdb | --vocab | --arch | --revision)
        [ $# -gt 1 ] || die "$1 needs a value"
        case $1 in
        --out) out=$2 ;;
        --limit) limit=$2 ;;
        --only) only=$2 ;;
        --arch) arch=$2 ;;
        --revision) revision=$2 ;;
        *) imdb="$imdb $1 $2" ;;
        esac
        shift ;;
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
    *) die "unknown option '$1'; --help lists them" ;;
    esac
    shift
done
parts=${parts:- build measure test sanitize}
for kind in $only; do
    case $kind in vit | fixed | imdb | gpt2) ;;
    *) die "--only '$kind': there are vit, fixed, imdb and gpt2" ;; esac
done
case $limit in *[!0-9]* | '') die "--limit takes seconds, not '$limit'" ;; esac
part() { case "$parts " in *" $1 "*) return 0 ;; esac; return 1; }

date=$(date +%Y-%m-%d) gpu='' driver='' cuda=''
if [ -n "$arch" ]; then
    [ "$parts" = ' build' ] || die "--arch goes with --build alone"
elif [ -z "$dry" ]; then
    gpu=$(nvidia-smi -i 0 --query-gpu=name --format=csv,noheader 2>&1) ||
        die "no GPU: nvidia-smi says '$gpu'; --dry-run does without one"
    driver=$(nvidia-smi -i 0 --query-gpu=driver_version --format=csv,noheader)
    arch=$(nvidia-smi -i 0 --query-gpu=compute_cap --format=csv,noheader | tr -d .)
    [ "$arch" != 90 ] || arch=90a
    cuda=$("$NVCC" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    [ -n "$cuda" ] || [ -n "$prebuilt" ] || die "no CUDA compiler: $NVCC (CUDA_HOME or NVCC names another)"
fi
# What would else be found missing minutes later.
if [ -z "$dry" ] && part build; then
    for file in include/cublasLt.h include/cuda_runtime.h lib64/libcublasLt.so; do
        [ -e "$CUDA_HOME/$file" ] || die "there is no $CUDA_HOME/$file: install cuBLAS of the CUDA toolkit"
    done
elif [ -z "$dry" ]; then
    missing=$(ldd "$B/cuda/step" 2>&1 | grep -E 'not found|No such file') &&
        die "$B/cuda/step cannot run here: $missing; LD_LIBRARY_PATH may name where it is"
fi
device=${dry:+cpu} device=${device:-cuda}
export B CUDA_HOME TORCHINDUCTOR_CACHE_DIR='' TORCHINDUCTOR_FX_GRAPH_CACHE=1 TORCHINDUCTOR_COMPILE_THREADS=4
export NVCC="$NVCC --threads 0 --split-compile 0"
export CUDA_WERROR='' # another machine's compiler may warn of what ours does not
export CUDA_CODE="-gencode arch=compute_${arch:-90},code=sm_${arch:-90}" # this GPU's code only
name=gpu_$(echo "${gpu:-none}" | tr 'A-Z ' 'a-z_' | tr -cd 'a-z0-9_-')_$date
state=$B/$name
! part build || rm -rf "$state"
[ -z "$prebuilt" ] || find "$B" -type f -exec touch {} + # newer than the sources, for make
mkdir -p "$state" "$out" || die "cannot write to $state and $out"
TORCHINDUCTOR_CACHE_DIR=$(cd "$state" && pwd)/torch

# stage NAME SECONDS COMMAND...: runs it and says how it went; its outputs are in NAME.log, and the standard
# one alone in NAME.out.
left() { echo $((limit - $(date +%s) + began)); }
said() { # NAME RESULT SECONDS COMMAND
    printf '%s\t%s\t%s\t%s\n' "$@" | tr '\n' ' ' > "$state/$1.stage"
    printf '%-36s %s, %s s\n' "$1" "$2" "$3"
}
stage() {
    stage=$1 seconds=$2
    shift 2
    if [ "$(left)" -lt 5 ]; then said "$stage" 'skipped: no time left' 0 "$*"; return; fi
    [ "$seconds" -lt "$(left)" ] || seconds=$(left)
    begin=$(date +%s)
    printf '\n==> %s: %s\n' "$stage" "$*" > "$state/$stage.log"
    timeout -k 5 "$seconds" "$@" < /dev/null > "$state/$stage.out" 2>> "$state/$stage.log"
    status=$?
    cat "$state/$stage.out" >> "$state/$stage.log"
    result=ok
    [ $status -eq 0 ] || result="failed with status $status"
    [ $status -ne 124 ] && [ $status -ne 137 ] || result="ended after its $seconds s"
    # shellcheck disable=SC2016
    last=$(sed -n '/[0-9] passed, [0-9]* failed$/h;${x;p;}' "$state/$stage.log")
    said "$stage" "$result${last:+: $last}" $(($(date +%s) - begin)) "$*"
}
skip() { said "$1" "skipped: $2" 0 ''; }

# ------------------------------------------------------------------------------------------ what is measured
# By kind: options of the model, its shape as the report says it, options of the batches, steps not measured
# and measured, precisions. With of() and model_of(), which read them.
# shellcheck disable=SC2034
if [ -n "$dry" ]; then
    model_vit='--vit Ti/16 --pixels 32 --layers 1' model_text='--layers 1' model_gpt2='--gpt2 --layers 1'
    shape_vit='Ti/16 of 1 layer, 2 images' shape_fixed='1 layer, 2 x 16' shape_imdb='1 layer, batch 2'
    shape_gpt2='1 layer, 1 x 16' batches_gpt2='--seqs 1 --length 16 --batches 1'
    batches_vit='--seqs 2 --pixels 32' batches_fixed='--seqs 2 --length 16'
    batches_imdb='--seqs 2 --length 48 --batches 3'
    precisions_vit=bf16-true precisions_fixed=bf16-true precisions_imdb=bf16-mixed precisions_gpt2=bf16-true
    warm_vit=1 steps_vit=2 warm_fixed=1 steps_fixed=2 warm_imdb=2 steps_imdb=3 warm_gpt2=1 steps_gpt2=1
    step=$B/step quick='--seconds 0 --threads 1'
else
    model_vit='--vit L/16' model_text='' model_gpt2=--gpt2
    shape_gpt2='124M, 16 x 1024' batches_gpt2='--seqs 16 --length 1024 --batches 2'
    shape_vit='L/16, 64 images' shape_fixed='12 x 512' shape_imdb='batch 12'
    batches_vit='--seqs 64 --batches 2' batches_fixed='--seqs 12' batches_imdb='--seqs 12 --batches 48'
    warm_vit=5 steps_vit=20 warm_fixed=10 steps_fixed=100 warm_imdb=20 steps_imdb=48
    warm_gpt2=5 steps_gpt2=20 precisions_gpt2='bf16-true bf16-mixed'
    step=$B/cuda/step quick='--seconds 1'
    precisions_vit=bf16-true precisions_fixed='bf16-true bf16-mixed' precisions_imdb='bf16-true bf16-mixed'
fi
of() { eval "echo \"\$$1_$2\""; }
model_of() {
    case $1 in vit) echo "$model_vit" ;; gpt2) echo "$model_gpt2" ;; *) echo "$model_text" ;; esac
}
variant_of() { case $1 in bf16-true) echo 'bf16 weights' ;; *) echo 'bf16 autocast' ;; esac; }
torch=''
[ -z "$peers" ] || torch=$("$PYTHON" -c 'import torch, transformers, safetensors
print("PyTorch", torch.__version__, "transformers", transformers.__version__)' 2> /dev/null)
make_batches() {
    for kind in $only; do
        real=$imdb
        [ "$kind" = imdb ] || real=''
        # shellcheck disable=SC2046,SC2086
        [ -e "$state/$kind.safetensors" ] || stage "batches_$kind" 90 "$PYTHON" bench/gpu.py batches "$kind" \
            --to "$state/$kind.safetensors" $(of batches "$kind") $real
    done
}
# torch_stage NAME KIND PRECISION eager|compile|reduce SECONDS STEPS
torch_stage() {
    variant="$(variant_of "$3")"
    [ "$4" = eager ] || variant="$variant compiled"
    [ "$4" != reduce ] || variant="$variant with reduce-overhead"
    count=''
    [ "$4" != eager ] || count=--count
    # shellcheck disable=SC2046,SC2086
    stage "$1" "$5" "$PYTHON" bench/gpu.py torch --device "$device" --batches "$state/$2.safetensors" \
        --variant "$variant" --warm "$(of warm "$2")" --steps "$6" $(model_of "$2") $count
}

# -------------------------------------------------------------------------------------------------- the parts
tests='test_ops test_models test_lm test_cuda test_peers test_tensor test_pipeline'
[ -z "$gpu" ] || stage nvidia-smi 20 nvidia-smi
if part build && [ -n "$dry" ]; then stage build 300 make "$B/step" "$B/tt_doctor"
elif part build; then
    # shellcheck disable=SC2046
    stage build 300 make -j 2 "$B/cuda/step" "$B/cuda/tt_doctor" "$B/cuda/test_emu" \
        $(echo "$tests" | sed "s|[^ ]*|$B/cuda/&|g") &
fi
# Beside it, what torch.compile leaves for the processes that measure.
if part measure && [ -n "$torch" ] && [ -z "$dry" ]; then
    make_batches
    for kind in $only; do for precision in $(of precisions "$kind"); do
        torch_stage "compile_$kind.$precision" "$kind" "$precision" compile 240 0 &
    done; done
fi
wait

if part measure; then
    make_batches
    # shellcheck disable=SC2086
    stage peaks 60 "$step" --json --device $device --peaks $quick
    # ours KIND PRECISION NAME OPTION...
    ours() {
        kind=$1 precision=$2 run=$1.$2.$3
        shift 3
        # shellcheck disable=SC2046,SC2086
        stage "$run" 60 "$step" --json --device $device --precision "$precision" \
            --batches "$state/$kind.safetensors" --warm "$(of warm "$kind")" --steps "$(of steps "$kind")" \
            $(model_of "$kind") $quick "$@"
    }
    # What matters most comes first, as time may run out. Images and GPT-2 have a batch's shape in each step,
    # which recorded launches (reduce-overhead) need.
    for side in tinytrain compile eager ops no_wgmma none reduce; do for kind in $only; do
    for precision in $(of precisions "$kind"); do
        case $side.$kind in
        tinytrain.*) ours "$kind" "$precision" tinytrain ;;
        none.vit | none.gpt2) ours "$kind" "$precision" none --recompute none ;;
        no_wgmma.*)
            if [ "$arch" != 90a ]; then skip "$kind.$precision.no_wgmma" 'no GPU of compute capability 9.0'
            else
                export TINYTRAIN_WGMMA=0
                ours "$kind" "$precision" no_wgmma
                unset TINYTRAIN_WGMMA
            fi ;;
        ops.imdb | none.* | reduce.imdb) ;;
        ops.*)
            if [ -n "$dry" ]; then skip "$kind.$precision.ops" 'no GPU'
            else ours "$kind" "$precision" ops --ops --steps 2
            fi ;;
        *)
            if [ -z "$torch" ]; then
                skip "$kind.$precision.$side" 'PyTorch with transformers is not there, or not asked for'
            else torch_stage "$kind.$precision.$side" "$kind" "$precision" $side 90 "$(of steps "$kind")"
            fi ;;
        esac
    done; done; done
fi

most=150 # seconds for each of these, behind measurements
part measure || most=500
if part test && [ -n "$dry" ]; then
    stage doctor 60 "$B/tt_doctor" --device cpu
    skip tests 'no GPU'
elif part test; then
    stage doctor 60 "$B/cuda/tt_doctor" --device cuda
    stage instructions 60 "$B/cuda/test_emu" # what the portability block has in assembly
    # Beside the sanitizers, where these are asked for.
    stage tests $most env TINYTRAIN_CUDA=1 TEST_SECONDS=$((most - 20)) make test TESTS= CHECKS= &
fi

# A tool on a few ops, as many as there is time for. Arguments: compute-sanitizer, tool, program, seconds.
# shellcheck disable=SC2016
sanitize='clean=0 found=0 end=$(($(date +%s) + $4))
for ops in layernorm linear_gelu embedding cross_entropy_linear dropout attention mean_pool set_rows \
    patches; do
    left=$((end - $(date +%s)))
    [ $left -gt 0 ] || { echo "-- $2: no time for $ops"; continue; }
    echo "-- $2: $ops"
    TINYTRAIN_DEVICE=cuda TT_TEST_CASE=$ops timeout $left "$1" --tool "$2" --error-exitcode 9 \
        --print-limit 5 "$3" reference_cuda gradient_cuda attention_by_warpgroups
    case $? in
    0) clean=$((clean + 1)) ;;
    124) echo "-- $2: no time for all of $ops" ;;
    *) found=$((found + 1)) ;;
    esac
done
echo "$clean passed, $found failed"
[ $found -eq 0 ]'
if part sanitize; then
    sanitizer=$(command -v compute-sanitizer || echo "$CUDA_HOME/bin/compute-sanitizer")
    for tool in memcheck racecheck initcheck synccheck; do
        if [ -n "$dry" ]; then skip $tool 'no GPU'
        elif [ ! -x "$sanitizer" ]; then skip $tool 'there is no compute-sanitizer'
        else
            stage $tool $most \
                sh -c "$sanitize" sanitize "$sanitizer" $tool "$B/cuda/test_ops" $((most - 20)) &
        fi
    done
fi
wait

# shellcheck disable=SC2046
cat $(ls -tr "$state"/*.log) > "$out/$name.log"
"$PYTHON" bench/gpu.py report --state "$state" --to "$out/$name" \
    --shapes "vit=$shape_vit" "fixed=$shape_fixed" "imdb=$shape_imdb${imdb:+, real reviews}" \
    "gpt2=$shape_gpt2" \
    --about "gpu=${gpu:-no GPU: a dry run}" "date=$date" "driver=${driver:-none}" "cuda=${cuda:-none}" \
    "peers=${torch:-none}" \
    "revision=$revision" "command=$command" || exit 1
! grep -qE '	(failed|ended|ok: .* [1-9][0-9]* failed)' "$state"/*.stage
