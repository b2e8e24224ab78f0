#pragma once

/// cuBLASLt, to compare the linears with.

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "cuda_bench.h"
#include "kernels/linear/linear.h"

namespace openspec::bench {

/// The same products by cuBLASLt, bf16 in and out: of the first algorithms that it proposes for a
/// shape the fastest.
template <typename Bench>
class Cublas {
 public:
  explicit Cublas(const Bench& bench)
      : bench_(bench), workspace_(device_array<uint8_t>(kWorkspaceBytes)) {
    check(cublasLtCreate(&handle_), "cublasLtCreate");
  }
  ~Cublas() {
    for (const auto& [key, product] : products_) {
      cublasLtMatrixLayoutDestroy(product.weights);
      cublasLtMatrixLayoutDestroy(product.rows);
      cublasLtMatrixLayoutDestroy(product.out);
      cublasLtMatmulDescDestroy(product.operation);
    }
    cublasLtDestroy(handle_);
    cudaFree(workspace_);
  }
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  /// Chooses an algorithm for every matrix.
  void prepare(int num_rows) {
    for (const auto& matrix : bench_.matrices()) {
      const LinearParams params = matrix.params(0, num_rows, bench_.x());
      Product product = describe(params);
      double best_us = 0;
      for (const cublasLtMatmulAlgo_t& algorithm : propose(product)) {
        Product tried = product;
        tried.algorithm = algorithm;
        const double us = bench_.matrix_us(
            matrix,
            [&](const LinearParams& each, cudaStream_t stream) { return run(tried, each, stream); },
            num_rows, 3);
        if (best_us == 0 || us < best_us) {
          best_us = us;
          product = tried;
        }
      }
      products_[key(params)] = product;
    }
  }

  int operator()(const LinearParams& params, cudaStream_t stream) const {
    return run(products_.at(key(params)), params, stream);
  }

 private:
  static constexpr size_t kWorkspaceBytes = size_t{64} << 20;
  static constexpr int kNumProposals = 8;

  using Key = std::array<int, 3>;
  struct Product {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t weights = nullptr, rows = nullptr, out = nullptr;
    cublasLtMatmulAlgo_t algorithm = {};
  };

  static void check(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    std::fprintf(stderr, "%s: cuBLAS status %d\n", what, static_cast<int>(status));
    std::exit(1);
  }
  static Key key(const LinearParams& params) {
    return {params.weight.num_outputs, params.weight.num_inputs, params.num_rows};
  }

  /// In the columns-first terms of cuBLAS: out[N, M] = weights[K, N]^T rows[K, M].
  static Product describe(const LinearParams& params) {
    const auto [n, k, m] = key(params);
    Product product;
    check(cublasLtMatmulDescCreate(&product.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check(cublasLtMatmulDescSetAttribute(product.operation, CUBLASLT_MATMUL_DESC_TRANSA,
                                         &transposed, sizeof transposed),
          "cublasLtMatmulDescSetAttribute");
    check(cublasLtMatrixLayoutCreate(&product.weights, CUDA_R_16BF, k, n, k), "weights' layout");
    check(cublasLtMatrixLayoutCreate(&product.rows, CUDA_R_16BF, k, m, k), "rows' layout");
    check(cublasLtMatrixLayoutCreate(&product.out, CUDA_R_16BF, n, m, n), "output's layout");
    return product;
  }

  std::vector<cublasLtMatmulAlgo_t> propose(const Product& product) const {
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &kWorkspaceBytes, sizeof kWorkspaceBytes),
          "cublasLtMatmulPreferenceSetAttribute");
    std::array<cublasLtMatmulHeuristicResult_t, kNumProposals> results;
    int count = 0;
    check(cublasLtMatmulAlgoGetHeuristic(handle_, product.operation, product.weights, product.rows,
                                         product.out, product.out, preference, kNumProposals,
                                         results.data(), &count),
          "cublasLtMatmulAlgoGetHeuristic");
    cublasLtMatmulPreferenceDestroy(preference);
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int i = 0; i < count; ++i) algorithms.push_back(results[static_cast<size_t>(i)].algo);
    return algorithms;
  }

  int run(const Product& product, const LinearParams& params, cudaStream_t stream) const {
    const float one = 1.0f, zero = 0.0f;
    void* out = params.partials != nullptr ? params.partials : params.out;
    check(cublasLtMatmul(handle_, product.operation, &one, params.weight.data, product.weights,
                         params.x, product.rows, &zero, out, product.out, out, product.out,
                         &product.algorithm, workspace_, kWorkspaceBytes, stream),
          "cublasLtMatmul");
    return cudaSuccess;
  }

  const Bench& bench_;
  void* workspace_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Key, Product> products_;
};

}  // namespace openspec::bench
