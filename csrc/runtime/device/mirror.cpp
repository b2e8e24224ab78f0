#ifdef OPENSPEC_CUDA

#include "runtime/device/mirror.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace openspec {

void TableUpdates::add(int slot) {
  new_slots_.push_back(slot);
  update(slot);
}

void TableUpdates::restore(int slot) {
  has_restored_ = true;
  update(slot);
}

void TableUpdates::update(int slot) {
  const SlotUpdate update = {.slot = slot,
                             .num_tokens = table_.num_tokens(slot),
                             .kv_len = table_.kv_len(slot),
                             .prompt_len = table_.prompt_len(slot),
                             .max_num_tokens = table_.max_num_tokens(slot),
                             .is_active = 1,
                             .num_folded = bases_.exist() ? bases_.num_folded(slot) : 0};
  // The last word counts, whatever the order in which the device writes them.
  std::erase_if(updates_, [&](const SlotUpdate& other) { return other.slot == slot; });
  updates_.push_back(update);
}

bool TableUpdates::is_new(int slot) const {
  return std::find(new_slots_.begin(), new_slots_.end(), slot) != new_slots_.end();
}

StepHeader TableUpdates::write(const StepLease& lease, const StepInputs& inputs) const {
  std::vector<PageUpdate> page_updates;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const int slot = lease.requests[i].slot;
    const auto pages = lease.pages[i].pages();
    // The lease's pages stand at the end of what is in flight for the sequence.
    const int end = table_.num_pages(slot) + table_.in_flight(slot).num_pages;
    const int first = end - static_cast<int>(pages.size());
    for (size_t j = 0; j < pages.size(); ++j) {
      page_updates.push_back({slot, first + static_cast<int>(j), pages[j]});
    }
  }
  OPENSPEC_CHECK(updates_.size() <= as_index(config_.max_num_seqs) &&
                     page_updates.size() <= inputs.max_page_updates,
                 "a step has ", updates_.size(), " slot and ", page_updates.size(),
                 " page updates, more than its input holds");
  const StepInputArrays& input = inputs[lease.ring_index];
  std::copy(updates_.begin(), updates_.end(), input.slot_updates);
  std::copy(page_updates.begin(), page_updates.end(), input.page_updates);
  for (size_t i = 0; i < lease.bases.size(); ++i) {
    const auto pages = lease.bases[i].pages();
    std::copy(pages.begin(), pages.end(), input.base_targets + i * as_index(bases_.num_pages()));
  }
  return {.num_spans = static_cast<int32_t>(lease.requests.size()),
          .num_slot_updates = static_cast<int32_t>(updates_.size()),
          .num_page_updates = static_cast<int32_t>(page_updates.size()),
          .ring_index = lease.ring_index};
}

void TableUpdates::forget() {
  updates_.clear();
  new_slots_.clear();
  has_restored_ = false;
}

DeviceMirror::DeviceMirror(const RunnerConfig& config, const SequenceTable& table,
                           const SlotBases& bases, const DeviceBuffers& arrays, void* stream)
    : table_(table), bases_(bases), arrays_(arrays), stream_(stream) {
  for (int i = 0; i < config.max_num_seqs; ++i) {
    slots_.push_back({Buffer(DeviceBuffers::kListBytes, Memory::kDevice),
                      Buffer(sizeof(SamplingParams) + DeviceBuffers::kListBytes, Memory::kPinned),
                      device::Event()});
  }
}

void DeviceMirror::add(int slot) {
  upload_tokens(slot);
  const auto pages = table_.pages(slot);
  if (!pages.empty()) upload_pages(slot, pages);
  upload_base(slot);
  upload_params(slot);
  slots_[as_index(slot)].uploaded.record(stream_);
}

void DeviceMirror::upload_tokens(int slot) {
  const auto tokens = table_.tokens(slot);
  device::copy_to_device(arrays_.table.tokens + slot * arrays_.table.tokens_stride, tokens.data(),
                         tokens.size_bytes(), stream_);
}

void DeviceMirror::upload_pages(int slot, std::span<const PageId> pages) {
  device::copy_to_device(arrays_.table.pages + int64_t{slot} * arrays_.table.max_pages_per_seq,
                         pages.data(), pages.size_bytes(), stream_);
}

void DeviceMirror::upload_base(int slot) {
  const auto pages = bases_.pages(slot);
  if (pages.empty()) return;
  device::copy_to_device(arrays_.table.base_pages + slot * arrays_.table.pages_per_base,
                         pages.data(), pages.size_bytes(), stream_);
}

void DeviceMirror::upload_params(int slot) {
  const SequenceParams& p = table_.params(slot);
  Slot& room = slots_[as_index(slot)];
  SamplingParams sampling = table_.sampling_data()[slot];
  size_t num_bytes = 0;
  p.for_each_list(sampling,
                  [&](const auto& list, auto&) { num_bytes += std::span(list).size_bytes(); });
  if (num_bytes > room.lists.bytes()) {
    device::synchronize(stream_);  // what is freed may be in use
    const size_t bytes = std::bit_ceil(num_bytes);
    Buffer lists(bytes, Memory::kDevice), staging(sizeof(SamplingParams) + bytes, Memory::kPinned);
    room.lists = std::move(lists);  // both or none
    room.staging = std::move(staging);
  }
  auto* staged = room.staging.as<std::byte>() + sizeof(SamplingParams);
  auto* device_lists = room.lists.as<std::byte>();
  size_t offset = 0;
  p.for_each_list(sampling, [&]<typename T>(const std::vector<T>& list, const T*& pointer) {
    if (!list.empty()) std::memcpy(staged + offset, list.data(), list.size() * sizeof(T));
    pointer = reinterpret_cast<const T*>(device_lists + offset);
    offset += list.size() * sizeof(T);
  });
  std::memcpy(room.staging.data(), &sampling, sizeof sampling);
  device::copy_to_device(arrays_.table.sampling + slot, room.staging.data(), sizeof sampling,
                         stream_);
  if (offset > 0) device::copy_to_device(device_lists, staged, offset, stream_);
}

}  // namespace openspec

#endif
