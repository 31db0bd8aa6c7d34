// A reader of all messages on a channel.
#pragma once

#include <numeric>
#include "check.h"
#include "endpoint/channel.h"

namespace unisono::testing {

// Reads all messages on a channel, touching every byte. No message may have more bytes than its header says.
class Drain {
 public:
  explicit Drain(Channel& channel) : channel_(channel) {}
  // Reads until nothing arrives. False if the protocol was broken, now or before; then the channel is not read again.
  bool run() {
    broken_ = broken_ || throws<ProtocolError>([&] {
                while (const Header* header = channel_.front()) {
                  const std::size_t nbytes = header->nbytes;
                  const auto available = channel_.readable();
                  CHECK(available.size() <= nbytes - taken_);
                  if (available.empty() && nbytes != 0) return;
                  sum_ = std::accumulate(available.begin(), available.end(), sum_,
                                         [](std::byte a, std::byte b) { return a ^ b; });
                  channel_.consume(available.size());
                  taken_ = taken_ + available.size() == nbytes ? 0 : taken_ + available.size();
                }
              });
    return !broken_;
  }

 private:
  Channel& channel_;
  std::size_t taken_ = 0;  // bytes of the message
  std::byte sum_{};
  bool broken_ = false;
};

}  // namespace unisono::testing
