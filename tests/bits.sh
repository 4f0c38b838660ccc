#!/bin/sh
# bits.sh OLD NEW [PATTERN...]: trains tiny models with two versions of the library (tests/bits.c) and
# compares losses, norms, outputs, parameters, optimizer state (the same bits) and plans (none larger). OLD
# and NEW are folders with the repository's files (but for tests/golden); `make bits BASE=...` makes the old
# one. PATTERN matches names of cases, such as 'vit/16-*'. Results of OLD are kept, and used again until
# tests/bits.c changes.
#
#   KINDS   "cpu cuda" (the default): on which kinds of device; cuda is emulated
#   EVERY   17: one of this number of cases is run, and half as many on instruction sets other than the best,
#           a quarter on cuda. 1: all
#   B       build: folder for programs and results
#   CC, CXX, CFLAGS (-O2)
set -u
[ $# -ge 2 ] || { sed -n '2,12s/^# *//p' "$0"; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
old=$(cd "$1" && pwd) && new=$(cd "$2" && pwd) || exit 2
shift 2
B=${B:-build} EVERY=${EVERY:-17} KINDS=${KINDS:-cpu cuda}
CC=${CC:-cc} CFLAGS=${CFLAGS:--O2} MAKE=${MAKE:-make}
case $CC in *clang*) CXX=${CXX:-clang++} ;; *) CXX=${CXX:-c++} ;; esac
mkdir -p "$B/bits" && B=$(cd "$B/bits" && pwd) || exit 2
strict="-std=c99 -Wall -Wextra -Wpedantic"

newer() # newer OUTPUT SOURCE...: is the output newer than all sources?
{
    out=$1; shift
    [ -f "$out" ] || return 1
    for f in "$@"; do [ "$out" -nt "$f" ] || return 1; done
}

build() # build old|new cpu|cuda FOLDER: compiles tests/bits.c
{
    program=$B/$1.$2
    has=
    grep -q '^    tt_compile_options compile;' "$3/tinytrain.h" && has=-DHAS_COMPILE
    if [ "$2" = cpu ]; then
        newer "$program" "$here/bits.c" "$3/tinytrain.h" && return 0
        $CC $CFLAGS $strict $has -I"$3" "$here/bits.c" -o "$program" -lm -lpthread
        return
    fi
    newer "$program" "$here/bits.c" "$3/tinytrain.h" "$3/tinytrain_cuda.cu" "$3"/tests/cuda_emu/* && return 0
    # Compiles each version with its own emulator, and with the sizes that its Makefile sets for the emulator.
    show='emu_defines: ; @echo $(EMU_DEFINES)'
    defines=$(cd "$3" && env -u MAKEFLAGS -u MAKELEVEL $MAKE -s --eval "$show" emu_defines) || return 1
    cxx="-std=c++17 -g -ftrivial-auto-var-init=pattern"
    fma=
    grep -qsw fma /proc/cpuinfo && fma="-mfma -ffp-contract=off"
    for part in cuda_emu cuda_emu_blas; do
        (cd "$3" && $CXX $cxx -O1 -c tests/cuda_emu/$part.cpp -o "$program.$part.o") || return 1
    done
    (cd "$3" && $CXX $cxx -O2 $fma $defines -x c++ -c tinytrain_cuda.cu -o "$program.cu.o") || return 1
    (cd "$3" && $CC -O1 $strict -DTINYTRAIN_CUDA -DTT_EMULATE -DTINYTRAIN_NO_AVX2 $defines \
        $has -c "$here/bits.c" -o "$program.c.o") || return 1
    $CXX "$program.c.o" "$program.cu.o" "$program.cuda_emu.o" "$program.cuda_emu_blas.o" -o "$program" \
        -lm -lpthread
}

# Joins the lines of both versions by the case's name. A plan, its lower bound, and the bytes to initialise
# the parameters may be smaller in the new version; all else must be equal.
cat > "$B/compare.awk" <<'AWK'
FNR == NR { if ($1 != "absent") line[$1] = $0; next }
$1 == "absent" { next }
{
    n++
    if (!($1 in line)) { print "  " $1 ": only in the new version"; bad++; next }
    split(line[$1], a); delete line[$1]; wrong = ""
    for (i = 2; i <= NF; i++) {
        if (a[i] == $i) continue
        split(a[i], x, "="); split($i, y, "=")
        if (x[1] == "plan" || x[1] == "bound" || x[1] == "init") {
            if (y[2] + 0 < x[2] + 0) { if (x[1] == "plan") smaller++ }
            else wrong = wrong " " x[1] " " x[2] " -> " y[2]
        } else wrong = wrong " " x[1] (x[1] == "last" || x[1] == "skipped" ? " " x[2] " -> " y[2] : "")
    }
    if (wrong != "") { print "  " $1 ":" wrong; bad++; if (first == "") first = $1 }
}
END {
    for (k in line) { print "  " k ": only in the old version"; bad++ }
    printf "%-20s %d cases, %d differ%s\n", what, n, bad + 0, smaller ? ", " smaller " plans are smaller" : ""
    print n + 0, bad + 0, first > result
}
AWK

cases=0 bad=0
run() # old|new ARGUMENT...
{
    program=$B/$1.$kind; shift
    TINYTRAIN_ISA=$isa TINYTRAIN_BF16=$bf16 "$program" --kind $kind "$@"
}

compare() # compare cpu|cuda EVERY ISA BF16 [PATTERN...]
{
    kind=$1 every=$2 isa=$3 bf16=$4; shift 4
    what="$kind${isa:+ $isa}${bf16:+ $bf16}"
    for version in old new; do
        of=$B/$version.$kind.$isa.$bf16.txt
        printf '%s\n' "$every $*" > "$B/asked"
        [ $version = old ] && newer "$of" "$B/old.$kind" && cmp -s "$B/asked" "$of.asked" && continue
        run $version --every $every "$@" > "$of.part" 2> "$B/errors"
        if [ $? -ne 0 ]; then
            echo "$what: the $version version failed: $(head -n 3 "$B/errors")"
            bad=$((bad + 1))
            rm -f "$of" "$of.part"
            return
        fi
        mv "$of.part" "$of"
        cp "$B/asked" "$of.asked"
    done
    if grep -q '^absent' "$of"; then printf '%-20s absent\n' "$what"; return; fi
    awk -v what="$what" -v result="$B/result" -f "$B/compare.awk" "$B/old.$kind.$isa.$bf16.txt" "$of"
    read -r n differ first < "$B/result"
    cases=$((cases + n)) bad=$((bad + differ))
    [ -n "$first" ] || return
    for version in old new; do
        run $version --tensors "$first" | sed -n 's/^  //p' | sort > "$B/$version.tensors"
    done
    tensors=$(diff "$B/old.tensors" "$B/new.tensors" | sed -n 's/^> //p' | head -n 8 | cut -d ' ' -f -2)
    echo "    tensors of $first that differ:" $tensors
}

for kind in $KINDS; do
    if ! build old $kind "$old" || ! build new $kind "$new"; then
        echo "bits.sh: a version does not compile"
        exit 2
    fi
    if [ $kind = cuda ]; then
        compare cuda $((EVERY * 4 + 1)) "" "" "$@"
        continue
    fi
    compare cpu $EVERY "" "" "$@"
    for isa in portable avx2 avx512 neon; do compare cpu $((EVERY * 2 + 1)) $isa "" "$@"; done
    for bf16 in convert dot tiles; do compare cpu $((EVERY * 2 + 1)) "" $bf16 "${@:-*/bf16-*}"; done
done
echo "$cases cases compared, $bad differ"
[ $bad -eq 0 ] && [ $cases -gt 0 ]
