#include "model/heads/eagle3.h"
#include "runtime/drafting/feature_drafter.h"
#include "runtime/drafting/one_pass_drafter.h"

namespace openspec {
namespace {

constexpr int kMaxDepth = 63;

/// All drafts in one pass: after the last known token's row stand rows of masks, whose feature is
/// a constant of the head, and every row drafts the token of its depth.
class PEagleDrafter final : public OnePassDrafter<FeatureDrafter<Eagle3>> {
 public:
  explicit PEagleDrafter(const RunnerConfig& config) : OnePassDrafter(config) {
    OPENSPEC_CHECK_ARG(head_.mask_token >= 0 && head_.mask_token < head_.vocab_size,
                       "mask_token must be in [0, ", head_.vocab_size, "), got ", head_.mask_token);
    OPENSPEC_CHECK_ARG(depth_ >= 1 && depth_ <= kMaxDepth, "draft_depth must be in [1, ", kMaxDepth,
                       "], got ", depth_);
    const int most = makes_trees() ? kMaxBlockTreeNodes : depth_;
    OPENSPEC_CHECK_ARG(config.max_draft_tokens <= most, "a tree of ", config.max_draft_tokens,
                       " drafts, at most ", most);
    head_.has_mask_hidden = true;
    head_.validate();
    declare_trees(top_k_, head_.draft_vocab_size);
    plan_blocks(makes_trees() ? top_k_ : 0);
    plan_kept(limits().max_rows, /*num_features=*/1);
    zero_ = take(1, sizeof(int32_t));
    declare_head(limits());
  }

  void prepare(const ExecContext& exec) override {
    model_->mask_feature(exec, at<int32_t>(zero_), features(),
                         static_cast<std::byte*>(feature_of_slot()) +
                             config_.max_num_seqs * row_bytes(head_.hidden_size));
  }

 private:
  void take_over(const ExecContext& exec) override { prepare(exec); }
  void propose_blocks(const ExecContext& exec, const TableView& table,
                      const WantedDrafts& wanted) override {
    const Room room = room_of(exec, wanted);
    const DraftRows rows =
        make_rows(exec, table, wanted, room, /*mask_source=*/config_.max_num_seqs);
    if (rows.num_rows == 0) return;
    copy_rows(exec, rows.source, feature_of_slot(), hidden(), rows.num_rows, head_.hidden_size);
    run(exec, table, rows, wanted.expected_kv_len);
    model_->logits(exec, target_.head, head_row(), rows.num_rows, logits());
    make_drafts(exec, table, wanted, rows, rows.num_rows);
  }

  size_t zero_ = 0;  // a place
};

const DrafterRegistration kRegistration("peagle", make_drafter_of<PEagleDrafter>);

}  // namespace
}  // namespace openspec
