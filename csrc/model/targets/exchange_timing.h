#pragma once

namespace openspec {

/// Seconds of a round of one row: a small product, whose sums are exchanged, and its norm.
struct ExchangeTiming {
  double shared = 0.0;
  double alone = 0.0;  // of the same work by one device, whose sums go nowhere
};

/// Times rounds among the first `num_ranks` devices, on which nothing else runs. Throws
/// ArgumentError or DeviceError where these cannot exchange sums.
ExchangeTiming time_exchange(int num_ranks);

}  // namespace openspec
