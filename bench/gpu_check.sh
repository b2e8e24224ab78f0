#!/usr/bin/env bash
# On a machine with a GPU, nvcc and a CUDA build of torch, and perhaps no network: builds openspec with what is
# there, runs the GPU tests, runs them again under compute-sanitizer, and times the kernels.
#
#   bench/gpu_check.sh [RESULTS]   figures go to the folder RESULTS, default build/gpu
#
# PYTHON names the interpreter that has torch, SITE a folder to install into (default build/gpu/site), ARCHS the
# architectures (default: those of the GPUs present). Under 10 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
RESULTS=${1:-build/gpu}
SITE=${SITE:-$PWD/build/gpu/site}
mkdir -p "$RESULTS" "$SITE"

# 9.0 -> 90a: the Hopper-only instructions.
ARCHS=${ARCHS:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d ' .' | sort -u |
  sed 's/^90$/90a/' | paste -sd ';')}
nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader
"$PYTHON" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'

echo "==== build for $ARCHS (at $SECONDS s)"
"$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-index --upgrade \
  --target "$SITE" -C build-dir=build/gpu/cmake -C cmake.define.OPENSPEC_CUDA=ON \
  -C cmake.define.OPENSPEC_WERROR=ON "-Ccmake.define.OPENSPEC_CUDA_ARCHS=$ARCHS" .
export PYTHONPATH=$SITE${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
"$PYTHON" -c 'from openspec import ops; assert ops.has_cuda(), "built, but no CUDA device is usable"'

echo "==== GPU tests (at $SECONDS s)"
"$PYTHON" -m pytest tests/gpu tests/ops -q -p no:cacheprovider

echo "==== compute-sanitizer memcheck (at $SECONDS s)"
# A part of the tests: under the sanitizer a kernel takes many times as long. PyTorch's caching allocator
# would hide accesses past the end of a tensor.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
  "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider -k "not graph and not opcheck"

for kernel in bench/kernels/*.py; do
  echo "==== $kernel (at $SECONDS s)"
  "$PYTHON" "$kernel" --json "$RESULTS/$(basename "$kernel" .py).json"
done
echo "==== gpu_check passed in $SECONDS s"
