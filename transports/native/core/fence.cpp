#include "fence.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <system_error>

#include "signal_masked_thread.h"

namespace unisono {
namespace {

bool call_membarrier(int command) { return ::syscall(SYS_membarrier, command, 0, 0) == 0; }

// Whether the kernel makes cores pass a full fence while they run this process. A forked child is as its parent was.
std::atomic<bool> registered{false};

}  // namespace

void lighten_fences() {
  static std::atomic<bool> begun{false};
  if (begun.exchange(true)) return;
  try {
    start_quiet_thread([] {
      // The command that all cores obey is tried too, for a filter of system calls may refuse it by itself.
      registered.store(call_membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) &&
                       call_membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED));
    }).detach();
  } catch (const std::system_error&) {
    begun = false;  // no thread can be started now; fences stay full, which is right and slower
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
