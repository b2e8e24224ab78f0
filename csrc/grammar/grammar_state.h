#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/row_layout.h"
#include "grammar/compiled_grammar.h"

namespace openspec {

/// Masks of a step's rows: num_words 32-bit words each, bit i of which allows token i.
struct MaskRows {
  int num_words = 0;
  std::span<int32_t> words = {};  // room for words.size() / num_words rows
  int num_rows = 0;               // in use

  std::span<int32_t> row(int index) const {
    return words.subspan(static_cast<size_t>(index) * static_cast<size_t>(num_words),
                         static_cast<size_t>(num_words));
  }
};

/// Where one sequence stands in its grammar. A function of its output tokens alone, so it can be
/// made anew at any time; after an exception it must be. Not thread-safe; states of different
/// sequences are independent.
class GrammarState {
 public:
  explicit GrammarState(std::shared_ptr<const CompiledGrammar> grammar);
  ~GrammarState();
  GrammarState(const GrammarState&) = delete;
  GrammarState& operator=(const GrammarState&) = delete;

  const Vocabulary& vocabulary() const { return grammar_->vocabulary(); }

  /// Becomes the state after exactly these tokens, of which those it knows are not read again.
  /// Tokens after the one that ends the answer do not count; where it comes too early it ends the
  /// answer all the same. Throws EngineError at any other that the grammar refuses.
  void sync(std::span<const int32_t> output);
  /// How many tokens it follows.
  size_t num_tokens() const { return tokens_.size(); }
  /// Whether the token that ends the answer is out.
  bool is_ended() const { return is_ended_; }

  /// Whether the token may be next; if so the state is that after it.
  bool accept(int32_t token);
  /// Takes back the last tokens.
  void rollback(int num_tokens);

  /// Fills the mask of the next token [num_mask_words]. False: the answer has ended, and nothing is
  /// filled.
  bool fill(std::span<int32_t> mask);

  /// Takes out drafts that the grammar refuses, those after the end and all that follow them.
  /// Returns how many.
  int prune(Draft& draft);
  /// Masks of the last known token and of each draft, at the end of `masks`: index[0] and
  /// index[1 + i] say which, -1: the row cannot be reached, or the answer has ended.
  void fill_rows(const Draft& draft, MaskRows& masks, std::span<int32_t> index);

  /// Drafts: what must come next, at most `most` tokens. Bytes that the grammar leaves no choice
  /// of, as the model spelt them last or else as the longest tokens of the vocabulary, and the
  /// token that ends an answer which cannot go on. A guess where the text allows several spellings.
  std::vector<int32_t> offer(int most);

 private:
  struct Library;

  /// Whether one of the tokens that the grammar names may be next.
  bool may_take_tag();

  std::shared_ptr<const CompiledGrammar> grammar_;
  std::unique_ptr<Library> library_;
  std::vector<int32_t> tokens_;  // that the library's matcher has taken
  bool is_ended_ = false;
  // Bytes that must follow so many tokens, until it is seen how the model spells them.
  std::string bytes_to_spell_;
  size_t spelt_from_ = 0;
  bool is_cut_ = false;  // ended by a token that the grammar refuses, which is not among tokens_
};

}  // namespace openspec
