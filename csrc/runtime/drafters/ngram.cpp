#include <algorithm>

#include "core/check.h"
#include "kernels/ngram_lookup.h"
#include "model/buffer.h"
#include "runtime/drafter.h"

namespace openspec {
namespace {

/// Prompt lookup over the request's own history. The sequence table is its only state.
class NgramDrafter final : public Drafter {
 public:
  explicit NgramDrafter(const DrafterConfig& config) {
    const int num_drafts = config.num_speculative_tokens;
    OPENSPEC_CHECK_ARG(num_drafts >= 1 && num_drafts <= 256,
                       "num_speculative_tokens must be in [1, 256], got ", num_drafts);
    for (const auto& [name, value] : config.options) {
      OPENSPEC_CHECK_ARG(
          name == "ngram_min" || name == "ngram_max" || name == "max_lookback" || name == "match",
          "unknown option ", name, "; there are: ngram_min, ngram_max, max_lookback, match");
    }
    params_.max_drafts = num_drafts;
    params_.ngram_max = config.integer("ngram_max", 4, 1, 64);
    params_.ngram_min = config.integer("ngram_min", std::min(2, params_.ngram_max), 1, 64);
    OPENSPEC_CHECK_ARG(params_.ngram_min <= params_.ngram_max, "ngram_min (", params_.ngram_min,
                       ") must not exceed ngram_max (", params_.ngram_max, ")");
    params_.max_lookback = config.integer("max_lookback", 4096, 2, 1 << 20);
    const std::string match = config.text("match", "recent");
    OPENSPEC_CHECK_ARG(match == "recent" || match == "earliest",
                       "match must be recent or earliest, got ", match);
    params_.earliest = match == "earliest";

    needs_.num_speculative_tokens = num_drafts;
    const auto seqs = static_cast<size_t>(config.max_num_seqs);
    is_on_device_ = config.device == Device::kCuda;
    if (is_on_device_) {
      needs_.fixed_bytes = seqs * sizeof(int32_t);
      max_num_seqs_ = seqs;
      return;
    }
    for (auto* array : {&seq_, &num_wanted_, &num_drafts_, &match_len_}) array->resize(seqs);
    drafts_.resize(seqs * static_cast<size_t>(num_drafts));
    workspace_ = Buffer(ngram_lookup_workspace_bytes(config.max_num_seqs, params_.max_lookback));
    needs_.fixed_bytes = workspace_.bytes() + drafts_.size() * sizeof(int32_t);
  }

  const DrafterNeeds& needs() const override { return needs_; }
  bool proposes_on_device() const override { return is_on_device_; }

#ifdef OPENSPEC_CUDA
  void propose_on_device(const ExecContext& exec, const DeviceTable& table,
                         const DeviceDrafts& drafts) override {
    // Taken at first use, which is before anything is captured: a configuration is also made only
    // to ask for its needs.
    if (workspace_.bytes() == 0) {
      workspace_ = Buffer(max_num_seqs_ * sizeof(int32_t), Memory::kDevice);
    }
    NgramLookupParams params = params_;
    params.tokens = table.tokens;
    params.tokens_stride = table.tokens_stride;
    params.num_tokens = table.num_tokens;
    params.seq = drafts.seq;
    params.num_wanted = drafts.num_wanted;
    params.num_seqs = drafts.num_seqs;
    params.drafts = drafts.drafts;
    params.num_drafts = drafts.num_drafts;
    params.match_len = workspace_.as<int32_t>();
    device::check(ngram_lookup_cuda(params, exec.stream), "ngram_lookup");
  }
#endif

  void propose(const ExecContext& exec, const SequenceTable& table,
               std::span<const ProposeRequest> requests, std::span<Draft> drafts) override {
    for (size_t i = 0; i < requests.size(); ++i) {
      seq_[i] = requests[i].slot;
      num_wanted_[i] = requests[i].num_wanted;
    }
    NgramLookupParams params = params_;
    params.tokens = table.token_data();
    params.tokens_stride = table.tokens_stride();
    params.num_tokens = table.num_tokens_data();
    params.seq = seq_.data();
    params.num_wanted = num_wanted_.data();
    params.num_seqs = static_cast<int>(requests.size());
    params.drafts = drafts_.data();
    params.num_drafts = num_drafts_.data();
    params.match_len = match_len_.data();
    params.workspace = static_cast<int32_t*>(workspace_.data());
    ngram_lookup_cpu(exec, params);
    for (size_t i = 0; i < requests.size(); ++i) {
      const int32_t* found = &drafts_[i * static_cast<size_t>(params.max_drafts)];
      for (int k = 0; k < num_drafts_[i]; ++k) drafts[i].append(found[k]);
    }
  }

 private:
  DrafterNeeds needs_;
  NgramLookupParams params_;
  std::vector<int32_t> seq_, num_wanted_, num_drafts_, match_len_, drafts_;
  bool is_on_device_ = false;
  size_t max_num_seqs_ = 0;
  Buffer workspace_;  // on the device: the lengths of the matches
};

const DrafterRegistration kRegistration(
    "ngram", [](const DrafterConfig& config) -> std::unique_ptr<Drafter> {
      return std::make_unique<NgramDrafter>(config);
    });

}  // namespace
}  // namespace openspec
