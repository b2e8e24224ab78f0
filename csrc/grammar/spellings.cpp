#include "grammar/spellings.h"

#include "grammar/vocabulary.h"

namespace openspec {

std::vector<int32_t> Spellings::of(const std::string& bytes) const {
  const std::lock_guard lock(mutex_);
  const auto found = tokens_.find(bytes);
  return found == tokens_.end() ? std::vector<int32_t>{} : found->second;
}

bool Spellings::learn(const Vocabulary& vocabulary, const std::string& bytes,
                      std::span<const int32_t> tokens) {
  std::vector<size_t> begins;
  size_t end = 0;
  for (size_t i = 0; i < tokens.size() && end < bytes.size(); ++i) {
    const auto& spelt = vocabulary.bytes(tokens[i]);
    if (bytes.compare(end, spelt.size(), spelt, 0, bytes.size() - end) != 0) return true;
    begins.push_back(end);
    end += spelt.size();
  }
  if (end < bytes.size()) return false;
  if (bytes.size() > kMostBytes) return true;
  const std::lock_guard lock(mutex_);
  if (tokens_.size() > kMostEntries) tokens_.clear();
  for (size_t i = 0; i < begins.size(); ++i) {
    const auto rest = tokens.first(begins.size()).subspan(i);
    tokens_[bytes.substr(begins[i])].assign(rest.begin(), rest.end());
  }
  return true;
}

}  // namespace openspec
