// A library of tagged messages within one process, which behaves like real libraries where a channel depends on it.
// Messages with one tag keep their order, and messages with different tags do not. Small messages are sent at once, and
// large ones when they are received. Data move only when a side calls `test`, and its next `test` reports the transfer
// as done.
#pragma once

#include <memory>

#include "tagged/messenger.h"

namespace unisono::testing {

struct MessengerPair {
  std::shared_ptr<Messenger> a;
  std::shared_ptr<Messenger> b;
};

// Two messengers, each of which reaches the other by any address. `seed` decides the order of messages with different
// tags.
MessengerPair messenger_pair(std::uint64_t seed = 1);

}  // namespace unisono::testing
