// `CoreDemand`: how much other threads want the core of a waiting thread, as its own yields show.
//
// Theory of operation
// -------------------
// A thread that waits can spin, yield its core, or sleep. Which of them is fastest depends on the other threads that
// the scheduler has on this core, and they change while a program runs. The cost of a yield tells them apart:
//
// - None: the yield returns within a microsecond, and the kernel counts no switch to another thread. Spinning is best.
// - Another rank that only passes messages on: the yield takes some microseconds, and afterwards the message is there.
//   So yields are best, and spinning holds up the other rank.
// - A thread that computes: the yield takes a time slice of some milliseconds, and each such thread has its turn before
//   the yielding one runs again. So sleeping is best. A thread that wakes may run at once, because it has used less
//   than its share of the core, and because it asks for short time slices meanwhile (`set_short_turns`).
//
// A single long yield says little: the kernel may have run the threads of another session or container, which take
// their turn whether this thread yields or sleeps. They do so when the slice of this session has ended. So it matters
// how long the short yields between two long ones have taken together. If that is less than a slice, the yields
// themselves cost the time.
//
// Example: 2 ranks and 14 processes that compute share 2 cores. An allreduce of 8 B takes 40 ms with yields, because
// seven processes run in between, and 0.1 to 0.2 ms with sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace unisono {

//! none: a waiting thread has the core for itself. shared: other threads run on it for a short time, or seldom.
//! computing: threads that compute take the core for a time slice whenever it is yielded.
enum class Demand : std::uint8_t { none, shared, computing };

//! The demand for the core on which the threads of an endpoint wait, one at a time. Only the leader changes it.
class CoreDemand {
 public:
  using Clock = std::chrono::steady_clock;

  //! The latest demand. Any thread may call it.
  Demand level() const { return level_.load(std::memory_order_relaxed); }
  //! Forgets demand that no yield has shown for a while.
  void refresh(Clock::time_point now);
  //! Yields the core once, notes the time it took, and returns the time afterwards. `before` is the time now.
  Clock::time_point yield(Clock::time_point before);
  //! Notes, after the first yield of a wait, whether another thread has run since the last such call.
  void note_first_yield(Clock::time_point now);
  //! Whether the kernel has given the core to another thread since the last call.
  bool another_has_run();

 private:
  static constexpr auto shortest_hold = std::chrono::milliseconds(400);

  void note_yield(Clock::duration took, Clock::time_point now);
  void note_long_yield(Clock::time_point now);

  std::atomic<Demand> level_{Demand::none};
  Clock::time_point shared_until_{};
  Clock::time_point computing_until_{};
  Clock::duration hold_ = shortest_hold;  // of the next finding that threads compute
  Clock::duration short_yields_{};        // time of the yields since the last long one
  std::uint32_t costly_yields_ = 0;       // long ones in a row that came too soon
  std::uint32_t waits_with_switch_ = 0;   // in a row
  long switches_ = 0;                     // of this thread to others, as last read
};

}  // namespace unisono
