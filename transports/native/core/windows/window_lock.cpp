#include "windows/window_lock.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>

#include "control/control.h"
#include "system/scheduling.h"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int lock_spin_rounds = 100;
constexpr int lock_yield_rounds = 20;
constexpr long longest_sleep_ns = 10'000'000;
constexpr double longest_wait_s = 1e8;

constexpr std::uint64_t exclusive_by(std::int32_t rank) { return (static_cast<std::uint64_t>(rank) + 1) << 32; }

}  // namespace

bool WindowLock::try_lock(bool exclusive, std::int32_t rank) {
  std::uint64_t holders = holders_.load();
  if (exclusive) return holders == 0 && holders_.compare_exchange_strong(holders, exclusive_by(rank));
  while (holders >> 32 == 0)
    if (holders_.compare_exchange_weak(holders, holders + 1)) return true;
  return false;
}

LockOutcome WindowLock::lock(bool exclusive, std::int32_t rank, double timeout_s, const Control& control,
                             bool (*interrupted)()) {
  for (int round = 0; round < lock_spin_rounds + lock_yield_rounds; ++round) {
    if (try_lock(exclusive, rank)) return LockOutcome::locked;
    round < lock_spin_rounds ? relax() : static_cast<void>(::sched_yield());
  }
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(std::min(timeout_s, longest_wait_s)));
  sleepers_.fetch_add(1);
  LockOutcome outcome = LockOutcome::locked;
  for (;;) {
    const std::uint32_t seen = releases_.load();
    if (try_lock(exclusive, rank)) break;
    if (control.failed()) outcome = LockOutcome::failed;
    if (outcome == LockOutcome::locked && Clock::now() >= deadline) outcome = LockOutcome::late;
    if (outcome == LockOutcome::locked && interrupted != nullptr && interrupted()) outcome = LockOutcome::interrupted;
    if (outcome != LockOutcome::locked) break;
    sleep(seen);
  }
  sleepers_.fetch_sub(1);
  return outcome;
}

// Sleeps until there is another release than the one that was seen, or for 10 ms.
void WindowLock::sleep(std::uint32_t seen) {
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof releases_ == sizeof seen);
  const timespec time{0, longest_sleep_ns};
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&releases_), FUTEX_WAIT, seen, &time, nullptr, 0);
}

void WindowLock::unlock(bool exclusive) {
  if (exclusive)
    holders_.store(0);
  else
    holders_.fetch_sub(1);
  releases_.fetch_add(1);
  if (sleepers_.load() != 0)
    ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&releases_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::int32_t WindowLock::holder() const { return static_cast<std::int32_t>(holders_.load() >> 32) - 1; }

}  // namespace unisono
