#!/bin/sh
# run.sh PROGRAM SECONDS: runs the fuzz target PROGRAM (`make fuzz`) for SECONDS on its corpus and on the
# inputs in PROGRAM.found, which earlier runs have found. First checks that seeds named good_* are accepted.
# Ends with the line `N passed, N failed`, which tests/run.sh needs. FUZZ_FLAGS: further options of libFuzzer,
# for example -seed=1.
set -u
program=$1 seconds=$2 name=$(basename "$1")
folder=$(dirname "$0")
log=$program.txt
mkdir -p "$program.found"

fail() {
    grep -a -v '^INFO\|^Running\|^#[0-9]' "$log" | head -n "${FUZZ_LINES:-40}"
    echo "FAILED fuzz_$name: $1"
    echo '0 passed, 1 failed'
    exit 1
}

for seed in "$folder/corpus/$name"/good_*; do
    FUZZ_GOOD=1 "$program" -timeout=10 "$seed" > "$log" 2>&1 ||
        fail "a good seed is not accepted: FUZZ_GOOD=1 $program $seed"
done
# shellcheck disable=SC2086
"$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
    -dict="$folder/$name.dict" -artifact_prefix="$program-" \
    ${FUZZ_FLAGS:-} "$program.found" "$folder/corpus/$name" > "$log" 2>&1 ||
    fail "an input breaks it: $program $(sed -n 's/.*Test unit written to //p' "$log")"
echo "ok fuzz_$name"
echo "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log") executions in $seconds s"
echo '1 passed, 0 failed'
