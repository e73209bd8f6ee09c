#!/usr/bin/env bash
# Builds the package on a machine with a Hopper GPU, offline, and runs what is chosen:
#
#   scripts/gpu.sh OUT_DIR [OPTION]...
#
# --tests      pytest -m gpu (the default), by TEST_WORKERS processes where pytest-xdist is there
# --records    benchmarks/records.py: every record that this machine can make, in RECORD_SECONDS
# --record NAME  this record; may be repeated
# --ep         on all GPUs: the tests of distributed, ep.py (ep.json, ep.png), a trace (trace.json,
#              trace.png), SOAK_STEPS (1000) of a soak by each transport
# --oracle     builds CUTLASS's own grouped GEMM first, so that its tests run, too
# --sanitize   the GPU tests under compute-sanitizer, SANITIZE_SECONDS (500) for each of SANITIZE_TOOLS
#              (memcheck racecheck synccheck), every SANITIZE_THIN-th (5) case of each test
# --ncu        Nsight Compute's counters of every kernel of ops.py: ncu.csv
# --only PATTERN  pytest -k, for --tests and --sanitize
# --op OP      only this operator, for --ncu; may be repeated
# --quick      tiny shapes
# --pack       at the end all logs in one archive, logs.tgz
#
# FP8MOE_COMMIT names the commit in the figures where the sources are no clone. CUTLASS: CUTLASS_DIR,
# the installed nvidia-cutlass wheel, or one in ./.whl. PYTHON names the interpreter (python3), JOBS the
# build's parallel jobs (all cores). Needs torch, pytest, hypothesis, nvcc 12.8+, cmake, ninja, nanobind,
# scikit-build-core.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/gpu.sh OUT_DIR [OPTION]...; the script begins with the list}
shift
declare -A on=()
only= quick=() ops=() records=()
while (($#)); do
  case $1 in
    --tests | --records | --ep | --oracle | --sanitize | --ncu | --pack) on[${1#--}]=1 ;;
    --record) on[records]=1 records+=("$2"); shift ;;
    --only) only=$2; shift ;;
    --op) ops+=(--op "$2"); shift ;;
    --quick) quick=(--quick) ;;
    *) echo "gpu.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
chosen=
for name in tests records ep sanitize ncu; do chosen+=${on[$name]-}; done
[[ $chosen ]] || on[tests]=1
mkdir -p "$out"
out=$(realpath "$out")
python=${PYTHON:-python3}
site=$PWD/build/gpu-site  # what is installed; PYTHONPATH=build/gpu-site uses it afterwards
rm -rf "$site"
mkdir -p "$site"
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)}
FP8MOE_COMMIT=${FP8MOE_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
export FP8MOE_COMMIT
status=0
step() { printf '\n== %s (%ss)\n' "$*" "$SECONDS"; }
# run NAME PYTHON_ARGUMENT...: with a log, and the script's status if it fails
run() {
  local name=$1
  shift
  step "$name"
  "$python" "$@" 2>&1 | tee "$out/$name.log" || status=1
}
# record NAME SCRIPT ARGUMENT...: NAME.json
record() { run "$1" "benchmarks/$2.py" --device cuda --json "$out/$1.json" "${quick[@]}" "${@:3}"; }
draw() { [[ ! -e $out/$1.json ]] || "$python" benchmarks/plot.py "$out/$1.json" "$out/$1.png" || status=1; }

step "environment"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpu.txt"
shopt -s nullglob
wheels=(.whl/nvidia_cutlass-*.whl)
if [[ -z ${CUTLASS_DIR:-} && ${#wheels[@]} -gt 0 ]]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "${wheels[0]}"
fi

step "build"
"$python" -m pip install -v --no-build-isolation --no-deps --no-index --no-compile --target "$site" \
  -C build-dir=build/gpu -C cmake.define.FP8MOE_CUDA=ON . >"$out/build.log" 2>&1 ||
  { tail -n 60 "$out/build.log"; exit 1; }
"$python" -m fp8moe_cutlass doctor | tee "$out/doctor.txt" || true

if [[ ${on[oracle]-} ]]; then
  step "oracle"
  { cmake --preset oracle -G Ninja && cmake --build --preset oracle; } >"$out/oracle.log" 2>&1 ||
    { tail -n 20 "$out/oracle.log"; status=1; }
fi
select=(-m gpu -q -p no:cacheprovider -o "addopts=-ra --strict-markers" tests)
[[ $only ]] && select+=(-k "$only")
if [[ ${on[tests]-} ]]; then
  threads=$(nproc) workers=()  # the CPU backend, which CUDA is compared with, uses threads of its own
  if "$python" -c "import xdist" 2>/dev/null; then  # a worker needs 17 GB of the GPU
    mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
    threads=2 workers=(-n "${TEST_WORKERS:-$((mib / 17000))}")
  fi
  OMP_NUM_THREADS=$threads run tests -m pytest "${select[@]}" "${workers[@]}" --durations=8 \
    --junitxml="$out/tests.xml"
fi
# NVLink multicast is shared by a whole host; the exchange has no use for it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
if [[ ${on[records]-} ]]; then
  run records benchmarks/records.py "$out" "${records[@]}" --seconds "${RECORD_SECONDS:-inf}" "${quick[@]}"
fi
if [[ ${on[ep]-} ]]; then
  ranks=$(nvidia-smi -L | wc -l)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
  run ep-tests -m pytest -m gpu -q -p no:cacheprovider \
    tests/gpu/test_distributed_gpu.py tests/gpu/test_peers_gpu.py
  record ep ep --ranks "$ranks"
  draw ep
  record trace ep_trace --ranks "$ranks"
  draw trace
  for transport in nccl peer; do
    record "soak-$transport" ep_soak --ranks "$ranks" --steps "${SOAK_STEPS:-1000}" --transport "$transport"
  done
fi
if [[ ${on[sanitize]-} ]]; then
  # Large tensors, hundreds of random sizes and whole layers only make it slow. Kernels that wait for
  # one another it runs one by one.
  slow="three_launches or model_sizes or random or layer or train or distributed or graph or replay"
  slow+=" or reach_every_rank"
  # Not initcheck: it sees neither what torch's kernels wrote nor what TMA wrote (docs/notes).
  for tool in ${SANITIZE_TOOLS:-memcheck racecheck synccheck}; do
    step "$tool"
    leave_out=$slow
    # It knows no order between warps that mbarriers make (docs/notes): GEMMs, cuBLAS's of the router
    # among them, SwiGLU backward.
    [[ $tool == racecheck ]] && leave_out+=" or gemm or swiglu or router"
    # Each tensor its own allocation. torch's own kernels are not checked. INT: pytest says what it did
    # in time.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -s INT "${SANITIZE_SECONDS:-500}" compute-sanitizer --tool "$tool" \
      --error-exitcode 9 --kernel-name kernel_substring=fp8moe --log-file "$out/$tool.log" \
      "$python" -m pytest "${select[@]}" -x -m "gpu and not slow" --thin "${SANITIZE_THIN:-5}" \
      -k "${only:-not ($leave_out)}" 2>&1 | tee "$out/$tool-tests.log" | tail -n 3 || status=1
    tail -n 2 "$out/$tool.log"
  done
fi
if [[ ${on[ncu]-} ]]; then
  step "ncu"
  ncu --clock-control none --kernel-name regex:fp8moe --set basic --csv --page raw \
    "$python" benchmarks/ops.py --json "$out/ncu.json" "${ops[@]}" "${quick[@]}" >"$out/ncu.csv" || status=1
fi
step "done, status $status"
[[ ${on[pack]-} ]] && (cd "$out" && tar czf logs.tgz --remove-files -- *.log *.txt *.xml)
exit $status
