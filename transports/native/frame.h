// What travels on control links: one kind of frame, of a fixed part, a text and ranks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "failure.h"

namespace unisono {

enum class FrameType : std::uint8_t {
  failure = 1,    // both ways: a failure was found; the hub sends the first one to everybody
  blocked = 2,    // to the hub: I am in this call and cannot go on
  mismatch = 3,   // to the hub: what arrived belongs to another call than mine
  timed_out = 4,  // to the hub: this call has not ended in time
  query = 5,      // from the hub: what do you know of this call?
  answer = 6,     // to the hub
  leaving = 7,    // to the hub: I close; from the hub: this rank has closed
};

// How far a rank is with a call. That a rank is outside the communicator is what the hub knows, and no rank says.
enum class CallState : std::uint8_t { unknown, not_called, running, returned, left, outside };

struct Frame {
  FrameType type = FrameType::failure;
  FailureKind failure = FailureKind::none;
  CallState state = CallState::unknown;
  std::int32_t rank = -1;
  std::int32_t peer = -1;  // of a query and its answer: the round of questions
  std::uint64_t communicator = 0;
  std::int64_t sequence = -1;
  std::uint64_t digest = 0;
  std::string text;
  std::vector<std::int32_t> members;  // of a report: the ranks of the communicator; none stands for all
};

// The bytes of a frame, with their length in front; a text that is too long is cut.
std::string encode(const Frame& frame);

// Removes the first whole frame from the front of `bytes` into `frame`; false if there is none yet. Throws
// std::runtime_error if the bytes cannot be a frame.
bool decode(std::string& bytes, Frame& frame);

}  // namespace unisono
