#!/usr/bin/env bash
# Installs by pip, and shows how far it is: pip_install.sh PYTHON ARGUMENT... A terminal gets one line that changes; a log
# gets a line for every tenth file that is compiled. build/pip.log keeps the whole output, and an error prints its end.
set -uo pipefail
python=$1
shift
mkdir -p build
log=build/pip.log
[ -t 2 ] && terminal=1 || terminal=0
echo "installing; the native core is compiled first if it has changed, which takes one to ten minutes ($log has all output)" >&2

# `pip -v` passes the output of the build on. Ninja begins its lines with [files compiled/all files].
"$python" -m pip --disable-pip-version-check install -v "$@" 2>&1 | tee "$log" | awk -v terminal="$terminal" '
  function show(text) { if (terminal) printf "\r\033[K%s", text; else print text; fflush() }
  match($0, /\[[0-9]+\/[0-9]+\]/) {
    split(substr($0, RSTART + 1, RLENGTH - 2), count, "/")
    if (terminal || count[1] % 10 == 0 || count[1] == count[2]) show("compiling " count[1] " of " count[2])
  }
  /warning:/ { print; fflush() }
  terminal && /^ *(Collecting|Downloading|Installing)/ { show(substr($0, 1, 78)) }
  END { if (terminal) printf "\r\033[K" }' >&2
status=${PIPESTATUS[0]}
[ "$status" = 0 ] || tail -n 40 "$log" >&2
exit "$status"
