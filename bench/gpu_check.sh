#!/usr/bin/env bash
# On a machine with a GPU, nvcc and a CUDA build of torch, and perhaps no network: builds openspec with what is
# there, runs the GPU tests and the exactness gates on the GPU, repeats a part under compute-sanitizer, times the
# kernels and the step, and measures the server on a checkpoint of Qwen3-4B's shape. By default build, tests, kernels,
# step and serve, 8.3 minutes on an H200 with 16 cores; the other stages have calls of their own. `tests` is
# cpp_tests, py_tests and gates side by side, for they time nothing, and beside them the checkpoint for `serve` is made.
#
#   bench/gpu_check.sh [STAGE ...]
#
# Stages: build, tests, kernels, step, serve; cpp_tests, py_tests, gates, sanitizer, equality, methods, grammar, compare,
# replicas, ranks (of all GPUs of the machine, two at least).
#
# `compare` runs this build's bench_cuda_step and another's, OLD_STEP, in turn: what a change costs a step.
#
# PYTHON names the interpreter that has torch, RESULTS the folder for figures (default build/gpu/results), SITE
# what is installed into and imported from (default build/gpu/site), BUILD the build folder (default
# build/gpu/cmake), ARCHS the architectures (default: those of the GPUs present), PROBLEMS the gsm8k_test.jsonl of
# openai/grade-school-math, which the methods are then measured on as well, GATES how many gates `ranks` runs (100).
# OPENSPEC_XGRAMMAR_SOURCE names the sdist of the grammar library, which the build cannot download without a network
# (third_party/xgrammar/source.cmake); by default the one that tests/run downloaded,
# build/xgrammar/xgrammar-source/*.tar.gz.
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
for source in "$PWD"/build/xgrammar/xgrammar-source/*.tar.gz; do
  [[ ! -f $source ]] || export OPENSPEC_XGRAMMAR_SOURCE=${OPENSPEC_XGRAMMAR_SOURCE:-$source}
done
export PYTHONPATH=$SITE${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

say() { printf '\n==== %s (at %s s)\n' "$*" "$SECONDS"; }

build() {
  say "build for $ARCHS"
  "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-index --upgrade \
    --target "$SITE" -C build-dir="$BUILD" -C cmake.define.OPENSPEC_CUDA=ON \
    -C cmake.define.OPENSPEC_WERROR=OFF -C cmake.define.OPENSPEC_TESTS=ON \
    -C cmake.define.CMAKE_CUDA_FLAGS=--split-compile=0 "-Ccmake.define.OPENSPEC_CUDA_ARCHS=$ARCHS" .
  cmake --build "$BUILD" --target cuda_tests bench_cuda
}

cpp_tests() {
  say "C++ tests on the GPU"
  local test output failed=0
  for test in "$BUILD"/tests/cpp/test.cuda.*; do
    printf '%s: ' "$(basename "$test")"
    if output=$("$test" 2>&1); then
      tail -n 1 <<<"$output"
    else
      failed=1
      printf 'failed\n%s\n' "$output"
    fi
  done
  return $failed
}

py_tests() {
  say "Python tests on the GPU"
  "$PYTHON" -c 'from openspec import ops; assert ops.has_cuda(), "built, but no CUDA device is usable"'
  "$PYTHON" -m pytest tests/gpu tests/ops -q -p no:cacheprovider
}

# Several engines at a time: one alone waits for its host most of the time.
gates() {
  say "exactness gates on the GPU"
  "$PYTHON" -m pytest tests/gates --device cuda --full -q -p no:cacheprovider -x -n 4
}

tests() {
  local stage together=(cpp_tests py_tests gates) pids=() failed=0
  [[ " $stages " != *" serve "* ]] || together+=(widen_target)
  for stage in "${together[@]}"; do
    "$stage" >"$RESULTS/$stage.log" 2>&1 &
    pids+=($!)
  done
  for stage in "${pids[@]}"; do wait "$stage" || failed=1; done
  for stage in "${together[@]}"; do cat "$RESULTS/$stage.log"; done
  return $failed
}

# Under the sanitizer a kernel takes many times as long: of the runner's tests a part, of the others the short ones.
sanitizer() {
  say "compute-sanitizer memcheck"
  local test
  for test in "$BUILD"/tests/cpp/test.cuda.*; do
    case ${test##*.} in
      linear_wgmma | span_attention_wgmma) continue ;;
      runner) set -- context_limit prompt_logprobs ;;
      *) set -- ;;
    esac
    printf '%s: ' "$(basename "$test")"
    compute-sanitizer --tool memcheck --error-exitcode 1 "$test" "$@" | tail -n 1
  done
}

kernels() {
  local bench name dim
  for bench in "$BUILD"/csrc/kernels/bench_cuda_*; do
    name=${bench##*/bench_}
    [[ $name != *_choices ]] || continue  # a minute for each size of heads, and only for whoever sets the dispatch
    say "$name"
    "$bench" --json "$RESULTS/$name.json"
  done
  for dim in 64 128; do
    "$BUILD/csrc/kernels/bench_cuda_attention" --ratios $dim --json "$RESULTS/attention_ratios_$dim.json"
  done
  say "ngram_lookup"
  "$PYTHON" bench/kernels/ngram_lookup.py --json "$RESULTS/ngram_lookup.json"
}

step() {
  say "step"
  "$BUILD/csrc/runtime/bench_cuda_step" --method none --method ngram --json "$RESULTS/cuda_step.json"
  local shape
  for shape in llama-3.1-8b llama-3.2-1b qwen2.5-7b; do
    "$BUILD/csrc/runtime/bench_cuda_step" --shape "$shape" --json "$RESULTS/cuda_step_$shape.json"
  done
}

compare() {
  say "steps of $OLD_STEP and of this build, in turn"
  "$PYTHON" -m bench.compare_steps "$OLD_STEP" "$BUILD/csrc/runtime/bench_cuda_step" --rounds "${ROUNDS:-2}" \
    --method none --method eagle3 --json "$RESULTS/compare.json"
}

# The embedded model, blown up to the shape of Qwen3-4B.
widen_target() {
  [[ -d $WIDENED ]] ||
    "$PYTHON" bench/widen_checkpoint.py python/openspec/models/tiny "$WIDENED" --like qwen3-4b
}

# And its heads, to published sizes.
widen() {
  local head
  widen_target
  for head in "eagle3 --draft-vocab 32000" "dflash --layers 5" "dspark --layers 5 --markov-rank 256"; do
    # shellcheck disable=SC2086
    set -- $head
    [[ -d $WIDENED/$1 ]] ||
      "$PYTHON" bench/widen_checkpoint.py "python/openspec/models/tiny/$1" "$WIDENED/$1" --for "$WIDENED" "${@:2}"
  done
}

equality() {
  widen
  say "equality, embedded model at the shape of Qwen3-4B"
  "$PYTHON" -m bench.equality --model "$WIDENED" --methods ngram --json "$RESULTS/equality-ngram.json"
  "$PYTHON" -m bench.equality --model "$WIDENED" --methods eagle3,dflash,dspark --concurrency 4,16,64 \
    --json "$RESULTS/equality-heads.json"
}

# Plain decoding against a method: bench_method NAME FLAG...
bench_method() {
  say "$1, embedded model at the shape of Qwen3-4B"
  "$PYTHON" -m openspec.bench --model "$WIDENED" --num-prompts 16 --repeats 1 --json "$RESULTS/method-$1.json" \
    ${PROBLEMS:+--dataset "$PROBLEMS"} "${@:2}"
}

serve() {
  widen_target
  say "server, embedded model at the shape of Qwen3-4B"
  "$PYTHON" -m bench.measure ready --with "plain=--model $WIDENED" --json "$RESULTS/ready.json"
  "$PYTHON" -m bench.measure prompts --with "plain=--model $WIDENED" --json "$RESULTS/prompts.json"
  bench_method ngram --concurrency 1,4,8,16,32,64 --workload repeat,chat,mixed,random
}

# What tokens bring that a grammar forces.
grammar() {
  widen
  say "grammars, embedded model at the shape of Qwen3-4B"
  "$PYTHON" -m bench.measure forced --model "$WIDENED" --concurrency 1 16 64 --json "$RESULTS/forced.json" \
    --runs none ngram "eagle3:$WIDENED/eagle3" "dflash:$WIDENED/dflash"
}

methods() {
  say "step with heads"
  "$BUILD/csrc/runtime/bench_cuda_step" --json "$RESULTS/cuda_step_heads.json"
  widen
  local some=(--concurrency 1,4,8,16,32 --workload chat)
  bench_method eagle3 --method eagle3 "${some[@]}"
  bench_method eagle3-tree --method eagle3 --num-speculative-tokens 5 --method-option draft_top_k=4 "${some[@]}"
  bench_method dflash --method dflash "${some[@]}"
  bench_method dflash-tree --method dflash --method-option draft_top_k=8 "${some[@]}"
  bench_method dspark --method dspark "${some[@]}"
  bench_method dspark-tree --method dspark --method-option draft_top_k=64 \
    --method-option draft_tree_size=15 "${some[@]}"
}

# Two engines on one GPU: they start, serve, lose one and drain; then one front with engines that have no model.
replicas() {
  widen_target
  say "two replicas on one GPU, embedded model at the shape of Qwen3-4B"
  "$PYTHON" -m bench.kill_replica --replicas 2 --seconds 40 --every 20 --json "$RESULTS/replicas.json" \
    -- --model "$WIDENED" --devices 0
  say "what one front carries"
  "$PYTHON" -m bench.front_load --engines 8 --streams 64,128,192,256 --seconds 8 --json "$RESULTS/front.json"
}

# rank_steps GPUS SHAPE...: what steps take that these GPUs share. A shape that has too few splits, or no room, says so.
rank_steps() {
  local shape num
  num=$(tr ',' '\n' <<<"$1" | wc -l)
  for shape in "${@:2}"; do
    CUDA_VISIBLE_DEVICES=$1 "$BUILD/csrc/runtime/bench_cuda_step" --shape "$shape" --tensor-parallel-size "$num" \
      --method none --method eagle3 --requests 1 --requests 16 --requests 64 \
      --json "$RESULTS/step_${shape}_$num.json" || true
  done
}

# As many gates as GATES says, taken at random of those of so many ranks: on four GPUs one takes a second, and all of
# them a quarter of an hour.
rank_gates() {
  local gates
  mapfile -t gates < <("$PYTHON" -m pytest tests/gates/test_device_faults.py tests/gates/test_tensor_parallel.py \
    --device cuda --collect-only -q | grep -E -- "-$1\]$|\[$1(-[0-9]+)?\]$" | shuf -n "${GATES:-100}")
  say "${#gates[@]} gates of $1 ranks"
  [[ ${#gates[@]} -gt 0 ]]
  "$PYTHON" -m pytest "${gates[@]}" --device cuda -q -p no:cacheprovider
}

# Targets that all GPUs share: exchanges, gates, steps beside those of each half of the GPUs, texts beside one GPU's.
# What times nothing runs while the checkpoint is made.
ranks() {
  local most half gpus making
  most=$(nvidia-smi --list-gpus | wc -l) half=$((most / 2)) gpus=$(seq -s , 0 $((most - 1)))
  say "$most ranks"
  "$BUILD/csrc/kernels/bench_cuda_exchange" --ranks "$most" --json "$RESULTS/exchange_$most.json"
  widen >"$RESULTS/widen.log" 2>&1 &
  making=$!
  "$BUILD/csrc/kernels/bench_cuda_exchange" --ranks "$most" --soak 500
  "$BUILD/tests/cpp/test.cuda.ranks"
  rank_gates "$most"
  wait "$making" || { cat "$RESULTS/widen.log"; return 1; }
  say "steps that $half GPUs share, and $most"
  rank_steps "$(seq -s , 0 $((half - 1)))" qwen3-4b qwen3-8b qwen3-32b >"$RESULTS/steps_of_half.log" 2>&1 &
  rank_steps "$(seq -s , $half $((most - 1)))" llama-3.3-70b
  wait
  cat "$RESULTS/steps_of_half.log"
  rank_steps "$gpus" qwen3-4b qwen3-8b qwen3-32b llama-3.3-70b
  "$PYTHON" -m bench.compare_ranks "$RESULTS"/step_*_"$half".json "$RESULTS"/step_*_"$most".json
  "$PYTHON" -m bench.equality --model "$WIDENED" --methods eagle3 --concurrency 16,64 \
    --tensor-parallel-size "$most" --json "$RESULTS/equality-ranks.json"
}

nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader
"$PYTHON" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'
stages=${*:-build tests kernels step serve}
for stage in $stages; do
  case $stage in
    build | tests | cpp_tests | py_tests | gates | sanitizer | kernels | step | equality | serve | methods | grammar | compare | replicas | ranks) "$stage" ;;
    *) echo "gpu_check.sh: unknown stage $stage" >&2; exit 2 ;;
  esac
done
say "gpu_check passed"
