#include "kernels/common/finite.h"

namespace openspec {

bool is_finite_cpu(const NumberArea& area) {
  const auto* words = static_cast<const uint32_t*>(area.data);
  const uint32_t low = detail::low_exponent(area.dtype);
  uint32_t found = 0;  // no early end, so that the loop runs on vectors
  for (size_t i = 0; i < area.bytes / sizeof *words; ++i) {
    found |= static_cast<uint32_t>(detail::is_non_finite(words[i], low));
  }
  return found == 0;
}

}  // namespace openspec
