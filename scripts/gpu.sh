#!/usr/bin/env bash
# Builds the package and puts it through its paces on a machine with a Hopper GPU, offline.
#
#   scripts/gpu.sh OUT_DIR [--tests] [--bench] [--layer] [--layer-full] [--sweep] [--train-cuda MINUTES]
#                  [--ep] [--gemm] [--oracle] [--sanitize] [--ncu] [--only PATTERN] [--op OP]... [--quick] [--pack]
#
# --tests     pytest -m gpu (the default when nothing is chosen), by TEST_WORKERS processes (one for 17 GB of the GPU)
#             where pytest-xdist is there
# --bench     fp8moe-cutlass bench --device cuda: bench.json and bench.png
# --layer     fp8moe-cutlass bench --layer --device cuda: layer.json and layer.png
# --layer-full  the same, and bench --memory: memory.json
# --sweep     fp8moe-cutlass bench --sweep in SWEEP_SECONDS (90): sweep.json and sweep.png
# --train-cuda  train --size h200: FP8 and bf16, TRAIN_SEEDS (3) seeds, text = every
#             Python source here, for at most MINUTES; loss.json and loss.png. It goes on from what is
#             in runs/h200 (finished runs: loss.json alone is enough), so call it again until done.
# --ep        all GPUs that nvidia-smi sees, by NCCL: the tests of distributed, bench --ep (ep.json, ep.png), a soak of SOAK_STEPS
#             (1000; soak.json, soak.png), a trace (trace.json, trace.png), and the loss of train by
#             one GPU and by all (train-1.json, train-ep.json)
# --gemm      fp8moe-cutlass bench --gemm in GEMM_SECONDS (360) and --accuracy: gemm.json, accuracy.json
# --oracle    builds CUTLASS's own grouped GEMM first, so that its tests run, too
# --sanitize  the GPU tests again under compute-sanitizer, SANITIZE_SECONDS (500) for each of
#             SANITIZE_TOOLS (memcheck racecheck synccheck), every SANITIZE_THIN-th (5) case of each test; racecheck without those of GEMMs, the router and SwiGLU
# --ncu       Nsight Compute's counters of every kernel of a quick bench
# --only      pytest -k PATTERN, for --tests and --sanitize
# --op        only this op, for --bench and --ncu; may be repeated. --quick: one tiny shape an op
# --pack      at the end all logs in one archive, logs.tgz
#
# FP8MOE_COMMIT names the commit in the figures where the sources are no clone.
# Needs Python 3.10+ with torch, pytest and hypothesis, nvcc 12.8+, cmake, ninja, nanobind and
# scikit-build-core. CUTLASS: CUTLASS_DIR, the installed nvidia-cutlass wheel, or one in ./.whl.
# PYTHON names the interpreter (python3), JOBS the build's parallel jobs (all cores).
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:?usage: scripts/gpu.sh OUT_DIR [--tests] [--bench] [--layer] [--layer-full] [--sweep] [--train-cuda MINUTES] [--ep] [--gemm] [--oracle] [--sanitize] [--ncu] [--only PATTERN] [--op OP] [--quick] [--pack]}
shift
tests= bench= layer= memory= sweep= train= ep= gemm= oracle= sanitize= ncu= only= pack= quick=() ops=()
while (($#)); do
  case $1 in
    --tests) tests=1 ;;
    --bench) bench=1 ;;
    --layer) layer=1 ;;
    --layer-full) layer=1 memory=1 ;;
    --sweep) sweep=1 ;;
    --train-cuda) train=$2; shift ;;
    --ep) ep=1 ;;
    --pack) pack=1 ;;
    --gemm) gemm=1 ;;
    --oracle) oracle=1 ;;
    --sanitize) sanitize=1 ;;
    --ncu) ncu=1 ;;
    --only) only=$2; shift ;;
    --op) ops+=(--op "$2"); shift ;;
    --quick) quick=(--quick) ;;
    *) echo "gpu.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
[[ $tests$bench$layer$ep$sweep$train$gemm$sanitize$ncu ]] || tests=1
mkdir -p "$out"
out=$(realpath "$out")
python=${PYTHON:-python3}
site=$PWD/build/gpu-site  # what is installed; PYTHONPATH=build/gpu-site uses it afterwards
rm -rf "$site"
mkdir -p "$site"
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)}
commit=${FP8MOE_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
export FP8MOE_COMMIT=$commit
step() { printf '\n== %s (%ss)\n' "$*" "$SECONDS"; }

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

status=0
if [[ $oracle ]]; then
  step "oracle"
  { cmake --preset oracle -G Ninja && cmake --build --preset oracle; } >"$out/oracle.log" 2>&1 ||
    { tail -n 20 "$out/oracle.log"; status=1; }
fi
select=(-m gpu -q -p no:cacheprovider -o "addopts=-ra --strict-markers" tests/gpu
  tests/test_integrations_te.py tests/test_integrations_megatron.py)
[[ $only ]] && select+=(-k "$only")
if [[ $tests ]]; then
  step "tests"
  threads=$(nproc) workers=()  # the CPU backend, which CUDA is compared with, uses threads of its own
  if "$python" -c "import xdist" 2>/dev/null; then
    mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
    threads=2 workers=(-n "${TEST_WORKERS:-$((mib / 17000))}")
  fi
  OMP_NUM_THREADS=$threads "$python" -m pytest "${select[@]}" "${workers[@]}" --durations=8 --junitxml="$out/tests.xml" 2>&1 |
    tee "$out/tests.log" || status=1
fi
if [[ $bench ]]; then
  step "bench"
  "$python" -m fp8moe_cutlass bench --device cuda --json "$out/bench.json" --plot "$out/bench.png" \
    "${ops[@]}" "${quick[@]}" 2>&1 | tee "$out/bench.log" || status=1
fi
if [[ $layer ]]; then
  step "layer"
  "$python" -m fp8moe_cutlass bench --layer --device cuda --json "$out/layer.json" \
    --plot "$out/layer.png" "${quick[@]}" 2>&1 | tee "$out/layer.log" || status=1
fi
if [[ $gemm ]]; then
  step "gemm"
  "$python" -m fp8moe_cutlass bench --gemm --device cuda --budget "${GEMM_SECONDS:-360}" \
    --json "$out/gemm.json" "${ops[@]}" "${quick[@]}" 2>&1 | tee "$out/gemm.log" || status=1
  "$python" -m fp8moe_cutlass bench --accuracy --device cuda --json "$out/accuracy.json" \
    "${quick[@]}" 2>&1 | tee "$out/accuracy.log" || status=1
fi
if [[ $memory ]]; then
  step "memory"
  "$python" -m fp8moe_cutlass bench --memory --device cuda --json "$out/memory.json" "${quick[@]}" 2>&1 |
    tee "$out/memory.log" || status=1
fi
if [[ $sweep ]]; then
  step "sweep"
  "$python" -m fp8moe_cutlass bench --sweep --budget "${SWEEP_SECONDS:-90}" --device cuda \
    --json "$out/sweep.json" --plot "$out/sweep.png" 2>&1 | tee "$out/sweep.log" || status=1
fi
if [[ $train ]]; then
  step "train"
  runs=runs/h200
  size=h200
  ((${#quick[@]})) && runs=runs/tiny size=tiny
  "$python" -m fp8moe_cutlass train --device cuda --size $size --every-python \
    --seeds "${TRAIN_SEEDS:-3}" --out $runs --resume --minutes "$train" 2>&1 | tee "$out/train.log" || status=1
  for file in $runs/loss.*; do [[ ! -e $file ]] || cp "$file" "$out"; done
fi
if [[ $ep ]]; then
  ranks=$(nvidia-smi -L | wc -l)
  # NVLink multicast is shared by a whole host; the exchange has no use for it.
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
  bench_ep() { "$python" -m fp8moe_cutlass bench --ep "$ranks" --device cuda "$@"; }
  step "tests, $ranks GPUs"
  "$python" -m pytest -m gpu -q -p no:cacheprovider tests/gpu/test_distributed_gpu.py 2>&1 |
    tee "$out/ep-tests.log" || status=1
  step "ep, $ranks GPUs"
  bench_ep --json "$out/ep.json" --plot "$out/ep.png" "${quick[@]}" 2>&1 | tee "$out/ep.log" || status=1
  step "trace"
  bench_ep --trace "$out/trace.json" "${quick[@]}" 2>&1 | tee "$out/trace.log" || status=1
  step "soak"
  bench_ep --soak "${SOAK_STEPS:-1000}" --json "$out/soak.json" --plot "$out/soak.png" 2>&1 |
    tee "$out/soak.log" || status=1
  step "train by one and by $ranks"
  train_small() { "$python" -m fp8moe_cutlass train --device cuda --size small --steps 300 "$@"; }
  train_small --out "$out/train-1" 2>&1 | tee "$out/train-1.log" || status=1
  train_small --out "$out/train-ep" --ep "$ranks" 2>&1 | tee "$out/train-ep.log" || status=1
  for run in train-1 train-ep; do mv "$out/$run/loss.json" "$out/$run.json" && rm -r "${out:?}/$run"; done
fi
if [[ $sanitize ]]; then
  # Large tensors, hundreds of random sizes and whole layers only make it slow.
  slow="three_launches or model_sizes or random or layer or train or distributed or graph or replay"
  # Not initcheck: it sees neither what torch's kernels wrote nor what TMA wrote (docs/notes).
  for tool in ${SANITIZE_TOOLS:-memcheck racecheck synccheck}; do
    step "$tool"
    leave_out=$slow
    # It knows no order between warps that mbarriers make (docs/notes): GEMMs, cuBLAS's of the router
    # among them, SwiGLU backward.
    [[ $tool == racecheck ]] && leave_out+=" or gemm or swiglu or router"
    # Each tensor its own allocation. torch's own kernels are not what is checked. INT: pytest says
    # what it did in time.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -s INT "${SANITIZE_SECONDS:-500}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      --kernel-name kernel_substring=fp8moe --log-file "$out/$tool.log" \
      "$python" -m pytest "${select[@]}" -x -m "gpu and not slow" --thin "${SANITIZE_THIN:-5}" \
      -k "${only:-not ($leave_out)}" 2>&1 | tee "$out/$tool-tests.log" | tail -n 3 || status=1
    tail -n 2 "$out/$tool.log"
  done
fi
if [[ $ncu ]]; then
  step "ncu"
  ncu --clock-control none --kernel-name regex:fp8moe --set basic --csv --page raw \
    "$python" -m fp8moe_cutlass bench --device cuda "${ops[@]}" "${quick[@]}" >"$out/ncu.csv" ||
    status=1
fi
step "done, status $status"
[[ $pack ]] && (cd "$out" && tar czf logs.tgz --remove-files -- *.log *.txt *.xml)
exit $status
