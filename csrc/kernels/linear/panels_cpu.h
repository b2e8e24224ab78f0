#pragma once

namespace openspec {

inline constexpr int kLinearPanel = 32;       // output columns
inline constexpr int kLinearInPlaceRows = 6;  // fp32 rows read where they are; more are copied

}  // namespace openspec
