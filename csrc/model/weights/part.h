#pragma once

#include "core/check.h"
#include "kernels/common/exec.h"
#include "kernels/linear/splits.h"

namespace openspec {

/// A range of what the ranks of a target share between them; all of it, where it is not shared.
struct Part {
  int first = 0, count = 0, whole = 0;

  constexpr Part(int whole) : count(whole), whole(whole) {}
  constexpr Part(int first, int count, int whole) : first(first), count(count), whole(whole) {}
  constexpr bool is_whole() const { return count == whole; }
  /// The same of `size` entries for each.
  constexpr Part of_size(int size) const { return {first * size, count * size, whole * size}; }
};

/// The rank's of as many outputs as divide evenly. Throws ArgumentError naming `what`.
inline Part even_part(const char* what, int whole, TpRank rank) {
  OPENSPEC_CHECK_ARG(whole % rank.size == 0, "tensor_parallel_size ", rank.size,
                     " must divide the model's ", whole, " ", what,
                     "; choose one that does, or --replicas for more devices");
  const int count = whole / rank.size;
  return {rank.rank * count, count, whole};
}

/// The rank's outputs of a matrix whose outputs go their own ways, such as the LM head: whole
/// units, of which two ranks' differ by one at most. Throws ArgumentError naming `what`.
inline Part unit_part(const char* what, int whole, TpRank rank) {
  if (rank.size == 1) return whole;
  OPENSPEC_CHECK_ARG(whole >= rank.size * kSplitUnit, "tensor_parallel_size ", rank.size,
                     " needs at least ", rank.size * kSplitUnit, " ", what, ", the model has ",
                     whole, "; choose a smaller one, or --replicas for more devices");
  const InputRange range = split_inputs(whole, rank.size, rank.rank);
  return {range.begin, range.size(), whole};
}

/// The rank's inputs of a matrix whose sums stay apart: its share of the splits. Throws
/// ArgumentError naming `what`.
inline Part split_part(const char* what, int whole_outputs, int whole_inputs, TpRank rank) {
  const int num_splits = linear_num_splits(whole_outputs, whole_inputs);
  OPENSPEC_CHECK_ARG(num_splits % rank.size == 0, "tensor_parallel_size ", rank.size,
                     " is more than the model's ", what, " allows, which has sums of ", num_splits,
                     " parts; choose ", num_splits, " at most, or --replicas for more devices");
  const int count = num_splits / rank.size;
  const int begin = split_inputs(whole_inputs, num_splits, rank.rank * count).begin;
  const int end = split_inputs(whole_inputs, num_splits, (rank.rank + 1) * count - 1).end;
  return {begin, end - begin, whole_inputs};
}

}  // namespace openspec
