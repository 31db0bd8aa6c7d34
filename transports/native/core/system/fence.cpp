#include "system/fence.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <system_error>

#include "system/signal_masked_thread.h"

namespace unisono {
namespace {

bool call_membarrier(int command) { return ::syscall(SYS_membarrier, command, 0, 0) == 0; }

// Whether the kernel makes cores that run this process execute a full fence. A thread of its own sets it once, and
// every light fence reads it. A forked child inherits it.
std::atomic<bool> registered{false};

}  // namespace

void lighten_fences() {
  static std::atomic<bool> begun{false};  // set by the first of the threads that call this at the same moment
  if (begun.exchange(true)) return;
  try {
    start_signal_masked_thread([] {
      // The command for all cores is tried too, because a system call filter may refuse it alone.
      registered.store(call_membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) &&
                       call_membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED));
    }).detach();
  } catch (const std::system_error&) {
    begun = false;  // no thread can be started now, so fences stay full, which is correct but slower
  }
}

void light_fence() {
  if (registered.load(std::memory_order_relaxed)) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

void heavy_fence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  call_membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
}

}  // namespace unisono
