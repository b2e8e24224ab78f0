#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "grammar/spellings.h"
#include "grammar/vocabulary.h"

namespace openspec {

/// A grammar prepared for a vocabulary. Any number of sequences share one, which is immutable but
/// for what they see of the model's spellings.
class CompiledGrammar {
 public:
  /// Compiles a structural tag, on one thread. What the library refuses is a Complaint (library.h).
  /// A grammar whose mask depends on more than the text so far (a rule's max_tokens, max_chars or
  /// temperature), or whose texts may never end, is another ArgumentError.
  static std::shared_ptr<const CompiledGrammar> structural_tag(
      std::shared_ptr<const Vocabulary> vocabulary, const std::string& json);
  /// What `serialize` returned, of the same vocabulary; an ArgumentError otherwise.
  static std::shared_ptr<const CompiledGrammar> deserialize(
      std::shared_ptr<const Vocabulary> vocabulary, std::string_view data);

  ~CompiledGrammar();
  CompiledGrammar(const CompiledGrammar&) = delete;
  CompiledGrammar& operator=(const CompiledGrammar&) = delete;

  std::string serialize() const;
  /// Memory that it takes, about.
  size_t num_bytes() const;
  const Vocabulary& vocabulary() const { return *vocabulary_; }
  Spellings& spellings() const { return spellings_; }

  /// What only csrc/grammar knows.
  struct Library;
  const Library& library() const { return *library_; }

 private:
  CompiledGrammar(std::shared_ptr<const Vocabulary> vocabulary, std::unique_ptr<Library> library);
  template <typename Make>
  static std::shared_ptr<const CompiledGrammar> make(std::shared_ptr<const Vocabulary> vocabulary,
                                                     const Make& make);

  std::shared_ptr<const Vocabulary> vocabulary_;
  std::unique_ptr<Library> library_;
  mutable Spellings spellings_;
};

/// A grammar in Lark as one in EBNF, whose rule `root` is Lark's `start`. What the library refuses
/// is a Complaint.
std::string lark_as_ebnf(const std::string& lark);

}  // namespace openspec
