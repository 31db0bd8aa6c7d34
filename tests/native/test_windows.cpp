#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "windows/window_server.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

constexpr double timeout_s = 60;
constexpr auto sum = static_cast<std::uint8_t>(Combine::sum);

constexpr Patience patient{nullptr, timeout_s, nullptr};

using Bytes = std::vector<std::byte>;

template <class Body>
void on_threads(int count, Body body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

void accumulates_of_threads_are_atomic() {
  constexpr int threads = 3;
  constexpr int rounds = 20;  // few enough for an int8
  constexpr std::int64_t length = 130;
  const DType dtypes[] = {DType::int8, DType::float16, DType::float32, DType::float64, DType::complex128};
  for (const DType dtype : dtypes) {
    const std::size_t itemsize = dtype_table[static_cast<std::size_t>(dtype)].itemsize;
    alignas(64) std::array<std::byte, length * 16> memory{};
    Bytes one(length * itemsize);
    // 1 in each of these types, from the sum of 60 of which no rounding differs
    const std::uint16_t half = 0x3c00;
    const float single = 1;
    const double real = 1;
    for (std::size_t i = 0; i < length; ++i) {
      std::byte* place = one.data() + i * itemsize;
      if (dtype == DType::int8) *place = std::byte{1};
      if (dtype == DType::float16) std::memcpy(place, &half, sizeof half);
      if (dtype == DType::float32) std::memcpy(place, &single, sizeof single);
      if (itemsize >= 8) std::memcpy(place, &real, sizeof real);
    }
    WindowGate gate;
    const WindowPart part(memory.data(), length * itemsize, gate);
    on_threads(threads, [&](int) {
      for (int round = 0; round < rounds; ++round)
        part.accumulate(dtype, sum, {0, length}, one.data(), nullptr, patient);
    });
    Bytes first(itemsize);
    part.get(dtype, {0, 1}, first.data());
    const std::uint16_t expected_half = 0x5380;
    const float expected_single = threads * rounds;
    const double expected_real = threads * rounds;
    if (dtype == DType::int8) CHECK(first[0] == std::byte{threads * rounds});
    if (dtype == DType::float16) CHECK(std::memcmp(first.data(), &expected_half, 2) == 0);
    if (dtype == DType::float32) CHECK(std::memcmp(first.data(), &expected_single, 4) == 0);
    if (itemsize >= 8) CHECK(std::memcmp(first.data(), &expected_real, 8) == 0);
    for (std::int64_t i = 1; i < length; ++i) {
      Bytes other(itemsize);
      part.get(dtype, {i, 1}, other.data());
      CHECK(other == first);
    }
  }
}

void swaps_count_what_no_other_thread_has_counted() {
  alignas(16) std::array<std::uint64_t, 2> memory{};
  WindowGate gate;
  const WindowPart part(reinterpret_cast<std::byte*>(memory.data()), sizeof memory, gate);
  constexpr std::uint64_t rounds = 300;
  on_threads(3, [&](int) {
    for (std::uint64_t counted = 0; counted < rounds;) {
      std::uint64_t seen = 0;
      part.accumulate(DType::uint64, static_cast<std::uint8_t>(WindowOp::no_op), {1, 1},
                      reinterpret_cast<const std::byte*>(&seen), reinterpret_cast<std::byte*>(&seen), patient);
      std::uint64_t value = seen + 1;
      part.compare_and_swap(DType::uint64, 1, reinterpret_cast<const std::byte*>(&seen),
                            reinterpret_cast<const std::byte*>(&value), reinterpret_cast<std::byte*>(&value), patient);
      if (value == seen) ++counted;
    }
  });
  CHECK(memory[0] == 0 && memory[1] == 3 * rounds);
}

void large_and_small_accumulates_are_atomic_together() {
  constexpr std::int64_t length = 20'000;  // several times as much as passes the gate at once
  constexpr std::int64_t rounds = 30;
  constexpr int threads = 4;
  WindowGate gate;
  std::vector<std::int64_t> memory(length);
  const std::vector<std::int64_t> ones(length, 1);
  const WindowPart part(reinterpret_cast<std::byte*>(memory.data()), length * sizeof ones[0], gate);
  const auto* operand = reinterpret_cast<const std::byte*>(ones.data());
  on_threads(threads, [&](int thread) {
    std::vector<std::int64_t> before(length);
    auto* result = reinterpret_cast<std::byte*>(before.data());
    for (std::int64_t round = 0; round < rounds; ++round) {
      part.accumulate(DType::int64, sum, {0, length}, operand, round % 3 == thread % 3 ? result : nullptr, patient);
      for (std::int64_t i = 0; i < 100; ++i) {
        const std::int64_t place = i * 199;
        std::int64_t value = 1;  // becomes the value before
        auto* cell = reinterpret_cast<std::byte*>(&value);
        part.accumulate(DType::int64, sum, {place, 1}, cell, cell, patient);
        std::int64_t more = value + 1;
        part.compare_and_swap(DType::int64, place, cell, reinterpret_cast<const std::byte*>(&more),
                              reinterpret_cast<std::byte*>(&more), patient);
        if (more == value) CHECK(false);  // the value has been larger since the sum
      }
      part.accumulate(DType::int64, sum, {length - 1, length / 2, -2}, operand, nullptr, patient);
    }
  });
  for (std::int64_t i = 0; i < length; ++i) {
    const std::int64_t singles = i % 199 == 0 && i / 199 < 100 ? 1 : 0;
    CHECK(memory[static_cast<std::size_t>(i)] == threads * rounds * (1 + singles + i % 2));
  }
}

void waits_at_a_gate_end_with_the_job() {
  Control control(0, 1);
  WindowGate gate;
  CHECK(gate.enter(patient) == LockOutcome::locked);  // and dies there
  CHECK(gate.close({&control, 0.01, nullptr}) == LockOutcome::late);
  CHECK(gate.close({&control, timeout_s, [] { return true; }}) == LockOutcome::interrupted);
  CHECK(gate.enter(patient) == LockOutcome::locked);  // because nobody closes it any more
  gate.leave();
  std::thread failing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    control.fail({FailureKind::peer_lost, 0, 1, -1, "rank 1 died"});
  });
  CHECK(gate.close({&control, timeout_s, nullptr}) == LockOutcome::failed);
  failing.join();
  gate.leave();
  CHECK(gate.close(patient) == LockOutcome::locked);
  CHECK(gate.enter({&control, timeout_s, nullptr}) == LockOutcome::failed);
  CHECK(gate.enter({nullptr, 0, nullptr}) == LockOutcome::late);
}

void exclusive_locks_exclude_and_shared_ones_do_not() {
  Control control(0, 1);
  WindowLock lock;
  std::uint64_t plain = 0;  // a race, if two threads hold the lock
  on_threads(4, [&](int thread) {
    for (int round = 0; round < 200; ++round) {
      const bool exclusive = (round + thread) % 2 == 0;
      CHECK(lock.lock(exclusive, thread, timeout_s, control, nullptr) == LockOutcome::locked);
      if (exclusive)
        ++plain;
      else
        CHECK(plain <= 400);
      lock.unlock(exclusive);
    }
  });
  CHECK(plain == 400 && lock.holder() == -1);
  CHECK(lock.try_lock(false, 0) && lock.try_lock(false, 1) && !lock.try_lock(true, 2));
  lock.unlock(false);
  lock.unlock(false);
  CHECK(lock.try_lock(true, 5) && lock.holder() == 5 && !lock.try_lock(false, 0));
}

void waits_for_a_lock_end_with_the_job() {
  Control control(0, 1);
  WindowLock lock;
  CHECK(lock.try_lock(true, 1));
  CHECK(lock.lock(true, 0, 0.01, control, nullptr) == LockOutcome::late);
  CHECK(lock.lock(false, 0, timeout_s, control, [] { return true; }) == LockOutcome::interrupted);
  std::thread failing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    control.fail({FailureKind::peer_lost, 0, 1, -1, "rank 1 died"});
  });
  CHECK(lock.lock(true, 0, timeout_s, control, nullptr) == LockOutcome::failed);
  failing.join();
  CHECK(lock.holder() == 1);
}

// A rank that sends requests by hand.
class Origin {
 public:
  explicit Origin(Endpoint& endpoint) : endpoint_(endpoint) {}

  void send(const WindowRequest& request, const Bytes& payload = {}) {
    Bytes message(sizeof request + payload.size());
    std::memcpy(message.data(), &request, sizeof request);
    std::copy(payload.begin(), payload.end(), message.begin() + sizeof request);
    send(message);
  }

  void send(Bytes& message) {
    const auto sending = endpoint_.start(
        Message::to_send(0, DType::uint8, WindowServer::request_tag, message.data(), message.size()), {});
    endpoint_.wait(*sending, timeout_s, nullptr);
  }

  // The answer, with `nbytes` of result behind its header; empty if the job has failed.
  Bytes answer(std::size_t nbytes, std::uint32_t tag = WindowServer::reply_tag) {
    Bytes bytes(sizeof(WindowReply) + nbytes);
    const auto receiving = endpoint_.start(Message::to_receive(0, DType::uint8, tag, bytes.data(), bytes.size()), {});
    return endpoint_.wait(*receiving, timeout_s, nullptr) == Outcome::done ? bytes : Bytes();
  }

  WindowReply flush() {
    send({WindowAction::flush, DType::uint8, 0, 0, 0, 0, 0, 1});
    WindowReply reply;
    const Bytes bytes = answer(0);
    CHECK(bytes.size() == sizeof reply);
    std::memcpy(&reply, bytes.data(), sizeof reply);
    return reply;
  }

 private:
  Endpoint& endpoint_;
};

// Runs `body` on ranks 1 and 2, while a server on rank 0 serves a part of 4 int64.
void beside_server(Transport transport, const std::function<void(std::int32_t, Origin&)>& body,
                   const std::function<void(std::span<const std::int64_t>)>& check) {
  alignas(64) std::array<std::int64_t, 4> memory{};
  WindowLock lock;
  Ranks ranks(3, transport);
  {
    WindowServer server(ranks.endpoint(0),
                        WindowPart(reinterpret_cast<std::byte*>(memory.data()), sizeof memory, lock.gate()), lock,
                        [](std::int32_t) {});
    std::atomic<int> ended{0};
    ranks.run([&](std::int32_t rank, Endpoint& endpoint) {
      if (rank == 0) {
        CHECK(eventually([&] { return ended == 2; }));
        return;
      }
      Origin origin(endpoint);
      try {
        body(rank, origin);
      } catch (...) {
        ++ended;
        throw;
      }
      ++ended;
    });
    ranks.endpoint(0).close();
    server.join();
  }
  check(memory);
}

Bytes bytes_of(std::initializer_list<std::int64_t> values) {
  Bytes bytes(values.size() * sizeof(std::int64_t));
  std::memcpy(bytes.data(), values.begin(), bytes.size());
  return bytes;
}

void a_server_carries_out_requests_in_their_order() {
  for (const Transport transport : {Transport::shm, Transport::tcp}) {
    const auto body = [](std::int32_t rank, Origin& origin) {
      for (std::int64_t round = 0; round < 50; ++round) {
        origin.send({WindowAction::accumulate, DType::int64, sum, 0, 0, 0, 2, 3}, bytes_of({1, 2}));  // 0 and 3
        origin.send({WindowAction::put, DType::int64, 0, 1, 0, 0, 1, 1}, bytes_of({rank, round}));    // position, value
      }
      CHECK(origin.flush().status == WindowStatus::done);
      origin.send({WindowAction::get, DType::int64, 0, 0, 0, rank, 1, 1});
      const Bytes reply = origin.answer(8);
      std::int64_t value = -1;
      std::memcpy(&value, reply.data() + sizeof(WindowReply), sizeof value);
      CHECK(value == 49);
    };
    beside_server(transport, body, [](std::span<const std::int64_t> memory) {
      CHECK(memory[0] == 100 && memory[1] == 49 && memory[2] == 49 && memory[3] == 200);
    });
  }
}

void a_server_lends_its_lock() {
  std::int64_t plain = 0;
  const auto body = [&](std::int32_t, Origin& origin) {
    for (int round = 0; round < 20; ++round) {
      origin.send({WindowAction::lock, DType::uint8, 1, 0, 0, 0, 0, 1});
      CHECK(!origin.answer(0, WindowServer::grant_tag).empty());
      const std::int64_t before = std::atomic_ref(plain).load(std::memory_order_relaxed);
      std::this_thread::yield();
      std::atomic_ref(plain).store(before + 1, std::memory_order_relaxed);
      origin.send({WindowAction::unlock, DType::uint8, 1, 0, 0, 0, 0, 1});
      CHECK(!origin.answer(0).empty());
    }
    origin.send({WindowAction::unlock, DType::uint8, 1, 0, 0, 0, 0, 1});
    WindowReply reply;
    std::memcpy(&reply, origin.answer(0).data(), sizeof reply);
    CHECK(reply.status == WindowStatus::not_locked);
  };
  beside_server(Transport::tcp, body, [](std::span<const std::int64_t>) {});
  CHECK(plain == 40);
}

void hostile_requests_touch_nothing_beyond_the_part() {
  const auto body = [](std::int32_t rank, Origin& origin) {
    if (rank == 2) return;
    Dice dice(5);
    constexpr std::size_t payloads[] = {1, 0, 1, 1, 2, 0, 0, 0};
    for (int round = 0; round < 2000; ++round) {
      WindowRequest request{};
      request.action = static_cast<WindowAction>(dice.below(5));
      request.dtype = static_cast<DType>(dice.below(dtype_count));
      request.op = static_cast<std::uint8_t>(dice.below(40));
      request.has_indices = static_cast<std::uint8_t>(dice.below(2));
      request.start = static_cast<std::int64_t>(dice.awkward());
      request.step = static_cast<std::int64_t>(dice.awkward());
      request.count = static_cast<std::int64_t>(dice.below(20));
      const auto count = static_cast<std::size_t>(request.count);
      const std::size_t nbytes = count * dtype_table[static_cast<std::size_t>(request.dtype)].itemsize;
      Bytes payload((request.has_indices != 0 ? 8 * count : 0) +
                    payloads[static_cast<std::size_t>(request.action)] * nbytes);
      for (std::size_t i = 0; i + 8 <= payload.size(); i += 8) {
        const std::uint64_t word = dice.awkward();
        std::memcpy(payload.data() + i, &word, sizeof word);
      }
      origin.send(request, payload);
      const bool is_answered = request.action != WindowAction::put && request.action != WindowAction::accumulate;
      if (is_answered) CHECK(!origin.answer(nbytes).empty());
    }
    origin.flush();
    CHECK(origin.flush().status == WindowStatus::done);
  };
  beside_server(Transport::shm, body, [](std::span<const std::int64_t>) {});
}

void a_request_of_a_wrong_length_fails_the_job() {
  const WindowRequest too_short{WindowAction::put, DType::int64, 0, 0, 0, 0, 2, 1};
  const WindowRequest too_many{WindowAction::get, DType::int64, 0, 0, 0, 0, std::int64_t{1} << 40, 1};
  const WindowRequest negative{WindowAction::get, DType::int64, 0, 0, 0, 0, -1, 1};
  const WindowRequest unknown{static_cast<WindowAction>(99), DType::int64, 0, 0, 0, 0, 0, 1};
  const WindowRequest no_type{WindowAction::get, static_cast<DType>(99), 0, 0, 0, 0, 0, 1};
  for (const WindowRequest& request : {too_short, too_many, negative, unknown, no_type}) {
    const auto body = [&](std::int32_t rank, Origin& origin) {
      if (rank == 1) {
        origin.send(request, Bytes(8));
        CHECK(origin.answer(0).empty());
      }
    };
    beside_server(Transport::shm, body, [](std::span<const std::int64_t> memory) {
      CHECK(std::all_of(memory.begin(), memory.end(), [](std::int64_t value) { return value == 0; }));
    });
  }
}

}  // namespace

int main() {
  return run_tests(
      {{"accumulates of threads are atomic", accumulates_of_threads_are_atomic},
       {"swaps count what no other thread has counted", swaps_count_what_no_other_thread_has_counted},
       {"large and small accumulates are atomic together", large_and_small_accumulates_are_atomic_together},
       {"waits at a gate end with the job", waits_at_a_gate_end_with_the_job},
       {"exclusive locks exclude, and shared ones do not", exclusive_locks_exclude_and_shared_ones_do_not},
       {"waits for a lock end with the job", waits_for_a_lock_end_with_the_job},
       {"a server carries out requests in their order", a_server_carries_out_requests_in_their_order},
       {"a server lends its lock", a_server_lends_its_lock},
       {"hostile requests touch nothing beyond the part", hostile_requests_touch_nothing_beyond_the_part},
       {"a request of a wrong length fails the job", a_request_of_a_wrong_length_fails_the_job}});
}
