#include <algorithm>

#include "core/check.h"
#include "runtime/drafting/copy_lookup.h"
#include "runtime/drafting/drafter.h"

namespace openspec {
namespace {

/// Prompt lookup over the request's own history. The sequence table is its only state.
class NgramDrafter final : public Drafter {
 public:
  explicit NgramDrafter(const RunnerConfig& config)
      : lookup_(params_of(config), config.max_num_seqs, config.device) {
    needs_.fixed_bytes = lookup_.bytes();
  }

  const DrafterNeeds& needs() const override { return needs_; }
  bool works_on_arrays() const override { return true; }

  void attach(const TargetModel&, std::span<const KvLayerView>) override { lookup_.allocate(); }

  void propose(const ExecContext& exec, const TableView& table,
               const WantedDrafts& wanted) override {
    lookup_.look_up(exec, table, wanted.seq, wanted.num_wanted, wanted.num_seqs, wanted.drafts,
                    wanted.num_drafts);
  }

 private:
  static CopyLookupParams params_of(const RunnerConfig& config) {
    const int num_drafts = config.max_draft_tokens;
    OPENSPEC_CHECK_ARG(num_drafts >= 1 && num_drafts <= 256,
                       "max_draft_tokens must be in [1, 256], got ", num_drafts);
    for (const auto& [name, value] : config.method_options) {
      OPENSPEC_CHECK_ARG(name == "ngram_min" || name == "ngram_max" || name == "max_lookback",
                         "unknown option ", name,
                         "; there are: ngram_min, ngram_max, max_lookback");
    }
    CopyLookupParams params;
    params.max_drafts = num_drafts;
    params.max_match_len = config.integer("ngram_max", 4, 1, 64);
    params.min_match_len = config.integer("ngram_min", std::min(2, params.max_match_len), 1, 64);
    OPENSPEC_CHECK_ARG(params.min_match_len <= params.max_match_len, "ngram_min (",
                       params.min_match_len, ") must not exceed ngram_max (", params.max_match_len,
                       ")");
    params.max_lookback = config.integer("max_lookback", 4096, 2, 1 << 20);
    return params;
  }

  CopyLookup lookup_;
  DrafterNeeds needs_;
};

const DrafterRegistration kRegistration("ngram", make_drafter_of<NgramDrafter>);

}  // namespace
}  // namespace openspec
