#!/usr/bin/env bash
# On a machine with a GPU, nvcc and a CUDA build of torch, and perhaps no network: builds openspec with what is
# there, runs the GPU tests and the exactness gates on the GPU, repeats a part under compute-sanitizer, times the
# kernels and the step, and measures the server on a checkpoint of Qwen3-4B's shape. Under 10 minutes.
#
#   bench/gpu_check.sh [STAGE ...]   stages: build tests sanitizer gates kernels step equality serve (default: all)
#
# PYTHON names the interpreter that has torch, RESULTS the folder for figures (default build/gpu/results), SITE
# what is installed into and imported from (default build/gpu/site), BUILD the build folder (default
# build/gpu/cmake), ARCHS the architectures (default: those of the GPUs present).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-$PWD/build/gpu/results}
SITE=${SITE:-$PWD/build/gpu/site}
BUILD=${BUILD:-$PWD/build/gpu/cmake}
WIDENED=${WIDENED:-$PWD/build/gpu/qwen3-4b}
# 9.0 -> 90a: the Hopper-only instructions.
ARCHS=${ARCHS:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d ' .' | sort -u |
  sed 's/^90$/90a/' | paste -sd ';')}
mkdir -p "$RESULTS" "$SITE"
export PYTHONPATH=$SITE${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

say() { printf '\n==== %s (at %s s)\n' "$*" "$SECONDS"; }

build() {
  say "build for $ARCHS"
  "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-index --upgrade \
    --target "$SITE" -C build-dir="$BUILD" -C cmake.define.OPENSPEC_CUDA=ON \
    -C cmake.define.OPENSPEC_WERROR=ON -C cmake.define.OPENSPEC_TESTS=ON \
    "-Ccmake.define.OPENSPEC_CUDA_ARCHS=$ARCHS" .
  cmake --build "$BUILD" --target cuda_tests bench_cuda
}

tests() {
  say "C++ tests on the GPU"
  local test
  for test in "$BUILD"/tests/cpp/test.cuda.*; do
    printf '%s: ' "$(basename "$test")"
    "$test" | tail -n 1
  done
  say "Python tests on the GPU"
  "$PYTHON" -c 'from openspec import ops; assert ops.has_cuda(), "built, but no CUDA device is usable"'
  "$PYTHON" -m pytest tests/gpu tests/ops -q -p no:cacheprovider
}

# A part of the tests: under the sanitizer a kernel takes many times as long.
sanitizer() {
  say "compute-sanitizer memcheck"
  local test
  for test in step_rows rms_norm rope embedding gather_rows; do
    compute-sanitizer --tool memcheck --error-exitcode 1 "$BUILD/tests/cpp/test.cuda.$test" | tail -n 2
  done
  compute-sanitizer --tool memcheck --error-exitcode 1 "$BUILD/tests/cpp/test.cuda.runner" \
    context_limit prompt_logprobs | tail -n 2
}

gates() {
  say "exactness gates on the GPU"
  "$PYTHON" -m pytest tests/gates --device cuda -q -p no:cacheprovider -x
}

kernels() {
  local bench name
  for bench in "$BUILD"/csrc/kernels/bench_cuda_*; do
    name=${bench##*/bench_}
    say "$name"
    "$bench" --json "$RESULTS/$name.json"
  done
  say "ngram_lookup"
  "$PYTHON" bench/kernels/ngram_lookup.py --json "$RESULTS/ngram_lookup.json"
}

step() {
  say "step"
  "$BUILD/csrc/runtime/bench_cuda_step" --json "$RESULTS/cuda_step.json"
}

# The embedded model, blown up to the shape of Qwen3-4B, and its heads.
widen() {
  [[ -d $WIDENED ]] ||
    "$PYTHON" bench/widen_checkpoint.py python/openspec/models/tiny "$WIDENED" --like qwen3-4b
  [[ -d $WIDENED/eagle3 ]] ||
    "$PYTHON" bench/widen_checkpoint.py python/openspec/models/tiny/eagle3 "$WIDENED/eagle3" --for "$WIDENED" \
      --draft-vocab 32000
}

equality() {
  widen
  say "equality, embedded model at the shape of Qwen3-4B"
  "$PYTHON" -m bench.equality --model "$WIDENED" --json "$RESULTS/equality.json"
}

serve() {
  widen
  say "server, embedded model at the shape of Qwen3-4B"
  "$PYTHON" -m bench.server_behaviour --model "$WIDENED" --json "$RESULTS/server.json"
  # Few requests at a time take long for each prompt; many need more prompts.
  "$PYTHON" -m openspec.bench --model "$WIDENED" --workload repeat,chat,random,mixed --concurrency 1,4 \
    --num-prompts 12 --repeats 2 --json "$RESULTS/serve-1-4.json"
  "$PYTHON" -m openspec.bench --model "$WIDENED" --workload repeat,chat,random,mixed --concurrency 16,64 \
    --num-prompts 64 --repeats 2 --json "$RESULTS/serve-16-64.json"
  say "server, EAGLE-3"
  "$PYTHON" -m openspec.bench --model "$WIDENED" --method eagle3 --workload chat,mixed --concurrency 1,4,16 \
    --num-prompts 24 --repeats 2 --json "$RESULTS/serve-eagle3.json"
}

nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader
"$PYTHON" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'
for stage in "${@:-build tests sanitizer gates kernels step equality serve}"; do
  for name in $stage; do
    case $name in
      build | tests | sanitizer | gates | kernels | step | equality | serve) "$name" ;;
      *) echo "gpu_check.sh: unknown stage $name" >&2; exit 2 ;;
    esac
  done
done
say "gpu_check passed"
