#include "system/core_distance.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

namespace unisono {
namespace {

constexpr std::int64_t batch = 200;

int pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(core), &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

struct alignas(128) Ball {
  std::atomic<std::int64_t> value{0};  // written by one of the two threads, and awaited by the other
};

}  // namespace

double flag_latency_ns(int core_a, int core_b, std::int64_t rounds) {
  Ball there;
  Ball back;
  std::atomic<int> error{0};  // of the thread that could not be pinned; both read it
  std::vector<double> batches;
  const auto pinned = [&](int core) {
    if (const int code = pin(core); code != 0) error.store(code);
    return error.load() == 0;
  };
  // A thread stops if it cannot be pinned to its core, or if it sees that the other thread could not be. So neither
  // waits for ever.
  const auto await = [&](Ball& ball, std::int64_t value) {
    while (ball.value.load(std::memory_order_acquire) != value)
      if (error.load(std::memory_order_relaxed) != 0) return false;
    return true;
  };
  std::thread echo([&] {
    if (!pinned(core_b)) return;
    for (std::int64_t i = 1; i <= rounds && await(there, i); ++i) back.value.store(i, std::memory_order_release);
  });
  std::thread caller([&] {
    if (!pinned(core_a)) return;
    auto before = std::chrono::steady_clock::now();
    for (std::int64_t i = 1; i <= rounds; ++i) {
      there.value.store(i, std::memory_order_release);
      if (!await(back, i)) return;
      if (i % batch != 0) continue;
      const auto now = std::chrono::steady_clock::now();
      batches.push_back(std::chrono::duration<double, std::nano>(now - before).count() / (2 * batch));
      before = now;
    }
  });
  caller.join();
  echo.join();
  if (error.load() != 0) throw std::system_error(error.load(), std::generic_category(), "pinning a thread to its core");
  if (batches.empty()) return 0;
  std::nth_element(batches.begin(), batches.begin() + static_cast<std::ptrdiff_t>(batches.size() / 2), batches.end());
  return batches[batches.size() / 2];
}

}  // namespace unisono
