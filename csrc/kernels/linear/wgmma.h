#pragma once

#include "kernels/linear/linear.h"

namespace openspec::cuda {

/// How linear_wgmma occupies the device. It decides speed, never bits.
struct WgmmaPlan {
  int tile_rows = 0;   // rows of x in a block's tile: 32, 64, 96 or 128
  int tile_units = 0;  // units of 16 outputs in a block's tile, 1 to 12
  int cluster = 1;  // 2: pairs of blocks, each with its own rows, share the weights that they load;
                    // for tiles of 96 and 128 rows
  // Into how many runs of consecutive units each split is cut, for every tile of rows, one for a
  // cluster, with tiles of tile_units and a last one of what is left. 0: tiles are all alike and go
  // round.
  int num_runs = 0;
  int shared_kib = 226;  // shared memory of a block; the ring of stages takes what it can
  // Of a run, where sums stay apart: neighbouring splits that a cluster takes one after the other.
  // It divides those that are here.
  int run_splits = 1;
};

/// The plan that linear_wgmma takes by itself: for up to 256 rows runs of one tile of rows that
/// occupy all of the device, beyond the fastest by a model of what limits a block and the device.
WgmmaPlan linear_wgmma_plan(const LinearParams& params);

/// linear_wgmma by a plan of the caller's.
int linear_wgmma_as(const WgmmaPlan& plan, const LinearParams& params, void* stream);

}  // namespace openspec::cuda
