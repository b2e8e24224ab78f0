#include "runtime/drafting/copy_lookup.h"

#include "kernels/ops.h"

namespace openspec {

CopyLookup::CopyLookup(const CopyLookupParams& params, int max_num_seqs, Device device)
    : params_(params),
      memory_(memory_of(device)),
      match_len_bytes_(static_cast<size_t>(max_num_seqs) * sizeof(int32_t)) {
  if (device == Device::kCpu) {
    workspace_bytes_ = copy_lookup_workspace_bytes(max_num_seqs, params.max_lookback);
  }
}

void CopyLookup::allocate() {
  match_len_ = Buffer(match_len_bytes_, memory_);
  workspace_ = Buffer(workspace_bytes_, memory_);
}

void CopyLookup::look_up(const ExecContext& exec, const TableView& table, const int32_t* seq,
                         const int32_t* num_wanted, int num_seqs, int32_t* drafts,
                         int32_t* num_drafts) {
  CopyLookupParams params = params_;
  params.tokens = table.tokens;
  params.tokens_stride = table.tokens_stride;
  params.num_tokens = table.num_tokens;
  params.seq = seq;
  params.num_wanted = num_wanted;
  params.num_seqs = num_seqs;
  params.drafts = drafts;
  params.num_drafts = num_drafts;
  params.match_len = match_len_.as<int32_t>();
  params.workspace = workspace_.as<int32_t>();
  ops::copy_lookup(exec, params);
}

}  // namespace openspec
