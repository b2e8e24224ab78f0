#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace openspec {

class Vocabulary;

/// How the model spells bytes that a grammar forces: the tokens that it chose there last, in any
/// sequence of the grammar. A name of a schema has many spellings, and which one a model prefers is
/// seen, not known. May be used by several threads.
class Spellings {
 public:
  /// Of longer texts nothing is kept.
  static constexpr size_t kMostBytes = 512;
  /// Empty: not seen yet. The last token may go on after the bytes.
  std::vector<int32_t> of(const std::string& bytes) const;
  /// Tokens that were chosen where the bytes had to come, and the ends of both. Returns false until
  /// they cover the bytes. Others came where the grammar names a token; of those nothing is kept.
  bool learn(const Vocabulary& vocabulary, const std::string& bytes,
             std::span<const int32_t> tokens);

 private:
  static constexpr size_t kMostEntries = 4096;  // a grammar has far fewer
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<int32_t>, std::less<>> tokens_;
};

}  // namespace openspec
