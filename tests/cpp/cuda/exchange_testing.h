#pragma once

/// What the tests of exchanges share: the ranks of a model, all on one device, and a product of
/// which each has its splits.

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cuda/linear_testing.h"
#include "kernels/common/device.h"
#include "kernels/exchange/exchange.h"
#include "kernels/linear/splits.h"
#include "kernels/norm/rms_norm.h"

namespace openspec::testing {

/// Set before CUDA is used: kernels that wait for each other on one device are loaded before any
/// waits, and come in queues of their own.
inline const bool has_room_for_ranks = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0 &&
                                       setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0;

/// The memory of each rank and its view of all.
class Ranks {
 public:
  Ranks(int num_ranks, const InboxFloats& floats, uint64_t deadline_ns = 10'000'000'000)
      : faults_(static_cast<size_t>(num_ranks) * sizeof(uint32_t)) {
    Exchange view = {.num_ranks = num_ranks, .floats = floats};
    view.deadline_ns = deadline_ns;
    for (int rank = 0; rank < num_ranks; ++rank) {
      memory_.push_back(std::make_unique<DeviceBuffer>(exchange_bytes(floats)));
      view.memory[rank] = memory_.back()->as<std::byte>();
    }
    for (view.rank = 0; view.rank < num_ranks; ++view.rank) {
      view.fault = faults_.as<uint32_t>() + view.rank;
      views_.push_back(view);
    }
    clear();
  }

  int size() const { return static_cast<int>(views_.size()); }
  const Exchange& operator[](int rank) const { return views_[static_cast<size_t>(rank)]; }
  void clear() {
    CHECK_CUDA(cudaMemset(faults_.data(), 0, faults_.bytes()));
    for (const Exchange& view : views_) CHECK_CUDA(clear_exchange_cuda(view, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  uint32_t fault(int rank) const { return faults_.download<uint32_t>()[static_cast<size_t>(rank)]; }
  /// Whether all slots are empty, and nothing is written behind a rank's memory.
  bool are_empty() const {
    for (const std::unique_ptr<DeviceBuffer>& memory : memory_) {
      const std::vector<uint8_t> bytes = memory->download<uint8_t>();
      const auto end = bytes.begin() + kInboxSlots * views_.front().floats.slot * ptrdiff_t{4};
      if (!std::all_of(bytes.begin(), end, [](uint8_t byte) { return byte == 0xff; })) return false;
      if (!memory->guard_is_whole()) return false;
    }
    return true;
  }

 private:
  DeviceBuffer faults_;
  std::vector<std::unique_ptr<DeviceBuffer>> memory_;
  std::vector<Exchange> views_;
};

/// A product whose splits are shared out, then its norm. Every rank has its own residual and
/// output, and one device with all of the matrix has them, too.
class SharedProduct {
 public:
  SharedProduct(const Shape& shape, int num_ranks, int max_rows)
      : whole_(shape),
        residual_(random_bf16(elements(shape.num_outputs, max_rows), 3.0f, 5)),
        weight_(Rng(6).normals(static_cast<size_t>(shape.num_outputs))),
        x_(random_bf16(elements(shape.num_inputs, max_rows), 1.5f, 7)),
        device_x_(x_),
        product_(residual_.size() * sizeof(uint16_t)),
        partials_(residual_.size() * static_cast<size_t>(shape.num_splits) * sizeof(float)),
        streams_(static_cast<size_t>(num_ranks)) {
    for (int i = 0; i <= num_ranks; ++i) ends_.push_back(std::make_unique<End>(residual_));
    const int n = shape.num_splits;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int begin = split_inputs(shape.num_inputs, n, n * rank / num_ranks).begin;
      const int end = split_inputs(shape.num_inputs, n, n * (rank + 1) / num_ranks - 1).end;
      shards_.push_back(std::make_unique<Shard>(shape, begin, end - begin, whole_.weights(), x_));
    }
  }

  const Shape& shape() const { return whole_.shape(); }
  int num_ranks() const { return static_cast<int>(shards_.size()); }
  /// For rounds of up to so many rows.
  InboxFloats inbox_floats(int max_rows) const {
    return openspec::inbox_floats(num_ranks(), shape().num_splits, max_rows, shape().num_outputs);
  }
  RoundForm form(int num_rows) const {
    return round_form(num_ranks(), shape().num_splits, num_rows, shape().num_outputs);
  }

  /// One rank's part of a round.
  LinearParams send_params(const Exchange& exchange, int num_rows) const {
    LinearParams params = shards_[static_cast<size_t>(exchange.rank)]->params(shape(), num_rows);
    params.exchange = &exchange;
    return params;
  }
  RmsNormParams take_params(const Exchange& exchange, int num_rows,
                            const OwnedRows* owned = nullptr) const {
    RmsNormParams params = norm_params(*ends_[static_cast<size_t>(exchange.rank)], num_rows);
    params.exchange = &exchange;
    params.owned = owned;
    return params;
  }
  /// The same by one device, as it does it: the sums of many rows are added by the product.
  void run_whole(int num_rows, void* stream) {
    LinearParams linear = whole_.params(num_rows, Out::kBF16, device_x_.data());
    RmsNormParams norm = norm_params(*ends_.back(), num_rows);
    if (num_rows > kMaxRowsToAll) {
      norm.delta = linear.out = product_.data();
    } else {
      linear.out = nullptr;
      norm.delta_partials = linear.partials = partials_.as<float>();
    }
    CHECK_CUDA(linear_cuda(linear, stream));
    CHECK_CUDA(rms_norm_cuda(norm, stream));
  }
  /// All ranks, one after the other, as one device can where nobody waits for results.
  void run_ranks(const Ranks& ranks, int num_rows, void* stream) const {
    for (int rank = 0; rank < ranks.size(); ++rank) {
      CHECK_CUDA(linear_cuda(send_params(ranks[rank], num_rows), stream));
    }
    for (int rank = 0; rank < ranks.size(); ++rank) {
      CHECK_CUDA(rms_norm_cuda(take_params(ranks[rank], num_rows), stream));
    }
  }
  /// All ranks where rows have owners: all products, then all norms side by side.
  void run_owners(const Ranks& ranks, int num_rows, bool sends_residuals) const {
    for (int rank = 0; rank < ranks.size(); ++rank) {
      CHECK_CUDA(linear_cuda(send_params(ranks[rank], num_rows), nullptr));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    OwnedRows owned;
    for (size_t rank = 0; rank < shards_.size(); ++rank) {
      owned.out[rank] = ends_[rank]->out.data();
      if (sends_residuals) owned.residual[rank] = ends_[rank]->residual.data();
    }
    for (int rank = 0; rank < ranks.size(); ++rank) {
      CHECK_CUDA(rms_norm_cuda(take_params(ranks[rank], num_rows, &owned),
                               streams_[static_cast<size_t>(rank)].handle()));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  /// Whether the ranks have one device's outputs, and of owned rows its residual.
  void check_owners_are_like_the_whole(int num_rows, const std::string& what) const {
    const RowOwners owners = form(num_rows).owners;
    const std::vector<uint16_t> residual = ends_.back()->residual.download<uint16_t>();
    const std::vector<uint16_t> out = ends_.back()->out.download<uint16_t>();
    const auto width = static_cast<size_t>(shape().num_outputs);
    for (size_t rank = 0; rank < shards_.size(); ++rank) {
      const std::vector<uint16_t> found = ends_[rank]->residual.download<uint16_t>();
      bool is_same = ends_[rank]->out.download<uint16_t>() == out;
      for (int place = 0; place < owners.rows_of(static_cast<int>(rank), num_rows); ++place) {
        const int row = owners.row_of(static_cast<int>(rank), place);
        const auto at = static_cast<ptrdiff_t>(static_cast<size_t>(row) * width);
        is_same = is_same &&
                  std::equal(found.begin() + at, found.begin() + at + static_cast<ptrdiff_t>(width),
                             residual.begin() + at);
      }
      if (!is_same) FAIL(shape().name + ", rank " + std::to_string(rank) + ", " + what);
    }
  }
  void check_ranks_are_like_the_whole(const std::string& what) const {
    const std::vector<uint16_t> residual = ends_.back()->residual.download<uint16_t>();
    const std::vector<uint16_t> out = ends_.back()->out.download<uint16_t>();
    for (int rank = 0; rank < num_ranks(); ++rank) {
      const End& end = *ends_[static_cast<size_t>(rank)];
      if (end.residual.download<uint16_t>() != residual || end.out.download<uint16_t>() != out) {
        FAIL(shape().name + ", rank " + std::to_string(rank) + " of " +
             std::to_string(num_ranks()) + ", " + what + ": other bits than one device's");
      }
    }
  }
  /// All residuals as they were at first.
  void start_again() {
    for (const std::unique_ptr<End>& end : ends_) end->residual.upload(residual_);
  }
  /// The value of activation (0, 0) of all.
  void set_first_x(uint16_t value) {
    const uint16_t one[] = {value};
    CHECK_CUDA(cudaMemcpy(device_x_.data(), one, sizeof one, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(shards_[0]->x.data(), one, sizeof one, cudaMemcpyHostToDevice));
  }

 private:
  static size_t elements(int width, int rows) {
    return static_cast<size_t>(width) * static_cast<size_t>(rows);
  }
  struct End {
    explicit End(const std::vector<uint16_t>& start) : residual(start), out(start.size() * 2) {}
    DeviceBuffer residual, out;
  };
  /// Inputs [first, first + count) of a matrix.
  struct Shard {
    Shard(const Shape& whole, int first_input, int count, const std::vector<uint16_t>& weights,
          const std::vector<uint16_t>& rows)
        : first(first_input),
          num_inputs(count),
          data(linear_packed_bytes_cuda(whole.num_outputs, count)),
          x(columns(rows, whole.num_inputs)) {
      const DeviceBuffer source(columns(weights, whole.num_inputs));
      CHECK_CUDA(linear_pack_cuda(weight(whole), source.data(), 0, whole.num_outputs, data.data(),
                                  nullptr));
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    std::vector<uint16_t> columns(const std::vector<uint16_t>& of, int width) const {
      std::vector<uint16_t> cut;
      for (auto row = of.begin(); row != of.end(); row += width) {
        cut.insert(cut.end(), row + first, row + first + num_inputs);
      }
      return cut;
    }
    PackedLinear weight(const Shape& whole) const {
      PackedLinear weight = packed(whole, data.data());
      weight.num_inputs = num_inputs;
      weight.shard = {.first_input = first, .whole_inputs = whole.num_inputs};
      return weight;
    }
    LinearParams params(const Shape& whole, int num_rows) const {
      LinearParams params;
      params.weight = weight(whole);
      params.x = x.data();
      params.num_rows = num_rows;
      params.dtype = DType::kBF16;
      return params;
    }
    int first, num_inputs;
    DeviceBuffer data, x;
  };

  RmsNormParams norm_params(const End& end, int num_rows) const {
    RmsNormParams params;
    params.residual = end.residual.data();
    params.num_partials = shape().num_splits;
    params.weight = device_weight_.as<float>();
    params.out = end.out.data();
    params.num_rows = num_rows;
    params.width = shape().num_outputs;
    params.dtype = DType::kBF16;
    return params;
  }

  Problem whole_;
  std::vector<uint16_t> residual_;
  std::vector<float> weight_;
  std::vector<uint16_t> x_;
  DeviceBuffer device_x_, product_, partials_;
  DeviceBuffer device_weight_{weight_};
  std::vector<device::Stream> streams_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<std::unique_ptr<End>> ends_;  // of each rank, then of the whole
};

}  // namespace openspec::testing
