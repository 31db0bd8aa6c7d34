// `Operation`: a started collective, send, receive or probe, which an endpoint drives. No function here blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "endpoint/channel.h"

namespace unisono {

//! The error that a message of another call has arrived. The text `what` describes the message.
struct Mismatch : std::runtime_error {
  //! `from` sent the message; `first_call`: see `sequence`.
  Mismatch(std::int32_t from, std::int64_t first_call, const std::string& what)
      : std::runtime_error(what), peer(from), sequence(first_call) {}
  std::int32_t peer;
  std::int64_t sequence;  // the first collective on which the ranks may disagree; -1 for a point-to-point message
};

//! A channel on which an operation waits.
struct Blocked {
  Channel* channel;
  std::int32_t peer;
  bool sends;
  bool receives;
  bool needed = true;    // false if the message may come from another peer instead
  bool listens = false;  // true if it need not come at all
};

//! A call in progress.
class Operation {
 public:
  Operation() = default;
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  //! Moves data where possible; true if any was moved. Throws Mismatch or ProtocolError.
  virtual bool advance() = 0;
  //! Whether the call has ended.
  virtual bool done() const = 0;
  //! Adds the channels on which the call waits.
  virtual void blocked_on(std::vector<Blocked>& waits) const = 0;
};

}  // namespace unisono
