// Ordered sums: a product whose splits are shared out among ranks, then its norm on each. All ranks
// are on one device, whose bits are those of one rank.

#include "kernels/exchange/exchange.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/exchange_testing.h"
#include "kernels/common/device.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

// Of o and down, by hidden size.
const std::vector<Shape>& products() {
  static const std::vector<Shape> all = {
      {"hidden 64", 64, 512, kNone, 8},   {"tiny o", 320, 512, kNone, 4},
      {"tiny down", 320, 1216, kNone, 4}, {"tiny down in eight", 320, 1216, kNone, 8},
      {"0.6B o", 1024, 2048, kNone, 4},   {"4B o", 2560, 4096, kNone, 4},
      {"4B down", 2560, 9728, kNone, 4},  {"8B o", 4096, 4096, kNone, 4},
      {"14B o", 5120, 5120, kNone, 8},    {"70B o", 8192, 8192, kNone, 8},
  };
  return all;
}
const Shape& product_named(const std::string& name) {
  for (const Shape& shape : products()) {
    if (name == shape.name) return shape;
  }
  throw check_test::Failure("no product " + name);
}

double seconds_of(const auto& what) {
  const auto begin = std::chrono::steady_clock::now();
  what();
  CHECK_CUDA(cudaDeviceSynchronize());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

// The numbers of rows follow each other without a pause, so the slots go round, too. Those of rows
// that have owners are of the next test.
TEST(ranks_have_the_bits_of_one_device) {
  for (const Shape& shape : products()) {
    const bool is_small = shape.num_outputs <= 320;
    for (int num_ranks = 1; num_ranks <= shape.num_splits; num_ranks *= 2) {
      SharedProduct product(shape, num_ranks, kMaxRows);
      Ranks ranks(num_ranks, product.inbox_floats(kMaxRows));
      std::vector<int> counts = {1, 2, 7, 8, 9, 16, 24, 25, 32, 33, 64, 65, 100, 128, 129, 256};
      for (int count = 3; is_small && count < kMaxRows; count += 11) counts.push_back(count);
      for (const int num_rows : counts) {
        if (product.form(num_rows).owners.exist()) continue;
        product.run_whole(num_rows, nullptr);
        product.run_ranks(ranks, num_rows, nullptr);
        product.check_ranks_are_like_the_whole(std::to_string(num_rows) + " rows");
      }
      CHECK(ranks.are_empty());
      for (int rank = 0; rank < num_ranks; ++rank) CHECK_EQ(ranks.fault(rank), 0u);
    }
  }
}

// Rounds of few and of many rows in turn. Without residuals an owner alone knows its rows'.
TEST(owners_have_the_bits_of_one_device) {
  for (const Shape& shape : products()) {
    for (int num_ranks = 2; num_ranks <= shape.num_splits; num_ranks *= 2) {
      for (const bool sends_residuals : {true, false}) {
        SharedProduct product(shape, num_ranks, 1100);
        Ranks ranks(num_ranks, product.inbox_floats(1100));
        int period = 0;
        for (const int num_rows : {257, 300, 129, 1100, 509, 513, 200, 64, 128, 100, 256}) {
          const RowOwners owners = product.form(num_rows).owners;
          if (!owners.exist()) continue;
          const std::string what = std::to_string(num_rows) + " rows";
          // Rows get other owners, who do not know their residuals.
          if (!sends_residuals && std::exchange(period, owners.period) != owners.period) {
            product.start_again();
          }
          product.run_whole(num_rows, nullptr);
          product.run_owners(ranks, num_rows, sends_residuals);
          if (sends_residuals) {
            product.check_ranks_are_like_the_whole(what);
            product.run_whole(num_rows % 31, nullptr);
            product.run_ranks(ranks, num_rows % 31, nullptr);
            product.check_ranks_are_like_the_whole("after " + what);
          }
          product.check_owners_are_like_the_whole(num_rows, what);
        }
        CHECK(ranks.are_empty());
        for (int rank = 0; rank < num_ranks; ++rank) CHECK_EQ(ranks.fault(rank), 0u);
      }
    }
  }
}

// Which rank owns a row does not depend on the product: o and down may have other splits.
TEST(every_row_keeps_its_owner) {
  for (const int width : {320, 2048, 4096, 5120, 8192}) {
    for (const int num_ranks : {2, 4, 8}) {
      for (int num_rows = 1; num_rows <= kMaxRoundRows; ++num_rows) {
        const RowOwners owners = round_form(num_ranks, 8, num_rows, width).owners;
        CHECK_EQ(owners.exist(), have_owners(num_rows, width));
        std::vector<int> counts(static_cast<size_t>(num_ranks));
        for (int row = 0; owners.exist() && row < num_rows; ++row) {
          const int rank = owners.rank_of(row);
          CHECK_EQ(owners.place_of(row), counts[static_cast<size_t>(rank)]++);
          CHECK_EQ(owners.row_of(rank, owners.place_of(row)), row);
        }
        for (int rank = 0; owners.exist() && rank < num_ranks; ++rank) {
          CHECK_EQ(owners.rows_of(rank, num_rows), counts[static_cast<size_t>(rank)]);
          CHECK(counts[static_cast<size_t>(rank)] > 0);
        }
        for (int num_splits = num_ranks; num_splits <= kMaxSplits; num_splits *= 2) {
          const RowOwners others = round_form(num_ranks, num_splits, num_rows, width).owners;
          CHECK(others.period == owners.period && others.last == owners.last);
        }
      }
    }
  }
}

// NaN and infinity are sums like others, of whatever bits.
TEST(sums_that_are_no_numbers_are_taken) {
  for (const uint16_t value : {0x7fc0, 0xffff, 0x7f80, 0xff80}) {
    SharedProduct product(product_named("4B o"), 2, 4);
    Ranks ranks(2, product.inbox_floats(4));
    product.set_first_x(value);
    product.run_whole(4, nullptr);
    const double seconds = seconds_of([&] { product.run_ranks(ranks, 4, nullptr); });
    CHECK(seconds < 5);
    product.check_ranks_are_like_the_whole("x of bits " + std::to_string(value));
    CHECK_EQ(ranks.fault(0), 0u);
  }
}

// One exchange in a graph: each replay is another round, in another slot.
TEST(recorded_rounds_rotate) {
  const int num_rows = 8;
  SharedProduct product(product_named("tiny o"), 4, num_rows);
  Ranks ranks(4, product.inbox_floats(num_rows));
  const device::Stream stream;
  product.run_ranks(ranks, num_rows, stream.handle());  // what is loaded on first use
  product.run_whole(num_rows, stream.handle());
  device::synchronize(stream.handle());  // before x changes
  const device::Graph graph(stream.handle(), [&] {
    product.run_ranks(ranks, num_rows, stream.handle());
    product.run_whole(num_rows, stream.handle());
  });
  for (int replay = 0; replay < 3 * kInboxSlots + 1; ++replay) {
    product.set_first_x(to_bf16(static_cast<float>(replay)));
    graph.launch(stream.handle());
    device::synchronize(stream.handle());
    product.check_ranks_are_like_the_whole("replay " + std::to_string(replay));
  }
  CHECK(ranks.are_empty());
}

// A rank that waits while the other one has not yet begun.
TEST(a_rank_waits_for_another) {
  for (const int num_rows : {1, 4, 24, 33}) {
    SharedProduct product(product_named("4B o"), 2, num_rows);
    Ranks ranks(2, product.inbox_floats(num_rows));
    const device::Stream streams[2];
    product.run_ranks(ranks, num_rows, nullptr);  // what is loaded on first use
    product.run_whole(num_rows, nullptr);
    CHECK_CUDA(cudaDeviceSynchronize());
    for (int round = 0; round < 2 * kInboxSlots; ++round) {
      product.run_whole(num_rows, nullptr);
      CHECK_CUDA(cudaDeviceSynchronize());
      for (int turn = 0; turn < 2; ++turn) {
        const int rank = (round + turn) % 2;
        const Exchange& view = ranks[rank];
        void* stream = streams[rank].handle();
        CHECK_CUDA(linear_cuda(product.send_params(view, num_rows), stream));
        CHECK_CUDA(rms_norm_cuda(product.take_params(view, num_rows), stream));
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      product.check_ranks_are_like_the_whole("round " + std::to_string(round));
    }
    CHECK(ranks.are_empty());
  }
}

TEST(a_rank_does_not_wait_forever) {
  const int num_rows = 4;
  SharedProduct product(product_named("4B o"), 2, num_rows);
  Ranks ranks(2, product.inbox_floats(num_rows), 100'000'000);
  const auto run_rank = [&](int rank) {
    CHECK_CUDA(linear_cuda(product.send_params(ranks[rank], num_rows), nullptr));
    CHECK_CUDA(rms_norm_cuda(product.take_params(ranks[rank], num_rows), nullptr));
  };
  product.run_ranks(ranks, num_rows, nullptr);
  CHECK_EQ(ranks.fault(0), 0u);
  const double first = seconds_of([&] { run_rank(0); });
  CHECK(first > 0.09 && first < 5);
  CHECK_EQ(ranks.fault(0), kExchangeIsLate);
  CHECK_EQ(ranks.fault(1), 0u);
  // Those after it do not wait at all.
  const double next = seconds_of([&] {
    for (int i = 0; i < 20; ++i) run_rank(0);
  });
  CHECK(next < 0.09);

  ranks.clear();
  SharedProduct again(product_named("4B o"), 2, num_rows);
  again.run_whole(num_rows, nullptr);
  again.run_ranks(ranks, num_rows, nullptr);
  again.check_ranks_are_like_the_whole("after a fault");
}

TEST(exchanges_that_cannot_be_are_refused) {
  const int num_rows = 4;
  SharedProduct product(product_named("tiny o"), 2, num_rows);
  Ranks ranks(2, product.inbox_floats(num_rows));
  const auto refuses_to_send = [&](const auto& change) {
    Exchange exchange = ranks[0];
    LinearParams params = product.send_params(exchange, num_rows);
    change(exchange, params);
    return linear_cuda(params, nullptr) == static_cast<int>(cudaErrorInvalidValue);
  };
  CHECK(refuses_to_send([](Exchange& e, LinearParams&) { e.num_ranks = 9; }));
  CHECK(refuses_to_send([](Exchange& e, LinearParams&) { e.rank = 2; }));
  CHECK(refuses_to_send([](Exchange& e, LinearParams&) { e.fault = nullptr; }));
  CHECK(refuses_to_send([](Exchange& e, LinearParams&) { e.floats.slot -= 4; }));
  CHECK(refuses_to_send([](Exchange&, LinearParams& p) { ++p.num_rows; }));
  float sums = 0;
  CHECK(refuses_to_send([&](Exchange&, LinearParams& p) { p.partials = &sums; }));
  CHECK(refuses_to_send([&](Exchange&, LinearParams& p) { p.weight.bias = &sums; }));
  const auto refuses_to_take = [&](const auto& change) {
    Exchange exchange = ranks[0];
    RmsNormParams params = product.take_params(exchange, num_rows);
    change(exchange, params);
    return rms_norm_cuda(params, nullptr) == static_cast<int>(cudaErrorInvalidValue);
  };
  CHECK(refuses_to_take([](Exchange& e, RmsNormParams&) { e.floats.slot -= 4; }));
  CHECK(refuses_to_take([](Exchange&, RmsNormParams& p) { p.num_partials = 3; }));
  CHECK(refuses_to_take([](Exchange&, RmsNormParams& p) { p.num_partials = 0; }));
  CHECK(refuses_to_take([](Exchange&, RmsNormParams& p) { p.starts_residual = true; }));
  CHECK(refuses_to_take([](Exchange&, RmsNormParams& p) { p.delta = p.residual; }));
  CHECK(ranks.are_empty());
}

TEST(every_row_is_dealt_to_one_rank) {
  for (const int num_ranks : {1, 2, 4, 8}) {
    for (const int num_rows : {1, 5, 16, 17, 64, 255}) {
      int next = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const RowRange own = dealt_rows(num_ranks, rank, num_rows);
        CHECK_EQ(own.first, next);
        next += own.count;
        for (int row = own.first; row < next; ++row) {
          CHECK_EQ(rank_of_dealt(num_ranks, row, num_rows), rank);
        }
        CHECK_LE(are_dealt(num_rows) ? own.count : num_rows, most_own_rows(num_ranks, num_rows));
        CHECK_LE(own.count, most_own_rows(num_ranks, 255));
      }
      CHECK_EQ(next, num_rows);
    }
  }
}

// Every rank ends with the columns of all, or of the rows that it is dealt, round after round, and
// nothing else is touched.
void check_columns_are_shared(bool deals_rows) {
  for (const int num_ranks : {1, 2, 4, 8}) {
    for (const int num_rows : {1, 7, 64}) {
      const size_t width = 4096 + 36, rows = static_cast<size_t>(num_rows);
      const Ranks ranks(num_ranks, {.slot = 4});
      const std::vector<device::Stream> streams(static_cast<size_t>(num_ranks));
      std::vector<std::unique_ptr<DeviceBuffer>> buffers;
      ShareColumnsParams params = {.num_rows = num_rows,
                                   .deals_rows = deals_rows,
                                   .row_bytes = static_cast<int64_t>(width * sizeof(float))};
      for (int rank = 0; rank < num_ranks; ++rank) {
        buffers.push_back(std::make_unique<DeviceBuffer>(rows * width * sizeof(float)));
        params.rows[rank] = buffers.back()->data();
      }
      for (uint64_t round = 0; round < 3; ++round) {
        const std::vector<float> expected = Rng(round + 1).normals(rows * width);
        std::vector<ShareColumnsParams> of_ranks;
        std::vector<std::vector<float>> ends;
        for (int rank = 0; rank < num_ranks; ++rank) {
          const size_t first =
              width / 4 * static_cast<size_t>(rank) / static_cast<size_t>(num_ranks) * 4;
          const size_t last =
              width / 4 * static_cast<size_t>(rank + 1) / static_cast<size_t>(num_ranks) * 4;
          std::vector<float> own(rows * width, -1.0f);
          for (size_t row = 0; row < rows; ++row) {
            for (size_t i = first; i < last; ++i) own[row * width + i] = expected[row * width + i];
          }
          buffers[static_cast<size_t>(rank)]->upload(own);
          const RowRange dealt =
              deals_rows ? dealt_rows(num_ranks, rank, num_rows) : RowRange{0, num_rows};
          const auto begin = static_cast<ptrdiff_t>(static_cast<size_t>(dealt.first) * width);
          const auto count = static_cast<ptrdiff_t>(static_cast<size_t>(dealt.count) * width);
          std::copy_n(expected.begin() + begin, count, own.begin() + begin);
          ends.push_back(own);
          params.exchange = &ranks[rank];
          params.first_byte = static_cast<int64_t>(first * sizeof(float));
          params.num_bytes = static_cast<int64_t>((last - first) * sizeof(float));
          of_ranks.push_back(params);
        }
        CHECK_CUDA(cudaDeviceSynchronize());
        for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
          CHECK_CUDA(share_columns_cuda(of_ranks[rank], streams[rank].handle()));
        }
        for (size_t rank = 0; rank < ends.size(); ++rank) {
          CHECK(buffers[rank]->download<float>() == ends[rank]);
          CHECK(buffers[rank]->guard_is_whole());
        }
        for (int rank = 0; rank < num_ranks; ++rank) CHECK_EQ(ranks.fault(rank), 0u);
      }
    }
  }
}

TEST(columns_are_shared) { check_columns_are_shared(/*deals_rows=*/false); }
TEST(columns_of_dealt_rows_go_to_their_ranks) { check_columns_are_shared(/*deals_rows=*/true); }

TEST(columns_are_not_awaited_forever) {
  const Ranks ranks(2, {.slot = 4}, 50'000'000);
  const DeviceBuffer rows(1024);
  ShareColumnsParams params = {.exchange = &ranks[0], .rows = {rows.data(), rows.data()}};
  params.num_rows = 1;
  params.row_bytes = params.num_bytes = 1024;
  const double seconds = seconds_of([&] { CHECK_CUDA(share_columns_cuda(params, nullptr)); });
  CHECK(seconds > 0.04 && seconds < 5);
  CHECK_EQ(ranks.fault(0), kExchangeIsLate);
  params.first_byte = 16;
  CHECK_EQ(share_columns_cuda(params, nullptr), static_cast<int>(cudaErrorInvalidValue));
}
