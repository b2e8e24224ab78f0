#pragma once

#include <memory>

#include "model/targets/target.h"

namespace openspec {

/// The setup of one of the ranks among which `whole` is shared, with its part of the threads.
TargetSetup setup_of_rank(const TargetSetup& whole, int rank);

/// Bytes of the exchange between the ranks of a target: on the host a rank's share, on CUDA what is
/// on each device; 0: it is not shared.
size_t exchange_bytes_of_rank(const TargetSetup& whole);

/// The target of a setup, on the host shared among `setup.rank.size` ranks (device_exchange.h has
/// those on CUDA). Its memory has the KV layers of every rank, one rank's after the other's.
std::unique_ptr<TargetModel> make_target(const TargetSetup& setup);

}  // namespace openspec
