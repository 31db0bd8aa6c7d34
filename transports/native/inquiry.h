// What all ranks say of one call, and the verdict on it. Pure: no links, no clock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "failure.h"
#include "frame.h"

namespace unisono {

// What one rank says of the call.
struct Testimony {
  CallState state = CallState::unknown;
  std::uint64_t digest = 0;
  std::string text;  // the call, or what the rank is at instead
};

// The question: why does this call not go on?
struct Inquiry {
  std::uint64_t communicator = 0;
  std::int64_t sequence = -1;
  FrameType reason = FrameType::blocked;  // the gravest that has been reported: blocked, mismatch or timed_out
  std::int32_t reporter = -1;
  std::string report;
  std::vector<Testimony> ranks;

  // The failure that the testimonies amount to, if any, once all have testified or `final` says that nobody else will:
  // a disagreement, or else the mismatch or the timeout that has been reported. For a disagreement, ranks that have not
  // made the call are waited for as well.
  std::optional<Failure> verdict(bool final) const;

 private:
  bool any(CallState state) const;
  std::optional<Failure> disagreement() const;
  Failure timeout() const;
  std::string call_text() const;
};

// "rank 3", "ranks 0, 2 and 5", "ranks 0-14": for messages.
std::string ranks_text(const std::vector<std::int32_t>& ranks);

}  // namespace unisono
