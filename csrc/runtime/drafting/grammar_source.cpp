#include "runtime/drafting/grammar_source.h"

namespace openspec {

void GrammarSource::offer(std::span<const ProposeRequest> wanted, std::span<Draft> drafts) {
  std::vector<size_t> with_grammar;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (table_.grammar(wanted[i].slot) != nullptr) with_grammar.push_back(i);
  }
  if (with_grammar.empty()) return;
  threads_().try_parallel_for(with_grammar.size(), [&](size_t part) {
    const size_t i = with_grammar[part];
    const int slot = wanted[i].slot;
    const std::vector<int32_t> known = known_(slot);
    const auto output = std::span(known).subspan(static_cast<size_t>(table_.prompt_len(slot)));
    std::vector<int32_t> tokens;
    table_.grammar(slot)->use(output, /*num_masks=*/1, [&](GrammarState& state) {
      tokens = state.offer(wanted[i].num_wanted);
    });
    for (const int32_t token : tokens) drafts[i].append(token);
  });
  for (const size_t i : with_grammar) {
    SourceEstimate& estimate = table_.estimate(wanted[i].slot, id());
    estimate.availability.observe(1, drafts[i].size() > 0 ? 1 : 0);
  }
}

}  // namespace openspec
