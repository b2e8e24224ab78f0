// Work of the parser is counted where it loops, so that whoever calls it can bound it.
#pragma once

#include <cstdint>

namespace xgrammar {

// Units until SpendMoreWork looks again, by thread. A unit is some tens of nanoseconds.
extern __thread int64_t work_left;

// Defined by the library's user, who sets work_left anew or throws. A parser that is left by an
// exception is of no use.
void SpendMoreWork();

inline void SpendWork(int64_t units) {
  if ((work_left -= units) < 0) SpendMoreWork();
}

}  // namespace xgrammar
