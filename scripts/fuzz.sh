#!/usr/bin/env bash
# Runs fuzzing targets side by side: fuzz.sh BUILD SECONDS TARGET... Fails if one finds an error; its input stays in BUILD.
set -euo pipefail
build=$1 seconds=$2
shift 2
seeds=$(realpath "$(dirname "$0")/../tests/native/fuzz/seeds")
cd "$build"
for target in "$@"; do
  mkdir -p "corpus/$target"
  tests/native/fuzz_"$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=4096 \
    -artifact_prefix="found_${target}_" "corpus/$target" "$seeds/$target" >"$target.log" 2>&1 &
  running[$!]=$target
done
failed=0
for process in "${!running[@]}"; do
  target=${running[$process]}
  if wait "$process"; then
    echo "fuzz_$target: $(grep -h '^Done' "$target.log")"
  else
    failed=1
    echo "fuzz_$target found an error (repeat it by: $build/tests/native/fuzz_$target $build/found_${target}_...):"
    tail -n 60 "$target.log"
  fi
done
exit $failed
