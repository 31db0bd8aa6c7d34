// What an endpoint drives: a started collective, send or receive. None of these calls blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "channel.h"

namespace unisono {

// A message arrived that belongs to another call than the one it was received for; `what` it was.
struct Mismatch : std::runtime_error {
  Mismatch(std::int32_t from, std::int64_t first_call, const std::string& what)
      : std::runtime_error(what), peer(from), sequence(first_call) {}
  std::int32_t peer;
  std::int64_t sequence;  // of the first collective that the ranks can disagree on; -1 for a message by itself
};

// A channel, open or not yet, on which an operation cannot go on now.
struct Blocked {
  Channel* channel;
  std::int32_t peer;
  bool sends;
  bool receives;
  bool needed = true;  // whether what is to be received there may not come from any other peer instead
};

class Operation {
 public:
  Operation() = default;
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Moves what can be moved; true if anything was. Throws Mismatch, or ProtocolError.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  virtual void blocked_on(std::vector<Blocked>& found) const = 0;
};

}  // namespace unisono
