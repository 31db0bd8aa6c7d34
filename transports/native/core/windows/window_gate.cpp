#include "windows/window_gate.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "control/control.h"
#include "system/scheduling.h"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t closed_gate = std::uint32_t{1} << 31;
constexpr int spin_rounds = 200;
constexpr int yield_rounds = 20;
constexpr int rest_rounds = 20;
constexpr auto sleep_period = std::chrono::microseconds(50);
constexpr double longest_gate_wait_s = 1e8;

// Waits until `condition` holds: it spins, yields, and then sleeps for 50 us at a time.
template <class Condition>
LockOutcome wait_until(const Patience& patience, Condition condition) {
  for (int round = 0; round < spin_rounds; ++round) {
    if (condition()) return LockOutcome::locked;
    relax();
  }
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
                                           std::min(patience.timeout_s, longest_gate_wait_s)));
  for (int round = 0;; ++round) {
    if (condition()) return LockOutcome::locked;
    if (patience.control != nullptr && patience.control->failed()) return LockOutcome::failed;
    if (Clock::now() >= deadline) return LockOutcome::late;
    if (patience.interrupted != nullptr && patience.interrupted()) return LockOutcome::interrupted;
    round < yield_rounds ? static_cast<void>(::sched_yield()) : std::this_thread::sleep_for(sleep_period);
  }
}

}  // namespace

bool WindowGate::try_enter() {
  if ((state_.load() & closed_gate) != 0) return false;
  if ((state_.fetch_add(1) & closed_gate) == 0) return true;
  state_.fetch_sub(1);
  return false;
}

LockOutcome WindowGate::enter(const Patience& patience) {
  if (try_enter()) return LockOutcome::locked;
  waiting_.fetch_add(1);
  const LockOutcome outcome = wait_until(patience, [this] { return try_enter(); });
  waiting_.fetch_sub(1);
  return outcome;
}

LockOutcome WindowGate::close(const Patience& patience) {
  const auto try_close = [this] {
    return (state_.load() & closed_gate) == 0 && (state_.fetch_or(closed_gate) & closed_gate) == 0;
  };
  if (!try_close()) {
    waiting_.fetch_add(1);
    const LockOutcome outcome = wait_until(patience, try_close);
    waiting_.fetch_sub(1);
    if (outcome != LockOutcome::locked) return outcome;
  }
  const LockOutcome outcome = wait_until(patience, [this] { return state_.load() == closed_gate; });
  if (outcome != LockOutcome::locked) state_.fetch_and(~closed_gate);
  return outcome;
}

void WindowGate::open() {
  state_.fetch_and(~closed_gate);
  for (int round = 0; round < rest_rounds && waiting_.load() != 0; ++round) relax();
}

}  // namespace unisono
