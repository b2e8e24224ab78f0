#pragma once

/// The threads that finish a row of `choose`: the CTAs of a cluster, each with a share of the row,
/// or the first of them alone with a list of candidates. Passes, sums and selections are written
/// once for both. Sums are of integers, so their order does not matter.

#include <cooperative_groups.h>

#include <cstdint>

#include "kernels/choose/row.cuh"
#include "kernels/common/launch.cuh"

namespace openspec::choosing {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxClusterSize = 8;  // what every GPU with clusters takes
constexpr int kDigitBits = 10;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kListCapacity = 3072;
constexpr int kMaxBest = 64;
static_assert(kMaxLogprobs <= kMaxBest);

struct Shared {
  alignas(16) uint64_t histogram[kDigits];
  alignas(16) uint64_t cluster_histogram[kDigits];
  int32_t list_ids[kListCapacity];
  float list_values[kListCapacity];  // logits, as they are stored
  uint32_t largest[kGroups];         // of the row's groups, as RowWorkspace::largest
  uint32_t coarse_largest[kGroups];
  uint64_t partials[kWarps];
  uint64_t inbox[2][kMaxClusterSize];
  uint64_t best[kMaxBest];  // candidate keys to report
  uint64_t mass_above_digit;
  uint32_t digit;
  uint32_t bound;
  int32_t list_size;
};

__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarp; }

// Before compute capability 9.0 a "cluster" is one CTA.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_size() {
  return static_cast<int>(cooperative_groups::this_cluster().num_blocks());
}
__device__ __forceinline__ int cluster_rank() {
  return static_cast<int>(cooperative_groups::this_cluster().block_rank());
}
__device__ __forceinline__ void cluster_barrier() { cooperative_groups::this_cluster().sync(); }
template <typename T>
__device__ __forceinline__ T* on_rank(T* shared, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
}
#else
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_barrier() { __syncthreads(); }
template <typename T>
__device__ __forceinline__ T* on_rank(T* shared, int) {
  return shared;
}
#endif

__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, offset);
  }
  return x;
}

/// Sum over the CTA, known to every thread.
__device__ inline uint64_t block_sum(Shared& shared, uint64_t x) {
  x = warp_sum(x);
  __syncthreads();  // the last use of `partials` is over
  if (lane_index() == 0) shared.partials[warp_index()] = x;
  __syncthreads();
  return warp_sum(lane_index() < kWarps ? shared.partials[lane_index()] : 0);
}
__device__ inline uint64_t block_max(Shared& shared, uint64_t key) {
  key = warp_max(key);
  __syncthreads();
  if (lane_index() == 0) shared.partials[warp_index()] = key;
  __syncthreads();
  return warp_max(lane_index() < kWarps ? shared.partials[lane_index()] : 0);
}

/// Adds to a 64-bit number in shared memory by halves: the hardware adds 32 bits at a time.
__device__ __forceinline__ void add_shared(uint64_t* sum, uint64_t amount) {
  uint32_t* half = reinterpret_cast<uint32_t*>(sum);
  const uint32_t low = static_cast<uint32_t>(amount);
  const uint32_t before = atomicAdd(half, low);
  const uint32_t high = static_cast<uint32_t>(amount >> 32) + (before + low < before ? 1 : 0);
  if (high != 0) atomicAdd(half + 1, high);
}

/// The CTAs of the row. Every thread of all of them makes the same calls.
class Cluster {
 public:
  /// Waits until all CTAs run, so that their shared memory is there.
  __device__ explicit Cluster(Shared& shared)
      : shared_(shared), rank_(cluster_rank()), size_(cluster_size()) {
    cluster_barrier();
  }
  __device__ int rank() const { return rank_; }
  __device__ int size() const { return size_; }
  __device__ bool is_first_thread() const { return rank_ == 0 && threadIdx.x == 0; }

  /// What each CTA gives (all its threads the same), by rank. A barrier. Valid until the next but
  /// one: who fills a box has seen everybody arrive at the barrier after its last reading.
  __device__ const uint64_t* exchange(uint64_t mine) {
    uint64_t* box = shared_.inbox[turn_];
    turn_ ^= 1;
    const int to = static_cast<int>(threadIdx.x);
    if (to < size_) *on_rank(&box[rank_], to) = mine;
    cluster_barrier();
    return box;
  }
  __device__ uint64_t sum(uint64_t x) {
    const uint64_t* all = exchange(block_sum(shared_, x));
    uint64_t total = 0;
    for (int rank = 0; rank < size_; ++rank) total += all[rank];
    return total;
  }
  __device__ uint64_t max(uint64_t key) {
    const uint64_t* all = exchange(block_max(shared_, key));
    uint64_t best = 0;
    for (int rank = 0; rank < size_; ++rank) best = max_key(best, all[rank]);
    return best;
  }
  /// The histograms of all CTAs, summed.
  __device__ const uint64_t* merge_histograms() {
    cluster_barrier();
    if (size_ == 1) return shared_.histogram;
    const int share = kDigits / size_;
    for (int i = static_cast<int>(threadIdx.x); i < share; i += kThreads) {
      const int digit = rank_ * share + i;
      uint64_t total = 0;
      for (int rank = 0; rank < size_; ++rank) total += on_rank(shared_.histogram, rank)[digit];
      for (int rank = 0; rank < size_; ++rank) {
        on_rank(shared_.cluster_histogram, rank)[digit] = total;
      }
    }
    cluster_barrier();
    return shared_.cluster_histogram;
  }

 private:
  Shared& shared_;
  const int rank_;
  const int size_;
  int turn_ = 0;
};

/// A row, or the CTA's share of it: of every kGroups chunks the same run.
class RowSource {
 public:
  static constexpr bool kIsList = false;
  __device__ RowSource(Cluster& cluster, const float* values, int size)
      : cluster_(cluster), values_(values), size_(size) {}

  /// visit(id, logit) for the CTA's ids, in no order.
  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
    const int share = kGroups / cluster_.size();
    const int lane = lane_index();
    for (int run = cluster_.rank() * share; run * kChunk < size_; run += kGroups) {
      for (int i = warp_index(); i < share; i += 2 * kWarps) {
        float value[2][4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            const int32_t id = chunk_id(run + i + k * kWarps, lane, word);
            value[k][word] = id < size_ ? values_[id] : 0.0f;
          }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            const int32_t id = chunk_id(run + i + k * kWarps, lane, word);
            if (id < size_) visit(id, value[k][word]);
          }
        }
      }
    }
  }
  __device__ bool owns(int32_t id) const {
    const int share = kGroups / cluster_.size();
    return id / kChunk % kGroups / share == cluster_.rank();
  }
  __device__ uint64_t sum(uint64_t x) { return cluster_.sum(x); }
  __device__ uint64_t max(uint64_t key) { return cluster_.max(key); }
  __device__ const uint64_t* merge_histograms() { return cluster_.merge_histograms(); }

 private:
  Cluster& cluster_;
  const float* values_;
  const int size_;
};
static_assert(kGroups / kMaxClusterSize % (2 * kWarps) == 0, "chunks in pairs");

/// Candidates in the shared memory of the row's first CTA, which alone works on them.
class ListSource {
 public:
  static constexpr bool kIsList = true;
  __device__ ListSource(Shared& shared, int size) : shared_(shared), size_(size) {}

  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
    for (int i = static_cast<int>(threadIdx.x); i < size_; i += kThreads) {
      visit(shared_.list_ids[i], shared_.list_values[i]);
    }
  }
  __device__ uint64_t sum(uint64_t x) { return block_sum(shared_, x); }
  __device__ uint64_t max(uint64_t key) { return block_max(shared_, key); }
  __device__ const uint64_t* merge_histograms() {
    __syncthreads();
    return shared_.histogram;
  }
  __device__ int size() const { return size_; }

 private:
  Shared& shared_;
  const int size_;
};

__device__ inline void clear_list(Shared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) shared.list_size = 0;
  __syncthreads();
}
__device__ __forceinline__ void add_to_list(Shared& shared, int32_t id, float value) {
  const int at = atomicAdd(&shared.list_size, 1);
  if (at >= kListCapacity) return;
  shared.list_ids[at] = id;
  shared.list_values[at] = value;
}
/// Moves what every CTA added into the first CTA's list. Returns how many there are in all; where
/// that is more than kListCapacity, the list is incomplete.
__device__ inline int gather_list(Shared& shared, Cluster& cluster) {
  __syncthreads();
  const int mine = shared.list_size;
  const uint64_t* sizes = cluster.exchange(static_cast<uint64_t>(mine));
  int total = 0, begin = 0;
  for (int rank = 0; rank < cluster.size(); ++rank) {
    if (rank == cluster.rank()) begin = total;
    total += static_cast<int>(sizes[rank]);
  }
  if (total > kListCapacity) return total;
  if (cluster.rank() > 0) {
    for (int i = static_cast<int>(threadIdx.x); i < mine; i += kThreads) {
      on_rank(shared.list_ids, 0)[begin + i] = shared.list_ids[i];
      on_rank(shared.list_values, 0)[begin + i] = shared.list_values[i];
    }
  }
  cluster_barrier();
  return total;
}

struct Measure {
  uint32_t key;
  uint64_t amount;
};

/// The largest key k for which the amounts of the keys >= k reach wanted(total of all amounts); 0
/// where all of them do not. Keys have `bits` bits; with `first_digit_only`, the digits after the
/// first are 0, so the result is a lower bound. `measure(logit)` gives a logit's key and amount;
/// what has no amount is as good as absent. Every thread of the source calls.
template <typename Source, typename MeasureOf, typename Wanted>
__device__ uint32_t select_from_top(Source& source, Shared& shared, int bits, bool first_digit_only,
                                    const MeasureOf& measure, const Wanted& wanted_of_total) {
  const int thread = static_cast<int>(threadIdx.x);
  uint64_t wanted = 0;
  uint32_t prefix = 0;
  for (int shift = bits; shift > 0;) {
    const int width = min(kDigitBits, shift);
    shift -= width;
    for (int i = thread; i < kDigits; i += kThreads) shared.histogram[i] = 0;
    __syncthreads();
    source.for_each([&](int32_t, float value) {
      const Measure m = measure(value);
      // Two shifts, for their sum may be 32.
      if (m.amount == 0 || (m.key >> shift) >> width != prefix) return;
      add_shared(&shared.histogram[(m.key >> shift) & ((1u << width) - 1)], m.amount);
    });
    const uint64_t* histogram = source.merge_histograms();

    // Each thread takes two digits, the first thread the largest ones.
    static_assert(kDigits == 2 * kThreads, "two digits per thread");
    const ulonglong2 pair = reinterpret_cast<const ulonglong2*>(histogram)[kThreads - 1 - thread];
    const uint64_t mine = pair.x + pair.y;
    uint64_t through = mine;  // inclusive prefix sum, of the warp at first
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const uint64_t other = __shfl_up_sync(kAllLanes, through, offset);
      through += lane_index() >= offset ? other : 0;
    }
    if (lane_index() == kWarp - 1) shared.partials[warp_index()] = through;
    __syncthreads();
    uint64_t total = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      through += warp < warp_index() ? shared.partials[warp] : 0;
      total += shared.partials[warp];
    }
    if (shift + width == bits) {
      wanted = wanted_of_total(total);
      if (total < wanted) return 0;
    }
    const uint64_t above = through - mine;
    if (above < wanted && wanted <= through) {
      const bool is_upper = above + pair.y >= wanted;
      shared.digit = static_cast<uint32_t>(kDigits - 1 - 2 * thread - (is_upper ? 0 : 1));
      shared.mass_above_digit = is_upper ? above : above + pair.y;
    }
    __syncthreads();
    wanted -= shared.mass_above_digit;
    prefix = prefix << width | shared.digit;
    if (first_digit_only) return prefix << shift;
  }
  return prefix;
}

/// order_key of the k-th largest of what `value_of` makes of the source's logits; 0 where fewer
/// than k are above -inf.
template <typename Source, typename ValueOf>
__device__ uint32_t select_kth(Source& source, Shared& shared, int k, const ValueOf& value_of) {
  const auto measure = [&](float stored) {
    const float value = value_of(stored);
    return Measure{order_key(value), value > minus_infinity() ? uint64_t{1} : 0};
  };
  return select_from_top(source, shared, 32, false, measure,
                         [k](uint64_t) { return static_cast<uint64_t>(k); });
}

/// A value that at least k logits reach and few more than k, for k <= kGroups / 2: the k-th largest
/// of the groups' largest logits. -inf where there are too few. `shared.largest` is in place.
__device__ inline float bound_of_kth_largest(Shared& shared, int k) {
  const int num_groups = k <= kGroups / 8 ? kGroups / 4 : kGroups;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (thread == 0) shared.bound = 0xffffffffu;
  if (thread < num_groups) {
    uint32_t largest = 0;
    for (int i = thread; i < kGroups; i += num_groups) largest = max(largest, shared.largest[i]);
    shared.coarse_largest[thread] = largest;
  }
  __syncthreads();
  const int num_parts = kThreads / num_groups;  // threads that count for one group
  const uint32_t mine = shared.coarse_largest[thread / num_parts];
  int num_larger = 0;
  for (int i = thread % num_parts; i < num_groups; i += num_parts) {
    num_larger += shared.coarse_largest[i] > mine ? 1 : 0;
  }
  for (int offset = 1; offset < num_parts; offset *= 2) {
    num_larger += __shfl_xor_sync(kAllLanes, num_larger, offset);
  }
  if (num_larger < k) atomicMin(&shared.bound, mine);
  __syncthreads();
  return value_of_order(shared.bound);
}

/// Candidate keys of the best n, best first, into shared.best of the first CTA, whose first warp
/// may read them. key(id, logit) is 0 for what is not a candidate. Returns how many there are.
template <typename Source, typename KeyOf>
__device__ int best_of(Source& source, Shared& shared, int n, const KeyOf& key) {
  uint64_t last = ~uint64_t{0};
  int num_found = 0;
  for (; num_found < n; ++num_found) {
    uint64_t best = 0;
    source.for_each([&](int32_t id, float value) {
      const uint64_t candidate = key(id, value);
      if (candidate < last) best = max_key(best, candidate);
    });
    last = source.max(best);
    if (last == 0) break;
    if (threadIdx.x == 0) shared.best[num_found] = last;
  }
  __syncwarp();
  return num_found;
}

/// Candidate keys of the best n of the list, best first, into shared.best; the list is used up.
/// value_of(id, stored) is what counts, -inf for what is not a candidate. Every thread of the CTA
/// calls. Returns how many there are.
template <typename ValueOf>
__device__ int best_of_list(Shared& shared, int size, int n, const ValueOf& value_of) {
  constexpr int kMany = 512;  // a rank takes a look at all others
  uint64_t num_candidates = 0;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
    const float value = value_of(shared.list_ids[i], shared.list_values[i]);
    shared.list_values[i] = value;
    num_candidates += value > minus_infinity() ? 1 : 0;
  }
  num_candidates = block_sum(shared, num_candidates);
  uint32_t least = 0;  // order_key of what may be among the best
  if (size > kMany) {
    ListSource list(shared, size);
    least = select_kth(list, shared, n, [](float value) { return value; });
  }
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
    if (order_key(shared.list_values[i]) < least) continue;
    const uint64_t key = candidate_key(shared.list_values[i], shared.list_ids[i]);
    int rank = 0;
    for (int other = 0; other < size; ++other) {
      rank += candidate_key(shared.list_values[other], shared.list_ids[other]) > key ? 1 : 0;
    }
    if (key != 0 && rank < n) shared.best[rank] = key;
  }
  __syncthreads();
  return min(n, static_cast<int>(num_candidates));
}

/// Launches a kernel with a cluster for each of `num_rows` rows; of one CTA where the code that
/// runs here was not made for clusters.
template <typename Params>
int launch_clusters(void (*kernel)(Params), int num_rows, const Params& params, void* stream) {
  static const int size = [kernel] {
    cudaFuncAttributes attributes = {};
    const bool is_known = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess;
    return is_known && attributes.ptxVersion >= 90 ? kMaxClusterSize : 1;
  }();
  return cuda::launch_clusters(size, kernel, num_rows * size, kThreads, 0, stream, params);
}

}  // namespace openspec::choosing
