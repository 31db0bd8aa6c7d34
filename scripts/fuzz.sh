#!/usr/bin/env bash
# Runs fuzzing targets side by side: fuzz.sh BUILD SECONDS EXECUTIONS TARGET... Each target runs for SECONDS or, if
# EXECUTIONS is not empty, for its share of them. The parsers in Python are one more target. Fails if a target finds an
# error, hangs for 20 s or takes 2 GiB; its input stays in BUILD.
set -euo pipefail
build=$1 seconds=$2 executions=$3
shift 3
root=$(realpath "$(dirname "$0")/..")
python=$root/.venv/bin/python
targets=("$@")
if "$python" -c "import atheris" 2>/dev/null; then
  targets+=(parsers)
else
  echo "skipped: the parsers in Python, because atheris is not built for this Python"
fi
cd "$build"

# Prints the share of a target in the executions. The fast ones get most: shared memory takes a thousand times as long as
# frames, because each execution makes a segment.
share_of() {
  case $1 in
    frames | plans) echo 120 ;;
    parsers) echo 60 ;;
    shm) echo 1 ;;
    *) echo 15 ;;
  esac
}
shares=0
for target in "${targets[@]}"; do shares=$((shares + $(share_of "$target"))); done

# Prints the command of a target and the folder of its seeds.
command_of() {
  case $1 in
    parsers) echo "$python $root/tests/fuzz/fuzz_parsers.py" "$root/tests/fuzz/corpus" ;;
    *) echo "tests/native/fuzz_$1" "$root/tests/native/fuzz/seeds/$1" ;;
  esac
}

for target in "${targets[@]}"; do
  mkdir -p "corpus/$target"
  read -ra command <<<"$(command_of "$target")"
  seeds=${command[-1]}
  unset "command[-1]"
  limit="-max_total_time=$seconds"
  [ -z "$executions" ] || limit="-runs=$((executions * $(share_of "$target") / shares + 1))"
  "${command[@]}" "$limit" -timeout=20 -rss_limit_mb=2048 -max_len=4096 -artifact_prefix="found_${target}_" \
    "corpus/$target" "$seeds" >"$target.log" 2>&1 &
  running[$!]=$target
done
failed=0 total=0
for process in "${!running[@]}"; do
  target=${running[$process]}
  if wait "$process"; then
    done=$(grep -h '^Done' "$target.log")
    echo "fuzz_$target: $done"
    total=$((total + $(grep -oE '[0-9]+' <<<"$done" | head -n 1)))
  else
    failed=1
    echo "fuzz_$target found an error; its input is $build/found_${target}_..."
    tail -n 60 "$target.log"
  fi
done
echo "$total executions"
exit $failed
