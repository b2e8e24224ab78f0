#pragma once

#include <cstddef>
#include <vector>

namespace openspec {

/// A layer in the page pool: K and V of each token.
struct KvLayerSpec {
  int num_kv_heads = 0;
  int head_dim = 0;
};

/// What a target or a drafter keeps of sequences, declared before memory is planned.
///
/// *Per token*: KV, in pages. *Per sequence*: a running state, as records. A row makes the record
/// of its position from those of the positions before it; nothing else is written, so that a
/// rejected draft is a record that nobody reads, and to go back is a length, as it is for KV.
/// Old records may be folded into a *base*, block by block, which lies in pages too
/// (kernels/delta_net/delta_net.h): only committed ones are, and into other pages than are read.
struct StateNeeds {
  std::vector<KvLayerSpec> kv_layers;
  size_t record_bytes = 0;  // of a sequence and position, all layers, a multiple of 16; 0: no state
  int num_read = 1;         // records before its own that a row reads, at most
  // Beside each record something of which a row reads only the last few: a multiple of 16, or 0.
  // Not where a target takes trees.
  size_t tail_bytes = 0;
  int num_tail_read = 0;
  int num_base_tiles = 0;  // of DeltaStates, all layers; 0: there is no base
  // Of a sequence's step.
  bool takes_trees = true;
  int max_drafts = 1 << 20;

  bool has_records() const { return record_bytes > 0; }
  bool has_base() const { return num_base_tiles > 0; }
};

}  // namespace openspec
