#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "plan_words.h"
#include "ranks.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using Build = std::function<PlanWords(std::int64_t rank)>;

constexpr double timeout_s = 60;

struct Family {
  std::int32_t size;
  std::int64_t lanes;
  Build build;
};

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {2, 1, [](std::int64_t rank) { return ring_allreduce(2, rank); }},
      {3, 1, [](std::int64_t rank) { return ring_allreduce(3, rank); }},
      {3, 1, [](std::int64_t rank) { return direct_allreduce(3, rank); }},
      {2, 1, [](std::int64_t rank) { return doubling_allreduce(2, rank); }},
      {4, 1, [](std::int64_t rank) { return doubling_allreduce(4, rank); }},
      {2, 2, [](std::int64_t rank) { return two_lane_allreduce(rank); }},
      {2, 2, [](std::int64_t rank) { return empty_groups_allreduce(rank); }},
  };
  return all;
}

template <class T>
struct Array {
  std::vector<T> values;
  DType dtype;

  std::byte* data() { return reinterpret_cast<std::byte*>(values.data()); }
};

struct Addresses {
  std::byte* input;
  std::byte* output;

  Memory memory() const { return {{&input, 1}, {&output, 1}}; }
};

template <class T>
Addresses memory_of(Array<T>& input, Array<T>& output) {
  return {input.data(), output.data()};
}

template <class T>
T contribution(std::size_t i, std::int32_t rank, std::int32_t size) {
  return static_cast<T>(static_cast<std::int32_t>(i % 61) * (rank + 1) * size);
}

// The average of (i mod 61) (rank + 1) size over all ranks is exact in every type used here.
template <class T>
void average(Endpoint& endpoint, const Family& family, DType dtype, std::int64_t count, std::int64_t segments,
             bool in_place) {
  const std::int32_t size = endpoint.size();
  const auto words = family.build(endpoint.rank()).encode();
  const CompiledCall call = compile(words, {count, dtype, Combine::sum, static_cast<std::uint64_t>(size)}, segments);
  Array<T> in{std::vector<T>(static_cast<std::size_t>(count)), dtype};
  for (std::size_t i = 0; i < in.values.size(); ++i) in.values[i] = contribution<T>(i, endpoint.rank(), size);
  Array<T> out{std::vector<T>(in_place ? 0 : in.values.size(), T(77)), dtype};
  Array<T>& result = in_place ? in : out;
  const auto request = endpoint.start(call, memory_of(in, result).memory(), {});
  CHECK(endpoint.wait(*request, timeout_s, nullptr) == Outcome::done);
  for (std::size_t i = 0; i < result.values.size(); ++i)
    CHECK(result.values[i] == static_cast<T>(static_cast<std::int32_t>(i % 61) * size * (size + 1) / 2));
}

void collectives_of_any_size_and_segments_are_right() {
  // A slot holds 64 KiB: 16384 elements of 4 bytes.
  const std::int64_t counts[] = {0, 1, 7, 16383, 16384, 16385, 32767, 32769};
  for (const Transport transport : transports) {
    for (const Family& family : families()) {
      Ranks ranks(family.size, transport, family.lanes);
      ranks.run([&](std::int32_t, Endpoint& endpoint) {
        for (const std::int64_t count : counts)
          for (const std::int64_t segments : {1, 3})
            average<float>(endpoint, family, DType::float32, count, segments, false);
        average<std::int16_t>(endpoint, family, DType::int16, 50001, 2, false);
        average<double>(endpoint, family, DType::float64, 9001, 1, false);
      });
    }
  }
}

void large_collectives_are_right() {
  for (const Transport transport : transports) {
    for (const std::size_t chosen : {std::size_t{0}, std::size_t{2}}) {  // a ring and direct messages
      const Family& family = families()[chosen];
      Ranks ranks(family.size, transport, family.lanes);
      ranks.run([&](std::int32_t, Endpoint& endpoint) {
        average<float>(endpoint, family, DType::float32, 1000003, 1, false);
        average<float>(endpoint, family, DType::float32, 700001, 5, chosen == 0);  // a ring may run in place
      });
    }
  }
}

void two_threads_may_wait_for_calls_of_one_communicator() {
  for (const Transport transport : transports) {
    const Family& family = families()[1];
    Ranks ranks(family.size, transport);
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      const CompiledCall call = compile(family.build(rank).encode(), {20000, DType::float32, Combine::sum}, 2);
      std::vector<Array<float>> arrays(16, {std::vector<float>(20000, 1), DType::float32});
      std::vector<std::unique_ptr<Request>> requests;
      for (auto& array : arrays) requests.push_back(endpoint.start(call, memory_of(array, array).memory(), {}));
      std::atomic<int> done{0};
      std::thread other([&] {
        for (std::size_t i = 1; i < requests.size(); i += 2) {
          done += eventually([&] { return endpoint.poll(*requests[i]) == Outcome::done; });
          requests[i].reset();
        }
      });
      for (std::size_t i = 0; i < requests.size(); i += 2)
        done += endpoint.wait(*requests[i], timeout_s, nullptr) == Outcome::done;
      other.join();
      CHECK(done == 16);
      for (const auto& array : arrays)
        CHECK(std::all_of(array.values.begin(), array.values.end(), [](float value) { return value == 3; }));
    });
  }
}

void channels_may_be_added_by_several_threads_while_a_call_waits() {
  constexpr std::int64_t lanes = 4;
  for (const Transport transport : transports) {
    Ranks ranks(2, transport, 0);
    std::vector<std::thread> late;
    for (std::int64_t lane = lanes - 1; lane >= 0; --lane) {
      late.emplace_back([&, lane] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        ChannelPair pair = channel_pair(transport, 0, 1);
        ranks.endpoint(0).add_channel(lane, std::move(pair.a));
        ranks.endpoint(1).add_channel(lane, std::move(pair.b));
      });
    }
    ranks.run([&](std::int32_t, Endpoint& endpoint) {
      average<float>(endpoint, families()[0], DType::float32, 1000, 1, false);
    });
    for (std::thread& each : late) each.join();
    for (const std::int32_t rank : {0, 1})  // and a channel for messages in each direction
      CHECK(ranks.endpoint(rank).traffic().size() == lanes + 2);
  }
}

std::atomic<bool> interrupt_now{false};

void an_interrupted_call_ends_on_all_ranks() {
  Ranks ranks(2, Transport::shm);
  interrupt_now = false;
  std::thread user([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    interrupt_now = true;
  });
  const CompiledCall call = compile(ring_allreduce(2, 0).encode(), {10, DType::float32, Combine::sum}, 1);
  Array<float> array{std::vector<float>(10), DType::float32};
  const auto request = ranks.endpoint(0).start(call, memory_of(array, array).memory(), {});
  CHECK(ranks.endpoint(0).wait(*request, timeout_s, [] { return interrupt_now.load(); }) == Outcome::interrupted);
  user.join();
  CHECK(eventually([&] { return ranks.control(1).failed(); }));
  CHECK(ranks.control(1).failure().kind == FailureKind::aborted);
}

void closing_ends_a_call_that_another_thread_waits_for() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    Endpoint& endpoint = ranks.endpoint(0);
    const CompiledCall call = compile(ring_allreduce(2, 0).encode(), {100000, DType::float32, Combine::sum}, 1);
    Array<float> array{std::vector<float>(100000), DType::float32};
    const auto request = endpoint.start(call, memory_of(array, array).memory(), {});
    std::thread closer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      endpoint.close();
    });
    CHECK(endpoint.wait(*request, timeout_s, nullptr) == Outcome::failed);
    closer.join();
    CHECK(endpoint.traffic().empty());
  }
}

void dropping_a_call_that_has_not_ended_aborts() {
  Ranks ranks(2, Transport::shm);
  const CompiledCall call = compile(ring_allreduce(2, 0).encode(), {10, DType::float32, Combine::sum}, 1);
  Array<float> array{std::vector<float>(10), DType::float32};
  ranks.endpoint(0).start(call, memory_of(array, array).memory(), {}).reset();
  CHECK(eventually([&] { return ranks.control(1).failed(); }));
  const auto request = ranks.endpoint(1).start(call, memory_of(array, array).memory(), {});
  CHECK(ranks.endpoint(1).poll(*request) == Outcome::failed);
}

// Lane 1 receives while messages of lane 0 end, so the mismatch is found after some groups have just ended.
void calls_that_differ_end_as_a_mismatch_on_all_ranks() {
  for (const Transport transport : transports) {
    for (const bool polls : {false, true}) {
      Ranks ranks(2, transport, 2);
      ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
        const auto digest = static_cast<std::uint64_t>(10 + rank);
        const CompiledCall call =
            compile(two_lane_allreduce(rank).encode(), {5000, DType::float32, Combine::sum}, 2, digest);
        Array<float> in{std::vector<float>(5000), DType::float32};
        Array<float> out = in;
        const auto request = endpoint.start(call, memory_of(in, out).memory(), {});
        if (polls) CHECK(eventually([&] { return endpoint.poll(*request) != Outcome::pending; }));
        CHECK(endpoint.wait(*request, timeout_s, nullptr) == Outcome::failed);
        const Failure failure = endpoint.control().failure();
        CHECK(failure.kind == FailureKind::mismatch && failure.sequence == 0);
        CHECK(failure.text.find("allreduce #10") != std::string::npos);
        CHECK(failure.text.find("allreduce #11") != std::string::npos);
      });
    }
  }
}

// Two ranks whose arrays differ by one element, which the third instance moves while the second one ends.
void a_mismatch_may_be_found_while_other_groups_end() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    std::vector<CompiledCall> calls;
    std::vector<Array<float>> arrays;
    std::vector<std::unique_ptr<Request>> requests;
    for (std::int32_t rank = 0; rank < 2; ++rank) {
      PlanWords plan = two_lane_allreduce(rank);  // its groups follow each other
      ItemWords second = plan.lanes[1][0];
      second.groups[0].after.clear();
      plan.lanes = {{plan.lanes[0][0], second}};
      calls.push_back(compile(plan.encode(), {4003 - rank, DType::float32, Combine::sum}, 2));
      arrays.push_back({std::vector<float>(4003), DType::float32});
      arrays.push_back(arrays.back());
    }
    for (std::int32_t rank = 0; rank < 2; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      requests.push_back(
          ranks.endpoint(rank).start(calls[index], memory_of(arrays[2 * index], arrays[2 * index + 1]).memory(), {}));
    }
    CHECK(eventually([&] {
      const Outcome first = ranks.endpoint(0).poll(*requests[0]);
      return ranks.endpoint(1).poll(*requests[1]) == Outcome::failed && first == Outcome::failed;
    }));
    CHECK(ranks.control(0).failure().kind == FailureKind::mismatch);
  }
}

void a_missing_rank_is_named_by_the_timeout() {
  Ranks ranks(3, Transport::tcp);
  const CompiledCall call = compile(ring_allreduce(3, 1).encode(), {10, DType::float32, Combine::sum}, 1);
  Array<float> array{std::vector<float>(10), DType::float32};
  const auto request = ranks.endpoint(1).start(call, memory_of(array, array).memory(), {});
  CHECK(ranks.endpoint(1).wait(*request, 0.2, nullptr) == Outcome::failed);
  const Failure failure = ranks.control(1).failure();
  CHECK(failure.kind == FailureKind::timeout && failure.peer == 0);
  CHECK(failure.text.find("ranks 0 and 2 have not called it") != std::string::npos);
}

void a_peer_whose_channel_closes_is_lost() {
  for (const Transport transport : transports) {
    Ranks ranks(2, transport);
    const CompiledCall call = compile(ring_allreduce(2, 0).encode(), {10, DType::float32, Combine::sum}, 1);
    Array<float> array{std::vector<float>(10), DType::float32};
    const auto request = ranks.endpoint(0).start(call, memory_of(array, array).memory(), {});
    ranks.endpoint(1).close();
    CHECK(ranks.endpoint(0).wait(*request, timeout_s, nullptr) == Outcome::failed);
    CHECK(ranks.control(0).failure().kind == FailureKind::peer_lost && ranks.control(0).failure().peer == 1);
  }
}

}  // namespace

int main() {
  return run_tests({
      {"collectives of any size and segments are right", collectives_of_any_size_and_segments_are_right},
      {"large collectives are right", large_collectives_are_right},
      {"two threads may wait for calls of one communicator", two_threads_may_wait_for_calls_of_one_communicator},
      {"channels may be added by several threads while a call waits",
       channels_may_be_added_by_several_threads_while_a_call_waits},
      {"an interrupted call ends on all ranks", an_interrupted_call_ends_on_all_ranks},
      {"closing ends a call that another thread waits for", closing_ends_a_call_that_another_thread_waits_for},
      {"dropping a call that has not ended aborts", dropping_a_call_that_has_not_ended_aborts},
      {"calls that differ end as a mismatch on all ranks", calls_that_differ_end_as_a_mismatch_on_all_ranks},
      {"a mismatch may be found while other groups end", a_mismatch_may_be_found_while_other_groups_end},
      {"a missing rank is named by the timeout", a_missing_rank_is_named_by_the_timeout},
      {"a peer whose channel closes is lost", a_peer_whose_channel_closes_is_lost},
  });
}
