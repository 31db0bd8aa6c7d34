// How a thread shares its core with others.
#pragma once

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace unisono {

// For a thread that looks again and again: lets others of the same core, and what it has stored itself, go first.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Looks so many times, or until all is done. It rests after every other look that finds nothing: without any rest it
// would disturb the peer as that writes what is looked for, and each one lets what has arrived wait.
template <class Done, class Advance>
void look_for(Done done, Advance advance, std::uint32_t rounds) {
  for (; rounds != 0 && !done(); --rounds)
    if (!advance() && rounds % 2 != 0) relax();
}

// A lock for a moment: taking and leaving it costs half as much as with a mutex, and whoever finds it taken, which
// is rare, gives its core away until it is not.
class BriefLock {
 public:
  void lock() {
    while (taken_.exchange(true, std::memory_order_acquire)) ::sched_yield();
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_{false};
};

// How the kernel treats a thread that wakes while another one computes on its core.
// Patient: it runs when the other has had its turn. Prompt: it runs at once, for it asks for short turns, and Linux
// (6.12 and later) lets who does so go first; its share of the core is that of any other.
enum class Waking : std::uint8_t { patient, prompt };

// Of this thread; where it is not allowed, or not known, all goes on without.
inline void set_waking(Waking waking) {
  struct {  // sched_attr, which not every libc has, in its first version
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
  constexpr std::uint64_t shortest_turn_ns = 100'000;
  attributes.size = sizeof attributes;
  attributes.policy = waking == Waking::patient ? SCHED_BATCH : SCHED_OTHER;
  attributes.nice = ::getpriority(PRIO_PROCESS, 0);
  attributes.turn_ns = waking == Waking::patient ? 0 : shortest_turn_ns;  // 0: as by default
  ::syscall(SYS_sched_setattr, 0, &attributes, 0U);
}

}  // namespace unisono
