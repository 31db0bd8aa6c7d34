// Runs paths that must stay short, over and over in one thread, so that their instructions can be counted:
//
//     hot_paths PATH TIMES
//
// Two runs with different TIMES give the cost of one call: the difference of instructions, divided by the difference of
// TIMES (`make counts`).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "plan_words.h"
#include "ranks.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using MakePlan = PlanWords (*)(std::int64_t size, std::int64_t rank);

struct Path {
  const char* name;
  Transport transport;
  MakePlan plan;
  std::int32_t ranks;
  std::int64_t elements;
  std::int64_t segments;
};

PlanWords own_copy(std::int64_t size, std::int64_t rank) {
  PlanWords plan{size, rank, 1, 1, 0, {}};
  plan.lanes = {{{1, {{{{Opcode::copy, 0, 0, output(0, 1), {input(0, 1)}}}, {}}}}}};
  return plan;
}

// Half of an allreduce of two ranks: each rank sums up one of the two blocks.
PlanWords reduce_scatter(std::int64_t size, std::int64_t rank) {
  const std::int64_t peer = 1 - rank;
  PlanWords plan{size, rank, 2, 2, 0, {}};
  plan.lanes = {{{1,
                  {{{{Opcode::send, peer, 0, {}, {input(peer, 1)}},
                     {Opcode::recv_reduce, peer, 0, output(rank, 1), {input(rank, 1)}}},
                    {}}}}}};
  return plan;
}

constexpr Path paths[] = {
    {"shm_exchange_8_bytes", Transport::shm, direct_allreduce, 2, 2, 1},
    {"tcp_exchange_8_bytes", Transport::tcp, direct_allreduce, 2, 2, 1},
    {"one_rank_8_bytes", Transport::shm, own_copy, 1, 2, 1},
    {"reduce_scatter_64_KiB", Transport::shm, reduce_scatter, 2, 16384, 1},
    {"ring_of_4_with_16_segments", Transport::shm, ring_allreduce, 4, 1024, 16},
};

// One rank sends and the other receives, by calls that end at once.
void send_and_receive(long times) {
  Ranks ranks(2, Transport::shm);
  float sent[2] = {1, 2}, received[2] = {};
  auto* from = reinterpret_cast<std::byte*>(sent);
  auto* to = reinterpret_cast<std::byte*>(received);
  for (; times > 0; --times) {
    const auto sending = ranks.endpoint(0).try_now(Message::to_send(1, DType::float32, 0, from, 8), {}, 1);
    const auto receiving = ranks.endpoint(1).try_now(Message::to_receive(0, DType::float32, 0, to, 8), {}, 1);
    if (sending->outcome() != Outcome::done || receiving->outcome() != Outcome::done) std::abort();
  }
}
constexpr const char* message_path = "shm_message_8_bytes";

// Drives the ranks in turn until all calls have ended.
class Caller {
 public:
  explicit Caller(const Path& path) : ranks_(path.ranks, path.transport), requests_(path.ranks) {
    for (std::int32_t rank = 0; rank < path.ranks; ++rank) {
      data_.emplace_back(path.elements, 1.0f);
      places_.push_back(reinterpret_cast<std::byte*>(data_.back().data()));
      const auto words = path.plan(path.ranks, rank).encode();
      calls_.push_back(compile(words, {path.elements, DType::float32, Combine::max}, path.segments));
    }
  }

  void call() {
    for (std::size_t rank = 0; rank < calls_.size(); ++rank) {
      const std::span<std::byte* const> place(&places_[rank], 1);
      if (!endpoint(rank).try_now(calls_[rank], {place, place}, {}, 1, requests_[rank])) std::abort();
    }
    for (bool is_pending = true; is_pending;) {
      is_pending = false;
      for (std::size_t rank = 0; rank < calls_.size(); ++rank) {
        if (!requests_[rank]) continue;
        const Outcome outcome = endpoint(rank).poll(*requests_[rank]);
        if (outcome == Outcome::failed) std::abort();
        if (outcome == Outcome::done) requests_[rank].reset();
        is_pending |= requests_[rank] != nullptr;
      }
    }
  }

 private:
  Endpoint& endpoint(std::size_t rank) { return ranks_.endpoint(static_cast<std::int32_t>(rank)); }

  Ranks ranks_;
  std::vector<std::vector<float>> data_;
  std::vector<std::byte*> places_;
  std::vector<CompiledCall> calls_;
  std::vector<std::unique_ptr<Request>> requests_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) {
    for (const Path& path : paths) std::puts(path.name);
    std::puts(message_path);
    return 0;
  }
  if (argc == 3 && std::strcmp(argv[1], message_path) == 0) {
    send_and_receive(std::atol(argv[2]));
    return 0;
  }
  for (const Path& path : paths) {
    if (argc != 3 || std::strcmp(argv[1], path.name) != 0) continue;
    Caller caller(path);
    for (long i = std::atol(argv[2]); i > 0; --i) caller.call();
    return 0;
  }
  return 2;
}
