#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace openspec {

/// The tokens of a model as grammars see them. Immutable, shared by all grammars of an engine.
class Vocabulary {
 public:
  /// `tokens` are the bytes of each id; empty ones no grammar can produce. The model has
  /// `vocab_size` ids, `stop_ids` of which end an answer. Throws ArgumentError where sizes or ids
  /// do not fit.
  Vocabulary(std::vector<std::string> tokens, int vocab_size, std::vector<int32_t> stop_ids);
  ~Vocabulary();
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  int size() const { return size_; }
  std::span<const int32_t> stop_ids() const { return stop_ids_; }
  bool is_stop(int32_t id) const;
  /// Whether a grammar can produce the token: it has bytes or ends the answer.
  bool is_usable(int32_t id) const;
  /// Of a usable token.
  std::string_view bytes(int32_t id) const;
  /// Code points of the longest token.
  int max_token_chars() const { return max_token_chars_; }
  /// Bytes of the longest token.
  size_t max_token_bytes() const { return max_token_bytes_; }
  /// 32-bit words of a mask, one bit a token.
  int num_mask_words() const { return (size() + 31) / 32; }

  /// The bytes as tokens, the longest that fits first; at most `most` of them.
  std::vector<int32_t> tokenize(std::string_view bytes, int most) const;

  /// Ids that the library knows: up to the last one that is usable. Each that is not takes it time
  /// in every mask, and models have up to hundreds of such ids at the end, widened ones far more.
  int library_size() const;
  /// What only csrc/grammar knows.
  struct Library;
  const Library& library() const { return *library_; }

 private:
  int size_;
  int max_token_chars_ = 0;
  size_t max_token_bytes_ = 0;
  std::unique_ptr<Library> library_;
  std::vector<int32_t> stop_ids_;
};

}  // namespace openspec
