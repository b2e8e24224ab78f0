#pragma once

#include "kernels/drafts/copy_lookup.h"
#include "kernels/drafts/table_rows.h"
#include "model/weights/buffer.h"

namespace openspec {

/// Prompt lookup over the sequences' own histories, with the memory that it needs. The sequence
/// table is its only state.
class CopyLookup {
 public:
  /// `params`: what is sought. Takes no memory yet.
  CopyLookup(const CopyLookupParams& params, int max_num_seqs, Device device);

  size_t bytes() const { return match_len_bytes_ + workspace_bytes_; }
  void allocate();
  /// Looks up `num_seqs` slots; arrays as in CopyLookupParams.
  void look_up(const ExecContext& exec, const TableView& table, const int32_t* seq,
               const int32_t* num_wanted, int num_seqs, int32_t* drafts, int32_t* num_drafts);
  /// Of the last look [num_seqs], see CopyLookupParams.
  int32_t* match_len() { return match_len_.as<int32_t>(); }
  const int32_t* match_len() const { return match_len_.as<int32_t>(); }

 private:
  CopyLookupParams params_;
  Memory memory_;
  size_t match_len_bytes_ = 0, workspace_bytes_ = 0;
  Buffer match_len_, workspace_;
};

}  // namespace openspec
