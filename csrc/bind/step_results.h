#pragma once

/// What a step says of a sequence, as tuples: objects of a class would cost more to make.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/runner.h"

namespace openspec {

using LogprobsTuple = std::tuple<std::vector<int32_t>, std::vector<float>, int>;

inline std::vector<LogprobsTuple> tuples_of(const std::vector<TokenLogprobs>& logprobs) {
  std::vector<LogprobsTuple> tuples;
  for (const TokenLogprobs& at : logprobs) {
    tuples.emplace_back(at.token_ids, at.logprobs, at.rank);
  }
  return tuples;
}

/// Drafts and accepted ones, by source.
inline std::vector<std::pair<int, int>> drafts_by_source(const SpanResult& result) {
  std::vector<std::pair<int, int>> counts;
  for (const DraftCounts& source : result.by_source) {
    counts.emplace_back(source.num_drafts, source.num_accepted);
  }
  return counts;
}

using TokenList = pybind11::typing::List<pybind11::int_>;
using DetailTuple = pybind11::typing::Tuple<
    TokenList, TokenList, pybind11::typing::Optional<pybind11::typing::List<pybind11::float_>>,
    TokenList, pybind11::int_, pybind11::int_, pybind11::int_, pybind11::int_, pybind11::float_,
    pybind11::float_, pybind11::typing::Optional<pybind11::float_>,
    pybind11::typing::List<pybind11::float_>>;

/// One object, because a step makes one for each sequence; none where no details were asked for.
inline pybind11::typing::Optional<DetailTuple> tuple_of_detail(const SpanResult& result) {
  if (!result.detail) return pybind11::none();
  const SpanDetail& detail = *result.detail;
  const Draft& draft = detail.draft;
  const pybind11::object scores =
      draft.scores.empty() ? pybind11::none() : pybind11::cast(draft.scores);
  const int num_forced = result.by_source[kGrammarDrafts].num_drafts;
  // Less those that a grammar refused.
  const int num_copied =
      std::min(result.by_source[kCopiedDrafts].num_drafts, draft.size() - num_forced);
  return pybind11::make_tuple(draft.tokens, draft.parents, scores, detail.accepted, num_forced,
                              num_copied, detail.num_rows, detail.num_seqs, detail.seconds,
                              detail.device_seconds, detail.draft_seconds, detail.wait_seconds);
}

/// Why the sequence cannot go on, and whether that is the request's own fault.
inline pybind11::typing::Optional<pybind11::typing::Tuple<pybind11::str, pybind11::bool_>>
tuple_of_failure(const SpanResult& result) {
  if (result.failure.message.empty()) return pybind11::none();
  return pybind11::make_tuple(result.failure.message, result.failure.is_request);
}

}  // namespace openspec
