#include <algorithm>

#include "core/check.h"
#include "kernels/ops.h"
#include "model/weights/buffer.h"
#include "runtime/drafting/drafter.h"

namespace openspec {
namespace {

/// Prompt lookup over the request's own history. The sequence table is its only state.
class NgramDrafter final : public Drafter {
 public:
  explicit NgramDrafter(const RunnerConfig& config) {
    const int num_drafts = config.max_draft_tokens;
    OPENSPEC_CHECK_ARG(num_drafts >= 1 && num_drafts <= 256,
                       "max_draft_tokens must be in [1, 256], got ", num_drafts);
    for (const auto& [name, value] : config.method_options) {
      OPENSPEC_CHECK_ARG(name == "ngram_min" || name == "ngram_max" || name == "max_lookback",
                         "unknown option ", name,
                         "; there are: ngram_min, ngram_max, max_lookback");
    }
    params_.max_drafts = num_drafts;
    params_.ngram_max = config.integer("ngram_max", 4, 1, 64);
    params_.ngram_min = config.integer("ngram_min", std::min(2, params_.ngram_max), 1, 64);
    OPENSPEC_CHECK_ARG(params_.ngram_min <= params_.ngram_max, "ngram_min (", params_.ngram_min,
                       ") must not exceed ngram_max (", params_.ngram_max, ")");
    params_.max_lookback = config.integer("max_lookback", 4096, 2, 1 << 20);

    memory_ = memory_of(config.device);
    match_len_bytes_ = static_cast<size_t>(config.max_num_seqs) * sizeof(int32_t);
    if (memory_ == Memory::kHost) {
      workspace_bytes_ = ngram_lookup_workspace_bytes(config.max_num_seqs, params_.max_lookback);
    }
    needs_.fixed_bytes = match_len_bytes_ + workspace_bytes_;
  }

  const DrafterNeeds& needs() const override { return needs_; }
  bool works_on_arrays() const override { return true; }

  void attach(const TargetModel&, std::span<const KvLayerView>) override {
    match_len_ = Buffer(match_len_bytes_, memory_);
    workspace_ = Buffer(workspace_bytes_, memory_);
  }

  void propose(const ExecContext& exec, const TableView& table,
               const WantedDrafts& wanted) override {
    NgramLookupParams params = params_;
    params.tokens = table.tokens;
    params.tokens_stride = table.tokens_stride;
    params.num_tokens = table.num_tokens;
    params.seq = wanted.seq;
    params.num_wanted = wanted.num_wanted;
    params.num_seqs = wanted.num_seqs;
    params.drafts = wanted.drafts;
    params.num_drafts = wanted.num_drafts;
    params.match_len = match_len_.as<int32_t>();
    params.workspace = workspace_.as<int32_t>();
    ops::ngram_lookup(exec, params);
  }

 private:
  DrafterNeeds needs_;
  NgramLookupParams params_;
  Memory memory_ = Memory::kHost;
  size_t match_len_bytes_ = 0, workspace_bytes_ = 0;
  Buffer match_len_, workspace_;
};

const DrafterRegistration kRegistration("ngram", make_drafter_of<NgramDrafter>);

}  // namespace
}  // namespace openspec
