// `WindowGate`: lets accumulates on one part change elements one by one beside each other, or many of them alone.
//
// Theory of operation
// -------------------
// An atomic instruction for each element takes 20 times as long as a vector kernel. So an accumulate of many elements
// closes the gate of the part, uses the kernel without atomic instructions, and opens the gate. Every other accumulate
// or swap enters the gate, changes elements by atomic instructions, and leaves. Any number of them are inside at a
// time.
//
// One word has a bit for "closed" and the number of operations inside. To enter, an operation adds one; if the gate was
// closed, it takes the one back and tries again later. To close, an operation sets the bit, which keeps new ones out,
// and waits until nobody is inside. For example, two ranks count by fetch_and_op, and a third adds 1 MiB. The third
// sets the bit, waits for at most the two operations that are inside, and changes 64 KiB. Then it opens the gate, so
// that the two wait for some microseconds only, and closes it for the next 64 KiB.
//
// A rank that dies inside leaves the gate as it is. Its death fails the job, and each rank that waits ends its wait
// with that failure. Elements that it was changing may be half combined, but no window outlives a failed job.
#pragma once

#include <atomic>
#include <cstdint>

namespace unisono {

class Control;

//! How the wait for a lock or a gate has ended.
enum class LockOutcome : std::uint8_t { locked, late, failed, interrupted };

//! When a wait ends without success: at a failure of the job, after `timeout_s`, or when `interrupted` returns true.
struct Patience {
  const Control* control;
  double timeout_s;
  bool (*interrupted)();
};

//! A gate that is zero when it is open and nobody is inside.
class WindowGate {
 public:
  //! Enters beside others. The caller must `leave` if the outcome is `locked`.
  LockOutcome enter(const Patience& patience);
  void leave() { state_.fetch_sub(1); }
  //! Keeps all others out. The caller must `open` if the outcome is `locked`.
  LockOutcome close(const Patience& patience);
  //! Opens the gate, and rests for a microsecond if others wait, because the caller may close it again at once.
  void open();

 private:
  bool try_enter();

  std::atomic<std::uint32_t> state_{0};    // the bit `closed`, and the number of operations inside
  std::atomic<std::uint32_t> waiting_{0};  // how many operations wait
};

}  // namespace unisono
