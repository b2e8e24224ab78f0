// A target on the CPU whose matrices several ranks share, each on threads of its own: what the
// ranks on several devices do, and their reference.

#include "model/targets/sharded.h"

#include <algorithm>
#include <deque>

#include "core/rendezvous.h"
#include "core/thread_pool.h"
#include "kernels/exchange/exchange.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/rms_norm.h"
#include "model/parts/sum_exchange.h"
#include "model/targets/device_exchange.h"
#include "model/targets/shared_tensors.h"
#include "model/weights/buffer.h"

namespace openspec {

namespace {

constexpr int kNumSlots = 2;

size_t host_slot_floats(const TargetSetup& setup) {
  return static_cast<size_t>(target_kind(setup.spec.kind).inbox_floats(setup).slot);
}

/// The sums of all ranks: on the host their inboxes are one memory. Rounds take slots in turn, so
/// that nobody waits for those who still read: a rank lays sums into a slot again once all have
/// come to the round between, and each has then read the round before.
struct SharedSums {
  SharedSums(size_t num_floats, int num_ranks)
      : slot_floats(num_floats),
        memory(kNumSlots * num_floats * sizeof(float)),
        rendezvous(num_ranks) {}

  size_t slot_floats;
  Buffer memory;
  Rendezvous rendezvous;
};

class HostExchange final : public SumExchange {
 public:
  explicit HostExchange(SharedSums& sums) : sums_(sums) {}

  void send(const ExecContext& exec, LinearParams product) override {
    slot_ = (slot_ + 1) % kNumSlots;
    product.partials = slot();
    linear_cpu(exec, product);
  }
  void take(const ExecContext& exec, RmsNormParams norm, bool) override {
    sums_.rendezvous.wait();
    norm.delta_partials = slot();
    rms_norm_cpu(exec, norm);
  }
  /// A pass begins: on all ranks with the same slot, wherever the last one ended.
  void restart() { slot_ = 0; }

 private:
  float* slot() { return sums_.memory.floats() + slot_ * sums_.slot_floats; }

  SharedSums& sums_;
  size_t slot_ = 0;
};

class ShardedTarget final : public TargetModel {
 public:
  explicit ShardedTarget(const TargetSetup& setup)
      : sums_(host_slot_floats(setup), setup.rank.size), threads_(setup.rank.size) {
    for (int rank = 0; rank < setup.rank.size; ++rank) {
      ranks_.emplace_back(setup_of_rank(setup, rank), sums_);
    }
  }

  std::vector<Weights*> weights() override {
    std::vector<Weights*> all;
    for (Rank& rank : ranks_) all.push_back(rank.model->weights().front());
    return all;
  }

  SharedTensors shared() const override {
    SharedTensors shared = ranks_.front().model->shared();
    shared.head.exchange = nullptr;  // all shards are here
    for (size_t i = 1; i < ranks_.size(); ++i) {
      shared.head.shards.push_back(ranks_[i].model->shared().head.shards.front());
    }
    return shared;
  }

  void forward(const ExecContext&, const RowBatch& rows, const TargetMemory& memory,
               const std::vector<int>& capture_layers, void* captured) override {
    const size_t num_layers = memory.kv.size() / ranks_.size();
    run([&](Rank& rank, size_t number) {
      const TargetMemory own{memory.page_table, memory.kv.subspan(number * num_layers, num_layers),
                             memory.records};
      const bool captures = number == 0;  // they are the same on every rank
      rank.model->forward({.pool = &rank.threads}, rows, own,
                          captures ? capture_layers : std::vector<int>(), captured);
    });
  }

  void logits(const ExecContext&, const int32_t* row, int count, float* out) override {
    run([&](Rank& rank, size_t) { rank.model->logits({.pool = &rank.threads}, row, count, out); });
  }

 private:
  struct Rank {
    Rank(TargetSetup setup, SharedSums& sums) : exchange(sums), threads(setup.num_threads) {
      setup.exchange = &exchange;
      model = target_kind(setup.spec.kind).make(setup);
    }
    HostExchange exchange;
    ThreadPool threads;
    std::unique_ptr<TargetModel> model;
  };

  /// Calls body(rank, its number) for all ranks at once. There is a thread for each, so that those
  /// who wait hold nobody up.
  template <typename Body>
  void run(const Body& body) {
    sums_.rendezvous.begin();
    threads_.parallel_for(static_cast<int64_t>(ranks_.size()), [&](int64_t i) {
      const auto number = static_cast<size_t>(i);
      try {
        ranks_[number].exchange.restart();
        body(ranks_[number], number);
      } catch (const Rendezvous::Failed&) {
        // As another rank has; its error is thrown below.
      } catch (...) {
        sums_.rendezvous.fail(std::current_exception());
      }
    });
    sums_.rendezvous.check();
  }

  SharedSums sums_;
  std::deque<Rank> ranks_;
  ThreadPool threads_;
};

}  // namespace

TargetSetup setup_of_rank(const TargetSetup& whole, int rank) {
  const int num_ranks = whole.rank.size;
  TargetSetup setup = whole;
  setup.rank.rank = rank;
  setup.num_threads = std::max(
      1, whole.num_threads * (rank + 1) / num_ranks - whole.num_threads * rank / num_ranks);
  return setup;
}

size_t exchange_bytes_of_rank(const TargetSetup& whole) {
  const int num_ranks = whole.rank.size;
  if (num_ranks == 1) return 0;
  if (whole.device == Device::kCuda) return device_exchange_bytes(whole);
  return kNumSlots * host_slot_floats(whole) * sizeof(float) / static_cast<size_t>(num_ranks);
}

std::unique_ptr<TargetModel> make_target(const TargetSetup& setup) {
  if (setup.rank.size == 1) return target_kind(setup.spec.kind).make(setup);
  OPENSPEC_CHECK(setup.device == Device::kCpu, "ranks on CUDA are made on a device each");
  return std::make_unique<ShardedTarget>(setup);
}

}  // namespace openspec
