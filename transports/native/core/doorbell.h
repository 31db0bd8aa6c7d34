// What a sleeping rank is woken by: an eventfd, its own, that peers on the host and its own service thread can ring.
// One kind of descriptor for shared memory, sockets and aborts lets a rank sleep in a single poll on all of them.
#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "descriptor.h"

namespace unisono {

class Doorbell {
 public:
  Doorbell() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!descriptor_.valid()) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  int get() const { return descriptor_.get(); }
  void ring() const { ring(descriptor_.get()); }
  void drain() const { drain(descriptor_.get()); }
  static void ring(int descriptor) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto put = ::write(descriptor, &one, sizeof one);
  }
  static void drain(int descriptor) {
    std::uint64_t value;
    [[maybe_unused]] const auto got = ::read(descriptor, &value, sizeof value);
  }

 private:
  Descriptor descriptor_;
};

}  // namespace unisono
