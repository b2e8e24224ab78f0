#include "core/prefix_hash.h"

#include <bit>
#include <cstring>
#include <vector>

namespace openspec {

namespace {

struct SipState {
  uint64_t v0, v1, v2, v3;

  void round() {
    v0 += v1;
    v1 = std::rotl(v1, 13) ^ v0;
    v0 = std::rotl(v0, 32);
    v2 += v3;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 += v3;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 += v1;
    v1 = std::rotl(v1, 17) ^ v2;
    v2 = std::rotl(v2, 32);
  }

  void absorb(uint64_t word) {
    v3 ^= word;
    round();
    round();
    v0 ^= word;
  }

  uint64_t squeeze() {
    for (int i = 0; i < 4; ++i) round();
    return v0 ^ v1 ^ v2 ^ v3;
  }
};

uint64_t load_little_endian(const uint8_t* bytes, size_t count) {
  uint64_t word = 0;
  for (size_t i = 0; i < count; ++i) word |= uint64_t{bytes[i]} << (8 * i);
  return word;
}

}  // namespace

PageHash siphash128(PrefixHasher::Key key, std::span<const uint8_t> data) {
  SipState state{key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du ^ 0xee,
                 key[0] ^ 0x6c7967656e657261u, key[1] ^ 0x7465646279746573u};
  size_t at = 0;
  for (; at + 8 <= data.size(); at += 8) state.absorb(load_little_endian(&data[at], 8));
  const size_t rest = data.size() - at;
  const uint64_t tail = rest == 0 ? 0 : load_little_endian(&data[at], rest);
  state.absorb(tail | (uint64_t{data.size() & 0xff} << 56));
  PageHash hash;
  state.v2 ^= 0xee;
  hash.low = state.squeeze();
  state.v1 ^= 0xdd;
  hash.high = state.squeeze();
  return hash;
}

PageHash PrefixHasher::root(std::span<const uint8_t> salt) const { return siphash128(key_, salt); }

PageHash PrefixHasher::extend(const PageHash& parent, std::span<const int32_t> tokens) const {
  std::vector<uint8_t> data(sizeof(PageHash) + tokens.size_bytes());
  std::memcpy(data.data(), &parent, sizeof(PageHash));
  std::memcpy(data.data() + sizeof(PageHash), tokens.data(), tokens.size_bytes());
  return siphash128(key_, data);
}

}  // namespace openspec
