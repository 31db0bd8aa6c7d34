#include "system/reserved_pages.h"

#include <fcntl.h>

#include <cerrno>
#include <fstream>

namespace unisono {
namespace {

constexpr int never_overcommit = 2;

bool overcommits() {
  int policy = 0;  // as by default, where the file is hidden
  std::ifstream("/proc/sys/vm/overcommit_memory") >> policy;
  return policy != never_overcommit;
}

}  // namespace

bool reserve_pages(int memory, std::size_t nbytes) {
  static const bool needs_no_reservation = overcommits();
  if (needs_no_reservation) return true;
  int result;
  do {
    result = ::fallocate(memory, 0, 0, static_cast<off_t>(nbytes));
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

}  // namespace unisono
