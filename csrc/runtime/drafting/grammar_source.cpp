#include "runtime/drafting/grammar_source.h"

#include <exception>

namespace openspec {

void GrammarSource::offer(std::span<const ProposeRequest> wanted, std::span<Draft> drafts) {
  std::vector<size_t> with_grammar;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (table_.grammar(wanted[i].slot) != nullptr) with_grammar.push_back(i);
  }
  if (with_grammar.empty()) return;
  std::vector<std::exception_ptr> errors(with_grammar.size());
  threads_().parallel_for(static_cast<int64_t>(with_grammar.size()), [&](int64_t part) {
    const size_t i = with_grammar[static_cast<size_t>(part)];
    try {
      const int slot = wanted[i].slot;
      GrammarState& grammar = *table_.grammar(slot);
      const std::vector<int32_t> known = known_(slot);
      grammar.sync(std::span(known).subspan(static_cast<size_t>(table_.prompt_len(slot))));
      for (const int32_t token : grammar.offer(wanted[i].num_wanted)) drafts[i].append(token);
    } catch (...) {
      errors[static_cast<size_t>(part)] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) std::rethrow_exception(error);
  }
  for (const size_t i : with_grammar) {
    SourceEstimate& estimate = table_.estimate(wanted[i].slot, id());
    estimate.availability.observe(1, drafts[i].size() > 0 ? 1 : 0);
  }
}

}  // namespace openspec
