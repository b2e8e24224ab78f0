#include "model/targets/device_exchange.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "kernels/common/device.h"
#include "kernels/exchange/exchange.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/rms_norm.h"
#include "model/parts/sum_exchange.h"
#include "model/targets/sharded.h"

namespace openspec {

namespace {

InboxFloats floats_of(const TargetSetup& whole) {
  return target_kind(whole.spec.kind).inbox_floats(whole);
}

struct Area {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

}  // namespace

class DeviceExchange::Rank final : public SumExchange {
 public:
  Rank(const DeviceExchange& all, size_t bytes) : all_(all), memory_(bytes, Memory::kDevice) {}

  std::byte* memory() { return memory_.at(0); }
  void set_view(const Exchange& view) { view_ = view; }
  ExchangeState* state() const override { return state_of(view_, view_.rank); }
  RowRange dealt(int num_rows) const override {
    if (!are_dealt(num_rows)) return {0, num_rows};
    return dealt_rows(view_.num_ranks, view_.rank, num_rows);
  }
  void clear() {
    OPENSPEC_ON_CUDA(clear_exchange_cuda, view_, ExecContext());
    device::synchronize(nullptr);
  }
  /// Ends the waits of what runs and of what follows. `fault` lies in pinned memory.
  void give_up(const uint64_t* fault) {
    device::copy_to_device(&state()->fault, fault, sizeof *fault, beside_.handle());
    device::synchronize(beside_.handle());
  }

  void send(const ExecContext& exec, LinearParams product) override {
    product.exchange = &view_;
    OPENSPEC_ON_CUDA(linear_cuda, product, exec);
  }
  void take(const ExecContext& exec, RmsNormParams norm, bool shares_residual) override {
    norm.exchange = &view_;
    OwnedRows owned;
    if (have_owners(norm.num_rows, norm.width)) {
      find_everywhere(norm.out, owned.out);
      if (shares_residual) find_everywhere(norm.residual, owned.residual);
      norm.owned = &owned;
    }
    OPENSPEC_ON_CUDA(rms_norm_cuda, norm, exec);
  }

  void give_area(void* data, size_t bytes) override {
    areas_.push_back({static_cast<std::byte*>(data), bytes});
  }

  void share_columns(const ExecContext& exec, float* rows, int num_rows, Part columns,
                     bool deals_rows) override {
    const auto bytes_of = [](int count) { return count * static_cast<int64_t>(sizeof(float)); };
    ShareColumnsParams params = {.exchange = &view_,
                                 .num_rows = num_rows,
                                 .deals_rows = deals_rows,
                                 .row_bytes = bytes_of(columns.whole),
                                 .first_byte = bytes_of(columns.first),
                                 .num_bytes = bytes_of(columns.count)};
    find_everywhere(rows, params.rows);
    OPENSPEC_ON_CUDA(share_columns_cuda, params, exec);
  }
  void share_rows(const ExecContext& exec, std::span<const MadeRows> buffers,
                  int num_rows) override {
    OPENSPEC_CHECK(buffers.size() <= size_t{ShareRowsParams::kMaxBuffers}, "too many buffers");
    ShareRowsParams params = {.exchange = &view_, .num_rows = num_rows};
    for (size_t i = 0; i < buffers.size(); ++i) {
      params.buffers[i].row_words = buffers[i].row_words;
      find_everywhere(buffers[i].words, params.buffers[i].words);
    }
    OPENSPEC_ON_CUDA(share_rows_cuda, params, exec);
  }

 private:
  /// Where the same of all ranks lies as `own` of this one.
  void find_everywhere(void* own, void* (&of_ranks)[kMaxRanks]) const {
    const auto* at = static_cast<std::byte*>(own);
    for (size_t i = areas_.size(); i-- > 0;) {
      const Area& area = areas_[i];
      if (at < area.data || at >= area.data + area.bytes) continue;
      for (int rank = 0; rank < all_.size(); ++rank) {
        const std::vector<Area>& others = all_.ranks_[static_cast<size_t>(rank)]->areas_;
        OPENSPEC_CHECK(i < others.size() && others[i].bytes == area.bytes,
                       "ranks give areas of the same sizes in the same order");
        of_ranks[rank] = others[i].data + (at - area.data);
      }
      return;
    }
    OPENSPEC_CHECK(false, "what ranks share lies in no area");
  }

  const DeviceExchange& all_;
  Buffer memory_;
  Exchange view_;
  device::Stream beside_;  // the passes, which may wait for each other
  std::vector<Area> areas_;
};

DeviceExchange::DeviceExchange(const TargetSetup& whole, std::vector<int> devices,
                               uint64_t deadline_ns)
    : devices_(std::move(devices)), deadline_ns_(deadline_ns) {
  if (devices_.empty()) {
    devices_.resize(static_cast<size_t>(whole.rank.size));
    std::iota(devices_.begin(), devices_.end(), 0);
  }
  OPENSPEC_CHECK_ARG(size() == whole.rank.size, "tensor_parallel_size is ", whole.rank.size,
                     ", of ", size(), " devices");
  const size_t bytes = device_exchange_bytes(whole);
  device::enable_peers(devices_);
  OPENSPEC_CHECK_ARG(device::loads_eagerly(),
                     "this process has used CUDA before; set CUDA_MODULE_LOADING=EAGER in its "
                     "environment, as GPUs that share a model need it");

  faults_ = Buffer(devices_.size() * sizeof(uint32_t), Memory::kPinned);
  off_ = Buffer(sizeof(uint64_t), Memory::kPinned);
  *off_.as<uint64_t>() = kExchangeIsOff;
  Exchange view = {.num_ranks = size(), .floats = floats_of(whole)};
  view.deadline_ns = deadline_ns_;
  for (int rank = 0; rank < size(); ++rank) {
    const device::Use use(device(rank));
    ranks_.push_back(std::make_unique<Rank>(*this, bytes));
    view.memory[rank] = ranks_.back()->memory();
  }
  for (view.rank = 0; view.rank < size(); ++view.rank) {
    view.fault = faults_.as<uint32_t>() + view.rank;
    ranks_[static_cast<size_t>(view.rank)]->set_view(view);
  }
  clear();
}

DeviceExchange::~DeviceExchange() = default;

SumExchange& DeviceExchange::rank(int rank) { return *ranks_.at(static_cast<size_t>(rank)); }

void DeviceExchange::give_area(int rank, void* data, size_t bytes) {
  this->rank(rank).give_area(data, bytes);
}

void DeviceExchange::fail() {
  volatile uint32_t* faults = faults_.as<uint32_t>();
  for (int rank = 0; rank < size(); ++rank) {
    if (faults[rank] == 0) faults[rank] = kExchangeIsOff;  // what is there came first
    try {
      const device::Use use(device(rank));
      ranks_[static_cast<size_t>(rank)]->give_up(off_.as<uint64_t>());
    } catch (const DeviceError&) {
      // Nothing waits on a device that can do nothing more.
    }
  }
}

void DeviceExchange::check() const {
  const volatile uint32_t* faults = faults_.as<uint32_t>();
  for (int rank = 0; rank < size(); ++rank) {
    const uint32_t fault = faults[rank];
    if (fault == 0) continue;
    const auto seconds = static_cast<double>(deadline_ns_) * 1e-9;
    if (fault == kExchangeIsLate) {
      detail::fail<DeviceError>("GPU ", device(rank), " waited ", seconds,
                                " s for another GPU's part of a step; the engine ends");
    }
    throw DeviceError("a GPU could not do its part of a step; the engine ends");
  }
}

void DeviceExchange::clear() {
  std::fill_n(faults_.as<uint32_t>(), size(), 0u);
  for (int rank = 0; rank < size(); ++rank) {
    const device::Use use(device(rank));
    ranks_[static_cast<size_t>(rank)]->clear();
  }
}

size_t device_exchange_bytes(const TargetSetup& whole) {
  const size_t bytes = exchange_bytes(floats_of(whole));
  OPENSPEC_CHECK_ARG(bytes <= kMaxInboxBytes + sizeof(ExchangeState),
                     "the sums that GPUs send each ", "other would take ", bytes >> 20,
                     " MiB of each, more than ", kMaxInboxBytes >> 20,
                     "; a target so wide cannot be shared by ranks");
  return bytes;
}

std::vector<std::unique_ptr<TargetModel>> make_ranks(const TargetSetup& whole,
                                                     DeviceExchange& exchange) {
  std::vector<std::unique_ptr<TargetModel>> ranks;
  for (int rank = 0; rank < exchange.size(); ++rank) {
    const device::Use use(exchange.device(rank));
    TargetSetup setup = setup_of_rank(whole, rank);
    setup.exchange = &exchange.rank(rank);
    ranks.push_back(target_kind(setup.spec.kind).make(setup));
  }
  return ranks;
}

}  // namespace openspec
