#include "kernels/choose/sample_math.h"

#include <algorithm>
#include <cmath>

#include "kernel_testing.h"

using namespace openspec;
using namespace openspec::testing;
namespace sm = openspec::sample_math;

namespace {

double ulps(float found, double expected) {
  const float rounded = static_cast<float>(expected);
  const double ulp = static_cast<double>(std::nextafter(std::abs(rounded), 1e30f)) -
                     static_cast<double>(std::abs(rounded));
  return std::abs(static_cast<double>(found) - expected) / ulp;
}

double uniform_of(uint32_t bits) { return (static_cast<double>(bits) + 0.5) / 4294967296.0; }

}  // namespace

// Source: the known-answer file of Random123 (philox4x32, 10 rounds).
TEST(philox_known_answers) {
  const auto equals = [](const sm::Philox& found, std::vector<uint32_t> expected) {
    return std::equal(expected.begin(), expected.end(), found.word);
  };
  CHECK(equals(sm::philox4x32_10(0, 0, 0, 0, 0, 0),
               {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  CHECK(equals(sm::philox4x32_10(ones, ones, ones, ones, ones, ones),
               {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK(equals(
      sm::philox4x32_10(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0),
      {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(noise_of_an_id_is_a_word_of_its_counter) {
  for (int32_t id = 0; id < 300; ++id) {
    const sm::Philox philox =
        sm::noise_of_counter(77, 5, static_cast<uint32_t>(id / 64 * 16 + id % 16));
    CHECK_EQ(sm::noise_bits(77, 5, id), philox.word[id % 64 / 16]);
  }
}

TEST(noise_depends_on_every_part_of_its_key) {
  const uint32_t bits = sm::noise_bits(1, 2, 3);
  CHECK_NE(bits, sm::noise_bits(2, 2, 3));
  CHECK_NE(bits, sm::noise_bits(1 + (uint64_t{1} << 32), 2, 3));
  CHECK_NE(bits, sm::noise_bits(1, 3, 3));
  CHECK_NE(bits, sm::noise_bits(1, 2, 4));
}

TEST(uniform_stays_inside) {
  CHECK_GT(sm::uniform(0), 0.0f);
  CHECK_LT(sm::uniform(0xffffffff), 1.0f);
  CHECK_EQ(sm::uniform(0x80000000), 0.5f + 5.9604644775390625e-8f);
}

TEST(exp_is_accurate) {
  double worst = 0;
  for (float x = -86.9f; x <= 0.0f; x += 0.00037f) {
    worst = std::max(worst, ulps(sm::exp_f32(x), std::exp(static_cast<double>(x))));
  }
  CHECK_LT(worst, 1.5);
  CHECK_EQ(sm::exp_f32(0.0f), 1.0f);
  CHECK_EQ(sm::exp_f32(-100.0f), 0.0f);
  CHECK_EQ(sm::exp_f32(-std::numeric_limits<float>::infinity()), 0.0f);
  CHECK_EQ(sm::exp_f32(std::numeric_limits<float>::quiet_NaN()), 0.0f);
}

TEST(log_is_accurate) {
  double worst = 0;
  for (float x = 1e-10f; x < 1e6f; x *= 1.00003f) {
    worst = std::max(worst, ulps(sm::log_f32(x), std::log(static_cast<double>(x))));
  }
  CHECK_LT(worst, 1.5);
  CHECK_EQ(sm::log_f32(1.0f), 0.0f);
}

TEST(exponential_variates_are_accurate_at_both_ends) {
  Rng rng(1);
  std::vector<uint32_t> all = {0,          1,          2,          0x7fffffff, 0x80000000,
                               0xb504f333, 0xb504f334, 0xfffffffe, 0xffffffff};
  for (int i = 0; i < 300000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(rng.integer(0, 0x7fffffff)) * 2 +
                          static_cast<uint32_t>(rng.integer(0, 1));
    all.push_back(bits >> rng.integer(0, 31));
    all.push_back(~(bits >> rng.integer(0, 31)));
  }
  for (const uint32_t bits : all) {
    const double expected = -std::log1p(uniform_of(bits) - 1.0);
    CHECK_LT(ulps(sm::exponential_variate(bits), expected), 3.0);
    const double gumbel = -std::log(expected);
    CHECK_NEAR(static_cast<double>(sm::gumbel_of_bits(bits)), gumbel,
               4e-7 + 2e-7 * std::abs(gumbel));
  }
}

TEST(fixed_mass_rounds_down) {
  CHECK_EQ(sm::fixed_mass(1.0f), uint64_t{1} << 40);
  CHECK_EQ(sm::fixed_mass(0.0f), 0u);
  CHECK_EQ(sm::fixed_mass(std::ldexp(1.0f, -40)), 1u);
  CHECK_EQ(sm::fixed_mass(std::ldexp(1.0f, -41)), 0u);
  CHECK_EQ(sm::fixed_mass(1e-38f), 0u);
  Rng rng(2);
  for (int i = 0; i < 100000; ++i) {
    const float weight = std::exp(-std::abs(rng.normal(8)));
    CHECK_EQ(sm::fixed_mass(weight),
             static_cast<uint64_t>(std::ldexp(static_cast<double>(weight), 40)));
  }
}

TEST(sanitize_bounds_logits) {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK_EQ(sm::sanitize(std::numeric_limits<float>::quiet_NaN()), -infinity);
  CHECK_EQ(sm::sanitize(infinity), std::numeric_limits<float>::max());
  CHECK_EQ(sm::sanitize(-infinity), -infinity);
  CHECK_EQ(sm::sanitize(1.5f), 1.5f);
}
