#include "fence.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace unisono {
namespace {

bool call_membarrier(int command) { return ::syscall(SYS_membarrier, command, 0, 0) == 0; }

// Registered once for the process; a forked child inherits it. The command that all cores obey is tried too, for a
// filter of system calls may refuse it by itself.
const bool has_membarrier =
    call_membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) && call_membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);

}  // namespace

void light_fence() {
  if (has_membarrier) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

void heavy_fence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (has_membarrier) call_membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
}

}  // namespace unisono
