// A library of tagged messages within a process, as the real ones are where it matters to a channel: messages of one
// tag keep their order and those of different tags do not, small ones are sent at once and large ones when they are
// received, nothing moves but when a side looks, and what has moved is known at the next look.
#pragma once

#include <memory>

#include "messenger.h"

namespace unisono::testing {

struct MessengerPair {
  std::shared_ptr<Messenger> a;
  std::shared_ptr<Messenger> b;
};

// Each reaches the other, whatever address it is given. `seed` decides the order of different tags.
MessengerPair messenger_pair(std::uint64_t seed = 1);

}  // namespace unisono::testing
