#include "grammar/vocabulary.h"

#include <algorithm>
#include <utility>

#include "grammar/classes_library.h"
#include "grammar/library.h"

namespace openspec {

Vocabulary::Vocabulary(std::vector<std::string> tokens, int vocab_size,
                       std::vector<int32_t> stop_ids)
    : size_(vocab_size), stop_ids_(std::move(stop_ids)) {
  OPENSPEC_CHECK_ARG(vocab_size > 0, "vocab_size must be positive, got ", vocab_size);
  OPENSPEC_CHECK_ARG(!stop_ids_.empty(), "a grammar needs a token that ends an answer");
  if (tokens.size() > static_cast<size_t>(vocab_size)) {
    // A tokenizer may know more than the model: the model cannot choose those.
    tokens.resize(static_cast<size_t>(vocab_size));
  }
  while (!tokens.empty() && tokens.back().empty()) tokens.pop_back();
  for (const int32_t id : stop_ids_) {
    OPENSPEC_CHECK_ARG(id >= 0 && id < vocab_size, "stop id ", id, " is outside the vocabulary of ",
                       vocab_size);
    // The library takes an end token for one only where it has an entry.
    if (static_cast<size_t>(id) >= tokens.size()) tokens.resize(static_cast<size_t>(id) + 1);
  }
  for (const std::string& token : tokens) {
    const auto starts = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; };
    const auto count = std::count_if(token.begin(), token.end(), starts);
    max_token_chars_ = std::max(max_token_chars_, static_cast<int>(count));
    max_token_bytes_ = std::max(max_token_bytes_, token.size());
  }
  library_ = library::checked([&] {
    return std::make_unique<Library>(Library{xgrammar::TokenizerInfo(
        tokens, xgrammar::VocabType::RAW, static_cast<int>(tokens.size()), stop_ids_,
        /*add_prefix_space=*/false)});
  });
}

Vocabulary::~Vocabulary() = default;

int Vocabulary::library_size() const { return library_->info.GetVocabSize(); }

bool Vocabulary::is_stop(int32_t id) const {
  return std::find(stop_ids_.begin(), stop_ids_.end(), id) != stop_ids_.end();
}

bool Vocabulary::is_usable(int32_t id) const {
  const std::vector<std::string>& tokens = library_->info.GetDecodedVocab();
  if (id < 0 || static_cast<size_t>(id) >= tokens.size()) return false;
  return !tokens[static_cast<size_t>(id)].empty() || is_stop(id);
}

std::string_view Vocabulary::bytes(int32_t id) const {
  return library_->info.GetDecodedVocab()[static_cast<size_t>(id)];
}

std::vector<int32_t> Vocabulary::tokenize(std::string_view bytes, int most) const {
  const auto& sorted = library_->info.GetSortedDecodedVocab();
  std::vector<int32_t> ids;
  while (!bytes.empty() && static_cast<int>(ids.size()) < most) {
    // Tokens that begin with the bytes so far stand together; the longest that fits ends there.
    auto first = sorted.begin(), last = sorted.end();
    int32_t found = -1;
    size_t length = 0;
    for (size_t i = 0; i < bytes.size() && first != last; ++i) {
      const auto byte_at = [i](const auto& token) {
        return i < token.second.size() ? static_cast<unsigned char>(token.second[i]) : -1;
      };
      const int byte = static_cast<unsigned char>(bytes[i]);
      first = std::partition_point(first, last, [&](const auto& t) { return byte_at(t) < byte; });
      last = std::partition_point(first, last, [&](const auto& t) { return byte_at(t) <= byte; });
      if (first != last && first->second.size() == i + 1) {
        found = first->first;
        length = i + 1;
      }
    }
    if (found < 0) break;
    ids.push_back(found);
    bytes.remove_prefix(length);
  }
  return ids;
}

}  // namespace openspec
