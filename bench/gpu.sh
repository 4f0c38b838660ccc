#!/bin/sh
# Measures and tests tinytrain on a GPU, in one command of at most 9 minutes: tests, training steps and a
# whole training, both compared with PyTorch, the time of each op, and a small part of
# the tests under compute-sanitizer. Each stage has a time limit of its own, and the report is written anew
# every 5 seconds, so that a run that is cut off leaves its results.
#
#   PYTHON=python3 bench/gpu.sh      builds first; needs an NVIDIA GPU, the CUDA toolkit, and for the peers
#                                    torch and transformers
#   bench/gpu.sh --test --measure    these parts only (--build --test --measure --train --ops --sanitize)
#
# If a GPU is available for minutes only: run bench/gpu.sh --build --arch 90a on another machine, and on the
# GPU's machine bench/gpu.sh --prebuilt --out DIR --revision TEXT --imdb DIR --vocab DIR, which builds
# nothing.
#
#   bench/gpu.sh --dry-run           runs without a GPU: small shapes on the CPU; what needs a GPU is skipped
#
#   --out DIR       folder for NAME.json, NAME.md and NAME.log, where NAME is gpu_, the GPU and the date
#                   (bench/results)
#   --limit N       seconds for all of this call; stages that no longer fit are skipped (530)
#   --revision TEXT revision of the sources, if there is no git (what git says)
#   --imdb DIR, --vocab DIR   aclImdb and a folder with vocab.txt (bench/minilm_imdb.py --make-vocab makes
#                             one): for the training, and real reviews instead of lengths drawn as IMDb's are
#   --cache DIR     folder of what torch.compile compiled, for calls on another GPU of the same kind: read if
#                   it exists, else written
#   --only LIST     what to measure, of vit, fixed, imdb and gpt2: ViT-L/16, DistilBERT on 12 x 512 tokens and
#                   on texts of IMDb's lengths, GPT-2 on 16 x 1,024 ('vit fixed imdb gpt2')
#   --build --arch A   on a machine without a GPU: builds for that architecture (90a: H100, H200)
#   --prebuilt      $B was built from these sources with --build --arch, on another machine, and is not built
#                   here
#   --no-peers      measures tinytrain alone
#   environment: B (build), CUDA_HOME (/usr/local/cuda), NVCC, CC, PYTHON (python3), GPU_LOCK (/tmp/gpu.lock),
#                which is locked (flock) while the GPU is measured
#
# PyTorch's peers start at once and compile side by side while the tests run; they are timed one at a time
# after tinytrain (class Turn in gpu.py). If a stage fails or runs out of time, it is reported, and the other
# stages still run; the status is 1 if one failed. The output of the stages is in NAME.log.
set -u
cd "$(dirname "$0")/.." || exit 1
B=${B:-build} CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} PYTHON=${PYTHON:-python3} began=$(date +%s)
NVCC=${NVCC:-$CUDA_HOME/bin/nvcc} GPU_LOCK=${GPU_LOCK:-/tmp/gpu.lock}
command="bench/gpu.sh $*" parts='' out=bench/results limit='' dry='' peers=yes imdb='' vocab='' cache=''
only='vit fixed imdb gpt2' prebuilt='' arch=''
revision=$(git rev-parse --short HEAD 2> /dev/null || echo unknown)
die() { echo "gpu.sh: $*" >&2; exit 1; }
while [ $# -gt 0 ]; do
    case $1 in
    --build | --test | --measure | --train | --ops | --sanitize) parts="$parts ${1#--}" ;;
    --dry-run) dry=yes ;;
    --no-peers) peers= ;;
    --prebuilt) prebuilt=yes ;;
    --out | --limit | --only | --imdb | --vocab | --cache | --arch | --revision)
        [ $# -gt 1 ] || die "$1 needs a value"
        case $1 in
        --out) out=$2 ;;
        --limit) limit=$2 ;;
        --only) only=$2 ;;
        --arch) arch=$2 ;;
        --revision) revision=$2 ;;
        --imdb) imdb=$2 ;;
        --vocab) vocab=$2 ;;
        --cache) cache=$2 ;;
        esac
        shift ;;
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
    *) die "unknown option '$1'; --help lists them" ;;
    esac
    shift
done
all=''
if [ -z "$parts" ]; then
    all=yes
    parts=' test measure train ops sanitize'
    [ -n "$prebuilt" ] || parts=" build$parts"
fi
# A call that only builds needs no GPU, so it may take longer.
[ -n "$limit" ] || case $parts in ' build') limit=3600 ;; *) limit=530 ;; esac
for kind in $only; do
    case $kind in vit | fixed | imdb | gpt2) ;;
    *) die "--only '$kind': there are vit, fixed, imdb and gpt2" ;; esac
done
case $limit in *[!0-9]* | '') die "--limit takes seconds, not '$limit'" ;; esac
[ -z "$imdb$vocab" ] || { [ -d "$imdb/train/pos" ] && [ -e "$vocab/vocab.txt" ]; } ||
    die "--imdb and --vocab go together: '$imdb' lacks train/pos or '$vocab' lacks vocab.txt"
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
    cuda=$("$NVCC" --version 2> /dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    [ -n "$cuda" ] || [ -n "$prebuilt" ] || die "no CUDA compiler: $NVCC (CUDA_HOME or NVCC names another)"
fi
# Reports missing files at once, which the build would report minutes later.
if [ -z "$dry" ] && part build; then
    for file in include/cublasLt.h include/cuda_runtime.h lib64/libcublasLt.so; do
        [ -e "$CUDA_HOME/$file" ] || die "there is no $CUDA_HOME/$file: install cuBLAS of the CUDA toolkit"
    done
elif [ -z "$dry" ]; then
    missing=$(ldd "$B/cuda/step" 2>&1 | grep -E 'not found|No such file') &&
        die "$B/cuda/step cannot run here: $missing; LD_LIBRARY_PATH may name where it is"
fi
device=${dry:+cpu} device=${device:-cuda}
export B CUDA_HOME TORCHINDUCTOR_CACHE_DIR='' TRITON_CACHE_DIR='' TORCHINDUCTOR_COMPILE_THREADS=3
export TORCH_LOGS=perf_hints,recompiles,graph_breaks HF_HUB_OFFLINE=1 # logs why a graph is not recorded
# nvcc gets no --split-compile, which puts arrays of 64 kernels, attention among them, into local memory
# (CUDA 13.0).
export NVCC="$NVCC --threads 0"
export CUDA_WERROR='' # no -Werror: another machine's compiler may warn where ours does not
export CUDA_CODE="-gencode arch=compute_${arch:-90},code=sm_${arch:-90}" # code for this GPU only
name=gpu_$(echo "${gpu:-none}" | tr 'A-Z ' 'a-z_' | tr -cd 'a-z0-9_-')_$date
state=$B/$name
[ -z "$all" ] || rm -rf "$state" # without this, several calls share a report
mkdir -p "$state" "$out" ${cache:+"$cache"} || die "cannot write to $state and $out"
TORCHINDUCTOR_CACHE_DIR=$(cd "$state" && pwd)/torch TRITON_CACHE_DIR=$TORCHINDUCTOR_CACHE_DIR/triton

# stage NAME SECONDS COMMAND...: runs the command and reports the result. All output is in NAME.log, standard
# output alone in NAME.out.
left() { echo $((limit - $(date +%s) + began)); }
said() { # said NAME RESULT SECONDS COMMAND: writes and prints a result
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
# A prefix for commands that measure: a lock that gives a command the GPU alone.
alone='' lock_tool=$(command -v flock)
[ -z "$lock_tool" ] || [ -n "$dry" ] || alone="$lock_tool $GPU_LOCK"

# ------------------------------------------------------------------------------------------ what is measured
# For each kind: options of the model, its shape in the report, options of the batches, steps not measured and
# measured, precisions. of() and model_of() read these variables.
# shellcheck disable=SC2034
if [ -n "$dry" ]; then
    model_vit='--vit Ti/16 --pixels 32 --layers 1' model_text='--layers 1' model_gpt2='--gpt2 --layers 1'
    layers='--layers 1'
    shape_vit='Ti/16 of 1 layer, 2 images' shape_fixed='1 layer, 2 x 16' shape_imdb='1 layer, batch 2'
    shape_gpt2='1 layer, 1 x 16' batches_gpt2='--seqs 1 --length 16 --batches 1'
    batches_vit='--seqs 2 --pixels 32' batches_fixed='--seqs 2 --length 16'
    batches_imdb='--seqs 2 --length 48 --batches 3'
    precisions_vit=bf16-true precisions_fixed=bf16-true precisions_imdb=bf16-mixed precisions_gpt2=bf16-true
    warm_vit=1 steps_vit=2 warm_fixed=1 steps_fixed=2 warm_imdb=2 steps_imdb=3 warm_gpt2=1 steps_gpt2=1
    step=$B/step quick='--seconds 0 --threads 1' train_program=$B/distilbert_imdb
    train_options='--train 4 --test 2 --epochs 1 --batch 4'
else
    model_vit='--vit L/16' model_text='' model_gpt2=--gpt2 layers=''
    shape_gpt2='124M, 16 x 1024' batches_gpt2='--seqs 16 --length 1024 --batches 2'
    shape_vit='L/16, 64 images' shape_fixed='12 x 512' shape_imdb='batch 12'
    batches_vit='--seqs 64 --batches 2' batches_fixed='--seqs 12' batches_imdb='--seqs 12 --batches 48'
    warm_vit=6 steps_vit=20 warm_fixed=15 steps_fixed=100 warm_imdb=20 steps_imdb=48
    warm_gpt2=6 steps_gpt2=20 precisions_gpt2='bf16-true bf16-mixed'
    step=$B/cuda/step quick='--seconds 0.3' train_program=$B/cuda/distilbert_imdb
    precisions_vit=bf16-true precisions_fixed='bf16-true bf16-mixed' precisions_imdb=bf16-mixed
    # 22,720 is the largest number of training reviews: the example holds out another tenth of the 25,000 for
    # validation.
    train_options='--train 22720 --test 10000 --epochs 2 --batch 32 --lr 1e-4'
fi
of() { eval "echo \"\$$1_$2\""; }
model_of() {
    case $1 in vit) echo "$model_vit" ;; gpt2) echo "$model_gpt2" ;; *) echo "$model_text" ;; esac
}
variant_of() { # PRECISION MODE
    case $1 in bf16-true) v='bf16 weights' ;; *) v='bf16 autocast' ;; esac
    case $2 in compile) v="$v compiled" ;; reduce) v="$v compiled with reduce-overhead" ;; esac
    echo "$v"
}
torch=''
[ -z "$peers" ] || torch=$("$PYTHON" -c 'import torch, transformers, safetensors
print("PyTorch", torch.__version__, "transformers", transformers.__version__)' 2> /dev/null)
[ -z "$imdb" ] || [ -n "$torch" ] || die '--imdb needs PyTorch with transformers'
# Prints the test programs, each with its tests that run on a GPU.
test_list() {
    for program in test_ops test_models test_lm test_cuda test_peers test_tensor test_pipeline; do
        printf '%s ' $program
        # shellcheck disable=SC2016
        printf 'include Makefile\ncases: ; @echo $(CUDA_T_%s)\n' $program | make -s -f - cases
    done
}

report() {
    # shellcheck disable=SC2046
    cat $(ls -tr "$state"/*.log) > "$state/log" && mv "$state/log" "$out/$name.log"
    "$PYTHON" bench/gpu.py report --state "$state" --to "$out/$name" \
        --shapes "vit=$shape_vit" "fixed=$shape_fixed" "imdb=$shape_imdb${imdb:+, real reviews}" \
        "gpt2=$shape_gpt2" \
        --about "gpu=${gpu:-no GPU: a dry run}" "date=$date" "driver=${driver:-none}" "cuda=${cuda:-none}" \
        "peers=${torch:-none}" "revision=$revision" "command=$command" \
        "took=$(($(date +%s) - began)) s" > "$state/report"
}
# Writes the report every few seconds, for a call that is ended from outside.
rm -f "$state/done"
[ "$parts" != ' build' ] || : > "$state/done"
(
    seconds=0
    while sleep 1 && kill -0 $$ 2> /dev/null && [ ! -e "$state/done" ]; do
        seconds=$((seconds + 1))
        [ $((seconds % 5)) -ne 0 ] || report 2> /dev/null
    done
) &
reporter=$!

# -------------------------------------------------------------------------------------------------- the parts
[ -z "$gpu" ] || stage nvidia-smi 20 nvidia-smi
if part build && [ -n "$dry" ]; then stage build 300 make "$B/step" "$B/tt_doctor" "$B/distilbert_imdb"
elif part build; then
    # shellcheck disable=SC2046
    stage build 3600 make -j 2 "$B/cuda/step" "$B/cuda/tt_doctor" "$B/cuda/distilbert_imdb" \
        "$B/cuda/test_emu" $(test_list | sed "s|^\([^ ]*\).*|$B/cuda/\1|")
    test_list > "$B/cuda/tests"
fi

# Adds a peer of PyTorch's to the list: a line with its name and options. SIDE is a name in SIDES of gpu.py.
# peer SIDE KIND PRECISION MODE OPTION...
peer() {
    side=$1 kind=$2 precision=$3 v=$(variant_of "$3" "$4")
    shift 4
    case " $only " in *" $kind "*) ;; *) return ;; esac
    case " $(of precisions "$kind") " in *" $precision "*) ;; *) return ;; esac
    echo "$kind.$precision.$side --device $device --batches $state/$kind.safetensors --variant '$v'" \
        "--warm $(of warm "$kind") --steps $(of steps "$kind")" \
        "${cache:+--cache $cache/$kind.$precision.$side}" "$*" >> "$state/peers"
}
# The most important peers come first, as time may run out. With DistilBERT PyTorch waits for its host, so the
# fair peer records its launches (reduce-overhead), which needs the same shape in each step. The plain GPT-2
# (bench/nano_gpt.py) with a padded vocabulary and without dropout is the fastest; the GPT-2 with 50,257
# tokens and dropout does tinytrain's work.
list_peers() {
    peer reduce vit bf16-true reduce --whole "$model_vit"
    for precision in bf16-mixed bf16-true; do
        peer reduce fixed $precision reduce --whole "$model_text"
    done
    peer nano_padded gpt2 bf16-mixed compile --nano 50304 --dropout 0 "$layers"
    peer nano_dropout gpt2 bf16-mixed compile --nano 50257 --dropout 0.1 "$layers"
    peer nano_padded_dropout gpt2 bf16-true compile --nano 50304 --dropout 0.1 "$layers"
    peer nano_padded gpt2 bf16-true compile --nano 50304 --dropout 0 "$layers"
    peer compile vit bf16-true compile --whole "$model_vit"
    for precision in bf16-true bf16-mixed; do
        peer eager vit "$precision" eager --count --whole "$model_vit"
        peer eager fixed "$precision" eager --count --whole "$model_text"
        peer eager gpt2 "$precision" eager --count --whole "$model_gpt2"
        peer eager imdb "$precision" eager --count "$model_text"
    done
    peer nano_padded_reduce gpt2 bf16-mixed reduce --nano 50304 --dropout 0 "$layers"
    peer nano_padded_dropout gpt2 bf16-mixed compile --nano 50304 --dropout 0.1 "$layers"
    peer nano gpt2 bf16-mixed compile --nano 50257 --dropout 0 "$layers"
    peer compile gpt2 bf16-mixed compile --whole "$model_gpt2"
    peer compile imdb bf16-mixed compile --dynamic "$model_text"
}
coordinator='' waiting=''
if part measure; then
    for kind in $only; do
        real=''
        [ "$kind" != imdb ] || [ -z "$imdb" ] || real="--imdb $imdb --vocab $vocab"
        # shellcheck disable=SC2046,SC2086
        stage "batches_$kind" 90 "$PYTHON" bench/gpu.py batches "$kind" \
            --to "$state/$kind.safetensors" $(of batches "$kind") $real &
        waiting="$waiting $!"
    done
    # shellcheck disable=SC2086
    wait $waiting
fi
if part measure && [ -n "$torch" ]; then
    : > "$state/peers"
    list_peers
    "$PYTHON" bench/gpu.py peers --list "$state/peers" --state "$state" --lock "$GPU_LOCK" \
        --after "$state/go" --compile $((limit / 3)) --each 40 --later $((limit / 3)) \
        --limit "$(($(left) - 5))" &
    coordinator=$!
elif part measure; then
    skip peers 'PyTorch with transformers is not there, or not asked for'
fi

if part test && [ -n "$dry" ]; then
    stage doctor 60 "$B/tt_doctor" --device cpu
    skip tests 'no GPU'
elif part test; then
    stage doctor 60 "$B/cuda/tt_doctor" --device cuda
    # Tests run side by side. As many processes as there are processors share the tests of ops.
    [ -e "$B/cuda/tests" ] || test_list > "$B/cuda/tests"
    most=$((limit / 4)) # seconds for all tests
    export TEST_PROGRESS="$state/progress" TEST_SECONDS=$((most - 2))
    sh tests/run.sh start "$TEST_PROGRESS" "$(wc -l < "$B/cuda/tests")" '' > /dev/null
    stage test_emu $most "$B/cuda/test_emu" & # tests the portability block's assembly
    waiting=$!
    while read -r program cases; do
        test_parts=1
        [ "$program" != test_ops ] || test_parts=$(getconf _NPROCESSORS_ONLN)
        # shellcheck disable=SC2086
        stage $program $most env TEST_PARTS="$test_parts" sh tests/run.sh run "$state/$program.part" \
            env TINYTRAIN_DEVICE=cuda "$B/cuda/$program" $cases &
        waiting="$waiting $!"
    done < "$B/cuda/tests"
    # shellcheck disable=SC2086
    wait $waiting
fi

# ours KIND PRECISION NAME OPTION...: measures tinytrain as stage KIND.PRECISION.NAME
ours() {
    kind=$1 precision=$2 run=$1.$2.$3
    shift 3
    # shellcheck disable=SC2046,SC2086
    stage "$run" ${dry:+1}30 $alone "$step" --json --device $device --precision "$precision" \
        --batches "$state/$kind.safetensors" --warm "$(of warm "$kind")" --steps "$(of steps "$kind")" \
        $(model_of "$kind") $quick "$@"
}
has() { "$step" --help 2>&1 | grep -q -- " $1 "; }
if part measure; then
    # shellcheck disable=SC2086
    stage peaks ${dry:+1}30 $alone "$step" --json --device $device --peaks $quick
    for side in tinytrain tuned nodrop nodrop_tuned none; do for kind in $only; do
    for precision in $(of precisions "$kind"); do
        case $side.$kind in
        tinytrain.*) ours "$kind" "$precision" tinytrain ;;
        tuned.imdb) ;;
        tuned.*) has --tune && ours "$kind" "$precision" tuned --tune on ;;
        nodrop.gpt2) ours "$kind" "$precision" nodrop --no-dropout ;;
        nodrop_tuned.gpt2) has --tune && ours "$kind" "$precision" nodrop_tuned --no-dropout --tune on ;;
        none.vit | none.gpt2)
            [ "$limit" -lt 500 ] || ours "$kind" "$precision" none --recompute none ;;
        esac
    done; done; done
    : > "$state/go"
    [ -z "$coordinator" ] || wait $coordinator
fi

# Trains DistilBERT on the reviews of IMDb from start to end. Both sides have the same random weights.
if part train && [ -z "$imdb" ]; then
    skip train 'no --imdb and --vocab'
elif part train; then
    stage train_start 60 "$PYTHON" bench/minilm_imdb.py --make-start "$state/start" --vocab "$vocab"
    # shellcheck disable=SC2086
    stage train.bf16-mixed.tinytrain 60 $alone "$PYTHON" bench/gpu.py training \
        --metrics "$state/run/metrics.csv" -- "$train_program" --device $device --data "$imdb" \
        --model "$state/start" --out "$state/run" --precision bf16-mixed --max-tokens 16384 $train_options
    # shellcheck disable=SC2086
    stage train.bf16-mixed.eager 75 $alone "$PYTHON" bench/gpu.py training -- \
        "$PYTHON" bench/minilm_imdb.py --device $device --imdb "$imdb" --start "$state/start" \
        --precision bf16-mixed --test-once $train_options
    rm -rf "$state/run" "$state/start"
fi

# Times each op by itself, with attention by warpgroups (wgmma) and without.
if part ops; then
    for wgmma in 1 0; do for kind in $only; do for precision in $(of precisions "$kind"); do
        case $kind.${dry:-no}.$wgmma in
        imdb.* | *.yes.0) continue ;;
        *.yes.1) skip "$kind.$precision.ops" 'no GPU'; continue ;;
        *.1) [ "$arch" = 90a ] || continue ;;
        esac
        # shellcheck disable=SC2046
        [ -e "$state/$kind.safetensors" ] || stage "batches_$kind" 90 "$PYTHON" bench/gpu.py batches "$kind" \
            --to "$state/$kind.safetensors" $(of batches "$kind")
        export TINYTRAIN_WGMMA=$wgmma
        ours "$kind" "$precision" ops_wgmma_$wgmma --ops --steps 2
        unset TINYTRAIN_WGMMA
    done; done; done
fi

# Runs a tool on several ops side by side, as far as the time allows. Arguments: compute-sanitizer,
# tool, program, seconds, a folder for logs.
# shellcheck disable=SC2016
sanitize='mkdir -p "$5" && end=$(($(date +%s) + $4))
export TINYTRAIN_DEVICE=cuda
one() {
    ops=$1
    shift
    TT_TEST_CASE=$ops timeout $((end - $(date +%s))) "$tool" --tool "$kind" --error-exitcode 9 \
        --print-limit 5 "$program" "$@" > "$logs/$ops.log" 2>&1
    echo $? > "$logs/$ops.status"
}
tool=$1 kind=$2 program=$3 logs=$5
one attention_by_warpgroups attention_by_warpgroups &
for ops in layernorm linear_gelu embedding cross_entropy_linear dropout attention mean_pool set_rows \
    patches; do
    one $ops reference_cuda gradient_cuda &
done
wait
clean=0 found=0
for status in "$logs"/*.status; do
    ops=$(basename "$status" .status)
    case $(cat "$status") in
    0) clean=$((clean + 1)) ;;
    124) echo "-- $kind: no time for all of $ops" ;;
    *) found=$((found + 1)); echo "-- $kind: $ops"; cat "$logs/$ops.log" ;;
    esac
done
echo "$clean passed, $found failed"
[ $found -eq 0 ]'
if part sanitize; then
    sanitizer=$(command -v compute-sanitizer || echo "$CUDA_HOME/bin/compute-sanitizer") waiting=''
    for tool in memcheck racecheck initcheck synccheck; do
        if [ -n "$dry" ]; then skip $tool 'no GPU'
        elif [ ! -x "$sanitizer" ]; then skip $tool 'there is no compute-sanitizer'
        elif [ "$(left)" -lt 30 ]; then skip $tool 'no time left'
        else
            most=$(($(left) - 20))
            stage $tool $((most + 10)) sh -c "$sanitize" sanitize "$sanitizer" $tool "$B/cuda/test_ops" \
                $most "$state/$tool" &
            waiting="$waiting $!"
        fi
    done
    # shellcheck disable=SC2086
    [ -z "$waiting" ] || wait $waiting
fi

: > "$state/done"
wait $reporter
report || exit 1
cat "$state/report"
! grep -qE '	(failed|ended|ok: .* [1-9][0-9]* failed)' "$state"/*.stage
