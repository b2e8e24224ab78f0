#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace openspec {

/// 128-bit content hash of a page together with everything before it.
struct PageHash {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const PageHash&) const = default;
};

struct PageHashHasher {
  size_t operator()(const PageHash& hash) const { return static_cast<size_t>(hash.low); }
};

/// Hashes page contents under a secret key, so that a client can neither find two prompts that
/// share a page by accident of the hash nor guess another tenant's salt.
class PrefixHasher {
 public:
  using Key = std::array<uint64_t, 2>;
  explicit PrefixHasher(Key key) : key_(key) {}

  /// The start of a chain. `salt` separates prompts that must not share pages.
  PageHash root(std::span<const uint8_t> salt) const;
  /// The page that holds `tokens` after the pages that `parent` stands for.
  PageHash extend(const PageHash& parent, std::span<const int32_t> tokens) const;

 private:
  Key key_;
};

/// SipHash-2-4 with 128 bits of output. Source: Aumasson and Bernstein, 2012; reference vectors in
/// the tests.
PageHash siphash128(PrefixHasher::Key key, std::span<const uint8_t> data);

}  // namespace openspec
