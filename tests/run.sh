#!/bin/sh
# Runs test programs and adds up their results. A program prints lines `ok NAME`, `FAILED NAME: why` and
# `skip NAME: why`, and a last line that ends with `N passed, N failed`. The Makefile's recipes call:
#
#   run.sh start FILE PROGRAMS ABOUT        prints ABOUT; FILE then counts how many of the PROGRAMS are done
#   run.sh run LOG PROGRAM [ARG...]         runs one program into LOG and prints LOG; a program that dies is a
#                                           failure in LOG. With TEST_PARTS=16, 16 processes at once share the
#                                           tests (TEST_PART of test_main.h)
#   run.sh skip LOG WHY                     writes to LOG that a program cannot run here, and why
#   run.sh total LOG...                     prints the failures and a last line `N passed, N failed`; status 1
#                                           unless tests passed and none failed
#   run.sh coverage FILE PERCENT NOT_RUN    reads the output of `gcov -t` for any number of programs; prints
#                                           the percentage of FILE's lines that ran
set -u

# ended NAME SECONDS WORKED notes that a program ended. TEST_PROGRESS is the FILE of `start`, whose first line
# is the number of programs.
ended() {
    echo "$1" >> "$TEST_PROGRESS"
    done=$(($(wc -l < "$TEST_PROGRESS") - 1))
    echo "-- $1 took $2 s, processors worked $3 s; $done of $(head -n 1 "$TEST_PROGRESS") programs are done"
}

# run_into LOG NAME PROGRAM [ARG...] runs a program into LOG, and adds a failure if the program died.
run_into() {
    to=$1 name=$2
    shift 2
    # shellcheck disable=SC2086
    $limit "$@" > "$to" 2>&1 < /dev/null
    status=$?
    if ! grep -q '[0-9] passed, [0-9]* failed$' "$to"; then
        echo "FAILED $name: ended with status $status before its last line" >> "$to"
    elif [ "$status" -ne 0 ] && ! grep -q '^FAILED ' "$to"; then
        echo "FAILED $name: ended with status $status" >> "$to"
    fi
}

# join_parts LOG... joins the logs of a program's parts. A test that ran in several parts is ok if it is ok in
# all of them.
join_parts() {
    cat "$@" | awk '
        { name = $2; sub(/:$/, "", name) }
        / passed, [0-9]+ failed$/ { checks += $1; next }
        $1 == "FAILED" { print; bad[name] = 1; failed++; next }
        $1 == "ok" || $1 == "skip" { if (!(name in line)) { line[name] = $0; order[++n] = name }; next }
        { print }
        END {
            for (k = 1; k <= n; k++) {
                if (order[k] in bad) continue
                print line[order[k]]
                split(line[order[k]], word)
                if (word[1] == "ok") passed++
                else skipped++
            }
            printf "%d checks, %d skipped: %d passed, %d failed\n", checks, skipped, passed, failed
        }'
}

case $1 in
start)
    echo "$3" > "$2"
    echo "== $3 programs$4"
    ;;
skip)
    echo "skip $(basename "$2" .log): $3" | tee "$2"
    echo '0 passed, 0 failed' >> "$2"
    ended "$(basename "$2" .log)" 0 0
    ;;
run)
    log=$2
    shift 2
    name=$(basename "$log" .log)
    begin=$(date +%s)
    # Synced files are in memory, if there is room, because on a busy disk tests would take minutes.
    room=$(df -Pk /dev/shm 2> /dev/null | awk 'NR == 2 { print $4 }')
    [ -n "${TMPDIR:-}" ] || [ ! -w /dev/shm ] || [ "${room:-0}" -lt 1000000 ] || export TMPDIR=/dev/shm
    limit=
    command -v timeout > /dev/null && limit="timeout ${TEST_SECONDS:-1800}"
    if [ "${TEST_PARTS:-1}" -gt 1 ]; then
        rm -f "$log".part[0-9]*
        part=1
        while [ $part -le "$TEST_PARTS" ]; do
            (export TEST_PART="$part/$TEST_PARTS"; run_into "$log.part$part" "$name, part $part" "$@") &
            part=$((part + 1))
        done
        wait
        join_parts "$log".part[0-9]* > "$log"
        rm -f "$log".part[0-9]*
    else
        run_into "$log.part" "$name" "$@"
        mv "$log.part" "$log"
    fi
    sed "s/^\([0-9]* passed, [0-9]* failed\)\$/-- \1/" "$log"
    times > "$log.times" # line 1: times of the shell; line 2: of its programs
    cpu=$(awk -F '[ms ]+' 'NR == 2 { print int($1 * 60 + $2 + $3 * 60 + $4) }' "$log.times")
    ended "$name" $(($(date +%s) - begin)) "$cpu"
    ;;
total)
    shift
    passed=$(cat "$@" | grep -c '^ok ')
    failed=$(cat "$@" | grep -c '^FAILED ')
    skipped=$(cat "$@" | grep -c '^skip ')
    echo "== $# programs, $skipped tests skipped"
    grep -h '^FAILED ' "$@"
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
    ;;
coverage)
    # gcov -t prints lines COUNT:LINE:TEXT, with COUNT -, #####, ===== or a number. A line may occur once for
    # each instance of a function.
    awk -F: -v file="$2" -v least="$3" -v not_run="$4" '
        $2 ~ /^ *0$/ { if ($3 == "Source") { n = split($4, part, "/"); here = part[n] == file }; next }
        !here || NF < 3 { next }
        { count = $1; gsub(/[ *]/, "", count); line = $2 + 0 }
        count == "-" || count == "" || !line { next }
        { lines[line] = 1; if (line > last) last = line; text[line] = $0 }
        count ~ /^[0-9]/ { run[line] = 1 }
        END {
            printf "" > not_run
            for (k = 1; k <= last; k++) {
                if (!(k in lines)) continue
                all++
                if (k in run) { good++; continue }
                sub(/^[^:]*: */, "", text[k])
                print text[k] > not_run
            }
            if (!all) { print "coverage: no line of " file " was counted"; exit 1 }
            printf "coverage: %.1f%% of %d lines of %s (at least %s%%); the others are in %s\n",
                100 * good / all, all, file, least, not_run
            exit 100 * good < least * all
        }'
    ;;
esac
