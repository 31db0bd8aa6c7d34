#include "system/core_demand.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <utility>

namespace unisono {
namespace {

using namespace std::chrono_literals;

// If a yield takes longer than this, another thread has run on the core, and will probably want the core again soon.
constexpr auto shared_yield = 30us;
constexpr auto shared_time = 5ms;
// A rank that shares the core and passes messages on runs for a few microseconds in each wait. A kernel thread seldom
// runs in so many waits in a row.
constexpr std::uint32_t least_waits_with_switch = 3;
// If a yield takes longer than this, a thread has computed meanwhile.
constexpr auto long_yield = 500us;
// A slice takes some milliseconds. If short yields have taken less than this, the slice has rarely ended by itself, and
// hardly ever so many times in a row.
constexpr auto least_slice = 300us;
constexpr std::uint32_t least_costly_yields = 4;
// After a hold, fewer costly yields hold on, for twice as long, so that looking again costs little.
constexpr std::uint32_t yields_to_hold_on = 2;
constexpr auto longest_hold = 3200ms;

}  // namespace

void CoreDemand::refresh(Clock::time_point now) {
  const Demand level = now < computing_until_ ? Demand::computing : now < shared_until_ ? Demand::shared : Demand::none;
  if (level != this->level()) level_.store(level, std::memory_order_relaxed);
}

CoreDemand::Clock::time_point CoreDemand::yield(Clock::time_point before) {
  ::sched_yield();
  const auto now = Clock::now();
  note_yield(now - before, now);
  return now;
}

void CoreDemand::note_yield(Clock::duration took, Clock::time_point now) {
  if (took > shared_yield) shared_until_ = now + shared_time;
  if (took > long_yield)
    note_long_yield(now);
  else
    short_yields_ += took;
  refresh(now);
}

void CoreDemand::note_long_yield(Clock::time_point now) {
  const bool is_costly = std::exchange(short_yields_, {}) < least_slice;
  costly_yields_ = is_costly ? costly_yields_ + 1 : 0;
  if (!is_costly) hold_ = shortest_hold;
  if (costly_yields_ < least_costly_yields) return;
  costly_yields_ = least_costly_yields - yields_to_hold_on;
  computing_until_ = now + hold_;
  hold_ = std::min<Clock::duration>(2 * hold_, longest_hold);
}

void CoreDemand::note_first_yield(Clock::time_point now) {
  waits_with_switch_ = another_has_run() ? waits_with_switch_ + 1 : 0;
  if (waits_with_switch_ < least_waits_with_switch) return;
  shared_until_ = now + shared_time;
  refresh(now);
}

bool CoreDemand::another_has_run() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return std::exchange(switches_, usage.ru_nivcsw) != usage.ru_nivcsw;
}

}  // namespace unisono
