#include "model/heads/mtp.h"

#include <algorithm>
#include <optional>

#include "runtime/drafting/draft_vocabulary.h"
#include "runtime/drafting/feature_drafter.h"

namespace openspec {
namespace {

/// Chains of drafts from the layer that came with the target, by the target's LM head: of all
/// tokens, or of those that it writes most often.
class MtpDrafter final : public ChainDrafter<Mtp> {
 public:
  explicit MtpDrafter(const RunnerConfig& config) : ChainDrafter(config) {
    OPENSPEC_CHECK_ARG(config.max_draft_tokens <= depth(), "a chain of ", config.max_draft_tokens,
                       " drafts, ", depth(), " are made");
    head_.validate();
    declare_trees(/*top_k=*/1, head_.draft_vocab_size);
    const int max_chains = std::min(config.max_num_seqs, config.limits().max_rows);
    ForwardLimits limits = config.limits();
    limits.max_logits_rows = max_chains;
    plan_rows(limits.max_rows, 1);
    plan_kept(limits.max_rows);
    plan_chains(max_chains, max_chains);
    plan_draws(max_chains, head_.draft_vocab_size);
    declare_head(limits);
    if (is_part()) {
      OPENSPEC_CHECK_ARG(config.tensor_parallel_size == 1,
                         "a part of the vocabulary is drafted on one device: set draft_vocab_size "
                         "to 0, for all tokens");
      needs_.fixed_bytes += DraftVocabulary::bytes(config.device, head_.draft_vocab_size,
                                                   head_.vocab_size, head_.hidden_size);
    }
  }

  void attach(const TargetModel& target, std::span<const KvLayerView> kv_layers) override {
    ChainDrafter::attach(target, kv_layers);
    if (!is_part()) return;
    vocabulary_.emplace(config_.device, head_.draft_vocab_size, head_.vocab_size, head_.hidden_size,
                        head_.kept_tokens);
    vocabulary_->attach(target_.head);
    target_.head = vocabulary_->head();
    token_map_ = vocabulary_->tokens();
  }
  void prepare(const ExecContext& exec) override { refresh(exec); }
  bool observe(std::span<const int32_t> token_ids) override {
    return vocabulary_ && vocabulary_->count(token_ids);
  }
  void refresh(const ExecContext& exec) override {
    if (vocabulary_) vocabulary_->choose(exec);
  }

  void propose(const ExecContext& exec, const TableView& table,
               const WantedDrafts& wanted) override {
    propose_chains(exec, table, wanted);
  }

 private:
  bool is_part() const { return head_.draft_vocab_size < head_.vocab_size; }

  std::optional<DraftVocabulary> vocabulary_;
};

const DrafterRegistration kRegistration("mtp", make_drafter_of<MtpDrafter>);

}  // namespace
}  // namespace openspec
