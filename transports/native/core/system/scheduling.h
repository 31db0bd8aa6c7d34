//! How a thread shares its core with other threads.
#pragma once

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace unisono {

//! For a polling loop: lets the other hardware thread of the core, and this thread's own stores, go first.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

//! Calls `advance` this many times, or until `done`. It rests after every second look without progress. Without any
//! rest, polling would disturb the peer that writes the polled line; a rest after each look would delay a message that
//! has arrived.
template <class Done, class Advance>
void poll_until(Done done, Advance advance, std::uint32_t rounds) {
  for (; rounds != 0 && !done(); --rounds)
    if (!advance() && rounds % 2 != 0) relax();
}

//! A lock for short critical sections. Taking and releasing it costs half as much as with a mutex. A thread that does
//! not get it, which is rare, yields its core until it does.
class BriefLock {
 public:
  void lock() {
    while (taken_.exchange(true, std::memory_order_acquire)) ::sched_yield();
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_{false};  // set by the thread that holds the lock
};

//! The moment when the kernel runs a thread that wakes while another thread computes on its core. Patient: after the
//! time slice of the other thread. Prompt: at once. A prompt thread asks for short time slices, and Linux 6.12 and
//! later runs such threads first. Its share of the core does not change.
enum class Waking : std::uint8_t { patient, prompt };

constexpr std::uint64_t shortest_turn_ns = 100'000;

//! Sets the policy of this thread and the length of its time slices; 0: the default. Where the kernel refuses it or
//! does not know it, nothing changes.
inline void set_turns(int policy, std::uint64_t turn_ns) {
  struct {  // the first version of sched_attr, which some libcs lack
    std::uint32_t size;
    std::uint32_t policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t turn_ns;
    std::uint64_t deadline_ns;
    std::uint64_t period_ns;
  } attributes{};
  static_assert(sizeof attributes == 48);
  attributes.size = sizeof attributes;
  attributes.policy = static_cast<std::uint32_t>(policy);
  attributes.nice = ::getpriority(PRIO_PROCESS, 0);
  attributes.turn_ns = turn_ns;
  ::syscall(SYS_sched_setattr, 0, &attributes, 0U);
}

//! Sets the mode of this thread.
inline void set_waking(Waking waking) {
  waking == Waking::patient ? set_turns(SCHED_BATCH, 0) : set_turns(SCHED_OTHER, shortest_turn_ns);
}

//! Lets this thread have short time slices, or the default ones again, if its policy is the ordinary one. With short
//! slices, it runs as soon as it wakes, although other threads compute on its core.
inline void set_short_turns(bool are_short) {
  thread_local bool has_short_turns = false;
  if (has_short_turns == are_short || ::sched_getscheduler(0) != SCHED_OTHER) return;
  has_short_turns = are_short;
  set_turns(SCHED_OTHER, are_short ? shortest_turn_ns : 0);
}

}  // namespace unisono
