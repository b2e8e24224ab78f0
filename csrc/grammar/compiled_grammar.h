#pragma once

#include <cstdint>
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
  struct JsonOptions {
    bool any_whitespace = true;  // between tokens of JSON; else ", " and ": "
    bool strict = true;          // nothing that the schema does not name, unless it says so
    bool any_order = false;      // of an object's properties; else as the schema has them
    int max_whitespace = -1;     // characters in a row; -1: any number
  };

  /// Each compiles on `num_threads` threads. What the library refuses is an ArgumentError with its
  /// message; so is a grammar whose mask depends on more than the text so far (a rule's max_tokens,
  /// max_chars or temperature).
  static std::shared_ptr<const CompiledGrammar> json_schema(
      std::shared_ptr<const Vocabulary> vocabulary, const std::string& schema,
      const JsonOptions& options, int num_threads);
  /// Any JSON object.
  static std::shared_ptr<const CompiledGrammar> json_object(
      std::shared_ptr<const Vocabulary> vocabulary, int num_threads);
  static std::shared_ptr<const CompiledGrammar> regex(std::shared_ptr<const Vocabulary> vocabulary,
                                                      const std::string& pattern, int num_threads);
  /// Begins with the rule `root`.
  static std::shared_ptr<const CompiledGrammar> ebnf(std::shared_ptr<const Vocabulary> vocabulary,
                                                     const std::string& text, int num_threads);
  static std::shared_ptr<const CompiledGrammar> structural_tag(
      std::shared_ptr<const Vocabulary> vocabulary, const std::string& json, int num_threads);
  /// JSON of a schema as rules in EBNF, with `max_whitespace` 2.
  static std::string json_schema_rules(const std::string& schema);
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

}  // namespace openspec
