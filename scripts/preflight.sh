#!/bin/sh
# Checks the tools that PyPI does not provide: Python with venv and headers, and a C++20 compiler. If one is missing, it
# says how to install it, and exits with 1. Usage: preflight.sh PYTHON CXX
set -u
python=$1
cxx=$2
missing=0

# lacks WHAT APT DNF CONDA
lacks() {
  missing=1
  echo "missing: $1" >&2
  echo "  Debian, Ubuntu:  sudo apt install $2" >&2
  echo "  Fedora, RHEL:    sudo dnf install $3" >&2
  echo "  conda:           conda install -c conda-forge $4" >&2
}

python_is_new() { "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
python_has_venv() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }
python_has_headers() {
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}
compiles_cxx20() {
  echo '#include <bit>
#include <concepts>
#include <span>
int main() { return std::span<const int>{}.empty() ? 0 : std::countr_zero(1u); }' |
    "$cxx" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null
}

if ! python_is_new; then
  lacks "Python 3.10 or newer as '$python' (another one: make PYTHON=/path/to/python3)" \
    "python3 python3-venv python3-dev" "python3.12 python3.12-devel" "python=3.12"
else
  python_has_venv || lacks "the venv module of '$python'" "python3-venv" "python3" "python"
  python_has_headers || lacks "the C headers of '$python'" "python3-dev" "python3-devel" "python"
fi
compiles_cxx20 || lacks "a C++20 compiler as '$cxx' (g++ 11, clang++ 14 or newer; another one: make CXX=g++-12)" \
  "g++" "gcc-c++" "cxx-compiler"
exit $missing
