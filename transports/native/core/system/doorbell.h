//! `Doorbell`: an eventfd on which a rank sleeps. Peers on the host and the rank's own service thread ring it. As it is
//! a descriptor, a rank sleeps in a single poll on shared memory, sockets and aborts.
#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "system/descriptor.h"

namespace unisono {

//! An eventfd owned by the rank that sleeps on it.
class Doorbell {
 public:
  Doorbell() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!descriptor_.valid()) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  //! The file descriptor, for poll.
  int get() const { return descriptor_.get(); }
  //! Wakes the sleeper, or makes its next sleep end at once.
  void ring() const { ring(descriptor_.get()); }
  //! Makes the doorbell silent again.
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
