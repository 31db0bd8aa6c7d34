#!/usr/bin/env bash
# A first run on a machine with a GPU, as one command without a network: gpu_day.sh [--rest] [options of bench/gpu.py]
#
# It runs the stages of the group `first` in at most 500 s, and with --rest what is left, in as much: the groups `rest`
# and `nccl`, and processes under MPS. Elsewhere and before, `make gpu-wheel` has put a wheel for this Python into gpu/;
# otherwise the library is built, which takes minutes. These travel in gpu/, too, if they are there:
#
#   packages/          packages that the machine lacks, such as nccl4py, installed by `pip install --target`
#   libnccl.so.2[.gz]  an NCCL of 2.30 or newer, which lets ranks share a GPU, for the group `nccl`
#
# Results go to the folder OUT, or else to build/gpu-day: at most 8 files a run. Records are written as they come. With
# --small on the double of the driver, it shows that everything runs. The exit code is that of the first part that
# failed: 1 if a stage failed, 3 without a GPU, 4 if only a target was missed.
set -uo pipefail
cd "$(dirname "$0")/.."
part=first
if [ "${1-}" = --rest ]; then
  part=rest
  shift
fi
python=${PYTHON:-python3}
out=${OUT:-build/gpu-day}
kept=build/gpu-environment
mkdir -p "$out" build
export OUT=$out PYTHONUNBUFFERED=1
[ ! -d gpu/packages ] || export PYTHONPATH=$PWD/gpu/packages${PYTHONPATH:+:$PYTHONPATH}

install=()
tag=$("$python" -c 'import sys; print("cp{}{}".format(*sys.version_info))')
for wheel in gpu/unisono-*-"$tag"-*.whl; do
  [ ! -e "$wheel" ] || install=(--wheel "$wheel")
done

summary=() code=0
# Runs some stages; their results are $out/NAME.json and NAME.jsonl: run NAME STAGES BUDGET_S OPTION...
run() {
  local name=$1 stages=$2 budget_s=$3 began=$SECONDS status=0
  shift 3
  echo "=== $name: $stages"
  "$python" bench/gpu.py "${install[@]}" --keep "$kept" --only "$stages" --budget "$budget_s" --out "$out/$name.json" "$@" ||
    status=$?
  summary+=("$name: code $status, $((SECONDS - began)) s")
  [ "$code" != 0 ] || code=$status
}

# Runs the group `nccl`, with the NCCL that was taken along.
run_nccl() {
  local library
  library=$(realpath -m build/nccl/libnccl.so.2)
  mkdir -p build/nccl
  if [ -e gpu/libnccl.so.2.gz ]; then
    gunzip -c gpu/libnccl.so.2.gz >"$library"
  elif [ -e gpu/libnccl.so.2 ]; then
    cp gpu/libnccl.so.2 "$library"
  fi
  if [ -e "$library" ]; then
    LD_PRELOAD=$library NCCL_MULTI_RANK_GPU_ENABLE=1 run nccl machine,nccl 150 "$@"
  else
    run nccl machine,nccl 150 "$@"
  fi
}

# Runs processes under MPS, which lets their contexts work side by side. Its server is our own and ends with this.
run_mps() {
  local control
  control=$(PATH=$PATH:/usr/local/nvidia/bin command -v nvidia-cuda-mps-control) || return 0
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  if "$control" -d; then
    trap 'echo quit | "$control"' EXIT
    run mps machine,processes-2 90 "$@"
    echo quit | "$control"
    trap - EXIT
  else
    summary+=("mps: its server does not start")
  fi
  rm -rf "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
}

{
  nvidia-smi || true
  if [ "$part" = first ]; then
    run first first 500 "$@"
  else
    run rest machine,rest 280 "$@"
    # 3: there is no GPU
    if [ "$code" != 3 ]; then
      run_nccl "$@"
      run_mps "$@"
    fi
  fi
  printf '=== %s\n' "${summary[@]}"
} > >(tee "$out/$part.log") 2>&1
exit "$code"
